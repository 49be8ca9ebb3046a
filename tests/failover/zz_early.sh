#!/bin/bash
. "$(dirname "$0")/servers.sh"
seed=${!#}
RANDOM=$seed
up
wish=(--server first)
export GPUPOOL_LOG=info
protect=(--protect --protect-interval 1s)
for round in $(seq 1 14); do
  server first >/dev/null 2>&1
  d=$((RANDOM % 900))
  launch early "${launcher[@]}" "$programs/steady_work" --mib 16 --rounds 12 --pause 100
  sleep "$(printf '0.%03d' $d)"
  kill_server first 2>/dev/null
  await_end early 
  if right; then r=right; else r="NOT $(honest && echo honest)"; fi
  how=$(grep -o "as epoch.*\|another one is looked for" <<<"$err" | tail -1)
  echo "round $round $d ms: $r $how"
  [ "$r" = right ] || { echo "$out"; echo "$err"; }
  until_true no_lease
done
finish
