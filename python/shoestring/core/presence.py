"""Bring the weights of a module that are away from its device, for code that reads them outside of its block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from shoestring.core.errors import InputError
from shoestring.core.storages import parts

# Attribute of each module of a block with offloaded weights: returns a context in which they are on the device.
PRESENT = "_shoestring_weights_present"
# Attribute of a block with offloaded weights. One hook before its forward and one after it bring the weights and
# change no tensor.
BRINGS_WEIGHTS = "_shoestring_brings_weights"


class Presence:
    """Makes a context in which weights are on the device. A copy of a module does not get it."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self.make = make

    def __deepcopy__(self, memo: object) -> Presence:
        return Presence(nullcontext)


def weights_present(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the weights of a module are on its device; weights are only read in it."""
    presence: Presence | None = module.__dict__.get(PRESENT)
    return nullcontext() if presence is None else presence.make()


def is_away(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor is away, so that a read of it raises an error."""
    try:
        for part in parts([tensor]):
            part.untyped_storage().data_ptr()
    except RuntimeError as error:
        return str(error).startswith("offload_weights: ")
    return False


def expect_here(caller: str, model: nn.Module, modules: Iterable[str] = ("",)) -> None:
    """Raise InputError if a weight is away, before ``caller`` reads or changes the weights of modules of a model."""
    for module_name in modules:
        module = model.get_submodule(module_name)
        for name, tensor in (*module.named_parameters(module_name), *module.named_buffers(module_name)):
            if is_away(tensor):
                raise InputError(
                    f"{caller}: model: expected weights on their device, received {name}, which is away. Call undo() of "
                    "the offloaded weights first."
                )
