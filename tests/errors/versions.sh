#!/bin/bash
# Parts of different versions that meet: library and holder, holder and server, server and manager.
#   versions.sh BIN LIBRARY FIRST_ERROR OTHERS     OTHERS: folder of the executables of "another version"
. "$(dirname "$0")/common.sh"
others=$4

case_of "call rows: the library's and the server's"
GPUPOOL_SERVER_WORKER=$others/worker_of_other_rows up
none="version mismatch: no server has a worker program for this client \(call rows [0-9a-f]{16} of gpupool [0-9.]+\); install the worker of that version there \(docs/admin.md, Upgrade\), or another version of the client here \(gpupool servers -v\)"
says 803 "$none" alone
refused "$none" gpupool run --wait 1m -- "${first_error[@]}"
run gpupool explain
check "explain: $status $out" test "$status" -eq 4
check "explain: $out" grep -Eq "it can never be served: $none" <<<"$out"
check "by server: $out" grep -Eq "^node +- +- +it has no worker program for this client" <<<"$out"
# The tool does not know of which version the library is that GPUPOOL_LIBRARY_DIR names: only the server does.
run env GPUPOOL_LIBRARY_DIR="$library" "$bin/gpupool" run -- "${first_error[@]}"
check "the server says so: $err" one_line "$err" "server node: version mismatch: call rows [0-9a-f]{16} of gpupool [0-9.]+ here, [0-9a-f]{16} of gpupool [0-9.]+ on the server; install one of the server's versions here, or the other worker program there \(--workers\)"
check "with the same code: $out" grep -q "(803)" <<<"$out"
down

case_of "pool protocol: servers, programs and tools with a manager of another version"
socket=$folder/other.sock
constant() { sed -n "s/^const $1 :UInt32 = \([0-9]*\);/\1/p" "$(dirname "$0")/../../schema/pool.capnp"; }
ours="$(constant oldestProtocol) to $(constant protocolVersion)"
refusal="version mismatch: the pool's manager speaks pool protocol 1000 to 1001, its caller speaks $ours; upgrade its caller first"
background "$others/manager_of_other_protocol" --config /dev/null --socket "$socket" --store memory 2>"$folder/manager.log"
until_true test -S "$socket"
GPUPOOL_SOFT_DEVICES=1 background "$bin/gpupool-server" --config /dev/null --name node --manager "unix:$socket" \
  --state "$folder/server" --driver "$library/../libcuda-soft.so" --warm 1 2>"$folder/server.log"
check "the server says so" until_true grep -qF "$refusal; this server is in no pool" "$folder/server.log"
export GPUPOOL_MANAGER=unix:$socket
says 803 "$refusal" alone
run gpupool run -- "${first_error[@]}"
check "under gpupool run" one_line "$err" "$refusal"
run gpupool devices
check "gpupool devices" one_line "$err" "$refusal"
unset GPUPOOL_MANAGER
check "the server said it once" test "$(grep -cF "$refusal" "$folder/server.log")" = 1
check "and so did the manager" one_log_line "$(cat "$folder/manager.log")" "$refusal"

holders=$(sed -n 's/^inline constexpr uint32_t kVersion = \([0-9]*\);/\1/p' "$(dirname "$0")/../../schema/holder.h")
case_of "holder protocol: a library with a holder of another version"
python3 - "$folder/holder" 1007 <<'PY' &
import os, socket, struct, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
listener.listen(4)
while True:
    client, _ = listener.accept()
    magic, version = struct.unpack_from("<II", client.recv(4096))
    client.send(struct.pack("<II", magic, int(sys.argv[2])) + bytes(100))
    client.close()
PY
started+=($!)
until_true test -S "$folder/holder"
GPUPOOL_HOLDER=$folder/holder says 803 \
  "version mismatch: this libcuda.so.1 and the lease holder are of different builds of gpupool \(holder protocol $holders here, 1007 there\)" alone

case_of "holder protocol: a holder with a library of another version"
said=$(python3 - "$bin/gpupool" <<'PY'
import os, socket, struct, subprocess, sys
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.dup2(theirs.fileno(), 3)
holder = subprocess.Popen([sys.argv[1], "hold", "--descriptor", "3"], pass_fds=[3])
ours.settimeout(10)
ours.send(struct.pack("<II", 0x47505531, 9) + bytes(160))
reply = ours.recv(4096)
print(struct.unpack_from("<I", reply, 8)[0], reply[-512:].split(b"\0")[0].decode())
ours.close()
os.close(3)
theirs.close()
holder.wait(10)
PY
)
check "it is told so" has "$said" "6 version mismatch: libcuda.so.1 speaks holder protocol 9, this gpupool speaks $holders; use both"
