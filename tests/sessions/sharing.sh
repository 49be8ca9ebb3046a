# What tests of leases that share have in common: the program processes_share in a lease of a tenant's, in the background
# until it is told to go on, or to its end. Sourced after errors/common.sh, with
#   transport                over which sessions go
#   tenant_options TENANT    sets tenant: the options of `gpupool run` that say whose the lease is
#   all_free                 what free_bytes says while there is no lease
share=("${launcher[@]}" "$(dirname "$3")/processes_share")
declare -A pid stdin

# begins NAME TENANT OPTIONS... -- WORDS...: `gpupool run` in the background, with a stdin that ends by `goes_on NAME`.
begins() {
  local name=$1
  local -a options=() tenant
  tenant_options "$2"
  shift 2
  while [ "$1" != -- ]; do options+=("$1"); shift; done
  shift
  mkfifo "$folder/$name.in"
  (
    for descriptor in "${stdin[@]}"; do exec {descriptor}>&-; done # or it would hold the others' open
    exec "$bin/gpupool" run --transport "$transport" "${tenant[@]}" --reason "$name" "${options[@]}" -- "${share[@]}" "$@"
  ) <"$folder/$name.in" >"$folder/$name.out" 2>"$folder/$name.err" &
  pid[$name]=$!
  started+=($!)
  exec {opened}>"$folder/$name.in"
  stdin[$name]=$opened
}
goes_on() {
  local descriptor=${stdin[$1]}
  exec {descriptor}>&-
  unset "stdin[$1]"
}
said() { until_true grep -qs "^$2" "$folder/$1.out" || fail "$1 does not say $2: $(cat "$folder/$1.out" "$folder/$1.err")"; }
# now TENANT OPTIONS... -- WORDS...: to its end; fills out, err, status
now() {
  local -a options=() tenant
  tenant_options "$1"
  shift
  while [ "$1" != -- ]; do options+=("$1"); shift; done
  shift
  run timeout 120 "$bin/gpupool" run --transport "$transport" "${tenant[@]}" "${options[@]}" -- "${share[@]}" "$@"
}
ends() { # ends NAME: its status
  local i
  for ((i = 0; i < 600 * $(busy); ++i)); do kill -0 "${pid[$1]}" 2>/dev/null || break; sleep 0.1; done
  ! kill -0 "${pid[$1]}" 2>/dev/null || fail "$1 does not end: $(list)"
  wait "${pid[$1]}"
}
passes() { # passes NAME
  ends "$1"
  local status=$?
  check "$1: exit status $status: $(cat "$folder/$1.out" "$folder/$1.err")" test "$status" -eq 0
  check "$1 is right: $(cat "$folder/$1.out")" test "$(tail -1 "$folder/$1.out")" = PASS
}
list() { gpupool leases | grep -E '^[0-9a-f]{8}'; }
is_gone() { ! list | grep -q "^$1 "; }
no_lease() { ! list | grep -q .; }
free_bytes() { gpupool devices --json | grep -o '"freeBytes": *[0-9]*'; }
is_free() { [ "$(free_bytes)" = "$all_free" ]; }
all_over() {
  check "no lease is left: $(list)" until_true no_lease
  check "all memory is free: $(free_bytes)" until_true is_free
}

lease_of() { gpupool leases -v | awk -v what="$1" '$2 == "is" && $3 == "for:" && $4 == what { print $1 }'; }
is_revoking() { list | grep "^$1 " | grep -q " revoking "; }
# A lease with memory that is open in it, and its handle in $folder/NAME.handle; another one of its tenant keeps that.
lend_and_keep() { # lend_and_keep NAME
  begins "$1" alps --memory 512MiB -- --pause "$folder/$1.handle"
  said "$1" paused
  begins "$1-keeper" alps --memory 512MiB -- --keep "$folder/$1.handle"
  said "$1-keeper" kept
  lender=$(lease_of "$1") keeper=$(lease_of "$1-keeper")
  check "both have a lease: $(gpupool leases -v)" test -n "$lender" -a -n "$keeper"
}
