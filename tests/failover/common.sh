# shellcheck shell=bash disable=SC2034,SC2154
# Sourced by the tests of failover: programs that work in the background in a protected lease, and what becomes of them.
. "$(dirname "$0")/../errors/common.sh"
programs=$(dirname "$3")
wish=()      # options of gpupool run, besides `protect`
transport=ucx # empty: none is named
export GPUPOOL_PROTECT_SILENCE=30s # a busy machine's servers are silent, too

said() { gpupool leases -v | grep -E "is (not )?(protected|being restored)"; }
says_of_it() { said | grep -Eq "$1"; }
says_ready() { grep -q ready "$folder/$1.out"; }
# launch NAME WORDS...: what they run reads the pipe NAME.in. Sets launched.
launch() {
  local name=$1
  shift
  : >"$folder/$name.out" # not what one of that name said before
  : >"$folder/$name.err"
  rm -f "$folder/$name.in"
  mkfifo "$folder/$name.in"
  exec 9<>"$folder/$name.in"
  "$bin/gpupool" run "${protect[@]}" "${wish[@]}" ${transport:+--transport "$transport"} --memory 512MiB -- "$@" \
    <"$folder/$name.in" >"$folder/$name.out" 2>"$folder/$name.err" &
  launched=$!
  started+=($!)
}
steady() { # steady NAME WORDS...: steady_work that waits for a line before its first round
  local name=$1
  shift
  launch "$name" "${launcher[@]}" "$programs/steady_work" --mib 16 --ready "$@"
  until_true says_ready "$name" || fail "it does not run: $(cat "$folder/$name.err")"
}
go() { echo >&9; }
await_end() { # sets status, and the texts of NAME
  wait "$launched"
  status=$?
  out=$(cat "$folder/$1.out") err=$(cat "$folder/$1.err")
}
right() { [ "$status" -eq 0 ] && [ "$(tail -1 <<<"$out")" = PASS ]; }
# It says what has died, and does not say that its results are right.
honest() { [ "$status" -ne 0 ] && [ "$(tail -1 <<<"$out")" != PASS ] && grep -Eq '^gpupool: .*start the program again$' <<<"$err"; }
