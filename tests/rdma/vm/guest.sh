#!/bin/bash
# In the virtual machine, as its first process: an RDMA device over Ethernet, then the command of this machine's role.
share=$1 role=$2
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
finish() {
  echo "$1" >"$share/$role.rc"
  sync
  echo o >/proc/sysrq-trigger
  sleep 60
}
ulimit -l unlimited
ulimit -c 0
hostname "$role"
ip link set lo up
case $role in
  server) address=10.77.0.1 ;;
  *) address=10.77.0.2 ;;
esac
# The wire to the second machine; alone, one end of a pair.
wire=eth0
if [ ! -e /sys/class/net/$wire ]; then
  wire=veth0
  ip link add veth0 type veth peer name veth1 && ip link set veth1 up
fi
ip link set "$wire" up
ip address add "$address/24" dev "$wire"
rdma link add rxe0 type rxe netdev "$wire" || finish 125
mkdir -p /dev/infiniband
for _ in $(seq 50); do
  [ "$(cat /sys/class/infiniband/rxe0/ports/1/state 2>/dev/null)" = "4: ACTIVE" ] && break
  sleep 0.1
done
export GPUPOOL_VM_SHARE=$(cat "$share/folder")
mkdir -p "$GPUPOOL_VM_SHARE"
mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=none files "$GPUPOOL_VM_SHARE" || finish 125
cd "$(cat "$share/directory")" || finish 125
bash "$share/$role.sh" >"$share/$role.output" 2>&1 </dev/null
finish $?
