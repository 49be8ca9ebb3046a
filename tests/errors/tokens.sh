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
GPUPOOL_LOG=debug up --port $port --tokens "$all" # what is logged at all
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
says 800 "the token of tenant 'servers' \(server\) cannot lease: use a user's token" alone

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
mkdir "$folder/copy" # the manager has locked its own
cp "$GPUPOOL_STATE"/manager.db* "$folder/copy/"
check "the lease's key is in no log, environment or command line" \
  test "$(python3 "$(dirname "$0")/keys.py" "$folder/copy/manager.db" "$GPUPOOL_STATE"/*.log "$folder/said")" = True
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

case_of "tokens that an operator makes"
made() { # made TENANT OPTION...: the path of its token file
  local tenant=$1
  shift
  GPUPOOL_MANAGER=$local_manager "$bin/gpupool" tokens create "$@" "$tenant" >"$folder/made-$tenant" 2>"$folder/made-said" ||
    fail "tokens create $tenant: $(cat "$folder/made-said")"
  chmod 600 "$folder/made-$tenant"
  echo "$folder/made-$tenant"
}
made_id() { sed -n 's/^gpupool: token \([0-9a-f]*\) of tenant.*/\1/p' "$folder/made-said"; }
operator=$(made operator --role operator --name canary)
check "it is the line of a token file" grep -Eq '^operator: gpt_[0-9a-f]{16}_[0-9a-f]{64}$' "$operator"
check "what it is, is said beside" one_line "$(cat "$folder/made-said")" "token [0-9a-f]{16} of tenant operator, operator, never expires"
export GPUPOOL_TOKEN_FILE=$operator
made erin >/dev/null
run gpupool tokens list
check "list: $err" grep -Eq "^[0-9a-f]{16} +operator +operator +canary +valid" <<<"$out"
check "one without a name has none: $out" grep -Eq "^[0-9a-f]{16} +erin +user +- +valid" <<<"$out"
run gpupool tokens list -o json
check "no list has the token" test -z "$(grep -F "$(sed 's/.*_//' "$operator")" <<<"$out")"
run gpupool cordon node
check "an operator's token cordons: $err" test "$status" = 0
gpupool uncordon node >/dev/null
viewer=$(made carol --role viewer --name screen)
carol=$(made dave --name laptop --expires 1h) carol_id=$(made_id)
GPUPOOL_TOKEN_FILE=$viewer says 800 "the token of tenant 'carol' \(viewer\) cannot lease: use a user's token" alone
GPUPOOL_TOKEN_FILE=$carol run gpupool tokens list
check "a user lists none" one_line "$err" "the token of tenant 'dave' \(user\) cannot manage tokens"
GPUPOOL_TOKEN_FILE=$(token_file renamed "alice: $(sed 's/.* //' "$carol")") says 800 \
  "this token is tenant 'dave's, and not 'alice's" alone

case_of "a revoked token"
GPUPOOL_TOKEN_FILE=$carol background "$bin/gpupool" run --ttl 2s -- "${first_error[@]}" --seconds 60 >"$folder/dave" 2>&1
until_true grep -q ready "$folder/dave"
GPUPOOL_TOKEN_FILE=$viewer run gpupool leases
check "others see a lease in use, and no name: $out" test -z "$(grep dave <<<"$out")"
check "in use" has "$out" "in use"
run gpupool tokens revoke "$carol_id"
check "$out$err" test "$out" = "gpupool: token $carol_id is revoked"
GPUPOOL_TOKEN_FILE=$carol says 800 "the token $carol_id \(laptop\) was revoked on .*; ask an operator for another one" alone
no_lease() { [ "$(GPUPOOL_MANAGER=$local_manager "$bin/gpupool" leases --json)" = "[]" ]; }
check "its lease ends when it is not renewed" until_true no_lease
run gpupool audit
check "the audit log has it: $out" grep -Eq "token-revoked .* dave +token $carol_id" <<<"$out"

case_of "quotas"
run gpupool quota set --devices 0.5 dave
check "$err" test "$out" = "gpupool: tenant dave may have 0.5 GPUs"
GPUPOOL_TOKEN_FILE=$(made dave --name desk) says 800 "tenant 'dave' may have 0.5 GPUs at once, and 1 is wanted" alone
GPUPOOL_TOKEN_FILE=$folder/made-dave run gpupool quota list
check "a tenant sees its own: $out$err" grep -Eq "^dave +0.00 of 0.50 " <<<"$out"
check "and no other's" test "$(wc -l <<<"$out")" = 2
GPUPOOL_TOKEN_FILE=$folder/made-dave run gpupool tenants
check "and itself: $out$err" grep -Eq "^dave +[1-9][0-9]* +0 +0 +0.00 of 0.50 " <<<"$out"
check "and no other tenant" test "$(wc -l <<<"$out")" = 2
run gpupool tenants -o wide
check "an operator sees all: $out$err" grep -q "^operator " <<<"$out"
check "with their states" grep -Eq "^TENANT .* STATES$" <<<"$out"
run gpupool tenants -o json
check "also as JSON: $out$err" grep -q '"tenant": "dave"' <<<"$out"
GPUPOOL_TOKEN_FILE=$folder/made-dave run gpupool quota set --devices 9 dave
check "and sets none" one_line "$err" "cannot set quotas"
run gpupool quota set --none dave
GPUPOOL_TOKEN_FILE=$folder/made-dave run alone
check "$out$err" test "$out$err" = "no call failed"

case_of "a pool that is closed by its first token"
mkdir -m 700 "$folder/closed"
run "$bin/gpupool-manager" init --config /dev/null --store "$folder/closed/manager.db"
check "init prints it: $err" grep -Eq '^operator: gpt_[0-9a-f]{16}_[0-9a-f]{64}$' <<<"$out"
first=$(token_file first "$out")
run "$bin/gpupool-manager" init --config /dev/null --store "$folder/closed/manager.db"
check "once: $out" test "$status" = 1 -a -z "$out"
check "$err" has "$err" "has tokens already"
background "$bin/gpupool-manager" --config /dev/null --store "$folder/closed/manager.db" --listen "127.0.0.1:$((port + 2))" \
  2>"$folder/closed/log"
answers() { GPUPOOL_TOKEN_FILE=$first GPUPOOL_MANAGER=127.0.0.1:$((port + 2)) "$bin/gpupool" servers >/dev/null 2>&1; }
check "the manager knows it" until_true answers
unset GPUPOOL_TOKEN_FILE
GPUPOOL_MANAGER=127.0.0.1:$((port + 2)) run gpupool servers
check "and lets in nobody without" one_line "$err" "requires a token"

case_of "no secret is told anywhere"
secrets=("$alice" "$servers")
for file in "$operator" "$viewer" "$folder/made-dave" "$first"; do secrets+=("$(sed -n 's/.*_//p' "$file")"); done
printf '%s\n' "${secrets[@]}" >"$folder/secrets" # a pattern in grep's own command line would be found
check "that is all of them" test "$(sort -u "$folder/secrets" | grep -c .)" = 6
told=$(grep -rlF -f "$folder/secrets" "$GPUPOOL_STATE" "$folder/closed" "$folder"/*.log "$folder/said" "$folder/dave" 2>/dev/null)
told+=$(cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\0' '\n' | grep -F -f "$folder/secrets")
check "no log, store, command line or environment has one: $told" test -z "$told"

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
