#!/usr/bin/env bash
# The wheel, as a user gets it: built, installed into a venv of its own without PyTorch, run from /.
#
#   tests/wheel/test_wheel.sh
#
# PYTHON names the Python that builds and runs it (default: the one of .venv, else python3). TOKENWAY_CUDA is AUTO, ON
# or OFF, as for make (default AUTO: with CUDA where nvcc is). TOKENWAY_SM lists the GPUs to compile for, as for pip
# (default: all).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[[ -x $python ]] || python=$(command -v python3)
# Nothing of the development tree may help.
unset PYTHONPATH PYTHONHOME TOKENWAY_LIBRARY LD_LIBRARY_PATH LD_PRELOAD
unset CXXFLAGS CFLAGS LDFLAGS CMAKE_ARGS CMAKE_GENERATOR
unset PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PIP_DISABLE_PIP_VERSION_CHECK=1

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say() { printf 'wheel: %s\n' "$*"; }
die() { printf 'wheel: ERROR: %s\n' "$*" >&2; exit 1; }

# ---- build --------------------------------------------------------------------------------------

export TOKENWAY_SM=${TOKENWAY_SM:-all}
say "building, for GPUs of compute capability $TOKENWAY_SM"
cuda=${TOKENWAY_CUDA:-AUTO}
[[ $cuda != AUTO ]] || { command -v nvcc > /dev/null && cuda=ON; } || cuda=OFF
# From nothing: the objects of `make build` are of other sizes, and for the GPUs of this machine alone.
mkdir "$work/build"
CC=${CC:-cc} CXX=${CXX:-c++} PATH=$(dirname "$python"):$PATH "$python" -m pip wheel "$root" --quiet --no-deps \
  --wheel-dir "$work/dist" --config-settings "build-dir=$work/build" \
  --config-settings "cmake.define.TOKENWAY_CUDA=$cuda"
wheels=("$work"/dist/*)
[[ ${#wheels[@]} == 1 && -f ${wheels[0]} ]] || die "expected one wheel, got: ${wheels[*]}"
wheel=${wheels[0]}
name=$(basename "$wheel")
version=$(sed -nE 's/^#define TW_VERSION_(MAJOR|MINOR|PATCH) +([0-9]+).*/\2/p' \
  "$root/include/tokenway/tokenway.h" | paste -sd.)
[[ $name == tokenway-"$version"-py3-none-*linux*.whl ]] ||
  die "$name: expected tokenway-$version-py3-none-*linux*.whl"

# ---- install ------------------------------------------------------------------------------------

say "installing $name"
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "$wheel"  # brings numpy and ml_dtypes by its own metadata
cd /
run=("$work/venv/bin/python")
"${run[@]}" - << 'PYTHON'
import importlib.util

for name in ("numpy", "ml_dtypes", "tokenway"):
    assert importlib.util.find_spec(name), f"the wheel did not bring {name}"
assert not importlib.util.find_spec("torch"), "this venv must be without PyTorch"
PYTHON
package=$("${run[@]}" -c 'import importlib.resources as r; print(r.files("tokenway"))')
[[ $package == "$work/venv/"* ]] || die "tokenway was imported from $package"
library=$package/lib/libtokenway.so
floor=$package/lib/tokenway-floor
headers=$package/include/tokenway
wanted=("$library" "$headers/tokenway.h" "$headers/types.h" "$headers/carrier.h" "$package/py.typed")
[[ $cuda == OFF ]] || wanted+=("$floor")
for file in "${wanted[@]}"; do
  [[ -f $file ]] || die "the wheel lacks ${file#"$package"/}"
done
[[ $cuda == OFF || -x $floor ]] || die "${floor#"$package"/} is not executable"

# ---- the library --------------------------------------------------------------------------------

say "exports and dependencies"
foreign=$(nm -D --defined-only "$library" | awk '$3 !~ /^tw[A-Z]/')
[[ -z $foreign ]] || die "the library exports more than tw*:"$'\n'"$foreign"
nm -D --defined-only "$library" | grep ' T twVersion$' > /dev/null ||
  die "twVersion is not exported"
binaries=("$library")
[[ $cuda == OFF ]] || binaries+=("$floor")
for file in "${binaries[@]}"; do
  needed=$(ldd "$file")
  ! grep -E 'libcuda|libcudart|not found' <<< "$needed" || die "a user may lack these"
done

say "CUDA: $cuda"
"${run[@]}" - "$cuda" << 'PYTHON'
import sys

import tokenway as tw

try:
    for comm in tw.local_comms(1, devices=[0]):
        comm.close()
    said = "a comm on a device"
except tw.Unsupported as error:
    said = str(error)
assert (said == "this library was built without CUDA") == (sys.argv[1] == "OFF"), said
print(said)
PYTHON

# ---- Python -------------------------------------------------------------------------------------

say "tokenway info"
"$work/venv/bin/tokenway" info

say "a round trip on one rank"
"${run[@]}" - << 'PYTHON'
import ml_dtypes
import numpy as np

import tokenway as tw

ids = np.array([[0, 1], [2, 3], [3, -1]], np.int32)
weights = np.full((3, 2), 0.5, np.float32)
tokens = np.arange(24).reshape(3, 8).astype(ml_dtypes.bfloat16)
comm = tw.connect()
with tw.Group(comm, experts=4, top_k=2, hidden=8, max_tokens=4) as group:
    handle = group.route(ids, weights)
    recv = group.dispatch(handle, tokens)
    out = group.combine(handle, recv.tokens)
    # One rank holds all experts: a token's row comes back as it went.
    assert out.dtype == tokens.dtype and out.shape == tokens.shape, (out.dtype, out.shape)
    assert np.array_equal(out.view(np.uint16), tokens.view(np.uint16)), out
PYTHON

# ---- C ------------------------------------------------------------------------------------------

say "examples/03_c_api.c"
cc -std=c11 -Wall -Wextra -Werror -pthread -I"$package/include" "$root/examples/03_c_api.c" \
  -o "$work/c_api" -L"$package/lib" -ltokenway -Wl,-rpath,"$package/lib"
"$work/c_api"

say "ok"
