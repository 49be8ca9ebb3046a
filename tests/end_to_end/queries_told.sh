#!/bin/bash
# Over a network, queries of events are round trips only at first, and so is asking for what kernels wrote to mapped
# memory that has not changed.
#   queries_told.sh path/to/gpupool ucx path/to/queried_events
set -euo pipefail
gpupool=$1 transport=$2 program=$3

status=0
run=("$gpupool" run --transport "$transport" --memory 1GiB --wait 2m -- ${GPUPOOL_TEST_LAUNCHER:-} "$program" --quiet)
said=$(GPUPOOL_STATS=1 "${run[@]}" 2>&1) || status=$?
echo "$said"
[ $status -eq 0 ]
awaited() {
  local number
  number=$(sed -n "s/^gpupool stats: *awaited $1 \([0-9]*\)$/\1/p" <<<"$said")
  echo "${number:-0}"
}
echo "$transport: behind 500 launches $(awaited cuEventQuery) queries and $(awaited sessionMirrorCollect) looks were awaited"
[ "$(awaited cuEventQuery)" -le 250 ] && [ "$(awaited sessionMirrorCollect)" -le 250 ]
