#!/bin/bash
# `gpupool up`, `down` and what lies between, with the real manager and server, and workers that only pretend.
#   cli_test.sh BIN DRIVER VERBS NVML  BIN: gpupool, gpupool-manager, gpupool-server, fake_worker, fake_application
#                                    VERBS, NVML: the libraries that stand for libibverbs and for NVIDIA's NVML
set -u
bin=$1 driver=$2 verbs=$3 nvml=$4
folder=$(mktemp -d /tmp/gpupool-cli-XXXXXX)
export GPUPOOL_SERVER_DEVICE_LOCKS=$folder  # the fake driver's GPUs are not this machine's
export GPUPOOL_STATE=$folder/pool GPUPOOL_LIBRARY_DIR=$folder/lib GPUPOOL_SERVER_WORKER=$bin/fake_worker
export GPUPOOL_SERVER_WALLS=off  # pretended workers put up none
unset GPUPOOL_MANAGER GPUPOOL_LOG
mkdir "$folder/lib" && : > "$folder/lib/libcuda.so.1"
failures=0 case=start

say() { printf '%s: %s\n' "$case" "$*"; }
check() {  # check TEXT COMMAND...: the command succeeds
  local text=$1; shift
  "$@" || { say "FAILED: $text"; failures=$((failures + 1)); }
}
has() { [[ $1 == *"$2"* ]] || { printf '%s\n' "--- this has no \"$2\":" "$1" ---; return 1; }; }
gpupool() { timeout 60 "$bin/gpupool" "$@" 2>&1; }
up() { gpupool up --detach --name node --driver "$driver" "$@"; }
# The processes of this test's pools: each has the state directory on its command line, or is a worker of one that has.
processes() { pgrep -f "$folder/pool" | grep -vx $$; }
until_true() { for _ in $(seq 100); do "$@" && return 0; sleep 0.1; done; return 1; }
nothing_left() {
  [ ! -e "$GPUPOOL_STATE" ] || { ls -la "$GPUPOOL_STATE"; return 1; }
  [ -z "$(processes)" ] || { ps -fp $(processes); return 1; }
}
pid_of() { awk -v role="$1" '$1 == role { print $2 }' "$GPUPOOL_STATE/pool.processes"; }
# Killed, and no process any more: what it held is free only then.
kill_supervisor() {
  local pid
  pid=$(pid_of supervisor)
  kill -KILL "$pid"
  until_true eval "! kill -0 $pid 2>/dev/null"
}
cleanup() { "$bin/gpupool" down > /dev/null 2>&1; rm -rf "$folder"; }
trap cleanup EXIT

case="help"
for command in up down run lease hold devices servers leases top explain audit events tenants release suspend resume migrate cordon uncordon drain; do
  text=$(gpupool $command --help); check "$command --help" test $? -eq 0
  check "$command --help says all" has "$text" "exit status:"
done
text=$(gpupool frobnicate); check "an unknown command" test $? -eq 2
check "says so" has "$text" "there is no command 'frobnicate'"

case="up and down"
text=$(gpupool down); check "down without a pool is no error" test $? -eq 0
check "and says so" has "$text" "no pool is up"
text=$(gpupool devices); check "devices without a pool" test $? -eq 1
check "names what was tried" has "$text" "unix:$GPUPOOL_STATE/manager.sock"
text=$(up); check "up" test $? -eq 0
check "says what there is" has "$text" "server node with 1 x Fake GPU 0"
check "the directory is private" test "$(stat -c %a "$GPUPOOL_STATE")" = 700
text=$(up); check "up again" test $? -eq 0
check "is told" has "$text" "is up already"
check "devices" has "$(gpupool devices)" "node    0    Fake GPU 0"
check "servers" has "$(gpupool servers)" "alive"
check "top, once" has "$(gpupool top --count 1)" "1 server, 1 alive; 2 GPUs, 0 B of 16.0 GiB leased; 0 leases"
check "devices as JSON" has "$(gpupool devices --json)" '"server": "node"'
check "JSON is JSON" python3 -c 'import json,sys; assert len(json.loads(sys.argv[1])) == 2' "$(gpupool devices --json)"
text=$(gpupool run -- "$bin/fake_application" open); check "run" test $? -eq 0
check "opens a session" has "$text" "session on node by shm, 1 devices, worker says e0"
text=$(gpupool run --gpus 2 -- "$bin/gpupool" leases); check "leases" has "$text" "0,1   whole"
text=$(gpupool run --memory 1GiB -- "$bin/gpupool" leases --json); check "leases as JSON" has "$text" '"memoryBytes": 1073741824'
text=$(gpupool run --share 25% --priority high -- "$bin/gpupool" leases --json)
check "terms as JSON" python3 -c '
import json, sys
assert json.loads(sys.argv[1])[0]["terms"] == {"sharePercent": 25, "priority": "high"}, sys.argv[1]
' "$text"
check "and in words" has "$(gpupool run --share 7 -- "$bin/gpupool" leases -v)" "active  7%     normal    -       -  "
text=$(gpupool run --share 200% -- true); check "a share beyond all" test $? -eq 125
check "says so" has "$text" "--share: '200%' is not a share of a GPU's time"
text=$("$bin/fake_application" hold "$bin/gpupool"); check "hold" test $? -eq 0
text=$(gpupool run -- "$bin/fake_application" open 777); check "other rows are refused" test $? -eq 16
check "naming the client's" has "$text" "call rows 0000000000000777 of gpupool "
check "and the server's" has "$text" " here, 0000000000001234 of gpupool "
text=$(PATH=$bin:$PATH timeout 60 sh -c 'set -e; eval "$(gpupool lease --memory 1GiB 2>/dev/null)"
  fake_application open; fake_application open; gpupool leases; gpupool release "$GPUPOOL_LEASE"')
check "a shell leases" test $? -eq 0
check "its programs use the lease" test "$(grep -c 'session on node by shm, 1 devices' <<< "$text")" = 2
check "which is one" test "$(grep -c ' 1.0 GiB ' <<< "$text")" = 1
"$bin/gpupool" events > "$folder/events" 2>&1 &
events=$!
check "events begins" until_true grep -q ^TIME "$folder/events"
gpupool run --reason 'for events' -- true > /dev/null
check "events sees a lease" until_true grep -q 'granted .*node GPU .*for events' "$folder/events"
check "and its end" until_true grep -q 'released .*node GPU' "$folder/events"
kill -INT $events; wait $events; check "Ctrl-C ends events well" test $? -eq 0
text=$(gpupool down); check "down" test $? -eq 0
check "nothing is left" nothing_left

case="fabric"
echo "mlx5_0 4 9 2" > "$folder/adapters"  # active; the probe for dma-buf says EBADF; two ports
echo "mlx5_1 shut 0 1" >> "$folder/adapters"
FAKE_VERBS=$folder/adapters GPUPOOL_SERVER_FABRIC=$verbs up > /dev/null; check "up" test $? -eq 0
shows() { has "$(gpupool servers -v)" "$1" > /dev/null; }
check "the adapter is shown" until_true shows "mlx5_0       b83f:d203:0011:2233  28.39.1002  -    -     yes"
text=$(gpupool servers -v)
check "with its distances" has "$text" "GPU 0 n/a, GPU 1 n/a"
check "its ports" has "$text" "mlx5_0:2  active  InfiniBand  400 Gbit/s  4096  2"
check "their addresses" has "$text" "mlx5_0:2  0      InfiniBand  fe80::2 (default)"
check "and what is wrong" has "$text" "mlx5_1: cannot be opened: Permission denied"
check "no walls, and why" has "$text" "node lacks walls around its workers: all: --walls is off"
check "--verbose is -v" has "$(gpupool servers --verbose)" "RDMA DEVICE"
plain=$(gpupool servers)
check "servers alone has no fabric" test "$(wc -l <<< "$plain")" = 2
check "JSON is JSON" python3 -c '
import json, sys
server = json.loads(sys.argv[1])[0]
assert server["walls"] == [] and server["missingWalls"] == ["all: --walls is off"], server
first, second = server["fabric"]["devices"]
assert first["name"] == "mlx5_0" and first["dmaBuf"] == "yes" and first["gpuDistances"] == ["n/a", "n/a"], first
assert [port["state"] for port in first["ports"]] == ["active", "active"], first
assert first["ports"][0]["gids"] == [
    {"index": 0, "type": "InfiniBand", "value": "fe80::1", "default": True}], first
assert second["problem"] and not second["ports"], second
' "$(gpupool servers --json)"
sed -i 's/mlx5_0 4/mlx5_0 1/' "$folder/adapters"
begun=$(date +%s%N)
check "a port that goes down is shown" until_true shows "mlx5_0:1  down"
check "within 3 s" test $(($(date +%s%N) - begun)) -lt 3000000000
check "the manager's log tells" grep -q "server node: fabric: mlx5_0 port 1 is down (was active)" "$GPUPOOL_STATE"/*.log
check "and the server's" grep -q "fabric: mlx5_0 port 2 is down (was active)" "$GPUPOOL_STATE"/*.log
sed -i 's/mlx5_0 1/mlx5_0 4/' "$folder/adapters"
check "and when it is up again" until_true shows "mlx5_0:1  active"
: > "$folder/adapters"
check "no adapters, in words" until_true shows "node: no RDMA devices"
gpupool down > /dev/null
GPUPOOL_SERVER_FABRIC=libnosuch.so.7 up > /dev/null; check "up without libibverbs" test $? -eq 0
check "and why there are none" until_true shows "no RDMA devices (no RDMA library: libnosuch.so.7"
gpupool down > /dev/null
check "nothing is left" nothing_left

case="NVLink"
echo "joined 2" > "$folder/gpus"
FAKE_NVML_STATE=$folder/gpus GPUPOOL_SERVER_NVML=$nvml up > /dev/null; check "up" test $? -eq 0
explains() { has "$(gpupool explain --gpus 2)" "$1" > /dev/null; }
check "explain says it" until_true explains "it would be leased now: node GPUs 0,1; joined by NVLink"
check "servers -v" has "$(gpupool servers -v)" "GPU 0      GPU 1"
check "JSON" has "$(gpupool servers --json | tr -d ' \n')" '"nvlinks":[[1],[0]]'
gpupool down > /dev/null
check "nothing is left" nothing_left

case="health"
echo "load 37 memory 1024 temperature 41 power 300400 limit 700000 ecc 3 links 2" > "$folder/gpus"
FAKE_NVML_STATE=$folder/gpus GPUPOOL_SERVER_NVML=$nvml up > /dev/null; check "up" test $? -eq 0
shows() { has "$(gpupool devices -v)" "$1" > /dev/null; }
check "load, memory, temperature, power" until_true shows "37%   1.0 KiB  41C   300 of 700 W  -         3    2        -    free"
check "devices alone has none" test -z "$(gpupool devices | grep LOAD)"
check "JSON has them" python3 -c '
import json, sys
for device in json.loads(sys.argv[1]):
    sample = device["sample"]
    assert sample.pop("ageMs") < 30000, sample
    assert sample == {"gpuPercent": 37, "memoryPercent": 5, "usedBytes": 1024, "totalBytes": 4096, "temperatureC": 41,
                      "powerMilliwatts": 300400, "powerLimitMilliwatts": 700000, "lastXid": 0, "uncorrectedEccErrors": 3,
                      "nvlinksUp": 2}, sample
' "$(gpupool devices --json)"
echo "load 37 xid 31 xid 79" > "$folder/new" && mv "$folder/new" "$folder/gpus"
check "a GPU with an Xid of its own is broken" until_true shows "node GPU 1 is broken: Xid 79: the GPU has fallen off the bus"
check "and which it was" until_true shows "79   broken"
check "what NVML does not say any more is -" until_true shows "37%   -     -"
gpupool down > /dev/null
GPUPOOL_SERVER_NVML=libnosuch.so.7 GPUPOOL_SERVER_CHECKPOINT_FOLDER=/nowhere/c GPUPOOL_SERVER_SUSPEND_FOLDER=/nowhere/s \
  up > /dev/null; check "up without NVML" test $? -eq 0
for option in "checkpoint-folder: /nowhere/c" "suspend-folder: /nowhere/s"; do
  check "the log says that there is no $option" until_true grep -q -e "--$option: No such file or directory" "$GPUPOOL_STATE/server.log"
done
text=$("$bin/gpupool-server" --manager unix:/nowhere --config /dev/null --warm 100000 --check-config 2>&1); check "--warm" test $? -eq 2
check "its bound" has "$text" "--warm: 100000 is more than 256"
check "the log says why" until_true grep -q "no figures of the GPUs: libnosuch.so.7" "$GPUPOOL_STATE/server.log"
check "and there are none" has "$(gpupool devices -v)" "-     -     -     -      -         -    -        -    free"
gpupool down > /dev/null
check "nothing is left" nothing_left

case="two at once"
up > "$folder/first" & first=$!
text=$(up); check "the second" test $? -eq 0
check "finds a pool that is ready" has "$(gpupool run -- "$bin/fake_application" open)" "worker says e0"
wait $first; check "the first" test $? -eq 0
check "one of them waited for the other" has "$text$(cat "$folder/first")" "is up already"
gpupool down > /dev/null
check "nothing is left" nothing_left

case="closed streams"
up > /dev/null
"$bin/gpupool" run -- "$bin/fake_application" open <&- >&- 2>&-
check "run without standard streams" test $? -eq 0
gpupool down > /dev/null

case="foreground"
"$bin/gpupool" up --driver "$driver" > "$folder/output" 2>&1 &
pool=$!
check "it comes up" until_true grep -q "the pool is up" "$folder/output"
kill -TERM $pool; wait $pool; check "SIGTERM ends it well" test $? -eq 0
check "nothing is left" nothing_left

case="deaths" # of a server that leaves no session to the next one; of one that does: tests/sessions/readopted.sh
GPUPOOL_SERVER_RESTART_TIME=0s up > /dev/null
: > "$folder/output"  # before it is looked at: the shell that starts a program in the background may be late
"$bin/gpupool" run -- "$bin/fake_application" sleep 60 > "$folder/output" 2>&1 &
tool=$!
check "a program runs" until_true grep -q ready "$folder/output"
kill -KILL "$(pid_of manager)"
has_alive() { gpupool servers | grep -q alive; }
check "the manager comes back" until_true has_alive
check "with its lease" has "$(gpupool leases)" "fake_application"
check "in its state" has "$(gpupool leases --json)" '"state": "active"'
old=$(pid_of server); kill -KILL "$old"
replaced() { new=$(pid_of server); [ -n "$new" ] && [ "$new" != "$old" ] && has_alive; }
check "the server comes back" until_true replaced
lost() { ! gpupool leases | grep -q fake_application; }
check "without the lease, whose sessions it lost" until_true lost
told() { gpupool audit | grep -q "server-lost .* node .* the manager" && gpupool audit | grep -q "server-alive .* node "; }
check "the log tells of the server" until_true told
check "the holder tells" until_true grep -q "the lease has ended: its server node was restarted" "$folder/output"
kill -TERM $tool; wait $tool; check "the program is its user's" test $? -eq 143

case="released by somebody else"
: > "$folder/output"
"$bin/gpupool" run -- "$bin/fake_application" sleep 60 > "$folder/output" 2>&1 &
tool=$!
check "a program runs" until_true grep -q ready "$folder/output"
lease=$(gpupool leases | awk '/fake_application/ { print $1 }')
text=$(gpupool release 0x"$lease"); check "no such lease" test $? -eq 1
check "says so" has "$text" "there is no lease 0x$lease"
text=$(gpupool release "${lease:0:3}"); check "too few digits" test $? -eq 2
check "says so" has "$text" "4 of its digits at least"
text=$(gpupool claim release nonesuch); check "no such claim" test $? -eq 1
check "says so" has "$text" "'nonesuch' names no claim"
text=$(gpupool release "${lease:0:4}"); check "release" test $? -eq 0
check "says so" has "$text" "$lease"
check "it is over" lost
check "the holder tells" until_true grep -q "the lease has ended: " "$folder/output"
kill -TERM $tool; wait $tool

case="suspend"
text=$(gpupool suspend 0123); check "no such lease" test $? -eq 1
check "says so" has "$text" "there is no lease 0123"
text=$(gpupool suspend); check "no lease" test $? -eq 2
text=$(gpupool resume --server node 0123); check "a lease and a server" test $? -eq 2
text=$(gpupool suspend --drain 2h 0123); check "too long" test $? -eq 2
text=$(gpupool suspend --server nobody); check "no such server" test $? -eq 1
check "says so" has "$text" "there is no server nobody"
text=$(gpupool suspend --server node); check "a server without leases" test $? -eq 0
check "says so" has "$text" "no lease runs on node"
: > "$folder/output"
"$bin/gpupool" run --gpus 2 -- "$bin/fake_application" sleep 60 > "$folder/output" 2>&1 &
tool=$!
check "a program runs" until_true grep -q ready "$folder/output"
lease=$(gpupool leases | awk '/fake_application/ { print $1 }')
text=$(gpupool suspend --drain 1s "$lease"); check "suspend" test $? -eq 0
check "says so" has "$text" "gpupool: lease $lease is suspended"
check "leases shows it" has "$(gpupool leases)" "suspended"
text=$(gpupool devices)
check "devices shows it" has "$text" "suspended"
check "and who" has "$text" "fake_application (suspended)"
check "and what is free" python3 -c '
import json, sys
for device in json.loads(sys.argv[1]):
    assert len(device["suspended"]) == 1 and device["suspended"] == device["leases"], device
    assert 0 < device["memoryBytes"] - device["freeBytes"] <= 1 << 30, device
' "$(gpupool devices --json)"
text=$(gpupool suspend "$lease"); check "again" test $? -eq 0
check "the same answer" has "$text" "gpupool: lease $lease is suspended"
: > "$folder/other"
"$bin/gpupool" run --memory 1GiB -- "$bin/fake_application" sleep 60 > "$folder/other" 2>&1 &
other=$!
check "another program gets the memory" until_true grep -q ready "$folder/other"
text=$(gpupool resume "$lease"); check "no room" test $? -eq 1
check "says who has it" has "$text" "held by"
text=$(gpupool resume --server node); check "nor by its server" test $? -eq 1
check "says which lease" has "$text" "lease $lease cannot be resumed"
gpupool resume --wait 1m "$lease" > "$folder/resumed" & resume=$!
kill -TERM $other; wait $other
wait $resume; check "it waits until there is room" test $? -eq 0
check "says so" has "$(cat "$folder/resumed")" "gpupool: lease $lease runs"
check "it is active" has "$(gpupool leases --json)" '"state": "active"'
text=$(gpupool suspend --server node); check "by its server" test $? -eq 0
check "says which lease" has "$text" "gpupool: lease $lease is suspended"
text=$(gpupool resume --server node); check "and back" test $? -eq 0
check "says which lease" has "$text" "gpupool: lease $lease runs"
check "a lease that runs" has "$(gpupool resume "$lease")" "gpupool: lease $lease runs"
text=$(gpupool suspend "$lease")
kill -TERM $tool; wait $tool; check "a suspended program is its user's" test $? -eq 143
check "and its lease is released" lost

case="cordon"
text=$(gpupool cordon nobody); check "no such server" test $? -eq 1
check "says so" has "$text" "there is no server nobody"
text=$(gpupool uncordon nobody); check "nor to uncordon" test $? -eq 1
check "says so, too" has "$text" "there is no server nobody"
text=$(gpupool uncordon node); check "in service already" test $? -eq 0
text=$(gpupool cordon --reason "a new fan" node); check "cordon" test $? -eq 0
text=$(gpupool servers)
check "servers shows it" has "$text" "alive, cordoned"
check "and why" has "$text" "node is cordoned: a new fan (by the operator (says: $(id -un)@"
check "and since when" has "$text" "s ago)"
check "devices shows it" has "$(gpupool devices)" "cordoned"
text=$(gpupool run -- true); check "nothing is leased" test $? -eq 125
check "for that reason" has "$text" "cordoned by an operator: a new fan"
text=$(gpupool drain node); check "drain of an empty server" test $? -eq 0
check "says so" has "$text" "server node is cordoned and has no leases"
check "the reason is that of before" has "$(gpupool servers)" "node is cordoned: a new fan (by"
text=$(gpupool uncordon node); check "uncordon" test $? -eq 0
text=$(gpupool uncordon node); check "again" test $? -eq 0
text=$(gpupool run -- true); check "in service again" test $? -eq 0

case="drain"
text=$(gpupool drain nobody); check "no such server" test $? -eq 1
check "says so" has "$text" "there is no server nobody"
text=$(gpupool drain); check "no server" test $? -eq 2
text=$(gpupool drain --wait 21d node); check "too long" test $? -eq 2
: > "$folder/output"
"$bin/gpupool" run -- "$bin/fake_application" sleep 60 > "$folder/output" 2>&1 &
tool=$!
check "a program runs" until_true grep -q ready "$folder/output"
lease=$(gpupool leases | awk '/fake_application/ { print $1 }')
text=$(gpupool drain --reason "a new fan" node); check "drain" test $? -eq 1
check "nowhere to go" has "$text" "lease $lease stays: it cannot be moved: there is no other server"
check "says how many" has "$text" "server node is cordoned and has 1 lease still:"
check "and which" has "$text" "$lease"
check "it is cordoned" has "$(gpupool servers)" "alive, cordoned"
text=$(gpupool drain --no-move node); check "without moving" test $? -eq 1
has_not() { [[ $1 != *"$2"* ]]; }
check "says nothing of that" has_not "$text" "stays"
text=$(gpupool drain --wait 1s node); check "not within a second" test $? -eq 1
check "it has waited" has "$text" "waiting for the end of 1 lease"
gpupool suspend "$lease" > /dev/null; check "suspend on a cordoned server" test $? -eq 0
text=$(gpupool drain node); check "a suspended lease is there" test $? -eq 1
check "says so" has "$text" "suspended"
gpupool resume "$lease" > /dev/null; check "and resume" test $? -eq 0
gpupool drain --wait 1m node > "$folder/drained" & drain=$!
check "it waits" until_true grep -q "waiting for the end of 1 lease" "$folder/drained"
kill -KILL "$(pid_of manager)"
check "the manager comes back" until_true has_alive
check "and knows the cordon" has "$(gpupool servers)" "node is cordoned: a new fan"
kill -TERM $tool; wait $tool
wait $drain; check "until the lease has ended" test $? -eq 0
check "says so" has "$(cat "$folder/drained")" "server node is cordoned and has no leases"
old=$(pid_of server); kill -KILL "$old"
check "the server comes back" until_true replaced
check "and is cordoned still" has "$(gpupool servers)" "alive, cordoned"
gpupool uncordon node > /dev/null; check "uncordon" test $? -eq 0

case="migrate"
text=$(gpupool migrate 0123); check "no such lease" test $? -eq 1
check "says so" has "$text" "there is no lease 0123"
text=$(gpupool migrate); check "no lease" test $? -eq 2
text=$(gpupool migrate --drain 2h 0123); check "too long" test $? -eq 2
: > "$folder/output"
"$bin/gpupool" run -- sh -c 'echo ready; exec sleep 60' > "$folder/output" 2>&1 &
tool=$!
check "a program runs" until_true grep -q ready "$folder/output"
lease=$(gpupool leases --json | python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["id"])')
text=$(gpupool migrate "$lease"); check "a lease without a session" test $? -eq 0
check "says so" has "$text" "no session had to be moved; it is on node GPU"
text=$(gpupool migrate --to node8:x "$lease"); check "what is no place" test $? -eq 2
text=$(gpupool migrate --to node8 "$lease"); check "no such server" test $? -eq 1
check "says so" has "$text" "there is no server named node8"
text=$(gpupool migrate --to 7 "$lease"); check "no such GPU" test $? -eq 1
check "says so" has "$text" "node: there is no such GPU"
gpupool suspend "$lease" > /dev/null; check "suspend" test $? -eq 0
text=$(gpupool migrate "$lease"); check "a suspended lease" test $? -eq 1
check "says so" has "$text" "it is suspended, and has to be resumed first"
kill -TERM $tool; wait $tool

case="supervisor killed"
kill_supervisor
text=$(up); check "up again" test $? -eq 0
check "a new pool" has "$text" "the pool is up"
kill_supervisor
text=$(gpupool down); check "down" test $? -eq 0
check "nothing is left" nothing_left

case="down under a program"
up > /dev/null
: > "$folder/output"
"$bin/gpupool" run -- "$bin/fake_application" sleep 60 > "$folder/output" 2>&1 &
tool=$!
check "a program runs" until_true grep -q ready "$folder/output"
gpupool down > /dev/null
check "nothing is left" nothing_left
kill -TERM $tool; wait $tool

case="cannot start"
text=$(gpupool up --detach --driver /no/such/driver --wait 1500ms); check "up fails" test $? -eq 1
check "saying why" has "$text" "the server's last words"
check "in the server's words" has "$text" "/no/such/driver"
check "nothing is left" nothing_left
mkdir -p "$GPUPOOL_STATE" && echo mine > "$GPUPOOL_STATE/notes"
up > /dev/null; gpupool down > /dev/null
check "a stranger's file survives" test "$(cat "$GPUPOOL_STATE/notes")" = mine
check "alone" test "$(ls "$GPUPOOL_STATE")" = notes
rm -r "$GPUPOOL_STATE"
ln -s "$folder/lib" "$GPUPOOL_STATE"
text=$(up); check "a link is not followed" test $? -eq 1
rm "$GPUPOOL_STATE"

case="network"
port=$((20000 + $$ % 10000))
up --transport ucx --port $port > /dev/null; check "up" test $? -eq 0
text=$(GPUPOOL_MANAGER=127.0.0.1:$port gpupool run -- "$bin/fake_application" open); check "run" test $? -eq 0
check "over the network" has "$text" "session on node by ucx"
text=$(gpupool run --transport shm -- "$bin/fake_application" open); check "shm is refused" test $? -eq 13
gpupool down > /dev/null
check "nothing is left" nothing_left

[ $failures -eq 0 ] && echo "all well"
exit $((failures != 0))
