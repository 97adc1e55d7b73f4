"""Leave the buffers of modules as they are before a run that must not count, such as a recomputation."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FunctionType, MethodType

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoestring.core.storages import parts

_SOURCES = (nn.Module, functools.partial, MethodType, FunctionType)


@contextmanager
def buffers_kept(*sources: object) -> Iterator[None]:
    """Put back, when the ``with`` block ends, the buffers that it has changed in place or assigned anew.

    Buffers that the block does not change are not copied. Copies are on the devices of the buffers.

    Args:
        sources: modules, and functions that use modules: bound methods, partial functions, and functions that
            refer to modules by closures, defaults or global names; also lists, tuples and dicts of these.
    """
    objects = _reachable(sources)
    modules = [one for one in objects if isinstance(one, nn.Module)]
    before = [(module, dict(module._buffers)) for module in modules if len(module._buffers) > 0]
    if not before:
        yield
        return
    tensors = [buffer for _, buffers in before for buffer in buffers.values() if buffer is not None]
    saved_buffers = torch.classes.shoestring.KeptBuffers(list(parts(tensors)))
    # compiled code changes buffers without calling an operator
    saved_buffers.begin(any(_is_compiled(one) for one in objects))
    try:
        yield
    finally:
        saved_buffers.end()
        for module, buffers in before:
            for name, buffer in buffers.items():
                if name not in module._buffers or module._buffers[name] is not buffer:
                    module._buffers[name] = buffer


def _is_compiled(one: object) -> bool:
    """Return whether ``torch.compile`` has compiled a function, or a module as a whole."""
    if not isinstance(one, nn.Module):
        return hasattr(one, "_torchdynamo_orig_callable")
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and (
        isinstance(one, dynamo.OptimizedModule)
        or one._compiled_call_impl is not None
        or hasattr(one.__dict__.get("forward"), "_torchdynamo_orig_callable")
    )


def _reachable(sources: object) -> list[object]:
    """Return all modules and functions that ``sources`` contain or refer to."""
    reached: dict[int, object] = {}
    todo = [sources]
    while todo:
        for leaf in tree_leaves(todo.pop()):
            if id(leaf) in reached or not isinstance(leaf, _SOURCES):
                continue
            if isinstance(leaf, nn.Module):
                reached |= {id(module): module for module in leaf.modules()}
            else:
                reached[id(leaf)] = leaf
                todo.extend(_referred(leaf))
    return list(reached.values())


def _referred(function: object) -> Iterator[object]:
    """Yield the objects to which a function refers: arguments, closure, defaults, and modules among its globals."""
    if isinstance(function, functools.partial):
        yield from (function.func, function.args, function.keywords)
    elif isinstance(function, MethodType):
        yield from (function.__self__, function.__func__)
    elif isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # a variable that the enclosing function has not set yet
                yield cell.cell_contents
        yield from (function.__defaults__ or (), function.__kwdefaults__ or {})
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, nn.Module):
                yield value
