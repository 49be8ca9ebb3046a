#!/bin/bash
# A program whose GPU waits nearly all the time for the program's own next call: its lease is suspended, moved to other GPUs
# and servers, copied into files and held there all the same. Two servers on this machine with two software GPUs each.
. "$(dirname "$0")/../errors/common.sh"
transport=${!#}
programs=$(dirname "$3")

server_of() { gpupool leases | awk -v id="${1:0:8}" '$1 == id { print $2 }'; }
# launch GAP: sets launched and lease.
launch() {
  : >"$folder/program.out"
  rm -f "$folder/end"
  "$bin/gpupool" run --memory 1GiB --server node -- "${launcher[@]}" "$programs/waits_for_calls" --gap "$1" --until "$folder/end" \
    >"$folder/program.out" 2>"$folder/program.err" &
  launched=$!
  started+=("$launched")
  until_true grep -q waits "$folder/program.out" || fail "the program does not run: $(cat "$folder/program.err")"
  lease=$(lease_ids | tail -1)
}
# does WORDS...: a command of gpupool's, well within the time for which the calls would else be held back.
does() {
  local began=$SECONDS
  run gpupool "$@"
  check "$1: $status $out $err" test "$status" -eq 0
  check "$1 took $((SECONDS - began)) s" within $((SECONDS - began)) $((20 * ${GPUPOOL_TEST_PATIENCE:-1}))
}
# migrates TO: a place that the lease has just left is not its own again before its server has said so.
migrates() {
  tried() { run gpupool migrate --to "$1" "$lease"; [ "$status" -eq 0 ] || ! has "$err" "ask again in a moment"; }
  until_true tried "$1"
  check "migrate --to $1: $status $err" test "$status" -eq 0
  check "it is there: $(server_of "$lease")" test "$(server_of "$lease")" = "$1"
}
ends_well() {
  touch "$folder/end"
  ends_in_time "$launched"
  status=$?
  check "exit status $status: $(cat "$folder/program.out" "$folder/program.err")" test "$status" -eq 0
  check "it is right" grep -q PASS "$folder/program.out"
  check "nothing on stderr: $(cat "$folder/program.err")" test ! -s "$folder/program.err"
  check "no lease is left" until_true no_lease
}

mkdir "$folder/checkpoints"
export GPUPOOL_SERVER_CHECKPOINT_FOLDER=$folder/checkpoints
gpupool up --detach --software 2 --name node --transport "$transport" >"$folder/up" 2>&1 || { cat "$folder/up"; fail up; }
SERVER_GPUS=2 start_server other
for gap in 5 200; do
  case_of "it waits for $gap ms at a time"
  launch "$gap"
  for round in 1 2 3; do
    does suspend "$lease"
    does resume "$lease"
    does migrate "$lease"
  done
  migrates other
  does checkpoint "$lease" "files-$gap"
  migrates node
  does checkpoint --hold "$lease" "held-$gap"
  does restore "$lease" "held-$gap"
  ends_well
done
down
