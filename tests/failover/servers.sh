# shellcheck shell=bash disable=SC2034,SC2154
# Sourced by the tests of failover that have several servers, with one software GPU of 2 GiB each, in one pool.
. "$(dirname "$0")/common.sh"
declare -A servers

# By its own word: for a while the manager lists a dead server of that name as alive.
in_pool() { grep -q "joined the pool manager" "$folder/$1.log"; }
# server NAME: one more server in this machine's pool, with a GPU of its own.
server() {
  mkdir -p "$folder/$1" "$folder/$1-locks"
  rm -f "$folder/$1.log"
  GPUPOOL_SOFT_IDENTITY=$1 background "$bin/gpupool-server" --name "$1" --manager "unix:$GPUPOOL_STATE/manager.sock" \
    --state "$folder/$1" --listen 127.0.0.1:0 --device-locks "$folder/$1-locks" --module-cache "$folder/$1-cache" \
    --driver "$(dirname "$library")/libcuda-soft.so" >"$folder/$1.log" 2>&1
  servers[$1]=${started[-1]}
  until_true in_pool "$1" || fail "server $1 does not come: $(cat "$folder/$1.log")"
}
processes_of() { pgrep -P "${servers[$1]}" | tr '\n' ' '; echo "${servers[$1]}"; }
kill_server() { # the front and all of its workers, at once
  # shellcheck disable=SC2046
  kill -KILL $(processes_of "$1") 2>/dev/null
}
# Of a dead server a lease that has ended is `lost` until that is heard of again.
living() { gpupool leases | awk '/^[0-9a-f]+ / && !/ (revoking|lost) /'; }
no_lease() { [ -z "$(living)" ]; }
place() { living | awk '{ print $2; exit }'; }
is_at() { [ "$(place)" = "$1" ]; }
ends() {
  await_end "$1"
  check "nothing of it runs: $(gpupool leases)" until_true no_lease
}
went_on() { grep -Eq "server is gone, and it goes on at another one as epoch $2: " "$folder/$1.err"; }
took() { # the milliseconds from $began until the program went on
  echo "$current: $(($(date +%s%3N) - began)) ms until the program went on"
}
protected() { says_of_it 'is protected .* checkpoint is'; }
