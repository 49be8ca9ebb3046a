#!/bin/bash
# What is installed works where it is installed (as services, where systemd runs: ./services): the Debian packages and the client's archive are made, unpacked into
# folders of the test, and a pool is started from there with the configuration that the packages bring.
#   installed.sh BUILD CPACK VECTOR_ADD
set -u
build=$1 cpack=$2 program=$3
folder=$(mktemp -d "${TMPDIR:-/tmp}/gpupool-packages-XXXXXX")
export GPUPOOL_STATE=$folder/pool XDG_CACHE_HOME=$folder/cache GPUPOOL_SOFT_MEMORY=256MiB
unset GPUPOOL_MANAGER GPUPOOL_CONFIG GPUPOOL_HOLDER GPUPOOL_TOKEN_FILE GPUPOOL_TENANT GPUPOOL_TRANSPORT LD_LIBRARY_PATH
failures=0 started=()
finish() {
  for pid in "${started[@]}"; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null; done
  rm -rf "$folder"
}
trap finish EXIT
fail() {
  printf 'FAILED: %s\n' "$*"
  failures=$((failures + 1))
}
check() { # check TEXT COMMAND...
  local text=$1
  shift
  "$@" >"$folder/out" 2>&1 || { fail "$text"; cat "$folder/out"; }
}
until_true() {
  local i
  for ((i = 0; i < 1200; ++i)); do
    "$@" >/dev/null 2>&1 && return 0
    sleep 0.05
  done
  return 1
}
command -v dpkg-shlibdeps >/dev/null || { echo "skipped: no dpkg-shlibdeps (Debian package dpkg-dev)"; exit 77; }

# The software GPU's package takes half a minute to compress: the file is taken as it was built.
make=("$cpack" --config "$build/CPackConfig.cmake" -B "$folder/made" -D "CPACK_OUTPUT_FILE_PREFIX=$folder/made")
slurm=
[ ! -e "$build/lib/slurm/spank_gpupool.so" ] || slurm=';slurm;slurm-system'
check "the packages" "${make[@]}" -G DEB \
  -D "CPACK_COMPONENTS_ALL=client;client-system;server;server-system;manager;manager-system$slurm"
check "the client's archive" "${make[@]}" -G TXZ
root=$folder/root
# verified UNIT: with the executables where they are unpacked.
verified() {
  command -v systemd-analyze >/dev/null && [ -e /usr/lib/systemd/system/sysinit.target ] || return 0
  local copy=$folder/${1##*/}
  sed "s|^ExecStart=/|ExecStart=$root/|" "$1" >"$copy"
  check "systemd has nothing to say of ${1##*/}" test -z "$(systemd-analyze verify "$copy" 2>&1 | tee /dev/stderr)"
}
for part in client server manager; do
  package=$(echo "$folder"/made/gpupool-${part}_*.deb)
  check "gpupool-$part unpacks" dpkg-deb -x "$package" "$root"
  check "its control files" dpkg-deb -e "$package" "$folder/control-$part"
  check "its configuration is the administrator's" grep -qx "/etc/gpupool/$part.yaml" "$folder/control-$part/conffiles"
  check "it says what it depends on" grep -q '^Depends:.*libc6' "$folder/control-$part/control"
  for script in "$folder/control-$part"/{pre,post}*; do [ ! -e "$script" ] || check "$script" sh -n "$script"; done
  [ "$part" = client ] && continue
  unit=$root/usr/lib/systemd/system/gpupool-$part.service
  verified "$unit"
  read -r executable words < <(sed -n 's/^ExecStart=//p' "$unit")
  check "$unit starts what is there: $executable" test -x "$root$executable"
  check "$executable $words" env GPUPOOL_MANAGER_STORE=memory "$root$executable" ${words/\/etc/$root/etc} --check-config
done
kept=$root/usr/lib/gpupool/workers
check "an upgrade keeps the worker" env DPKG_ROOT="$root" sh "$folder/control-server/preinst" upgrade 0.0.8
check "and the last one alone" env DPKG_ROOT="$root" sh "$folder/control-server/preinst" upgrade 0.0.9
check "under its version: $(ls "$kept")" test "$(ls "$kept")" = gpupool-worker-0.0.9 -a -x "$kept/gpupool-worker-0.0.9"
check "an installation keeps none" env DPKG_ROOT="$folder/nowhere" sh "$folder/control-server/preinst" install
if [ -n "$slurm" ]; then
  check "gpupool-slurm unpacks" dpkg-deb -x "$(echo "$folder"/made/gpupool-slurm_*.deb)" "$root"
  for file in "$(sed -n 's/^required \([^ ]*\).*/\1/p' "$root/usr/share/gpupool/slurm/plugstack.conf")" \
    "$(sed -n 's/^ExecStart=//p' "$root/usr/lib/systemd/system/gpupool-slurm-reap.service")" \
    /usr/share/gpupool/slurm/{prolog,epilog}_slurmctld; do
    check "$file is there" test -x "$root$file" -o "${file%.so}" != "$file" -a -s "$root$file"
  done
  verified "$root/usr/lib/systemd/system/gpupool-slurm-reap.service"
  check "a job without GPUs has nothing to do in the prolog" env -i "$root/usr/share/gpupool/slurm/prolog_slurmctld"
  check "nor in the epilog" env -i "$root/usr/share/gpupool/slurm/epilog_slurmctld"
fi
commands=$("$root/usr/bin/gpupool" --help | sed -n '/^commands:/,/^$/s/^  \([a-z]*\) .*/\1/p')
check "there are commands" test "$(wc -w <<<"$commands")" -gt 20
for command in $commands; do
  page=$root/usr/share/man/man1/gpupool-$command.1.gz
  check "a man page of $command" test -s "$page"
  # Each option of the help is in the page.
  check "its options" diff <("$root/usr/bin/gpupool" "$command" --help | sed -n 's/^  --/--/p') \
    <(zcat "$page" | sed -n 's/^\.B //p' | sed 's/\\fI//; s/\\fR//; s/\\-/-/g; s/\\e/\\/g')
done
check "of the services" test -s "$root/usr/share/man/man1/gpupool-manager.1.gz" -a -s "$root/usr/share/man/man1/gpupool-server.1.gz"
if command -v groff >/dev/null; then
  check "groff has nothing to say" test -z "$(zcat "$root"/usr/share/man/man1/*.gz | groff -man -Tutf8 -ww 2>&1 >/dev/null)"
fi
# completes WORDS... EXPECTED: what bash would offer for the last of WORDS has EXPECTED among it.
completes() {
  local expected=${*: -1}
  bash -c '. "$0/usr/share/bash-completion/completions/gpupool"
    COMP_WORDS=("$0/usr/bin/gpupool" "${@:2}") COMP_CWORD=$(($# - 1))
    _gpupool; echo "offered: ${COMPREPLY[*]}"; printf "%s\n" "${COMPREPLY[@]}" | grep -qx -- "$1"' \
    "$root" "$expected" "${@:1:$#-1}"
}
check "completion of a command" completes cla claim
check "of a command's word" completes tokens "" revoke
check "of an option" completes tokens create --ro --role
check "of an option whose value may be missing" completes run --protec --protect
check "of a value" completes run --gpus 2 --transport "" ucx
check "of a program" completes run --protect bas bash
check "nothing of the packages is on the loader's path" test -z "$(find "$root/usr/lib" -maxdepth 1 -name '*.so*')"

ln -s "$build/lib/libcuda-soft.so" "$root/usr/lib/gpupool/libcuda-soft.so"
"$root/usr/bin/gpupool-manager" --config "$root/etc/gpupool/manager.yaml" --store "$folder/manager.db" \
  --listen 127.0.0.1:0 --socket "$folder/manager.sock" &
started+=($!)
export GPUPOOL_MANAGER=unix:$folder/manager.sock
GPUPOOL_SOFT_DEVICES=1 "$root/usr/bin/gpupool-server" --config "$root/etc/gpupool/server.yaml" --manager "$GPUPOOL_MANAGER" \
  --state "$folder/server" --name node --driver "$root/usr/lib/gpupool/libcuda-soft.so" --nvml none &
started+=($!)
offered() { timeout 20 "$root/usr/bin/gpupool" devices | grep -q '^0 .*free\|node'; }
check "the server offers its GPU" until_true offered
listed() { timeout 20 "$root/usr/bin/gpupool" servers -v | grep -q '^node serves clients of gpupool'; }
check "which versions the server serves" until_true listed
check "a program, by the package's client" timeout 60 "$root/usr/bin/gpupool" run --wait 30s -- "$program"
check "its NVML" timeout 60 "$root/usr/bin/gpupool" run --wait 30s -- "$root/usr/bin/gpupool" smi -L
mkdir "$folder/elsewhere"
check "the archive unpacks" tar xf "$(echo "$folder"/made/gpupool-client-*.tar.xz)" -C "$folder/elsewhere"
client=$(echo "$folder"/elsewhere/gpupool-*)
check "a program, by the archive's client" timeout 60 "$client/bin/gpupool" run --wait 30s -- "$program"
export LD_LIBRARY_PATH=$client/lib/gpupool GPUPOOL_WAIT=30s
check "a program without gpupool run" timeout 60 "$program"
[ "$failures" -eq 0 ] || { echo "$failures checks failed"; exit 1; }
echo "the packages and the archive work where they are unpacked"
