#!/bin/bash
# Repeats of a call are posted: of the hundreds that a program makes few are awaited, and at least one.
#   calls_posted.sh path/to/gpupool shm|ucx path/to/program CALL MOST
set -euo pipefail
gpupool=$1 transport=$2 program=$3 call=$4 most=$5

status=0
run=("$gpupool" run --transport "$transport" --memory 1GiB --wait 2m -- ${GPUPOOL_TEST_LAUNCHER:-} "$program")
said=$(GPUPOOL_STATS=1 "${run[@]}" 2>&1) || status=$?
echo "$said"
[ $status -eq 0 ]
awaited=$(sed -n "s/^gpupool stats: *awaited $call \([0-9]*\)\$/\1/p" <<<"$said")
echo "$transport: $awaited of hundreds of $call were awaited"
[ "$awaited" -gt 0 ] && [ "$awaited" -le "$most" ]
