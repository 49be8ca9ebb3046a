#!/bin/bash
# Leases that take turns on a server that leases more memory than its GPU has: what programs notice (nothing but time), who
# yields, what administrators see, and what is left when somebody dies. Over the transport named last; a pool of one
# software GPU of 2 GiB, of which 4 GiB may be leased.
. "$(dirname "$0")/../errors/common.sh"
transport=${!#}
programs=$(dirname "$3")
steady_work=("${launcher[@]}" "$programs/steady_work")
export GPUPOOL_SERVER_OVERCOMMIT=2.0 GPUPOOL_SERVER_TURN_TIME=1s GPUPOOL_SERVER_SUSPEND_MEMORY=4GiB

shows() { gpupool leases | grep -c "active, $1"; }
holds() { [ "$(shows "$1")" -eq "$2" ]; }
turns_of_all() { gpupool leases --json | grep -o '"turns": *[0-9]*' | awk '{ sum += $2 } END { print sum + 0 }'; }
has_turned() { [ "$(turns_of_all)" -ge "$1" ]; }
work() { # work NAME MEMORY WORDS...: a program of that name, in the background
  local name=$1 memory=$2
  shift 2
  : >"$folder/$name.out" # not what one of that name said before
  "$bin/gpupool" run --transport "$transport" --memory "$memory" "${terms[@]}" -- "${steady_work[@]}" "$@" \
    <&0 >"$folder/$name.out" 2>"$folder/$name.err" &
  pid[$name]=$!
  started+=($!)
}
ends_well() { # ends_well NAME
  wait "${pid[$1]}"
  status=$?
  check "$1: exit status $status: $(cat "$folder/$1.out" "$folder/$1.err")" test "$status" -eq 0
  check "$1 is right" grep -q PASS "$folder/$1.out"
}
declare -A pid
terms=()

up
devices=$(gpupool devices)

case_of "two programs that do not fit beside one another"
work one 1200MiB --mib 4 --until "$folder/end" --pause 10
work two 1200MiB --mib 4 --until "$folder/end" --pause 10
check "both have their turns: $(gpupool leases)" until_true has_turned 4
check "one is there at a time: $(gpupool leases)" until_true holds resident 1
check "devices say how much is leased: $devices" has "$devices" LEASED
touch "$folder/end"
ends_well one
ends_well two
check "no lease is left" until_true no_lease

case_of "one that does nothing yields, and comes back for its next call"
mkfifo "$folder/go"
sleep 600 >"$folder/go" & # keeps it open
started+=($!)
work idle 1200MiB --mib 4 --rounds 3 --ready <"$folder/go"
until_true grep -q ready "$folder/idle.out" || fail "it does not run: $(cat "$folder/idle.err")"
check "it stays where it is while nobody wants its place" until_true holds resident 1
work other 1200MiB --mib 4 --rounds 20 --pause 10
ends_well other
echo >"$folder/go"
ends_well idle

if [ -x "$programs/waits_for_calls" ]; then
  case_of "one whose GPU waits nearly always for the program's own next call lets others have their turns"
  until_true no_lease
  "$bin/gpupool" run --transport "$transport" --memory 1200MiB -- "${launcher[@]}" "$programs/waits_for_calls" --gap 20 \
    --until "$folder/waits.end" >"$folder/waits.out" 2>"$folder/waits.err" &
  pid[waits]=$!
  started+=($!)
  until_true grep -q waits "$folder/waits.out" || fail "it does not run: $(cat "$folder/waits.err")"
  work other 1200MiB --mib 4 --until "$folder/waits.end" --pause 10
  check "both have their turns: $(gpupool leases)" until_true has_turned 6
  touch "$folder/waits.end"
  ends_well waits
  ends_well other
fi

case_of "one that does nothing is killed while it is aside"
until_true no_lease
work idle 1200MiB --mib 4 --rounds 3 --ready <"$folder/go"
until_true grep -q ready "$folder/idle.out" || fail "it does not run: $(cat "$folder/idle.err")"
work other 1200MiB --mib 4 --rounds 100000 --pause 10
check "it is aside: $(gpupool leases)" until_true holds aside 1
kill -KILL "$(pgrep -P "${pid[idle]}" steady_work)"
wait "${pid[idle]}"
check "one lease is left: $(gpupool leases)" until_true holds resident 1
kill -KILL "$(pgrep -P "${pid[other]}" steady_work)"
wait "${pid[other]}"
check "no lease is left" until_true no_lease

case_of "a suspended lease takes no turns, and a resumed one does"
work one 1200MiB --mib 4 --rounds 100000 --pause 10
until_true holds resident 1
lease=$(lease_ids)
run gpupool suspend "$lease"
check "suspend: $status $err" test "$status" -eq 0
work two 1200MiB --mib 4 --until "$folder/two.end" --pause 10
until_true holds resident 1 || fail "the other one does not run: $(cat "$folder/two.err")"
check "the first one is suspended: $(gpupool leases)" has "$(gpupool leases)" suspended
run gpupool resume "$lease"
check "resume, although there is no room: $status $err" test "$status" -eq 0
touch "$folder/two.end"
ends_well two
check "it has its turn: $(gpupool leases)" until_true holds resident 1
kill -KILL "$(pgrep -P "${pid[one]}" steady_work)"
wait "${pid[one]}"
until_true no_lease

case_of "leases that take turns move to a server where they do not, and have a GPU for themselves"
until_true no_lease
GPUPOOL_SERVER_OVERCOMMIT=1.0 SERVER_GPUS=2 start_server other
place_of() { gpupool leases --json | python3 -c 'import json, sys
print(next((one["server"] for one in json.load(sys.stdin) if one["id"] == sys.argv[1]), ""))' "$1"; }
are_at() { [ "$(gpupool leases | grep -cE "^[0-9a-f]{8} +$1 ")" -eq "$2" ]; } # are_at SERVER COUNT
rm -f "$folder/end"
terms=(--server node --share 30%)
work one 1200MiB --mib 4 --until "$folder/end" --pause 10
until_true holds resident 1
first=$(lease_ids)
terms=(--server node)
work two 1200MiB --mib 4 --until "$folder/end" --pause 10
work idle 1200MiB --mib 4 --rounds 3 --ready <"$folder/go"
until_true grep -q ready "$folder/idle.out" || fail "it does not run: $(cat "$folder/idle.err")"
check "they take turns: $(gpupool leases)" until_true has_turned 3
run gpupool migrate --to node "$first"
check "not to other GPUs of their server: $status" test "$status" -eq 1
check "the reason: $err" has "$err" "take turns on the GPUs that they have"
run gpupool migrate --to other "$first"
if [ "$transport" = shm ]; then
  check "not in shared memory: $status" test "$status" -eq 1
  check "the reason: $err" has "$err" "shares memory"
else
  check "moved: $status $err" test "$status" -eq 0
  check "it is there: $(gpupool leases)" test "$(place_of "$first")" = other
  check "it takes no turns there: $(gpupool leases)" until_true holds resident 1
  run gpupool drain node
  check "one more fits there, and one does not: $status $out $err" test "$status" -eq 1
  check "two of three have moved: $(gpupool leases)" are_at other 2
  check "why one stays: $out" has "$out" "stays: "
  gpupool uncordon node >/dev/null || fail "uncordon"
fi
touch "$folder/end"
echo >"$folder/go"
for name in one two idle; do ends_well "$name"; done
check "no lease is left: $(gpupool leases)" until_true no_lease
kill "${servers[other]}"
wait "${servers[other]}"
terms=()

case_of "a share that is not there any more is refused"
terms=(--share 75%)
work one 600MiB --mib 4 --rounds 100000 --pause 10
until_true holds resident 1
run "$bin/gpupool" run --transport "$transport" --memory 600MiB --share 50% -- "${steady_work[@]}"
check "refused: $status" test "$status" -ne 0
check "the reason: $err" has "$err" "only 25% of its time is not promised to others"
kill -KILL "$(pgrep -P "${pid[one]}" steady_work)"
wait "${pid[one]}"
terms=()

case_of "the server is killed while one is aside" # readopted_aside.sh has the rest
until_true no_lease
work one 1200MiB --mib 4 --until "$folder/last" --pause 10
work two 1200MiB --mib 4 --until "$folder/last" --pause 10
until_true has_turned 2
kill -KILL "$(pid_of server)"
check "the next one gives both their turns: $(gpupool leases)" until_true has_turned 2
touch "$folder/last"
ends_well one
ends_well two
check "no lease is left" until_true no_lease
down
