#!/bin/bash
# Runs a library program on a pool of software GPUs and checks how it ends: with PASS, or, where the library has no code
# for such a GPU, by saying which operations failed and status 1; never by a signal.
#   on_software.sh PASS|FAIL command...
ends=$1
shift
output=$("$@" 2>&1)
status=$?
last=${output##*$'\n'}
case $ends:$status:$last in
  PASS:0:PASS | FAIL:1:"FAIL: "*" operations") exit 0 ;;
esac
printf '%s\nexit status %s; expected it to end with %s\n' "$output" "$status" "$ends"
exit 1
