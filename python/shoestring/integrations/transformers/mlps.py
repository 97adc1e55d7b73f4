"""Let MLPs with one GELU save for backward what goes into GELU, but not what comes out of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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

Names = tuple[str, str, str]  # attribute names of the first linear layer, GELU and the second linear layer


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
        approximate = None if names is None else approximation(module._modules[names[1]])
        if names is None or approximate is None:
            continue
        if "forward" in module.__dict__ or not _is_mlp(module, names, approximate):
            left.append((name, "a forward of its own, or an MLP that computes something else"))
            continue
        body = {"forward": _forward(type(module).forward, names, approximate)}
        changes.append((name, "GELU without its result in memory", derive(module, body)))
    return changes, left


def _parts(module: nn.Module) -> Names | None:
    linears = [name for name, part in module._modules.items() if type(part) is nn.Linear]
    others = [name for name in module._modules if name not in linears]
    if len(linears) != 2 or len(others) != 1 or not has_only(module, {*linears, *others}):
        return None
    if "gelu" not in type(module._modules[others[0]]).__name__.lower() or names_dropout(module):
        return None
    return linears[0], others[0], linears[1]


def _is_mlp(module: nn.Module, names: Names, approximate: str) -> bool:
    first, second = module._modules[names[0]], module._modules[names[2]]
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
    @functools.wraps(original)
    def forward(self: Any, x: Tensor) -> Any:
        activation, second = self._modules[names[1]], self._modules[names[2]]
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
        # While the forward of a module runs, its layers may be objects that know which library computes them.
        products = getattr(getattr(self, names[2]), "products", None)
        key = (compute, ((weight.shape[0], weight.shape[1]),))
        chosen = None if products is None else products.chosen.get(key)
        library = library_sum("linear", PRODUCTS if chosen is None else chosen)
        return torch.ops.shoestring._gelu_linear(
            getattr(self, names[0])(x), weight, second.bias, approximate, library=library
        )

    return forward


def _autocast(x: Tensor) -> bool:
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
