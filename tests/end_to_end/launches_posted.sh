#!/bin/bash
# Repeats of a launch are posted, also with packed parameters and with attributes that have garbage where no value is:
# of two times 500 launches few are awaited.
#   launches_posted.sh path/to/gpupool shm|ucx path/to/launch_repeats
set -euo pipefail
gpupool=$1 transport=$2 program=$3

status=0
run=("$gpupool" run --transport "$transport" --memory 1GiB --wait 2m -- ${GPUPOOL_TEST_LAUNCHER:-} "$program")
said=$(GPUPOOL_STATS=1 "${run[@]}" 2>&1) || status=$?
echo "$said"
[ $status -eq 0 ]
awaited=$(sed -n 's/^gpupool stats: *awaited sessionLaunch \([0-9]*\)$/\1/p' <<<"$said")
echo "$transport: $awaited of 1000 launches were awaited"
[ "$awaited" -gt 0 ] && [ "$awaited" -le 10 ]
