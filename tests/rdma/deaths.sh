#!/bin/bash
# In the virtual machine: a worker, then a client, of a session over RDMA is killed (SIGKILL) while data is under way; the
# other side must know within 2 s, and say why, and be gone soon after: ending a process takes a translated machine a
# second or two by itself. Prints the times.
#   deaths.sh BIN     build/release/bin; the programs are beside it
set -uo pipefail
bin=$1
export GPUPOOL_STATE=/run/pool XDG_CACHE_HOME=/run/cache GPUPOOL_SOFT_MEMORY=512MiB GPUPOOL_SERVER_HANDSHAKE_TIME=20s
unset GPUPOOL_MANAGER GPUPOOL_CONFIG UCX_TLS
mkdir -p "$XDG_CACHE_HOME"
bound_ms=3000  # of an emulated machine
look_ms=150
failed=0
here=$(mktemp -d)
now() { date +%s%3N; }
"$bin/gpupool" up --detach --software 1 --transport ucx --network-wire rdma --listen 10.77.0.2 --wait 3m --warm 1 || exit 1

# Runs copies until they are stopped; sets runner, program (the process) and worker.
start() {
  GPUPOOL_STATS=1 "$bin/gpupool" run --transport ucx --memory 256MiB --wait 2m -- "$(dirname "$bin")/programs/copy_sizes" \
    >"$here/output" 2>&1 &
  runner=$!
  worker=""
  for _ in $(seq 600); do
    for candidate in $(awk '{ print $2 }' "$GPUPOOL_STATE/pool.processes" | xargs -n 1 pgrep -P); do
      ! readlink "/proc/$candidate/fd/1" | grep -q gpupool-output || worker=$candidate
    done
    # Bytes cross the device: more than set-up takes.
    [ -z "$worker" ] || [ "$(cat /sys/class/infiniband/rxe0/ports/1/hw_counters/rcvd_pkts)" -lt $((before + 2000)) ] || break
    sleep 0.1
  done
  program=$(pgrep -f 'programs/copy_sizes$' | tail -n 1)
  [ -n "$worker" ] && [ -n "$program" ] && kill -0 "$program" && return
  echo "FAIL: the program did not come to copy: $(cat "$here/output")"
  exit 1
}
gone() { [ ! -e "/proc/$1" ] || grep -q '^State:.*Z' "/proc/$1/status" 2>/dev/null; }
told() { grep -q '^gpupool: the GPU server is gone' "$here/output"; }
# Waits until a command ($1) succeeds, and prints what that means and how long it took since $began; at most $3 ms. A look
# takes the translated machine $look_ms where nothing else runs. Beside other work it takes longer, and so does all that is
# waited for: then the looks count.
await() {
  local looks=0 took=0
  until $1 || { [ $took -gt $((2 * $3)) ] && [ $looks -gt $((2 * $3 / look_ms)) ]; }; do
    sleep 0.02
    looks=$((looks + 1)) took=$(($(now) - began))
  done
  took=$(($(now) - began))
  echo "$2 after $took ms, $looks looks"
  [ $took -le "$3" ] || [ $looks -le $(($3 / look_ms)) ] || { echo "FAIL: more than $3 ms"; failed=1; }
}

before=$(cat /sys/class/infiniband/rxe0/ports/1/hw_counters/rcvd_pkts)
start
began=$(now)
kill -KILL "$worker"
await told "worker killed: the program was told" $bound_ms
await "gone $program" "worker killed: the program had ended" $((3 * bound_ms))
wait "$runner"
status=$?
grep -v stats "$here/output" | tail -n 3
if [ $status -eq 0 ] || ! grep -q 'gpupool:' "$here/output"; then
  echo "FAIL: exit status $status, and no reason: $(cat "$here/output")"
  failed=1
fi

before=$(cat /sys/class/infiniband/rxe0/ports/1/hw_counters/rcvd_pkts)
start
began=$(now)
kill -KILL "$program"
await "gone $worker" "program killed: its worker had ended" $bound_ms
wait "$runner" 2>/dev/null
"$bin/gpupool" down || failed=1
exit $failed
