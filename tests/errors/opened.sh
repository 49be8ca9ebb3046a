#!/bin/bash
# A worker opens no file of its server by path: caches, checkpoints and shared memory come as descriptors. Here its opens
# are written down (opened_paths.c); what is left are the system's own files and UCX's configuration.
#   opened.sh BIN LIBRARY FIRST_ERROR FOLDER OPENED_PATHS
. "$(dirname "$0")/common.sh"
programs=$(dirname "$3") preloaded=$5
opened=$folder/opened
mkdir "$opened"
cat >"$folder/worker" <<EOS
#!/bin/sh
export GPUPOOL_OPENED_PATHS=$opened/\$\$
LD_PRELOAD=$preloaded exec "$bin/gpupool-worker" "\$@"
EOS
chmod +x "$folder/worker"
export GPUPOOL_SERVER_WORKER=$folder/worker

case_of "what is opened is seen"
GPUPOOL_OPENED_PATHS=$folder/seen LD_PRELOAD=$preloaded cat "$folder/worker" >/dev/null
check "a path" grep -q "$folder/worker" "$folder/seen"

systems='^[a-z0-9_]+ (descriptor:|/proc/|/sys/|/dev/|/etc/(machine-id|ucx/|libnl/)|.*/ucx\.conf$)'
for transport in shm ucx; do
  case_of "$transport"
  up
  check "behind walls" grep -q "node has walls around its workers: no_new_privs, .*seccomp" <(gpupool servers -v)
  for program in "stress_mixed --threads 2" managed_memory device_printf; do
    read -ra words <<<"$program"
    run gpupool run --transport "$transport" -- "${launcher[@]}" "$programs/${words[0]}" "${words[@]:1}"
    check "$program: $status $out $err" test "$status" -eq 0
  done
  down
  check "code came from the cache's folder" grep -Eqs '^openat descriptor:[0-9a-f]{64}-' "$opened"/*
  foreign=$(cat "$opened"/* | grep -Ev "$systems" | sort -u)
  check "opened by path: $foreign" test -z "$foreign"
  rm -f "$opened"/*
done
