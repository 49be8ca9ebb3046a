#!/bin/bash
# A program's code crosses to a server once: a second process that loads the same 6 MiB sends less than 1 MiB, and so
# does the first one when it loads them again; code the server does not know is sent.
#   modules_cross_once.sh path/to/gpupool shm|ucx path/to/large_module
set -euo pipefail
gpupool=$1 transport=$2 program=$3

# Bytes of calls that one run sent.
sent() {
  local errors status=0
  errors=$(GPUPOOL_STATS=1 "$gpupool" run --transport "$transport" --memory 1GiB --wait 2m -- ${GPUPOOL_TEST_LAUNCHER:-} "$program" --nonce "$1" \
    2>&1 >/dev/null) || status=$?
  if [ $status -ne 0 ]; then
    printf 'exit status %d:\n%s\n' $status "$errors" >&2
    return 1
  fi
  sed -n 's/^gpupool stats: .* \([0-9]*\) bytes of frames$/\1/p' <<<"$errors"
}

nonce=$((RANDOM * 32768 + RANDOM))
first=$(sent $nonce)
second=$(sent $nonce)
echo "$transport: the first process sent $first bytes, the second $second"
[ "$first" -gt $((6 << 20)) ] && [ "$first" -lt $((7 << 20)) ] && [ "$second" -lt $((1 << 20)) ]
