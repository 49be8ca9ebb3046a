#!/bin/bash
# A lease that goes to other GPUs of its server and to another server and back while its program runs, and a server that is
# drained: what the program notices (nothing), what the commands say, and what is left. Two servers on this machine with two
# software GPUs each.
. "$(dirname "$0")/../errors/common.sh"
transport=${!#}
programs=$(dirname "$3")

# place_of LEASE: "SERVER GPUS"
place_of() { gpupool leases | awk -v id="${1:0:8}" '$1 == id { print $2, $3 }'; }
is_at() { [ "$(place_of "$1")" = "$2" ]; }
all_free() { ! gpupool devices --json | grep -o '"freeBytes": *[0-9]*' | grep -qv '2147483648'; }
# launch [TRANSPORT]: first_error until it is told to end, on a lease of 1 GiB, with 300 MiB of it in use. Sets launched and lease.
launch() {
  : >"$folder/program.out"
  rm -f "$folder/end"
  "$bin/gpupool" run ${1:+--transport "$1"} --memory 1GiB --server node -- "${first_error[@]}" --device 300 --until "$folder/end" \
    >"$folder/program.out" 2>"$folder/program.err" &
  launched=$!
  started+=("$launched")
  until_true grep -q ready "$folder/program.out" || fail "the program does not run: $(cat "$folder/program.err")"
  lease=$(lease_ids | tail -1)
}
# migrates TO: sets status, out, err. A place that the lease has just left is not its own again before its server has said so.
migrates() {
  tried() { run gpupool migrate --to "$1" "$lease"; [ "$status" -eq 0 ] || ! has "$err" "ask again in a moment"; }
  until_true tried "$1"
}
goes_and_comes_back() {
  run gpupool migrate --to other "$lease"
  check "migrate --to other: $status $err" test "$status" -eq 0
  check "the lease is there: $(place_of "$lease")" has "$(place_of "$lease")" other
  migrates node
  check "and back: $status $err" test "$status" -eq 0
  check "the lease is back: $(place_of "$lease")" has "$(place_of "$lease")" node
}
ends_well() {
  touch "$folder/end"
  wait "$launched"
  status=$?
  check "exit status $status: $(cat "$folder/program.out" "$folder/program.err")" test "$status" -eq 0
  check "nothing on stderr: $(cat "$folder/program.err")" test ! -s "$folder/program.err"
  check "nothing is left: $(gpupool leases; gpupool devices)" until_true all_free
}

# computes TRANSPORT OPTION...: a program that checks its results, until computed_right. Sets launched and lease.
computes() {
  rm -f "$folder/input"
  mkfifo "$folder/input"
  "$bin/gpupool" run ${1:+--transport "$1"} --memory 1GiB "${@:2}" -- "${launcher[@]}" "$programs/stress_mixed" --threads 6 --seconds 1 --samples \
    <"$folder/input" >"$folder/program.out" 2>"$folder/program.err" &
  launched=$!
  started+=("$launched")
  exec {input}>"$folder/input" # it computes for as long as this is open
  until_true any_lease || fail "no lease"
  lease=$(lease_ids | tail -1)
  sleep 0.5
}
computed_right() {
  exec {input}>&-
  wait "$launched"
  status=$?
  check "exit status $status: $(cat "$folder/program.out" "$folder/program.err")" test "$status" -eq 0
  check "all results are right" has "$(cat "$folder/program.out")" "all results are right"
  check "nothing is left: $(gpupool leases; gpupool devices)" until_true all_free
}

gpupool up --detach --software 2 --name node --transport shm >"$folder/up" 2>&1 || { cat "$folder/up"; fail up; }
SERVER_GPUS=2 start_server other

case_of "other GPUs of its server"
launch "$transport"
from=$(place_of "$lease")
to="node $((1 - ${from##* }))"
run gpupool migrate --to "${to##* }" "$lease"
check "migrate --to ${to##* }: $status $err" test "$status" -eq 0
check "it says where the lease is: $out" has "$out" "node"
check "the lease is at $(place_of "$lease"), not $to" is_at "$lease" "$to"
migrates "${from##* }"
check "and back: $status $err" test "$status" -eq 0
check "the lease is back: $(place_of "$lease")" is_at "$lease" "$from"
check "its memory went from device to device" test "$(grep -c "straight from device to device" "$GPUPOOL_STATE/server.log")" -eq 2
ends_well

case_of "a program that checks what it computes, from GPU to GPU"
computes "$transport" --server node
to=$(place_of "$lease")
for ((move = 0; move < 4; ++move)); do
  to="node $((1 - ${to##* }))"
  check "to $to" until_true gpupool migrate --to "${to##* }" "$lease" >>"$folder/moves" 2>&1
  check "it is there: $(place_of "$lease")" is_at "$lease" "$to"
done
computed_right

case_of "another server, and back"
launch ucx
goes_and_comes_back
over_several() { grep -q "moved: .* over [2-8] connections" "$1"; }
check "there over several connections: $(grep moved: "$GPUPOOL_STATE/server.log")" over_several "$GPUPOOL_STATE/server.log"
check "and back: $(grep moved: "$folder/other.log")" over_several "$folder/other.log"
ends_well

case_of "a program for which shared memory was asked stays"
launch shm
run gpupool migrate --to other "$lease"
check "refused: $status" test "$status" -eq 1
check "the reason: $err" has "$err" "was started with --transport shm"
check "the lease stays: $(place_of "$lease")" has "$(place_of "$lease")" node
says_why() { gpupool leases -v | grep -q "cannot be moved to another server: its program was started with --transport shm"; }
check "leases -v says so: $(gpupool leases -v)" until_true says_why
ends_well

# Both servers are on this machine: sessions that move share memory with the other one, too, where this does not say otherwise.
export GPUPOOL_DISTURB_SHARING=never

case_of "from shared memory to another server, and back: over the network from there on"
launch ""
says_nothing() { ! gpupool leases -v | grep -q "cannot be moved"; }
check "nothing hinders it: $(gpupool leases -v)" says_nothing
goes_and_comes_back
ends_well

case_of "a program whose machine has no UCX stays, and goes on over shared memory"
mkdir "$folder/no-ucx"
for name in ucs ucp; do echo "not a library" >"$folder/no-ucx/lib$name.so.0"; done
LD_LIBRARY_PATH=$folder/no-ucx launch ""
from=$(place_of "$lease")
for ask in 1 2; do
  migrates other
  check "refused, $ask: $status $out" test "$status" -eq 1
  check "the reason, $ask: $err" has "$err" "the program cannot go on over a network; it has said why on its stderr"
done
check "the lease stays: $(place_of "$lease")" is_at "$lease" "$from"
check "what the program said: $(cat "$folder/program.err")" has "$(cat "$folder/program.err")" "a network needs UCX on this machine"
migrates $((1 - ${from##* }))
check "to other GPUs of its server it goes: $status $err" test "$status" -eq 0
: >"$folder/program.err"
ends_well

case_of "a program that checks what it computes leaves shared memory"
for try in 1 2 3; do
  computes "" --server node
  check "to other, $try" until_true gpupool migrate --to other "$lease" >>"$folder/moves" 2>&1
  computed_right
done

# asks live|late WHEN: does a kernel of the program see what that writes while it runs? A round takes a quarter of a second.
asks() {
  local lines
  lines=$(wc -l <"$folder/program.out")
  echo "$1" >&"$input"
  answered() { [ "$(wc -l <"$folder/program.out")" -gt "$lines" ]; }
  until_true answered || fail "no answer: $(cat "$folder/program.err")"
  check "$2: $(tail -1 "$folder/program.out")" test "$(tail -1 "$folder/program.out")" = "$1"
}
case_of "a session comes back to shared memory, with all that kernels and the program see of each other"
export GPUPOOL_DISTURB_SHARING=in-turns # the first move takes it to the network, the next one back
rm -f "$folder/input"
mkfifo "$folder/input"
"$bin/gpupool" run --memory 1GiB --server node -- "${launcher[@]}" "$programs/mapped_live" --asks \
  <"$folder/input" >"$folder/program.out" 2>"$folder/program.err" &
launched=$!
started+=("$launched")
exec {input}>"$folder/input"
until_true any_lease || fail "no lease"
lease=$(lease_ids | tail -1)
asks live "over shared memory"
for round in 1 2; do
  migrates other
  check "there, $round: $status $err" test "$status" -eq 0
  asks late "over the network, $round"
  migrates node
  check "back, $round: $status $err" test "$status" -eq 0
  asks live "over shared memory again, $round"
done
check "its server says so" grep -q "comes over shm" "$GPUPOOL_STATE/server.log"
says_nothing() { ! gpupool leases -v | grep -q "cannot be moved"; }
check "nothing hinders it: $(gpupool leases -v)" until_true says_nothing
exec {input}>&-
wait "$launched"
check "it is right: $(cat "$folder/program.out" "$folder/program.err")" test "$(tail -1 "$folder/program.out")" = PASS
check "nothing is left: $(gpupool leases; gpupool devices)" until_true all_free

case_of "a program that checks what it computes goes from server to server, and shares memory with every other one"
computes "" --server node
for to in other node other node; do
  check "to $to" until_true gpupool migrate --to "$to" "$lease" >>"$folder/moves" 2>&1
done
computed_right
export GPUPOOL_DISTURB_SHARING=never

case_of "a server is drained"
for over in ucx ""; do
  launch "$over"
  run gpupool drain node
  check "drain: $status $out $err" test "$status" -eq 0
  check "the lease has left: $(place_of "$lease")" has "$(place_of "$lease")" other
  gpupool uncordon node >/dev/null || fail "uncordon"
  ends_well
done

case_of "a program that checks what it computes, from server to server"
computes ucx
for to in other node other; do
  # Right behind a move the server that was left may not have confirmed it yet.
  check "to $to" until_true gpupool migrate --to "$to" "$lease" >>"$folder/moves" 2>&1
done
computed_right

case_of "a session that leaves its server shares memory with the other one at once, where that is on the same machine"
unset GPUPOOL_DISTURB_SHARING
launch ""
goes_and_comes_back
for server in "$folder/other.log" "$GPUPOOL_STATE/server.log"; do
  check "over shared memory: $(tail -3 "$server")" has "$(tail -8 "$server")" "comes over shm"
done
ends_well

case_of "the server that was left dies"
launch ucx
run gpupool migrate --to other "$lease"
check "migrate: $status $err" test "$status" -eq 0
kill -KILL "$(pid_of server)"
sleep 1
ends_well
