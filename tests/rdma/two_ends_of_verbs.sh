#!/bin/bash
# In the virtual machine: libibverbs' own ping-pong over the RDMA device, both ends here. What everything else takes for
# granted.
set -e
ibv_devinfo
ibv_rc_pingpong -d rxe0 -g 1 -n 100 &
for _ in $(seq 20); do
  sleep 0.2
  ibv_rc_pingpong -d rxe0 -g 1 -n 100 127.0.0.1 && break
done
wait $!
