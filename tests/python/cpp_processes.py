"""Start a C++ program in several processes: that of tests/distributed, or another one."""

import os
import subprocess
from pathlib import Path

import pytest

from build_folder import BUILD
from ports import free_port

PROGRAM = BUILD / "tests/distributed/distributed_program"
GLOO = "expected a build with Gloo"


def start(
    ranks: int,
    *arguments: object,
    program: Path = PROGRAM,
    port: int | None = None,
    only: int | None = None,
) -> list[subprocess.Popen[str]]:
    """Start a program in several processes, as torchrun does, or ``only`` one of them."""
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port())}
    return [
        subprocess.Popen(
            [program, *map(str, arguments)],
            env=os.environ | common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (range(ranks) if only is None else [only])
    ]


def finish(processes: list[subprocess.Popen[str]], seconds: float = 60) -> list[tuple[int, str, str]]:
    """Return the exit code and both outputs of each process."""
    try:
        found = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, found, strict=True)]


def run(ranks: int, *arguments: object) -> list[str]:
    """Run a test of the program; return what the ranks print. All must pass."""
    done = finish(start(ranks, *arguments))
    assert all(code == 0 and out.endswith("passed\n") for code, out, _ in done), done
    return [out for _, out, _ in done]


def skip_without_gloo() -> None:
    """Skip the tests of a build that cannot connect processes."""
    (_, _, errors), *_ = finish(start(1, "missing"))
    if GLOO in errors:
        pytest.skip(errors.strip())
