#!/bin/bash
# The workers of protected programs (`gpupool run --protect`) are killed: a program goes on from its checkpoint, the calls
# since are made again, and its results are right; where that cannot be, it ends with a line that says why. Over the
# transport named last; a pool of one software GPU of 2 GiB.
. "$(dirname "$0")/common.sh"
transport=${!#}
protect=(--protect=1s)
RANDOM=7 # the moments of kills; what comes of them is one of two things, whenever they are

any_lease() { gpupool leases | grep -Eq '^[0-9a-f]{8}'; }
at_rest() { ! any_lease && [ -z "$(session_workers)" ]; }
has_logged() { grep -Eq "$1" "$GPUPOOL_STATE/server.log"; }
has_worker() { [ -n "$(session_workers)" ]; }
# Its checkpoint has all that it has sent: an interval (1 s) later there was no reason for another one.
is_covered() { says_of_it "is protected .* checkpoint is ([${1:-3}-9]|[1-9][0-9]+)s old, [^;]*(; restored|$)"; } # for some seconds
kill_worker() { session_workers | xargs -r kill -KILL; }
ends() {
  await_end "$1"
  check "nothing is left: $(gpupool leases)" until_true at_rest
}

GPUPOOL_LOG=info up

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
check "checkpoints came through shared memory" has_logged ' [1-9][0-9]* pages came through shared memory'
check "and went back through it" has_logged ' [1-9][0-9]* of [0-9]+ parts of a checkpoint went through shared memory'

case_of "one that pauses has a checkpoint long before its interval is over, and nothing is made again"
export GPUPOOL_LOG=info
checkpoints() { grep -Ec 'checkpoint of frame [0-9]+ is kept' "$GPUPOOL_STATE/server.log"; }
one_more() { [ "$(checkpoints)" -gt "$made" ]; }
protect=(--protect --protect-interval 90s)
rm -f "$folder/end"
steady pauses --until "$folder/end" --pause 300000
# The second one comes after 1 s, and a third one after 3 s more if there were calls as the second one was made.
until_true is_covered 6
check "it is protected: $(said)" until_true is_covered 6
made=$(checkpoints)
go
check "there is one behind its first round: $(said)" until_true one_more
kill_worker
check "another worker has it: $(said)" until_true says_of_it "restored 1 time"
touch "$folder/end"
ends pauses
check "it is right: $status $out $err" right
check "nothing was made again: $err" has "$err" ": 0 calls made again, 0 of kernels"

case_of "one that works goes on, and what it has sent since its checkpoint is made again"
made_again() { grep -Eqc "epoch $1: [0-9]+ calls made again, [1-9][0-9]* of kernels, .*[1-9][0-9]* answers compared" "$folder/calls.err"; }
busy_again() { says_of_it 'the calls since then take'; }
# A first checkpoint is followed by a second one after a second, this one by none within the hour: its calls stay.
busy_since_the_second() { says_of_it 'checkpoint is ([4-9]|[1-9][0-9]+)s old, .*the calls since then take'; }
protect=(--protect --protect-interval 1h)
rm -f "$folder/end"
steady calls --load --until "$folder/end" # each round has an answer
check "it is protected: $(said)" until_true says_of_it 'is protected .* checkpoint is'
go
for round in 1 2; do
  check "it runs: $(said)" until_true busy_since_the_second
  kill_worker
  check "another worker has it: $(said)" until_true says_of_it "restored $round time"
  check "calls are made again: $(cat "$folder/calls.err")" until_true made_again $((round + 1))
done
touch "$folder/end"
ends calls
check "it is right: $status $out $err" right
unset GPUPOOL_LOG

case_of "a host function runs once"
rm -f "$folder/end"
protect=(--protect --protect-interval 1h)
steady functions --host-function --until "$folder/end" # counts its calls in each round
check "it is protected: $(said)" until_true says_of_it 'is protected .* checkpoint is'
go
for round in 1 2; do
  check "it runs: $(said)" until_true busy_since_the_second
  kill_worker
  check "another worker has it: $(said)" until_true says_of_it "restored $round time"
done
touch "$folder/end"
ends functions
check "it is right: $status $out $err" right

case_of "results that differ from run to run"
for what in stop continue; do
  rm -f "$folder/end" "$folder/clock.in"
  protect=(--protect --protect-interval 1h)
  [ $what = continue ] && protect+=(--on-divergence continue)
  steady clock --clock --until "$folder/end"
  check "it is protected: $(said)" until_true says_of_it 'is protected .* checkpoint is'
  go
  check "it runs: $(said)" until_true busy_since_the_second
  kill_worker
  if [ $what = stop ]; then
    ends clock
    check "it ends: $status $out $err" honest
    check "and says why: $err" grep -Eq 'sessionRead .call [0-9]+. gave another answer than before.*on-divergence.*s old' <<<"$err"
  else
    check "another worker has it: $(said)" until_true says_of_it "restored 1 time"
    touch "$folder/end"
    ends clock
    check "it goes on: $status $out $err" right
    check "and says what differs: $err" grep -Eq 'with other data than the program has seen: [1-9]' <<<"$err"
  fi
done

case_of "a log that is full"
rm -f "$folder/end"
# Room for the calls of a second or two: a busy machine takes that long for the checkpoint.
protect=(--protect --protect-interval 1h --protect-log 128KiB)
steady full --until "$folder/end"
check "it is protected: $(said)" until_true says_of_it 'is protected .* checkpoint is'
go
sleep 3 # far behind the first one, and before the next interval
check "it is checkpointed early: $(said)" until_true says_of_it 'checkpoint is [0-2]s old'
touch "$folder/end"
ends full
check "it is right: $status $out $err" right
rm -f "$folder/end" "$folder/full.in"
protect=(--protect --protect-interval 1h --protect-log 1KiB)
steady full --until "$folder/end"
check "it is protected: $(said)" until_true says_of_it 'is protected'
go
check "it says so: $(said)" until_true says_of_it 'only while idle: .*log of its calls is full'
touch "$folder/end"
ends full
check "and is right all the same: $status $out $err" right
protect=(--protect --protect-interval 1s)

case_of "a program that sends all the time is protected before its first interval is over"
protect=(--protect --protect-interval 1h)
rm -f "$folder/end"
launch busy "${launcher[@]}" "$programs/steady_work" --mib 8 --until "$folder/end"
check "it is protected: $(said)" until_true says_of_it 'is protected .* checkpoint is'
kill_worker
check "another worker has it: $(said)" until_true says_of_it "restored 1 time"
touch "$folder/end"
ends busy
check "and is right: $status $out $err" right
protect=(--protect --protect-interval 1s)

case_of "kills at any moment"
resumed=0 ended=0
for round in 1 2 3; do
  launch any "${launcher[@]}" "$programs/steady_work" --mib 8 --rounds 12 --pause $((RANDOM % 400))
  until_true has_worker
  sleep "$((RANDOM % 3)).$((5 + RANDOM % 5))"
  kill_worker 2>/dev/null
  ends any
  if right; then resumed=$((resumed + 1)); else ended=$((ended + 1)); fi
  check "right, or an honest end: $status $out $err" eval 'right || honest'
done
echo "killed at any moment: $resumed were right, $ended ended with the reason"

case_of "kills while a checkpoint is on its way"
rm -f "$folder/end"
logged() { grep -c "$1" "$GPUPOOL_STATE/server.log"; }
open_ones() { echo $(($(logged 'a checkpoint is sent') - $(logged 'copied: '))); }
on_its_way() { [ "$(open_ones)" -gt "$before" ]; }
steady sent --mib 48 --pause 100 --until "$folder/end"
check "it is protected: $(said)" until_true says_of_it 'is protected .* checkpoint is'
go
for round in 1 2; do
  check "it runs: $(said)" until_true busy_again
  before=$(open_ones)
  for _ in {1..100}; do on_its_way && break; done # seen or not, what follows must be right
  kill_worker
  check "another worker has it: $(said)" until_true says_of_it "restored $round time"
done
touch "$folder/end"
ends sent
check "it is right: $status $out $err" right

case_of "as the tenant is set up, where the program's user says nothing"
protect=()
wish=(--tenant alice)
run gpupool quota set --protect 1s alice
check "it is set: $out $err" has "$out" "its leases are protected, every 1s"
check "and shown: $(gpupool tenants -o wide)" grep -Eq '^alice .* 1s ' <<<"$(gpupool tenants -o wide)"
steady tenant --rounds 2
check "it is protected: $(said)" until_true says_of_it 'is protected .* checkpoint is'
kill_worker
check "another worker has it: $(said)" until_true says_of_it "restored 1 time"
go
ends tenant
check "it is right: $status $out $err" right
protect=(--no-protect)
steady tenant --rounds 2
sleep 2 # two of the server's beats
check "what it says itself counts more: $(said)" test -z "$(said)"
go
ends tenant
check "it is right: $status $out $err" right
run gpupool quota set --none alice
wish=()

case_of "what is not protected, and what is without a checkpoint"
protect=()
steady plain --rounds 2
sleep 2 # two of the server's beats
check "without --protect nothing is said: $(said)" test -z "$(said)"
go
ends plain
check "it is right: $status $out $err" right
down
GPUPOOL_SERVER_PROTECT_MEMORY=1MiB up
protect=(--protect --protect-interval 1s)
rm -f "$folder/end"
steady large --load --until "$folder/end"
check "there is no room: $(said)" until_true says_of_it "is protected from its beginning: .*no room"
go
for round in 1 2; do
  check "it runs: $(said)" until_true says_of_it 'no room.*; the calls since then take [0-9.]+ [KM]iB'
  kill_worker
  check "another worker has it: $(said)" until_true says_of_it "is protected from its beginning: .*; restored $round time"
done
touch "$folder/end"
ends large
check "it is right, from its beginning: $status $out $err" right
protect=(--protect --protect-interval 1s --protect-log 1KiB)
steady full --rounds 8
check "nor room for its calls: $(said)" until_true says_of_it "is not protected: .*no room.*since its beginning: .*log of its calls is full"
kill_worker
go
ends full
check "it ends: $status $out $err" honest
