"""Test the backends of C++ programs: what NCCL needs, and groups of devices other than the CPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from build_folder import BUILD
from cpp_processes import PROGRAM, run, skip_without_gloo
from ports import free_port

CUDA = BUILD / "libshoestring_cuda.so"
DEVICE = BUILD / "tests/device/libsimdev.so"
PREFIX = "init_process_group: backend: expected "


def refused(backend: str, loaded: Path | None = None) -> str:
    """Return the error of a program that connects by a backend, with one more library."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    preloaded = {} if loaded is None else {"LD_PRELOAD": str(loaded)}
    done = subprocess.run(
        [PROGRAM, "backend", backend],
        env=os.environ | place | preloaded,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done
    return done.stderr


def test_nccl_without_the_library_that_has_it() -> None:
    assert refused("nccl") == (
        f'{PREFIX}a program that links shoestring::shoestring of a build with CUDA kernels and nccl.h for "nccl", '
        'received one without. Use "gloo", or build where both are.\n'
    )


def test_nccl_without_a_gpu() -> None:
    """The library loads, so all that it takes from LibTorch's CUDA libraries is there."""
    if not CUDA.exists():
        pytest.skip("this build has no CUDA kernels")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert refused("nccl", CUDA) == f'{PREFIX}a GPU for "nccl", received none. Use "gloo".\n'


def test_unknown_backend() -> None:
    assert refused("mpi") == f'{PREFIX}"gloo" or "nccl", received "mpi"\n'


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_training_on_another_device(ranks: int) -> None:
    """Weights are those of the CPU, bit for bit. The group knows the device alone, as NCCL knows GPUs alone."""
    skip_without_gloo()
    if not DEVICE.exists():
        pytest.skip("the simulated device was not built")
    run(ranks, "other_device", DEVICE)
