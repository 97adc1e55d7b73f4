"""Which modules hold the stacked matrices of experts, and which of them read these by shoestring's operators alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor, nn

# Attribute of a module: whether its forward reads its stacks of matrices by moe_experts and grouped_linear alone.
READS_STACKS = "_shoestring_reads_stacks"
# Attribute of a module of experts that processes have split: an object with send(x, index, weight) and receive(sent).
EXCHANGE = "_shoestring_exchange"
# Attribute of a parameter of such a module, or of its adapters: each process has other values.
OF_ONE_PROCESS = "_shoestring_of_one_process"


class Reader(NamedTuple):
    """What another library's modules of experts do with their stacks.

    is_experts: returns whether a module is one of them.
    reads: returns whether the forward of one of them reads its stacks by our operators alone.
    refusal: returns why one of them cannot read codes, or None if it can.
    switch: lets the experts of a model read their stacks by our operators from now on.
    """

    is_experts: Callable[[nn.Module], bool]
    reads: Callable[[nn.Module], bool]
    refusal: Callable[[nn.Module], str | None]
    switch: Callable[[nn.Module], None]


readers: list[Reader] = []


def _reader_of(module: nn.Module) -> Reader | None:
    return next((reader for reader in readers if reader.is_experts(module)), None)


def reads_stacks(module: nn.Module) -> bool:
    """Return whether the forward of a module reads its stacks by ``moe_experts`` and ``grouped_linear`` alone."""
    if getattr(module, READS_STACKS, False):
        return True
    reader = _reader_of(module)
    return reader is not None and reader.reads(module)


def refusal_of_codes(module: nn.Module) -> str | None:
    """Return why the forward of a module cannot read codes in place of its stacks, or None if it can."""
    if getattr(module, READS_STACKS, False):
        return None
    reader = _reader_of(module)
    return "its class is not known to read stacks of experts" if reader is None else reader.refusal(module)


def switch_to_codes(model: nn.Module) -> None:
    """Let the experts of a model read their stacks by our operators, before the stacks become codes."""
    for reader in readers:
        if any(reader.is_experts(module) for module in model.modules()):
            reader.switch(model)


def stacks_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the stacked matrices that a module itself holds, with the names of these parameters.

    In a module that is not known to have experts, a parameter of three dimensions counts unless it belongs to a
    convolution, or has one matrix, as the positions of an image have.
    """
    if isinstance(module, (nn.modules.conv._ConvNd, nn.Bilinear)):
        return
    least = 1 if getattr(module, READS_STACKS, False) or _reader_of(module) is not None else 2
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if parameter.dim() == 3 and parameter.is_floating_point() and parameter.shape[0] >= least:
            yield name, parameter
