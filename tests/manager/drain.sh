#!/bin/bash
# Servers that are being drained when the manager is killed: started again it goes on, for the command that waits and for who
# has asked over REST and does not ask again. One program can be moved, one cannot.
#   drain.sh BIN LIBRARY FIRST_ERROR
. "$(dirname "$0")/../errors/common.sh"
port=$((20000 + $$ % 10000))
mkdir -p "$folder/store"
export GPUPOOL_MANAGER=unix:$folder/manager.sock

start_manager() {
  rm -f "$folder/manager.sock"
  background "$bin/gpupool-manager" --config /dev/null --socket "$folder/manager.sock" --store "$folder/store/m.db" \
    --http-listen "127.0.0.1:$port" 2>>"$folder/manager.log"
  manager=$!
  until_true test -S "$folder/manager.sock" || fail "the manager does not come: $(cat "$folder/manager.log")"
}
kill_manager() {
  kill -KILL "$manager"
  wait "$manager" 2>/dev/null
}
# A manager that was started again waits 10 s for its servers.
eventually() { until_true "$@" || until_true "$@" || until_true "$@" || until_true "$@"; }
lease_ids() { "$bin/gpupool" leases --json | grep -o '"id": *"[0-9a-f]*"' | grep -o '[0-9a-f]\{8,\}'; }
place() { "$bin/gpupool" leases | awk -v id="${1:0:8}" '$1 == id { print $2 }'; }
is_at() { [ "$(place "$1")" = "$2" ]; }
moves() { "$bin/gpupool" leases | grep "^${1:0:8}" | grep -q moving; }
any_lease() { lease_ids | grep -q .; }
no_lease() { ! any_lease; }
# launch NAME TRANSPORT: a program on the server node, until $folder/NAME.end is there. Sets launched[NAME] and lease.
declare -A launched
launch() {
  local before
  before=$(lease_ids)
  rm -f "$folder/$1.end"
  "$bin/gpupool" run --transport "$2" --memory 512MiB --ttl 60s --server node -- "${first_error[@]}" --device 100 \
    --until "$folder/$1.end" >"$folder/$1.out" 2>"$folder/$1.err" &
  launched[$1]=$!
  started+=($!)
  until_true grep -q ready "$folder/$1.out" || fail "$1 does not run: $(cat "$folder/$1.err")"
  lease=$(lease_ids | grep -vxF "${before:-none}")
}
says() { grep -Eq "$1" "$folder/drain.out"; }
# drains BODY: over REST. Sets code and answer.
drains() {
  answer=$(python3 - "$port" "$1" <<'EOF'
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
connection.request("POST", "/v1/servers/node/drain", sys.argv[2], {"Content-Type": "application/json"})
response = connection.getresponse()
print(response.status, response.read().decode())
EOF
  )
  code=${answer%% *}
  [ -n "$code" ]
} 2>/dev/null # a manager that does not listen yet
looks() { drains '{"stay": true}'; }
is_drained() { looks && [[ $answer == *'"drained":true'* ]]; }

start_manager
SERVER_GPUS=2 start_server node

case_of "the command waits, and the manager is killed meanwhile"
launch moves ucx
moving=$lease
launch stays shm
staying=$lease
"$bin/gpupool" drain --wait 10m --reason 'a new fan' node >"$folder/drain.out" 2>&1 &
drain=$!
started+=("$drain")
check "there is no room: $(cat "$folder/drain.out")" until_true says "^gpupool: lease ${moving:0:8} stays: "
check "it waits: $(cat "$folder/drain.out")" until_true says "^gpupool: waiting for the end of 2 leases"
kill_manager
sleep 1
check "the command waits for the manager, too: $(cat "$folder/drain.out")" kill -0 "$drain"
start_manager
SERVER_GPUS=2 start_server other
check "there is room now: $(cat "$folder/drain.out")" eventually says "^gpupool: lease ${moving:0:8} moved to other"
check "the lease is there: $(gpupool leases)" is_at "$moving" other
check "the other one is not forgotten: $(cat "$folder/drain.out")" says "^gpupool: lease ${staying:0:8} stays: .*shares memory"
check "nor ended: $(gpupool leases)" is_at "$staying" node
check "the cordon keeps its reason: $(gpupool servers)" has "$(gpupool servers)" "node is cordoned: a new fan"
ends_well stays
wait "$drain"
status=$?
check "the command ends well: $status $(cat "$folder/drain.out")" test "$status" -eq 0
check "and says so: $(cat "$folder/drain.out")" says "^gpupool: server node is cordoned and has no leases"
ends_well moves
check "nothing is left" until_true no_lease
check "uncordon" gpupool uncordon node >/dev/null

case_of "over REST, and nobody asks again"
launch rest ucx
program=$(pgrep -P "${launched[rest]}" first_error)
kill -STOP "$program" # so that its move does not end
drains '{"reason": "a new fan"}'
check "it is begun: $answer" test "$code" = 202
check "a lease moves: $(gpupool leases)" until_true moves "$lease"
kill_manager
kill -CONT "$program"
start_manager
check "the manager answers" until_true looks
check "it goes on: $answer" has "$answer" '"pending":true'
check "and moves the lease: $(gpupool leases)" eventually is_at "$lease" other
check "until the server is drained: $answer" eventually is_drained
ends_well rest

case_of "what has ended does not begin again"
check "uncordon" gpupool uncordon node >/dev/null
launch last ucx
check "cordon" gpupool cordon node >/dev/null
kill_manager
start_manager
check "the manager answers" until_true looks
check "nothing is pending: $answer" has "$answer" '"pending":false'
ends_well last

