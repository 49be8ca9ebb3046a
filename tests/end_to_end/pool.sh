#!/bin/bash
# The pool that the end-to-end programs run on, as a CTest fixture; GPUPOOL_STATE is its directory.
#   pool.sh up|down path/to/gpupool shm|ucx
set -euo pipefail
step=$1 gpupool=$2 transport=$3
unset GPUPOOL_MANAGER GPUPOOL_CONFIG GPUPOOL_SYNC GPUPOOL_TRACE CUDA_VISIBLE_DEVICES

if [ "$step" = up ]; then
  export XDG_CACHE_HOME=$GPUPOOL_STATE.cache # of this pool alone
  "$gpupool" down >/dev/null # what an interrupted run left
  GPUPOOL_SOFT_MEMORY=4GiB exec "$gpupool" up --detach --software 2 --transport "$transport" --name node
fi

# The last program's may still be on its way: `gpupool run` waits a second for a manager that is slow to store its end.
for ((i = 0; i < 300; ++i)); do
  leases=$("$gpupool" leases 2>&1) && ! grep -q '^[0-9a-f]' <<<"$leases" && break
  sleep 0.1
done
processes=$(awk '{ print $2 }' "$GPUPOOL_STATE/pool.processes")
workers=$(xargs -n 1 pgrep -P <<<"$processes" || true)
"$gpupool" down
rm -rf "$GPUPOOL_STATE.cache"

status=0
if [ "$i" -eq 300 ]; then
  printf 'programs ended, leases did not, or cannot be listed:\n%s\n' "$leases"
  status=1
fi
if [ -e "$GPUPOOL_STATE" ]; then
  printf 'files were left:\n%s\n' "$(ls -lA "$GPUPOOL_STATE")"
  status=1
fi
# Those that ended and were not waited for yet do not count.
if left=$(xargs -rd '\n' ps -o pid,stat,args -p <<<"$(printf '%s\n' $processes $workers)" | grep -v ' Z' | tail -n +2 | grep .); then
  printf 'processes were left:\n%s\n' "$left"
  status=1
fi
exit $status
