#!/bin/bash
# What the client library shows to the process that loads it: the driver's names and gpupool's own mark, and no library
# but the C library's own.
#   exports_test.sh lib/gpupool/libcuda.so.1 schema/names.def
set -euo pipefail
library=$1 names=$2
expected=$(sed -n 's/^NAME(\(.*\))$/\1/p' "$names"; echo gpupoolClientVersion)
exported=$(nm -D --defined-only "$library" | awk '{ print $3 }')
status=0
if ! difference=$(diff <(sort <<<"$expected") <(sort <<<"$exported")); then
  printf 'names expected (<) and exported (>):\n%s\n' "$difference"
  status=1
fi
count=$(grep -c '^cu' <<<"$exported")
[ "$count" -eq 637 ] || { echo "$count functions, not 637"; status=1; }
# Their signatures are cuda.h's; that they are functions is visible here.
if others=$(nm -D --defined-only "$library" | grep ' cu' | grep -v ' [iT] '); then
  printf 'not functions:\n%s\n' "$others"
  status=1
fi
if foreign=$(ldd "$library" | grep -Ev 'linux-vdso|ld-linux|lib(c|m|dl|rt|pthread)\.so'); then
  printf 'needs more than the C library:\n%s\n' "$foreign"
  status=1
fi
exit $status
