#!/usr/bin/env bash
# Runs the C++ suite, C++ programs of several processes and the Python tests of all CPU kernels with
# AddressSanitizer and UndefinedBehaviorSanitizer.
# Usage: test_asan.sh BUILD_DIR   (built with SHOESTRING_SANITIZE=ON)
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(realpath "$1")
export SHOESTRING_BUILD=$build  # the tests load libraries from this folder
# LibTorch is not instrumented. Its operators and Python do not free all memory at exit.
export ASAN_OPTIONS=detect_leaks=0:detect_container_overflow=0:detect_odr_violation=0
export UBSAN_OPTIONS=print_stacktrace=1
python tests/python/write_cases.py
for capability in plain avx2 avx512; do
  # AddressSanitizer keeps freed memory, which [resident] tests would count.
  SHOESTRING_CPU=$capability "$build/tests/cpp/shoestring_tests" "~[resident]" || { echo "failed with $capability"; exit 1; }
done
python -m pytest tests/python/distributed/test_{data_parallel,fully_shard,diloco}_cpp.py
package=$(mktemp -d)  # a copy of the Python package, with the sanitized libraries
trap 'rm -rf "$package"' EXIT
cp -r python/shoestring "$package/shoestring"
cmake --install "$build" --prefix "$package/shoestring" >/dev/null
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" PYTHONPATH=$package \
  python -m pytest -m "device and not alone"
