#!/bin/bash
# What runs out: the disk of the module cache, the memory that client and worker share, the program's address space.
. "$(dirname "$0")/common.sh"

case_of "disk full for the module cache"
mkdir "$folder/small"
# The mount is seen by the pool's own processes only.
if unshare -m bash -c "mount -t tmpfs -o size=4k tmpfs '$folder/small'" 2>"$folder/why"; then
  GPUPOOL_SERVER_MODULE_CACHE=$folder/small timeout 60 unshare -m bash -c \
    "mount -t tmpfs -o size=4k tmpfs '$folder/small' && exec '$bin/gpupool' up --detach --software 1 --name node" >"$folder/up" ||
    cat "$folder/up"
  run alone
  check "the program works: $out$err" test "$out$err" = "no call failed"
  said=$(grep "module cache" "$GPUPOOL_STATE/server.log")
  check "the server's log says what to do, once" one_log_line "$said" \
    "No space left on device; this session goes on without it: free space there, or name another folder with --module-cache"
  down
else
  skip "a private mount is not allowed here: $(cat "$folder/why")"
fi

case_of "files may not grow: the server's memory files neither"
(ulimit -f 1024 && gpupool up --detach --software 1 --name node --wait 5s >"$folder/up" 2>&1)
check "the pool does not come up, and is not killed by a signal" has "$(cat "$folder/up")" \
  "File too large; raise the limit of file sizes (ulimit -f)"
down

up
case_of "more pinned memory than the machine has"
mib=$(awk '/^MemTotal/ { print int($2 / 1024) + 1024 }' /proc/meminfo)
run alone --pinned "$mib"
check "out of memory, as natively: $out" grep -q "^cudaMallocHost: cudaErrorMemoryAllocation (2)" <<<"$out"
check "the server's log says why" grep -q "no pinned memory of [0-9]* bytes" "$GPUPOOL_STATE/server.log"
run alone
check "the next program works: $out$err" test "$out$err" = "no call failed"

case_of "files may not grow: over a network the program's memory files neither"
limited() { (ulimit -f "$1" && shift && GPUPOOL_TRANSPORT=ucx LD_LIBRARY_PATH=$library exec "${first_error[@]}" "$@"); } # KiB
remedy="shared memory: [0-9]* bytes: File too large; raise the limit of file sizes \(ulimit -f\)"
GPUPOOL_WAIT=10s says 2 "cannot connect to the worker: $remedy" limited 1024
GPUPOOL_WAIT=10s says 2 "no pinned memory of [0-9]* bytes: $remedy" limited 32768 --pinned 64

case_of "a limited address space" # batch systems set it
confined() { (ulimit -v 4000000 && exec env LD_LIBRARY_PATH="$library" "${first_error[@]}"); }
if [ ${#launcher[@]} -eq 0 ]; then
  says 2 "client and worker can reserve no common address space .*ulimit -v" confined
else
  skip "a sanitizer takes terabytes of address space"
fi
