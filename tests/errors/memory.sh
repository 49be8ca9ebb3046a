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
    "No space left on device; this session goes on without it: free space in the folder of the server's --module-cache"
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
case_of "a worker opens no file of ours by its path"
workers=$(pgrep -P "$(pid_of server)" gpupool-worker)
attached() { local pid; for pid in $workers; do grep -q '^TracerPid:[[:space:]]*[1-9]' "/proc/$pid/status" || return 1; done; }
if command -v strace >/dev/null; then
  strace -f -qq -e "trace=?open,openat,?openat2,?creat,?rename,?renameat,?renameat2,?unlink,unlinkat" -o "$folder/trace" \
    $(printf -- '-p %s ' $workers) 2>"$folder/why" &
  tracer=$!
  started+=($tracer)
  if until_true attached; then
    run alone
    check "the program works: $out$err" test "$out$err" = "no call failed"
    check "the cache was used" grep -Eq 'openat\([0-9]+, "[0-9a-f]{16}\.part"' "$folder/trace"
    check "by no path: $(grep -F "\"$folder" "$folder/trace")" test -z "$(grep -F "\"$folder" "$folder/trace")"
  else
    skip "no process may be traced here: $(cat "$folder/why")"
  fi
  kill -KILL "$tracer" 2>/dev/null  # the kernel lets the workers go; strace would first wait for each of them
  wait "$tracer" 2>/dev/null
else
  skip "there is no strace here"
fi

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

case_of "NCCL's segments of shared memory: kernels would wait for one another for ever"
segment=/dev/shm/nccl-gpupool-test-$$
over_network() { GPUPOOL_TRANSPORT=ucx LD_LIBRARY_PATH=$library "${first_error[@]}" "$@"; }
GPUPOOL_WAIT=10s says 801 "NCCL's shared-memory transport, .*, does not work over a network: use --transport shm" \
  over_network --segment "$segment"
check "as registering memory, and at once: $out" grep -q "^cudaHostRegister: cudaErrorNotSupported (801)" <<<"$out"
GPUPOOL_WAIT=10s run over_network --segment "/dev/shm/gpupool-test-$$"
check "another shared file can be registered there: $out$err" has "$out" "no call failed"
GPUPOOL_WAIT=10s run alone --segment "$segment"
check "and NCCL's over shm: $out$err" test "$out$err" = "no call failed"

case_of "the processes of one lease share its memory"
cat >"$folder/sharing" <<'EOF'
folder=$1
shift
"$@" --device 400 --array 300 --seconds 60 >"$folder/first" 2>&1 &
for _ in $(seq 600); do grep -q ready "$folder/first" && break; sleep 0.1; done
"$@" --free yes --device 700
"$@" --array 700
"$@" --free yes --device 200
kill -KILL $!
wait $! 2>/dev/null
for _ in $(seq 100); do
  "$@" --device 700 | grep "no call failed" && break
  sleep 0.1
done
EOF
GPUPOOL_WAIT=10s run gpupool run --memory 1GiB -- bash "$folder/sharing" "$folder" "${first_error[@]}"
check "the first one has what it asked for: $(cat "$folder/first")" grep -q ready "$folder/first"
check "not twice the lease's, as device memory: $out$err" grep -q "^cudaMalloc: cudaErrorMemoryAllocation (2)" <<<"$out"
check "nor as an array: $out$err" grep -q "^cudaMallocArray: cudaErrorMemoryAllocation (2)" <<<"$out"
free=$(sed -n 's/^free \([0-9]*\) of .*/\1/p' <<<"$out" | tail -1)
check "what is free is what the lease has left: $out" test "${free:-9999}" -le 124
check "what is left can be had, and what a killed one had too: $out$err" test "$(grep -c "no call failed" <<<"$out")" = 2

case_of "a limited address space" # batch systems set it
confined() { (ulimit -v 4000000 && exec env LD_LIBRARY_PATH="$library" "${first_error[@]}"); }
if [ ${#launcher[@]} -eq 0 ]; then
  says 2 "client and worker can reserve no common address space .*ulimit -v" confined
else
  skip "a sanitizer takes terabytes of address space"
fi
