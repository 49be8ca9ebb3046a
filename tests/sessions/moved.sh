#!/bin/bash
# `gpupool migrate` while the programs of a lease run: what they notice (nothing but time), what others and administrators
# see, what is refused and why, and what is left. Over the transport named last; a pool of two software GPUs of 2 GiB.
. "$(dirname "$0")/../errors/common.sh"
transport=${!#}
programs=$(dirname "$3")
steady_work=("${launcher[@]}" "$programs/steady_work")
threads=("${launcher[@]}" "$programs/stress_threads" --threads 4 --rounds 60)

list() { gpupool leases | grep -E '^[0-9a-f]{8}'; }
list_lasting() { list | sed -E 's/ +[0-9]+[smh] +/ /'; } # without their age, and its width
lease_of() { list | awk -v tenant="$1" '$0 ~ " " tenant " " { print $1 }'; }
no_lease() { ! list | grep -q .; }
free_bytes() { gpupool devices --json | grep -o '"freeBytes": *[0-9]*'; }
at_rest() { [ "$(free_bytes)" = "$all_free" ] && no_lease && [ -z "$(session_workers)" ]; }
moved() { grep -c 'session .*: has moved to worker' "$GPUPOOL_STATE/server.log"; }
has_moved() { [ "$(moved)" -ge "$1" ]; }
has_begun() { [ "$(session_workers | wc -l)" -ge "$1" ]; }
workers_are() { [ "$(session_workers | wc -l)" -eq "$1" ]; }
ends_within_a_minute() { # ends_within_a_minute PID: its status
  local i
  for ((i = 0; i < 600 * $(busy); ++i)); do kill -0 "$1" 2>/dev/null || break; sleep 0.1; done
  ! kill -0 "$1" 2>/dev/null || fail "process $1 does not end: $(list)"
  wait "$1"
}
# in_lease NAME TENANT GPUS WORDS...: what they run is in a lease of that tenant, in the background.
in_lease() {
  local name=$1 tenant=$2 gpus=$3
  shift 3
  "$bin/gpupool" run --transport "$transport" --tenant "$tenant" --gpus "$gpus" --memory 512MiB -- "$@" \
    >"$folder/$name.out" 2>"$folder/$name.err" &
  pid[$name]=$!
  started+=($!)
}
ends_well() { # ends_well NAME
  ends_within_a_minute "${pid[$1]}"
  local status=$?
  check "$1: exit status $status: $(cat "$folder/$1.out" "$folder/$1.err")" test "$status" -eq 0
  check "$1 says nothing on stderr: $(cat "$folder/$1.err")" test ! -s "$folder/$1.err"
}
is_right() { check "$1 is right: $(cat "$folder/$1.out")" test "$(tail -1 "$folder/$1.out")" = PASS; }
program_of() { pgrep -P "${pid[$1]}" steady_work; }
is_the_command() { [ "$(readlink "/proc/$1/exe")" = "$(readlink -f "$bin/gpupool")" ] || ! kill -0 "$1" 2>/dev/null; }
migrate() { run gpupool migrate --tenant eve "$@"; } # the shell's pool is its user's: the tenant is only a name
# moves LEASE: also where a program ends at that very moment, whose session is not moved then.
moves() {
  local i
  for ((i = 0; i < 20; ++i)); do
    migrate "$1"
    grep -q "the session is ending" <<<"$err" || return
  done
}
refuses() { # refuses REGEX WORDS...: one line with the reason, in 20 s
  local regex=$1
  shift
  migrate "$@"
  check "refused: $out" test "$status" -eq 1
  check "one line on stderr" one_line "$err" "$regex"
  check "took $ms ms" within "$ms" 20000
}
declare -A pid

up --software 2
until_true workers_are 0
all_free=$(free_bytes)
check "a pool of two devices: $all_free" test "$(wc -l <<<"$all_free")" -eq 2

case_of "undisturbed"
"$bin/gpupool" run --transport "$transport" --memory 512MiB -- "${threads[@]}" >"$folder/threads.expected" 2>&1 ||
  fail "$(cat "$folder/threads.expected")"
until_true at_rest

case_of "two programs of a lease, another lease beside them, and a program that begins meanwhile"
mkfifo "$folder/go"
in_lease lease eve 2 bash -c '
  work=("${@:2:$1}") threads=("${@:2 + $1}")
  "${work[@]}" --mib 16 --until "$0/end" --pause 2 >"$0/work.out" 2>"$0/work.err" & one=$!
  until [ -e "$0/end" ]; do "${threads[@]}" || exit; done >"$0/threads" 2>"$0/threads.err" & two=$!
  read -r <"$0/go"
  "${work[@]}" --mib 4 --until "$0/end" --pause 2 >"$0/late.out" 2>"$0/late.err" & three=$!
  wait $one && wait $two && wait $three' "$folder" "${#steady_work[@]}" "${steady_work[@]}" "${threads[@]}"
in_lease beside bob 1 "${steady_work[@]}" --mib 16 --until "$folder/end" --pause 2
until_true has_begun 3 || fail "they do not run: $(list) $(cat "$folder"/*.err)"
lease=$(lease_of eve) before=$(list_lasting) worker=$(session_workers | sort | xargs)
for round in 1 2 3; do
  [ "$round" -ne 2 ] || echo >"$folder/go"
  moves "$lease"
  check "moved, $round: $status $err" test "$status" -eq 0
  check "it says what: $out" grep -Eq "lease $lease: [123] sessions? moved with .*B; the longest pause was" <<<"$out"
done
until_true has_begun 4 || fail "the third one does not run: $(cat "$folder/late.err" "$folder/lease.err")"
for ((round = 0; round < 20; ++round)); do
  ! has_moved 6 || break
  moves "$lease"
  check "moved again: $status $err" test "$status" -eq 0
done
check "moved: $(moved)" has_moved 6
check "leases are what they were: $(list_lasting)" test "$(list_lasting)" = "$before"
check "in other workers: $(session_workers | xargs)" test "$(session_workers | sort | xargs)" != "$worker"
touch "$folder/end"
ends_well lease
ends_well beside
is_right beside
is_right work
is_right late
# Each run of it begins anew: every one says the same.
check "threads are right: $(sort "$folder/threads" | uniq -c)" \
  test "$(sort -u "$folder/threads")" = "$(sort -u "$folder/threads.expected")"
check "nothing is left: $(list) $(session_workers) $(free_bytes)" until_true at_rest

case_of "what is refused, with its reason"
rm -f "$folder/end"
in_lease one eve 1 "${steady_work[@]}" --mib 4 --capture "$folder/captured" --until "$folder/end" --pause 2
until_true grep -q captures "$folder/one.out" || fail "it does not run: $(cat "$folder/one.err")"
lease=$(lease_of eve)
refuses "steady_work \(process [0-9]+\): a stream capture is open" --drain 1s "$lease"
touch "$folder/captured"
migrate "$lease"
check "moved when the capture is closed: $status $err" test "$status" -eq 0
run gpupool suspend "$lease"
check "suspend: $status $err" test "$status" -eq 0
refuses "suspended.*resume" "$lease"
run gpupool resume "$lease"
check "resume: $status $err" test "$status" -eq 0
program=$(program_of one)
kill -STOP "$program"
refuses "steady_work \(process $program\): the program does not say that it stands still: is it stopped" --drain 1s "$lease"
kill -CONT "$program"
migrate "$lease"
check "moved when it goes on: $status $err" test "$status" -eq 0
refuses "no lease" ffffffff
touch "$folder/end"
ends_well one
is_right one
check "nothing is left: $(list) $(session_workers) $(free_bytes)" until_true at_rest

case_of "why a lease cannot be moved is known before anybody tries"
rm -f "$folder/end"
cat >"$folder/heap.py" <<'EOF'
"""Loads kernels that may use the device's heap, then others in their place; argv: the files to wait for."""
import ctypes, os, sys, time
def load(text):
    module = ctypes.c_void_p()
    code = b".version 9.0\n.target sm_75\n.address_size 64\n" + text + b".visible .entry k() { ret; }\n"
    assert cuda.cuModuleLoadData(ctypes.byref(module), code) == 0
    return module
def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.05)
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
module = load(b".extern .func (.param .b64 r) malloc (.param .b64 n);\n")
wait_for(sys.argv[1])
assert cuda.cuModuleUnload(module) == 0
load(b"")
wait_for(sys.argv[2])
EOF
in_lease one eve 1 "${launcher[@]}" python3 "$folder/heap.py" "$folder/unload" "$folder/end"
says_of_it() { gpupool leases -v | grep "^$lease cannot be moved"; }
says_heap() { says_of_it | grep -q "^$lease cannot be moved: kernels of the program may use the device's heap"; }
says_no_heap() { ! says_heap; }
until_true has_begun 1 || fail "it does not run: $(cat "$folder/one.err")"
lease=$(lease_of eve)
check "leases -v says why: $(gpupool leases -v)" until_true says_heap
check "so does --json: $(gpupool leases --json)" has "$(gpupool leases --json)" '"hindrances"'
check "without -v nothing is said: $(gpupool leases)" test -z "$(gpupool leases | grep 'cannot be moved')"
refuses "kernels of the program may use the device's heap" "$lease"
touch "$folder/unload"
check "what is unloaded hinders no more: $(gpupool leases -v)" until_true says_no_heap
case $transport in
shm) check "it shares memory: $(says_of_it)" has "$(says_of_it)" 'to another server: its program was started with --transport shm' ;;
*) check "nothing else hinders it: $(says_of_it)" test -z "$(says_of_it)" ;;
esac
migrate "$lease"
check "moved then: $status $err" test "$status" -eq 0
touch "$folder/end"
ends_well one
check "nothing is left: $(list) $(session_workers) $(free_bytes)" until_true at_rest

case_of "a program that is stopped in the middle of a move"
rm -f "$folder/end" "$folder/captured"
in_lease one eve 1 "${steady_work[@]}" --mib 64 --until "$folder/end"
until_true workers_are 1 || fail "it does not run: $(cat "$folder/one.err")"
lease=$(lease_of eve) program=$(program_of one)
for delay in 0.02 0.05 0.08 0.12; do
  background timeout 60 "$bin/gpupool" migrate --drain 30s "$lease" >"$folder/migrate" 2>&1
  command=$!
  sleep "$delay" # any moment of it will do
  kill -STOP "$program"
  sleep 0.3
  kill -CONT "$program"
  ends_within_a_minute "$command"
  status=$?
  check "moved when it goes on, $delay: $status $(cat "$folder/migrate")" test "$status" -eq 0
done

case_of "the command is interrupted"
for delay in 0.01 0.03 0.05 0.1; do
  # A shell's background command ignores SIGINT.
  python3 -c 'import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])' "$bin/gpupool" migrate "$lease" >"$folder/migrate" 2>&1 &
  command=$!
  started+=($command)
  # Before that it is a copy of this shell, which would end by `finish`.
  until_true is_the_command "$command" || fail "the command does not begin"
  sleep "$delay"
  kill -INT "$command" 2>/dev/null
  ends_within_a_minute "$command"
  status=$?
  check "it ends of it, or had ended: $status" test "$status" -eq 130 -o "$status" -eq 0
done
check "one worker has the session: $(session_workers | xargs)" until_true workers_are 1
migrate "$lease"
check "moved again: $status $err" test "$status" -eq 0
check "the lease is active: $(list)" has "$(list)" active
touch "$folder/end"
ends_well one
is_right one
check "nothing is left: $(list) $(session_workers) $(free_bytes)" until_true at_rest
check "no worker that was left went on" test -z "$(grep -E 'did not exit after|nobody asked|answered nonsense' "$GPUPOOL_STATE/server.log")"
down
