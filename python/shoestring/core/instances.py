"""Change the methods of a single module by giving it a class derived from its former class."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

# The record of a changed module: its name, a description of the change, and a function that undoes the
# change.
Found = tuple[str, str, Callable[[], None]]
Left = tuple[str, str]  # pair: the name of a module that was left unchanged, and the reason
# attribute of a derived class that holds the original class, to which copies and pickles revert
PLAIN = "_shoestring_plain"
# attribute of a derived class that holds the names of module attributes that copies leave out
PRIVATE = "_shoestring_private"


def derive(module: nn.Module, body: dict[str, Any], private: tuple[str, ...] = ()) -> Callable[[], None]:
    """Give a module a new class, derived from its present class, with the methods in `body`.

    Several calls on one module accumulate their changes. Deep copies and pickles of the module have its
    original class.

    Args:
        module: the module, which stays the same object.
        body: attributes and methods of the new class.
        private: names of attributes that the new methods set on the module. Copies and pickles of the module
            leave these attributes out.

    Returns:
        A function that undoes the change. After several calls, undo the last one first.
    """
    original = type(module)
    attributes = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": _reduce,
        PLAIN: getattr(original, PLAIN, original),
        PRIVATE: (*getattr(original, PRIVATE, ()), *private),
    }
    derived = type(original.__name__, (original,), attributes | body)
    module.__class__ = derived
    return functools.partial(_take_back, module, original, private)


def _take_back(module: nn.Module, original: type, private: tuple[str, ...]) -> None:
    module.__class__ = original
    for name in private:
        module.__dict__.pop(name, None)


def _reduce(self: Any, protocol: Any) -> Any:
    """Implement ``__reduce_ex__`` such that copies and pickles of the module have its original class."""
    state: Any = object.__reduce_ex__(self, 2)[2]
    return (
        object.__new__,
        (getattr(self, PLAIN),),
        {k: v for k, v in state.items() if k not in getattr(self, PRIVATE)},
    )


def has_only(module: nn.Module, parts: set[str]) -> bool:
    """Return whether a module's submodules are all in ``parts`` and it has no own parameters or buffers.

    A replacement of the module's forward ignores any other weight. A comparison of outputs may not reveal an
    ignored weight, for example a scale that still has its initial value 1.
    """
    return set(module._modules) <= parts and not module._parameters and not module._buffers


def names_dropout(module: nn.Module) -> bool:
    """Return whether the code of a module's forward uses a name that contains "dropout".

    Also return True if the code cannot be read. A comparison of outputs in eval mode would not reveal
    dropout.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is None or any("dropout" in name for name in code.co_names)
