# Bash completion of gpupool, gpupool-manager and gpupool-server. What they take is what their --help lists.
# "--gpus N", "--spread" or "--protect[=TIME]" a line; a value that may be missing is never the next word.
_gpupool_options() { "$@" --help 2>/dev/null | sed -n 's/^  \(--[a-z-]*\)\(\[.*\]\)\{0,1\}/\1/p'; }

# What a value may be, by its unit's name in the help.
_gpupool_value() { # UNIT
  case $1 in
    *'|'*) mapfile -t COMPREPLY < <(compgen -W "${1//|/ }" -- "$cur") ;;
    FILE | PATH | LIBRARY) mapfile -t COMPREPLY < <(compgen -f -- "$cur") ;;
    DIR) mapfile -t COMPREPLY < <(compgen -d -- "$cur") ;;
  esac
}

_gpupool() {
  local cur=${COMP_WORDS[COMP_CWORD]} program=${COMP_WORDS[0]} previous=${COMP_WORDS[COMP_CWORD - 1]}
  local at=1 asked=("$program") usage unit
  COMPREPLY=()
  if [ "${program##*/}" = gpupool ]; then
    if [ "$COMP_CWORD" -eq 1 ]; then
      mapfile -t COMPREPLY < <(compgen -W "--help --version --print-config $("$program" --help |
        sed -n '/^commands:/,/^$/s/^  \([a-z]*\) .*/\1/p')" -- "$cur")
      return
    fi
    asked+=("${COMP_WORDS[1]}")
    at=2
    # "usage: gpupool tokens create|list|revoke [options]"
    usage=$("${asked[@]}" --help 2>/dev/null | sed -n '1s/^usage: gpupool [a-z]* \([a-z|]*|[a-z]*\) .*/\1/p')
    if [ -n "$usage" ]; then
      if [ "$COMP_CWORD" -eq 2 ]; then
        mapfile -t COMPREPLY < <(compgen -W "${usage//|/ }" -- "$cur")
        return
      fi
      asked+=("${COMP_WORDS[2]}")
      at=3
    fi
  fi
  # Behind "--", and behind the first word that is no option of `gpupool run`, another program's words begin.
  local word takesValue=false options
  options=$(_gpupool_options "${asked[@]}")
  while [ "$at" -lt "$COMP_CWORD" ]; do
    word=${COMP_WORDS[at]}
    at=$((at + 1))
    if $takesValue; then takesValue=false; continue; fi
    if [ "$word" = -- ] || { [[ $word != -* ]] && [ "${asked[1]:-}" = run ]; }; then
      [ "$word" = -- ] || at=$((at - 1))
      if declare -F _command_offset >/dev/null; then _command_offset "$at"
      else mapfile -t COMPREPLY < <(compgen -c -f -- "$cur"); fi
      return
    fi
    grep -q -- "^$word [A-Z]" <<<"$options" && takesValue=true
    grep -q -- "^$word [a-z]*|" <<<"$options" && takesValue=true
  done
  if $takesValue; then
    unit=$(sed -n "s/^$previous //p" <<<"$options")
    case $previous in
      --lease) mapfile -t COMPREPLY < <(compgen -W "$(_gpupool_first leases)" -- "$cur") ;;
      --server | --to) mapfile -t COMPREPLY < <(compgen -W "$(_gpupool_first servers)" -- "$cur") ;;
      *) _gpupool_value "$unit" ;;
    esac
  elif [[ $cur == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$(cut -d ' ' -f 1 <<<"$options")" -- "$cur")
  else
    case ${asked[*]:1} in
      release | suspend | resume | migrate | checkpoint | restore)
        mapfile -t COMPREPLY < <(compgen -W "$(_gpupool_first leases)" -- "$cur") ;;
      cordon | uncordon | drain) mapfile -t COMPREPLY < <(compgen -W "$(_gpupool_first servers)" -- "$cur") ;;
      "claim release" | "claim renew") mapfile -t COMPREPLY < <(compgen -W "$(_gpupool_first "claim list")" -- "$cur") ;;
      "tokens revoke") mapfile -t COMPREPLY < <(compgen -W "$(_gpupool_first "tokens list")" -- "$cur") ;;
      run | explain) mapfile -t COMPREPLY < <(compgen -c -- "$cur") ;;
    esac
  fi
}
# The first column of a list, of a pool that answers at once.
# shellcheck disable=SC2086
_gpupool_first() { timeout 2 "$program" $1 2>/dev/null | awk 'NR > 1 && NF == 0 { exit } NR > 1 { print $1 }'; }
complete -F _gpupool gpupool gpupool-manager gpupool-server
