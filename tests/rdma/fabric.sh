#!/bin/bash
# In the virtual machine: a server tells of its RDMA device, and of a port that goes down and comes back, within 3 s.
#   fabric.sh BIN
set -u
bin=$1
wire=$(cat /sys/class/infiniband/rxe0/parent)
export GPUPOOL_STATE=/tmp/pool GPUPOOL_LOG=info
fail() { echo "FAILED: $*"; "$bin/gpupool" servers -v; cat "$GPUPOOL_STATE"/*.log; exit 1; }
gpupool() { "$bin/gpupool" "$@"; }
milliseconds() { echo $(($(date +%s%N) / 1000000)); }
# port_is STATE [BOUND]: shown within the bound, in milliseconds. Asking takes part of a second here: one that was asked
# in time counts.
port_is() {
  local begun asked
  begun=$(milliseconds)
  while asked=$(($(milliseconds) - begun)); [ "$asked" -lt "${2:-3000}" ]; do
    gpupool servers -v | grep -qE "rxe0:1 +$1 " || continue
    echo "the port is shown $1 when asked after $asked ms"
    return 0
  done
  return 1
}

gpupool up --detach --software 2 --wait 60s || fail "the pool does not come up"
port_is active 20000 || fail "rxe0 is not shown, or not active"
text=$(gpupool servers -v)
echo "$text"
for part in "RDMA DEVICE" "rxe0  " "GPU 0 n/a, GPU 1 n/a" "rxe0:1" Ethernet "Gbit/s" "$wire" "RoCE v2" \
  "::ffff:10.77.0.2 (default)"; do
  [[ $text == *"$part"* ]] || fail "servers -v has no \"$part\""
done
# No dma-buf in rxe of this kernel; and the row says so.
echo "$text" | grep -qE "^ +rxe0 .* no +GPU 0" || fail "dma-buf is not shown as missing"
gpupool servers --json | python3 -c '
import json, sys
device, = json.load(sys.stdin)[0]["fabric"]["devices"]
port, = device["ports"]
assert device["dmaBuf"] == "no" and device["dmaBufReason"] and device["transport"] == "InfiniBand", device
assert port["mtu"] >= 1024 and port["rateGbps"] > 0 and sum(gid["default"] for gid in port["gids"]) == 1, port
guid = open("/sys/class/infiniband/rxe0/node_guid").read().strip()
assert device["nodeGuid"] == guid, (device["nodeGuid"], guid)
' || fail "the JSON is not right"

for round in 1 2; do
  ip link set "$wire" down
  port_is down || fail "the port is down and not shown so (round $round)"
  ip link set "$wire" up
  port_is active || fail "the port is up again and not shown so (round $round)"
done
grep -h "rxe0 port 1 is down (was active)" "$GPUPOOL_STATE"/*.log || fail "the logs do not tell"
rdma link delete rxe0 || fail "rdma link delete"
begun=$(milliseconds)
until gpupool servers -v | grep -q "no RDMA devices"; do
  [ $(($(milliseconds) - begun)) -lt 5000 ] || fail "the device is gone and still shown"
done
rdma link add rxe1 type rxe netdev "$wire" || fail "rdma link add"
begun=$(milliseconds)
until gpupool servers -v | grep -qE "rxe1:1 +active"; do
  [ $(($(milliseconds) - begun)) -lt 5000 ] || fail "a device that came is not shown"
done
gpupool down
