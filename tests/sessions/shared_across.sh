#!/bin/bash
# Leases of one tenant that share memory and events: what opens, for whom, and what becomes of a lease that ends while
# others have memory of it. Over the transport named last; software GPUs of 2 GiB.
. "$(dirname "$0")/../errors/common.sh"
transport=${!#}
tenant_options() { tenant=(--tenant "$1"); }
. "$(dirname "$0")/sharing.sh"

# shellcheck disable=SC2046 # two words
gpupool up --detach $(software 2) --transport "$transport" --name node >"$folder/up" 2>&1 || fail "$(cat "$folder/up")"
all_free=$(free_bytes)

case_of "memory, events, descriptors and pools between two leases of a tenant, whose owner dies in the end"
begins owner alps --memory 512MiB -- --lend "$folder/line"
begins guest alps --memory 512MiB -- --borrow "$folder/line"
passes guest
ends owner
all_over

case_of "another tenant's lease"
begins shared alps --memory 512MiB -- --pause "$folder/handle"
said shared paused
now andes --memory 512MiB -- --open "$folder/handle"
check "it opens nothing: $out $err" test "$status" -eq 0
check "it says why: $err" has "$err" "the handle is of another tenant or GPU server"
now alps --memory 512MiB -- --join "$folder/handle"
check "its own tenant's opens it: $out $err" test "$status" -eq 0
run gpupool suspend "$(lease_of shared)"
check "it is not suspended: $err" has "$err" "it shares memory or events with other processes"
goes_on shared
passes shared
all_over

case_of "a lease that ends while another one has memory of it"
lend_and_keep ended
run gpupool suspend "$keeper"
check "who has opened memory is not suspended: $err" has "$err" "it shares memory or events with other processes"
check "it is released" gpupool release "$lender"
goes_on ended
ends ended
check "it is revoking: $(list)" until_true is_revoking "$lender"
shown=$(gpupool leases -v)
check "and says why: $shown" has "$shown" "$lender has ended, and keeps its GPUs while memory of it is in use by"
check "by whom: $shown" has "$shown" "of lease $keeper"
now alps --memory 512MiB -- --open "$folder/ended.handle"
check "its token opens nothing any more: $out $err" test "$status" -eq 0
run timeout 60 "$bin/gpupool" run --tenant andes --gpus 2 -- true
check "its GPU is nobody's yet: $err" test "$status" -eq 125
check "it is the tenant's: $(gpupool tenants)" has "$(gpupool tenants)" alps
check "its memory is not free: $(free_bytes)" test "$(free_bytes)" != "$all_free"
goes_on ended-keeper
passes ended-keeper
check "it is over: $(list)" until_true is_gone "$lender"
all_over

case_of "who has memory of an ended lease is killed"
lend_and_keep orphaned
check "it is released" gpupool release "$lender"
check "it is revoking: $(list)" until_true is_revoking "$lender"
kill -KILL "$(pgrep -P "${pid[orphaned-keeper]}" -f "^[^ ]*processes_share --keep" | head -n 1)"
check "it is over: $(list)" until_true is_gone "$lender"
goes_on orphaned
ends orphaned
ends orphaned-keeper
goes_on orphaned-keeper
all_over

case_of "its time limit ends a lease, and the lease that has memory of it is released"
begins timed alps --memory 512MiB --time 15s -- --pause "$folder/timed.handle"
said timed paused
begins timed-keeper alps --memory 512MiB -- --keep "$folder/timed.handle"
said timed-keeper kept
lender=$(lease_of timed)
for ((i = 0; i < 30; ++i)); do is_revoking "$lender" && break; sleep 1; done
check "it is revoking: $(list)" is_revoking "$lender"
check "the other one is released" gpupool release "$(lease_of timed-keeper)"
check "it is over: $(list)" until_true is_gone "$lender"
goes_on timed
goes_on timed-keeper
ends timed
ends timed-keeper
all_over

case_of "memory on a GPU that the other lease does not have"
begins whole alps -- --pause "$folder/whole.handle"
said whole paused
now alps -- --join "$folder/whole.handle"
check "it is refused: $out" has "$out" "cudaIpcOpenMemHandle"
check "with the reason: $err" has "$err" "on a GPU that this lease does not have"
goes_on whole
passes whole
all_over
