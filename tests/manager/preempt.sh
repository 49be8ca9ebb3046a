#!/bin/bash
# A high request takes the GPU of a low lease, and gives it back: what both programs and others see of it, on a pool of one
# software GPU of 2 GiB.
. "$(dirname "$0")/../errors/common.sh"
leases() { gpupool leases --json; }
field() { # field PRIORITY NAME: of the lease of this class
  leases | python3 -c 'import json, sys
for lease in json.load(sys.stdin):
    if lease.get("terms", {}).get("priority", "normal") == sys.argv[1]: print(lease.get(sys.argv[2], ""))' "$1" "$2"
}
is() { [ "$(field "$1" state)" = "$2" ]; }
export GPUPOOL_MANAGER_PREEMPT=suspend GPUPOOL_MANAGER_PREEMPT_MIN_RUN=1s
GPUPOOL_LOG=info up

case_of "a low program, and a high one"
background "$bin/gpupool" run --priority low -- "${first_error[@]}" --device 600 --until "$folder/low.end" \
  >"$folder/out.low" 2>"$folder/err.low"
low=${started[-1]}
until_true grep -q ready "$folder/out.low"
check "the low one runs" until_true is low active
sleep 1 # it has run for its minimum
background "$bin/gpupool" run --priority high --wait 1m -- "${first_error[@]}" --device 600 --until "$folder/high.end" \
  >"$folder/out.high" 2>"$folder/err.high"
high=${started[-1]}
check "the high one gets the GPU: $(leases)" until_true grep -q ready "$folder/out.high"
check "the low one is suspended" is low suspended
check "gpupool leases says why" has "$(gpupool leases)" "is suspended: preempted by lease"
check "the audit log, too" has "$(gpupool audit)" "preempting"
touch "$folder/high.end"
wait "$high"
status=$?
says_no_more() { ! grep -v '^gpupool: waiting (--wait 1m): ' "$folder/err.high"; }
check "the high one ends right: $status $(cat "$folder/out.high" "$folder/err.high")" test "$status" = 0
check "and has said at most that it waits" says_no_more
check "the low one comes back by itself" until_true is low active
touch "$folder/low.end"
wait "$low"
status=$?
check "and ends right: $status $(cat "$folder/out.low" "$folder/err.low")" test "$status" = 0 -a ! -s "$folder/err.low"
