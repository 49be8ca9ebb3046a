#!/bin/bash
# What docs/admin.md says, as root of the system that tests/packages/services has made: head, node7 and desk are this one.
set -u
failures=0
fail() {
  printf 'FAILED: %s\n' "$*"
  failures=$((failures + 1))
}
check() { # check TEXT COMMAND...
  local text=$1
  shift
  if "$@" >/tmp/out 2>&1; then printf 'ok: %s\n' "$text"; else
    fail "$text"
    cat /tmp/out
  fi
}
until_true() { # within a minute
  local until=$((SECONDS + 60))
  while ((SECONDS < until)); do
    "$@" >/tmp/last 2>&1 && return 0
    sleep 0.1
  done
  cat /tmp/last
  return 1
}
command -v sudo >/dev/null || sudo() { runuser -u "$2" -- "${@:3}"; } # sudo -u USER COMMAND...
has() { "${@:2}" 2>&1 | grep -Eq -- "$1"; }
unit() { [ "$(systemctl show -P "$2" "$1")" = "$3" ]; } # unit NAME PROPERTY VALUE
tell() { for name in manager server; do journalctl -u "gpupool-$name" --no-pager -n 60; done; }
edit() { # edit UNIT LINE...: what `systemctl edit UNIT` would write below [Service]
  install -d "/etc/systemd/system/$1.service.d"
  printf '%s\n' '[Service]' "${@:2}" >>"/etc/systemd/system/$1.service.d/override.conf"
  systemctl daemon-reload
}
set_in() { # set_in FILE OPTION VALUE
  grep -q "^$2: " "/etc/gpupool/$1.yaml" || fail "$1.yaml has no $2"
  sed -i "s|^$2: .*|$2: \"$3\"|" "/etc/gpupool/$1.yaml"
}
# in_group UNIT COMMAND...: in the unit's cgroup, under what it has there: devices, addresses.
in_group() {
  bash -c 'echo $$ >"/sys/fs/cgroup$(systemctl show -P ControlGroup "$0")/cgroup.procs" && exec "$@"' "$@"
}
cd /srv/packages || exit 1
export DEBIAN_FRONTEND=noninteractive
# Not of the guide: so that the journal has all that is logged at all, for the search at the end.
install -d /etc/systemd/system/gpupool-.service.d
printf '[Service]\nEnvironment=GPUPOOL_LOG=debug\n' >/etc/systemd/system/gpupool-.service.d/debug.conf

echo "== The manager"
check "apt install" apt-get install -y --no-install-recommends ./gpupool-manager_*.deb ./gpupool-client_*.deb
check "its units are without faults" systemd-analyze verify gpupool-manager.service
check "its folder" install -d -o gpupool -g gpupool -m 700 /var/lib/gpupool
(umask 077; sudo -u gpupool gpupool-manager init >operator.token) || fail "init"
check "systemctl enable --now" systemctl enable --now gpupool-manager
check "it runs" until_true unit gpupool-manager ActiveState active
check "--check-config" gpupool-manager --check-config
export GPUPOOL_MANAGER=head:4780 GPUPOOL_TOKEN_FILE=$PWD/operator.token
check "it answers its operator" until_true has "no servers|SERVER" gpupool servers

echo "== A server"
(umask 077; gpupool tokens create --name node7 servers >node7.token) || fail "a token for the server"
check "apt install" apt-get install -y --no-install-recommends ./gpupool-server_*.deb
check "its units are without faults" systemd-analyze verify gpupool-server.service
check "its token" install -o gpupool -g gpupool -m 600 node7.token /etc/gpupool/server.token
set_in server manager head:4780
set_in server token_file /etc/gpupool/server.token
set_in server listen '*:4790'
set_in server advertise node7
set_in server name node7
set_in server driver /usr/lib/gpupool/libcuda-soft.so
check "--check-config" has "can be used" sudo -u gpupool gpupool-server --check-config
check "systemctl enable --now" systemctl enable --now gpupool-server
alive() { has '^node7 +alive' gpupool servers; }
check "it has joined" until_true alive
check "its sessions' addresses" has 'node7:4790, /run/gpupool-server/server-node7.sock' gpupool servers
all_but() { has "^node7 lacks walls around its workers: $1\$" gpupool servers -v; }
check "the unit takes no wall from its workers" all_but "user: --worker-users is not set"

echo "== A client"
(umask 077; gpupool tokens create alice >alice.token) || fail "a token for alice"
adduser --quiet --disabled-password --gecos '' alice
install -o alice -g alice -m 600 alice.token /home/alice/alice.token
as_alice() {
  runuser -u alice -- env GPUPOOL_MANAGER=head:4780 GPUPOOL_TOKEN_FILE=/home/alice/alice.token HOME=/home/alice \
    GPUPOOL_MEMORY=256MiB "$@"
}
check "a program of alice" as_alice gpupool run --wait 30s -- vector_add
check "over the network" as_alice gpupool run --wait 30s --transport ucx -- vector_add

echo "== Looking after it"
as_alice gpupool run --wait 30s -- first_error --device 100 --until /tmp/over >/tmp/program 2>&1 &
program=$!
check "a program that runs" until_true grep -q ready /tmp/program
check "systemctl restart gpupool-manager" systemctl restart gpupool-manager
check "the server joins again" until_true alive
check "systemctl reload gpupool-manager" systemctl reload gpupool-manager
check "systemctl reload gpupool-server" systemctl reload gpupool-server
check "both run" has "^active.active.$" bash -c 'systemctl is-active gpupool-manager gpupool-server | tr "\n" "."'
check "its lease is there" has "first_error" gpupool leases
check "drain names what stays" has "stays: it cannot be moved: there is no other server" gpupool drain node7
check "uncordon" gpupool uncordon node7
touch /tmp/over
wait "$program"
check "the program: $(cat /tmp/program)" test $? -eq 0
check "the log" has "server node7 is cordoned" journalctl -u gpupool-manager --no-pager
check "killed, the manager comes again" systemctl kill -s KILL gpupool-manager
check "it answers" until_true alive
check "killed, the server comes again" systemctl kill -s KILL gpupool-server
serves() { as_alice gpupool run --wait 5s -- vector_add; }
check "and serves" until_true serves
systemctl reset-failed

echo "== What the units leave open"
exposed() { # exposed UNIT TENTHS: at most so much, as systemd reckons
  systemd-analyze security --no-pager "$1" | tail -1
  check "$1: at most $2 tenths" systemd-analyze security --no-pager --threshold="$2" "$1"
}
exposed gpupool-manager 18
exposed gpupool-server 34
refused() { comm -23 /srv/worker.calls <(systemctl show -P SystemCallFilter gpupool-server | tr ' ' '\n' | sort); }
check "it lets workers make the calls that their walls permit: $(refused)" test -s /srv/worker.calls -a -z "$(refused)"
opened() { ! has "Operation not permitted|Permission denied" in_group gpupool-server bash -c ': <>/dev/nvidiactl'; }
check "NVIDIA's devices can be opened" opened # here: No such device or address
check "modules are cached where they are to be" has modules ls /var/cache/gpupool
check "the server has nothing to warn of" has 0 bash -c 'journalctl -u gpupool-server --no-pager | grep -c "no module cache"'

echo "== What a site may have to change in the server's unit"
# In the place of NVIDIA's: it makes the node, which only root may.
printf '#!/bin/sh\n[ "$*" = "-u -c 0" ] && mknod -m 666 /dev/nvidia-uvm c 235 0\n' >/usr/bin/nvidia-modprobe
chmod 755 /usr/bin/nvidia-modprobe
edit gpupool-server 'ExecStartPre=+/usr/bin/nvidia-modprobe -u -c 0'
check "the unit is without faults" systemd-analyze verify gpupool-server.service
check "systemctl restart gpupool-server" systemctl restart gpupool-server
check "the driver is loaded before it" test -c /dev/nvidia-uvm
rm /usr/bin/nvidia-modprobe
sed -i '/^ExecStartPre/d' /etc/systemd/system/gpupool-server.service.d/override.conf
check "it has joined" until_true alive

echo "== Where workers may connect to"
ip address add 192.0.2.1/32 dev lo
ip address add 192.0.2.129/32 dev lo
reaches() { timeout 5 bash -c ": <>/dev/tcp/$1/4780"; }
server_reaches() { in_group gpupool-server timeout 5 bash -c ": <>/dev/tcp/$1/4780"; }
check "to everything" server_reaches 192.0.2.129
edit gpupool-server IPAddressDeny=any 'IPAddressAllow=localhost 192.0.2.0/25'
check "systemctl restart gpupool-server" systemctl restart gpupool-server
check "it has joined" until_true alive
check "to what is allowed" server_reaches 192.0.2.1
check "to nothing else" eval '! server_reaches 192.0.2.129'
check "others may" reaches 192.0.2.129
check "a program over the network" as_alice gpupool run --wait 30s --transport ucx -- vector_add
in_its_group() {
  local pid group
  group=$(systemctl show -P ControlGroup gpupool-server)
  for pid in $(pgrep gpupool-worker); do grep -q ":$group\$" "/proc/$pid/cgroup" || return 1; done
  pgrep gpupool-worker
}
check "workers are in the service's cgroup" in_its_group

echo "== Users of their own for workers (docs/security.md)"
edit gpupool-server 'AmbientCapabilities=CAP_SETUID CAP_SETGID CAP_KILL'
set_in server worker_users 2000000000-2000001023
check "the unit is without faults" systemd-analyze verify gpupool-server.service
check "systemctl restart gpupool-server" systemctl restart gpupool-server
check "it has joined" until_true alive
check "and serves" until_true serves
own_users() { ps -eo uid,comm | grep -q '^ *20000[0-9]* gpupool-worker'; }
check "its workers have users of their own" until_true own_users
all_walls() { has "^node7 has walls .*, devices, user\$" gpupool servers -v && ! has "node7 lacks" gpupool servers -v; }
check "all walls stand" all_walls
systemd-analyze security --no-pager gpupool-server | tail -1

echo "== Folders"
install -d -o gpupool -g gpupool -m 700 /srv/gpupool/{checkpoints,suspended}
edit gpupool-server ReadWritePaths=/srv/gpupool
set_in server checkpoint_folder /srv/gpupool/checkpoints
set_in server suspend_folder /srv/gpupool/suspended
set_in server suspend_memory 16MiB # less than the program has
check "systemctl restart gpupool-server" systemctl restart gpupool-server
check "it has joined" until_true alive
begin() { # begin NAME OPTION...: a program of alice, with 100 MiB
  as_alice gpupool run --wait 30s "${@:2}" -- first_error --device 100 --until "/tmp/$1.end" >"/tmp/$1" 2>&1 &
  programs[$1]=$!
  until_true grep -q ready "/tmp/$1" || fail "$1 does not begin: $(cat "/tmp/$1")"
}
ends() { # ends NAME
  touch "/tmp/$1.end"
  wait "${programs[$1]}"
  check "$1 has ended well: $(cat "/tmp/$1")" test $? -eq 0
}
declare -A programs
lease_is() { has "^$1 .* $2 " gpupool leases; } # lease_is LEASE STATE
begin held --transport ucx
lease=$(gpupool leases | awk '/first_error/ { print $1 }')
check "gpupool suspend" gpupool suspend "$lease"
check "it is in the folder" lease_is "$lease" suspended
check "gpupool resume" gpupool resume "$lease"

echo "== Upgrade"
version=$(dpkg-deb -f ./gpupool-server_*.deb Version)
# newer PACKAGE VERSION: the same under another version, behind that of this build.
newer() {
  rm -rf /tmp/newer
  dpkg-deb -R "$(echo ./gpupool-"$1"_"$version"_*.deb)" /tmp/newer &&
    sed -i "s/^Version: .*/Version: $2/" /tmp/newer/DEBIAN/control &&
    dpkg-deb -Znone -b /tmp/newer "./gpupool-$1_$2_amd64.deb" >/dev/null || fail "gpupool-$1 $2"
}
newer manager 9.2.0
newer server 9.2.0
newer server 9.3.0
newer client 9.2.0
main_pid() { systemctl show -P MainPID "$1"; }
begin stays
both_run() { [ "$(gpupool leases | grep -c ' active .*first_error')" = 2 ]; }
check "two programs run" until_true both_run
before=$(main_pid gpupool-manager)
check "the manager: apt install" apt-get install -y --no-install-recommends ./gpupool-manager_9.2.0_amd64.deb
check "the package has restarted it" test "$(main_pid gpupool-manager)" != "$before"
check "the server joins it" until_true alive
check "the programs' leases go on" until_true both_run
before=$(main_pid gpupool-server)
run_drain() { gpupool drain node7 >/tmp/drain 2>&1; }
check "the server: drain has something left" test "$(run_drain; echo $?)" = 1
cat /tmp/drain
check "apt install" apt-get install -y --no-install-recommends ./gpupool-server_9.2.0_amd64.deb
check "the package leaves it running" test "$(main_pid gpupool-server)" = "$before"
check "systemctl restart" systemctl restart gpupool-server
check "it is another one" test "$(main_pid gpupool-server)" != "$before"
check "it has joined" until_true alive
check "it is cordoned still" has "^node7 .*cordoned" gpupool servers
check "uncordon" gpupool uncordon node7
check "the programs go on under it" until_true both_run
check "the worker that it replaces is kept" test -x "/usr/lib/gpupool/workers/gpupool-worker-$version"
check "its configuration is as before" grep -q '^advertise: "node7"' /etc/gpupool/server.yaml
check "and serves" until_true serves
gpupool servers -v

check "held in files: cordon" gpupool cordon node7
check "checkpoint --hold" gpupool checkpoint --hold "$lease" upgrade
check "its lease is held" lease_is "$lease" held
check "apt install" apt-get install -y --no-install-recommends ./gpupool-server_9.3.0_amd64.deb
check "systemctl restart" systemctl restart gpupool-server
check "uncordon" until_true gpupool uncordon node7
check "restore" gpupool restore --wait 10m "$lease" upgrade
check "both programs run" until_true both_run
check "one worker is kept, the last" test "$(ls /usr/lib/gpupool/workers)" = gpupool-worker-9.2.0
check "a client: apt install" apt-get install -y --no-install-recommends ./gpupool-client_9.2.0_amd64.deb
check "its programs" until_true serves
ends held

echo "== Backup and restore"
systemctl stop gpupool-manager && cp -a /var/lib/gpupool /var/backups/gpupool && systemctl start gpupool-manager ||
  fail "the copy"
check "it answers" until_true alive
check "the program's lease goes on" lease_is "$(gpupool leases | awk '/first_error/ { print $1 }')" active
ends stays
gpupool tokens create later >later.token
systemctl stop gpupool-manager && rm -rf /var/lib/gpupool && cp -a /var/backups/gpupool /var/lib/gpupool ||
  fail "the copy comes back"
check "systemctl start" systemctl start gpupool-manager
check "it answers" until_true alive
check "what came after the copy is gone" has 0 bash -c 'gpupool tokens list | grep -c "^later\|later "'

echo "== Slurm: the controller's part of docs/slurm.md"
controller() {
  check "apt install" apt-get install -y --no-install-recommends ./gpupool-slurm_*.deb
  check "its unit is without faults" systemd-analyze verify /usr/lib/systemd/system/gpupool-slurm-reap.service
  # The cluster as a site has it, without nodes that answer.
  install -d /etc/slurm
  install -d -o slurm -g slurm /var/lib/slurm/slurmctld /var/log/slurm
  install -d -o munge -g munge -m 700 /etc/munge
  head -c 1024 /dev/urandom >/etc/munge/munge.key
  chown munge:munge /etc/munge/munge.key
  cat >/etc/slurm/slurm.conf <<END
ClusterName=alps
SlurmctldHost=head(127.0.0.1)
SlurmUser=slurm
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmctldPidFile=/run/slurmctld.pid
ProctrackType=proctrack/linuxproc
NodeName=n[1-2] NodeAddr=127.0.0.1 CPUs=16
PartitionName=all Nodes=ALL Default=YES
END
  # What the guide says.
  cp /usr/share/gpupool/slurm/gpupool.conf /usr/share/gpupool/slurm/job_submit.lua /etc/slurm/
  cat >>/etc/slurm/slurm.conf <<END
PlugStackConfig=/etc/slurm/plugstack.conf
JobSubmitPlugins=lua
PrologSlurmctld=/usr/share/gpupool/slurm/prolog_slurmctld
EpilogSlurmctld=/usr/share/gpupool/slurm/epilog_slurmctld
Licenses=remote_gpu:16,remote_gpu_h200:8
END
  cat /usr/share/gpupool/slurm/plugstack.conf >>/etc/slurm/plugstack.conf
  (umask 077; gpupool tokens create --name slurm --role scheduler slurm >/etc/slurm/gpupool.token) || fail "a token"
  chown slurm: /etc/slurm/gpupool.token
  printf 'GPUPOOL_MANAGER=head:4780\nGPUPOOL_TOKEN_FILE=/etc/slurm/gpupool.token\nTENANT=user\n' >>/etc/slurm/gpupool.conf
  systemctl restart munge
  check "systemctl enable --now gpupool-slurm-reap.timer" systemctl enable --now gpupool-slurm-reap.timer
  check "systemctl restart slurmctld" systemctl restart slurmctld
  check "slurmctld answers, with the licences" until_true has remote_gpu_h200 scontrol show licenses
  # A claim of a job that slurmctld does not list.
  runuser -u slurm -- env GPUPOOL_TOKEN_FILE=/etc/slurm/gpupool.token GPUPOOL_MANAGER=head:4780 \
    gpupool claim create --for alice --job alps:4711.n1:0:20260101000000 >/dev/null || fail "no claim"
  check "a claim" has "alps:4711" gpupool claim list
  no_claim() { ! has "alps:4711" gpupool claim list; }
  check "the timer ends it" until_true no_claim
  check "and says so" has "job 4711 has ended: its claim .* is released" journalctl -u gpupool-slurm-reap --no-pager
  exposed gpupool-slurm-reap 20
  check "its unit has not failed" has 0 bash -c 'systemctl show -P ExecMainStatus gpupool-slurm-reap'
  systemctl stop gpupool-slurm-reap.timer slurmctld munge
}
if ! ls ./gpupool-slurm_*.deb >/dev/null 2>&1 || ! command -v slurmctld >/dev/null; then
  echo "not tried: this machine has no slurmctld, or the package was built without Slurm's headers"
else controller; fi

echo "== No secret is told"
journalctl --no-pager -a -o export >/tmp/journal
for file in *.token /etc/slurm/gpupool.token; do [ ! -e "$file" ] || sed -n 's/^[a-z]*: gpt_.*_//p' "$file"; done >/tmp/secrets
check "there are tokens: $(wc -l </tmp/secrets)" test "$(wc -l </tmp/secrets)" -ge 4
check "the journal has what was logged" grep -aq "token [0-9a-f]* is made" /tmp/journal
check "and no token" eval '! grep -aF -f /tmp/secrets /tmp/journal'
check "and no lease's key" has True python3 /usr/local/bin/keys.py /var/backups/gpupool/manager.db /tmp/journal

echo "== Remove"
check "apt remove gpupool-server" apt-get remove -y gpupool-server
check "it has ended" until_true unit gpupool-server ActiveState inactive
check "its configuration stays" test -e /etc/gpupool/server.yaml
check "apt purge gpupool-manager" apt-get purge -y gpupool-manager
check "its store is gone" test ! -e /var/lib/gpupool
check "nothing runs" test -z "$(pgrep gpupool)"
[ "$failures" -eq 0 ] || {
  tell 2>/dev/null
  echo "$failures checks failed"
  exit 1
}
echo "the services run as docs/admin.md says"
