"""The tensors of a parameter's optimizer state: their names, dtypes and sizes.

The C++ class ``OptimizerCore`` allocates them: flat tensors (arenas) hold the state of many parameters.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.optim.sharded import Shards
from shoestring.quantization.quantize_8bit import STATE_BLOCK

STATES = ("8bit", "4bit", "bf16", "fp32")
ROUNDINGS = ("nearest", "stochastic", "remainder")


@dataclass(frozen=True)
class Moment:
    """A running mean that an update rule keeps: its name in a state dict, and whether it may be negative.

    long: the mean moves less per step than one quantisation level. If the other means are stored as 8-bit or
    4-bit codes, this one is stored in bf16.
    """

    name: str
    signed: bool
    long: bool = False

    def stored_as(self, state: str) -> str:
        """Return the format in which this moment is stored, given the optimizer's option ``state_format``."""
        return "bf16" if self.long and state in ("8bit", "4bit") else state


class Kind(NamedTuple):
    """How the state of a parameter is stored. Parameters of a group with the same Kind share flat tensors.

    state: the format of the moments. remainder: whether 16 more bits of each bf16 weight are stored. device:
    the device that steps the parameters. shards: how processes split the parameter, if they do.
    """

    state: str
    remainder: bool
    device: torch.device
    shards: Shards | None


def blocks(size: int) -> int:
    """Return the number of 256-element blocks that the state of a parameter with ``size`` elements takes."""
    return -(-size // STATE_BLOCK)


@dataclass(frozen=True)
class Part:
    """A tensor in a parameter's state: its name, dtype and elements per 256 elements of the parameter."""

    name: str
    dtype: torch.dtype
    per_block: int
    # Whether this state tensor has the parameter's shape. Otherwise it is flat and covers whole blocks of 256
    # elements.
    shaped: bool

    def size(self, param: Tensor) -> int:
        """Return the number of elements that this state tensor has for the parameter."""
        return param.numel() if self.shaped else blocks(param.numel()) * self.per_block

    def shape(self, param: Tensor) -> tuple[int, ...]:
        """Return the shape that this state tensor has for the parameter."""
        return tuple(param.shape) if self.shaped else (self.size(param),)
