#!/usr/bin/env bash
# Tests search, links and layout of the built documentation in headless Chromium, which it installs if it is missing.
# Usage: docs_browser.sh SITE   (screenshots of some pages go to SITE/../screenshots)
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v chromium >/dev/null; then
  sudo=$([ "$(id -u)" = 0 ] || echo sudo)
  $sudo apt-get update -qq
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
fi
SHOESTRING_SITE=$(realpath "$1") python -m pytest tests/docs/test_browser.py
