#!/bin/bash
# A GPU is lost (GPUPOOL_SOFT_FAIL: the software GPU breaks at a kernel, as with an ECC error): protected programs on it go
# on elsewhere, also those that have not met the loss; those on other GPUs of that server stay where they are.
. "$(dirname "$0")/servers.sh"

up # the server `node`
export GPUPOOL_LOG=info # of the programs
lose() { GPUPOOL_SOFT_FAIL=0:100:214 SERVER_GPUS=2 server first; } # its GPU 0, at the 100th kernel of a process
broken() { gpupool devices | grep -Eq '^first +0 .* broken '; }
at() { living | awk -v holder=" pid $1 " 'index($0, holder) { print $2, $3 }'; } # server and GPU of that `gpupool run`
is_there() { [ "$(at "$1")" = "$2" ]; }
protect=(--protect=1h)
wish=(--server first)

case_of "a device is lost under one of two protected programs; a third one is on another device"
lose
rm -f "$folder/end"
steady neighbour --until "$folder/end"
neighbour=$launched
exec 8<>"$folder/neighbour.in" # it waits, whoever is launched next
check "it is protected: $(said)" until_true protected
wish=(--server first --spread)
steady apart --pause 50 --until "$folder/end"
apart=$launched
exec 7<>"$folder/apart.in"
echo >&7
wish=(--server first)
steady breaks --pause 20 --until "$folder/end"
breaks=$launched
check "two are on one device: $(living)" eval 'is_there "$neighbour" "first 0" && is_there "$breaks" "first 0"'
check "and one is on the other one: $(living)" is_there "$apart" "first 1"
check "all are protected: $(said)" until_true eval '[ "$(said | grep -c "is protected .* checkpoint is")" -eq 3 ]'
go
check "the device is lost: $(gpupool devices)" until_true broken
check "it goes on: $(cat "$folder/breaks.err")" until_true went_on breaks 2
check "calls are made again: $(cat "$folder/breaks.err")" grep -Eq ": [0-9]+ calls made again, [1-9][0-9]* of kernels" "$folder/breaks.err"
check "so does its neighbour: $(cat "$folder/neighbour.err")" until_true went_on neighbour 2
check "both are on the other server: $(living)" until_true eval 'is_there "$neighbour" "node 0" && is_there "$breaks" "node 0"'
check "the third one is where it was: $(living)" is_there "$apart" "first 1"
echo >&8
sleep 0.5 # some rounds
touch "$folder/end"
for one in neighbour apart breaks; do
  launched=${!one}
  await_end $one
  check "$one is right: $status $out $err" right
done
check "the third one has noticed nothing: $(cat "$folder/apart.err")" eval '! grep -q "goes on at another one" "$folder/apart.err"'
check "nothing of them runs: $(gpupool leases)" until_true no_lease
kill_server first

case_of "the server's other device is all that there is"
lose
run gpupool cordon node
rm -f "$folder/end"
steady other --pause 20 --until "$folder/end"
check "it is on the device that breaks: $(living)" is_there "$launched" "first 0"
check "it is protected: $(said)" until_true protected
go
check "it goes on: $(cat "$folder/other.err")" until_true went_on other 2
check "on the other device: $(living)" until_true is_there "$launched" "first 1"
touch "$folder/end"
ends other
check "it is right: $status $out $err" right
kill_server first

case_of "there is no other device"
SERVER_GPUS=1 GPUPOOL_SOFT_FAIL=0:100:214 server first
rm -f "$folder/end"
protect=(--protect=1h --protect-wait 2s)
steady alone --pause 20 --until "$folder/end"
check "it is protected: $(said)" until_true protected
go
ends alone
check "it ends: $status $out $err" honest
check "and says what is lost: $err" grep -Eq "GPU 0 is lost: CUDA_ERROR_ECC_UNCORRECTABLE.*no other server: .*the checkpoint is [0-9]+s old" <<<"$err"
run gpupool uncordon node
kill_server first

case_of "a program that is not protected"
SERVER_GPUS=1 GPUPOOL_SOFT_FAIL=0:100:214 server first
protect=()
steady plain --pause 2 --until "$folder/never"
go
ends plain
check "it ends: $status $out $err" test "$status" -ne 0
check "and says why: $err" grep -q "GPU 0 of the server is lost: CUDA_ERROR_ECC_UNCORRECTABLE (214)" <<<"$err"
