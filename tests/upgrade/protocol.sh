#!/bin/bash
# Servers, holders and tools of the pool protocol before with this manager, and this one's with a manager of the version to
# come: they join, lease, renew, beat, move and release, while a session runs.
#   protocol.sh BIN LIBRARY FIRST_ERROR OTHER_LIBRARY
. "$(dirname "$0")/common.sh"
alive() { "$bin/$1" servers | grep -Eq "^$2 +alive"; }
no_refusal() { ! grep -h "version mismatch" "$folder"/*.log "$folder"/*.err 2>/dev/null; }
# course SERVER TOOL...: a program of each tool on that server, for longer than their leases live unrenewed.
course() {
  local where=$1 tool leases=()
  shift
  for tool in "$@"; do
    launch "$tool" "$tool" "$library" --server "$where" --ttl 5s --transport ucx
    leases+=("$lease")
    check "$tool: it is listed: $(gpupool leases)" is_at "$lease" "$where"
  done
  sleep 6
  check "server $where beats: $(gpupool servers)" alive gpupool "$where"
  for tool in "$@"; do
    check "$tool: it is renewed, and runs: $(gpupool leases)" runs "$tool"
    run "$bin/$tool" suspend "${leases[0]}"
    check "$tool: suspend: $status $err" test "$status" -eq 0
    run "$bin/$tool" resume "${leases[0]}"
    check "$tool: resume: $status $err" test "$status" -eq 0
    leases=("${leases[@]:1}")
    ends_well "$tool"
  done
}

case_of "the version before, with this manager"
manager gpupool-manager
server before server_before
server now gpupool-server
for tool in gpupool gpupool_before; do
  run "$bin/$tool" servers
  check "$tool lists both: $out $err" test "$(grep -c alive <<<"$out")" = 2
done
course before gpupool_before gpupool
course now gpupool_before gpupool
launch moves gpupool_before "$library" --server before --transport ucx
for to in now before; do
  moves() { run "$bin/gpupool_before" migrate --to "$1" "$lease"; [ "$status" -eq 0 ]; }
  check "migrate --to $to: $status $err" until_true moves "$to"
done
ends_well moves
check "nothing is left: $(gpupool leases; gpupool devices)" until_true all_free
check "nobody is refused" no_refusal
end_pool

case_of "this version, with the manager to come"
manager manager_after
server now gpupool-server
course now gpupool
check "nothing is left: $(gpupool leases; gpupool devices)" until_true all_free
check "nobody is refused" no_refusal

case_of "a manager of before gpupool drain"
end_pool
background "$bin/gpupool-manager" --config /dev/null --socket "$folder/real.sock" --store memory >"$folder/manager.log" 2>&1
until_true test -S "$folder/real.sock"
background "$bin/manager_before" "$folder/manager.sock" "$folder/real.sock"
until_true test -S "$folder/manager.sock" || fail "it does not come"
server now gpupool-server
launch stays gpupool "$library" --server now --transport ucx
older="the pool's manager is of an older gpupool, and drains no server: upgrade it first"
for options in "" "--wait 1h" "--no-move"; do
  # shellcheck disable=SC2086
  run gpupool drain $options now
  check "drain $options: exit status $status" test "$status" -eq 1
  check "drain $options says what to do, in one line" one_line "$err" "$older\$"
  check "drain $options says nothing else: $out" test -z "$out"
done
check "nothing has changed: $(gpupool servers)" alive gpupool now
check "it is not cordoned: $(gpupool servers)" test -z "$(gpupool servers | grep cordoned)"
ends_well stays
end_pool

case_of "two versions before is too old"
manager manager_after
GPUPOOL_SOFT_DEVICES=1 background "$bin/server_before" --config /dev/null --name old --manager "$GPUPOOL_MANAGER" \
  --state "$folder/old" --driver "$(dirname "$library")/libcuda-soft.so" --warm 1 2>"$folder/old.log"
refusal="version mismatch: the pool's manager speaks pool protocol [0-9]+ to [0-9]+, its caller speaks [0-9]+; upgrade its caller first"
check "the server says so: $(cat "$folder/old.log")" until_true grep -Eq "$refusal; this server is in no pool" "$folder/old.log"
run "$bin/gpupool_before" servers
check "and the tool" one_line "$err" "$refusal"
