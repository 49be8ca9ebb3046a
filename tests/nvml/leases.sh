#!/bin/bash
# NVML in programs of leases: each sees its own GPUs and no others, as CUDA names them; what is answered when the holder or
# the server is stopped or gone; and `gpupool smi`. Two servers on this machine, one with two software GPUs, and one that has
# an NVML.
#   leases.sh BIN LIBRARY ASKS FAKE_NVML     the last as of server/health/tests, which stands for a server's NVML
. "$(dirname "$0")/../errors/common.sh"
asks=("${first_error[@]}") fake_nvml=$4
export FAKE_NVML_STATE=$folder/nvml
says() { # what the fake one says from now on
  echo "$*" >"$folder/nvml.new"
  mv "$folder/nvml.new" "$folder/nvml"
}

passes() { # passes NAME OPTION... -- WORD...: asks prints PASS, in a lease
  local name=$1
  shift
  gpupool run --wait 1m "$@" >"$folder/$name" 2>&1 && grep -q '^PASS$' "$folder/$name" || { cat "$folder/$name"; return 1; }
}
# follow OPTION...: a program in a lease that asks when it is told to. Sets launched and holder.
follow() {
  rm -f "$folder/questions"
  mkfifo "$folder/questions"
  : >"$folder/answers"
  "$bin/gpupool" run "$@" -- "${asks[@]}" lines <"$folder/questions" >"$folder/answers" 2>"$folder/follow.err" &
  launched=$!
  started+=("$launched")
  exec 9>"$folder/questions"
  answers 0 0 || fail "no answer at first: $(cat "$folder/answers" "$folder/follow.err")"
  holder=$(pgrep -P "$launched" gpupool | head -1)
}
answered_one() { [ "$(grep -c . "$folder/answers")" -gt "$before" ]; }
question() { # prints the answer: what live figures and what facts say, milliseconds
  before=$(grep -c . "$folder/answers")
  sleep 0.15 # what is known is too old then
  echo >&9
  until_true answered_one && tail -1 "$folder/answers"
}
answers() { # answers LIVE FACT: the next answer
  local live fact ms
  read -r live fact ms <<<"$(question)"
  [ "$live $fact" = "$1 $2" ] && within "$ms" 5000 || { echo "answered $live $fact after $ms ms"; return 1; }
}
# The same, sooner or later.
comes_to() { for ((i = 0; i < 100; ++i)); do answers "$@" >/dev/null && return 0; done; return 1; }
query() { gpupool run --server node --gpus 2 -- "$bin/gpupool" smi "$@"; }

gpupool up --detach --software 2 --name node >"$folder/up" 2>&1 || { cat "$folder/up"; fail up; }
says load 37 memory 1024 temperature 41 power 300500 limit 700000 sm 1980 ecc 2 links 18
start_server other --nvml "$fake_nvml"
server=${servers[other]}

case_of "CUDA and NVML name the same GPUs"
check "two GPUs" passes two --server node --gpus 2 -- "${asks[@]}" agree 2
check "over a network" passes network --server other --transport ucx --memory 1GiB -- "${asks[@]}" agree 1
check "a share of a GPU" passes share --server node --memory 512MiB -- "${asks[@]}" agree 1
check "another server's GPUs have other addresses: $(grep -h '^GPU' "$folder/two" "$folder/network")" \
  test "$(grep -h '^GPU' "$folder/two" "$folder/network" | awk '{ print substr($4, 1, 4) }' | sort -u | wc -l)" -eq 2
check "and all are different" test "$(grep -h '^GPU' "$folder/two" "$folder/network" | awk '{ print $3 }' | sort -u | wc -l)" -eq 3
check "no session was needed for what follows" passes often --server node -- "${asks[@]}" often

case_of "without a holder"
run env -u GPUPOOL_HOLDER LD_LIBRARY_PATH="$library" "${asks[@]}" none
check "no driver: $out" test "$out" = "9 Driver Not Loaded"
run env GPUPOOL_HOLDER=@gpupool-nobody LD_LIBRARY_PATH="$library" "${asks[@]}" none
check "nor with one that is gone: $out" test "$out" = "9 Driver Not Loaded"
run gpupool smi
check "smi says so: $status $err" test "$status" -eq 9
check "in one line" one_line "$err" "no lease here"

case_of "without gpupool run"
run env GPUPOOL_GPUS=2 GPUPOOL_WAIT=1m LD_LIBRARY_PATH="$library" "${asks[@]}" alone 2
check "the process's own lease: $out $err" test "$(tail -1 <<<"$out")" = PASS

case_of "smi"
uuids=$(grep -h '^GPU' "$folder/two" | awk '{ print $3 }')
run query -L
check "-L: $out $err" test "$(sed 's/.*UUID: \(.*\))/\1/' <<<"$out")" = "$uuids"
run query --query-gpu=index,gpu_name,memory.total,utilization.gpu --format=csv
check "csv: $out $err" test "$out" = "index, name, memory.total [MiB], utilization.gpu [%]
0, gpupool software GPU, 2048 MiB, [N/A]
1, gpupool software GPU, 2048 MiB, [N/A]"
run query --query-gpu=index,memory.total --format=csv,noheader,nounits -i 1
check "noheader, nounits, -i: $out $err" test "$out" = "1, 2048"
run query
check "the table: $out $err" test "$(grep -c '0MiB / 2048MiB' <<<"$out")" -eq 2
check "its lines are of one width" test "$(grep '^[|+]' <<<"$out" | awk '{ print length }' | sort -u)" = 91
run query --query-gpu=index,nonsense --format=csv
check "an unknown field: $status $out" test "$status" -eq 2
check "nvidia-smi's words: $out" has "$out" 'Field "nonsense" is not a valid field to query.'
run query -i 2
check "an unknown GPU: $status $err" test "$status" -eq 6

case_of "figures of the server's NVML"
fields=utilization.gpu,temperature.gpu,power.draw,clocks.sm,clocks.mem,ecc.errors.uncorrected.volatile.total
run gpupool run --server other -- "$bin/gpupool" smi --query-gpu=$fields --format=csv,noheader
check "what it says: $out $err" test "$out" = "37 %, 41, 300.50 W, 1980 MHz, [N/A], 2"
run gpupool run --server other -- "$bin/gpupool" smi --query-gpu=memory.total --format=csv,noheader,nounits
check "links that are up, as NCCL asks for them: $(cat "$folder/links" 2>/dev/null)" \
  passes links --server other -- "${asks[@]}" links 18
check "a software GPU has none" passes unlinked --server node -- "${asks[@]}" links 0
check "memory is NVML's where the lease has a whole GPU: $out" test "$out" = 0
run gpupool run --server other --memory 1GiB -- "$bin/gpupool" smi --query-gpu=memory.total --format=csv,noheader
check "and the lease's share where it has one: $out" test "$out" = "1024 MiB"
# One program that goes on asking sees what changes.
"$bin/gpupool" run --server other -- "$bin/gpupool" smi --query-gpu=utilization.gpu --format=csv,noheader -lms 20 >"$folder/loop" 2>&1 &
looping=$!
started+=("$looping")
check "the load as it was" until_true grep -q '^37 %' "$folder/loop"
says "load 99 memory 1024"
check "the load as it is: $(tail -1 "$folder/loop")" until_true grep -q '^99 %' "$folder/loop"
kill "$looping"
wait "$looping"

case_of "a server's NVML that does not answer any more"
# Frameworks call nvmlInit before all else. What never changes of a GPU was told long ago; nobody waits for something new.
says stuck
run gpupool run --server other -- "$bin/gpupool" smi -L
check "-L: $status $out $err" test "$status" -eq 0
check "the GPU: $out" grep -q '^GPU 0: ' <<<"$out"
says load 99 memory 1024

case_of "a lease that is suspended, and one that moves to another server"
"$bin/gpupool" run --server node --memory 1GiB -- "$bin/gpupool" smi --query-gpu=uuid,utilization.gpu --format=csv,noheader -lms 20 >"$folder/loop" 2>&1 &
looping=$!
started+=("$looping")
shows() { tail -1 "$folder/loop" | grep -q ", $1\$"; } # in the latest line
check "the software GPU has no load: $(tail -1 "$folder/loop")" until_true shows '\[N/A\]'
lease=$(gpupool leases --json | grep -o '"id": *"[0-9a-f]*"' | grep -o '[0-9a-f]\{8,\}' | tail -1)
run gpupool suspend "$lease"
check "suspend: $status $err" test "$status" -eq 0
lines=$(grep -c . "$folder/loop")
goes_on() { [ "$(grep -c . "$folder/loop")" -gt $((lines + 10)) ] && shows '\[N/A\]'; }
check "it is answered as before: $(tail -1 "$folder/loop")" until_true goes_on
run gpupool resume "$lease"
check "resume: $status $err" test "$status" -eq 0
run gpupool migrate --to other "$lease"
check "migrate: $status $err" test "$status" -eq 0
check "the load is the other server's: $(tail -1 "$folder/loop")" until_true shows '99 %'
check "the name is the one that the program knows" test "$(cut -d , -f 1 "$folder/loop" | sort -u | wc -l)" -eq 1
kill "$looping"
wait "$looping"

case_of "a holder that is stopped, and one that is killed"
follow --server node
kill -STOP "$holder"
check "a stopped one" answers 10 0
kill -CONT "$holder"
check "goes on" comes_to 0 0
kill -KILL "$holder"
check "a dead one" comes_to 15 0
exec 9>&-
wait "$launched"

case_of "a server that is stopped"
follow --server other
kill -STOP "$server"
check "what it said last" answers 0 0
check "and then nothing" comes_to 15 0
name=$(tr '\0' '\n' <"/proc/$(pgrep -P "$launched" nvml_asks)/environ" | sed -n 's/^GPUPOOL_HOLDER=//p')
run env GPUPOOL_HOLDER="$name" "$bin/gpupool" smi -L
check "a program that begins now finds the lease's GPU: $name $out $err" test "${out%% (*}" = "GPU 0: gpupool software GPU"
kill -CONT "$server"
exec 9>&-
wait "$launched"
