#!/bin/bash
# Two virtual machines: a protected program goes on at another server when its own one is cut off from it and from the
# manager; then the wire heals, and what the old worker's adapter still has to put reaches the program's machine.
#   partition.sh serve BIN    the server that is cut off, `far`; it does what the other machine orders
#   partition.sh there BIN    manager and program, and the server where it goes on, `node`
# Each machine drops what it sends over the wire. Orders go through the folder that both share.
set -uo pipefail
what=$1 bin=$2
share=$GPUPOOL_VM_SHARE
export GPUPOOL_STATE=/run/pool XDG_CACHE_HOME=/run/cache GPUPOOL_SOFT_MEMORY=512MiB GPUPOOL_LOG=info
export GPUPOOL_SERVER_HANDSHAKE_TIME=20s # translated machines take their time
unset GPUPOOL_MANAGER GPUPOOL_CONFIG UCX_TLS
mkdir -p "$XDG_CACHE_HOME"
mkfifo /run/nap && exec 8<>/run/nap
nap() { read -rt "$1" <&8; } # a process that sleeps costs more than the sleep
cut_wire() { tc qdisc add dev eth0 root netem loss 100%; }
heal_wire() { tc qdisc del dev eth0 root; }

# ---- the machine of `far`

# Its adapter tries for a minute to get rid of what a worker has posted, every 8.6 s: longer than the program needs to go on.
start() {
  mkdir -p /run/far
  GPUPOOL_SOFT_IDENTITY=far UCX_RC_TIMEOUT=8s "$bin/gpupool-server" --config /dev/null --name far --manager 10.77.0.2:7600 \
    --listen 10.77.0.1:0 --network-wire rdma --state /run/far --device-locks /run/far --module-cache /run/far/cache --warm 1 \
    --driver "$(readlink -f "$(dirname "$bin")/lib/libcuda-soft.so")" >/run/far/log 2>&1 &
  server=$!
}
# A worker that has a session captures what kernels print.
sessions() {
  local pid
  for pid in $(pgrep -P "$server"); do ! readlink "/proc/$pid/fd/1" | grep -q gpupool-output || echo "$pid"; done
}
state() { awk '{ print $3 }' "/proc/$1/stat"; }
# Front and worker are stopped with the cut, or the worker would end when it misses the program, and take along what its
# adapter has to put.
cut_off() {
  kill -STOP "$server"
  cut_wire
  nap 0.3 # a put is under way then, which nobody answers
  kill -STOP "$1"
  nap 0.1
  state "$1"
}
if [ "$what" = serve ]; then
  for ((n = 1; ; ++n)); do
    until [ -e "$share/order.$n" ]; do nap 0.05; done
    # shellcheck disable=SC1090
    . "$share/order.$n" >"$share/answer.$n" 2>&1
    : >"$share/done.$n"
  done
fi

# ---- the machine of the program

number=0
order() { # order COMMAND...: on the other machine; sets answer
  number=$((number + 1))
  echo "$*" >"$share/order"
  mv "$share/order" "$share/order.$number"
  until [ -e "$share/done.$number" ]; do nap 0.05; done
  answer=$(<"$share/answer.$number")
}
gpupool() { "$bin/gpupool" "$@"; }
say() { awk -v ms=$(($(date +%s%3N) - began)) -v text="$*" 'BEGIN { printf "%5.1f s: %s\n", ms / 1000, text }'; }
fail() {
  echo "FAILED: $*"
  gpupool leases -v
  gpupool devices
  tail -n 40 "$here"/*.out "$here"/*.err
  # shellcheck disable=SC2016 # the other machine's words
  order 'heal_wire; kill -CONT $server $(pgrep -P $server); tail -n 40 /run/far/log'
  echo "$answer"
  exit 1
}
# await TEXT COMMAND...: until it succeeds; the bound of the test is that of run_in_vm.
await() {
  local text=$1
  shift
  for ((i = 0; i < 300; ++i)); do
    "$@" && say "$text" && return
    nap 0.3
  done
  fail "not: $text"
}
says() { grep -qE "$1" "$here/$2"; }
listed() { gpupool "${@:2}" | grep -qE "$1"; }
memory() { gpupool devices --json | grep -oE '"freeBytes": *[0-9]+'; }
both_are_there() { at_first=$(memory) && [ "$(wc -l <<<"$at_first")" -eq 2 ]; }
all_is_free() { [ "$(memory)" = "$at_first" ] && ! listed '^[0-9a-f]{8} ' leases; }
has_ended() { order "[ -e /proc/$1 ] || echo ended"; [ "$answer" = ended ]; }
arrived() { awk '/^Udp: [0-9]/ { print $2 }' /proc/net/snmp; } # RoCE is the only UDP here; it is not used within a machine
more_arrives() {
  for ((i = 0; i < 60; ++i)); do
    [ "$(arrived)" -eq "$before" ] || return 0
    nap 0.3
  done
  return 1
}
# run NAME OPTION...: the program at `far`; its lines come through descriptor 9. Its adapter is as patient: with a message of
# its own under way it would else give the connection up by itself, and a client that kept it would not be noticed.
run() {
  local name=$1
  shift
  rm -f "$here/$name.in"
  mkfifo "$here/$name.in"
  exec 9<>"$here/$name.in"
  UCX_RC_TIMEOUT=8s gpupool run --server far --transport ucx --memory 256MiB --wait 2m "$@" -- "$bin/network_load" late 0 \
    <&9 >"$here/$name.out" 2>"$here/$name.err" &
  runner=$!
}
ends_right() {
  wait "$runner" || fail "the program's exit status is $?"
  await "all is free" all_is_free
  order sessions
  [ -z "$answer" ] || fail "sessions are left at far: $answer"
}

here=$(mktemp -d)
began=$(date +%s%3N)
order start
gpupool up --detach --software 1 --transport ucx --network-wire rdma --listen 10.77.0.2 --port 7600 --wait 3m --warm 1 \
  --name node || exit 1
await "both servers are there" both_are_there

for attempt in 1 2 3; do
  run cut --protect=1h --protect-silence 2s
  await "the program runs" says ready cut.out
  await "it has a checkpoint" listed 'is protected .*checkpoint is' leases -v
  order sessions
  old=$answer
  [[ $old =~ ^[0-9]+$ ]] || fail "its session at far: $old"
  echo >&9
  nap 1.5
  order "cut_off $old"
  cut_wire
  say "its server is cut off, its worker: $answer"
  await "it goes on" says 'server is gone, and it goes on at another one as epoch 2: [1-9][0-9]* calls? made again' cut.err
  echo >&9
  await "it stands still" says still cut.out
  listed '^far .* leased ' devices || fail "its GPU at far counts until that server has spoken"
  before=$(arrived)
  heal_wire
  order heal_wire
  more_arrives && say "what the old worker still had to put arrives" && break
  # On a busy machine the worker may have been stopped too late, or had nothing to put.
  [ "$attempt" -lt 3 ] || fail "nothing comes of the old worker: $answer"
  order "kill -CONT \$server $old"
  echo >&9
  ends_right
done
nap 1
order "state $old"
[ "$answer" = T ] || fail "the old worker does not live any more: $answer"
listed '^far .* leased ' devices || fail "its GPU at far is granted while the worker lives"
order "kill -CONT \$server $old"
await "the old worker has ended" has_ended "$old"
echo >&9
ends_right
grep 'goes on' "$here/cut.err"
[ "$(grep -c 'goes on at another one' "$here/cut.err")" -eq 1 ] || fail "it went on more than once"

run alone
printf '\n\n\n' >&9
ends_right
cmp "$here/cut.out" "$here/alone.out" || fail "it printed something else than when it was alone"
say "its GPU at far was granted again, and it prints the same there"
gpupool down
