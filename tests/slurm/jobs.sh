#!/bin/bash
# Slurm's jobs with --remote-gpus on a real pool: slurmctld and the slurmd of two nodes, as Debian has them, with the plugin
# and the scripts of etc/slurm; a manager that demands tokens, and two servers with two software GPUs each.
#   jobs.sh BIN LIBRARY VECTOR_ADD STEADY_WORK PLUGIN EXPECTED
. "$(dirname "$0")/../errors/common.sh"
. "$(dirname "$0")/cluster.sh"
vector_add=$3 steady=$4 plugin=$5 expected=$6 # whole paths
port=$(free_ports 4)

# The pool. The tenants are the users of the jobs.
mkdir -p "$folder/store"
user=$(id -un)
(umask 077; "$bin/gpupool-manager" init --store "$folder/store/m.db" >"$folder/operator" 2>/dev/null) || fail "init"
start_manager() {
  background "$bin/gpupool-manager" --config /dev/null --store "$folder/store/m.db" --listen "127.0.0.1:$port" \
    --socket "$folder/m.sock" 2>>"$folder/manager.log"
  manager=$!
}
start_manager
export GPUPOOL_MANAGER=127.0.0.1:$port
token() { # token TENANT ROLE: its file
  (umask 077; gpupool tokens create --token-file "$folder/operator" --role "$2" "$1" >"$folder/$2" 2>/dev/null) || fail "token of $1"
}
until_true gpupool tokens list --token-file "$folder/operator" >/dev/null 2>&1
token servers server
token slurm scheduler
token "$user" user
for server in one two; do
  GPUPOOL_SOFT_DEVICES=2 background "$bin/gpupool-server" --config /dev/null --name $server --manager "127.0.0.1:$port" \
    --token-file "$folder/server" --state "$folder/$server" --driver "$library/../libcuda-soft.so" --warm 2 2>"$folder/$server.log"
done
export GPUPOOL_TOKEN_FILE=$folder/user # of the jobs, by Slurm's own way: what is set where they are submitted
# By their names without the time.
claims() { GPUPOOL_TOKEN_FILE=$folder/scheduler gpupool claim list 2>/dev/null | tail -n +2 | sed -E 's/(alps:[^ :]+:[0-9]+):[0-9]{14} /\1 /'; }
free_gpus() { GPUPOOL_TOKEN_FILE=$folder/scheduler gpupool devices | grep -c ' free '; }
all_free() { [ "$(free_gpus 2>/dev/null)" = 4 ]; }
check "two servers offer two GPUs each" until_true all_free

mkdir -p "$folder/slurm"
cat >"$folder/slurm/gpupool.conf" <<END
GPUPOOL=$bin/gpupool
GPUPOOL_MANAGER=127.0.0.1:$port
GPUPOOL_TOKEN_FILE=$folder/scheduler
SLURM_CONF=$folder/slurm/slurm.conf
TENANT=user
WAIT=3
END
# Licences are quarters of GPUs, and the pool has four.
cluster "$plugin" $((port + 1)) remote_gpu:16,remote_gpu_software:16,remote_gpu_h200:16 \
  'gpupool.parts = 4; gpupool.memory = { software = "1G", h200 = "140G" }'

# What every case ends with: nothing is reserved, whatever Slurm thinks.
nothing_left() { all_free && [ -z "$(claims)" ]; }
over() {
  check "its claims are over: $(claims)" until_true nothing_left
  { scontrol --details show job; scontrol show config; } >>"$folder/slurm/records.log" 2>&1 # for the search at the end
}
# batch OPTION... COMMAND: submits, prints the job's id. What it prints comes to $folder/JOB.out.
batch() { sbatch --parsable --open-mode=append -o "$folder/%j.out" "${@:1:$#-1}" --wrap "${*: -1}"; }
job_is() { [ "$(squeue -h -t all -j "$1" -o %T 2>/dev/null)" = "$2" ]; }
comment() { scontrol show job "$1" | sed -n 's/^ *AdminComment=//p'; }
claimed() { claims | awk '{ print $2 }' | sort | tr '\n' ' '; } # the jobs
has_claims() { [ "$(claimed)" = "$1" ]; }
used() { claims | grep -q "$1 .*$2"; }  # used CLAIM BY
start_reaper() {
  background bash -c 'while sleep 1; do GPUPOOL_SLURM_CONFIG=$0 timeout 90 "$1/reap"; done' "$folder/slurm/gpupool.conf" "$etc" \
    2>>"$folder/slurm/scripts.log"
  reaper=$!
}
no_reap() { ! pgrep -f "timeout 90 $etc/reap" >/dev/null; }
stop_reaper() { # and what it has begun
  kill "$reaper"
  wait "$reaper" 2>/dev/null
  until_true no_reap
}
reap() { GPUPOOL_SLURM_CONFIG=$folder/slurm/gpupool.conf timeout 90 "$etc/reap" 2>>"$folder/slurm/scripts.log"; }
works() { printf 'timeout 300 %q --mib 4 --until %q' "$steady" "$folder/$1"; } # a command that works until `touch FILE`
# A job that was requeued waits for two minutes: not here. Slurm sets that time again at several moments.
at_once() { scontrol update "JobId=$job" StartTime=now 2>/dev/null || true; }
no_jobs() { [ -z "$(squeue -h 2>/dev/null)" ]; }
leave() { # also in the middle: no job outlives its cluster
  scancel --user="$user" 2>/dev/null
  until_true no_jobs
  [ $failures -eq 0 ] || tail -n 30 "$folder"/slurm/*.log "$folder/manager.log"
  finish
}
trap leave EXIT
case_of "one program"
out=$(timeout 60 srun --remote-gpus=1 "$vector_add" 2>&1)
check "prints what it prints natively: $out" test "$out" = "$(cat "$expected")"
out=$(timeout 60 srun --remote-gpus=1:software --remote-gpu-mem=256M "$vector_add" 2>&1)
check "a part of a GPU of a model: $out" test "$out" = "$(cat "$expected")"
out=$(timeout 60 salloc -Q --remote-gpus=1 srun "$vector_add" 2>&1)
check "in an allocation: $out" test "$out" = "$(cat "$expected")"
out=$(timeout 60 srun env 2>&1)
check "a job without has nothing of it: $out" test "$(grep -c GPUPOOL_CLAIM <<<"$out")" = 0
over
[ $failures -eq 0 ] || leave # nothing else can go well

case_of "two nodes"
timeout 60 srun -N 2 --remote-gpus=2 bash -c 'echo "$GPUPOOL_CLAIM"; exec "$0"' "$vector_add" >"$folder/nodes" 2>&1
check "each has a claim: $(cat "$folder/nodes")" grep -qx 'alps:[0-9]*.n1:0' "$folder/nodes"
check "of its own" grep -qx 'alps:[0-9]*.n2:0' "$folder/nodes"
check "both programs work" test "$(grep -cx PASS "$folder/nodes")" = 2
over

case_of "steps share their job's claim"
job=$(batch --remote-gpus=1 "srun -n 1 --overlap $(works steps) & srun -n 1 --overlap --export=ALL $(works steps) & wait; srun -n 1 $vector_add")
check "two use one claim" until_true used "alps:$job.n1:0" "2 programs"
check "and it is the only one: $(claimed)" has_claims "alps:$job.n1:0 "
touch "$folder/steps"
check "the job ends" until_true job_is "$job" COMPLETED
check "all three worked: $(cat "$folder/${job}.out")" test "$(grep -c PASS "$folder/${job}.out")" = 3
over

case_of "an array of more than fit"
job=$(batch --array=1-6 -o "$folder/array-%a.out" --remote-gpus=1 "echo \$GPUPOOL_CLAIM; $vector_add")
ended() { [ "$(squeue -h -r -t all -j "$job" -o %T | sort | uniq -c | xargs)" = "6 COMPLETED" ]; }
check "all end: $(squeue -r -t all)" until_true ended
check "each with GPUs" test "$(cat "$folder"/array-[1-6].out | grep -cx PASS)" = 6
check "each with a claim of its own" test "$(cat "$folder"/array-[1-6].out | grep '^alps' | sort -u | wc -l)" = 6
over

case_of "scancel"
job=$(batch --remote-gpus=2 "$(works never)")
check "it runs" until_true used "alps:$job.n1:0" steady_work
scancel "$job"
check "it is cancelled" until_true job_is "$job" CANCELLED
over

case_of "requeue"
job=$(batch --requeue --remote-gpus=1 "$(works requeued); echo restart \$SLURM_RESTART_COUNT")
check "it runs" until_true used "alps:$job.n1:0" steady_work
scontrol requeue "$job"
check "the first claim is over: $(claims)" until_true nothing_left
sleep 2 # slurmd takes a job that starts in the second in which it was killed for one that has been killed already
second_start() { at_once && used "alps:$job.n[12]:1" steady_work; }
until_true second_start || fail "the second start has no claim of its own: $(squeue; claims; scontrol show job "$job")"
touch "$folder/requeued"
check "it ends" until_true job_is "$job" COMPLETED
check "in its second start: $(cat "$folder/${job}.out")" grep -qx "restart 1" "$folder/${job}.out"
over

case_of "no GPU is free"
background "$bin/gpupool" run --gpus 2 --server one -- sleep 1000
outsider=$!
background "$bin/gpupool" run --gpus 2 --server two -- sleep 1000
others=$!
none_free() { [ "$(free_gpus)" = 0 ]; }
check "others have them all" until_true none_free
run timeout 60 srun --remote-gpus=1 true
check "srun fails: $err" has "$status $err" "1 "
job=$(batch --remote-gpus=1 "$vector_add")
requeued() { scontrol show job "$job" | grep -q 'Restarts=1'; }
check "a batch job is requeued" until_true requeued
check "and says why: $(comment "$job")" has "$(comment "$job")" "gpupool: n1: 1 device is wanted"
pending=$(batch --remote-gpus=1 true)
check "one more waits in its prolog" until_true job_is "$pending" CONFIGURING
scancel "$pending"
kill "$outsider" "$others"
later() { at_once && job_is "$job" COMPLETED; }
check "later it has its GPU" until_true later
check "and works" grep -qx PASS "$folder/${job}.out"
over
job=$(batch --remote-gpus=1:h200 true)
held() { scontrol show job "$job" | grep -q 'Reason=job_requeued_in_held_state'; }
check "a job that the pool cannot serve is held" until_true held
check "and says why: $(comment "$job")" has "$(comment "$job")" "'h200'"
scancel "$job"

case_of "refused where it is submitted"
refuses() { # refuses TEXT OPTION...
  run timeout 20 srun "${@:2}" true
  check "${*:2}: $err" has "$status $err" "$1"
}
refuses "'0' is not N or N:MODEL" --remote-gpus=0
refuses "'9' is not N or N:MODEL (N: 1 to 8)" --remote-gpus=9
refuses "'1:a,b' is not N or N:MODEL" --remote-gpus=1:a,b
refuses "'5' is not a size" --remote-gpus=1 --remote-gpu-mem=5
refuses "say also how many GPUs" --remote-gpu-mem=5G
refuses "say how many nodes" --remote-gpus=1 -n 4
refuses "say how many nodes" --remote-gpus=1 -N 1-2
refuses "Invalid license" --remote-gpus=5
refuses "Invalid license" --remote-gpus=1:unheard-of
refuses "no software has 2G of memory" --remote-gpus=1:software --remote-gpu-mem=2G

case_of "licences are parts of GPUs"
takes() { # takes LICENCES OPTION...
  local job
  job=$(batch --hold "${@:2}" true)
  check "${*:2}" has "$(scontrol show job "$job" | grep Licenses=)" "Licenses=$1 "
  scancel "$job"
}
takes remote_gpu:4 --remote-gpus=1
takes remote_gpu:16,remote_gpu_software:16 --remote-gpus=2:software -N 2
takes remote_gpu:1,remote_gpu_software:1 --remote-gpus=1:software --remote-gpu-mem=256M
takes remote_gpu:2,remote_gpu_software:2 --remote-gpus=1:software --remote-gpu-mem=257MiB
takes remote_gpu:1,remote_gpu_h200:1 --remote-gpus=1:H200 --remote-gpu-mem=20G
takes remote_gpu:4 --remote-gpus=2 --remote-gpu-mem=512M # of the smallest
takes remote_gpu:4 --remote-gpus=1 --remote-gpu-mem=100G # of a larger one

case_of "slurmctld is killed"
# What was over until here, the epilog has ended. From now on also what a timer does every 10 s.
start_reaper
job=$(batch --remote-gpus=1 "$(works killed)")
gone=$(batch --remote-gpus=1 "$(works killed)")
check "two jobs run" until_true used "alps:$job.n1:0" steady_work
check "both" until_true used "alps:$gone.n[12]:0" steady_work
touch "$folder/run"
written() { [ "$folder/slurm/state/job_state" -nt "$folder/run" ]; }
scontrol update "JobId=$job" Comment=running # a change, so that it writes its state; what it has not written is lost to it
check "slurmctld writes down that they run" until_true written
kill -KILL "$slurmctld"
wait "$slurmctld" 2>/dev/null
reap && fail "reap does not know that slurmctld is away"
check "nothing has ended: $(claimed)" used "alps:$job.n1:0" steady_work
start_slurmctld
check "it knows its jobs" until_true job_is "$job" RUNNING
check "they have their claims" used "alps:$job.n1:0" steady_work
touch "$folder/killed"
check "the job ends" until_true job_is "$job" COMPLETED
check "well: $(cat "$folder/${job}.out")" grep -qx PASS "$folder/${job}.out"
over

case_of "slurmctld comes back without its jobs"
job=$(batch --remote-gpus=1 "$(works lost)")
check "it runs" until_true used "alps:$job.n[12]:0" steady_work
kill -KILL "$slurmctld"
wait "$slurmctld" 2>/dev/null
echo FirstJobId=1000 >>"$SLURM_CONF" # else slurmd finds that it has a job of that number already, and its node is drained
start_slurmctld -c
began=$SECONDS
check "30 s later its claims are gone" eval 'for i in 1 2 3; do until_true nothing_left && break; done'
nothing_left || fail "$(claims)"
echo "a forgotten job's claims were gone after $((SECONDS - began)) s"
until_true idle

case_of "a claim that an earlier job of that number has left"
stop_reaper # which would end it
next=1000
for node in n1 n2; do
  GPUPOOL_TOKEN_FILE=$folder/scheduler gpupool claim create --for "$user" --job "alps:$next.$node:0:20200101000000" >/dev/null || fail "no claim"
done
job=$(batch --remote-gpus=1 "$vector_add")
check "the job of that number" test "$job" = "$next"
check "runs with a claim of its own: $(comment "$job")" until_true job_is "$job" COMPLETED
check "well: $(cat "$folder/$job.out")" grep -qx PASS "$folder/$job.out"
ended_early() { GPUPOOL_TOKEN_FILE=$folder/operator gpupool audit | grep -q "a job that was submitted later has the number of its job"; }
check "the earlier one's has ended for it" ended_early
start_reaper
over

case_of "the manager is killed"
job=$(batch --remote-gpus=1 "$(works manager); $vector_add")
check "a job runs" until_true used "alps:$job.n1:0" steady_work
ending=$(batch --remote-gpus=1 "$(works never)")
check "another" until_true used "alps:$ending.n[12]:0" steady_work
kill -KILL "$manager"
wait "$manager" 2>/dev/null
scancel "$ending"
check "that ends meanwhile" until_true job_is "$ending" CANCELLED
start_manager
ended_alone() { has_claims "alps:$job.n1:0 "; }
check "its claim is gone, and the other is there: $(claims)" until_true ended_alone
touch "$folder/manager"
check "that job goes on to its end" until_true job_is "$job" COMPLETED
check "well: $(cat "$folder/${job}.out")" test "$(grep -cx PASS "$folder/${job}.out")" = 2
over

case_of "no secret is told anywhere"
for file in operator server scheduler user; do sed -n 's/^[^:]*: gpt_.*_//p' "$folder/$file"; done >"$folder/secrets" # not in grep's command line
check "that is all of them" test "$(sort -u "$folder/secrets" | grep -c .)" = 4
for log in scripts slurmctld slurmd-n1 slurmd-n2 records; do check "there is $log.log" test -s "$folder/slurm/$log.log"; done
check "job records say why a job waits" grep -q "AdminComment=gpupool: " "$folder/slurm/records.log"
# Slurm's logs, its state and what it keeps of jobs, the programs' output, the pool's logs and store.
told=$(find "$folder" -type f ! -name secrets ! -path "$folder/operator" ! -path "$folder/server" \
  ! -path "$folder/scheduler" ! -path "$folder/user" -exec grep -lF -f "$folder/secrets" {} +)
told+=$(cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\0' '\n' | grep -F -f "$folder/secrets")
check "no log, record, command line or environment has a token: $told" test -z "$told"
mkdir "$folder/copy" # the manager has locked its own
job=$(batch --remote-gpus=1 "$(works last)") # whose lease has a key
check "a job runs" until_true used "alps:$job.n1:0" steady_work
cp "$folder/store"/m.db* "$folder/copy/"
scontrol --details show job >>"$folder/slurm/records.log"
check "nor a lease's key" test "$(python3 "$(dirname "$0")/../errors/keys.py" "$folder/copy/m.db" "$folder"/slurm/*.log "$folder"/*.log "$folder"/*.out)" = True
touch "$folder/last"
over

leave
