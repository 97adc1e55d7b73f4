"""Give a global name another meaning in the forward of some modules only.

A copy of the forward uses a name of its own, which is added to the globals of the forward's file. The copy has
the same globals, because ``torch.compile`` requires a function's globals to be those of its file.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable
from typing import Any

PREFIX = "_shoestring_"
# (id of the globals, name) -> number of users of the name
_claims: dict[tuple[int, str], int] = {}


def uses(forward: Any, name: str) -> bool:
    """Return whether a function, or a function that it wraps, uses the global ``name``.

    A function that also uses an attribute of this name, as in ``nn.CrossEntropyLoss``, does not count, because
    both uses share one entry in the table of names.
    """
    return _uses(forward, name) or (hasattr(forward, "__wrapped__") and uses(forward.__wrapped__, name))


def _uses(forward: Any, name: str) -> bool:
    code = getattr(forward, "__code__", None)
    if code is None or name not in code.co_names or name not in forward.__globals__:
        return False
    return {i.opname for i in dis.get_instructions(code) if i.argval == name} == {"LOAD_GLOBAL"}


def renamed(forward: Any, name: str) -> Callable[..., Any]:
    """Return a copy of a function that uses ``PREFIX + name`` in place of the global ``name``.

    A function that it wraps is copied likewise.
    """
    inner = getattr(forward, "__wrapped__", None)
    closure = forward.__closure__
    if inner is not None and closure is not None:
        copied = renamed(inner, name)
        closure = tuple(types.CellType(copied) if c.cell_contents is inner else c for c in closure)
    uses_name = _uses(forward, name)
    names = tuple(PREFIX + used if uses_name and used == name else used for used in forward.__code__.co_names)
    copy = types.FunctionType(
        forward.__code__.replace(co_names=names),
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        closure,
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    functools.update_wrapper(copy, forward)
    if inner is not None and closure is not None:
        copy.__wrapped__ = copied  # type: ignore[attr-defined]
    return copy


def claim(forward: Any, name: str, value: Any) -> Callable[[], None]:
    """Add ``PREFIX + name`` to the globals of a function's file; return a function that removes it.

    The name stays in the globals until the change of the last module that uses it is undone.
    """
    while not _uses(forward, name):
        forward = forward.__wrapped__
    namespace, global_name = forward.__globals__, PREFIX + name
    key = (id(namespace), global_name)
    namespace[global_name] = value
    _claims[key] = _claims.get(key, 0) + 1

    def release() -> None:
        _claims[key] -= 1
        if _claims[key] == 0:
            del _claims[key]
            namespace.pop(global_name, None)

    return release
