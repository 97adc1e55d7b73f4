"""One instance made to do something else: it gets a class of its own, derived from the one that it had."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

Found = tuple[str, str, Callable[[], None]]  # where, what, how to take it back
Left = tuple[str, str]  # where, and why it is left alone
PLAIN = "_shoestring_plain"  # of a derived class: the one that copies and files know
PRIVATE = "_shoestring_private"  # names of attributes that they do not


def derive(module: nn.Module, body: dict[str, Any], private: tuple[str, ...] = ()) -> Callable[[], None]:
    """Gives the module a class with `body` in it; one that is derived already keeps what it has besides.

    A deep copy of the module, and what is unpickled, has its plain class. Returns how to take it back, the last first.

    Args:
        private: attributes that the new methods set on the module, for it alone.
    """
    original = type(module)
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    own = {PLAIN: getattr(original, PLAIN, original), PRIVATE: (*getattr(original, PRIVATE, ()), *private)}
    derived = type(original.__name__, (original,), names | own | {"__reduce_ex__": _reduce} | body)
    module.__class__ = derived
    return functools.partial(_take_back, module, original, private)


def _take_back(module: nn.Module, original: type, private: tuple[str, ...]) -> None:
    module.__class__ = original
    for name in private:
        module.__dict__.pop(name, None)


def _reduce(self: Any, protocol: Any) -> Any:
    """As the plain module, so that copies and files know nothing of the derived class."""
    state: Any = object.__reduce_ex__(self, 2)[2]
    return (
        object.__new__,
        (getattr(self, PLAIN),),
        {k: v for k, v in state.items() if k not in getattr(self, PRIVATE)},
    )


def has_only(module: nn.Module, parts: set[str]) -> bool:
    """Whether a module is these parts alone: a forward in place of its own would pass over weights besides, which a trial need
    not show, where a scale is still one."""
    return set(module._modules) <= parts and not module._parameters and not module._buffers


def names_dropout(module: nn.Module) -> bool:
    """Whether a module's forward calls one, which a trial in eval mode does not show."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is None or any("dropout" in name for name in code.co_names)
