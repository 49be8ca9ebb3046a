# shellcheck shell=bash disable=SC2034,SC2154
# Sourced by the tests of upgrades: servers with a software GPU of 2 GiB each, and programs that run on them.
. "$(dirname "$0")/../errors/common.sh"
other_library=$4
programs=$(dirname "$3")

# server NAME PROGRAM OPTION...: one more server in the pool of $GPUPOOL_MANAGER, with a GPU of its own.
server() { SERVER_PROGRAM=$2 start_server "$1" --warm 1 "${@:3}"; }
# manager PROGRAM: the pool's.
manager() {
  background "$bin/$1" --config /dev/null --socket "$folder/manager.sock" --store memory >"$folder/manager.log" 2>&1
  export GPUPOOL_MANAGER=unix:$folder/manager.sock
  until_true test -S "$folder/manager.sock" || fail "$1 does not come: $(cat "$folder/manager.log")"
}
end_pool() {
  local pid
  for pid in "${started[@]}"; do kill "$pid" 2>/dev/null; done
  wait 2>/dev/null
  started=() servers=()
  rm -rf "$folder/manager.sock"
}
lease_ids() { "$bin/gpupool" leases --json | grep -o '"id": *"[0-9a-f]*"' | grep -o '[0-9a-f]\{8,\}'; }
place() { "$bin/gpupool" leases | awk -v id="${1:0:8}" '$1 == id { print $2 }'; }
is_at() { [ "$(place "$1")" = "$2" ]; }
all_free() { ! "$bin/gpupool" devices --json | grep -o '"freeBytes": *[0-9]*' | grep -qv '2147483648'; }
# launch NAME TOOL LIBRARY OPTION...: first_error with that client library, until $folder/NAME.end is there, by that gpupool.
# Sets launched[NAME] and lease.
declare -A launched
launch() {
  local name=$1 tool=$2 with=$3 before
  shift 3
  rm -f "$folder/$name.end"
  before=$(lease_ids)
  "$bin/$tool" run --memory 512MiB "$@" -- env LD_LIBRARY_PATH="$with" "${first_error[@]}" --device 100 \
    --until "$folder/$name.end" >"$folder/$name.out" 2>"$folder/$name.err" &
  launched[$name]=$!
  started+=($!)
  until_true grep -q ready "$folder/$name.out" || fail "$name does not run: $(cat "$folder/$name.err")"
  lease=$(lease_ids | grep -vxF "${before:-none}")
}
runs() { kill -0 "${launched[$1]}" 2>/dev/null; }
