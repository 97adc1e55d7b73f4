"""Training data: the prefetcher. The module ``packing`` joins sequences of different lengths without padding."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoestring.data.prefetcher import Prefetcher

__all__ = ["Prefetcher"]


def __getattr__(name: str) -> Any:
    """Import Prefetcher on first use, because it imports PyTorch, which the command line defers."""
    if name == "Prefetcher":
        from shoestring.data.prefetcher import Prefetcher

        return Prefetcher
    raise AttributeError(f"module 'shoestring.data' has no attribute {name!r}")
