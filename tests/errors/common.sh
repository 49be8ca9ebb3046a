# What the tests of errors share; sourced with the folder of executables, the client library's folder and the program
# first_error as arguments:  <test>.sh BIN LIBRARY FIRST_ERROR
# GPUPOOL_TEST_LAUNCHER: words before FIRST_ERROR, as a sanitizer's build needs them.
# GPUPOOL_TEST_GPUS: UUIDs of GPUs of this machine, in place of software GPUs; a server of start_server has one of them.
# Each test has pools and a scratch folder of its own and removes both. Skipped cases say why; a test all of whose cases
# were skipped ends with status 77.
set -u
bin=$1 library=$2
read -ra launcher <<<"${GPUPOOL_TEST_LAUNCHER:-}"
first_error=("${launcher[@]}" "$3")
[ -x "$3" ] || { echo "$3 is not built: cmake --build build/release --target programs"; exit 1; }
folder=$(mktemp -d "${TMPDIR:-/tmp}/gpupool-errors-XXXXXX")
export GPUPOOL_STATE=$folder/pool XDG_CACHE_HOME=$folder/cache GPUPOOL_SOFT_MEMORY=2GiB
unset GPUPOOL_MANAGER GPUPOOL_CONFIG GPUPOOL_HOLDER GPUPOOL_LOG GPUPOOL_SYNC GPUPOOL_TRACE GPUPOOL_TOKEN_FILE
unset CUDA_VISIBLE_DEVICES GPUPOOL_WAIT GPUPOOL_MEMORY GPUPOOL_SHARE GPUPOOL_PRIORITY GPUPOOL_TRANSPORT GPUPOOL_TENANT LD_LIBRARY_PATH
failures=0 checked=0 skipped=0 started=()

case_of() { current=$1; }
fail() {
  printf 'FAILED %s: %s\n' "$current" "$*"
  failures=$((failures + 1))
}
check() { # check TEXT COMMAND...: the command succeeds
  local text=$1
  shift
  checked=$((checked + 1))
  "$@" || fail "$text"
}
skip() {
  printf 'skipped %s: %s\n' "$current" "$*"
  skipped=$((skipped + 1))
}
has() { [[ $1 == *"$2"* ]] || { printf -- '--- no "%s" in:\n%s\n---\n' "$2" "$1"; return 1; }; }
# busy: how many threads want a core of this machine, for each core, rounded up: bounds are that many times as long.
busy() {
  awk -v cores="$(nproc)" '{ split($4, running, "/"); most = $1 > running[1] - 1 ? $1 : running[1] - 1
    print (most > cores ? int((most + cores - 1) / cores) : 1) }' /proc/loadavg
}
within() { test "$1" -lt $(($2 * $(busy))); } # within TOOK BOUND
until_true() { # within 10 s
  local i times=$((200 * $(busy)))
  for ((i = 0; i < times; ++i)); do
    "$@" && return 0
    sleep 0.05
  done
  return 1
}
lease_ids() { gpupool leases --json | grep -o '"id": *"[0-9a-f]*"' | grep -o '[0-9a-f]\{8,\}'; }
any_lease() { gpupool leases | grep -Eq '^[0-9a-f]{8}'; }
no_lease() { ! any_lease; }
ends_in_time() { # ends_in_time PID: its exit status; it has a minute, and is killed then
  local i times=$((600 * $(busy)))
  for ((i = 0; i < times; ++i)); do kill -0 "$1" 2>/dev/null || break; sleep 0.1; done
  if kill -0 "$1" 2>/dev/null; then
    fail "process $1 does not end: $(gpupool leases)"
    pkill -KILL -P "$1"
    kill -KILL "$1"
  fi
  wait "$1"
}
ends_well() { # ends_well NAME: the program launched[NAME], which runs until $folder/NAME.end is there
  touch "$folder/$1.end"
  wait "${launched[$1]}"
  status=$?
  check "$1: exit status $status: $(cat "$folder/$1.out" "$folder/$1.err")" test "$status" -eq 0
  check "$1: nothing on stderr: $(cat "$folder/$1.err")" test ! -s "$folder/$1.err"
}
background() { # background COMMAND...: ended with the test
  "$@" &
  started+=($!)
}

IFS=, read -ra real <<<"${GPUPOOL_TEST_GPUS:-}"
software() { [ ${#real[@]} -ne 0 ] || echo --software "$1"; } # software COUNT: options of `gpupool up`
gpupool() { timeout 60 "$bin/gpupool" "$@"; }
# shellcheck disable=SC2046 # two words
up() { gpupool up --detach $(software 1) --name node "$@" >"$folder/up" 2>&1 || { cat "$folder/up"; fail "up $*"; }; }
down() { gpupool down >/dev/null 2>&1; }
pid_of() { awk -v role="$1" '$1 == role { print $2 }' "$GPUPOOL_STATE/pool.processes"; }
declare -A servers
# By its own word: for a while the manager lists a dead server of that name as alive.
joined() { grep -q "joined the pool manager" "$folder/$1.log"; }
# start_server NAME OPTION...: one more server in this machine's pool, or GPUPOOL_MANAGER's, with GPUs of its own:
# SERVER_GPUS (1) of 2 GiB. SERVER_PROGRAM: instead of gpupool-server. Sets servers[NAME]; logs into $folder/NAME.log.
start_server() {
  local name=$1
  shift
  local gpus=(--driver "$(dirname "$library")/libcuda-soft.so")
  [ ${#real[@]} -eq 0 ] || gpus=(--devices "${real[0]}")
  mkdir -p "$folder/$name" "$folder/$name-locks"
  rm -f "$folder/$name.log"
  GPUPOOL_LOG=info GPUPOOL_SOFT_IDENTITY=$name GPUPOOL_SOFT_DEVICES=${SERVER_GPUS:-1} \
    background "$bin/${SERVER_PROGRAM:-gpupool-server}" --config /dev/null --name "$name" --manager "${GPUPOOL_MANAGER:-unix:$GPUPOOL_STATE/manager.sock}" \
    --state "$folder/$name" --listen 127.0.0.1:0 --device-locks "$folder/$name-locks" --module-cache "$folder/$name-cache" \
    "${gpus[@]}" "$@" >"$folder/$name.log" 2>&1
  # shellcheck disable=SC2034 # for who sources this
  servers[$name]=${started[-1]}
  until_true joined "$name" || fail "server $name does not come: $(cat "$folder/$name.log")"
}
# A worker that has a session captures what kernels print.
session_workers() {
  local pid
  for pid in $(pgrep -P "$(pid_of server)"); do
    ! readlink "/proc/$pid/fd/1" 2>/dev/null | grep -q gpupool-output || echo "$pid"
  done
}
# are_gone PID...: they have ended
are_gone() { local one; for one in "$@"; do [ ! -e "/proc/$one" ] || grep -q '^State:.Z' "/proc/$one/status" 2>/dev/null || return 1; done; }
alone() { LD_LIBRARY_PATH=$library timeout 60 "${first_error[@]}" "$@"; } # no wrapper: the library alone
wrapped() { gpupool run -- "${first_error[@]}" "$@"; }

# run COMMAND...: fills out, err, status, ms
run() {
  local began
  began=$(date +%s%3N)
  "$@" >"$folder/out" 2>"$folder/err"
  status=$?
  ms=$(($(date +%s%3N) - began))
  out=$(cat "$folder/out") err=$(cat "$folder/err")
}
# heard REGEX: exactly one line on stderr, ours, and it says this.
one_line() {
  local lines
  lines=$(grep -c '' <<<"$1")
  [ -n "$1" ] && [ "$lines" -eq 1 ] && grep -Eq "^gpupool: .*$2" <<<"$1" ||
    { printf -- '--- wanted one line, ^gpupool: .*%s, and have %s:\n%s\n---\n' "$2" "$lines" "$1"; return 1; }
}
one_log_line() { # TEXT PART: one line, and it says PART
  [ "$(grep -c . <<<"$1")" -eq 1 ] && has "$1" "$2" || { printf -- "--- %s\n" "$1"; return 1; }
}
# says CODE REGEX COMMAND...: the first call that fails returns CODE; one line; within 10 s.
says() {
  local code=$1 regex=$2
  shift 2
  run "$@"
  check "one line on stderr" one_line "$err" "$regex"
  check "the first failing call returns $code: $out" grep -Eq "^[a-zA-Z]+: [a-zA-Z]+ \($code\)\$" <<<"$out"
  check "exit status $status" test "$status" -eq 3
  check "took $ms ms" within "$ms" 10000
  printf '%s: %s [%s]\n' "$current" "$err" "$(grep -o '^.*([0-9]*)' <<<"$out")"
}
# refused REGEX COMMAND...: `gpupool run` cannot lease: one line, status 125.
refused() {
  local regex=$1
  shift
  run "$@"
  check "one line on stderr" one_line "$err" "$regex"
  check "exit status $status" test "$status" -eq 125
  check "took $ms ms" within "$ms" 10000
}

finish() {
  trap - EXIT
  down
  local pid
  for pid in "${started[@]:-}"; do [ -z "$pid" ] || kill -KILL "$pid" 2>/dev/null; done
  wait 2>/dev/null
  rm -rf "$folder"
  echo "$checked checks, $failures failed, $skipped skipped"
  [ $failures -eq 0 ] || exit 1
  [ $checked -ne 0 ] || exit 77
  exit 0
}
trap finish EXIT
