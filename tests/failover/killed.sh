#!/bin/bash
# The workers of protected programs (`gpupool run --protect`) are killed: a program that has made no call since its
# checkpoint goes on, and its results are right; any other one ends with a line that says why. Over the transport named
# last; a pool of one software GPU of 2 GiB.
. "$(dirname "$0")/../errors/common.sh"
transport=${!#}
programs=$(dirname "$3")
protect=(--protect --protect-interval 1s)
RANDOM=7 # the moments of kills; what comes of them is one of two things, whenever they are

any_lease() { gpupool leases | grep -Eq '^[0-9a-f]{8}'; }
lease_id() { gpupool leases | awk '/^[0-9a-f]+ / { print $1; exit }'; }
at_rest() { ! any_lease && [ -z "$(session_workers)" ]; }
has_worker() { [ -n "$(session_workers)" ]; }
said() { gpupool leases -v | grep -E "^$lease is (not )?(protected|being restored)"; }
says_of_it() { said | grep -Eq "$1"; }
says_ready() { grep -q ready "$folder/$1.out"; }
# Its checkpoint has all that it has sent: an interval (1 s) later there was no reason for another one.
is_covered() { says_of_it 'is protected .* checkpoint is ([3-9]|[1-9][0-9]+)s old, [^;]*(; restored|$)'; }
# launch NAME WORDS...: what they run is in a protected lease, in the background, and reads the pipe NAME.in. Sets
# launched and lease.
launch() {
  local name=$1
  shift
  mkfifo "$folder/$name.in"
  exec 9<>"$folder/$name.in"
  "$bin/gpupool" run "${protect[@]}" --transport "$transport" --memory 512MiB -- "$@" \
    <"$folder/$name.in" >"$folder/$name.out" 2>"$folder/$name.err" &
  launched=$!
  started+=($!)
  until_true any_lease || fail "no lease: $(cat "$folder/$name.err")"
  lease=$(lease_id)
}
steady() { # steady NAME WORDS...: steady_work that waits for a line before its first round
  local name=$1
  shift
  launch "$name" "${launcher[@]}" "$programs/steady_work" --mib 16 --ready "$@"
  until_true says_ready "$name" || fail "it does not run: $(cat "$folder/$name.err")"
}
go() { echo >&9; }
kill_worker() { session_workers | xargs -r kill -KILL; }
ends() { # sets status, and the texts of NAME
  wait "$launched"
  status=$?
  out=$(cat "$folder/$1.out") err=$(cat "$folder/$1.err")
  check "nothing is left: $(gpupool leases)" until_true at_rest
}
right() { [ "$status" -eq 0 ] && [ "$(tail -1 <<<"$out")" = PASS ]; }
# It says that its worker has died, and does not say that its results are right.
honest() { [ "$status" -ne 0 ] && [ "$(tail -1 <<<"$out")" != PASS ] && grep -Eq '^gpupool: .*start the program again$' <<<"$err"; }

up

if [ "$transport" = shm ]; then
  case_of "over shm"
  steady shm
  check "it says why not: $(said)" until_true says_of_it "is not protected: .*shares memory with its worker"
  kill_worker
  go
  ends shm
  check "it ends: $status $out $err" honest
  finish
fi

case_of "a program that waits goes on, each time its worker is killed"
steady waits --rounds 8
for round in 1 2 3; do
  check "it is protected: $(said)" until_true is_covered
  kill_worker
  check "another worker has it: $(said)" until_true says_of_it "restored $round time"
done
go
ends waits
check "it is right: $status $out $err" right
check "it says of it nothing but its rounds' time: $err" test "$(grep -c gpupool <<<"$err")" -eq 0

case_of "one whose calls are not in the checkpoint ends, and says so"
steady calls --until "$folder/end"
check "it is protected: $(said)" until_true is_covered
go
busy_again() { says_of_it 'checkpoint is [0-2]s old' || says_of_it 'no later one'; }
check "it runs: $(said)" until_true busy_again
kill_worker
ends calls
check "it ends: $status $out $err" honest
check "and says why: $err" grep -Eq 'since the checkpoint|calls under way' <<<"$err"

case_of "kills at any moment"
resumed=0 ended=0
for round in 1 2 3 4; do
  rm -f "$folder/any.in"
  launch any "${launcher[@]}" "$programs/steady_work" --mib 8 --rounds 12 --pause $((RANDOM % 400))
  until_true has_worker
  sleep "$((RANDOM % 3)).$((5 + RANDOM % 5))"
  kill_worker 2>/dev/null
  ends any
  if right; then resumed=$((resumed + 1)); else ended=$((ended + 1)); fi
  check "right, or an honest end: $status $out $err" eval 'right || honest'
done
echo "killed at any moment: $resumed were right, $ended ended with the reason"

case_of "what is not protected"
protect=()
steady plain --rounds 2
sleep 2 # two of the server's beats
check "without --protect nothing is said: $(said)" test -z "$(said)"
go
ends plain
check "it is right: $status $out $err" right
protect=(--protect --protect-interval 1s)
down
GPUPOOL_SERVER_PROTECT_MEMORY=1MiB up
steady large
check "there is no room: $(said)" until_true says_of_it "is not protected: .*no room"
kill_worker
go
ends large
check "it ends: $status $out $err" honest
