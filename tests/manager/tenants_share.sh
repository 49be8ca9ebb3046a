#!/bin/bash
# Two tenants with a token each, and what their programs can share: memory, events and descriptors open in other leases
# of the tenant on that server. Another tenant's program, a program on another server, and one that comes after the
# host's end get the driver's errors for the very same bytes, and the host's memory is as it was.
#   tenants_share.sh BIN LIBRARY FIRST_ERROR TRANSPORT
. "$(dirname "$0")/../errors/common.sh"
transport=${!#}
. "$(dirname "$0")/with_tokens.sh"
tenant_options() { tenant=(--token-file "$folder/$1" --memory 256MiB --server one); }
. "$(dirname "$0")/../sessions/sharing.sh"
token servers server
token alice
token alice user desk # another token of that tenant's
token bob
export GPUPOOL_TOKEN_FILE=$folder/operator
for name in one two; do start_server $name --token-file "$folder/servers" --warm 2; done
all_free=$(free_bytes)
elsewhere="the handle is of another tenant or GPU server, or of one that has been started again"

passed() { # what `now` has run
  check "it is right: $status $out $err" test "$status" -eq 0 -a "$(tail -1 <<<"$out")" = PASS
}
opens_nothing() { # the errors are in what a spy checks
  passed
  check "it is told why, once: $err" one_line "$err" "$elsewhere"
  check "the host goes on: $(cat "$folder/host.out")" kill -0 "${pid[host]}"
}
visited() { now "$1" -- --visit "$folder/line"; passed; }

case_of "leases of one tenant"
begins host alice -- --host "$folder/line"
said host lends
lease=$(list | awk '{ print $1 }')
visited alice
check "no changed bit of a token opens anything: $out" has "$out" "memory: each changed bit of its token is refused"
visited desk

case_of "what others see of its lease"
check "the tenant sees what it is for: $(as desk leases -v)" has "$(as desk leases -v)" "is for: host"
for who in alice operator; do
  check "$who sees whose it is: $(as "$who" leases)" grep -Eq "^$lease .* alice +[^ ]+@" <<<"$(as "$who" leases)"
done
seen=$(as bob leases -v)
check "another tenant sees that it is in use: $seen" grep -Eq "^$lease .* in use$" <<<"$seen"
check "and neither whose nor what for: $seen" test "${seen/alice/}${seen/is for/}" = "$seen$seen"
run as bob release "$lease"
check "nor can it end it: $err" test "$status" -ne 0
run as bob suspend --server one
check "nor suspend it, which is not tried: $status $out $err" test "$status" -eq 0 -a -z "$err"
check "and that is said: $out" has "$out" "no lease runs on one but those of other tenants, which are not yours to change"

case_of "another tenant's program"
now bob -- --spy "$folder/line"
opens_nothing
visited alice

case_of "a program on another server"
now alice --server two -- --spy "$folder/line"
opens_nothing
visited alice

case_of "the host has ended"
begins late alice -- --spy "$folder/line"
said late "has the handles"
goes_on host
passes host
check "each time all it has lent was right: $(cat "$folder/host.out")" \
  test "$(grep -c '^the piece: .* values are exact' "$folder/host.out")" -eq 7
check "its lease is over: $(list)" until_true is_gone "$lease"
goes_on late
passes late
check "its tenant's program is told the driver's error alone: $(cat "$folder/late.err")" test ! -s "$folder/late.err"
all_over
