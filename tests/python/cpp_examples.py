"""Helpers for the tests of the C++ examples: build an example, and write token files."""

import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import torch

import shoestring
from build_folder import BUILD, REPOSITORY

# on a busy machine, OpenMP threads that spin while they wait are slow
ENVIRONMENT = os.environ | {"OMP_WAIT_POLICY": "passive"}
SEQ_LEN = 32
# Options of train_gpt for a small model.
SMALL = ["--layers", "2", "--hidden", "32", "--heads", "4", "--kv-heads", "2", "--batch-size", "8", "--threads", "2",
         "--seq-len", str(SEQ_LEN), "--steps", "30", "--lr", "1e-2", "--warmup", "2", "--checkpoint-every", "5"]  # fmt: skip


def build_example(name: str) -> Path:
    """Configure and build an example, and return the path of its program.

    The build folder is kept, so that a second run rebuilds only what changed.
    """
    build = BUILD / "examples"
    configure = ["cmake", "-S", REPOSITORY / "examples/cpp", "-B", build, "-DCMAKE_BUILD_TYPE=Release",
                 # The example is compiled without optimisation, because it spends its time in PyTorch and
                 # shoestring.
                 "-DCMAKE_CXX_FLAGS_RELEASE=-O0", "-DCMAKE_UNITY_BUILD=ON",
                 f"-DCMAKE_PREFIX_PATH={shoestring.cmake_prefix_path}", f"-DTorch_ROOT={Path(torch.__file__).parent}"]  # fmt: skip
    if shutil.which("ccache"):
        configure.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    with (BUILD / "examples.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of pytest-xdist build in the same folder
        for command in (configure, ["cmake", "--build", build, "--target", name, "--parallel", "2"]):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            assert done.returncode == 0, done.stdout
    return build / name / name


def learnable_tokens(count: int, vocab_size: int) -> np.ndarray:
    """Return tokens in which the token at each odd position is determined by the token before it.

    A model learns this in 30 steps.
    """
    generator = np.random.default_rng(0)
    tokens, follower = generator.integers(0, vocab_size, count), generator.permutation(vocab_size)
    tokens[1::2] = follower[tokens[0::2] % 32]
    tokens[0::2] %= 32
    return tokens


def token_file(path: Path, tokens: np.ndarray, **header: int | bytes) -> Path:
    """Write ``tokens`` to a file in the format of ``shoestring tokenize``.

    ``header`` overrides the fields magic, vocab, width and count of the file's header.
    """
    fields = {"magic": b"shoetok\x01", "vocab": 512, "width": 2, "count": len(tokens)} | header
    path.write_bytes(struct.pack("<8sIIQ40x", *fields.values()) + tokens.astype("<u2").tobytes())
    return path


def train(
    program: Path, data: Path, out: Path, *options: str, **kwargs: object
) -> subprocess.CompletedProcess[str]:
    """Run train_gpt with the options SMALL and further ones."""
    command = [program, "--data", data, "--out", out, *SMALL, *options]
    settings = {"timeout": 120, "env": ENVIRONMENT} | kwargs
    return subprocess.run(command, capture_output=True, text=True, **settings)


def losses(output: str) -> list[float]:
    return [
        float(line.split("loss ")[1].split()[0]) for line in output.splitlines() if line.startswith("step ")
    ]


def validation_loss(output: str) -> float:
    return float(output.split("validation loss ")[1].split(",")[0])


def refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2
    assert done.stderr.startswith("train_gpt: error: ") and done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr
