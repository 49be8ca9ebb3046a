#!/bin/bash
# A program that loses its GPU while it runs: lease expired or revoked, worker killed or crashed, device broken. The next
# call fails with the matching code, one line says why, and later calls fail alike.
. "$(dirname "$0")/common.sh"

# A program in the background, in its first round and beyond: $program is its process. Its holder's is $holder.
launch() { # launch COMMAND...: `first_error --seconds 30` behind it
  : >"$folder/out"
  "$@" "${first_error[@]}" --seconds 30 >"$folder/out" 2>"$folder/err" &
  launched=$!
  started+=($launched)
  until_true grep -q ready "$folder/out" || fail "the program does not run: $(cat "$folder/err")"
  program=$(pgrep -P "$launched" first_error) || program=$launched
  holder=$(pgrep -P "$launched" gpupool | head -1)
}
without_wrapper() { launch env LD_LIBRARY_PATH="$library" "$@"; }
# ended CODE REGEX: as `says`, of what was launched.
ended() {
  local code=$1 regex=$2
  wait "$launched"
  status=$?
  out=$(cat "$folder/out") err=$(cat "$folder/err")
  check "one line on stderr" one_line "$err" "$regex"
  check "the first failing call returns $code: $out" grep -Eq "^[a-zA-Z]+: [a-zA-Z]+ \($code\)\$" <<<"$out"
  check "and so do later ones: $out" grep -Eq '^later: ([a-zA-Z]+) \1 \1$' <<<"$out"
  check "exit status $status" test "$status" -eq 3
  printf '%s: %s [%s]\n' "$current" "$err" "$(grep -o '^.*([0-9]*)' <<<"$out")"
}
no_lease() { ! gpupool leases | grep -Eq '^[0-9a-f]{8}'; }

up
case_of "lease expired: the holder was stopped for longer than its time"
without_wrapper GPUPOOL_TTL=1s
kill -STOP "$holder" "$program"
check "the lease ends" until_true no_lease
kill -CONT "$program"
ended 46 "the lease has ended: its holder has not renewed it for 1 s; start the program again"
kill -CONT "$holder"

case_of "the same under gpupool run"
launch "$bin/gpupool" run --ttl 1s --
kill -STOP "$holder" "$program"
check "the lease ends" until_true no_lease
kill -CONT "$program" "$holder"
ended 46 "the lease has ended: its holder has not renewed it for 1 s; start the program again"

case_of "lease revoked: the manager does not know it any more"
without_wrapper
kill -STOP "$holder" # else it might ask for another one
manager=$(pid_of manager)
rm -f "$GPUPOOL_STATE"/*.db*
kill -KILL "$manager"
ended 46 "the lease has ended: the manager does not know this lease; start the program again"
kill -CONT "$holder"

for death in "shm KILL 9 Killed" "shm ABRT 6 Aborted" "ucx KILL 9 Killed"; do
  read -r transport signal number name <<<"$death"
  case_of "worker died by SIG$signal, over $transport"
  until_true no_lease
  without_wrapper GPUPOOL_WAIT=10s GPUPOOL_TRANSPORT=$transport
  kill -"$signal" $(session_workers)
  ended 46 "the GPU server is gone: the worker was killed by signal $number \($name\); start the program again"
done

case_of "the server is stopped"
until_true no_lease
without_wrapper GPUPOOL_WAIT=10s
kill -TERM "$(pid_of server)"
ended 46 "the GPU server is shutting down; start the program again"
down

case_of "the server is killed, and leaves nothing to the next one" # otherwise: tests/sessions/readopted.sh
GPUPOOL_SERVER_RESTART_TIME=0s up
without_wrapper
kill -KILL "$(pid_of server)"
ended 46 "the GPU server died: its process was killed or crashed; start the program again"
down

case_of "server and manager are both gone under gpupool run"
GPUPOOL_SERVER_RESTART_TIME=0s up
launch "$bin/gpupool" run --
# The server first: one whose supervisor ends is told to stop, and says so.
pool=$(for role in server manager supervisor; do pid_of $role; done)
began=$(date +%s%3N)
kill -KILL $pool
ended 46 "the GPU server died: its process was killed or crashed; start the program again"
ms=$(($(date +%s%3N) - began))
check "gpupool run does not wait for what does not come back: $ms ms" within "$ms" $((2000 * ${GPUPOOL_TEST_PATIENCE:-1}))
echo "ended after $ms ms"
down

# GPUPOOL_SOFT_FAIL: the software GPU breaks at its fourth kernel, in the process that runs it. Of two devices the other
# one serves on.
for broken in "214 CUDA_ERROR_ECC_UNCORRECTABLE" "46 CUDA_ERROR_DEVICE_UNAVAILABLE"; do
  read -r code name <<<"$broken"
  case_of "device lost: $name"
  GPUPOOL_SOFT_FAIL=0:3:$code gpupool up --detach --software 2 --name node >/dev/null
  without_wrapper
  ended "$code" "GPU 0 of the server is lost: $name \($code\): .*; the pool places nothing on it any more: start"
  run env GPUPOOL_WAIT=5s LD_LIBRARY_PATH="$library" "${first_error[@]}" --seconds 1
  check "the other one serves: $out$err" has "$out" "no call failed"
  problem="$name \($code\): .*; repair or reset it, and restart gpupool-server"
  run gpupool devices
  check "gpupool devices shows it" grep -Eq '^node +0 .* broken ' <<<"$out"
  check "and why" grep -Eq "^node GPU 0 is broken: $problem\$" <<<"$out"
  check "programs see it" grep -q '"problem": "CUDA_ERROR' <<<"$(gpupool devices --json)"
  GPUPOOL_GPUS=2 says 46 "only 1 is free: node: GPU 0 \(.*\) is broken \($problem\)" alone
  check "the server's log says it once" test "$(grep -c 'device 0 is lost' "$GPUPOOL_STATE/server.log")" = 1
  kill -TERM "$(pid_of server)" # the supervisor starts it again
  well() { gpupool devices 2>/dev/null | grep -Eq '^node +0 .* free '; }
  check "a restarted server trusts it again" until_true well
  down
done
