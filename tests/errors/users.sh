#!/bin/bash
# Workers with user ids of their own (--worker-users): what a pool does works as without, and no worker survives its server.
#   users.sh BIN LIBRARY FIRST_ERROR FOLDER
. "$(dirname "$0")/common.sh"
programs=$(dirname "$3")
first=$((1900000000 + $$ % 100000 * 64)) # no other run of this test has them
last=$((first + 63))
chmod 711 "$folder" # workers go through it
export GPUPOOL_SERVER_WORKER_USERS=$first-$last
export GPUPOOL_SERVER_MODULE_CACHE=$folder/modules

case_of "without the right to change user ids"
ordinary=()
[ "$(id -u)" -ne 0 ] || ordinary=(setpriv --reuid 65534 --regid 65534 --clear-groups)
run "${ordinary[@]}" "$bin/gpupool-server" --name node --state "$folder/none"
check "it does not start, and says why: $err" has "$err" \
  "--worker-users: this process may not change user ids: it needs the capabilities CAP_SETUID, CAP_SETGID and CAP_KILL"
if ! setpriv --reuid $first --regid $first --clear-groups true 2>"$folder/why"; then
  skip "user ids cannot be changed here: $(cat "$folder/why")"
  finish
fi

case_of "another server of this machine has some of the ids"
mkdir "$folder/locks"
export GPUPOOL_SERVER_DEVICE_LOCKS=$folder/locks
up
run "$bin/gpupool-server" --name second --state "$folder/second" --worker-users "$last-$((last + 9))"
check "the second one does not start: $status" test "$status" -eq 2
check "and says whose they are: $err" one_log_line "$err" \
  "--worker-users $last-$((last + 9)): another gpupool-server of this machine has $first-$last (process $(pid_of server)) of these user ids"
down
unset GPUPOOL_SERVER_DEVICE_LOCKS

uids() { local pid; for pid in $(pgrep gpupool-worker); do awk -v pid="$pid" '/^State:/ { ended = $2 == "Z" } /^Uid:/ && !ended { print $2, pid }' "/proc/$pid/status"; done 2>/dev/null |
  awk -v first="$first" -v last="$last" '$1 >= first && $1 <= last'; }
none_left() { [ -z "$(uids)" ]; }
capabilities() { awk '/^Cap(Prm|Eff|Bnd|Amb):/ { print $2 }' "/proc/$1/status" | sort -u; }
spawner() { pgrep -P "$(pid_of server)" gpupool-spawner; }

# A checkout in somebody's home folder cannot be reached by others.
if ! setpriv --reuid $first --regid $first --clear-groups test -r "$bin/gpupool-worker" -a -r "$library/../libcuda-soft.so"; then
  mkdir -p "$folder/there/bin"
  cp -L "$bin"/gpupool "$bin"/gpupool-{manager,server,spawner,worker} "$folder/there/bin"
  cp -aL "$library/.." "$folder/there/lib"
  bin=$folder/there/bin
fi

for transport in shm ucx; do
  case_of "$transport"
  up
  check "behind this wall, too" grep -q "node has walls around its workers: .*user" <(gpupool servers -v)
  check "two wait, of two users: $(uids)" test "$(uids | awk '{ print $1 }' | sort -u | wc -l)" -ge 2
  for program in "stress_mixed --threads 2" managed_memory device_printf; do
    read -ra words <<<"$program"
    run gpupool run --transport "$transport" -- "${launcher[@]}" "$programs/${words[0]}" "${words[@]:1}"
    check "$program: $status $out $err" test "$status" -eq 0
  done
  check "code is in the cache: $(find "$folder/modules")" test -n "$(find "$folder/modules" -type f -size +0)"
  check "no worker can list the cache" test "$(stat -c %a "$folder/modules")" = 711
  said=$(grep -i "module cache" "$GPUPOOL_STATE/server.log")
  check "the log says nothing of the cache: $said" test -z "$said"
  check "the server has no capability" test "$(capabilities "$(pid_of server)")" = 0000000000000000
  check "the spawner has three: $(capabilities "$(spawner)")" \
    grep -qx 00000000000000e0 <(capabilities "$(spawner)")
  down
  check "none is left: $(uids)" until_true none_left
done

case_of "a session that is put aside and moved to another worker"
up
background gpupool run --transport ucx -- "${first_error[@]}" --seconds 50 >"$folder/long" 2>&1
has_lease() { lease=$(gpupool leases | awk '/ active / { print $1 }') && [ -n "$lease" ]; } # its server has confirmed it
until_true has_lease
run gpupool suspend "$lease"
check "suspended: $err" test "$status" -eq 0
run gpupool resume "$lease"
check "resumed: $err" test "$status" -eq 0
run gpupool migrate "$lease"
check "moved: $err" test "$status" -eq 0
down

case_of "a cache where its users cannot go"
mkdir -m 700 "$folder/closed"
GPUPOOL_SERVER_MODULE_CACHE=$folder/closed/modules
up
check "the log says what to do" \
  grep -q "no module cache: $folder/closed is closed to the users of --worker-users: chmod o+x" "$GPUPOOL_STATE/server.log"
run gpupool run -- "${first_error[@]}"
check "the program works: $out$err" test "$out$err" = "no call failed"

case_of "the server is killed"
mapfile -t workers < <(uids | awk '{ print $2 }') # the pool starts another server at once, which has workers
check "there are workers" test ${#workers[@]} -gt 0
kill -KILL "$(pid_of server)"
check "its workers end with it" until_true are_gone "${workers[@]}"
down
check "none is left: $(uids)" until_true none_left

case_of "a session outlives its server and the spawner, under its user id"
up
echo | "$bin/gpupool" run -- "${launcher[@]}" "$programs/steady_work" --mib 16 --ready --until "$folder/enough" \
  >"$folder/lasting.out" 2>"$folder/lasting.err" &
lasting=$!
started+=($lasting)
works() { grep -qs ready "$folder/lasting.out"; }
check "it begins" until_true works
worker=$(grep -oE "began, worker [0-9]+" "$GPUPOOL_STATE/server.log" | grep -oE '[0-9]+')
user=$(uids | awk -v pid="$worker" '$2 == pid { print $1 }')
goes_on() { [ "$(grep -c "session .*: goes on, worker $worker" "$GPUPOOL_STATE/server.log")" -ge "$1" ]; }
waits() { [ "$(uids | awk '{ print $1 }' | sort -u | wc -l)" -ge 3 ]; } # other workers are there, of other users
kill -KILL "$(pid_of server)"
check "it goes on" until_true goes_on 1
check "others are started" until_true waits
kill -KILL "$(spawner)"
check "it goes on once more: $(tail -n 3 "$GPUPOOL_STATE/server.log")" until_true goes_on 2
check "others are started" until_true waits
check "the worker is alone under its id: $(uids)" test "$(uids | grep -c "^$user ")" = 1
touch "$folder/enough"
wait $lasting
status=$?
check "it is right: $status $(cat "$folder/lasting.out" "$folder/lasting.err")" test "$status-$(tail -1 "$folder/lasting.out")" = 0-PASS
down
check "none is left: $(uids)" until_true none_left

case_of "the server is ended"
GPUPOOL_SERVER_WORKER_USERS=$first-$((first + 31)) up
GPUPOOL_SERVER_WORKER_USERS=$((first + 32))-$last start_server second
kill -TERM "${servers[second]}"
wait "${servers[second]}"
status=$?
check "well: status $status, $(tail -n 3 "$folder/second.log")" test "$status" -eq 0
down

case_of "the spawner is killed"
up
mapfile -t workers < <(uids | awk '{ print $2 }')
check "there are workers" test ${#workers[@]} -gt 0
kill -KILL "$(spawner)"
check "the workers end with it" until_true are_gone "${workers[@]}"
says() { grep -q "gpupool-spawner has ended" "$GPUPOOL_STATE/server.log"; }
check "the server ends, and says why" until_true says
down

case_of "the spawner is stopped"
up
mapfile -t workers < <(uids | awk '{ print $2 }')
stopped=$(spawner)
kill -STOP "$stopped"
kill -KILL "${workers[0]}" # the server asks for its status, and for another one
ends() { until_true are_gone "$stopped" "${workers[@]}" || until_true are_gone "$stopped" "${workers[@]}"; } # after 10 s
check "it is ended, and its workers with it" ends
check "the server says why" until_true says
down

case_of "more workers than user ids"
export GPUPOOL_SERVER_WORKER_USERS=$first-$((first + 1))
up
run gpupool run -- "${first_error[@]}"
check "the log says what to do: $(tail -n 3 "$GPUPOOL_STATE/server.log")" \
  grep -q "every user id of --worker-users is in use: make the range longer" "$GPUPOOL_STATE/server.log"
check "a program that runs alone works: $out$err" test "$out$err" = "no call failed"
down
finish
