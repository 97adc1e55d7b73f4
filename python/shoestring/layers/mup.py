"""Groups of parameters for muP, with learning rates and initial deviations that carry over between widths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

# The layouts of a parameter say which of its dimensions are fan-out and fan-in; see csrc/layers/mup_rule.h.
_UNKNOWN, _OUT_IN, _IN_OUT = range(3)


class _Scaled(NamedTuple):
    """A parameter with the multipliers that the rule gives it."""

    name: str
    parameter: Tensor
    kind: str
    lr: float
    deviation: float


def mup_groups(
    model: nn.Module,
    base: nn.Module | Mapping[int, int],
    lr: float,
    *,
    optimizer: Literal["adam", "sgd"] = "adam",
    weight_decay: float | None = None,
    kinds: Mapping[str, Literal["input", "output"]] | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups whose learning rates carry over from a base model of another width.

    muP (maximal update parametrisation) scales learning rates and initial values so that the best learning rate
    of a narrow model is also that of a wide one. With ``r_in`` and ``r_out``, the fan-in and the fan-out of a
    parameter as multiples of those in the base model:

    ========== ======== ========= ================ ================ ==================
    kind       ``r_in`` ``r_out`` rate of Adam     rate of SGD      initial deviation
    ========== ======== ========= ================ ================ ==================
    input      1        r         1                r                1
    hidden     r_in     r_out     1 / r_in         r_out / r_in     1 / sqrt(r_in)
    output     r        1         1 / r            1 / r            1 / r
    fixed      1        1         1                1                1
    ========== ======== ========= ================ ================ ==================

    Embeddings, biases and the weights of norms are "input". The last column is that of ``r_out >= r_in``;
    otherwise a hidden deviation is ``sqrt(r_out) / r_in``. ``mup_`` sets the initial deviations.

    Attention needs no change if the width grows by the number of heads. If the heads grow, divide the scores by
    the size of the head and not by its root.

    Args:
        model: the model. Frozen parameters are left out.
        base: the same model in the width whose learning rate is known; it may be on the device "meta". Or, for
            each size of a dimension that grows with the width, the size in the base model: ``{1024: 64}``. All
            dimensions of this size count then.
        lr: learning rate of the base model.
        optimizer: ``"adam"`` for optimizers whose steps do not depend on the scale of the gradient, ``"sgd"`` for
            SGD.
        weight_decay: weight decay of the base model. Each group gets a value that keeps the product of learning
            rate and weight decay, by which AdamW multiplies the weights, equal to that of the base model.
        kinds: ``"input"`` or ``"output"`` for parameters whose module does not tell it, such as a position
            embedding that is a parameter of its own, by patterns of ``fnmatch``.

    Returns:
        Parameter groups for any optimizer, with ``params``, ``lr``, and ``weight_decay`` if it is given. The keys
        ``kind``, ``lr_multiplier`` and ``std_multiplier`` say what the table gives. Schedules by factors keep the
        ratios.

    Raises:
        ValueError: names or numbers of dimensions differ, a parameter has two roles, such as tied embeddings, or
            the role of a parameter is not known.

    Example:
        >>> def mlp(width):
        ...     layers = [torch.nn.Linear(10, width), torch.nn.Linear(width, width), torch.nn.Linear(width, 2)]
        ...     return torch.nn.Sequential(*layers)
        >>> model, base = mlp(256), mlp(64)
        >>> groups = shoestring.nn.init.mup_groups(model, base, lr=0.008)
        >>> [(group["kind"], group["lr"], group["std_multiplier"]) for group in groups]
        [('input', 0.008, 1.0), ('hidden', 0.002, 0.5), ('output', 0.002, 0.25), ('fixed', 0.008, 1.0)]
        >>> shoestring.nn.init.mup_(model, base)
        >>> optimizer = shoestring.optim.AdamW(groups)

    Reference: G. Yang et al., Tensor programs V: Tuning large neural networks via zero-shot hyperparameter
    transfer, arXiv 2203.03466, table 3.
    """
    groups: dict[tuple[str, float, float], dict[str, Any]] = {}
    for scaled in _scaled(model, base, kinds, optimizer):
        key = scaled.kind, scaled.lr, scaled.deviation
        if key not in groups:
            groups[key] = {"params": [], "lr": lr * scaled.lr, "kind": scaled.kind}
            groups[key] |= {"lr_multiplier": scaled.lr, "std_multiplier": scaled.deviation}
            if weight_decay is not None:
                groups[key]["weight_decay"] = weight_decay / scaled.lr
        groups[key]["params"].append(scaled.parameter)
    return list(groups.values())


@torch.no_grad()
def mup_(
    model: nn.Module, base: nn.Module, *, kinds: Mapping[str, Literal["input", "output"]] | None = None
) -> None:
    """Scale the initial values of a model to the deviations of muP, from those of a base model.

    The deviation of each hidden and output parameter becomes that of the base model times the factor in the
    table of ``mup_groups``. The deviations are measured, so any initialisation fits. Parameters of zeros stay
    zeros.

    Args:
        model: the model after its initialisation, which changes in place.
        base: the same model in another width, initialised in the same way.
        kinds: see ``mup_groups``.

    Raises:
        ValueError: see ``mup_groups``.

    Example:
        >>> model, base = torch.nn.Linear(4096, 10), torch.nn.Linear(64, 10)
        >>> shoestring.nn.init.mup_(model, base)
        >>> ratio = model.weight.std() / base.weight.std()
        >>> torch.testing.assert_close(ratio, torch.tensor(64 / 4096))
    """
    base_parameters = dict(base.named_parameters(remove_duplicate=False))
    for scaled in _scaled(model, base, kinds):
        if scaled.kind not in ("hidden", "output") or scaled.parameter.numel() < 2:
            continue
        deviation = scaled.parameter.double().std()
        base_deviation = base_parameters[scaled.name].double().std()
        if deviation > 0:
            scaled.parameter.mul_((base_deviation * scaled.deviation / deviation).item())


def _scaled(
    model: nn.Module,
    base: nn.Module | Mapping[int, int],
    kinds: Mapping[str, Literal["input", "output"]] | None,
    optimizer: str = "adam",
) -> list[_Scaled]:
    """Return the trainable parameters with their multipliers."""
    names: list[str] = []
    parameters: list[Tensor] = []
    layouts: list[int] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            names.append(f"{prefix}.{key}" if prefix else key)
            parameters.append(parameter)
            layouts.append(_layout(module, key))
    mup = torch.classes.shoestring.Mup(
        names,
        layouts,
        [list(p.shape) for p in parameters],
        [id(p) for p in parameters],
        [p.requires_grad for p in parameters],
    )
    options = dict(kinds or {}), optimizer
    if isinstance(base, nn.Module):
        sizes = {name: list(p.shape) for name, p in base.named_parameters(remove_duplicate=False)}
        roles = mup.by_name(list(sizes), list(sizes.values()), *options)
    else:
        roles = mup.by_width(dict(base), *options)
    return [_Scaled(names[role], parameters[role], *multipliers) for role, *multipliers in roles]


def _layout(module: nn.Module, key: str) -> int:
    """Return the layout of the parameter ``key`` of a module."""
    if isinstance(module, nn.MultiheadAttention) and key.endswith("proj_weight"):
        return _OUT_IN
    if key != "weight":
        return _UNKNOWN
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag, _ConvTransposeNd)):
        return _IN_OUT
    return _OUT_IN if isinstance(module, (nn.Linear, _ConvNd)) else _UNKNOWN
