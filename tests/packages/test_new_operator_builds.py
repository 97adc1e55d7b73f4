"""Operators that scripts/new_operator.py writes compile, and pass their tests on the CPU and in the emulator."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from build_folder import REPOSITORY


@pytest.mark.nightly
def test_the_operator_compiles_and_passes(tmp_path: Path) -> None:
    """Build a copy of the repository with two new operators, and run their tests on the CPU and in the emulator."""
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    copy = tmp_path / "copy"
    for name in files.stdout.split("\0")[:-1]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, copy / name)
    for arguments in (["soft_gate", "--inputs", "gate", "up", "--option", "offset", "1.0"], ["soft"]):
        subprocess.run([sys.executable, copy / "scripts/new_operator.py", "layers", *arguments], check=True)
    build = copy / "build"
    env = os.environ | {
        "SHOESTRING_CUDA": "0",
        "SHOESTRING_BUILD": str(build),
        "PYTHONPATH": str(copy / "python"),
    }
    tests = [f"tests/python/layers/test_{name}.py" for name in ("soft_gate", "soft")]
    for command in (
        [
            "cmake",
            "-S",
            ".",
            "-B",
            "build",
            "-G",
            "Ninja",
            f"-DPython3_EXECUTABLE={sys.executable}",
            "-DSHOESTRING_TESTS=ON",
        ],
        ["cmake", "--build", "build", "--target", "shoestring_tests", "shoestring_simt", "first_tier"],
        ["cmake", "--install", "build", "--prefix", "python/shoestring"],
        [sys.executable, "tests/python/write_cases.py"],
        [str(build / "tests/cpp/shoestring_tests"), "[operator_cases]"],
        [sys.executable, "-m", "pytest", "-q", *tests],
        [sys.executable, "-m", "pytest", "-q", "--backend=simt", *tests],
    ):
        subprocess.run(command, cwd=copy, env=env, check=True)
