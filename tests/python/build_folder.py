"""Path of the build folder whose C++ programs the tests run: ``SHOESTRING_BUILD``, or else ``build``."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
BUILD = Path(os.environ.get("SHOESTRING_BUILD", REPOSITORY / "build")).resolve()
EMULATOR = BUILD / "tests/simt/libshoestring_simt.so"


def library(name: str) -> Path:
    """Return the path of the C++ library ``name`` in ``tests/cpp``; fail if it is not built."""
    path = BUILD / "tests/cpp" / name
    assert path.exists(), f"{path} is not built; run make build-tests, or set SHOESTRING_BUILD"
    return path


def program(name: str) -> list[str]:
    """Return the command that runs the C++ program ``name`` of ``tests/cpp/programs.cpp``; fail if it is not built."""
    return [str(library("programs")), name]
