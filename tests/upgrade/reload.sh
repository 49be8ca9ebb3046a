#!/bin/bash
# A server whose folder of worker programs changes while it runs: SIGHUP has it look again. A program that came serves clients
# of its version; one that went serves no new ones, and those that run stay.
#   reload.sh BIN LIBRARY FIRST_ERROR OTHER_LIBRARY      OTHER_LIBRARY: folder of a libcuda.so.1 of other call rows
. "$(dirname "$0")/common.sh"
mkdir "$folder/workers"
program=$folder/workers/gpupool-worker-0.0.9
versions() { gpupool servers -v | grep "^$1 serves clients of" | grep -o 'call rows' | grep -c .; }
serves() { [ "$(versions "$1")" = "$2" ]; }
none='no server has a worker program for this client \(call rows [0-9a-f]{16} of gpupool [0-9.]+\)'

manager gpupool-manager
server node gpupool-server --workers "$folder/workers"

case_of "a program that is not there yet"
check "one version is served: $(gpupool servers -v)" serves node 1
run "$bin/gpupool_of_other_rows" run -- true
check "refused: $status $err" one_line "$err" "version mismatch: $none"
launch before gpupool "$library" --transport ucx

case_of "a program comes"
cp "$bin/worker_of_other_rows" "$folder/workers/.new" && mv "$folder/workers/.new" "$program"
check "nobody looks by himself: $(gpupool servers -v)" serves node 1
kill -HUP "${servers[node]}"
check "servers -v shows it: $(gpupool servers -v)" until_true serves node 2
check "the log says it: $(cat "$folder/node.log")" grep -q "worker program $program: for clients of gpupool" "$folder/node.log"
check "a session that ran runs on" runs before
launch came gpupool_of_other_rows "$other_library" --transport ucx
came=$lease
check "a program of that version has a lease: $(gpupool leases)" is_at "$came" node

case_of "it goes again"
rm "$program"
kill -HUP "${servers[node]}"
check "servers -v shows it no more: $(gpupool servers -v)" until_true serves node 1
run "$bin/gpupool_of_other_rows" run -- true
check "no new lease: $status $err" one_line "$err" "version mismatch: $none"
# One of which the manager does not know the version is refused by the server.
run gpupool run --memory 256MiB -- env LD_LIBRARY_PATH="$other_library" "${first_error[@]}"
check "no new session: $status $err" one_line "$err" "server node: version mismatch: call rows"
run gpupool migrate "$came"
check "those that run are not moved: $status" test "$status" -eq 1
check "and it is said why: $err" grep -q "first_error (process [0-9]*): version mismatch: call rows" <<<"$err"
check "they run on" runs came
ends_well came
ends_well before
check "the server was never started again: $(cat "$folder/node.log")" \
  test "$(grep -c 'joined the pool manager' "$folder/node.log")" = 1
check "nothing is left: $(gpupool leases; gpupool devices)" until_true all_free

case_of "a server without such a folder"
server bare gpupool-server --workers none
kill -HUP "${servers[bare]}"
says_so() { grep -q "there is no folder --workers to look at again" "$folder/bare.log"; }
check "says so, and goes on: $(cat "$folder/bare.log")" until_true says_so
check "it serves: $(gpupool servers -v)" serves bare 1
