"""Fixtures of the tests of the documentation: the site, built once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import REPOSITORY

# The tests in Chromium have a command of their own, `make docs-browser`, which names the site.
collect_ignore = [] if "SHOESTRING_SITE" in os.environ else ["test_browser.py"]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Build the site from nothing, as `make docs` does; its folder is the last argument of the command."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "-n", "--keep-going", "-q"]
    command += ["-d", str(site / "doctrees"), str(REPOSITORY / "docs"), str(site / "html")]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="session")
def site(build: subprocess.CompletedProcess[str]) -> Path:
    """Return the folder of the site, which exists also if there were warnings."""
    folder = Path(build.args[-1])
    assert (folder / "index.html").exists(), build.stderr
    return folder
