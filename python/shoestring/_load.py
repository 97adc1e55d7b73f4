"""Load the operator libraries, after a check that they were built for the installed version of PyTorch."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

PACKAGE = Path(__file__).parent
LIBRARIES = PACKAGE / "lib"


@dataclass(frozen=True)
class Build:
    """The versions of PyTorch and CUDA, the GPUs and the compiler of the build of the installed libraries.

    ``gpus`` names the architectures that have machine code, such as ``"80"`` for compute capability 8.0, and
    ``"ptx"`` if newer GPUs are served as well.
    """

    version: str
    torch: str
    cuda: str | None
    cuda_note: str
    gpus: list[str]
    compiler: str


def read_build() -> Build:
    """Return the description of the build, which CMake wrote to build.json next to the libraries.

    Raises:
        ImportError: build.json does not exist, because the libraries were not built.
    """
    try:
        return Build(**json.loads((LIBRARIES / "build.json").read_text()))
    except FileNotFoundError:
        raise ImportError(
            "shoestring: the libraries are not built; run `pip install --no-build-isolation .` in its source folder"
        ) from None


def load() -> Build:
    """Load the libraries, which register the operators with torch.ops.shoestring, and return their build.

    Raises:
        ImportError: the libraries are missing, or were built for another version of PyTorch or CUDA. The
            message is one line that begins with "shoestring" and contains a command that mends it.
    """
    build = read_build()
    running = torch.__version__.split("+")[0]
    if build.torch.split(".")[:2] != running.split(".")[:2]:
        raise ImportError(
            f"shoestring was built for PyTorch {build.torch}, and this is {running}; rebuild it with "
            "`pip install --no-build-isolation --force-reinstall --no-deps .` in its source folder, or run "
            f"`pip install 'torch=={'.'.join(build.torch.split('.')[:2])}.*'`"
        )
    cuda = torch.version.cuda
    if build.cuda is not None and cuda is not None and build.cuda.split(".")[0] != cuda.split(".")[0]:
        raise ImportError(
            f"shoestring was built for CUDA {build.cuda}, and this PyTorch is for CUDA {cuda}; install the wheel for "
            f"cu{cuda.replace('.', '')} or the one for cpu, or rebuild it with "
            "`pip install --no-build-isolation --force-reinstall --no-deps .` in its source folder"
        )
    torch.ops.load_library(str(LIBRARIES / "libshoestring.so"))
    if build.cuda is not None and cuda is not None:
        torch.ops.load_library(str(LIBRARIES / "libshoestring_cuda.so"))
    return build
