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
cd /srv/packages || exit 1
export DEBIAN_FRONTEND=noninteractive

echo "== The manager"
check "apt install" apt-get install -y --no-install-recommends ./gpupool-manager_*.deb ./gpupool-client_*.deb
check "its units are without faults" systemd-analyze verify gpupool-manager.service
check "its folder" install -d -o gpupool -g gpupool -m 700 /var/lib/gpupool
umask 077
sudo -u gpupool gpupool-manager init >operator.token || fail "init"
check "systemctl enable --now" systemctl enable --now gpupool-manager
check "it runs" until_true unit gpupool-manager ActiveState active
check "--check-config" gpupool-manager --check-config
export GPUPOOL_MANAGER=head:4780 GPUPOOL_TOKEN_FILE=$PWD/operator.token
check "it answers its operator" until_true has "no servers|SERVER" gpupool servers

echo "== A server"
gpupool tokens create --name node7 servers >node7.token || fail "a token for the server"
check "apt install" apt-get install -y --no-install-recommends ./gpupool-server_*.deb
check "its units are without faults" systemd-analyze verify gpupool-server.service
check "its token" install -o gpupool -g gpupool -m 600 node7.token /etc/gpupool/server.token
sed -i -e 's|^manager: .*|manager: "head:4780"|' -e 's|^token_file: .*|token_file: "/etc/gpupool/server.token"|' \
  -e 's|^listen: .*|listen: "*:4790"|' -e 's|^advertise: .*|advertise: "node7"|' -e 's|^name: .*|name: "node7"|' \
  -e 's|^driver: .*|driver: "/usr/lib/gpupool/libcuda-soft.so"|' /etc/gpupool/server.yaml
check "--check-config" has "can be used" sudo -u gpupool gpupool-server --check-config
check "systemctl enable --now" systemctl enable --now gpupool-server
alive() { has '^node7 +alive' gpupool servers; }
check "it has joined" until_true alive
check "its sessions' addresses" has 'node7:4790, /run/gpupool-server/server-node7.sock' gpupool servers
gpupool servers -v

echo "== A client"
gpupool tokens create alice >alice.token || fail "a token for alice"
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
for name in manager server; do systemd-analyze security --no-pager "gpupool-$name" | tail -1; done

echo "== Users of their own for workers (docs/security.md)"
install -d /etc/systemd/system/gpupool-server.service.d
printf '[Service]\nAmbientCapabilities=CAP_SETUID CAP_SETGID CAP_KILL\n' >/etc/systemd/system/gpupool-server.service.d/override.conf
sed -i 's|^worker_users: .*|worker_users: "2000000000-2000001023"|' /etc/gpupool/server.yaml
systemctl daemon-reload
check "the unit is without faults" systemd-analyze verify gpupool-server.service
check "systemctl restart gpupool-server" systemctl restart gpupool-server
check "it has joined" until_true alive
check "and serves" until_true serves
own_users() { ps -eo uid,comm | grep -q '^ *20000[0-9]* gpupool-worker'; }
check "its workers have users of their own" until_true own_users
gpupool servers -v

echo "== Backup and restore"
systemctl stop gpupool-manager && cp -a /var/lib/gpupool /var/backups/gpupool && systemctl start gpupool-manager ||
  fail "the copy"
check "it answers" until_true alive
gpupool tokens create later >/dev/null
systemctl stop gpupool-manager && rm -rf /var/lib/gpupool && cp -a /var/backups/gpupool /var/lib/gpupool ||
  fail "the copy comes back"
check "systemctl start" systemctl start gpupool-manager
check "it answers" until_true alive
check "what came after the copy is gone" has 0 bash -c 'gpupool tokens list | grep -c "^later\|later "'

echo "== Slurm's unit"
if ls ./gpupool-slurm_*.deb >/dev/null 2>&1; then
  check "apt install" apt-get install -y --no-install-recommends ./gpupool-slurm_*.deb
  check "its unit is without faults" systemd-analyze verify /usr/lib/systemd/system/gpupool-slurm-reap.service
fi

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
