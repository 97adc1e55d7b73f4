#!/usr/bin/env bash
# Runs all suites, even after one has failed, and prints their totals at the end.
# Usage: test.sh BUILD_DIR [SUITE...]   (the libraries are built and installed into python/shoestring)
set -uo pipefail
cd "$(dirname "$0")/.."
build=$1
wanted=${*:2}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
status=0
SHOESTRING_BUILD=$(realpath "$build") || exit  # the Python suites run the programs in this folder
export SHOESTRING_BUILD
export OMP_WAIT_POLICY=passive  # spinning threads are slow on a busy machine
simt=$SHOESTRING_BUILD/tests/simt
cpp=$SHOESTRING_BUILD/tests/cpp/shoestring_tests

wants() { [ -z "$wanted" ] || [[ " $wanted " == *" $1 "* ]]; }  # SUITE
run() {  # SUITE COMMAND...
  local name=$1
  shift
  wants "$name" || return 0
  echo "== $name"
  local start=$SECONDS
  "$@" 2>&1 | tee "$logs/$name" || status=1
  echo "($((SECONDS - start)) s)" >>"$logs/$name.time"
}
# Runs the C++ suite on the emulated kernels, in two processes of one thread. Each process runs every second
# case. The emulator has an allocator of CPU tensors of its own, which the host allocator cannot replace.
emulated() {
  local list=$logs/cases status=0 half first second
  "$cpp" --list-test-names-only "~[host_allocator]" >"$list" || true  # Catch2 2 returns the number of cases
  for half in 0 1; do
    awk "NR % 2 == $half" "$list" | sed 's/,/\\,/g' >"$list.$half"  # escape commas, which would end a name
    LD_PRELOAD=$simt/libshoestring_simt.so OMP_NUM_THREADS=1 "$cpp" --input-file "$list.$half" >"$list.$half.log" 2>&1 &
  done
  for half in 0 1; do wait -n || status=1; done
  grep -hv "^Filters: " "$list.0.log" "$list.1.log"
  return $status
}

# The program is not built where the headers of CUTLASS or of the CUDA toolkit are missing.
cutlass() {
  if [ -x "$simt/cutlass/cutlass_tests" ]; then
    "$simt/cutlass/cutlass_tests"
  else
    printf 'skipped: the comparison with CUTLASS was not built\n0 passed, 0 failed\n'
  fi
}

run lint scripts/lint.sh
run C++ "$cpp"
run emulator "$simt/simt_tests"
run cutlass cutlass
run C++-emulated emulated
run Python python -m pytest -n 2 --dist loadfile -m "not alone"
run Python-alone python -m pytest -m alone
! wants check || [ -z "$wanted" ] || run check python -m pytest -n 2 --dist loadfile -m "not alone and not slow"
# Approximate functions are as wrong as a GPU's may be; the C++ suite runs with exact ones.
SIMT_APPROXIMATE=random OMP_NUM_THREADS=1 run Python-emulated python -m pytest --backend=simt -n 2 --dist loadfile
PYTHONPATH=tests/device:${PYTHONPATH:-} run device python -m pytest -n 2 --dist loadfile tests/device
run crash python -m pytest -n 2 --dist loadfile tests/crash
run fuzz python -m pytest -n 2 tests/fuzz
run peers python -m pytest -n 2 tests/peers
run docs python -m pytest -n 2 --dist loadfile tests/docs
run consumer tests/consumer/run.sh "$build"
run packages python -m pytest tests/packages
run gates python scripts/check_ptxas.py "$build"

passed=0 failed=0
sum() { grep -oE "$2" "$logs/$1" | grep -oE '[0-9]+' | awk '{ total += $1 } END { print total + 0 }'; }  # SUITE PATTERN
add() {  # SUITE PASSED FAILED
  passed=$((passed + $2)) failed=$((failed + $3))
  echo "$1: $2 passed, $3 failed $(cat "$logs/$1.time")"
}
# Reads Catch2's "All tests passed (9 assertions in 2 test cases)", or "test cases: 3 | 2 passed | 1 failed".
add_catch() {  # SUITE
  ! wants "$1" || add "$1" "$(($(sum "$1" 'in [0-9]+ test case') + $(sed -n '/^test cases:/p' "$logs/$1" >"$logs/cases.$1"; sum "cases.$1" '[0-9]+ passed')))" \
    "$(sum "cases.$1" '[0-9]+ failed')"
}
add_pytest() {  # SUITE
  ! wants "$1" || { tail -n 1 "$logs/$1" >"$logs/last.$1"; add "$1" "$(sum "last.$1" '[0-9]+ passed')" "$(sum "last.$1" '[0-9]+ (failed|error)')"; }
}
echo "== totals"
! wants lint || add lint "$(grep -c '^ok ' "$logs/lint")" "$(grep -c '^not ok ' "$logs/lint")"
add_catch C++
add_catch emulator
! wants cutlass || add cutlass "$(sum cutlass '[0-9]+ passed')" "$(sum cutlass '[0-9]+ failed')"
! wants cutlass || sed -n 's/^skipped/cutlass skipped/p' "$logs/cutlass"
add_catch C++-emulated
add_pytest Python
add_pytest Python-alone
[ -z "$wanted" ] || add_pytest check
add_pytest Python-emulated
add_pytest device
add_pytest crash
add_pytest fuzz
add_pytest peers
add_pytest docs
! wants consumer || add consumer "$(grep -c '^ok ' "$logs/consumer")" "$(grep -c '^not ok ' "$logs/consumer")"
add_pytest packages
! wants gates || add gates "$(sum gates '[0-9]+ passed')" "$(sum gates '[0-9]+ failed')"
! wants gates || sed -n 's/^skipped/gates skipped/p' "$logs/gates"
# Repeat what failed, because the totals follow thousands of lines.
for ran in "$logs"/*.time; do
  log=${ran%.time}
  grep -qE ': FAILED|^(FAILED|ERROR|not ok) ' "$log" || continue
  echo "== failed in $(basename "$log")"
  grep -E -B 10 -A 10 ': FAILED' "$log" | head -n 60
  grep -E '^(FAILED|ERROR|not ok) ' "$log" | head -n 40
done
# A suite that crashed before it printed how many tests passed also counts as a failure.
[ $status = 0 ] || [ $failed -gt 0 ] || failed=1
echo "$passed passed, $failed failed"
# For `make release`: all suites have passed on this commit.
if [ -z "$wanted" ] && [ $status = 0 ] && [ $failed = 0 ] && [ -z "$(git status --porcelain 2>&1)" ]; then
  git rev-parse HEAD >"$SHOESTRING_BUILD/tested"
fi
[ $status = 0 ] && [ $failed = 0 ]
