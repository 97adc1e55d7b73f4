"""Loads the operator libraries, after comparing what they were built for with the PyTorch that runs."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

PACKAGE = Path(__file__).parent
LIBRARIES = PACKAGE / "lib"


@dataclass(frozen=True)
class Build:
    """What the installed libraries were built with."""

    version: str
    torch: str
    cuda: str | None
    cuda_note: str
    compiler: str


def read_build() -> Build:
    """The build's description, as CMake wrote it beside the libraries."""
    try:
        return Build(**json.loads((LIBRARIES / "build.json").read_text()))
    except FileNotFoundError:
        raise ImportError(
            "shoestring: the libraries are not built; run `pip install --no-build-isolation .` in its source folder"
        ) from None


def load() -> Build:
    """Registers the operators with torch.ops.shoestring.

    Raises:
        ImportError: the libraries were built for another PyTorch; the message has the command that mends it.
    """
    build = read_build()
    running = torch.__version__.split("+")[0]
    if build.torch.split(".")[:2] != running.split(".")[:2]:
        raise ImportError(
            f"shoestring was built for PyTorch {build.torch}, and this is {running}; rebuild it with "
            "`pip install --no-build-isolation --force-reinstall --no-deps .` in its source folder"
        )
    torch.ops.load_library(str(LIBRARIES / "libshoestring.so"))
    if build.cuda is not None and torch.version.cuda is not None:
        torch.ops.load_library(str(LIBRARIES / "libshoestring_cuda.so"))
    return build
