#!/bin/bash
# Leases that are given back when nobody uses them (--idle-release): what a program, others and the audit log see of it, on
# a pool of one software GPU of 2 GiB.
. "$(dirname "$0")/../errors/common.sh"
hold_memory=("${launcher[@]}" "$(dirname "$3")/hold_memory")
leases() { gpupool leases --json; }
state() { # state N: of the lease that has N MiB
  leases | python3 -c 'import json, sys
for lease in json.load(sys.stdin):
    if lease["devices"][0]["memoryBytes"] == int(sys.argv[1]) << 20: print(lease["state"])' "$1"
}
is() { [ "$(state "$1")" = "$2" ]; }

GPUPOOL_LOG=info up

case_of "a lease without a session"
background "$bin/gpupool" run --idle-release 1s --memory 100MiB -- sleep 20 >"$folder/holder" 2>&1
ended() { gpupool audit 2>/dev/null | grep -q "released.*it was idle for 1"; }
check "ends: $(gpupool leases)" until_true ended
check "is gone" test -z "$(state 100)"

case_of "a program that makes no call"
background "$bin/gpupool" run --idle-release 2s --memory 1GiB -- "${first_error[@]}" --device 600 --until "$folder/end" \
  >"$folder/out.program" 2>"$folder/err.program"
launched=${started[-1]}
until_true grep -q ready "$folder/out.program"
program=$(pgrep -P "$launched" first_error)
sleep 2.5
check "is left alone while it works" is 1024 active
kill -STOP "$program"
check "leaves its GPU then" until_true is 1024 suspended
check "the audit log says why" has "$(gpupool audit)" "it was idle for 2"
check "others have its memory" gpupool run --memory 1900MiB -- "${first_error[@]}" --device 1700
kill -CONT "$program"
check "comes back by itself" until_true is 1024 active
touch "$folder/end"
wait "$launched"
status=$?
check "and notices nothing: $status $(cat "$folder/out.program" "$folder/err.program")" \
  test "$status" = 0 -a ! -s "$folder/err.program"

case_of "a kernel that runs, and no call"
background "$bin/gpupool" run --idle-release 1s --memory 500MiB -- "${hold_memory[@]}" --mib 200 --hold \
  >"$folder/out.kernel" 2>&1
until_true grep -q holds "$folder/out.kernel"
tried() { grep -q "is not suspended, though it was idle for 1" "$GPUPOOL_STATE/manager.log"; }
check "is no idleness" until_true tried
check "the lease goes on" is 500 active
kill -KILL "$(sed -n 's/^process \([0-9]*\) holds.*/\1/p' "$folder/out.kernel")" # it would wait for ever
