#!/bin/bash
# Servers of protected programs (`gpupool run --protect`) end at bad moments: while a checkpoint is on its way to the
# holder, two of three at once, while they restore the program. It goes on with right results wherever its holder has a
# checkpoint; also when its lease is suspended then, by order or for a request of a higher class. And a holder without room
# for a checkpoint says so, and takes it later. The last argument names the part.
. "$(dirname "$0")/servers.sh"
part=${!#}

export GPUPOOL_LOG=info # of the servers and programs: what is under way
logged() { grep -c "$2" "$folder/$1.log"; }
has_logged() { grep -q "$2" "$folder/$1.log"; }
died_again() { grep -q "the worker of epoch $2 has died, too" "$folder/$1.err"; }
gone_on() { grep -Eq "it goes on at another one as epoch [2-9]: " "$folder/$1.err"; }
ended() { ! kill -0 "${servers[$1]}" 2>/dev/null; }
# works NAME OPTIONS...: steady_work in a lease on the server `first`; it has a checkpoint, and makes calls since then.
works() {
  local name=$1
  shift
  rm -f "$folder/end"
  wish=(--server first)
  steady "$name" "$@" --until "$folder/end"
  check "it is protected: $(said)" until_true protected
  check "it is on that server: $(place)" is_at first
  go
  check "it runs: $(said)" until_true says_of_it 'the calls since then take'
}
goes_on_at() { # goes_on_at SERVER NAME
  check "it goes on: $(cat "$folder/$2.err")" until_true gone_on "$2"
  check "the lease is on $1: $(living)" until_true is_at "$1"
  touch "$folder/end"
  ends "$2"
  check "it is right: $status $out $err" right
}

export GPUPOOL_MANAGER_PREEMPT=suspend GPUPOOL_MANAGER_PREEMPT_MIN_RUN=0s
up # the server `node`
server first

if [ "$part" = room ]; then
case_of "a holder that has room for one of two programs"
protect=(--protect --protect-interval 1s --protect-size 256MiB) # each has 96 MiB that change, beside those of the one before
wish=(--server first)
# The first one waits, so that its checkpoint stays what it is.
# shellcheck disable=SC2016
launch room bash -c '"${@:2}" --rounds 1 --ready <&0 & for _ in {1..600}; do [ -e "$1/two-begins" ] && break; sleep 0.1; done
  "${@:2}" --pause 300 --until "$1/two" & wait' "" "$folder" "${launcher[@]}" "$programs/steady_work" --mib 96
check "the first one is protected: $(said)" until_true says_of_it 'is protected .* checkpoint is .* old, 1[0-9][0-9] MiB'
touch "$folder/two-begins"
check "there is no room for what the second has: $(said)" until_true says_of_it 'its holder: no room for it: '
check "the first one has its checkpoint still: $(said)" says_of_it 'is protected'
go # and it ends
check "there is room now: $(said)" until_true eval 'says_of_it "is protected" && ! says_of_it "no room|is not protected"'
touch "$folder/two"
ends room
check "both are right: $status $out $err" test "$(grep -c '^PASS' <<<"$out")" -eq 2
fi

if [ "$part" = shutdown ]; then
case_of "a server that is shut down while a checkpoint is on its way"
protect=(--protect --protect-interval 1s)
kept() { logged first 'checkpoint of frame .* is kept'; }
on_its_way() { [ "$(kept)" -gt "$(logged first 'its holder has its checkpoint')" ]; }
hit=false
for round in 1 2 3; do # the moment is short
  [ $round = 1 ] || server first
  works sent --mib 320 --pause 50
  for _ in {1..2000}; do on_its_way && break; done
  kill -TERM "${servers[first]}"
  check "the server has ended" until_true ended first
  on_its_way && hit=true
  goes_on_at node sent
  $hit && break
done
check "a checkpoint was on its way" $hit

case_of "a server that is shut down while the first checkpoint is on its way"
server first
rm -f "$folder/end"
launch early "${launcher[@]}" "$programs/steady_work" --mib 128 --pause 50 --until "$folder/end"
for _ in {1..2000}; do [ "$(kept)" -gt 0 ] && break; done
kill -TERM "${servers[first]}"
until_true ended first
touch "$folder/end"
ends early
check "right, or an honest end: $status $out $err" eval 'right || honest'

fi

protect=(--protect --protect-interval 1h)
if [ "$part" = two ]; then
case_of "two servers of three are shut down at once"
server second
works two
kill -TERM "${servers[first]}" "${servers[second]}"
goes_on_at node two
check "both have ended" until_true eval 'ended first && ended second'

case_of "both servers are shut down, and one is started again"
server first
server second
works both
run gpupool cordon node
kill -TERM "${servers[first]}" "${servers[second]}"
check "both have ended" until_true eval 'ended first && ended second'
server second
goes_on_at second both
fi

if [ "$part" = again ]; then
server second
run gpupool cordon node
case_of "the second server dies while it restores the program"
works restored
kill_server first
check "the second one restores it" until_true has_logged second 'comes from another server as epoch 2'
kill_server second
run gpupool uncordon node
goes_on_at node restored
run gpupool cordon node

case_of "the second server dies while it is sent the calls again"
server first
server second
works again
sleep 2 # that many calls
kill_server first
check "the program has come" until_true has_logged second 'has come from another server'
kill_server second
run gpupool uncordon node
goes_on_at node again
check "it was before it went on: $err" eval 'died_again again 2 || grep -q "as epoch 2: " <<<"$err"'
fi

if [ "$part" = suspended ]; then
lease() { gpupool leases | awk '/steady_work/ { print $1; exit }'; }
is_suspended() { gpupool leases | grep -Eq ' suspended .*steady_work'; }

case_of "a lease is preempted, and its server dies"
works preempted
before=$launched
rm -f "$folder/high-end"
# shellcheck disable=SC2016
"$bin/gpupool" run --server first --priority high --wait 1m -- \
  bash -c 'for _ in {1..600}; do [ -e "$1" ] && break; sleep 0.1; done' "" "$folder/high-end" 2>/dev/null &
started+=($!)
check "it is suspended: $(gpupool leases)" until_true is_suspended
kill_server first
touch "$folder/high-end" # the other one ends, and its lease is lost
launched=$before
goes_on_at node preempted

case_of "a lease is suspended by order, and its server is shut down"
server first
works ordered
run gpupool suspend "$(lease)"
check "it is suspended: $out $err" is_suspended
kill -TERM "${servers[first]}"
goes_on_at node ordered

case_of "a lease is suspended, and its worker dies alone"
server first
works alone
run gpupool suspend "$(lease)"
check "it is suspended: $out $err" is_suspended
for pid in $(pgrep -P "${servers[first]}"); do
  ! readlink "/proc/$pid/fd/1" 2>/dev/null | grep -q gpupool-output || kill -KILL "$pid"
done
sleep 1 # it stays so
check "it is suspended still: $(gpupool leases)" is_suspended
run gpupool resume "$(lease)"
check "it is resumed: $out $err" test "$status" -eq 0
goes_on_at first alone

case_of "a lease is suspended, and the copier dies, which has its memory"
works copied
run gpupool suspend "$(lease)"
check "it is suspended: $out $err" is_suspended
kill -KILL "$(pgrep -P "${servers[first]}" -f -- --copier)"
check "its worker ends: $(cat "$folder/first.log")" until_true has_logged first "the server's copier, which kept its memory, has died"
check "it is suspended still: $(gpupool leases)" is_suspended
run gpupool resume "$(lease)"
check "it is resumed: $out $err" test "$status" -eq 0
goes_on_at first copied
fi
