#!/usr/bin/env bash
# Compiles an operator twice, by the classic registration and through LibTorch's stable ABI, and compares the two.
# docs/internals/stable_abi.md shows the results.
# Usage: run.sh [PYTHON...]   (the first interpreter's PyTorch compiles; all of them load and time the libraries)
set -euo pipefail
cd "$(dirname "$0")"
pythons=("${@:-python3}")
work=$(mktemp -d)
TIMEFORMAT=%U
trap 'rm -rf "$work"' EXIT
torch=$("${pythons[0]}" -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")
flags=(-std=c++20 -O3 -fPIC -shared -fopenmp -I "$torch/include" -L "$torch/lib" -ltorch_cpu)
for name in classic stable; do
  more=()
  [ $name = classic ] && more=(-lc10) || more=(-DTORCH_TARGET_VERSION=0x020b000000000000)  # the interface of 2.11
  seconds=$( { time g++ "swiglu_$name.cpp" -o "$work/swiglu_$name.so" "${flags[@]}" "${more[@]}"; } 2>&1)
  echo "$name: $seconds seconds of CPU time to compile," \
    "$(strip -o "$work/stripped" "$work/swiglu_$name.so" && stat -c %s "$work/stripped") bytes stripped," \
    "$(nm -DC --undefined-only "$work/swiglu_$name.so" | grep -cE ' (at|c10|torch|caffe2)::') undefined C++ symbols of LibTorch"
done
echo "lines that differ: $(diff swiglu_classic.cpp swiglu_stable.cpp | grep -c '^[<>]') of" \
  "$(cat swiglu_classic.cpp swiglu_stable.cpp | wc -l)"
for python in "${pythons[@]}"; do "$python" measure.py "$work"; done
