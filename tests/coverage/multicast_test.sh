#!/bin/bash
# Nothing may call cuMulticast*: on a machine that is shared it can put GPUs out of service for everybody. The
# worker, which is all that reaches a real driver, does not know the names, and no source asks for them.
#   multicast_test.sh source-folder path/to/gpupool-worker
set -uo pipefail
source=$1 worker=$2
status=0
if grep -q 'cuMulticast' "$worker"; then
  echo "$worker names cuMulticast*"
  status=1
fi
# The lists of the driver's names, and the test of what they answer, only say that they exist.
if found=$(grep -rnE 'cuMulticast[A-Z]' "$source" --include=* --exclude-dir=build --exclude-dir=.git --exclude-dir=.cache \
  --exclude=names.def --exclude=proc_address.def --exclude=lookup_test.cpp --exclude=\*.md --exclude="$(basename "$0")" -I); then
  printf 'named in:\n%s\n' "$found"
  status=1
fi
exit $status
