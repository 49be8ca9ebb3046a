#!/bin/bash
# A server that is started again goes on with leases whose memory its copier keeps: suspended ones, and those that take
# turns; and what is left when the copier, a worker or the next server does not come. Over the transport named last;
# software GPUs of 2 GiB.
. "$(dirname "$0")/../errors/common.sh"
transport=${!#}
programs=$(dirname "$3")
steady_work=("${launcher[@]}" "$programs/steady_work")
stop=$folder/stop
log=$GPUPOOL_STATE/server.log
declare -A pid

# in_lease NAME MEMORY WORDS...: `gpupool run` of steady_work, until $stop is there.
in_lease() {
  local name=$1 memory=$2
  shift 2
  : >"$folder/$name.out" # not what one of that name said before
  "$bin/gpupool" run --transport "$transport" --tenant "$name" --memory "$memory" -- "${steady_work[@]}" --mib 64 \
    --until "$stop" "$@" >"$folder/$name.out" 2>"$folder/$name.err" < <(echo) &
  pid[$name]=$!
  started+=($!)
}
begins() { until_true grep -qs "$2" "$folder/$1.out" || fail "$1 does not begin: $(list; cat "$folder/$1.err")"; }
list() { gpupool leases | grep -E '^[0-9a-f]{8}'; }
lease_of() { list | awk -v tenant="$1" '$0 ~ " " tenant " " { print $1 }'; }
is() { list | grep " $1 " | grep -q " $2"; } # is NAME STATE
no_lease() { ! list | grep -q .; }
free_bytes() { gpupool devices --json | grep -o '"freeBytes": *[0-9]*'; }
has_free() { [ "$(free_bytes)" = "$1" ]; }
count() { grep -cE "$1" "$log"; }
has_lines() { [ "$(count "$1")" -ge "$2" ]; }
workers() { grep -oE "began, worker [0-9]+" "$log" | grep -oE '[0-9]+'; }
copiers() { grep -oE "copier [0-9]+ is ready" "$log" | grep -oE '[0-9]+' | sort -u; }
doors() { find "$GPUPOOL_STATE" -path '*.doors/*'; }
no_door() { [ -z "$(doors)" ]; }
is_new_server() { local now; now=$(pid_of server) && [ -n "$now" ] && [ "$now" != "$1" ]; }
kill_server() { # kill_server SIGNAL PID...: and those; its supervisor starts the next one
  local was joins signal=$1
  shift
  was=$(pid_of server) joins=$(count "joined the pool manager")
  kill "-$signal" "$was" "$@"
  check "there is another server" until_true is_new_server "$was"
  check "it joins: $(tail -5 "$log")" until_true has_lines "joined the pool manager" $((joins + 1))
}
suspend() { # suspend NAME
  run gpupool suspend "$(lease_of "$1")"
  check "$1 is suspended: $err" test "$status" -eq 0
}
resume() {
  run gpupool resume --wait 10s "$(lease_of "$1")"
  check "$1 is resumed: $err" test "$status" -eq 0
}
ends() { ends_in_time "${pid[$1]}"; } # ends NAME
ends_well() {
  ends "$1"
  local status=$?
  check "$1: exit status $status: $(cat "$folder/$1.out" "$folder/$1.err")" test "$status" -eq 0
  check "$1 is right: $(cat "$folder/$1.out")" test "$(tail -1 "$folder/$1.out")" = PASS
}
ends_badly() { # ends_badly NAME TEXT: one line says why
  ends "$1"
  local status=$?
  check "$1 ends with an error" test "$status" -ne 0
  check "$1 says why: $(cat "$folder/$1.err")" has "$(cat "$folder/$1.err")" "$2"
}
nothing_left() {
  check "no lease is left: $(list)" until_true no_lease
  check "the memory is free: $(free_bytes)" until_true has_free "$all_free"
  # shellcheck disable=SC2046 # a list
  check "no worker is left" until_true are_gone $(workers)
}

case_of "a suspended lease, its server killed"
export GPUPOOL_SERVER_SUSPEND_MEMORY=1GiB
up
all_free=$(free_bytes)
in_lease eve 1GiB --ready
in_lease bob 512MiB --ready
begins eve ready
begins bob ready
suspend eve
free_aside=$(free_bytes)
kill_server KILL
check "the copier goes on: $(tail -5 "$log")" until_true has_lines "copier .* of this server's earlier life goes on" 1
check "both sessions go on" until_true has_lines "session .*: goes on" 2
check "it is suspended still: $(list)" until_true is eve suspended
check "what it has left is free: $(free_bytes)" until_true has_free "$free_aside"
in_lease amy 1200MiB --ready
begins amy ready
run gpupool resume "$(lease_of eve)"
check "it is not resumed where others are: $out" test "$status" -ne 0
check "and says why: $err" has "$err" "cannot be resumed"

case_of "the same with the manager, and by SIGUSR2"
kill -KILL "$(pid_of manager)"
kill_server KILL
check "it is suspended still: $(list)" until_true is eve suspended
kill_server USR2
check "it is suspended still: $(list)" until_true is eve suspended
check "there has been one copier: $(copiers)" test "$(copiers | wc -l)" -eq 1
suspend bob
run gpupool release "$(lease_of amy)"
ends amy
resume eve
resume bob
suspend eve
kill_server KILL
resume eve
touch "$stop"
ends_well eve
ends_well bob
nothing_left
rm "$stop"

case_of "an order that is under way is carried out, and settled"
in_lease eve 1GiB --capture "$folder/end-capture"
begins eve captures
background gpupool suspend "$(lease_of eve)" >"$folder/suspended" 2>&1
command=${started[-1]}
check "the order is there" until_true has_lines "joined the pool manager" 1
sleep 0.5
kill_server KILL
wait "$command"
check "who gave it hears that its outcome is not known: $(cat "$folder/suspended")" \
  has "$(cat "$folder/suspended")" "lost the connection"
check "it is not suspended yet: $(list)" is eve active
touch "$folder/end-capture"
check "it is suspended: $(list)" until_true is eve suspended
check "its memory is free: $(free_bytes)" until_true has_free "$all_free"
resume eve
touch "$stop"
ends_well eve
nothing_left
rm "$stop"

case_of "the copier dies with the server"
in_lease eve 1GiB --ready
begins eve ready
suspend eve
copier=$(copiers | tail -1)
kill_server KILL "$copier"
ends_badly eve "the session was suspended, and the server's copier, which kept its memory, has died"
nothing_left
check "no door is left: $(doors)" until_true no_door

case_of "a worker dies while there is no server"
in_lease eve 1GiB --ready
begins eve ready
suspend eve
copier=$(copiers | tail -1)
kill_server KILL "$(workers | tail -1)"
ends eve
check "eve ends with an error" test "$?" -ne 0
nothing_left
# Its room with the copier is free, whether that has ended or serves the next one: there is room for one.
in_lease bob 1GiB --ready
begins bob ready
suspend bob
kill_server TERM
ends_badly bob "the GPU server is shutting down"
down
check "nothing is left" test ! -e "$GPUPOOL_STATE"
# shellcheck disable=SC2046 # a list
check "no copier is left" until_true are_gone "$copier"

case_of "leases that take turns"
export GPUPOOL_SERVER_OVERCOMMIT=2.0 GPUPOOL_SERVER_TURN_TIME=1s GPUPOOL_SERVER_SUSPEND_MEMORY=4GiB
turns_of_all() { gpupool leases --json | grep -o '"turns": *[0-9]*' | awk '{ sum += $2 } END { print sum + 0 }'; }
has_turned() { [ "$(turns_of_all)" -ge "$1" ]; }
up
all_free=$(free_bytes)
in_lease eve 1200MiB --pause 10
in_lease bob 1200MiB --pause 10
check "both have their turns: $(list)" until_true has_turned 3
kill_server KILL
check "both go on" until_true has_lines "session .*: goes on" 2
check "and have their turns: $(list)" until_true has_turned 3
sleep 0.$((RANDOM % 10)) # at any moment, also while they change places
kill_server KILL
check "both go on once more" until_true has_lines "session .*: goes on" 4
check "and have their turns: $(list)" until_true has_turned 3
touch "$stop"
ends_well eve
ends_well bob
nothing_left
rm "$stop"
down

case_of "a server that stays away"
unset GPUPOOL_SERVER_OVERCOMMIT
up
gpupool cordon node >/dev/null 2>&1
log=$folder/second.log
start_server second --restart-time 1s
in_lease eve 1GiB --ready
begins eve ready
suspend eve
kill -KILL "${servers[second]}"
ends_badly eve "the GPU server died: its process was killed or crashed, and was not started again within 1000 ms"
# shellcheck disable=SC2046 # lists
check "no process is left" until_true are_gone $(workers) $(copiers)
down
finish
