#!/usr/bin/env bash
# Checks format, lint and types of all code. Prints "ok ..." or "not ok ..." for each tool.
# Usage: lint.sh [--fix]   (--fix first formats the code and applies the automatic fixes)
set -uo pipefail
cd "$(dirname "$0")/.."
failed=0
check() {  # NAME COMMAND...
  local name=$1
  shift
  if "$@"; then
    echo "ok $name"
  else
    echo "not ok $name"
    failed=1
  fi
}
# Includes new files that git does not track yet.
cpp() { git ls-files --cached --others --exclude-standard -- '*.cpp' '*.h' '*.cu' | xargs clang-format "$@"; }
if [ "${1:-}" = --fix ]; then
  cpp -i
  ruff check --fix -q .
  ruff format -q .
fi
check clang-format cpp --dry-run -Werror
check ruff-format ruff format --check -q .
check ruff ruff check -q .
check mypy mypy
exit $failed
