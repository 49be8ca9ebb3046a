# Sourced by ./quickstart and ./check, in the repository's root: installs what building takes and is not there, and
# configures build/release. Debian 12 and Ubuntu 24.04; elsewhere it names what is needed and goes on.

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

packages=(g++ cmake ninja-build pkg-config procps python3 ca-certificates capnproto libcapnp-dev libucx-dev
  libyaml-cpp-dev nlohmann-json3-dev catch2 libsqlite3-dev libssl-dev liblz4-dev libzstd-dev zlib1g-dev libibverbs-dev
  libxxhash-dev libseccomp-dev libslurm-dev)
# What tests take beyond that: a virtual machine with Soft-RoCE, network namespaces, clocks that can be set, a Slurm cluster. A test whose tool is not there
# is skipped with the reason. clang with its fuzzer's runtime comes in LLVM's version (installTestPackages).
testPackages=(qemu-system-x86 busybox-static kmod cpio iproute2 rdma-core ibverbs-providers ibverbs-utils librdmacm1
  strace git dpkg-dev python3-venv python3-jsonschema faketime munge slurmctld slurmd slurm-client)
# The web page is looked at in a headless Chromium, without the desktop that the whole browser brings. Ubuntu has none
# as a package: there, Google's Chrome is taken if it is installed.
browserPackage=chromium-headless-shell
llvmVersions=(19 18 17 16)  # the software GPU takes any of them
lintVersion=19              # of clang-format and clang-tidy: another release formats differently
# The last one holds cudaProfiler.h alone: three of the driver's functions are declared there.
cudaWheels=(nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cuda-nvrtc nvidia-nvvm
  nvidia-cuda-profiler-api)
cudaFolder=$PWD/.cache/cuda

installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# aptInstall PACKAGE...: those that are missing, all at once.
aptInstall() {
  local missing=() package sudo=()
  for package in "$@"; do installed "$package" || missing+=("$package"); done
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || die "these packages are missing, and there is neither root nor sudo: ${missing[*]}"
    sudo=(sudo)
  fi
  say "installing Debian packages: ${missing[*]}"
  "${sudo[@]}" apt-get -qq update
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 install --no-install-recommends -y \
    "${missing[@]}" >/dev/null
}

llvmPackage() {
  local version
  for version in "${llvmVersions[@]}"; do
    if installed "llvm-$version-dev"; then echo "llvm-$version-dev"; return; fi
  done
  for version in "${llvmVersions[@]}"; do
    if [ -n "$(apt-cache search --names-only "^llvm-$version-dev\$")" ]; then echo "llvm-$version-dev"; return; fi
  done
  echo "llvm-${llvmVersions[0]}-dev"
}

installPackages() {
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    say "not a Debian system: these packages' equivalents are expected: ${packages[*]} llvm-19-dev"
    return
  fi
  aptInstall "${packages[@]}"
  aptInstall "$(llvmPackage)"
}

installTestPackages() {
  command -v dpkg-query >/dev/null && command -v apt-get >/dev/null || return 0
  local version
  version=$(llvmPackage)
  version=${version#llvm-}
  version=${version%-dev}
  local browser=("$browserPackage")
  if grep -qs '^ID=ubuntu' /etc/os-release; then browser=(); fi
  aptInstall "${testPackages[@]}" "${browser[@]}" "clang-$version" "libclang-rt-$version-dev" "clang-format-$lintVersion" \
    "clang-tidy-$lintVersion"
}

# The call rows are checked against the headers of CUDA 13.0, so no other release will do.
isCuda13() { [ -x "$1" ] && "$1" --version 2>/dev/null | grep -q 'release 13\.0,'; }

# Sets nvcc. GPUPOOL_CUDA=pypi: the private folder, also where there is a toolkit.
findCuda() {
  local candidate
  if [ "${GPUPOOL_CUDA:-}" != pypi ]; then
    for candidate in "$(command -v nvcc || true)" "${CUDA_HOME:-/nowhere}/bin/nvcc" /usr/local/cuda/bin/nvcc \
      /usr/local/cuda-13.0/bin/nvcc; do
      if isCuda13 "$candidate"; then nvcc=$(readlink -f "$candidate"); return; fi
    done
  fi
  nvcc=$cudaFolder/bin/nvcc
  if ! isCuda13 "$nvcc" || [ ! -e "$cudaFolder/include/cudaProfiler.h" ]; then installCuda; fi
}

# Sets python to one that has pip.
findPip() {
  python=python3
  python3 -m pip --version >/dev/null 2>&1 && return
  command -v apt-get >/dev/null && aptInstall python3-venv
  [ -x .cache/pip/bin/python ] || python3 -m venv .cache/pip
  python=.cache/pip/bin/python
}

# The compiler and the headers from PyPI, laid out as in a toolkit.
installCuda() {
  local new=$cudaFolder.new library python=python3
  say "installing the CUDA 13.0 compiler and headers from PyPI into ${cudaFolder#"$PWD"/}"
  findPip
  rm -rf "$new" "$cudaFolder"
  $python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --target "$new" \
    --root-user-action ignore "${cudaWheels[@]/%/==13.0.*}" ||
    die "PyPI did not give the compiler; install the CUDA 13.0 toolkit, or set CUDA_HOME to one"
  (
    cd "$new/nvidia/cu13"
    ln -s lib lib64
    for library in lib/*.so.13; do ln -s "${library##*/}" "${library%.13}"; done
    # To link against, as the toolkit's stub: the driver library itself is gpupool's.
    mkdir lib/stubs
    sed -n 's/^NAME(\(.*\))$/int \1(void) { return 34; }/p' "$OLDPWD/schema/names.def" |
      g++ -x c - -shared -fPIC -w -Wl,-soname,libcuda.so.1 -o lib/stubs/libcuda.so
  )
  mv "$new/nvidia/cu13" "$cudaFolder"
  rm -rf "$new"
  isCuda13 "$cudaFolder/bin/nvcc" || die "the nvcc from PyPI does not run"
}

# NVML's header, from PyPI where the toolkit comes without.
findNvml() {
  local folder=$PWD/.cache/nvml python=python3
  [ ! -e "$1/nvml.h" ] && [ ! -e "$folder/nvml.h" ] || return 0
  say "installing NVML's header from PyPI into .cache/nvml"
  findPip
  $python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --target "$folder.new" \
    --root-user-action ignore "nvidia-nvml-dev==13.0.*" || die "PyPI did not give NVML's header, nvml.h"
  mkdir -p "$folder"
  mv "$folder.new"/nvidia/cu13/include/nvml.h "$folder/"
  rm -rf "$folder.new"
}

configureRelease() {
  local toolkit headers
  toolkit=$(dirname "$(dirname "$nvcc")")
  headers=$toolkit/include
  findNvml "$headers"
  [ -e "$headers/cuda.h" ] && [ -e "$headers/cudaProfiler.h" ] || die "$headers lacks cuda.h or cudaProfiler.h"
  mkdir -p build/release
  # Several files of a library at once: two thirds of the time. GPUPOOL_UNITY=OFF: one by one, for work on one of them.
  cmake --preset release -DNVCC="$nvcc" -DCUDA_INCLUDE="$headers" -DCMAKE_UNITY_BUILD="${GPUPOOL_UNITY:-ON}" >build/release/configure.log 2>&1 ||
    { cat build/release/configure.log; die "CMake failed"; }
}

# What ./quickstart and ./check have in common: everything up to the build.
prepare() {
  installPackages
  findCuda
  say "configuring build/release (CUDA compiler: $nvcc)"
  configureRelease
}
