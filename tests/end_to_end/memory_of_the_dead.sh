#!/bin/bash
# A program that holds much device memory is killed (SIGKILL) while a kernel of its runs: its worker is gone, its lease
# has ended and, on an NVIDIA GPU, the memory is free again within two seconds. Prints the times; runs on the pool of
# GPUPOOL_STATE. The second call holds most of a real GPU:
#   memory_of_the_dead.sh path/to/gpupool shm|ucx path/to/hold_memory [--memory 1GiB] [--mib 600]
#   memory_of_the_dead.sh path/to/gpupool shm|ucx path/to/hold_memory --mib 100000
set -euo pipefail
gpupool=$1 transport=$2 program=$3
shift 3
lease=() arguments=()
while [ $# -gt 0 ]; do
  if [ "$1" = --memory ]; then lease+=("$1" "$2"); else arguments+=("$1" "$2"); fi
  shift 2
done
bound_ms=2000
now() { date +%s%3N; }
fail() {
  echo "FAIL: $*"
  exit 1
}

devices=$("$gpupool" devices --json)
free_before=$(grep -o '"freeBytes": *[0-9]*' <<<"$devices")
smi=""
if ! grep -q '"software": *true' <<<"$devices"; then smi=$(command -v nvidia-smi) || fail "no nvidia-smi"; fi
used() { "$smi" --query-gpu=memory.used --format=csv,noheader,nounits | awk "{ total += \$1 } END { print total }"; }
used_before=${smi:+$(used)}

said=$(mktemp)
"$gpupool" run --transport "$transport" "${lease[@]}" --wait 2m -- ${GPUPOOL_TEST_LAUNCHER:-} "$program" --hold "${arguments[@]}" >"$said" 2>&1 &
runner=$!
disown # bash would report how it ended
trap 'kill "$runner" 2>/dev/null || true; rm -f "$said"' EXIT
for ((i = 0; i < 300; ++i)); do
  grep -q holds "$said" && break
  kill -0 "$runner" 2>/dev/null || break
  sleep 0.1
done
process=$(sed -n 's/^process \([0-9]*\) holds .*/\1/p' "$said")
[ -n "$process" ] || fail "it did not come to hold memory: $(cat "$said")"

# Its worker: of this pool's, the one that has a session and therefore captures what kernels print.
workers=()
for candidate in $(awk '{ print $2 }' "$GPUPOOL_STATE/pool.processes" | xargs -n 1 pgrep -P); do
  ! readlink "/proc/$candidate/fd/1" | grep -q gpupool-output || workers+=("$candidate")
done
[ ${#workers[@]} -eq 1 ] || fail "this pool has ${#workers[@]} sessions; it must have this one alone"
worker=${workers[0]}
tail -n 1 "$said"
resident=$(awk '/^VmRSS/ { print int($2 / 1024) }' "/proc/$worker/status")
echo "its worker, process $worker, has $resident MiB resident"
[ -z "$smi" ] || echo "the driver's tool sees $(($(used) - used_before)) MiB more used than before"

began=$(now)
kill -KILL "$process"
gone="" ended="" freed=""
[ -n "$smi" ] || freed=- # a software GPU's memory is its worker's
while [ -z "$gone" ] || [ -z "$ended" ] || [ -z "$freed" ]; do
  if [ -z "$gone" ] && { [ ! -e "/proc/$worker" ] || grep -q '^State:.*Z' "/proc/$worker/status" 2>/dev/null; }; then
    gone=$(($(now) - began))
  fi
  if [ -z "$ended" ] && [ "$("$gpupool" devices --json | grep -o '"freeBytes": *[0-9]*')" = "$free_before" ]; then
    ended=$(($(now) - began))
  fi
  if [ -z "$freed" ] && [ "$(used)" -le $((used_before + 1100)) ]; then freed=$(($(now) - began)); fi
  [ $(($(now) - began)) -le 10000 ] || break
  sleep 0.01
done
echo "$transport: worker gone after ${gone:-more than 10000} ms, lease ended after ${ended:-more than 10000} ms," \
  "device memory free after ${freed:-more than 10000} ms (limit $bound_ms)"
for time in "$gone" "$ended" "$freed"; do
  [ "$time" = - ] || { [ -n "$time" ] && [ "$time" -le "$bound_ms" ]; } || fail "later than $bound_ms ms"
done
