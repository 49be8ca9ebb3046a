# Sourced after ../errors/common.sh: a Slurm cluster of two nodes on this machine, with everything it has in a folder of
# the test: configuration, keys, sockets, state. It runs as whoever runs the test, beside a cluster of the machine's own.
#   cluster PLUGIN PORT LICENCES SETTINGS: writes the configuration and starts munged, slurmctld and the nodes' slurmd. PORT and the two
#   behind it are free.
etc=$(readlink -f "$(dirname "${BASH_SOURCE[0]}")/../../etc/slurm")

export PATH=$PATH:/usr/sbin:/sbin
for program in munged slurmctld slurmd srun; do
  command -v $program >/dev/null || { echo "skipped: no $program (./check installs it)"; exit 77; }
done

write_cluster() {
  local me state=$folder/slurm
  me=$(id -un)
  mkdir -p "$state/state" "$state/spool"
  # munged trusts a folder that nobody else can write.
  chmod 755 "$folder" "$state"
  head -c 1024 /dev/urandom >"$state/munge.key"
  chmod 600 "$state/munge.key"
  echo "required $1 library=$library" >"$state/plugstack.conf"
  printf 'dofile("%s")\n%s\nreturn slurm.SUCCESS\n' "$etc/job_submit.lua" "$4" >"$state/job_submit.lua"
  local script
  for script in prolog_slurmctld epilog_slurmctld; do
    printf '#!/bin/bash\nGPUPOOL_SLURM_CONFIG=%q exec %q 2>>%q\n' "$state/gpupool.conf" "$etc/$script" "$state/scripts.log" >"$state/$script"
    chmod 755 "$state/$script"
  done
  # From Slurm 23 on, a slurmd that is to leave control groups alone is told so.
  case $(slurmd -V) in *\ 2[012].*) ;; *) echo CgroupPlugin=disabled >"$state/cgroup.conf" ;; esac
  cat >"$state/slurm.conf" <<END
ClusterName=alps
SlurmctldHost=$(uname -n)(127.0.0.1)
SlurmctldPort=$2
SlurmUser=$me
SlurmdUser=$me
AuthType=auth/munge
AuthInfo=socket=$state/munge.socket
CredType=cred/munge
StateSaveLocation=$state/state
SlurmdSpoolDir=$state/spool/%n
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
KillWait=5
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
PlugStackConfig=$state/plugstack.conf
PrologSlurmctld=$state/prolog_slurmctld
EpilogSlurmctld=$state/epilog_slurmctld
JobSubmitPlugins=lua
Licenses=$3
NodeName=n[1-2] NodeHostname=$(uname -n) NodeAddr=127.0.0.1 Port=[$(($2 + 1))-$(($2 + 2))] CPUs=16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
END
}

start_slurmctld() { # start_slurmctld [OPTION]...
  background slurmctld -D "$@" 2>>"$folder/slurm/slurmctld.log"
  slurmctld=$!
}

cluster() { # cluster PLUGIN PORT LICENCES SETTINGS: of job_submit.lua
  local state=$folder/slurm node
  write_cluster "$@"
  export SLURM_CONF=$state/slurm.conf
  background munged --foreground --key-file="$state/munge.key" --socket="$state/munge.socket" --pid-file="$state/munge.pid" \
    --log-file="$state/munge.log" --seed-file="$state/munge.seed" 2>"$state/munged.log"
  until_true test -S "$state/munge.socket" || fail "munged: $(cat "$state/munged.log")"
  start_slurmctld -i
  for node in n1 n2; do background slurmd -D -N $node 2>"$state/slurmd-$node.log"; done
  until_true idle || fail "the nodes are not idle: $(sinfo; tail -n 20 "$state"/*.log)"
}
idle() { [ "$(sinfo -h -N -o %t 2>/dev/null | tr '\n' ' ')" = "idle idle " ]; }

# Ports that nobody has, below those that the kernel gives to clients.
free_ports() { # free_ports COUNT: the first of them
  /usr/bin/python3 - "$1" <<'END'
import random, socket, sys
while True:
    first, taken = random.randrange(10000, 32000), []
    try:
        for port in range(first, first + int(sys.argv[1])):
            taken.append(socket.socket())
            taken[-1].bind(("127.0.0.1", port))
    except OSError:
        continue
    finally:
        for one in taken:
            one.close()
    print(first)
    break
END
}
