#!/bin/bash
# walls_test.sh CMAKE SOURCE: a forbidden include fails the step before compilation, a permitted one does not.
cmake=$1 source=$2
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
failed=0
# includes EXPECTED LINE [FILE]: what the step says to a file of client/ with that line.
includes() {
  rm -rf "$dir/client"
  mkdir -p "$dir/client/calls" "$dir/client/memory" "$dir/client/tests"
  printf '%s\n' '#include <string>' '#include "client/session.h"' "$2" > "$dir/client/${3:-calls/one.cpp}"
  if "$cmake" -DSOURCE="$dir" -DPART=client "-DMAY=schema;transports;base" "-DLAYERS=streams[.];memory/;calls/" \
    -P "$source/cmake/walls.cmake" 2> "$dir/said"
  then said=permitted; else said=refused; fi
  [[ $said == "$1" ]] || { echo "$2: $said, expected: $1"; cat "$dir/said"; failed=1; }
}
includes permitted '#include "schema/rows.h"'
includes permitted '#include "base/log.h"'
includes permitted '// #include "server/driver.h"'
includes refused '#include "server/driver.h"'
includes refused '  #  include <pool-manager/model.h>'
includes refused '#include "../../server/driver.h"'
includes refused '#include "tests/support/catch.h"'
grep -q 'client/calls/one.cpp includes tests/support/catch.h' "$dir/said" || { echo "the file is not named"; failed=1; }
# Layers, the lowest first; what belongs to none is below them.
includes permitted '#include "client/memory/host.h"'
includes permitted '#include "client/memory/host.h"' memory/device.cpp
includes permitted '#include "client/streams.h"' memory/device.cpp
includes permitted '#include "client/memory/host.h"' tests/host_test.cpp
includes refused '#include "client/memory/host.h"' streams.h
includes refused '#include "client/streams.h"' session.cpp
includes refused '#include "client/calls/batch.h"' memory/device.cpp
tr -s ' \n' ' ' < "$dir/said" | grep -q 'memory/device.cpp includes client/calls/batch.h, which is of a higher layer' ||
  { echo "the layer is not named"; failed=1; }
exit $failed
