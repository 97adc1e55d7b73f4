"""Tell DTensors from other tensors."""

from typing import TYPE_CHECKING

from torch import Tensor
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> "TypeIs[DTensor]":
    """Return whether the object is a DTensor; always False if torch has no distributed package."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "to_local")
