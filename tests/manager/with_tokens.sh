# A manager that demands tokens, and commands with one; sourced after errors/common.sh.
port=$((20000 + $$ % 10000))
mkdir -p "$folder/store"
umask 077
"$bin/gpupool-manager" init --store "$folder/store/m.db" >"$folder/operator" 2>/dev/null || fail "init"
start_manager() { # again: with what it has stored. Sets manager
  background "$bin/gpupool-manager" --config /dev/null --store "$folder/store/m.db" --listen "127.0.0.1:$port" \
    --socket "$folder/m.sock" 2>>"$folder/manager.log"
  # shellcheck disable=SC2034 # for who sources this
  manager=${started[-1]}
}
start_manager
export GPUPOOL_MANAGER=127.0.0.1:$port
token() { # token TENANT [ROLE [NAME]]: its file, $folder/NAME, else $folder/TENANT
  gpupool tokens create --token-file "$folder/operator" ${2:+--role "$2"} "$1" >"$folder/${3:-$1}" 2>/dev/null ||
    fail "token of $1"
}
as() { # as TENANT COMMAND...
  local tenant=$1
  shift
  GPUPOOL_TOKEN_FILE=$folder/$tenant timeout 60 "$bin/gpupool" "$@"
}
until_true gpupool tokens list --token-file "$folder/operator" >/dev/null 2>&1
