#!/bin/bash
# `gpupool checkpoint` while the programs of a lease run: what they notice (nothing but time), what is in the folder, what
# is refused and why, and what is left. Over the transport named last; a pool of one software GPU of 2 GiB.
. "$(dirname "$0")/../errors/common.sh"
transport=${!#}
programs=$(dirname "$3")
checkpoints=$folder/checkpoints
mkdir "$checkpoints"
export GPUPOOL_SERVER_CHECKPOINT_FOLDER=$checkpoints

lease_id() { gpupool leases | awk '/^[0-9a-f]+ / { print $1; exit }'; }
at_rest() { ! any_lease && [ -z "$(session_workers)" ]; }
has_worker() { [ -n "$(session_workers)" ]; }
workers_are() { [ "$(session_workers | wc -l)" -eq "$1" ]; }
begun_or_done() { ! nothing_half || [ -e "$checkpoints/$1" ]; }
nothing_half() { [ -z "$(find "$checkpoints" -name '.*' -mindepth 1)" ]; }
size_of() { stat -c %s "$1"; }
gpus=1 # of the leases
# launch NAME WORDS...: what they run is in a lease, in the background. Sets launched and lease.
launch() {
  local name=$1
  shift
  "$bin/gpupool" run --transport "$transport" --gpus $gpus --memory 512MiB -- "$@" >"$folder/$name.out" 2>"$folder/$name.err" &
  launched=$!
  started+=($!)
  until_true any_lease || fail "no lease: $(cat "$folder/$name.err")"
  lease=$(lease_id)
}
ends_well() { # ends_well NAME
  wait "$launched"
  local status=$?
  check "$1: exit status $status: $(cat "$folder/$1.out" "$folder/$1.err")" test "$status" -eq 0
  check "$1 says nothing on stderr: $(cat "$folder/$1.err")" test ! -s "$folder/$1.err"
  check "nothing is left: $(gpupool leases)" until_true at_rest
}
checkpoint() { run gpupool checkpoint "$@"; }
refuses() { # refuses REGEX WORDS...: one line with the reason
  local regex=$1
  shift
  checkpoint "$@"
  check "refused: $out" test "$status" -eq 1
  check "one line on stderr" one_line "$err" "$regex"
  check "nothing half is left" nothing_half
}

up

case_of "a program that checks what it computes is written several times, and goes on"
launch mixed "${launcher[@]}" "$programs/stress_mixed" --threads 4 --seconds 8
until_true has_worker || fail "it does not run: $(cat "$folder/mixed.err")"
written=0
for ((round = 1; round < 40 && written < 4; ++round)); do
  kill -0 "$launched" 2>/dev/null || break
  checkpoint "$lease" "mixed-$round"
  if [ "$status" -eq 0 ]; then # else: for a moment a stream captures, code arrives, or a host function asks
    written=$((written + 1))
    check "it says what: $out" grep -Eq "lease ${lease:0:8}: 1 session written to $checkpoints/mixed-$round on node with .*B" <<<"$out"
    check "manifest and session: $(ls "$checkpoints/mixed-$round")" test "$(find "$checkpoints/mixed-$round" -type f | wc -l)" -eq 2
  else
    check "nothing is there: $err" test ! -e "$checkpoints/mixed-$round"
  fi
done
check "written $written times, lastly: $status $out $err" test "$written" -ge 2
ends_well mixed
check "all results are right: $(cat "$folder/mixed.out")" has "$(cat "$folder/mixed.out")" "all results are right"
check "nothing half is left" nothing_half

case_of "what is written, and for whom"
launch work "${launcher[@]}" "$programs/steady_work" --mib 64 --until "$folder/end" --pause 2
until_true has_worker || fail "it does not run: $(cat "$folder/work.err")"
checkpoint "$lease" monday
check "written: $status $err" test "$status" -eq 0
file=$(find "$checkpoints/monday" -type f ! -name manifest)
check "64 MiB and more: $(size_of "$file")" test "$(size_of "$file")" -gt $((64 << 20))
check "the server's own: $(stat -c %a "$checkpoints/monday" "$file")" test "$(stat -c %a "$checkpoints/monday" "$file" | xargs)" = "700 600"
checkpoint "$lease" "$checkpoints/tuesday"
check "by its whole path: $status $err" test "$status" -eq 0
mkdir "$checkpoints/eve"
checkpoint "$lease" eve/monday
check "in a folder that is there: $status $err" test "$status" -eq 0 -a -f "$checkpoints/eve/monday/manifest"

case_of "what is refused, with its reason"
refuses "monday: File exists" "$lease" monday
refuses "is not in the server's checkpoint folder" "$lease" /etc/monday
refuses "no part of it may begin with a '\.'" "$lease" ../monday
refuses "No such file or directory" "$lease" bob/monday
ln -s "$folder" "$checkpoints/out"
refuses "checkpoints/out" "$lease" out/monday
check "nothing went through the link" test ! -e "$folder/monday"
refuses "no lease" ffffffff monday
run gpupool checkpoint "$lease"
check "a folder is wanted: $status" test "$status" -eq 2
run gpupool suspend "$lease"
check "suspend: $status $err" test "$status" -eq 0
refuses "suspended, and has to be resumed first" "$lease" wednesday
run gpupool resume "$lease"
check "resume: $status $err" test "$status" -eq 0
program=$(pgrep -P "$launched" steady_work)
kill -STOP "$program"
refuses "steady_work \(process $program\): the program does not say that it stands still: is it stopped" --drain 1s "$lease" wednesday
kill -CONT "$program"
checkpoint "$lease" wednesday
check "written when it goes on: $status $err" test "$status" -eq 0
touch "$folder/end"
ends_well work
check "it is right: $(cat "$folder/work.out")" test "$(tail -1 "$folder/work.out")" = PASS

case_of "two programs of a lease, and a command that is interrupted"
rm -f "$folder/end"
launch two bash -c '"$@" --mib 16 --until "$0/end" --pause 2 >"$0/one" & one=$!
  "$@" --mib 16 --until "$0/end" --pause 2 >"$0/other" && wait $one' "$folder" "${launcher[@]}" "$programs/steady_work"
until_true workers_are 2 || fail "they do not run: $(cat "$folder/two.err")"
checkpoint "$lease" both
check "both are written: $status $out $err" has "$out" "2 sessions written"
check "manifest and sessions" test "$(find "$checkpoints/both" -type f | wc -l)" -eq 3
python3 -c 'import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])' "$bin/gpupool" checkpoint "$lease" later >"$folder/later" 2>&1 &
command=$!
started+=($command)
until_true begun_or_done later || fail "it does not begin: $(cat "$folder/later")"
kill -INT "$command" 2>/dev/null
wait "$command"
check "the server goes on" until_true test -f "$checkpoints/later/manifest"
touch "$folder/end"
ends_well two
check "both are right" test "$(tail -qn 1 "$folder/one" "$folder/other" | xargs)" = "PASS PASS"

ticks_of() { awk '{ print $14 + $15 }' "/proc/$1/stat"; }
is_running() { [ "$(gpupool leases | awk -v id="${lease:0:8}" '$1 == id { print $5 $6 $7 }' | grep -c active)" -eq 1 ]; }
restore() { run gpupool restore "$@"; }
refuses_to_restore() { # REGEX WORDS...
  local regex=$1
  shift
  restore "$@"
  check "not restored: $out" test "$status" -eq 1
  check "one line on stderr" one_line "$err" "$regex"
}
flip() { # flip FILE AT: one bit
  python3 -c 'import sys
with open(sys.argv[1], "r+b") as file:
  file.seek(int(sys.argv[2])); byte = file.read(1)[0]; file.seek(int(sys.argv[2])); file.write(bytes([byte ^ 1]))' "$@"
}

case_of "held, and restored"
rm -f "$folder/end"
all_free=$(gpupool devices --json | grep -o '"freeBytes": *[0-9]*')
launch work "${launcher[@]}" "$programs/steady_work" --mib 64 --until "$folder/end" --pause 2
until_true has_worker || fail "it does not run: $(cat "$folder/work.err")"
checkpoint "$lease" before
check "written: $status $err" test "$status" -eq 0
if [ "$transport" = shm ]; then
  checkpoint --hold "$lease" held
  check "refused: $out" test "$status" -eq 1
  check "the reason: $err" has "$err" "shares memory with this server"
else
  for round in 1 2; do
    checkpoint --hold "$lease" "held-$round"
    check "held: $status $out $err" test "$status" -eq 0
    check "its workers are gone" until_true workers_are 0
    check "its GPU is free" test "$(gpupool devices --json | grep -o '"freeBytes": *[0-9]*')" = "$all_free"
    program=$(pgrep -P "$launched" steady_work)
    before=$(ticks_of "$program") since=$SECONDS
    run gpupool run -- "${launcher[@]}" "$programs/steady_work" --mib 16 --rounds 4
    check "another lease has the whole GPU: $status $err" test "$status" -eq 0
    sleep 1
    # It asks now and then whether it goes on: a twentieth of a core at most.
    check "it sleeps: $before, $(ticks_of "$program")" \
      test "$(($(ticks_of "$program") - before))" -le "$((5 * (SECONDS - since + 1)))"
    run gpupool resume "$lease"
    check "resume does not do: $status $out" test "$status" -eq 1
    check "the reason: $err" has "$err" "held in files"
    refuses_to_restore "it is not the one in which the lease is held" "$lease" before
    refuses_to_restore "it is of another lease" "$lease" both
    refuses_to_restore "No such file or directory" "$lease" nowhere
    cp -r "$checkpoints/held-$round" "$checkpoints/damaged"
    file=$(find "$checkpoints/damaged" -type f ! -name manifest)
    flip "$file" $(($(size_of "$file") / 2))
    refuses_to_restore "the file is damaged" "$lease" damaged
    cp "$checkpoints/held-$round/${file##*/}" "$file"
    truncate -s -1 "$file"
    refuses_to_restore "the file is damaged" "$lease" damaged
    flip "$checkpoints/damaged/manifest" 100
    refuses_to_restore "its manifest is damaged" "$lease" damaged
    rm -r "$checkpoints/damaged"
    restore "$lease" "held-$round"
    check "restored: $status $out $err" test "$status" -eq 0
    check "a worker has it" until_true workers_are 1
    refuses_to_restore "the lease was held in it, and has gone on since" "$lease" "held-$round"
  done
fi
touch "$folder/end"
ends_well work
check "it is right: $(cat "$folder/work.out")" test "$(tail -1 "$folder/work.out")" = PASS

case_of "a checkpoint that was written while programs ran, which have done nothing since"
for one in 0 1; do
  mkfifo "$folder/line$one"
  eval "exec 7$one<>'$folder/line$one'"
done
launch kept bash -c 'for one in 0 1; do "$@" <"$0/line$one" >"$0/kept$one" 2>>"$0/said" & done; wait' "$folder" \
  "${launcher[@]}" "$programs/kept_memory" --wait
both_ready() { grep -q ready "$folder/kept0" && grep -q ready "$folder/kept1"; }
until_true both_ready || fail "they do not run: $(cat "$folder/said")"
checkpoint "$lease" quiet
check "written: $status $out $err" has "$out" "2 sessions written"
workers=$(session_workers | sort)
if [ "$transport" = shm ]; then
  refuses_to_restore "shares memory with this server" "$lease" quiet
else
  refuses_to_restore "it is of another lease" "$lease" both
  refuses_to_restore "cannot be restored elsewhere: it runs" --to node "$lease" quiet
  file=$(find "$checkpoints/quiet" -type f ! -name manifest | head -1)
  flip "$file" $(($(size_of "$file") / 2))
  refuses_to_restore "the file is damaged" "$lease" quiet
  flip "$file" $(($(size_of "$file") / 2))
  check "nothing has changed" test "$(session_workers | sort)" = "$workers"
  for round in quiet again; do
    [ -e "$checkpoints/$round" ] || checkpoint "$lease" "$round"
    workers=$(session_workers | sort)
    restore "$lease" "$round"
    check "restored: $status $out $err" test "$status" -eq 0
    check "both have other workers: $workers, $(session_workers)" test -z "$(comm -12 <(echo "$workers") <(session_workers | sort))"
    check "two of them" until_true workers_are 2
    check "it runs" until_true is_running
    refuses_to_restore "the lease was held in it, and has gone on since" "$lease" "$round"
  done
  check "nothing half is left" nothing_half
  checkpoint "$lease" late
  echo go >&70
  until_true grep -q PASS "$folder/kept0" || fail "it does not end: $(cat "$folder/kept0" "$folder/said")"
  check "one of them has ended" until_true workers_are 1
  refuses_to_restore "a session of the lease has begun or ended since" "$lease" late
fi
echo go >&70
echo go >&71
wait "$launched"
check "both are right: $(cat "$folder/kept0" "$folder/kept1" "$folder/said")" test "$(tail -qn 1 "$folder/kept0" "$folder/kept1" | xargs)" = "PASS PASS"
check "nothing is left: $(gpupool leases)" until_true at_rest

case_of "a checkpoint that programs have gone on from: they go on"
rm -f "$folder/end"
launch work "${launcher[@]}" "$programs/steady_work" --mib 16 --until "$folder/end" --pause 2
until_true has_worker || fail "it does not run: $(cat "$folder/work.err")"
checkpoint "$lease" past
check "written: $status $err" test "$status" -eq 0
for round in 1 2; do
  sleep 0.1 # some rounds; none would be refused all the same
  [ "$transport" = shm ] || refuses_to_restore "has gone on since the checkpoint was written" "$lease" past
done
touch "$folder/end"
ends_well work
check "it is right: $(cat "$folder/work.out")" test "$(tail -1 "$folder/work.out")" = PASS

if [ "$transport" != shm ]; then
  case_of "a program of two that dies while it is held leaves nothing when the lease is restored"
  rm -f "$folder/end"
  launch two bash -c '"$@" --mib 16 --until "$0/end" --pause 2 >"$0/one" & echo $! >"$0/doomed"
    "$@" --mib 16 --until "$0/end" --pause 2 >"$0/other"' "$folder" "${launcher[@]}" "$programs/steady_work"
  until_true workers_are 2 || fail "they do not run: $(cat "$folder/two.err")"
  checkpoint --hold "$lease" doomed
  check "held: $status $out $err" test "$status" -eq 0
  check "its workers are gone" until_true workers_are 0
  kill -KILL "$(cat "$folder/doomed")"
  restore "$lease" doomed
  check "restored: $status $out $err" test "$status" -eq 0
  check "the other one's worker is left: $(session_workers)" until_true workers_are 1
  touch "$folder/end"
  wait "$launched"
  check "it is right: $(cat "$folder/other" "$folder/two.err")" test "$(tail -1 "$folder/other")" = PASS
  check "nothing is left: $(gpupool leases)" until_true at_rest

  case_of "a lease of two GPUs is held, and the manager is started again"
  down
  up --software 2
  free_bytes() { gpupool devices --json | grep -o '"freeBytes": *[0-9]*'; }
  all_free() { [ "$(free_bytes)" = "$before" ]; }
  is_held() { gpupool leases | grep -q "^${lease:0:8} .* held "; }
  restored() {
    restore "$lease" two-gpus
    [ "$status" -eq 0 ]
  }
  before=$(free_bytes)
  rm -f "$folder/end"
  gpus=2
  launch two bash -c 'CUDA_VISIBLE_DEVICES=0 "$@" --mib 16 --until "$0/end" --pause 2 >"$0/one" & one=$!
    CUDA_VISIBLE_DEVICES=1 "$@" --mib 16 --until "$0/end" --pause 2 >"$0/other" && wait $one' "$folder" "${launcher[@]}" "$programs/steady_work"
  gpus=1
  until_true workers_are 2 || fail "they do not run: $(cat "$folder/two.err")"
  check "it has both: $(free_bytes)" test "$(free_bytes | sort -u | wc -l)" -eq 1 -a "$(free_bytes)" != "$before"
  checkpoint --hold "$lease" two-gpus
  check "held: $status $out $err" test "$status" -eq 0
  check "both GPUs are free: $(free_bytes)" all_free
  kill -KILL "$(pid_of manager)"
  check "the manager is back, and it is held" until_true is_held
  check "both GPUs are still free" until_true all_free
  kill -KILL "$(pid_of server)"
  check "the server is back, and it is held" until_true is_held
  check "both GPUs are free there" until_true all_free
  check "restored: $status $err" until_true restored
  check "both have a worker" until_true workers_are 2
  touch "$folder/end"
  ends_well two
  check "both are right" test "$(tail -qn 1 "$folder/one" "$folder/other" | xargs)" = "PASS PASS"
  check "both GPUs are free again: $(free_bytes)" until_true all_free
fi

case_of "a disk that is full, and a folder that goes away"
rm -f "$folder/end"
if small=$(mktemp -d "$folder/small-XXXX") && mount -t tmpfs -o size=16m none "$small" 2>/dev/null; then
  down
  GPUPOOL_SERVER_CHECKPOINT_FOLDER=$small up
  launch work "${launcher[@]}" "$programs/steady_work" --mib 64 --until "$folder/end" --pause 2
  until_true has_worker || fail "it does not run: $(cat "$folder/work.err")"
  checkpoint "$lease" monday
  check "refused: $out" test "$status" -eq 1
  check "the disk: $err" has "$err" "No space left on device"
  check "nothing is left there: $(ls -A "$small")" test -z "$(ls -A "$small")"
  until_true umount "$small" 2>/dev/null || fail "the server does not let go of the folder"
  rmdir "$small"
  checkpoint "$lease" monday
  check "the folder: $status $err" has "$err" "No such file or directory"
  touch "$folder/end"
  ends_well work
else
  skip "this user may not mount a small disk"
fi

case_of "a server without the option"
down
unset GPUPOOL_SERVER_CHECKPOINT_FOLDER
up
rm -f "$folder/end"
launch work "${launcher[@]}" "$programs/steady_work" --mib 4 --until "$folder/end" --pause 2
until_true has_worker || fail "it does not run: $(cat "$folder/work.err")"
refuses "checkpoint-folder" "$lease" monday
touch "$folder/end"
ends_well work

case_of "a server that is killed while it writes leaves nothing when it comes again"
down
export GPUPOOL_SERVER_CHECKPOINT_FOLDER=$checkpoints
up
rm -f "$folder/end"
launch work "${launcher[@]}" "$programs/steady_work" --mib 400 --until "$folder/end" --pause 2
until_true has_worker || fail "it does not run: $(cat "$folder/work.err")"
background "$bin/gpupool" checkpoint "$lease" late >"$folder/late" 2>&1
until_true begun_or_done late || fail "it does not begin: $(cat "$folder/late")"
kill -KILL "$(pid_of server)"
touch "$folder/end"
wait "$launched"
status=$?
# Its worker gives the checkpoint up, unless that takes too long on this machine.
gave_up() { test "$status" -eq 0 || grep -q "does not outlive it: it is being moved" "$folder/work.err"; }
check "the program goes on: $status $(cat "$folder/work.err")" gave_up
check "nothing half is left" until_true nothing_half
check "a whole one or none" test ! -e "$checkpoints/late" -o -f "$checkpoints/late/manifest"
down
