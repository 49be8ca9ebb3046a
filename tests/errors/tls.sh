#!/bin/bash
# TLS: a pool of two servers whose manager has a certificate; who is refused and what is said; another certificate while
# programs run; and where tokens and keys never appear.
. "$(dirname "$0")/common.sh"

umask 077
port=$((20000 + $$ % 10000)) home=$folder/manager
mkdir "$home"
manager() { "$bin/gpupool-manager" "$1" --config /dev/null --store "$home/manager.db" "${@:2}"; }
elsewhere=$(ip -4 -o address show scope global 2>/dev/null | awk '{ sub("/.*", "", $4); print $4; exit }')

case_of "tokens without a certificate"
run "$bin/gpupool-manager" init --config /dev/null --store "$folder/plain.db" --tls off
check "init makes none then: $out" test "$(grep -c '' <<<"$out")" = 1 -a ! -e "$folder/plain.crt"
run timeout 10 "$bin/gpupool-manager" --config /dev/null --store "$folder/plain.db" --listen "*:$port"
check "the manager does not listen to others: $err" one_line "${err/gpupool manager/gpupool}" \
  "there are tokens, and an address that other machines reach has no TLS: .*gpupool-manager certificate.*--tls off"
check "a wrong command line" test "$status" = 2
GPUPOOL_LOG=info background "$bin/gpupool-manager" --config /dev/null --store memory --listen "*:$port" \
  --socket "$folder/open.sock" 2>"$folder/open.log"
until_true grep -q "listening" "$folder/open.log"
GPUPOOL_MANAGER=unix:$folder/open.sock run gpupool tokens create --role operator operator
check "nor is a first token made" one_line "$err" "before there are tokens: .*gpupool-manager certificate"
kill "${started[-1]}"
wait "${started[-1]}"

case_of "a pool with TLS"
manager init >"$folder/operator" 2>"$folder/init"
check "a token file has the certificate" grep -Eq '^certificate sha256:[0-9a-f]{64}$' "$folder/operator"
check "which the administrator can have again" \
  test "$(manager certificate 2>/dev/null)" = "$(tail -1 "$folder/operator")"
check "its key is the manager's alone" test "$(stat -c %a "$home/manager.key")" = 600
GPUPOOL_LOG=debug background "$bin/gpupool-manager" --config /dev/null --store "$home/manager.db" --listen "*:$port" \
  --http-listen "127.0.0.1:$((port + 1))" 2>"$folder/manager.log"
manager_pid=${started[-1]}
until_true grep -q REST "$folder/manager.log"
export GPUPOOL_MANAGER=127.0.0.1:$port
GPUPOOL_TOKEN_FILE=$folder/operator gpupool tokens create servers >"$folder/servers" 2>>"$folder/said"
GPUPOOL_TOKEN_FILE=$folder/operator gpupool tokens create alice >"$folder/alice" 2>>"$folder/said"
check "new ones too" test "$(tail -1 "$folder/alice")" = "$(tail -1 "$folder/operator")"
join() { # join NAME TOKEN_FILE: a server, whose first address has no manager; its log is $folder/NAME.log
  GPUPOOL_SOFT_DEVICES=1 GPUPOOL_LOG=info background "$bin/gpupool-server" --config /dev/null --name "$1" \
    --manager "127.0.0.1:1, 127.0.0.1:$port" --state "$folder/$1" --driver "$library/../libcuda-soft.so" --warm 1 \
    --token-file "$2" 2>"$folder/$1.log"
}
join one "$folder/servers"
join two "$folder/servers"
export GPUPOOL_TOKEN_FILE=$folder/alice
alive() { test "$(gpupool servers 2>/dev/null | grep -c ' alive ')" = 2; }
check "two servers join it" until_true alive
for server in one two; do
  GPUPOOL_SERVER=$server run alone
  check "the library alone, on $server: $out$err" test "$out$err" = "no call failed"
done
run wrapped
check "wrapped: $out$err" test "$out$err" = "no call failed"
ask() { # ask ADDRESS: over REST, as alice
  python3 - "$1" "$home/manager.crt" "$folder/alice" <<'PY'
import ssl, sys, urllib.request
address, certificate, token = sys.argv[1], sys.argv[2], open(sys.argv[3]).readline().split()[-1]
request = urllib.request.Request(address, headers={"Authorization": "Bearer " + token})
print(urllib.request.urlopen(request, context=ssl.create_default_context(cafile=certificate)).read().decode())
PY
}
run ask "https://localhost:$((port + 1))/v1/servers"
check "REST, by the certificate: $err" has "$out" '"name":"two"'
run ask "http://127.0.0.1:$((port + 1))/v1/servers"
check "and without TLS from this machine: $err" has "$out" '"name":"two"'

case_of "another certificate than the token file's"
other="certificate sha256:$(printf '0%.0s' {1..64})"
{ head -1 "$folder/alice" && echo "$other"; } >"$folder/wrong"
shown=$(tail -1 "$folder/alice")
GPUPOOL_TOKEN_FILE=$folder/wrong says 800 \
  "the manager at 127.0.0.1:$port is not trusted: it shows the $shown, and the token file names ${other#* }" alone
{ head -1 "$folder/servers" && echo "$other"; } >"$folder/mistaken-servers"
join mistaken "$folder/mistaken-servers"
check "a server says so" until_true grep -q "is not trusted: it shows the $shown.*; this server is in no pool" "$folder/mistaken.log"

case_of "a client without TLS, from elsewhere"
head -1 "$folder/alice" >"$folder/bare"
if [ -n "$elsewhere" ]; then
  GPUPOOL_MANAGER=$elsewhere:$port GPUPOOL_TOKEN_FILE=$folder/bare says 800 "the manager speaks TLS: put the line" alone
  GPUPOOL_MANAGER=$elsewhere:$port run alone
  check "with it: $out$err" test "$out$err" = "no call failed"
else
  skip "this machine has no address but its loopback"
fi

case_of "another certificate while a program runs"
next=$(manager certificate --tls-certificate "$home/next.crt" --tls-key "$home/next.key" 2>/dev/null)
for file in operator servers alice; do echo "$next" >>"$folder/$file"; done
background "$bin/gpupool" run --ttl 2s -- "${first_error[@]}" --seconds 60 >"$folder/program" 2>&1
program=${started[-1]}
until_true grep -q ready "$folder/program"
mv "$home/next.key" "$home/manager.key"
mv "$home/next.crt" "$home/manager.crt"
kill -HUP "$manager_pid"
check "the manager reads it" until_true grep -q "is ${next#* }" "$folder/manager.log"
check "who knows both goes on" until_true alive
sed -i "/$shown/d" "$folder/alice"
run alone
check "and who knows the new one: $out$err" test "$out$err" = "no call failed"
{ head -1 "$folder/alice" && echo "$shown"; } >"$folder/old"
GPUPOOL_TOKEN_FILE=$folder/old says 800 "is not trusted: it shows the $next" alone
kill "$manager_pid"
wait "$manager_pid"
GPUPOOL_LOG=debug background "$bin/gpupool-manager" --config /dev/null --store "$home/manager.db" --listen "*:$port" \
  2>>"$folder/manager.log"
check "servers come back to it" until_true alive
holds() { gpupool leases 2>/dev/null | grep -q " alice "; }
check "and so does the program's lease" until_true holds
sleep 2.5 # the lease's time to live, and more
check "which is renewed" holds
check "the program runs: $(cat "$folder/program")" kill -0 "$program"

case_of "no secret is told anywhere"
for file in operator servers alice; do sed -n 's/.*_//p' "$folder/$file"; done >"$folder/secrets"
grep -v -- ----- "$home/manager.key" >>"$folder/secrets"
check "that is all of them" test "$(sort -u "$folder/secrets" | grep -c .)" -ge 5
mkdir "$folder/copy" # the manager has locked its own
cp "$home"/manager.db* "$folder/copy/"
told=$(grep -lF -f "$folder/secrets" "$folder"/*.log "$folder/said" "$folder/init" "$folder/program" "$folder"/copy/* 2>/dev/null)
told+=$(cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\0' '\n' | grep -F -f "$folder/secrets")
check "no token or key in a log, store, command line or environment: $told" test -z "$told"
check "nor a lease's key" \
  test "$(python3 "$(dirname "$0")/keys.py" "$folder/copy/manager.db" "$folder"/*.log "$folder/program")" = True
kill "$program"
