#!/bin/bash
# No manager, no device: what a program is told that gets no lease.
. "$(dirname "$0")/common.sh"

remedy='gpupool up --detach.*GPUPOOL_MANAGER'
case_of "nothing configured"
says 100 "no pool manager is reachable \(tried unix:$GPUPOOL_STATE/manager.sock: No such file.*$remedy" alone
refused "no pool manager is reachable \(tried unix:.*$remedy" wrapped

remedy='GPUPOOL_MANAGER.*systemctl status gpupool-manager' # of one that is named, `gpupool up` is another pool
case_of "address refused"
export GPUPOOL_MANAGER=127.0.0.1:1
says 100 "127.0.0.1:1: Connection refused.*$remedy" alone
refused "127.0.0.1:1: Connection refused.*$remedy" wrapped
run gpupool devices
check "gpupool devices: one line" one_line "$err" "no pool manager is reachable \(tried 127.0.0.1:1: Connection refused"

case_of "several addresses"
GPUPOOL_MANAGER=127.0.0.1:1,/nowhere/manager.sock says 100 \
  "127.0.0.1:1: Connection refused; unix:/nowhere/manager.sock: No such file.*$remedy" alone

case_of "no such host"
GPUPOOL_MANAGER=no-such-host.invalid:4780 says 100 "no-such-host.invalid:4780: [^;=]*$remedy" alone

case_of "unreachable network" # TEST-NET-1 answers nowhere: refused by the router, or silent
GPUPOOL_MANAGER=192.0.2.1:4780 says 100 "192.0.2.1:4780: .*$remedy" alone

case_of "a port that takes connections and says nothing"
python3 -c 'import socket, sys, time
s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen(8)
print(s.getsockname()[1], flush=True); time.sleep(60)' >"$folder/port" &
started+=($!)
until_true test -s "$folder/port"
GPUPOOL_MANAGER=127.0.0.1:$(cat "$folder/port") says 100 "127.0.0.1:[0-9]+: no answer within 3 s.*$remedy" alone

case_of "something else at that port"
python3 -c 'import http.server
s = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
print(s.server_port, flush=True); s.serve_forever()' >"$folder/http" 2>/dev/null &
started+=($!)
until_true test -s "$folder/http"
GPUPOOL_MANAGER=127.0.0.1:$(cat "$folder/http") says 100 "127.0.0.1:[0-9]+: .*$remedy" alone
unset GPUPOOL_MANAGER

case_of "the holder is gone"
GPUPOOL_HOLDER=/nowhere/holder says 100 "no lease holder at /nowhere/holder: No such file.*gpupool run" alone

case_of "no tool beside the library"
GPUPOOL_TOOL=/nowhere/gpupool says 100 "is .gpupool. installed beside this library \(/nowhere/gpupool\)" alone

case_of "an option that cannot be"
GPUPOOL_GPUS=none says 800 "GPUPOOL_GPUS: 'none' is not a whole number" alone

up
case_of "no trouble"
run alone
check "no call failed" test "$out$err" = "no call failed"
case_of "one program right behind another" # the first one's lease is still ending
for i in 1 2 3; do
  run alone
  check "no call failed in run $i" test "$out$err" = "no call failed"
done

no_lease() { ! gpupool leases | grep -Eq '^[0-9a-f]{8}'; }
case_of "nothing fits"
check "the last lease has ended" until_true no_lease # a device of one that ends is told otherwise
says 100 "2 devices on one server are wanted, but no server has more than 1: node: .*gpupool devices" env GPUPOOL_GPUS=2 \
  LD_LIBRARY_PATH="$library" "${first_error[@]}"
refused "no server has more than 1.*gpupool devices" gpupool run --gpus 2 -- "${first_error[@]}"
refused "the most that any server could give is 0: node: .* has only 2.0 GiB.*gpupool devices" gpupool run --memory 64GiB --wait 20s -- "${first_error[@]}"
run alone
check "a request too large harms nobody" test "$out$err" = "no call failed"
refused "there is no server named other in the pool; there are: node" gpupool run --server other -- "${first_error[@]}"

case_of "CUDA_VISIBLE_DEVICES names no device, or one twice"
granted() { gpupool audit | grep -c ' granted '; }
leases=$(granted)
CUDA_VISIBLE_DEVICES= run alone
check "the first failing call returns 100: $out" has "$out" "(100)"
check "nothing is said: $err" test -z "$err"
check "no lease was taken" test "$(granted)" -eq "$leases"
CUDA_VISIBLE_DEVICES=0,0 run alone
check "the first failing call returns 101: $out" has "$out" "(101)"
check "nothing is said: $err" test -z "$err"
check "its lease has ended" until_true no_lease

case_of "no device free"
background "$bin/gpupool" run --tenant alice -- sleep 30
held() { gpupool leases | grep -q alice; }
check "a lease is held" until_true held
who='1 device is wanted, none is free: node: GPU 0 \(gpupool software GPU\) is held by [^ ]+@[^ ]+ pid [0-9]+ sleep'
who+=' \(tenant alice, [0-9]+ m?s\); wait with --wait TIME \(GPUPOOL_WAIT\), share with --memory SIZE'
says 46 "$who" alone
refused "$who" wrapped

case_of "waiting for it"
(sleep 1 && kill "${started[-1]}") &
run env GPUPOOL_WAIT=20s LD_LIBRARY_PATH="$library" "${first_error[@]}"
check "it came" test "$out$err" = "no call failed"
down

case_of "a runtime directory too long for a socket"
long=$folder/$(printf 'x%.0s' {1..100})
for command in "up --detach --software 1" "devices" "run -- true"; do
  # shellcheck disable=SC2086
  run env GPUPOOL_STATE="$long" "$bin/gpupool" $command
  check "gpupool $command fails" test "$status" -ne 0
  check "gpupool $command says why: $err" has "$err" "too long a path for a Unix socket"
done

case_of "a driver that cannot be loaded"
run env GPUPOOL_STATE="$folder/none" "$bin/gpupool" up --detach --driver /nowhere/libcuda.so.1
check "up fails: $out" test "$status" -eq 1
check "says why: $err" has "$err" "/nowhere/libcuda.so.1"
check "took $ms ms" within "$ms" 10000
