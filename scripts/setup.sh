#!/usr/bin/env bash
# Makes .venv and installs what a group of make targets needs:
#
#   scripts/setup.sh run|lint|spec|test|frameworks|apart ...
#
#   run    NumPy, ml_dtypes, CMake, Ninja, rich, matplotlib
#   lint   ruff and clang-format, pinned: their output differs from version to version
#   spec   spin, through apt
#   test   pytest, hypothesis, the wheel's build tools, PyTorch; GoogleTest, Boost.Context, libfabric and, if it can be
#          had, ccache through apt; spec, frameworks
#   frameworks  what tests of integrations run, pinned; where it cannot be had, they are skipped
#   apart  what make test-frameworks runs, pinned, in folders of their own: .venv/frameworks, .venv/sglang
#
# A group that is already there costs milliseconds: .venv/.stamp-GROUP holds a hash of this script.
#
#   PYTHON        the Python that .venv is made of (default python3)
#   TORCH=0       leave PyTorch out; its tests are skipped
#   TW_TORCH_ANY=1  accept a PyTorch that brings GPU packages (gigabytes)
#   TW_STRICT=1   a system package or framework that cannot be had is an error, not a warning
#
# Wheels in the folder wheels/ of the repository, if there is one, are found beside pip's sources.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV

run_packages=("numpy>=1.24" "ml_dtypes>=0.4" "cmake>=3.30" "ninja>=1.11" "rich>=13"
  "matplotlib>=3.8")
lint_packages=("ruff==0.17.6" "clang-format==18.1.8")
test_packages=("pytest>=8" "hypothesis>=6.100" "scikit-build-core>=0.11" "build>=1.2")
torch_package="torch==2.13.0"
# And what accelerate needs, and what importing FlashInfer does: it alone would bring gigabytes for GPUs, and accelerate a
# PyTorch where one is borrowed.
framework_packages=("transformers==5.24.0" "psutil" "packaging" "apache-tvm-ffi>=0.1.11,<0.2" "nvidia-ml-py" "requests")
frameworks_without_needs=("accelerate==1.15.0" "flashinfer-python==0.7.2.post1" "megatron-core==0.16.1")
# torchtitan, and what importing its MoE layers needs: 7 MB of the gigabytes that it asks for. Not Triton: its tests say how.
packages_apart=("torchtitan==0.3.0" "spmd_types==0.2.3" "tyro==1.0.17" "docstring_parser==0.18.0" "typeguard==4.6.1")
# vLLM from its sources (47 MB), without kernels: its wheel brings gigabytes. What builds it, and what importing its MoE
# layers and its command line needs: 80 MB.
vllm_package="vllm==0.33.0"
vllm_builders=("setuptools==80.10.2" "setuptools-scm==10.3.4" "vcs-versioning==2.6.0" "setuptools-rust==1.13.0"
  "semantic-version==2.10.0" "wheel==0.48.0" "packaging>=24.2" "jinja2>=3.1" "markupsafe>=2")
packages_apart+=("aiohappyeyeballs==2.7.1" "aiohttp==3.14.5" "aiosignal==1.4.0" "attrs==26.1.0" "cachetools==8.0.2"
  "cbor2==6.3.0" "cloudpickle==3.1.3" "einops==0.8.2" "fastapi==0.165.0" "frozenlist==1.8.0" "llguidance==1.9.1"
  "msgspec==0.22.0" "multidict==7.2.1" "openai==3.57.0" "openai-harmony==0.0.8" "opentelemetry-api==1.45.2"
  "partial-json-parser==0.2.1.1.post7" "prometheus-client==0.26.0" "propcache==0.5.4" "py-cpuinfo==9.0.0"
  "pybase64==1.5.1" "pyzmq==27.3.0" "sniffio==1.3.1" "starlette==1.10.0" "uvloop==0.23.0" "xgrammar==0.2.8"
  "yarl==1.25.1")

# SGLang, and what importing its dispatchers needs: 140 MB, apart from those, whose packages it would find and want more of.
packages_sglang=("sglang==0.5.23" "msgspec==0.22.0" "orjson==3.13.0" "pybase64==1.5.1" "pyzmq==27.3.0" "dill==0.4.1"
  "einops==0.8.2")

base_python=${PYTHON:-python3}
python=.venv/bin/python
strict=${TW_STRICT:-0}

say() { printf 'setup: %s\n' "$*"; }
warn() { printf 'setup: WARNING: %s\n' "$*" >&2; }
die() { printf 'setup: ERROR: %s\n' "$*" >&2; exit 1; }
pip() {
  local links=()
  [[ -d wheels ]] && links=(--find-links wheels)
  local command=$1
  shift
  # Python compiles what it imports; to compile all of PyTorch takes longer than to install it.
  "$python" -m pip "$command" --no-compile --disable-pip-version-check "${links[@]}" "$@"
}

# -------------------------------------------------------------------------------------------------
# Stamps

stamp_key() { sha256sum < scripts/setup.sh | cut -c1-16; }
is_stamped() { [[ -x $python && -f .venv/.stamp-$1 && $(< ".venv/.stamp-$1") == "$(stamp_key)" ]]; }
stamp() { stamp_key > ".venv/.stamp-$1"; }

# -------------------------------------------------------------------------------------------------
# The virtual environment

make_venv() {
  if [[ -x $python ]] && "$python" -c 'import pip' 2> /dev/null; then return; fi
  command -v "$base_python" > /dev/null ||
    die "no '$base_python' found; install Python >= 3.10 or name one: PYTHON=/path/to/python3"
  "$base_python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$("$base_python" -V) is too old; Python >= 3.10 is needed: PYTHON=/path/to/python3"
  say "making .venv with $("$base_python" -V)"
  rm -rf .venv  # what an interrupted attempt left
  if "$base_python" -c 'import ensurepip, venv' 2> /dev/null; then
    "$base_python" -m venv .venv
  elif "$base_python" -c 'import virtualenv' 2> /dev/null; then
    "$base_python" -m virtualenv --quiet .venv
  else
    die "'$base_python' cannot make virtual environments: it lacks venv and ensurepip." \
      "On Debian and Ubuntu: apt-get install python3-venv. Or name another Python: PYTHON=..."
  fi
  # The pip that some Pythons bundle resolves dependencies by rules of its own.
  "$python" -c 'import pip, sys; sys.exit(int(pip.__version__.split(".")[0]) < 23)' ||
    pip install --quiet "pip>=23.1"
}

install() {
  say "$1: installing ${*:2}"
  pip install --quiet "${@:2}"
}

# -------------------------------------------------------------------------------------------------
# PyTorch

import_torch() { "$1" -c 'import torch; print("PyTorch", torch.__version__)' 2> /dev/null; }

# Constraints that no GPU build can meet. pip then refuses at torch's own metadata; a dry run with a
# report would first have fetched everything that it reports on, 2.7 GB of it.
gpu_packages=(triton cuda-toolkit cuda-bindings nvidia-nccl-cu12 nvidia-nccl-cu13 nvidia-cudnn-cu12
  nvidia-cudnn-cu13)

install_torch() {
  local options=(--progress-bar off)
  # fast-deps reads the metadata out of a remote wheel without fetching the wheel.
  local lazy=(--use-feature fast-deps)
  "$python" -m pip install "${lazy[@]}" --help > /dev/null 2>&1 && options+=("${lazy[@]}")
  if [[ ${TW_TORCH_ANY:-0} != 1 ]]; then
    printf '%s<0\n' "${gpu_packages[@]}" > .venv/no-gpu.txt
    options+=(--constraint .venv/no-gpu.txt)
  fi
  pip install "${options[@]}" "$torch_package" 2>&1 |
    sed -nuE 's/^ *((Processing|Downloading|Successfully|ERROR|torch .* depends on).*)/  \1/p' |
    cut -c 1-160
}

# Puts the folder that the base Python has its PyTorch in at the end of .venv's path.
borrow_torch() {
  local folder link
  folder=$("$base_python" -c 'import os, torch; print(os.path.dirname(torch.__path__[0]))' \
    2> /dev/null) || return
  link=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base_torch.pth
  echo "$folder" > "$link"
  import_torch "$python" || { rm "$link"; return 1; }
}

# The base Python's PyTorch serves if there is one; else the pinned version, if it is a CPU build.
provide_torch() {
  if [[ ${TORCH:-1} == 0 ]]; then
    warn "TORCH=0: PyTorch is left out. EVERY TEST THAT NEEDS IT IS SKIPPED."
    return
  fi
  is_stamped torch && return
  import_torch "$python" && { stamp torch; return; }
  if borrow_torch; then
    say "torch: the one of $base_python"
    stamp torch
    return
  fi
  say "torch: installing $torch_package; what is downloaded:"
  if ! install_torch; then
    die "no $torch_package without GPU packages: gigabytes, of which the tests need nothing." \
      "Put a wheel of a CPU build into wheels/, or let pip find one (PIP_FIND_LINKS," \
      "PIP_EXTRA_INDEX_URL), or leave PyTorch out (TORCH=0), or take it all (TW_TORCH_ANY=1)."
  fi
  import_torch "$python" || die "PyTorch was installed, but cannot be imported"
  stamp torch
}

# -------------------------------------------------------------------------------------------------
# Frameworks

provide_frameworks() {
  local missing=""
  if [[ ${TORCH:-1} == 0 ]]; then
    warn "TORCH=0: frameworks are left out, and their tests skipped"
    return
  fi
  is_stamped frameworks && return
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    missing="they need Python 3.11, and this is $("$python" -V)"
  elif ! install frameworks "${framework_packages[@]}" ||
    ! pip install --quiet --no-deps "${frameworks_without_needs[@]}"; then
    missing="pip cannot install ${framework_packages[0]} and ${frameworks_without_needs[*]}"
  fi
  [[ -z $missing ]] && { stamp frameworks; return; }
  [[ $strict == 1 ]] && die "frameworks: $missing"
  warn "frameworks: $missing; their tests are skipped"
}

# Builds vLLM without kernels into .venv/frameworks, in this environment: one of its own would get a PyTorch of its own.
install_vllm() {
  local builders=.venv/vllm-builders target=.venv/frameworks options=(--no-deps --no-build-isolation)
  pip install --quiet --no-deps --target "$builders" "${vllm_builders[@]}" &&
    PYTHONPATH=$PWD/$builders VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=${vllm_package##*=} \
      pip install --quiet "${options[@]}" --no-binary vllm --target "$target" "$vllm_package"
  local result=$?
  rm -rf "$builders"
  return $result
}

provide_apart() {
  if [[ ${TORCH:-1} == 0 ]]; then
    warn "TORCH=0: frameworks are left out, and their tests skipped"
    return
  fi
  is_stamped apart && [[ -d .venv/frameworks ]] && return
  rm -rf .venv/frameworks
  say "apart: installing ${packages_apart[*]} $vllm_package"
  if pip install --quiet --no-deps --target .venv/frameworks "${packages_apart[@]}" && install_vllm; then
    stamp apart
    return
  fi
  rm -rf .venv/frameworks
  [[ $strict == 1 ]] && die "apart: pip cannot install ${packages_apart[*]} $vllm_package"
  warn "apart: pip cannot install ${packages_apart[*]} $vllm_package; tests of them are skipped"
}

provide_sglang() {
  [[ ${TORCH:-1} == 0 ]] && return
  is_stamped sglang && [[ -d .venv/sglang ]] && return
  rm -rf .venv/sglang
  say "sglang: installing ${packages_sglang[*]}"
  if pip install --quiet --no-deps --target .venv/sglang "${packages_sglang[@]}"; then
    stamp sglang
    return
  fi
  rm -rf .venv/sglang
  [[ $strict == 1 ]] && die "sglang: pip cannot install ${packages_sglang[*]}"
  warn "sglang: pip cannot install ${packages_sglang[*]}; tests of it are skipped"
}

# -------------------------------------------------------------------------------------------------
# System packages

# Where apt and root, or sudo without a password, are there.
apt_install() {
  local root=()
  [[ $(id -u) == 0 ]] || root=(sudo -n)
  command -v apt-get > /dev/null && { [[ $(id -u) == 0 ]] || sudo -n true 2> /dev/null; } || return 0
  say "apt-get install $1"
  local apt=("${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq)
  local install=("${apt[@]}" install -y --no-install-recommends "$1")
  "${install[@]}" > /dev/null || { "${apt[@]}" update && "${install[@]}" > /dev/null; } || true
}

# provide_system PACKAGE COMMAND...: apt-get install PACKAGE unless COMMAND succeeds.
provide_system() {
  local package=$1
  shift
  "$@" > /dev/null 2>&1 && return
  apt_install "$package"
  "$@" > /dev/null 2>&1 && return
  local text="the system package $package (Debian's name) is missing and cannot be installed here"
  [[ $strict == 1 ]] && die "$text"
  warn "$text; what needs it will fail or be skipped"
}

has_header() { printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$1" | c++ -E -x c++ -; }

# -------------------------------------------------------------------------------------------------

setup_group() {
  case $1 in
    run)
      command -v c++ > /dev/null || die "no C++ compiler (c++) found; GCC 12 or newer works"
      is_stamped run || { install run "${run_packages[@]}"; stamp run; }
      ;;
    lint) is_stamped lint || { install lint "${lint_packages[@]}"; stamp lint; } ;;
    spec) provide_system spin command -v spin ;;
    test)
      is_stamped test || { install test "${test_packages[@]}"; stamp test; }
      provide_system libgtest-dev has_header gtest/gtest.h
      provide_system libboost-context-dev has_header boost/context/continuation.hpp
      provide_system libfabric-dev has_header rdma/fabric.h
      # Builds do without it, and it is asked for once.
      is_stamped ccache || { command -v ccache > /dev/null || apt_install ccache; stamp ccache; }
      setup_group spec
      provide_torch
      provide_frameworks
      ;;
    frameworks) provide_frameworks ;;
    apart) provide_torch; provide_apart; provide_sglang ;;
    *) die "unknown group '$1'; known are run, lint, spec, test, frameworks and apart" ;;
  esac
}

[[ $# -gt 0 ]] || die "usage: scripts/setup.sh run|lint|spec|test|frameworks|apart ..."
# Two makes may start at once.
if command -v flock > /dev/null; then exec 9> .venv.lock && flock 9; fi
make_venv
for group in "$@"; do setup_group "$group"; done
