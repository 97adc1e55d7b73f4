#!/usr/bin/env bash
# The suites, all of them even when one fails, and their totals at the end.
# Usage: test.sh BUILD_DIR   (the libraries are built and installed into python/shoestring)
set -uo pipefail
cd "$(dirname "$0")/.."
build=$1
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
status=0
SHOESTRING_BUILD=$(realpath "$build") || exit  # whose programs the Python suites run
export SHOESTRING_BUILD
export OMP_WAIT_POLICY=passive  # threads that spin are slow where the machine does anything else

run() {  # NAME COMMAND...
  local name=$1
  shift
  echo "== $name"
  local start=$SECONDS
  "$@" 2>&1 | tee "$logs/$name" || status=1
  echo "($((SECONDS - start)) s)" >>"$logs/$name.time"
}
simt=$SHOESTRING_BUILD/tests/simt
run C++ "$build/tests/cpp/shoestring_tests"
run emulator "$simt/simt_tests"
run C++-emulated env LD_PRELOAD="$simt/libshoestring_simt.so" "$build/tests/cpp/shoestring_tests"
run Python python -m pytest
run Python-emulated python -m pytest --backend=simt
run crash python -m pytest tests/crash
run fuzz python -m pytest tests/fuzz
run consumer tests/consumer/run.sh "$build"
run gates python scripts/check_ptxas.py "$build"

passed=0 failed=0
count() { grep -oE "[0-9]+ $2" "$logs/$1" | tail -n 1 | grep -oE '[0-9]+' || echo 0; }  # NAME WORD: the number before it
add() {  # NAME PASSED FAILED
  passed=$((passed + $2)) failed=$((failed + $3))
  echo "$1: $2 passed, $3 failed $(cat "$logs/$1.time")"
}
add_catch() {  # NAME, a suite of Catch2
  if grep -q '^All tests passed' "$logs/$1"; then
    add "$1" "$(count "$1" 'test case')" 0
  else
    sed -i '/^assertions:/d' "$logs/$1"  # Catch2 counts both; the cases are wanted
    add "$1" "$(count "$1" passed)" "$(count "$1" failed)"
  fi
}
add_pytest() {  # NAME
  add "$1" "$(count "$1" passed)" "$(($(count "$1" failed) + $(count "$1" error)))"
}
echo "== totals"
add_catch C++
add_catch emulator
add_catch C++-emulated
add_pytest Python
add_pytest Python-emulated
add_pytest crash
add_pytest fuzz
add consumer "$(grep -c '^ok ' "$logs/consumer")" "$(grep -c '^not ok ' "$logs/consumer")"
add gates "$(count gates passed)" "$(count gates failed)"
sed -n 's/^skipped/gates skipped/p' "$logs/gates"
# A suite that died before it counted anything is a failure too.
[ $status = 0 ] || [ $failed -gt 0 ] || failed=1
echo "$passed passed, $failed failed"
[ $status = 0 ] && [ $failed = 0 ]
