"""Training data: the prefetcher, mixup and cutmix.

The module ``packing`` joins sequences of different lengths without padding.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoestring.data.mixing import Mixed, cutmix, mixup
    from shoestring.data.prefetcher import Prefetcher

__all__ = ["Mixed", "Prefetcher", "cutmix", "mixup"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because its module imports PyTorch, which the command line defers."""
    if name in __all__:
        return getattr(
            import_module("shoestring.data." + ("prefetcher" if name == "Prefetcher" else "mixing")), name
        )
    raise AttributeError(f"module 'shoestring.data' has no attribute {name!r}")
