#!/bin/bash
# Servers, programs and the tool are given three addresses of their manager, at the first of which nobody listens. Then the
# manager's machine is lost: another manager is started at the third address with a copy of the store. Sessions go on.
#   addresses.sh BIN LIBRARY FIRST_ERROR
. "$(dirname "$0")/../errors/common.sh"
mkdir -p "$folder/first" "$folder/second"
read -r nobody first second < <(python3 -c '
import socket
free = [socket.socket() for _ in range(3)]
for one in free: one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in free))')
export GPUPOOL_MANAGER=127.0.0.1:$nobody,127.0.0.1:$first,127.0.0.1:$second
ttl=8

start_manager() { # NAME PORT
  background "$bin/gpupool-manager" --config /dev/null --listen "127.0.0.1:$2" --store "$folder/$1/manager.db" \
    >"$folder/$1.log" 2>&1
  manager=$!
  until_true listens "$2" || fail "the $1 manager does not come: $(cat "$folder/$1.log")"
}
listens() { GPUPOOL_MANAGER=127.0.0.1:$1 gpupool devices >/dev/null 2>&1; }
eventually() { until_true "$@" || until_true "$@" || until_true "$@" || until_true "$@"; }
leases() { gpupool leases --json | grep -o '"id": *"[0-9a-f]*"' | sort; }
has_leases() { [ "$(leases 2>/dev/null)" = "$1" ]; }
two_leases() { [ "$(leases 2>/dev/null | wc -l)" = 2 ]; }
node_is_alive() { gpupool servers 2>/dev/null | grep -q '^node *alive'; }
# launch NAME COMMAND...: in the background, until $folder/NAME.end is there.
declare -A launched
launch() {
  local name=$1
  shift
  "$@" "${first_error[@]}" --device 100 --until "$folder/$name.end" >"$folder/$name.out" 2>"$folder/$name.err" &
  launched[$name]=$!
  started+=($!)
  until_true grep -q ready "$folder/$name.out" || fail "$name does not run: $(cat "$folder/$name.err")"
}

case_of "nobody listens at the first address"
start_manager first "$first"
SERVER_GPUS=1 start_server node
export GPUPOOL_MEMORY=512MiB GPUPOOL_TTL=${ttl}s
launch wrapped "$bin/gpupool" run --
launch alone env LD_LIBRARY_PATH="$library"
check "two leases: $(leases)" until_true two_leases
before=$(leases)

case_of "the manager is restored at another address"
kill -TERM "$manager"
wait "$manager"
cp -a "$folder/first/." "$folder/second"
start_manager second "$second"
check "the server joins it: $(gpupool servers)" eventually node_is_alive
check "it has the leases: $(leases), before: $before" eventually has_leases "$before"
sleep $((ttl + 6)) # whatever was not renewed is over: time to live, drift, kill time
check "they are renewed: $(leases), before: $before" has_leases "$before"
run wrapped
check "another program gets a lease: $status $err" test "$status" -eq 0
ends_well wrapped
ends_well alone
check "nothing is left: $(leases)" until_true has_leases ""
finish
