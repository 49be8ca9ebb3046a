#!/bin/bash
# In the virtual machine: a pool of one software GPU whose sessions go over RDMA and nothing else, and programs on it.
#   pool.sh serve BIN                                 the pool for the other machine
#   pool.sh here  BIN EXPECTED [name[:status] ...]    a pool and its programs in one machine
#   pool.sh there BIN EXPECTED [name[:status] ...]    the programs, on the pool of the other machine
# BIN: build/release/bin; the programs are beside it. Prints a line for each program: time, bytes moved and copied.
set -uo pipefail
what=$1 bin=$2 expected=${3:-}
shift 2
[ $# -eq 0 ] || shift
export GPUPOOL_STATE=/run/pool XDG_CACHE_HOME=/run/cache GPUPOOL_SOFT_MEMORY=1GiB
export GPUPOOL_SERVER_HANDSHAKE_TIME=20s # translated machines take their time
unset GPUPOOL_MANAGER GPUPOOL_CONFIG UCX_TLS
programs=$(dirname "$bin")/programs
address=10.77.0.1
[ "$what" != here ] || address=10.77.0.2
here=$(mktemp -d)
mkdir -p "$XDG_CACHE_HOME"

up() {
  GPUPOOL_LOG=info "$bin/gpupool" up --detach --software 1 --transport ucx --network-wire rdma --listen $address --wait 3m \
    --warm 1 --name node "$@"
}

if [ "$what" = serve ]; then
  up --port 7600 || exit 1
  echo ready >"$GPUPOOL_VM_SHARE/ready"
  exec sleep 3600
fi
if [ "$what" = here ]; then
  up || exit 1
else
  export GPUPOOL_MANAGER=10.77.0.1:7600
  for _ in $(seq 600); do
    [ ! -e "$GPUPOOL_VM_SHARE/ready" ] || break
    sleep 0.2
  done
fi

failed=0
for entry in "$@"; do
  name=${entry%%:*} status=0
  [ "$name" = "$entry" ] || status=${entry#*:}
  began=$(date +%s%N)
  (cd "$programs" && GPUPOOL_STATS=1 "$bin/gpupool" run --transport ucx --memory 512MiB --wait 2m -- "./$name") \
    >"$here"/output 2>"$here"/errors
  got=$?
  took=$((($(date +%s%N) - began) / 1000000))
  traffic=$(sed -n 's/^gpupool stats: puts and gets: //p' "$here"/errors | tail -1)
  printf '%-20s %6d ms  %s\n' "$name" $took "${traffic:-nothing large}"
  if [ $got -ne "$status" ] || ! cmp -s "$here"/output "$expected/$name.txt"; then
    echo "FAIL: $name: exit status $got, expected $status; its output and what was expected:"
    diff "$here"/output "$expected/$name.txt"
    tail -n 20 "$here"/errors
    failed=1
  fi
done
[ "$what" != here ] || "$bin/gpupool" down || failed=1
[ $# -gt 0 ] || failed=1
exit $failed
