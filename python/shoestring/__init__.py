"""Train big models on a shoestring: training-efficiency operators for PyTorch, in C++ and CUDA."""

from shoestring import _load

build = _load.load()
__version__ = build.version
cmake_prefix_path = str(_load.PACKAGE / "share" / "cmake")

from shoestring.ops import linear_cross_entropy  # noqa: E402

__all__ = ["build", "cmake_prefix_path", "linear_cross_entropy"]
