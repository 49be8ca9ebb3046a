#!/bin/bash
# The pool that the end-to-end programs run on, as a CTest fixture; GPUPOOL_STATE is its directory.
#   pool.sh up|down path/to/gpupool shm|ucx
set -euo pipefail
step=$1 gpupool=$2 transport=$3
unset GPUPOOL_MANAGER GPUPOOL_CONFIG GPUPOOL_SYNC GPUPOOL_TRACE CUDA_VISIBLE_DEVICES

if [ "$step" = up ]; then
  "$gpupool" down >/dev/null # what an interrupted run left
  GPUPOOL_SOFT_MEMORY=4GiB exec "$gpupool" up --detach --software 2 --transport "$transport" --name node
fi

leases=$("$gpupool" leases)
"$gpupool" down
status=0
# Every lease went with its program, every file and process with the pool. Its processes name its directory.
if grep -q '^node' <<<"$leases"; then
  printf 'leases were left:\n%s\n' "$leases"
  status=1
fi
if [ -e "$GPUPOOL_STATE" ]; then
  printf 'files were left:\n%s\n' "$(ls -lA "$GPUPOOL_STATE")"
  status=1
fi
if left=$(pgrep -af -- "$GPUPOOL_STATE/" | grep -v pool.sh); then
  printf 'processes were left:\n%s\n' "$left"
  status=1
fi
exit $status
