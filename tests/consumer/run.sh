#!/usr/bin/env bash
# Builds the consumer against the installed package (python/shoestring, the same tree as in a wheel), and runs
# it without Python: once on the machine as it is, and once with any CUDA toolkit hidden. The library itself
# is also configured without a toolkit, and with --build (make nightly) built and installed that way. Prints
# "ok ..." or "not ok ..." for each check.
#   Usage: run.sh BUILD_DIR [--build | --tier=first | --tier=second]
# The first tier (make test) ends before the toolkit is hidden. The second runs the program of NCCL, and what follows.
set -uo pipefail
cd "$(dirname "$0")/../.."
prefix=$PWD/python/shoestring
torch=$(sed -n 's/^-- LibTorch .* in //p' "$1/configure.log" 2>/dev/null)
[ -n "$torch" ] || torch=$(python -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
check() {  # usage: check DESCRIPTION COMMAND...
  local what=$1
  shift
  if "$@" >"$work/log" 2>&1; then
    grep -E '^(not )?ok ' "$work/log"
    echo "ok $what"
  else
    cat "$work/log"
    echo "not ok $what"
    failures=$((failures + 1))
  fi
}
launcher=$(command -v ccache >/dev/null && echo -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
configure() { cmake -S tests/consumer -B "$1" -DCMAKE_BUILD_TYPE=Release $launcher "${@:2}"; }

check "the consumer configures with CMAKE_PREFIX_PATH alone" configure "$work/a" -DCMAKE_PREFIX_PATH="$prefix;$torch"
targets=$([ "${2:-}" != --tier=first ] || echo --target api dispatcher processes)
check "the consumer builds" cmake --build "$work/a" --parallel 2 $targets
if [ "${2:-}" != --tier=second ]; then
  check "the C++ API works without Python" env -i "$work/a/api"
  check "the dispatcher finds the operators" env -i "$work/a/dispatcher"
  check "a program of several processes works" env -i RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29517 \
    "$work/a/processes"
fi
[ "${2:-}" != --tier=first ] || exit $failures
# A library with CUDA kernels was built with the toolkit, so the program that uses CUDA must have been built as well.
if grep -q '"cuda": "' "$prefix/lib/build.json"; then
  check "host code of NCCL and CUDA compiles, links and runs as far as the machine allows" env -i "$work/a/nccl"
fi

# Simulates a machine without a CUDA toolkit: nvcc is neither in PATH nor anywhere that FindCUDAToolkit looks.
# The build is not optimised, to be quick.
bare() { env -u CUDA_HOME -u CUDA_PATH -u CUDACXX PATH=/usr/bin:/bin "$@"; }
check "the library configures without a CUDA toolkit" bare cmake -S . -B "$work/c" -DTorch_ROOT="$torch" \
  -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0 $launcher
check "and says so" grep -q '"cuda": null' "$work/c/build.json"
if [ "${2:-}" = --build ]; then
  check "the library builds without a CUDA toolkit" bare cmake --build "$work/c" --parallel 2
  check "the library installs" cmake --install "$work/c" --prefix "$work/prefix"
  prefix=$work/prefix
fi
check "the consumer configures without a CUDA toolkit" bare cmake -S tests/consumer -B "$work/b" \
  -DCMAKE_PREFIX_PATH="$prefix" -DTorch_ROOT="$torch" $launcher
check "the consumer builds without a CUDA toolkit" bare cmake --build "$work/b" --parallel 2
check "and runs" env -i "$work/b/api"
exit $failures
