"""Let MLPs with one GELU save for backward what goes into GELU, but not what comes out of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.core.instances import Found, Left, derive, has_only, names_dropout
from shoestring.core.presence import weights_present
from shoestring.gemm.dense import is_plain
from shoestring.gemm.linear import PRODUCTS, library_sum
from shoestring.integrations.transformers.elementwise import approximation
from shoestring.integrations.transformers.residuals import has_hooks
from shoestring.integrations.transformers.trial import shaken, within_rounding
from shoestring.layers.gelu import gelu


class Names(NamedTuple):
    """The attribute names of the layers of an MLP."""

    first: str
    gelu: str
    second: str


def fuse_gelu_mlps(model: nn.Module) -> tuple[list[Found], list[Left]]:
    """Make MLPs of a linear layer, GELU and a linear layer save one tensor less for backward.

    Backward computes GELU again while it computes the gradient of GELU. A test on random numbers determines
    whether a module with these three parts is such an MLP.

    Returns:
        The changes, and the modules that are left unchanged with the reason.
    """
    changes: list[Found] = []
    left: list[Left] = []
    for name, module in list(model.named_modules()):
        names = _parts(module)
        approximate = None if names is None else approximation(module._modules[names.gelu])
        if names is None or approximate is None:
            continue
        if "forward" in module.__dict__ or not _is_mlp(module, names, approximate):
            left.append((name, "a forward of its own, or an MLP that computes something else"))
            continue
        body = {"forward": _forward(type(module).forward, names, approximate)}
        changes.append((name, "GELU without its result in memory", derive(module, body)))
    return changes, left


def _parts(module: nn.Module) -> Names | None:
    """Return the names of the layers if the module may be an MLP with GELU."""
    linears = [name for name, part in module._modules.items() if type(part) is nn.Linear]
    other_parts = [name for name in module._modules if name not in linears]
    if len(linears) != 2 or len(other_parts) != 1 or not has_only(module, {*linears, *other_parts}):
        return None
    if "gelu" not in type(module._modules[other_parts[0]]).__name__.lower() or names_dropout(module):
        return None
    return Names(linears[0], other_parts[0], linears[1])


def _is_mlp(module: nn.Module, names: Names, approximate: str) -> bool:
    """Return whether a module computes its first layer, GELU and its second layer, from a trial on random rows."""
    first, second = module._modules[names.first], module._modules[names.second]
    assert isinstance(first, nn.Linear) and second is not None
    weight, training = first.weight, module.training
    tokens = torch.randn(8, first.in_features, generator=torch.Generator().manual_seed(0))
    module.eval()
    try:
        with weights_present(module), torch.no_grad():
            x = tokens.to(weight.device, weight.dtype)
            h = gelu(first(x), approximate)
            return within_rounding(module(x), second(h), second(shaken(h)))
    except Exception:  # raised if the MLP's forward has another signature, or its layers do not fit together
        return False
    finally:
        module.train(training)


def _forward(original: Callable[..., Any], names: Names, approximate: str) -> Callable[..., Any]:
    """Return a forward whose second layer recomputes GELU in backward instead of saving its result."""

    @functools.wraps(original)
    def forward(self: Any, x: Tensor) -> Any:
        activation, second = self._modules[names.gelu], self._modules[names.second]
        weight: Tensor = second.weight
        compute = torch.get_autocast_dtype(x.device.type) if _autocast(x) else x.dtype
        if (
            not torch.is_grad_enabled()
            or has_hooks(activation)
            or not is_plain(second)
            or type(weight) is not nn.Parameter
            or type(x) not in (Tensor, nn.Parameter)
            or not (_autocast(x) or weight.dtype == x.dtype)
        ):
            return original(self, x)
        # While a patched module runs, its layers may be stand-ins that hold the measured choice of a library.
        products = getattr(getattr(self, names.second), "products", None)
        key = (compute, ((weight.shape[0], weight.shape[1]),))
        chosen = None if products is None else products.chosen.get(key)
        library = library_sum("linear", PRODUCTS if chosen is None else chosen)
        return torch.ops.shoestring._gelu_linear(
            getattr(self, names.first)(x), weight, second.bias, approximate, library=library
        )

    return forward


def _autocast(x: Tensor) -> bool:
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
