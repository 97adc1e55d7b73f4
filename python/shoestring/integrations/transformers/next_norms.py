"""Let a decoder layer compute the norm that reads its output together with its last residual sum.

A layer ends with ``residual + out``, and the first operation of the next layer, or of the model after its last
layer, is a norm of this sum. One operator computes both in one pass, and its backward also adds the two
gradients of the sum. The layer still returns the sum. The norm is kept on the norm's module until the module
is called with this sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Attribute of a decoder layer: the norm that reads its output, and the module that this norm belongs to.
NEXT = "_shoestring_next"
# Attribute of a fused norm: a sum, its version, the norm of the sum, and the dtype to which it was rounded.
PENDING = "_shoestring_pending"


def next_norms(
    layers: Iterable[nn.Module], norms: dict[nn.Module, nn.Module], run: Callable[[], object]
) -> dict[nn.Module, tuple[nn.Module, nn.Module]]:
    """Return for each layer the norm that reads its output, and the module that this norm belongs to.

    Args:
        layers: decoder layers.
        norms: fused norms, each with the module that it belongs to.
        run: function that calls the model. A layer or norm that it calls twice is left out.
    """
    linked: list[tuple[nn.Module, Any]] = []
    read: list[tuple[nn.Module, Any]] = []

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        read.append((module, args[0] if args else None))

    hooks = [layer.register_forward_hook(lambda m, _, out: linked.append((m, out))) for layer in layers]
    hooks += [norm.register_forward_pre_hook(note) for norm in norms]
    try:
        run()
    except Exception:  # patch() runs the model again later and reports the error
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    norm_of: dict[nn.Module, tuple[nn.Module, nn.Module]] = {}
    for layer, out in linked:
        readers = [norm for norm, x in read if x is out]
        once = len(readers) == 1 and sum(norm is readers[0] for norm, _ in read) == 1
        if once and isinstance(out, Tensor) and sum(m is layer for m, _ in linked) == 1:
            norm_of[layer] = readers[0], norms[readers[0]]
    return norm_of


def _in_checkpoint() -> bool:
    """Return whether hooks see saved tensors, as in a checkpoint, whose part computes its norms itself."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def may_defer(layer: nn.Module, residual: Tensor) -> bool:
    """Return whether a layer may compute the next norm.

    The sum must be in fp32, so that its bits do not depend on who computes the norm. The layer must not run in a
    checkpoint, which recomputes it without the next norm. The weight must be a plain parameter, neither a shard of
    FSDP2 nor the result of a hook.
    """
    if torch.compiler.is_compiling() or residual.dtype != torch.float32 or NEXT not in layer.__dict__:
        return False
    weight = layer.__dict__[NEXT][0].weight
    return (
        torch.is_grad_enabled()
        and torch._C._current_graph_task_id() == -1
        and not _in_checkpoint()
        and not getattr(layer, "_is_replica", False)
        and isinstance(weight, nn.Parameter)
        and not hasattr(weight, "device_mesh")
        and weight.device == residual.device
    )


def keep(norm: nn.Module, total: Tensor, normed: Tensor, rounded: torch.dtype | None) -> None:
    """Keep the norm of ``total``, which the layer before ``norm`` has computed with its sum."""
    norm.__dict__[PENDING] = (total, total._version, normed, rounded)


def take(norm: nn.Module, x: Tensor, rounded: torch.dtype | None) -> Tensor | None:
    """Return the norm of x if the layer before has computed it, else None.

    A checkpoint computes the norm itself, because its recomputation has to do the same.
    """
    if torch.compiler.is_compiling() or PENDING not in norm.__dict__:
        return None
    total, version, normed, dtype = norm.__dict__.pop(PENDING)
    same = total is x and version == x._version and dtype == rounded
    return normed if same and torch.is_grad_enabled() and not _in_checkpoint() else None
