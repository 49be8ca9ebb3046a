#!/bin/bash
# Servers, holders and tools of the pool protocol before with this manager, and this one's with a manager of the version to
# come: they join, lease, renew, beat, move and release, while a session runs.
#   protocol.sh BIN LIBRARY FIRST_ERROR OTHER_LIBRARY
. "$(dirname "$0")/common.sh"
alive() { "$bin/$1" servers | grep -Eq "^$2 +alive"; }
no_refusal() { ! grep -h "version mismatch" "$folder"/*.log "$folder"/*.err 2>/dev/null; }
# course NAME TOOL SERVER: a program of that tool on that server, for longer than its lease lives unrenewed.
course() {
  local name=$1 tool=$2
  launch "$name" "$tool" "$library" --server "$3" --ttl 2s --transport ucx
  check "$name: it is listed: $(gpupool leases)" is_at "$lease" "$3"
  sleep 4
  check "$name: it is renewed, and runs: $(gpupool leases)" runs "$name"
  check "$name: its server beats: $(gpupool servers)" alive gpupool "$3"
  run "$bin/$tool" suspend "$lease"
  check "$name: suspend: $status $err" test "$status" -eq 0
  run "$bin/$tool" resume "$lease"
  check "$name: resume: $status $err" test "$status" -eq 0
}

case_of "the version before, with this manager"
manager gpupool-manager
server before server_before
server now gpupool-server
for tool in gpupool gpupool_before; do
  run "$bin/$tool" servers
  check "$tool lists both: $out $err" test "$(grep -c alive <<<"$out")" = 2
done
for where in before now; do
  course "before-$where" gpupool_before "$where"
  course "now-$where" gpupool "$where"
  ends_well "before-$where"
  ends_well "now-$where"
done
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
course now gpupool now
ends_well now
check "nothing is left: $(gpupool leases; gpupool devices)" until_true all_free
check "nobody is refused" no_refusal

case_of "two versions before is too old"
GPUPOOL_SOFT_DEVICES=1 background "$bin/server_before" --config /dev/null --name old --manager "$GPUPOOL_MANAGER" \
  --state "$folder/old" --driver "$(dirname "$library")/libcuda-soft.so" --warm 1 2>"$folder/old.log"
refusal="version mismatch: the pool's manager speaks pool protocol [0-9]+ to [0-9]+, its caller speaks [0-9]+; upgrade its caller first"
check "the server says so: $(cat "$folder/old.log")" until_true grep -Eq "$refusal; this server is in no pool" "$folder/old.log"
run "$bin/gpupool_before" servers
check "and the tool" one_line "$err" "$refusal"
