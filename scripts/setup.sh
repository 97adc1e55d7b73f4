#!/usr/bin/env bash
# Installs what building, testing and the demo need: Debian packages, a virtual environment, PyTorch, and
# shoestring's requirements.
# Usage: setup.sh VENV TORCH   (TORCH: a pip requirement; "" takes the version that constraints.txt pins)
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH  # or pip would treat packages in the source folder as installed
venv=$1 torch=${2:-}

missing=()
[ -e /usr/include/nlohmann/json.hpp ] || [ -n "${NLOHMANN_JSON_INCLUDE_DIR:-}" ] || missing+=(nlohmann-json3-dev)
{ [ -e /usr/include/catch2/catch.hpp ] || [ -e /usr/include/catch2/catch_all.hpp ]; } || missing+=(catch2)
[ -e /usr/include/CLI/CLI.hpp ] || [ -n "${CLI11_INCLUDE_DIR:-}" ] || missing+=(libcli11-dev)
[ -e /usr/include/liburing.h ] || missing+=(liburing-dev)
[ -e /usr/include/pcre2.h ] || missing+=(libpcre2-dev)
[ -e /usr/include/gloo/context.h ] || missing+=(libgloo-dev)
command -v g++ >/dev/null || missing+=(g++)
command -v cmake >/dev/null || missing+=(cmake)
command -v ccache >/dev/null || missing+=(ccache)
command -v doxygen >/dev/null || missing+=(doxygen)
python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
# For tests/packages: containers without a compiler, and the tools that make Debian packages.
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v dpkg-shlibdeps >/dev/null || missing+=(dpkg-dev)
command -v file >/dev/null || missing+=(file)
if [ ${#missing[@]} -gt 0 ]; then
  sudo=$([ "$(id -u)" = 0 ] || echo sudo)
  echo "installing Debian packages: ${missing[*]}"
  $sudo apt-get update -qq
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
fi

[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
constraints=constraints.txt
if [ -n "$torch" ]; then
  constraints=$venv/constraints.txt
  grep -v '^torch==' constraints.txt >"$constraints"
fi
# uv installs in half of pip's time. It reads neither pip's configuration nor its variables, so this script passes them
# on. Where uv does not reach a package, pip installs it, or says why not.
"$venv/bin/pip" install -q uv || true
setting() { "$venv/bin/pip" config get ":env:.$1" 2>/dev/null || "$venv/bin/pip" config get "global.$1" 2>/dev/null || true; }
give() { [ -z "$2" ] || export "$1=${!1:-$2}"; }  # VARIABLE VALUE: sets the variable, unless the user has set it
give UV_DEFAULT_INDEX "$(setting index-url)"
give UV_INDEX "$(setting extra-index-url)"
give UV_FIND_LINKS "$(setting find-links)"
give SSL_CERT_FILE "$(setting cert)"
give UV_HTTP_TIMEOUT "$(setting default-timeout)"
install() {
  "$venv/bin/uv" pip install -q --python "$venv/bin/python" -c "$constraints" "$@" 2>/dev/null ||
    "$venv/bin/pip" install -q --no-compile -c "$constraints" "$@"  # Python compiles the modules that are imported
}
install ${torch:+--upgrade} "${torch:-torch}" "setuptools>=77" ninja
# Install the requirements of the extras by name, so that pip does not run again after a change of code alone.
# The package itself requires torch alone.
"$venv/bin/python" - <<'EOF' >"$venv/requirements.txt"
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
groups = (extras[name] for name in ("cli", "peers", "test", "lint", "docs", "release"))
for requirement in sum(groups, []):
    if not requirement.startswith(("shoestring[", "nvidia-cutlass")):
        print(requirement)
EOF
install -r "$venv/requirements.txt"
# Tests read the headers of CUTLASS alone, so the packages that its Python modules need are left out.
install --no-deps nvidia-cutlass
touch "$venv/.ready"
