#!/bin/bash
# A lease that is held in files, and restored where its first server is gone for good: on another one that has the same
# folder. And a protected one: it is held and restored, and its programs survive their workers before and after that.
. "$(dirname "$0")/../errors/common.sh"
programs=$(dirname "$3")
checkpoints=$folder/checkpoints
mkdir "$checkpoints"
export GPUPOOL_PROTECT_SILENCE=30s # a busy machine's servers are silent, too

lease_id() { gpupool leases --json | grep -o '"id": *"[0-9a-f]*"' | grep -o '[0-9a-f]\{8,\}' | head -1; }
is_at() { [ "$(gpupool leases | awk -v id="${lease:0:8}" '$1 == id { print $2 }')" = "$1" ]; }
is_held() { gpupool leases | grep -q "^${lease:0:8} .* held "; }
nothing_left() { ! gpupool leases | grep -Eq '^[0-9a-f]{8}' && ! gpupool devices | grep -Eq '^(node|second) .* leased '; }
has_left() { grep -q "lease $lease.* revoked" "$folder/first.log"; }
# heard_since MS: the manager has had a beat of the first server since then, and so all that it said before.
heard_since() {
  local now age
  now=$(date +%s%3N)
  age=$(gpupool servers --json | python3 -c 'import json, sys
print(next(one["lastBeatMs"] for one in json.load(sys.stdin) if one["name"] == "first"))')
  [ $((now - age)) -gt "$1" ]
}
# launch WORDS...: steady_work until it is told to end, in a lease of these options. Sets program and lease.
work=(--mib 32 --pause 2)
launch() {
  : >"$folder/program.out" # not what the one before said
  rm -f "$folder/end"
  "$bin/gpupool" run --memory 512MiB "$@" -- "${launcher[@]}" "$programs/steady_work" "${work[@]}" --until "$folder/end" --ready \
    >"$folder/program.out" 2>"$folder/program.err" </dev/null &
  program=$!
  started+=("$program")
  until_true grep -q ready "$folder/program.out" || fail "the program does not run: $(cat "$folder/program.err")"
  lease=$(lease_id)
}
ends_right() {
  touch "$folder/end"
  wait "$program"
  status=$?
  check "exit status $status: $(cat "$folder/program.out" "$folder/program.err")" test "$status" -eq 0
  check "it is right: $(cat "$folder/program.out")" test "$(tail -1 "$folder/program.out")" = PASS
  check "nothing is left: $(gpupool leases; gpupool devices)" until_true nothing_left
}
# rest METHOD PATH [BODY]: fills out and status, 0 for an answer below 400.
rest() {
  out=$(python3 - "$port" "$@" <<'EOS'
import http.client, sys
port, method, path, *body = sys.argv[1:]
connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
connection.request(method, path, body[0] if body else None, {"Content-Type": "application/json"} if body else {})
answer = connection.getresponse()
print(answer.read().decode())
sys.exit(answer.status >= 400)
EOS
  )
  status=$?
}
state() { grep -o '"state": *"[a-z]*"' <<<"$out" | grep -o '[a-z]*"$' | tr -d '"'; }
restored() { # restored WORDS...: it may be that a server has not confirmed yet that the lease has left it
  run gpupool restore "$@"
  [ "$status" -eq 0 ]
}
restored_by_rest() { # restored_by_rest FOLDER: likewise
  rest POST "/v1/leases/$lease/restore" "{\"folder\": \"$1\", \"server\": \"second\"}"
  [ "$status" -eq 0 ]
}

up --http-listen 127.0.0.1:0
port=$(sed -n 's/.*REST on [^ ]*, port \([0-9]*\).*/\1/p' "$GPUPOOL_STATE/manager.log" | tail -1)
start_server first --checkpoint-folder "$checkpoints"
first=${servers[first]}
start_server second --checkpoint-folder "$checkpoints"

case_of "a program for which shared memory was asked stays where that is"
launch --transport shm --server first
run gpupool checkpoint --hold "$lease" shared
check "refused: $out" test "$status" -eq 1
check "the reason: $err" has "$err" "shares memory with this server"
check "nothing is written: $(ls -A "$checkpoints")" test -z "$(ls -A "$checkpoints")"
check "the lease stays" is_at first
ends_right

case_of "a program that shares memory with its server goes on at another one, over the network, and comes back to it"
launch --server first
run gpupool checkpoint --hold "$lease" sunday
check "held: $status $out $err" test "$status" -eq 0
check "it has left its server: $(cat "$folder/first.log")" until_true has_left
check "restored: $err" until_true restored --to second "$lease" sunday
check "it is there: $(gpupool leases)" is_at second
check "over the network: $(tail -5 "$folder/second.log")" until_true grep -q "comes over ucx" "$folder/second.log"
run gpupool migrate "$lease"
check "moved: $status $err" test "$status" -eq 0
check "over shared memory: $(tail -5 "$folder/second.log")" until_true grep -q "comes over shm" "$folder/second.log"
ends_right
rm -r "$checkpoints/sunday"

case_of "the server is gone for good, and the lease goes on at another one"
launch --transport ucx --server first
run gpupool checkpoint --hold "$lease" monday
check "held: $status $out $err" test "$status" -eq 0
check "it has left its server: $(cat "$folder/first.log")" until_true has_left
check "the manager has heard that" until_true heard_since "$(date +%s%3N)"
kill -KILL "$first"
wait "$first" 2>/dev/null
check "it is held" is_held
run gpupool restore --wait 0s "$lease" monday
check "not where it was: $out" test "$status" -eq 1
check "the reason: $err" has "$err" "first: "
GPUPOOL_SOFT_NAME="another model" start_server model --checkpoint-folder "$checkpoints"
GPUPOOL_SOFT_DRIVER=13010 start_server driver --checkpoint-folder "$checkpoints"
for foreign in model driver; do
  run gpupool restore --wait 0s --to "$foreign" "$lease" monday
  check "not on another $foreign: $out" test "$status" -eq 1
  check "the reason: $err" has "$err" "is another model or has another driver"
  check "it is held as before" is_held
  kill "${servers[$foreign]}"
  wait "${servers[$foreign]}"
done
run gpupool restore --to node "$lease" monday
check "not where there is no such folder: $out" test "$status" -eq 1
check "the reason: $err" has "$err" "node has no --checkpoint-folder"
check "it is held as before" is_held
check "restored: $err" until_true restored --to second "$lease" monday
check "it is there: $(gpupool leases)" is_at second
run gpupool migrate "$lease"
check "it can be moved: $status $err" test "$status" -eq 0
run gpupool checkpoint --hold "$lease" tuesday
check "and held again: $status $err" test "$status" -eq 0
check "restored: $err" until_true restored "$lease" tuesday
ends_right

case_of "over REST"
launch --transport ucx --server second
rest POST "/v1/leases/$lease/checkpoint" '{"folder": "copies"}'
check "a checkpoint of a program that runs: $out" test "$status" -eq 0
check "of one session" grep -q '"sessions": *1' <<<"$out"
check "it runs on: $out" test "$(state)" = active
rest POST "/v1/leases/$lease/hold" '{"folder": "copies"}'
check "that folder is there: $out" test "$status" -eq 1
for again in first second; do # it may be repeated
  rest POST "/v1/leases/$lease/hold" '{"folder": "thursday"}'
  check "held, for the $again time: $out" test "$status$(state)" = 0held
done
rest GET "/v1/leases/$lease"
check "it is held: $out" test "$(state)" = held
rest POST "/v1/leases/$lease/restore" '{"folder": "friday"}'
check "not from another folder: $out" test "$status" -eq 1
check "restored: $out" until_true restored_by_rest thursday
check "it runs: $out" test "$(state)" = active
ends_right

case_of "a protected program: its workers die, before it was held and after"
worker() { # of the only session, on that server
  awk '/session [0-9a-f]+: (began,|comes from another server as epoch)/ { sub(/.*worker /, ""); sub(/,.*/, ""); last = $0 } END { print last }' "$folder/second.log"
}
kept() { [ "$(grep -c "is kept" "$folder/second.log")" -gt "$before" ]; }
await_checkpoint() {
  before=$(grep -c "is kept" "$folder/second.log")
  check "a checkpoint is kept: $(tail -3 "$folder/second.log")" until_true kept
}
dies() {
  local was
  was=$(worker)
  kill -KILL "$was"
  check "another worker has it" until_true eval "[ \"\$(worker)\" != $was ]"
}
work=(--mib 1 --pause 200) # its GPU is idle now and then, for it is checkpointed only then
launch --transport ucx --server second --protect --protect-interval 1s
await_checkpoint
dies
await_checkpoint
run gpupool checkpoint --hold "$lease" wednesday
check "held: $status $out $err" test "$status" -eq 0
check "restored: $err" until_true restored "$lease" wednesday
await_checkpoint
dies
ends_right

case_of "the whole pool is taken down while a lease is held, and another one has just been released"
gone() { ! kill -0 "$1" 2>/dev/null; }
work=(--mib 32 --pause 2)
launch --transport ucx --server second
released=$program
run gpupool checkpoint --hold "$lease" released
check "held: $status $out $err" test "$status" -eq 0
run gpupool release "$lease"
check "released: $status $out $err" test "$status" -eq 0
check "its program ends: $(cat "$folder/program.err")" until_true gone "$released"
check "it says why: $(cat "$folder/program.err")" grep -q "the lease has ended" "$folder/program.err"
launch --transport ucx --server second
run gpupool checkpoint --hold "$lease" friday
check "held: $status $out $err" test "$status" -eq 0
run gpupool down
check "it is down: $status $out $err" test "$status" -eq 0
check "and says what ends: $out" has "$out" "1 lease that is held in files ends, and its programs; it cannot be restored"
check "its program ends: $(cat "$folder/program.err")" until_true gone "$program"
check "it says why: $(cat "$folder/program.err")" grep -q "the lease has ended" "$folder/program.err"
