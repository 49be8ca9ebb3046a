#!/bin/bash
# A protected program whose worker is killed, and whose results hang on one part of the replay: uploads, queries (two
# streams that only the host's queries order), functions (host functions), clock (results that differ from run to run, so
# that it has to end). Or a program that leaves memory that it shares with its worker (leaves), and comes back (returns). The
# last argument names it.
# GPUPOOL_LIBRARY_DIR: with that client library.
. "$(dirname "$0")/../failover/common.sh"
part=${!#}
protect=(--protect=1h)
declare -A work=([uploads]=--upload [queries]=--by-query [functions]=--host-function [clock]=--clock)

# A first checkpoint is followed by a second one after a second, and that by none within the hour: its calls stay.
busy_since_the_second() { says_of_it 'checkpoint is ([4-9]|[1-9][0-9]+)s old, .*the calls since then take'; }
# In order too soon, or wrong: it has ended.
gone_on() { says_of_it "restored 1 time" || ! kill -0 "$launched" 2>/dev/null; }

[ "$part" != returns ] || exec "$(dirname "$0")/../sessions/servers.sh" "${@:1:3}" shm
if [ "$part" = leaves ]; then
  for seed in 1 2 3 4 5 6; do
    case_of "leaves, $seed"
    GPUPOOL_DISTURB=stream:$seed up
    run gpupool run --memory 1GiB -- "${launcher[@]}" "$programs/written_meanwhile"
    check "it has left: $(cat "$GPUPOOL_STATE/server.log")" grep -q 'has moved to worker' "$GPUPOOL_STATE/server.log"
    check "the result: it is right: $status $out $err" test "$status" -eq 0
    gpupool down >/dev/null
  done
  exit
fi
up
case_of "$part"
steady "$part" "${work[$part]}" --until "$folder/end"
check "it is protected: $(said)" until_true says_of_it 'is protected .* checkpoint is'
go
check "it runs: $(said)" until_true busy_since_the_second
session_workers | xargs -r kill -KILL
check "it has gone on, or has ended" until_true gone_on
[ "$part" != clock ] || sleep 1 # or ends in that time
touch "$folder/end"
await_end "$part"
if [ "$part" = clock ]; then
  check "the result: it ends: $status $out $err" honest
else
  check "the result: it is right: $status $out $err" right
fi
