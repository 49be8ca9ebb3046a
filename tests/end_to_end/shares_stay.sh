#!/bin/bash
# A lease whose processes share memory stays where it is: `gpupool leases -v` says why, and suspend and migrate refuse
# with that reason. Meanwhile a program of another tenant is given a handle of it, and opens nothing. Then a guest is
# killed in the middle. A program of the same claim opens the handle. Runs on the pool of GPUPOOL_STATE.
#   shares_stay.sh path/to/gpupool shm|ucx path/to/processes_share
set -euo pipefail
gpupool=$1 transport=$2 program=$3
reason="it shares memory or events with other processes"
folder=$(mktemp -d)
mkfifo "$folder/stdin"
runner=""
fail() {
  echo "FAIL: $*"
  exit 1
}
trap '[ -z "$runner" ] || kill "$runner" 2>/dev/null || true; rm -rf "$folder"' EXIT

# Until the guest has the owner's memory open; it goes on when descriptor 9 is closed. $@: options of the lease.
begin() {
  rm -f "$folder/handle" "$folder/said"  # what the one before said is not this one's
  "$gpupool" run --transport "$transport" "$@" -- ${GPUPOOL_TEST_LAUNCHER:-} "$program" \
    --pause "$folder/handle" <"$folder/stdin" >"$folder/said" 2>&1 &
  runner=$!
  exec 9>"$folder/stdin"
  for ((i = 0; i < 600; ++i)); do
    ! grep -qs '^paused' "$folder/said" || break
    kill -0 "$runner" 2>/dev/null || break
    sleep 0.1
  done
  grep -qs '^paused' "$folder/said" || fail "it did not come to share: $(cat "$folder/said")"
}
start() {
  begin --memory 512MiB --wait 2m
  lease=$("$gpupool" leases | awk -v pid="$runner" '$0 ~ ("pid " pid " ") { print $1 }')
  [ -n "$lease" ] || fail "it has no lease: $("$gpupool" leases)"
}

start
for ((i = 0; i < 300; ++i)); do
  ! "$gpupool" leases -v | grep -q "^$lease cannot be moved: $reason" || break
  sleep 0.1
done
"$gpupool" leases -v | grep "^$lease cannot be moved: $reason" || fail "$("$gpupool" leases -v)"
for order in suspend migrate; do
  ! "$gpupool" "$order" "$lease" >"$folder/order" 2>&1 || fail "gpupool $order was not refused"
  grep -q "$reason" "$folder/order" || fail "gpupool $order: $(cat "$folder/order")"
  echo "gpupool $order: refused"
done
"$gpupool" run --transport "$transport" --tenant other --memory 512MiB --wait 2m -- ${GPUPOOL_TEST_LAUNCHER:-} "$program" \
  --open "$folder/handle" >"$folder/other" 2>&1 || fail "in another tenant's lease: $(cat "$folder/other")"
grep -q 'the handle is of another tenant' "$folder/other" || fail "it is not said why: $(cat "$folder/other")"
exec 9>&-
wait "$runner" || fail "it did not end well: $(cat "$folder/said")"
runner=""

start
guest=$(pgrep -P "$runner" -f "^[^ ]*$(basename "$program") --pause" | head -n 1)
[ -n "$guest" ] || guest=$(pgrep -f "$program --pause $folder/handle" | head -n 1)
kill -KILL "$guest"
exec 9>&-
wait "$runner" && fail "a killed program ended well"
runner=""
for ((i = 0; i < 300; ++i)); do
  "$gpupool" leases | grep -q "^$lease" || break
  sleep 0.1
done
! "$gpupool" leases | grep "^$lease" || fail "the killed program's lease is there still"

claim=$("$gpupool" claim create --job "shares_stay:$$:0" --memory 512MiB --wait 2m)
begin --claim "$claim"
"$gpupool" run --transport "$transport" --claim "$claim" -- ${GPUPOOL_TEST_LAUNCHER:-} "$program" \
  --join "$folder/handle" || fail "in the same claim"
exec 9>&-
wait "$runner" || fail "it did not end well beside another program of its claim: $(cat "$folder/said")"
runner=""
"$gpupool" claim release "$claim"
echo PASS
