#!/bin/bash
# The server of a protected program (`gpupool run --protect`) dies, front and worker: the program goes on on another
# server, from the checkpoint that its holder has, and its results are right; where there is none, it ends with a line
# that says why. A server that comes back has nothing of it any more. Servers with one software GPU of 2 GiB each.
. "$(dirname "$0")/servers.sh"

up # the server `node`
protect=(--protect --protect-interval 1s)
wish=(--server first)
export GPUPOOL_LOG=info # of the programs: that they go on

case_of "a program that waits, and its server dies"
server first
steady waits --rounds 8
check "it is on that server: $(place)" is_at first
check "it is protected: $(said)" until_true protected
began=$(date +%s%3N)
kill_server first
check "it goes on: $(cat "$folder/waits.err")" until_true went_on waits 2
took
check "the lease is on the other server: $(place)" until_true is_at node
check "it is protected there: $(said)" until_true protected
go
ends waits
check "it is right: $status $out $err" right

case_of "one that works, for which nobody named a transport, and its server dies"
transport=
server first
rm -f "$folder/end"
protect=(--protect --protect-interval 1h)
steady works --until "$folder/end"
check "it is protected: $(said)" until_true protected
go
check "it runs: $(said)" until_true says_of_it 'the calls since then take'
began=$(date +%s%3N)
kill_server first
check "it goes on: $(cat "$folder/works.err")" until_true went_on works 2
took
check "calls are made again: $(cat "$folder/works.err")" grep -Eq ": [0-9]+ calls made again, [1-9][0-9]* of kernels" "$folder/works.err"
sleep 0.3 # some rounds
touch "$folder/end"
ends works
check "it is right: $status $out $err" right
transport=ucx

case_of "its code is in the cache of that server alone"
server first
run gpupool run --server first --memory 512MiB -- "${launcher[@]}" "$programs/steady_work" --rounds 1 --load
check "the code is there now: $out $err" right
rm -f "$folder/end"
steady loads --until "$folder/end" --load
check "it is protected: $(said)" until_true protected
go
check "it runs: $(said)" until_true says_of_it 'the calls since then take'
kill_server first
check "it goes on: $(cat "$folder/loads.err")" until_true went_on loads 2
touch "$folder/end"
ends loads
check "it is right: $status $out $err" right

case_of "its holder has no room for a checkpoint: it goes on from its beginning"
server first
rm -f "$folder/end"
protect=(--protect --protect-interval 1s --protect-size 1MiB)
steady begins --until "$folder/end" --load
check "it is protected all the same: $(said)" until_true says_of_it 'is protected from its beginning: .*no room'
go
check "it runs: $(said)" until_true says_of_it 'the calls since then take [0-9.]+ [KM]iB'
kill_server first
check "it goes on: $(cat "$folder/begins.err")" until_true went_on begins 2
check "the lease is on the other server: $(place)" until_true is_at node
check "it runs there: $(said)" until_true says_of_it 'the calls since then take'
touch "$folder/end"
ends begins
check "it is right: $status $out $err" right

case_of "a server that dies before the program's first call"
server first
# shellcheck disable=SC2016
launch early bash -c 'for _ in {1..600}; do [ -e "$1" ] && break; sleep 0.1; done; exec "${@:2}"' "" "$folder/begins-now" \
  "${launcher[@]}" "$programs/steady_work" --rounds 2
check "its lease is there: $(place)" until_true is_at first
kill_server first
touch "$folder/begins-now"
ends early
check "it is right: $status $out $err" right

case_of "a server that dies in the first moments of a program"
RANDOM=7 # handshakes, the first calls, the first checkpoint
protect=(--protect --protect-interval 1s)
for round in 1 2 3 4 5; do
  server first
  launch young "${launcher[@]}" "$programs/steady_work" --mib 16 --rounds 12 --pause 50
  check "its lease is there: $(place)" until_true is_at first
  sleep "$(printf '0.%03d' $((RANDOM % 300)))"
  kill_server first
  ends young
  check "it is right: $status $out $err" right
done
protect=(--protect --protect-interval 1h)

case_of "the front alone dies"
server first
rm -f "$folder/end"
steady front --until "$folder/end"
check "it is protected: $(said)" until_true protected
go
check "it runs: $(said)" until_true says_of_it 'the calls since then take'
began=$(date +%s%3N)
kill -KILL "${servers[first]}"
check "it goes on: $(cat "$folder/front.err")" until_true went_on front 2
took
touch "$folder/end"
ends front
check "it is right: $status $out $err" right

case_of "there is no other server"
server first
rm -f "$folder/end"
protect=(--protect --protect-interval 1h --protect-wait 2s)
steady alone --until "$folder/end"
check "it is protected: $(said)" until_true protected
run gpupool cordon node
check "node is cordoned: $err" test "$status" -eq 0
go
kill_server first
ends alone
check "it ends: $status $out $err" honest
# The front may still have said that the worker has died.
check "and says what is lost: $err" grep -Eq "the GPU server.* (is gone|has died).*no other server: .*the checkpoint is [0-9]+s old" <<<"$err"
run gpupool uncordon node

case_of "a server that is stopped, and comes back when the program has gone on"
server first
rm -f "$folder/end"
protect=(--protect --protect-interval 1h --protect-silence 2s)
steady stopped --until "$folder/end"
check "it is protected: $(said)" until_true protected
go
check "it runs: $(said)" until_true says_of_it 'the calls since then take'
read -ra frozen <<<"$(processes_of first)"
began=$(date +%s%3N)
kill -STOP "${frozen[@]}"
check "it goes on: $(cat "$folder/stopped.err")" until_true went_on stopped 2
took
kill -CONT "${frozen[@]}"
has_session() { pgrep -P "${servers[first]}" | while read -r pid; do readlink "/proc/$pid/fd/1"; done | grep -q gpupool-output; }
has_none() { ! has_session; }
check "nothing of it is left there" until_true has_none
check "the lease is on the other server: $(place)" is_at node
touch "$folder/end"
ends stopped
check "it is right: $status $out $err" right
check "it went on once: $err" test "$(grep -c 'goes on at another one' <<<"$err")" -eq 1
kill_server first

case_of "a server that is stopped, and a program that has no checkpoint"
server first
rm -f "$folder/end"
# Silence counts from its first call on: --stall-time would be too long to be waited for here.
protect=(--protect --protect-interval 1h --protect-silence 2s --stall-time 1h --protect-size 1MiB)
steady unkept --until "$folder/end"
check "it is protected from its beginning: $(said)" until_true says_of_it 'is protected from its beginning'
go
check "it runs: $(said)" until_true says_of_it 'the calls since then take'
read -ra frozen <<<"$(processes_of first)"
began=$(date +%s%3N)
kill -STOP "${frozen[@]}"
check "it goes on: $(cat "$folder/unkept.err")" until_true went_on unkept 2
took
kill_server first
touch "$folder/end"
ends unkept
check "it is right: $status $out $err" right
protect=(--protect --protect-interval 1h --protect-silence 2s)

case_of "a server that is stopped for a while, and a program that could not go on elsewhere"
server first
rm -f "$folder/end"
protect+=(--protect-log 1KiB)
steady waiting --until "$folder/end"
check "it is protected: $(said)" until_true protected
go
check "it is protected only while idle: $(said)" until_true says_of_it 'is protected only while idle'
read -ra frozen <<<"$(processes_of first)"
kill -STOP "${frozen[@]}"
sleep 4 # longer than --protect-silence
kill -CONT "${frozen[@]}"
touch "$folder/end"
ends waiting
check "it is right: $status $out $err" right
check "it stayed there: $err" eval '! grep -q "goes on at another one" <<<"$err"'

case_of "a server that is shut down"
rm -f "$folder/end"
protect=(--protect --protect-interval 1h)
steady shut --until "$folder/end"
check "it is protected: $(said)" until_true protected
check "it is on that server: $(place)" is_at first
go
check "it runs: $(said)" until_true says_of_it 'the calls since then take'
began=$(date +%s%3N)
kill -TERM "${servers[first]}"
check "it goes on: $(cat "$folder/shut.err")" until_true went_on shut 2
took
check "the lease is on the other server: $(place)" until_true is_at node
touch "$folder/end"
ends shut
check "it is right: $status $out $err" right
check "the server has ended" until_true eval '! kill -0 "${servers[first]}" 2>/dev/null'

case_of "a server that is shut down and started again, and there is no other"
server first
rm -f "$folder/end"
steady again --until "$folder/end"
check "it is protected: $(said)" until_true protected
run gpupool cordon node
go
check "it runs: $(said)" until_true says_of_it 'the calls since then take'
kill -TERM "${servers[first]}"
wait "${servers[first]}" 2>/dev/null
server first
check "it goes on: $(cat "$folder/again.err")" until_true went_on again 2
check "the lease is on that server's next life: $(place)" until_true is_at first
touch "$folder/end"
ends again
check "it is right: $status $out $err" right
run gpupool uncordon node
kill_server first

case_of "kills at any moment"
protect=(--protect --protect-interval 1s)
RANDOM=11 # the moments of kills; what comes of them is one of two things, whenever they are
resumed=0 ended=0
for round in 1 2 3; do
  server first
  launch any "${launcher[@]}" "$programs/steady_work" --mib 8 --rounds 12 --pause $((RANDOM % 400))
  until_true is_at first || fail "no lease: $(cat "$folder/any.err")"
  sleep "$((RANDOM % 3)).$((5 + RANDOM % 5))"
  kill_server first
  ends any
  if right; then resumed=$((resumed + 1)); else ended=$((ended + 1)); fi
  check "round $round: right, or an honest end: $status $out $err" eval 'right || honest'
done
echo "killed at any moment: $resumed were right, $ended ended with the reason"

case_of "kept by the server alone"
server first
protect=(--protect --protect-keep server)
steady server --rounds 3
check "it is protected: $(said)" until_true protected
kill_server first
go
ends server
check "it ends: $status $out $err" honest

case_of "the whole pool is taken down"
wish=()
protect=(--protect)
steady down --rounds 3
check "it is protected: $(said)" until_true protected
run gpupool down
check "it is down: $out $err" test "$status" -eq 0
go
await_end down
check "it ends, and waits for no other server: $status $out $err" honest
check "and says why: $err" grep -q "is shutting down" <<<"$err"
