#!/bin/bash
# A server that is started again goes on with its sessions: what their programs notice (nothing), what can be done with them
# afterwards, and which sessions end, and how. Over the transport named last; software GPUs of 2 GiB.
. "$(dirname "$0")/../errors/common.sh"
transport=${!#}
programs=$(dirname "$3")
steady_work=("${launcher[@]}" "$programs/steady_work")
stop=$folder/stop
declare -A pid

# in_lease NAME WORDS...: of `gpupool run`, in the background, until $stop is there.
in_lease() {
  local name=$1
  shift
  echo | "$bin/gpupool" run --transport "$transport" --tenant "$name" --memory 512MiB "$@" -- \
    "${steady_work[@]}" --mib 64 --ready --until "$stop" >"$folder/$name.out" 2>"$folder/$name.err" &
  pid[$name]=$!
  started+=($!)
}
works() { until_true grep -qs ready "$folder/$1.out" || fail "$1 does not begin: $(list; cat "$folder/$1.err")"; }
list() { gpupool leases | grep -E '^[0-9a-f]{8}'; }
lease_of() { list | awk -v tenant="$1" '$0 ~ " " tenant " " { print $1 }'; }
is_active() { list | grep " $1 " | grep -q " active "; }
no_lease_of() { [ -z "$(lease_of "$1")" ]; }
no_lease() { ! list | grep -q .; }
free_bytes() { gpupool devices --json | grep -o '"freeBytes": *[0-9]*'; }
is_free() { [ "$(free_bytes)" = "$all_free" ]; }
count() { grep -c "$1" "$log"; } # of lines in the server's log
has_lines() { [ "$(count "$1")" -ge "$2" ]; } # has_lines PATTERN COUNT
workers() { grep -oE "began, worker [0-9]+" "$log" | grep -oE '[0-9]+'; }
find_worker() { worker=$(workers | tail -1) && [ -n "$worker" ] && kill -0 "$worker" 2>/dev/null; } # of the last session
is_new_server() { local now; now=$(pid_of server) && [ -n "$now" ] && [ "$now" != "$1" ]; }
kill_server() { # its supervisor starts the next one
  local was joins
  was=$(pid_of server) joins=$(count "joined the pool manager")
  kill "-${1:-KILL}" "$was"
  check "there is another server" until_true is_new_server "$was"
  check "it joins: $(tail -5 "$log")" until_true has_lines "joined the pool manager" $((joins + 1))
}
ends() { # ends NAME: its status; within a minute
  local i
  for ((i = 0; i < 600 * $(busy); ++i)); do kill -0 "${pid[$1]}" 2>/dev/null || break; sleep 0.1; done
  ! kill -0 "${pid[$1]}" 2>/dev/null || fail "$1 does not end: $(list)"
  wait "${pid[$1]}"
}
ends_well() {
  ends "$1"
  local status=$?
  check "$1: exit status $status: $(cat "$folder/$1.out" "$folder/$1.err")" test "$status" -eq 0
  check "$1 says nothing of it: $(cat "$folder/$1.err")" not_has "$folder/$1.err" gpupool
  check "$1 is right: $(cat "$folder/$1.out")" test "$(tail -1 "$folder/$1.out")" = PASS
}
not_has() { ! grep -q "$2" "$1"; }
ends_badly() { # ends_badly NAME TEXT: one line says why
  ends "$1"
  local status=$?
  check "$1 ends with an error" test "$status" -ne 0
  check "$1 says why: $(cat "$folder/$1.err")" has "$(cat "$folder/$1.err")" "$2"
}
log=$GPUPOOL_STATE/server.log

case_of "two sessions on two GPUs, the server killed twice, once with the manager"
mkdir "$folder/checkpoints"
# shellcheck disable=SC2046 # two words
GPUPOOL_SERVER_CHECKPOINT_FOLDER=$folder/checkpoints gpupool up --detach $(software 2) --name node >"$folder/up" 2>&1 ||
  fail "$(cat "$folder/up")"
all_free=$(free_bytes)
model=$(gpupool devices --json | sed -n 's/.*"name": *"\([^"]*\)".*/\1/p' | head -n 1)
in_lease eve
in_lease bob
works eve
works bob
before=$(list | awk '{ print $1, $2, $3, $NF }' | sort)
free_before=$(free_bytes)
kill_server
check "both go on" until_true has_lines "session .*: goes on" 2
check "the same leases: $(list)" test "$(list | awk '{ print $1, $2, $3, $NF }' | sort)" = "$before"
check "they have what they had: $(free_bytes)" test "$(free_bytes)" = "$free_before"
kill -KILL "$(pid_of manager)"
kill_server
check "both go on once more" until_true has_lines "session .*: goes on" 4
check "both leases are active: $(list)" until_true is_active eve
check "both leases are active: $(list)" until_true is_active bob
check "the workers are who they were" test "$(workers | wc -l)" -eq 2
for worker in $(workers); do check "worker $worker runs" kill -0 "$worker"; done

case_of "what can be done with such a session"
lease=$(lease_of eve)
run gpupool suspend --tenant eve "$lease"
check "it is suspended: $err" test "$status" -eq 0
check "its memory is free: $(free_bytes)" test "$(free_bytes)" != "$free_before"
run gpupool resume --tenant eve "$lease"
check "it is resumed: $err" test "$status" -eq 0
run gpupool migrate --tenant eve "$lease"
check "it is moved: $err" test "$status" -eq 0
run gpupool checkpoint --tenant eve "$lease" monday
if [ "$transport" = ucx ]; then check "it is written into files: $err" test "$status" -eq 0; fi
kill_server
check "it goes on where it has moved to, too: $(tail -5 "$log")" until_true has_lines "session .*: goes on" 6
in_lease amy --gpu "$model"
works amy
run gpupool release "$(lease_of bob)"
check "it is released: $err" test "$status" -eq 0
ends_badly bob "the lease has ended"

case_of "SIGUSR2 leaves them to the next server"
kill_server USR2
check "they go on: $(tail -5 "$log")" until_true has_lines "session .*: goes on" 8
touch "$stop"
ends_well eve
ends_well amy
check "no lease is left: $(list)" until_true no_lease
check "the memory is free: $(free_bytes)" until_true is_free
# shellcheck disable=SC2046 # a list
check "no worker is left" until_true are_gone $(workers)
rm "$stop"

case_of "a program that begins while there is no server"
cat >"$folder/two" <<'END'
"$@" --rounds 1 || exit 1
touch "$folder/first"
while [ ! -e "$folder/go" ]; do sleep 0.02; done
"$@" --rounds 1
END
export folder
echo | "$bin/gpupool" run --transport "$transport" --tenant eve --memory 512MiB -- \
  bash "$folder/two" "${steady_work[@]}" --mib 64 >"$folder/eve.out" 2>"$folder/eve.err" &
pid[eve]=$!
started+=($!)
check "the first program has run" until_true test -e "$folder/first"
kill -KILL "$(pid_of server)"
touch "$folder/go"
ends_well eve
check "both: $(cat "$folder/eve.out")" test "$(grep -c PASS "$folder/eve.out")" -eq 2
check "no lease is left: $(list)" until_true no_lease

case_of "killed while a lease is to move to the other GPU, and its program does not stand still"
in_lease eve
works eve
lease=$(lease_of eve)
gpu=$(list | awk '{ print $3 }')
program=$(pgrep -f "^[^ ]*steady_work .*--until $stop" | head -n 1)
check "its program is known" test -n "$program"
kill -STOP "$program"
background timeout 60 "$bin/gpupool" migrate --to $((1 - gpu)) --tenant eve "$lease" >"$folder/migrate" 2>&1
is_moving() { list | grep " eve " | grep -q " moving "; }
check "it is moving: $(list)" until_true is_moving
goes=$(count "session .*: goes on")
kill_server
check "it goes on: $(tail -5 "$log")" until_true has_lines "session .*: goes on" $((goes + 1))
check "it is moving still: $(list)" until_true is_moving
kill -CONT "$program"
run gpupool migrate --tenant eve "$lease"
check "it moves there: $err" test "$status" -eq 0
check "it is there: $out" has "$out" "GPU $((1 - gpu))"
kill_server
check "it goes on there: $(tail -5 "$log")" until_true has_lines "session .*: goes on" $((goes + 2))
touch "$stop"
ends_well eve
check "no lease is left: $(list)" until_true no_lease
check "the memory is free: $(free_bytes)" until_true is_free
rm "$stop"

case_of "a worker that dies while there is no server"
in_lease eve
works eve
check "its worker is known" until_true find_worker # the log may come a little later
kill -STOP "$worker" # it must not see the server's death before its own
kill -KILL "$(pid_of server)" "$worker"
ends_badly eve "the GPU server is gone"
check "no lease is left: $(list)" until_true no_lease
check "the memory is free: $(free_bytes)" until_true is_free

if [ "$transport" = ucx ]; then # over shared memory nothing is protected
  case_of "a protected program goes on from its holder's checkpoint"
  in_lease eve --protect
  works eve
  sleep 1
  kill_server
  touch "$stop"
  ends eve
  status=$?
  check "exit status $status: $(cat "$folder/eve.out" "$folder/eve.err")" test "$status" -eq 0
  check "it is right: $(cat "$folder/eve.out")" test "$(tail -1 "$folder/eve.out")" = PASS
  check "no lease is left: $(list)" until_true no_lease
  rm "$stop"
fi

case_of "SIGTERM ends the sessions"
in_lease eve
works eve
kill_server TERM
ends_badly eve "the GPU server is shutting down"
down
check "nothing is left" test ! -e "$GPUPOOL_STATE"

case_of "a server that stays away"
up
gpupool cordon node >/dev/null 2>&1
log=$folder/second.log
start_server second --restart-time 2s
in_lease eve
works eve
check "its worker is known" until_true find_worker
kill -KILL "${servers[second]}"
ends_badly eve "the GPU server died: its process was killed or crashed, and was not started again within 2000 ms"
check "its worker is gone" until_true are_gone "$worker"
check "its GPU stays taken until its server says that it is free: $(list)" has "$(list)" " second "
mv "$log" "$log.before"
start_server second --restart-time 2s
in_lease bob
check "and then its lease: $(list)" until_true no_lease_of eve
works bob
touch "$stop"
ends_well bob
down
finish
