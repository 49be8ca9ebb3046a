#!/bin/bash
# A server that is started again goes on with sessions that share memory and events, of one lease and of several: what is
# open stays, what was offered can be opened, and who ends meanwhile is missed. Over the transport named last; software GPUs
# of 2 GiB, or GPUPOOL_TEST_GPUS.
. "$(dirname "$0")/../errors/common.sh"
transport=${!#}
tenant_options() { tenant=(--tenant "$1"); }
. "$(dirname "$0")/sharing.sh"

log=$GPUPOOL_STATE/server.log
count() { grep -c "$1" "$log"; } # of lines in the server's log
has_lines() { [ "$(count "$1")" -ge "$2" ]; } # has_lines PATTERN COUNT
is_new_server() { local now; now=$(pid_of server) && [ -n "$now" ] && [ "$now" != "$1" ]; }
kill_server() { # its supervisor starts the next one
  local was joins
  was=$(pid_of server) joins=$(count "joined the pool manager")
  kill -KILL "$was"
  check "there is another server" until_true is_new_server "$was"
  check "it joins: $(tail -5 "$log")" until_true has_lines "joined the pool manager" $((joins + 1))
}
go_on() { # go_on COUNT: so many sessions, while the server is started again
  local before
  before=$(count "session .*: goes on")
  kill_server
  check "$1 go on: $(tail -5 "$log")" until_true has_lines "session .*: goes on" $((before + $1))
}
# workers_of NAME: of the sessions of the programs of which NAME.handle is
workers_of() {
  local program
  for program in $(pgrep -f "^[^ ]*processes_share --pause $folder/$1.handle"); do
    grep -oE "began, worker [0-9]+, client $program " "$log" | grep -oE '[0-9]+' | head -n 1
  done
}

# shellcheck disable=SC2046 # two words
gpupool up --detach $(software 2) --transport "$transport" --name node >"$folder/up" 2>&1 || fail "$(cat "$folder/up")"
all_free=$(free_bytes)

case_of "two leases that share memory, while the server is killed twice, once with the manager"
lend_and_keep both
free_before=$(free_bytes)
go_on 2
kill -KILL "$(pid_of manager)"
go_on 2
check "they have what they had: $(free_bytes)" until_true test "$(free_bytes)" = "$free_before"
now alps --memory 512MiB -- --join "$folder/both.handle"
check "what was offered before opens: $out $err" test "$status" -eq 0
now andes --memory 512MiB -- --open "$folder/both.handle"
check "and not to another tenant: $out $err" test "$status" -eq 0
run gpupool suspend "$keeper"
check "it shares memory still: $err" has "$err" "it shares memory or events with other processes"

case_of "the lease whose memory it is ends, and the server is killed once more"
check "it is released" gpupool release "$lender"
goes_on both
ends both
check "it is revoking: $(list)" until_true is_revoking "$lender"
go_on 1
says_why() { gpupool leases -v | grep -q "$lender has ended, and keeps its GPUs while memory of it is in use by"; }
check "it is revoking still: $(list)" until_true is_revoking "$lender"
check "and says why: $(gpupool leases -v)" until_true says_why
check "its memory is not free: $(free_bytes)" test "$(free_bytes)" != "$all_free"
goes_on both-keeper
passes both-keeper
check "it is over: $(list)" until_true is_gone "$lender"
all_over

case_of "the program whose memory it is dies while there is no server"
lend_and_keep orphaned
owners=$(workers_of orphaned)
check "their workers are known: $owners" test "$(wc -w <<<"$owners")" -eq 2
before=$(count "session .*: goes on")
# shellcheck disable=SC2086 # a list
kill -STOP $owners # they must not see the server's death before their own
# shellcheck disable=SC2086 # a list
kill -KILL "$(pid_of server)" $owners
check "the other one goes on: $(tail -5 "$log")" until_true has_lines "session .*: goes on" $((before + 1))
goes_on orphaned
ends orphaned
goes_on orphaned-keeper
passes orphaned-keeper
check "it is over: $(list)" until_true is_gone "$lender"
all_over

# Each time as soon as the sessions have come back: the programs are in the middle of something.
killed_until_over() { # killed_until_over NAME...
  local name living=1
  kills=0
  while [ "$living" = 1 ] && [ "$kills" -lt 20 ]; do
    sleep 0.$((RANDOM % 5 + 1))
    kill_server
    kills=$((kills + 1))
    living=0
    for name in "$@"; do ! kill -0 "${pid[$name]}" 2>/dev/null || living=1; done
  done
}
case_of "memory, events, descriptors and pools between two leases, while the server is killed again and again"
begins owner alps --memory 512MiB -- --lend "$folder/line"
begins guest alps --memory 512MiB -- --borrow "$folder/line"
said guest memory # a session that has just begun ends with its server
killed_until_over guest
passes guest
ends owner
check "it was killed meanwhile" test "$kills" -ge 1
all_over

case_of "likewise between two processes of one lease"
begins pair alps --memory 1GiB --
said pair memory
killed_until_over pair
passes pair
check "it was killed meanwhile" test "$kills" -ge 1
all_over
