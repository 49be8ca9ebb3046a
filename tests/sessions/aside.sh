#!/bin/bash
# Programs whose lease is suspended and resumed while they run: what they notice (nothing but time), what others get
# meanwhile, what it costs, and what is left when somebody dies. Over the transport named last; a pool of one software GPU
# of 2 GiB.
. "$(dirname "$0")/../errors/common.sh"
transport=${!#}
programs=$(dirname "$3")
hold_memory=("${launcher[@]}" "$programs/hold_memory")

# launch: first_error, until it is told to end (ends_well), on a lease of 1 GiB, 600 MiB of it in use, in its first round and beyond. Sets launched,
# holder, program and lease.
launch() {
  : >"$folder/program.out"
  rm -f "$folder/end"
  "$bin/gpupool" run --transport "$transport" --memory 1GiB -- "${first_error[@]}" --device 600 --until "$folder/end" \
    >"$folder/program.out" 2>"$folder/program.err" &
  launched=$!
  started+=($launched)
  until_true grep -q ready "$folder/program.out" || fail "the program does not run: $(cat "$folder/program.err")"
  program=$(pgrep -P "$launched" first_error)
  holder=$(pgrep -P "$launched" gpupool | head -1)
  lease=$(lease_ids | tail -1)
}
state_of() { gpupool leases | awk -v id="${1:0:8}" '$1 == id { for (i = 2; i <= NF; ++i) if ($i ~ /^(active|suspended)$/) print $i }'; }
is() { [ "$(state_of "$1")" = "$2" ]; }
free_mib() { gpupool devices --json | grep -o '"freeBytes": *[0-9]*' | grep -o '[0-9]*$' | awk '{ print int($1 / 1048576) }'; }
memory_is_free() { [ "$(free_mib)" -ge "$1" ]; } 2>/dev/null
# Processor time of a process and its threads, in microseconds.
cpu_of() { cat /proc/"$1"/task/*/schedstat 2>/dev/null | awk '{ sum += $1 } END { print int(sum / 1000) }'; }
worker() { session_workers | head -1; }
ends_well() {
  touch "$folder/end"
  ends_in_time "$launched"
  status=$?
  check "exit status $status: $(cat "$folder/program.out" "$folder/program.err")" test "$status" -eq 0
  check "nothing on stderr: $(cat "$folder/program.err")" test ! -s "$folder/program.err"
}
ends_with() { # ends_with REGEX
  ends_in_time "$launched"
  status=$?
  check "exit status $status" test "$status" -ne 0
  check "one line on stderr" one_line "$(cat "$folder/program.err")" "$1"
}

up

case_of "suspended in the middle of its work"
launch
run gpupool suspend "$lease"
check "suspend: $status $err" test "$status" -eq 0
check "it says what moved" has "$out" "MiB"
check "the state" is "$lease" suspended
check "its memory is free: $(free_mib) MiB" test "$(free_mib)" -ge 2000
run gpupool suspend "$lease"
check "once more: $status $err" test "$status" -eq 0
check "another program has its memory" gpupool run --transport "$transport" --memory 1900MiB -- "${first_error[@]}" --device 1700
worker=$(worker)
# Beside other work, what wakes up finds others' data in the caches and costs more: one more look then.
sleeps_well() {
  local before=$(($(cpu_of "$program") + $(cpu_of "$worker"))) began=$(date +%s%N) used passed
  sleep 8
  used=$(($(cpu_of "$program") + $(cpu_of "$worker") - before)) passed=$((($(date +%s%N) - began) / 1000))
  echo "suspended over $transport: program and worker used $used us of $passed us"
  within $((used * 1000)) $((2 * passed))
}
check "program and worker use at most 0.2 % of a core" eval 'sleeps_well || sleeps_well'
run gpupool resume "$lease"
check "resume: $status $err" test "$status" -eq 0
check "the state" is "$lease" active
for round in 1 2 3; do
  run gpupool suspend "$lease"
  check "again, $round: $status $err" test "$status" -eq 0
  run gpupool resume "$lease"
  check "and back, $round: $status $err" test "$status" -eq 0
done
ends_well

case_of "a program that asks for its events again and again sleeps, too"
until_true no_lease
rm -f "$folder/end"
"$bin/gpupool" run --transport "$transport" --memory 1GiB -- "${launcher[@]}" "$programs/steady_work" --ready --mib 8 --by-query \
  --until "$folder/end" < <(echo) >"$folder/program.out" 2>"$folder/program.err" &
launched=$!
started+=($launched)
until_true grep -q ready "$folder/program.out" || fail "the program does not run: $(cat "$folder/program.err")"
program=$(pgrep -P "$launched" steady_work)
lease=$(lease_ids | tail -1)
for round in 1 2 3; do
  sleep 0.3
  gpupool suspend "$lease" >/dev/null || fail "suspend"
  before=$(cpu_of "$program")
  sleep 1
  used=$(($(cpu_of "$program") - before))
  check "it has used $used us of a second" test "$used" -lt 100000
  gpupool resume "$lease" >/dev/null || fail "resume"
done
touch "$folder/end"
wait "$launched"
status=$?
check "it is right: $status $(cat "$folder/program.out" "$folder/program.err")" test "$status" -eq 0

case_of "what another lease has must come free first"
until_true no_lease
launch
gpupool suspend "$lease" >/dev/null || fail "suspend"
"$bin/gpupool" run --transport "$transport" --memory 1536MiB -- "${first_error[@]}" --until "$folder/other.end" >"$folder/other" 2>&1 &
other=$!
started+=($other)
until_true grep -q ready "$folder/other"
run gpupool resume "$lease"
check "refused: $out" test "$status" -eq 1
check "with what is missing" has "$err" "512 MiB free of the 1.0 GiB that are wanted"
check "it is still suspended" is "$lease" suspended
background gpupool resume --wait 5m "$lease"
sleep 1
check "it waits" is "$lease" suspended
touch "$folder/other.end"
check "resumed when the other one has ended" until_true is "$lease" active
wait "$other" || fail "the other program: $(cat "$folder/other")"
ends_well

case_of "all programs of a lease together, and one that comes later"
until_true no_lease
rm -f "$folder/end"
mkfifo "$folder/go"
"$bin/gpupool" run --transport "$transport" --memory 1GiB -- bash -c '
  "$@" --until "$0/end" >"$0/one" 2>&1 & one=$!
  "$@" --until "$0/end" >"$0/two" 2>&1 & two=$!
  read -r <"$0/go"
  "$@" >"$0/three" 2>"$0/three.err"; third=$?
  wait $one && wait $two && exit $third' "$folder" "${first_error[@]}" &
launched=$!
started+=($launched)
until_true test -s "$folder/one"
until_true grep -q ready "$folder/one" && until_true grep -q ready "$folder/two" || fail "they do not run"
lease=$(lease_ids | tail -1)
run gpupool suspend --server node
check "suspend --server: $status $err" test "$status" -eq 0
check "the state" is "$lease" suspended
echo >"$folder/go"
check "the third one is told that it waits" until_true grep -q "suspended" "$folder/three.err"
check "and waits: $(cat "$folder/three")" test ! -s "$folder/three"
run gpupool resume --server node
check "resume --server: $status $err" test "$status" -eq 0
touch "$folder/end"
wait "$launched"
status=$?
check "all three end well: $status, $(cat "$folder/one" "$folder/two" "$folder/three")" test "$status" -eq 0

case_of "a kernel that does not end"
until_true no_lease
"$bin/gpupool" run --transport "$transport" --memory 1GiB -- "${hold_memory[@]}" --hold yes >"$folder/program.out" 2>"$folder/program.err" &
launched=$!
started+=($launched)
until_true grep -q holds "$folder/program.out" || fail "the program does not run"
lease=$(lease_ids | tail -1)
run gpupool suspend --drain 1s "$lease"
check "refused: $out" test "$status" -eq 1
check "the reason" has "$err" "busy"
check "it runs on" is "$lease" active
kill -KILL "$(pgrep -P "$launched" hold_memory)"
wait "$launched"

case_of "the manager is restarted while it is suspended"
until_true no_lease
launch
gpupool suspend "$lease" >/dev/null || fail "suspend"
kill -KILL "$(pid_of manager)"
check "the manager is back, and it is suspended" until_true is "$lease" suspended
check "its memory is still free: $(free_mib)" until_true memory_is_free 2000
resumed() { gpupool resume "$lease" >/dev/null 2>&1; }
check "resumed" until_true resumed
ends_well

case_of "the lease is released while it is suspended"
until_true no_lease
launch
gpupool suspend "$lease" >/dev/null || fail "suspend"
gpupool release "$lease" >/dev/null || fail "release"
ends_with "the lease has ended"
check "no lease is left" until_true no_lease

case_of "the program is killed while it is suspended"
launch
gpupool suspend "$lease" >/dev/null || fail "suspend"
kill -KILL "$program"
wait "$launched"
check "no lease is left" until_true no_lease
check "all memory is free: $(free_mib)" until_true memory_is_free 2048

case_of "the worker is killed while it is suspended"
launch
gpupool suspend "$lease" >/dev/null || fail "suspend"
kill -KILL "$(worker)"
ends_with "killed by signal 9"
check "no lease is left" until_true no_lease

case_of "the copier is killed while it keeps the memory"
launch
gpupool suspend "$lease" >/dev/null || fail "suspend"
copier=$(pgrep -P "$(pid_of server)" -f -- --copier)
kill -KILL "$copier"
ends_with "copier"
check "no lease is left" until_true no_lease
launch
run gpupool suspend "$lease"
check "there is another one: $status $err" test "$status" -eq 0
check "resume" gpupool resume "$lease"
ends_well

case_of "the server is killed while it is suspended" # readopted_aside.sh has the rest
until_true no_lease
launch
gpupool suspend "$lease" >/dev/null || fail "suspend"
copier=$(pgrep -P "$(pid_of server)" -f -- --copier)
# The manager takes a server for present that has stopped, and orders it to resume; nobody reads that.
kill -STOP "$(pid_of server)"
resumed &
first=$!
check "the lease counts as running" until_true is "$lease" active # from before the order is sent
kill -KILL "$(pid_of server)"
wait "$first"
status=$?
check "the command whose order was lost fails: $status" test "$status" -ne 0
check "the next one resumes it" until_true resumed
check "it runs: $(gpupool leases)" is "$lease" active
ends_well
check "no lease is left" until_true no_lease
down
no_copier() { ! kill -0 "$copier" 2>/dev/null; }
check "the copier went with it" until_true no_copier

case_of "a server with less memory than the session has"
export GPUPOOL_SERVER_SUSPEND_MEMORY=256MiB
up
launch
run gpupool suspend "$lease"
check "refused: $out" test "$status" -eq 1
check "the option is named" has "$err" "suspend_memory"
ends_well
