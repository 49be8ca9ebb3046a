#!/bin/bash
# walls_test.sh CMAKE SOURCE: a forbidden include fails the step before compilation, a permitted one does not.
cmake=$1 source=$2
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
mkdir -p "$dir/client/calls"
failed=0
# includes EXPECTED LINE: what the step says to a file of client/ with that line.
includes() {
  printf '%s\n' '#include <string>' '#include "client/session.h"' "$2" > "$dir/client/calls/one.cpp"
  if "$cmake" -DSOURCE="$dir" -DPART=client "-DMAY=schema;transports;base" -P "$source/cmake/walls.cmake" 2> "$dir/said"
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
exit $failed
