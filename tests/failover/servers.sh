# shellcheck shell=bash disable=SC2034,SC2154
# Sourced by the tests of failover that have several servers, with one software GPU of 2 GiB each, in one pool.
. "$(dirname "$0")/common.sh"
[ ${#real[@]} -eq 0 ] || export GPUPOOL_SERVER_DEVICES=${real[1]:?GPUPOOL_TEST_GPUS: two GPUs are needed} # of the server `node`; the others have the first one

server() { start_server "$@"; }
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
