#!/bin/bash
# The process that holds a program's lease is killed: `gpupool run` starts another one, which takes the lease over, and the
# program runs on. Of a protected one the checkpoints go with the holder, so that it says that it is not protected until the
# next holder has one. A program without `gpupool run` loses its lease when that was not renewed in time.
. "$(dirname "$0")/servers.sh"

# A busy machine sees late that a holder is gone.
export GPUPOOL_MANAGER_TAKE_OVER=30s
up # the server `node`
export GPUPOOL_LOG=info
holder() { pgrep -P "$launched" -x gpupool | head -1; }
taken_over() { grep -q "was killed: another one takes the lease over" "$folder/$1.err"; }
has_other_holder() { [ -n "$(holder)" ] && [ "$(holder)" != "$killed" ]; }
kill_holder() { # kill_holder NAME
  killed=$(holder)
  check "it has a holder" test -n "$killed"
  kill -KILL "$killed"
  check "another one takes over: $(cat "$folder/$1.err")" until_true has_other_holder
  check "and the user is told: $(cat "$folder/$1.err")" until_true taken_over "$1"
}
busy_again() { says_of_it 'is protected .*the calls since then take'; }

case_of "over shm"
transport=shm protect=() wish=(--ttl 2s)
rm -f "$folder/end"
steady shared --until "$folder/end"
lease=$(living | awk '{ print $1 }')
go
kill_holder shared
sleep 4 # twice its time to live
check "it has its lease: $(gpupool leases)" test "$(living | awk '{ print $1 }')" = "$lease"
touch "$folder/end"
ends shared
check "it is right: $status $out $err" right

transport=ucx protect=(--protect=1s) wish=(--server first --ttl 2s)
case_of "a protected program, and then its server dies"
server first
rm -f "$folder/end"
steady both --until "$folder/end"
check "it is protected: $(said)" until_true protected
go
kill_holder both
sleep 4
check "it is on that server: $(living)" is_at first
check "it is protected again: $(said)" until_true busy_again
kill_server first
check "it goes on: $(cat "$folder/both.err")" until_true went_on both 2
touch "$folder/end"
ends both
check "it is right: $status $out $err" right

case_of "a holder that was killed keeps nothing, and that is said"
wish=(--server first --ttl 1m)
server first
rm -f "$folder/end"
protect=(--protect=1h)
steady lapses --until "$folder/end"
check "it is protected: $(said)" until_true protected
go
check "it runs: $(said)" until_true busy_again
kill -STOP "$launched" # no other one comes
killed=$(holder)
kill -KILL "$killed"
check "it is not protected: $(said)" until_true says_of_it "is not protected: .*its holder, which keeps its checkpoints, is gone"
pgrep -P "${servers[first]}" | while read -r pid; do
  ! readlink "/proc/$pid/fd/1" 2>/dev/null | grep -q gpupool-output || kill -KILL "$pid"
done
kill -CONT "$launched"
check "another one takes over: $(cat "$folder/lapses.err")" until_true taken_over lapses
check "its worker is restored: $(cat "$folder/lapses.err")" until_true grep -q "worker has died, and it goes on" "$folder/lapses.err"
check "it is protected again: $(said)" until_true busy_again
touch "$folder/end"
ends lapses
check "it is right: $status $out $err" right

case_of "holder and server die together"
wish=(--server first --ttl 2s)
rm -f "$folder/end"
steady together --until "$folder/end"
check "it is protected: $(said)" until_true protected
go
check "it runs: $(said)" until_true busy_again
killed=$(holder)
kill -KILL "$killed"
kill_server first
touch "$folder/end"
ends together
check "right, or an honest end: $status $out $err" eval 'right || honest'

case_of "a program without gpupool run"
rm -f "$folder/end"
# shellcheck disable=SC2016
LD_LIBRARY_PATH=$library GPUPOOL_TTL=2s GPUPOOL_WAIT=20s GPUPOOL_MEMORY=512MiB GPUPOOL_TRANSPORT=ucx "${launcher[@]}" "$programs/steady_work" --pause 20 --until "$folder/end" \
  >"$folder/alone.out" 2>"$folder/alone.err" &
launched=$!
started+=($!)
check "it has a lease: $(gpupool leases)" until_true eval '[ -n "$(living)" ]'
holder_alone() { pgrep -P "$launched" -x gpupool; }
until_true holder_alone >/dev/null
kill -KILL "$(holder_alone)"
ends alone
check "it ends: $status $out $err" test "$status" -ne 0
check "and says why: $err" grep -Eq "the lease has ended: its holder(, process [0-9]+, was killed| has not renewed it for 2 s); start the program again" <<<"$err"
