#!/bin/bash
# Tokens: who must show one, what is said to those who show none or a wrong one, and where tokens never appear.
. "$(dirname "$0")/common.sh"

alice=$(printf 'alice-%032d' 1) servers=$(printf 'servers-%032d' 2)
token_file() { # token_file NAME LINE...: prints its path
  local path=$folder/$1
  shift
  printf '%s\n' "$@" >"$path"
  chmod 600 "$path"
  echo "$path"
}
all=$(token_file all "# everybody's" "alice: $alice" "bob: $(printf 'bob-%032d' 3)" "servers: $servers")
right=$(token_file right "alice: $alice")
port=$((20000 + $$ % 10000))
up --port $port --tokens "$all"
local_manager=unix:$GPUPOOL_STATE/manager.sock
export GPUPOOL_MANAGER=127.0.0.1:$port

case_of "the right token"
run env GPUPOOL_TOKEN_FILE="$right" LD_LIBRARY_PATH="$library" "${first_error[@]}"
check "alone: $out$err" test "$out$err" = "no call failed"
run gpupool run --token-file "$right" -- "${first_error[@]}"
check "wrapped: $out$err" test "$out$err" = "no call failed"
run gpupool devices --token-file "$right"
check "gpupool devices" has "$out" "software GPU"
run gpupool run --token-file "$all" --tenant alice -- "$bin/gpupool" leases --token-file "$right"
check "one of several, the tenant's: $out$err" grep -Eq " alice +[^ ]+@" <<<"$out"

case_of "no token"
says 800 "the manager at 127.0.0.1:$port requires a token: .*--token-file" alone
refused "the manager at 127.0.0.1:$port requires a token: .*--token-file" wrapped
run gpupool leases
check "gpupool leases" one_line "$err" "the manager at 127.0.0.1:$port requires a token"

case_of "a wrong token"
wrong=$(token_file wrong "alice: not-the-token-of-alice")
refusal="the manager refuses the token of tenant 'alice': it has another one for this tenant, or none; check the token file"
export GPUPOOL_TOKEN_FILE=$wrong
says 800 "$refusal" alone
refused "$refusal" wrapped
case_of "a tenant that the manager does not know"
export GPUPOOL_TOKEN_FILE=$(token_file unknown "carol: $alice")
says 800 "the manager refuses the token of tenant 'carol'" alone

case_of "a server's token leases nothing, a user's joins nothing"
export GPUPOOL_TOKEN_FILE=$(token_file servers "servers: $servers")
says 800 "the token of tenant 'servers' cannot lease: use a user's token" alone

case_of "files that are no token files"
export GPUPOOL_TOKEN_FILE=$folder/nowhere
says 800 "token file $folder/nowhere: No such file" alone
refused "token file $folder/nowhere: No such file" wrapped
export GPUPOOL_TOKEN_FILE=$(token_file open "alice: $alice")
chmod 644 "$GPUPOOL_TOKEN_FILE"
says 800 "token file $folder/open: others may read it: chmod 600" alone
export GPUPOOL_TOKEN_FILE=$(token_file short "alice: 12345")
says 800 "line 1: a token is a word of at least 16 characters \(openssl rand -hex 32" alone
export GPUPOOL_TOKEN_FILE=$(token_file shapeless "$alice")
says 800 "line 1: is not of the form 'tenant: token'" alone
GPUPOOL_TENANT=dave GPUPOOL_TOKEN_FILE=$right says 800 "token file $right: holds no token of tenant 'dave'" alone
unset GPUPOOL_TOKEN_FILE
chmod 644 "$all"
run "$bin/gpupool-manager" --config /dev/null --socket "$folder/m.sock" --store memory --tokens "$all"
check "the manager does not start with such a file either" has "$err" "others may read it"
chmod 600 "$all"

case_of "a token is exchanged while the manager runs"
new=$(token_file new "alice: $(printf 'alice-%032d' 9)")
sed -i "s/$alice/$(sed 's/.* //' "$new")/" "$all"
GPUPOOL_TOKEN_FILE=$new run alone
check "the new one holds at once: $err" test "$out$err" = "no call failed"
GPUPOOL_TOKEN_FILE=$right says 800 "$refusal" alone
echo nonsense >>"$all"
GPUPOOL_TOKEN_FILE=$new run alone
check "a file that cannot be used changes nothing: $err" test "$out$err" = "no call failed"
check "and is logged once" one_log_line "$(grep 'stay valid' "$GPUPOOL_STATE/manager.log")" \
  "line 5: is not of the form 'tenant: token'; the tokens that were read before stay valid"
sed -i "/nonsense/d; s/$(sed 's/.* //' "$new")/$alice/" "$all"

case_of "the Unix socket's own user needs none"
GPUPOOL_MANAGER=$local_manager run alone
check "alone: $out$err" test "$out$err" = "no call failed"

case_of "a manager without tokens is not believed"
GPUPOOL_STATE=$folder/other gpupool up --detach --software 1 --port $((port + 1)) >/dev/null
GPUPOOL_MANAGER=127.0.0.1:$((port + 1)) GPUPOOL_TOKEN_FILE=$right says 800 \
  "the manager at 127.0.0.1:$((port + 1)) requires no token, so it does not prove that it is yours" alone
GPUPOOL_STATE=$folder/other gpupool down >/dev/null

case_of "where the token is not"
python3 - "$port" "$folder" <<'PY' & # passes bytes on and keeps them
import socket, sys, threading
there, folder = int(sys.argv[1]), sys.argv[2]
log = open(folder + "/wire", "wb", buffering=0)
def pump(a, b):
    try:
        while data := a.recv(65536):
            log.write(data)
            b.sendall(data)
    except OSError:
        pass
    b.close()
listener = socket.socket(); listener.bind(("127.0.0.1", 0)); listener.listen(8)
open(folder + "/wire.port", "w").write(str(listener.getsockname()[1]))
while True:
    near, _ = listener.accept()
    far = socket.create_connection(("127.0.0.1", there))
    for pair in ((near, far), (far, near)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
PY
started+=($!)
until_true test -s "$folder/wire.port"
GPUPOOL_MANAGER=127.0.0.1:$(cat "$folder/wire.port") background \
  "$bin/gpupool" run --token-file "$right" -- "${first_error[@]}" --seconds 30 >"$folder/said"
until_true grep -q ready "$folder/said"
check "the tenant crossed the wire" grep -q alice "$folder/wire"
check "the token did not" test -z "$(grep -c "$alice" "$folder/wire" | grep -v '^0$')"
seen=""
for process in "${started[-1]}" $(pgrep -P "${started[-1]}"); do
  seen+=$(cat "/proc/$process/environ" "/proc/$process/cmdline" 2>/dev/null | tr '\0' '\n' | grep -F "$alice")
done
check "nor is it in anybody's environment or command line" test -z "$seen"
kill "${started[-1]}"

case_of "servers"
join() { # join NAME TOKEN_FILE: a server over TCP; its log is $folder/NAME.log
  GPUPOOL_SOFT_DEVICES=1 GPUPOOL_LOG=info background "$bin/gpupool-server" --config /dev/null --name "$1" \
    --manager "127.0.0.1:$port" --state "$folder/$1" --driver "$library/../libcuda-soft.so" --warm 1 ${2:+--token-file "$2"} \
    2>"$folder/$1.log"
}
join good "$folder/servers"
joined() { GPUPOOL_MANAGER=$local_manager gpupool servers | grep -q "^good .*alive"; }
check "the right token joins" until_true joined
join none ""
check "none: told so" until_true grep -q "the manager at 127.0.0.1:$port requires a token: .*; this server is in no pool" "$folder/none.log"
check "and once" test "$(grep -c 'requires a token' "$folder/none.log")" = 1
join impostor "$(token_file not-servers "servers: $alice")"
check "a wrong one" until_true grep -q "the manager refuses the token of tenant 'servers'" "$folder/impostor.log"
join stranger "$right"
check "a user's" until_true grep -q "token file $right: holds no token of tenant 'servers'" "$folder/stranger.log"
check "only the right one is in the pool" test "$(GPUPOOL_MANAGER=$local_manager gpupool servers | grep -c alive)" = 2
for pid in "${started[@]: -4}"; do kill "$pid" 2>/dev/null; done

case_of "guessing"
export GPUPOOL_TOKEN_FILE=$wrong
slowed=no
for i in $(seq 12); do
  run gpupool devices
  [[ $err != *"too many wrong tokens from 127.0.0.1; wait a minute"* ]] || slowed=yes
done
check "is slowed down" test $slowed = yes
# One guess is heard every six seconds: right after one, nobody is heard for as long.
heard() { run gpupool devices; [[ $err != *"too many wrong tokens"* ]]; }
check "and heard now and then" until_true heard
GPUPOOL_TOKEN_FILE=$right says 800 "too many wrong tokens from 127.0.0.1; wait a minute" alone
GPUPOOL_MANAGER=$local_manager GPUPOOL_TOKEN_FILE=$right run alone
check "others are not" test "$out$err" = "no call failed"
