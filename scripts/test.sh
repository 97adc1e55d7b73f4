#!/usr/bin/env bash
# Runs suites, even after one has failed, and prints their totals at the end.
# Usage: test.sh BUILD_DIR first|check|second|all|SUITE...   (the libraries are built and installed into python/shoestring)
#   first    the first tier (make test): C++, a sample of the Python tests, the consumer
#   check    lint, C++ and the sample of the Python tests
#   second   everything that the first tier leaves out (make test-all)
#   all      whole suites, without tiers
#   SUITE    whole suites by name, without tiers
set -uo pipefail
cd "$(dirname "$0")/.."
build=$1
tier=$2
# What is joined by a comma runs side by side: the first suite prints at once, and beside it the others, which are
# joined by colons, run one after the other. The tests of Python wait for processes a quarter of their time.
SECOND="Python,lint:consumer:docs:packages:peers:crash:fuzz:emulator:cutlass:device:gates:C++-emulated:Python-emulated Python-alone"
case $tier in
  first) suites="C++ Python,consumer" ;;
  check) suites="lint,C++ Python" ;;
  second) suites=$SECOND ;;
  all) suites="C++ $SECOND" tier="" ;;
  *) suites=${*:2} tier="" ;;
esac
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
status=0 number=0
SHOESTRING_BUILD=$(realpath "$build") || exit  # the Python suites run the programs in this folder
export SHOESTRING_BUILD
export OMP_WAIT_POLICY=passive  # spinning threads are slow on a busy machine
export TORCHINDUCTOR_VEC_ISA_OK=1  # Inductor then trusts the compiler with the processor's instructions, without programs
simt=$SHOESTRING_BUILD/tests/simt
cpp=$SHOESTRING_BUILD/tests/cpp/shoestring_tests

# Runs the C++ suite on the emulated kernels, in two processes of one thread. Each process runs every second
# case. The emulator has an allocator of CPU tensors of its own, which the host allocator cannot replace.
emulated() {
  local list=$logs/cases status=0 half
  python tests/python/write_cases.py --backend simt || return
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

# A worker that has no tests left takes some of the other's, in their order, so few fixtures of files are made twice.
tests() { python -m pytest -n 2 --dist worksteal "$@"; }
# Lists the files that have tests with a mark, because importing all files takes 10 s.
marked() { grep -rlF --include="test_*.py" "mark.$1" tests/python | sort; }
suite() {  # SUITE
  case $1 in
    lint) scripts/lint.sh ;;
    C++) python tests/python/write_cases.py && "$cpp" ;;
    emulator) "$simt/simt_tests" ;;
    cutlass) cutlass ;;
    C++-emulated) emulated ;;
    Python)
      case $tier in
        first | check) tests --tier=first --fuzz-seconds 8 tests/python tests/docs tests/crash tests/fuzz ;;
        *) tests ${tier:+--tier=second} -m "not alone" ;;
      esac ;;
    Python-alone) python -m pytest -m alone $(marked alone) ;;
    # Approximate functions are as wrong as a GPU's may be; the C++ suite runs with exact ones.
    Python-emulated) SIMT_APPROXIMATE=random OMP_NUM_THREADS=1 tests --backend=simt $(marked device) ;;
    device) PYTHONPATH=tests/device:${PYTHONPATH:-} tests tests/device ;;
    crash | fuzz) tests ${tier:+--tier=second} "tests/$1" ;;
    docs) python -m pytest ${tier:+--tier=second} tests/docs ;;  # one process, which builds the site once
    peers) tests tests/peers ;;
    consumer) tests/consumer/run.sh "$build" ${tier:+--tier=$tier} ;;
    packages) python -m pytest tests/packages ;;
    gates) python scripts/check_ptxas.py "$build" ;;
    *)
      echo "test.sh: expected first, check, second, all or a suite (${SECOND//[,:]/ } C++), got '$1'" >&2
      return 2 ;;
  esac
}

timed() {  # SUITE
  local start=$SECONDS status=0
  suite "$1" 2>&1 || status=1
  echo "($((SECONDS - start)) s)" >"$logs/$1.time"
  return $status
}

beside() {  # SUITE[:SUITE...]
  local name status=0
  for name in ${1//:/ }; do
    timed "$name" >"$logs/$name" || status=1
    echo "== $name"
    cat "$logs/$name"
  done
  return $status
}

for entry in $suites; do
  number=$((number + 1))
  name=${entry%%,*} others=""
  [ "$entry" = "$name" ] || others=${entry#*,}
  echo "== $name${others:+, and beside it ${others//:/, }} ($number of $(wc -w <<<"$suites"))"
  [ -z "$others" ] || beside "$others" &
  timed "$name" | tee "$logs/$name" || status=1
  wait $! || status=1
done
suites=${suites//[,:]/ }

passed=0 failed=0
sum() { grep -oE "$2" "$logs/$1" | grep -oE '[0-9]+' | awk '{ total += $1 } END { print total + 0 }'; }  # SUITE PATTERN
echo "== totals"
for name in $suites; do
  case $name in
    C++ | emulator | C++-emulated)
      # Catch2 prints "All tests passed (9 assertions in 2 test cases)", or "test cases: 3 | 2 passed | 1 failed".
      sed -n '/^test cases:/p' "$logs/$name" >"$logs/cases.$name"
      good=$(($(sum "$name" 'in [0-9]+ test case') + $(sum "cases.$name" '[0-9]+ passed')))
      bad=$(sum "cases.$name" '[0-9]+ failed') ;;
    lint | consumer) good=$(grep -c '^ok ' "$logs/$name") bad=$(grep -c '^not ok ' "$logs/$name") ;;
    cutlass | gates)
      good=$(sum "$name" '[0-9]+ passed') bad=$(sum "$name" '[0-9]+ failed')
      sed -n "s/^skipped/$name skipped/p" "$logs/$name" ;;
    *)
      tail -n 1 "$logs/$name" >"$logs/last.$name"
      good=$(sum "last.$name" '[0-9]+ passed') bad=$(sum "last.$name" '[0-9]+ (failed|error)') ;;
  esac
  passed=$((passed + good)) failed=$((failed + bad))
  echo "$name: $good passed, $bad failed $(cat "$logs/$name.time")"
done
# Repeat what failed, because the totals follow thousands of lines.
for name in $suites; do
  log=$logs/$name
  grep -qE ': FAILED|^(FAILED|ERROR|not ok) ' "$log" || continue
  echo "== failed in $name"
  grep -E -B 10 -A 10 ': FAILED' "$log" | head -n 60
  grep -E '^(FAILED|ERROR|not ok) ' "$log" | head -n 40
done
# A suite that crashed before it printed how many tests passed also counts as a failure.
[ $status = 0 ] || [ $failed -gt 0 ] || failed=1
echo "$passed passed, $failed failed"
# For `make release`: `tested` names the commit on which both tiers have passed.
if [ $status = 0 ] && [ $failed = 0 ] && [ -z "$(git status --porcelain 2>&1)" ]; then
  commit=$(git rev-parse HEAD)
  [ "$tier" != first ] || echo "$commit" >"$SHOESTRING_BUILD/tested-first"
  [ "$tier" != second ] || [ "$commit" != "$(cat "$SHOESTRING_BUILD/tested-first" 2>/dev/null)" ] || echo "$commit" >"$SHOESTRING_BUILD/tested"
fi
[ $status = 0 ] && [ $failed = 0 ]
