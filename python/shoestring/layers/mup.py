"""Groups of parameters for muP, with learning rates and initial deviations that carry over between widths.

Spectral conditions (arXiv 2310.17813) give the table of ``mup_groups`` in one formula each: Adam's rate is
proportional to ``1 / fan_in``, SGD's to ``fan_out / fan_in``, and the deviation to
``min(1, sqrt(fan_out / fan_in)) / sqrt(fan_in)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from shoestring.core.name_patterns import matching


@dataclass(frozen=True)
class _Ratios:
    """Fan-in and fan-out of a parameter, as multiples of those of the base model."""

    fan_in: float = 1.0
    fan_out: float = 1.0

    @property
    def kind(self) -> str:
        if self.fan_in == 1:
            return "fixed" if self.fan_out == 1 else "input"
        return "output" if self.fan_out == 1 else "hidden"

    def lr(self, optimizer: str) -> float:
        return (self.fan_out if optimizer == "sgd" else 1) / self.fan_in

    @property
    def deviation(self) -> float:
        return float(min(1.0, (self.fan_out / self.fan_in) ** 0.5) / self.fan_in**0.5)


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
    if optimizer not in ("adam", "sgd"):
        raise ValueError(f'mup_groups: optimizer: expected "adam" or "sgd", received {optimizer!r}')
    groups: dict[tuple[str, float, float], dict[str, Any]] = {}
    for _, parameter, ratios in _parameters(model, base, kinds or {}):
        kind, multiplier, deviation = key = ratios.kind, ratios.lr(optimizer), ratios.deviation
        if key not in groups:
            groups[key] = {"params": [], "lr": lr * multiplier, "kind": kind}
            groups[key] |= {"lr_multiplier": multiplier, "std_multiplier": deviation}
            if weight_decay is not None:
                groups[key]["weight_decay"] = weight_decay / multiplier
        groups[key]["params"].append(parameter)
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
    sizes = dict(base.named_parameters(remove_duplicate=False))
    for name, parameter, ratios in _parameters(model, base, kinds or {}):
        if ratios.fan_in == 1 or parameter.numel() < 2:
            continue
        own, wanted = parameter.double().std(), sizes[name].double().std() * ratios.deviation
        if own > 0:
            parameter.mul_((wanted / own).item())


@dataclass
class _Role:
    """A parameter with its names in the model and in its module."""

    name: str
    key: str
    module: nn.Module
    parameter: Tensor


def _roles(model: nn.Module) -> Iterator[_Role]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield _Role(f"{prefix}.{key}" if prefix else key, key, module, parameter)


def _parameters(
    model: nn.Module, base: nn.Module | Mapping[int, int], kinds: Mapping[str, str]
) -> list[tuple[str, Tensor, _Ratios]]:
    """Return the name, the tensor and the ratios of each trainable parameter."""
    roles = list(_roles(model))
    for pattern, kind in kinds.items():
        matching("mup_groups", "kinds", pattern, [role.name for role in roles])
        if kind not in ("input", "output"):
            expected = f'"input" or "output" for {pattern!r}'
            raise ValueError(f"mup_groups: kinds: expected {expected}, received {kind!r}")
    each = _by_model(base) if isinstance(base, nn.Module) else _by_size(base, roles)
    found: dict[Tensor, tuple[str, Tensor, _Ratios]] = {}
    for role in roles:
        if not role.parameter.requires_grad:
            continue
        ratios = _ratios(role, each(role), kinds)
        before = found.setdefault(role.parameter, (role.name, role.parameter, ratios))
        if before[2] != ratios:
            raise ValueError(
                f"mup_groups: {role.name}: expected one role, received that of {before[2].kind!r} ({before[0]}) "
                f"and of {ratios.kind!r}. Untie the weights."
            )
    return list(found.values())


def _by_model(base: nn.Module) -> Callable[[_Role], list[float]]:
    sizes = {name: tensor.shape for name, tensor in base.named_parameters(remove_duplicate=False)}

    def each(role: _Role) -> list[float]:
        before = sizes.get(role.name)
        if before is None:
            raise ValueError(f"mup_groups: base: expected a parameter {role.name}, received none")
        shape = role.parameter.shape
        if len(before) != len(shape):
            raise ValueError(
                f"mup_groups: base: expected {len(shape)} dimensions of {role.name}, received {len(before)}"
            )
        return [size / other for size, other in zip(shape, before, strict=True)]

    return each


def _by_size(widths: Mapping[int, int], roles: Sequence[_Role]) -> Callable[[_Role], list[float]]:
    sizes = {size for role in roles for size in role.parameter.shape}
    for width, before in widths.items():
        if not (width > 0 and before > 0):
            raise ValueError(f"mup_groups: base: expected numbers above 0, received {width} and {before}")
        if width not in sizes:
            raise ValueError(
                f"mup_groups: base: expected sizes of dimensions, received {width}, which no parameter has"
            )
    return lambda role: [size / widths.get(size, size) for size in role.parameter.shape]


def _dimensions(role: _Role) -> tuple[int, int] | None:
    """Return the dimensions (fan-in, fan-out) of a matrix of a known module, or None."""
    module = role.module
    if isinstance(module, nn.MultiheadAttention) and role.key.endswith("proj_weight"):
        return 1, 0
    if role.key != "weight":
        return None
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag, _ConvTransposeNd)):
        return 0, 1
    return (1, 0) if isinstance(module, (nn.Linear, _ConvNd)) else None


def _ratios(role: _Role, each: Sequence[float], kinds: Mapping[str, str]) -> _Ratios:
    """Return the ratios of fan-in and fan-out from the ratio of each dimension."""
    grown = [ratio for ratio in each if ratio != 1]
    if not grown:
        return _Ratios()
    for pattern, kind in kinds.items():
        if fnmatchcase(role.name, pattern):
            if len(set(grown)) > 1:
                raise ValueError(
                    f"mup_groups: kinds: expected dimensions of {role.name} that grow by the same factor, "
                    f"received others"
                )
            return _Ratios(1.0, grown[0]) if kind == "input" else _Ratios(grown[0], 1.0)
    if len(each) == 1:
        return _Ratios(1.0, each[0])
    known = _dimensions(role)
    if known is not None:
        return _Ratios(each[known[0]], each[known[1]])
    if len(grown) == 1 or len(set(grown)) > 1:
        raise ValueError(
            f'mup_groups: kinds: expected "input" or "output" for {role.name}, since its module does not tell it, '
            "received none"
        )
    return _Ratios(grown[0], grown[0])
