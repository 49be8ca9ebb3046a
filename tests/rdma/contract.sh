#!/bin/bash
# In the virtual machine: the transports' contract suite over RDMA, both ends in processes of this machine.
#   contract.sh path/to/transport_contract [tests...]
export GPUPOOL_TEST_TRANSPORTS=ucx-rdma
suite=$1
shift
if ! "$suite" --list-tests | grep -q rdma; then
  echo "the suite has no tests of RDMA"
  exit 1
fi
"$suite" -d yes "$@"
status=$?
echo "packets sent and received by the device: $(cat /sys/class/infiniband/rxe0/ports/1/hw_counters/{sent,rcvd}_pkts | xargs)"
exit $status
