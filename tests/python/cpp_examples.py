"""What the tests of the C++ examples share: building one against the installed package, and token files."""

import os
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import torch

import shoestring
from build_folder import BUILD, REPOSITORY

ENVIRONMENT = os.environ | {"OMP_WAIT_POLICY": "passive"}  # threads that spin are slow on a busy machine


def build_example(name: str) -> Path:
    """Configures and builds an example; the folder is kept, so that a second run only relinks what changed."""
    build = BUILD / name
    configure = ["cmake", "-S", REPOSITORY / "examples/cpp" / name, "-B", build, "-DCMAKE_BUILD_TYPE=Release",
                 "-DCMAKE_CXX_FLAGS_RELEASE=-O0",  # the work is in the libraries
                 f"-DCMAKE_PREFIX_PATH={shoestring.cmake_prefix_path}", f"-DTorch_ROOT={Path(torch.__file__).parent}"]  # fmt: skip
    if shutil.which("ccache"):
        configure.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    for command in (configure, ["cmake", "--build", build, "--parallel", "2"]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout
    return build / name


def learnable_tokens(count: int, vocab_size: int) -> np.ndarray:
    """Every other token follows from the one before it: something to learn within 30 steps."""
    generator = np.random.default_rng(0)
    tokens, follower = generator.integers(0, vocab_size, count), generator.permutation(vocab_size)
    tokens[1::2] = follower[tokens[0::2] % 32]
    tokens[0::2] %= 32
    return tokens


def token_file(path: Path, tokens: np.ndarray, **header: int | bytes) -> Path:
    """The format of ``shoestring tokenize``; header overrides magic, vocab, width or count."""
    fields = {"magic": b"shoetok\x01", "vocab": 512, "width": 2, "count": len(tokens)} | header
    path.write_bytes(struct.pack("<8sIIQ40x", *fields.values()) + tokens.astype("<u2").tobytes())
    return path
