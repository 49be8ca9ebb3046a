#!/bin/bash
# Claims as a job scheduler uses them, with a real pool of two servers that demands tokens: the scheduler reserves for
# another tenant, the tenant's job adopts, in several steps and programs at once, and others cannot.
#   claims.sh BIN LIBRARY FIRST_ERROR
. "$(dirname "$0")/../errors/common.sh"
. "$(dirname "$0")/with_tokens.sh"
token servers
token slurm scheduler
token alice
token bob
for node in one two; do
  GPUPOOL_SOFT_DEVICES=2 background "$bin/gpupool-server" --config /dev/null --name $node --manager "127.0.0.1:$port" \
    --token-file "$folder/servers" --state "$folder/$node" --driver "$library/../libcuda-soft.so" --warm 1 2>"$folder/$node.log"
done
four() { test "$(as alice devices | grep -c ' free ')" = 4; }
check "two servers offer two GPUs each" until_true four

case_of "a scheduler reserves for a tenant, whose programs adopt"
id=$(as slurm claim create --job alps:7:0 --for alice --gpus 2)
check "an id: $id" grep -Eqx '[0-9a-f]{32}' <<<"$id"
check "the same again" test "$(as slurm claim create --job alps:7:0 --for alice --gpus 2)" = "$id"
check "it is alice's" has "$(as alice claim list)" " alice "
check "one server has it" test "$(as alice devices | grep -c ' free ')" = 2
step() { GPUPOOL_CLAIM=$1 as "$2" run -- "${first_error[@]}" 2>&1; }
check "a step by the job's name: $(step alps:7:0 alice)" test "$(step alps:7:0 alice)" = "no call failed"
check "a step by the id" test "$(step "$id" alice)" = "no call failed"
step alps:7:0 alice >"$folder/a" & a=$!
step alps:7:0 alice >"$folder/b" & b=$!
wait $a $b
check "two steps at once: $(cat "$folder/a" "$folder/b")" test "$(cat "$folder/a" "$folder/b")" = $'no call failed\nno call failed'
check "a program without gpupool run" test "$(GPUPOOL_CLAIM=alps:7:0 GPUPOOL_TOKEN_FILE=$folder/alice LD_LIBRARY_PATH=$library timeout 60 "${first_error[@]}" 2>&1)" = "no call failed"

case_of "others"
out=$(as bob claim create --job alps:8:0 --for alice 2>&1)
check "a user reserves for itself alone: $out" has "$out" "tenant 'bob' makes claims for itself alone"
out=$(step alps:7:0 bob)
check "the same job's name is another claim for another tenant: $out" has "$out" "there is no claim alps:7:0"
out=$(step "$id" bob)
check "the id is good for nothing: $out" has "$out" "gpupool: "
check "nor does it say whose it is: $out" test "${out/alice/}" = "$out"
as bob claim release "$id" >/dev/null 2>&1
as bob claim release alps:7:0 >/dev/null 2>&1
check "it is still there" test "$(step alps:7:0 alice)" = "no call failed"

case_of "the manager is killed and started again"
kill -KILL "$manager"
wait "$manager" 2>/dev/null
start_manager
check "the claim is there" until_true eval '[ "$(step alps:7:0 alice)" = "no call failed" ]'

case_of "the job is over"
check "released" has "$(as slurm claim release --for alice alps:7:0)" "is over"
check "again, as an epilog may" has "$(as slurm claim release --for alice alps:7:0)" "is over"
check "all GPUs are free" until_true four
run as slurm claim create --job alps:7:0 --for alice
check "not made again: $err" has "$status $err" "1 gpupool: this lease has ended: released"
check "the requeued job has another" grep -Eqx '[0-9a-f]{32}' <<<"$(as slurm claim create --job alps:7:1 --for alice --unused 1s)"
check "which nobody adopts, so that it ends" until_true four
check "and the audit says why" has "$(as slurm audit)" "alps:7:1"
finish
