"""Fuzz the readers of the C++ library under sanitizers, and check that each C++ reader has a fuzzer."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from test_fuzz import CPP_SHARE

from build_folder import BUILD

ROOT = Path(__file__).parents[2]
PROGRAM = BUILD / "tests/fuzz/fuzz_readers"
# The functions of the public headers that take a path. Those in FUZZED read files, and fuzz_readers calls
# them. Those in NOT_READERS only write files.
# "load" and "save" are those of PromptTokens and PrefixTokens.
FUZZED = {
    "SafetensorsFile",
    "load_safetensors",
    "load_model",
    "load_adapter",
    "load_optimizer",
    "load_training",
    "load",
}
NOT_READERS = {"save_safetensors", "save_model", "save_adapter", "save_optimizer", "save_training", "save"}
PATHS = re.compile(r"\b(\w+)\((?:[^()]*,)?\s*const std::string& (?:path|directory|folder|file)\b")
OPTIONS = "detect_leaks=0:detect_odr_violation=0:max_allocation_size_mb=4096:hard_rss_limit_mb=4096"


def test_cpp_readers(seed: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Run fuzz_readers. It fails on a sanitizer's report, an undocumented exception or a hang."""
    assert PROGRAM.exists(), f"{PROGRAM} is not built; run make build-tests, or set SHOESTRING_BUILD"
    seconds = request.config.getoption("--fuzz-seconds") * CPP_SHARE
    environment = {**os.environ, "ASAN_OPTIONS": OPTIONS, "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [PROGRAM, str(seed), str(seconds), tmp_path]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=seconds + 300, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-6000:]
    counts = [int(count) for count in re.findall(r"(\d+) cases", done.stdout)]
    assert len(counts) >= len(FUZZED) and min(counts) >= 20


def test_every_cpp_reader_has_a_fuzzer() -> None:
    """Check that each public C++ function that takes a path is in FUZZED or in NOT_READERS."""
    headers = "\n".join(path.read_text() for path in (ROOT / "csrc/include/shoestring").rglob("*.h"))
    found = set(PATHS.findall(headers))
    assert found == FUZZED | NOT_READERS
    program = (ROOT / "tests/fuzz/fuzz_readers.cpp").read_text()
    assert all(name in program for name in FUZZED)
