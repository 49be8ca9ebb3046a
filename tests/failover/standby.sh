#!/bin/bash
# A protected program whose checkpoints another server keeps, its standby (`--protect-keep standby`): its server dies or is
# stopped, and the program goes on from what the standby has, there or elsewhere; the standby dies, is stopped or is cordoned,
# and another one is named; both die, and a line says so. Nothing is left when the program has ended. Its holder has room
# for nothing. Servers with one software GPU of 2 GiB each, all on one host. The last argument names the part.
. "$(dirname "$0")/servers.sh"

part=${!#}
up # the server `node`, which takes no part
gpupool cordon node >/dev/null || fail "node is not cordoned"
wish=(--server first)
standing=(--protect --protect-keep standby --protect-size 1KiB --protect-interval)
words=()                # of the programs, besides
export GPUPOOL_LOG=info # of the programs: that they go on

kept_by() { gpupool leases -v | grep -q "its checkpoints kept by its standby, server $1"; }
protected_by() { kept_by "$1" && protected; }
# How much of checkpoints the process has: those of its own sessions lie in other files.
files_of() {
  local one count=0
  for one in /proc/"${servers[$1]}"/fd/*; do
    [[ $(readlink "$one") != *gpupool-checkpoint* ]] || [ "$(stat -L -c %b "$one" 2>/dev/null || echo 0)" -eq 0 ] || count=$((count + 1))
  done
  echo $count
}
has_files() { [ "$(files_of "$1")" -gt 0 ]; }
has_no_files() { [ "$(files_of "$1")" -eq 0 ]; }
standby() { gpupool leases -v | sed -n 's/.* its checkpoints kept by its standby, server \([a-z]*\).*/\1/p'; }
protected_away() { keeper=$(standby) && [ -n "$keeper" ] && protected; }
# running NAME PROTECT...: a program on `first` that has a checkpoint with its standby, and works. Sets keeper, and other, the
# server that has no part in it: on a busy machine a server may be silent for a while, and not be the one that is named.
running() {
  local name=$1
  shift
  rm -f "$folder/end"
  protect=("${standing[@]}" "$@")
  steady "$name" --until "$folder/end" "${words[@]}"
  check "another server keeps its checkpoint: $(gpupool leases -v)" until_true protected_away
  other=$([ "$keeper" = second ] && echo third || echo second)
  go
  check "it runs: $(said)" until_true says_of_it 'the calls since then take'
}
finishes() { # finishes NAME: with right results, and nothing of it is left
  local one
  touch "$folder/end"
  ends "$1"
  check "it is right: $status $out $err" right
  for one in first second third; do
    [ ! -d "/proc/${servers[$one]}" ] || check "$one keeps nothing of it" until_true has_no_files "$one"
  done
}

memory=()
[ "$part" != tight ] || memory=(--protect-memory 280MiB)
for one in first second third; do server "$one" "${memory[@]}"; done

if [ "$part" = death ]; then
  case_of "the server dies, and then the standby that has taken the program over"
  running twice 1s
  check "it has it in its memory" has_files "$keeper"
  began=$(date +%s%3N)
  kill_server first
  check "it goes on: $(cat "$folder/twice.err")" until_true went_on twice 2
  took
  check "it is on its standby: $(place)" until_true is_at "$keeper"
  check "the other one keeps its checkpoint: $(gpupool leases -v)" until_true protected_by "$other"
  kill_server "$keeper"
  check "it goes on once more: $(cat "$folder/twice.err")" until_true went_on twice 3
  check "it is on the other one: $(place)" until_true is_at "$other"
  check "there is no other standby, and that is said: $(gpupool leases -v)" until_true eval 'gpupool leases -v | grep -q "has no standby, and its holder keeps its checkpoints: "'
  finishes twice
fi

if [ "$part" = stop ]; then
  case_of "the server is stopped"
  running stopped 1h --protect-silence 2s
  read -ra frozen <<<"$(processes_of first)"
  began=$(date +%s%3N)
  kill -STOP "${frozen[@]}"
  check "it goes on: $(cat "$folder/stopped.err")" until_true went_on stopped 2
  took
  check "it is on its standby: $(place)" until_true is_at "$keeper"
  kill -CONT "${frozen[@]}"
  finishes stopped
  check "it went on once: $err" test "$(grep -c 'goes on at another one' <<<"$err")" -eq 1
fi

if [ "$part" = room ]; then
  case_of "the standby has no room: it hands the checkpoint on"
  running handed 1h
  "$bin/gpupool" run --server "$keeper" --memory 1700MiB -- "${launcher[@]}" "$programs/steady_work" --until "$folder/full" \
    >"$folder/full.out" 2>&1 &
  full=$!
  started+=($!)
  is_full() { living | awk '{ print $2 }' | grep -qx "$keeper"; }
  check "another program is there: $(gpupool leases)" until_true is_full
  kill_server first
  check "it goes on: $(cat "$folder/handed.err")" until_true went_on handed 2
  check "it is on the other one: $(gpupool leases -v)" grep -q "$other" <<<"$(living)"
  touch "$folder/full"
  wait "$full"
  finishes handed
fi

if [ "$part" = tight ]; then
  case_of "the standby has memory for two such checkpoints: it keeps on protecting the program that it has taken over"
  words=(--mib 64)
  running tight 1s
  kill_server first
  check "it goes on: $(cat "$folder/tight.err")" until_true went_on tight 2
  check "it is on its standby: $(place)" until_true is_at "$keeper"
  check "the other one keeps its checkpoint: $(gpupool leases -v)" until_true protected_by "$other"
  kill_server "$keeper"
  check "it goes on once more: $(cat "$folder/tight.err")" until_true went_on tight 3
  finishes tight
fi

if [ "$part" = replaced ]; then
  case_of "the standby is cordoned, dies, and is stopped: others are named"
  running replaced 1s
  gpupool cordon "$keeper" >/dev/null
  check "the other one keeps its checkpoint: $(gpupool leases -v)" until_true protected_by "$other"
  check "and the one before nothing" until_true has_no_files "$keeper"
  gpupool uncordon "$keeper" >/dev/null
  kill_server "$other"
  check "the first one keeps its checkpoint: $(gpupool leases -v)" until_true protected_by "$keeper"
  server "$other"
  kill -STOP "${servers[$keeper]}"
  check "the other one keeps its checkpoint: $(gpupool leases -v)" until_true protected_by "$other"
  kill -CONT "${servers[$keeper]}"
  check "and the one before nothing" until_true has_no_files "$keeper"
  kill_server first
  check "it goes on: $(cat "$folder/replaced.err")" until_true went_on replaced 2
  check "it is on the other one: $(place)" until_true is_at "$other"
  finishes replaced
fi

if [ "$part" = manager ]; then
  case_of "the standby and the manager die"
  running managed 1s
  kill_server "$keeper"
  kill -KILL "$(pid_of manager)"
  server "$keeper"
  check "it has a standby again: $(gpupool leases -v)" until_true eval 'gpupool leases -v | grep -q "its checkpoints kept by its standby, server" && protected'
  kill_server first
  check "it goes on: $(cat "$folder/managed.err")" until_true went_on managed 2
  finishes managed
fi

if [ "$part" = both ]; then
  case_of "server and standby die together"
  decided() { grep -q 'start the program again' "$folder/together.err" || went_on together 2; }
  for attempt in 1 2 3 4 5; do
    running together 1h
    both="$(processes_of "$keeper") $(processes_of first)" # at once: a moment later another standby is named
    # shellcheck disable=SC2086 # a list
    kill -KILL $both
    until_true decided || until_true decided
    went_on together 2 || break
    finishes together # a busy machine: another server had become its standby just before
    check "attempt $attempt is not the last one" test "$attempt" -lt 5
    server first
    server "$keeper"
  done
  ends together
  check "it ends: $status $out $err" honest
fi
