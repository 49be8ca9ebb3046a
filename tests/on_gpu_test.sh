#!/bin/bash
# tests/on_gpu must see what differs: programs that behave otherwise in the pool, by text, by status and by signal.
#   on_gpu_test.sh path/to/bin
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# program NAME COMMAND: prints what it should, except that the command runs instead in the pool.
program() {
  # shellcheck disable=SC2016  # the script expands it
  printf '#!/bin/bash\n[ -z "$GPUPOOL_HOLDER" ] || { %s; }\ncat %s\n' "$2" "$here/end_to_end/expected/$1.txt" >"$folder/$1"
  chmod +x "$folder/$1"
}
program vector_add true
program scan 'echo otherwise; exit 0'
program matmul 'echo "cuX: CUDA_ERROR_UNKNOWN"; exit 3'
program stencil 'kill -SEGV $$'

output=$("$here/on_gpu" --bin "$1" --programs "$folder" --kinds end_to_end --only vector_add,scan,matmul,stencil \
  --transports shm --jobs 1)
status=$?
missing=0
for line in 'vector_add .* yes$' 'scan .* DIFFERS$' "shm: line 1: 'otherwise'" 'shm: exit status 3, .*UNKNOWN' \
  'shm: ended by SIGSEGV' '4 ran, 1 equal, 3 differ, 0 skipped, 0 left behind'; do
  grep -Eq "$line" <<<"$output" || { echo "not found: $line"; missing=1; }
done
[ $status -eq 1 ] && [ $missing -eq 0 ] && exit 0
printf 'exit status %s\n%s\n' "$status" "$output"
exit 1
