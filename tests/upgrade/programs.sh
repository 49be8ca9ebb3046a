#!/bin/bash
# A server with the worker programs of two versions serves the clients of both at once; a session stays with its program
# wherever it goes; a server without that program refuses it, and says what to do.
#   programs.sh BIN LIBRARY FIRST_ERROR OTHER_LIBRARY      OTHER_LIBRARY: folder of a libcuda.so.1 of other call rows
. "$(dirname "$0")/common.sh"
mkdir "$folder/workers" "$folder/checkpoints"
ln "$bin/worker_of_other_rows" "$folder/workers/gpupool-worker-0.0.9" 2>/dev/null ||
  cp "$bin/worker_of_other_rows" "$folder/workers/gpupool-worker-0.0.9"
printf '#!/bin/sh\nexit 1\n' >"$folder/workers/README"
chmod +x "$folder/workers/README"
# The executables of a server's workers that have a session.
executables() {
  local pid
  for pid in $(pgrep -P "${servers[$1]}"); do
    ! readlink "/proc/$pid/fd/1" 2>/dev/null | grep -q gpupool-output || readlink "/proc/$pid/exe"
  done | xargs -rn1 basename | sort | tr '\n' ' '
}
have() { [ "$(executables "$1")" = "$2" ]; }

manager gpupool-manager
server both gpupool-server --workers "$folder/workers" --checkpoint-folder "$folder/checkpoints"

case_of "what a server serves"
check "the log says it of both: $(cat "$folder/both.log")" grep -q "worker program $folder/workers/gpupool-worker-0.0.9: for clients of gpupool" "$folder/both.log"
check "and what it leaves out" grep -q "worker program $folder/workers/README is left out: it says nothing to --identify" "$folder/both.log"
run gpupool servers -v
check "servers -v: $out" grep -Eq '^both serves clients of gpupool [0-9.]+ \(call rows [0-9a-f]{16}\), [0-9.]+ \(call rows [0-9a-f]{16}\)$' <<<"$out"
run gpupool servers --json
check "servers --json" test "$(grep -c '"release"' <<<"$out")" = 2
run "$bin/gpupool-worker" --identify
check "--identify: $out" grep -Eq '^gpupool-worker interface=[0-9]+ rows=[0-9a-f]{16} frames=[0-9]+ release=[0-9.]+$' <<<"$out"

case_of "both clients at once"
launch new gpupool "$library" --transport ucx
launch old gpupool "$other_library" --transport ucx
old_lease=$lease
check "each has a worker of its program: $(executables both)" until_true have both "gpupool-worker gpupool-worker-0.0.9 "
ends_well new

case_of "moved, suspended, and in files, it stays with its program"
run gpupool migrate "$old_lease"
check "migrate: $status $err" test "$status" -eq 0
check "another worker of that program: $(executables both)" until_true have both "gpupool-worker-0.0.9 "
run gpupool suspend "$old_lease"
check "suspend: $status $err" test "$status" -eq 0
run gpupool resume "$old_lease"
check "resume: $status $err" test "$status" -eq 0
run gpupool checkpoint --hold "$old_lease" held
check "hold: $status $err" test "$status" -eq 0
run gpupool restore "$old_lease" held
check "restore: $status $err" test "$status" -eq 0
check "a worker of that program: $(executables both)" until_true have both "gpupool-worker-0.0.9 "

case_of "a move to a server without that program"
server new gpupool-server --workers none
none='new: has no worker program for this client \(call rows [0-9a-f]{16} of gpupool [0-9.]+\); install the worker of that version there \(docs/admin.md, Upgrade\)'
# That it is another client than the tool has beside it, the manager knows from the holder, when it has renewed.
refused_move() { run gpupool migrate "$@" "$old_lease"; [ "$status" -ne 0 ] && grep -Eq "cannot be moved: $none" <<<"$err"; }
check "refused, and says why: $(refused_move --to new; echo "$err")" until_true refused_move --to new
check "it stays: $(gpupool leases)" until_true is_at "$old_lease" both
run gpupool drain both
check "drain says why it stays: $status $out" test "$status" -eq 1
check "drain: $out" grep -Eq "^gpupool: lease ${old_lease:0:8} stays: .*cannot be moved: $none" <<<"$out"
check "uncordon" gpupool uncordon both

case_of "a move to a server with it"
server old gpupool-server --workers "$folder/workers"
# `new` has as much room, and comes first by its name.
run gpupool drain --wait 1m both
check "drain finds it: $status $out $err" test "$status" -eq 0
check "it is there" is_at "$old_lease" old
check "uncordon" gpupool uncordon both
check "there it has a worker of that program: $(executables old)" until_true have old "gpupool-worker-0.0.9 "
ends_well old
check "nothing is left: $(gpupool leases; gpupool devices)" until_true all_free

case_of "a program of that version gets a server with its worker program"
run "$bin/gpupool_of_other_rows" run --server new -- true
check "not the other one: $status $err" one_line "$err" "version mismatch: server new has no worker program for this client"
run gpupool cordon both
launch placed gpupool_of_other_rows "$other_library" --transport ucx
check "it is there: $(gpupool leases)" is_at "$lease" old
ends_well placed
# One without a wrapper leases when it says what it is.
run env LD_LIBRARY_PATH="$other_library" "${first_error[@]}" --device 100
check "without gpupool run: $status $out $err" test "$status" -eq 0
run gpupool uncordon both

case_of "a client that no program is for"
run gpupool run --server new -- env LD_LIBRARY_PATH="$other_library" "${first_error[@]}"
check "refused, in one line" one_line "$err" "server new: version mismatch: call rows [0-9a-f]{16} of gpupool [0-9.]+ here, [0-9a-f]{16} of gpupool [0-9.]+ on the server; install one of the server's versions here, or the other worker program there"
check "803: $out" grep -q '(803)' <<<"$out"

# protected NAME: steady_work of the other version on the server `both`, protected, which waits for a line. Sets steady.
protected() {
  rm -f "$folder/in"
  mkfifo "$folder/in"
  exec 9<>"$folder/in"
  "$bin/gpupool" run --protect --protect-interval 1s --server both --transport ucx --memory 512MiB -- env LD_LIBRARY_PATH="$other_library" \
    "${launcher[@]}" "$programs/steady_work" --mib 16 --ready --rounds 6 <"$folder/in" >"$folder/$1.out" 2>"$folder/$1.err" &
  started+=($!)
  steady=$!
  is_protected() { gpupool leases -v | grep -q 'is protected .* checkpoint is'; }
  check "it is protected: $(gpupool leases -v)" until_true is_protected
}
is_right() {
  echo >&9
  wait "$steady"
  status=$?
  check "and is right: $status $(cat "$folder/$1.out" "$folder/$1.err")" test "$status" -eq 0 -a "$(tail -1 "$folder/$1.out")" = PASS
}

case_of "a protected program of the other version, whose worker dies"
protected worker
for pid in $(pgrep -P "${servers[both]}"); do
  ! readlink "/proc/$pid/exe" | grep -q 0.0.9 || kill -KILL "$pid"
done
check "it is restored in a worker of its program: $(executables both)" until_true have both "gpupool-worker-0.0.9 "
is_right worker

case_of "one whose server dies"
protected server  # `new` is not cordoned: the lease passes it by
# shellcheck disable=SC2046
kill -KILL $(pgrep -P "${servers[both]}") "${servers[both]}"
check "it is restored in a worker of its program: $(executables old)" until_true have old "gpupool-worker-0.0.9 "
is_right server
