"""Let an embedding whose weight is away compute with the rows that a call needs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.core.errors import InputError


class RowsOnDemand(Tensor):
    """The weight of an embedding that is away: ``F.embedding`` brings the rows of its indices.

    So the embedding may be of a class of its own, such as one with adapters or with positions that it computes. Any
    other function reads the memory of the weight, which raises an error while it is away.
    """

    _rows_of: Callable[[Tensor], Tensor]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is not F.embedding:
                return function(*args, **(kwargs or {}))
            arguments = dict(zip(("input", "weight"), args, strict=False)) | (kwargs or {})
            indices, weight = arguments["input"], arguments["weight"]
            distinct, numbers = indices.cpu().unique(return_inverse=True)
            return F.embedding(numbers.to(indices.device), weight._rows_of(distinct))


def bring_rows(store: Any, table: nn.Embedding) -> list[Any]:
    """Let an embedding bring the rows that it needs; return the handles of its hooks."""
    weight = table.weight
    rows = weight.detach().as_subclass(RowsOnDemand)
    rows._rows_of = lambda distinct: store.embedding(weight, distinct)
    running: set[int] = set()  # ids of the threads whose forward runs

    def enter(module: nn.Module, args: Any) -> None:
        if module._parameters["weight"] is not weight:
            return
        if weight.requires_grad:
            raise InputError(
                "offload_weights: table: expected a frozen weight, as when it left, received one that requires gradients "
                "now. Call undo(), then offload_weights with tables=() to let tables stay."
            )
        running.add(threading.get_ident())
        # An attribute of the object hides the parameter, which stays where the module registers it. If an exception
        # such as KeyboardInterrupt skips the other hook, the attribute stays until the next call.
        module.__dict__["weight"] = rows

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.discard(threading.get_ident())
        if not running:
            module.__dict__.pop("weight", None)

    return [table.register_forward_pre_hook(enter), table.register_forward_hook(leave, always_call=True)]
