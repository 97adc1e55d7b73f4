"""Remove biases that a batch norm subtracts again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd


@dataclass(frozen=True)
class FoldReport:
    """The result of ``fold_bias_before_batch_norm``.

    Attributes:
        folded: for each layer whose bias was removed, the batch norm behind it.
        kept: for each layer with a bias directly before a batch norm that was not removed, the reason.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
        >>> report = shoestring.nn.fold_bias_before_batch_norm(model)
        >>> report.kept["0"]
        'no example shows that the batch norm normalises the features'
    """

    folded: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


@torch.no_grad()
def fold_bias_before_batch_norm(
    model: nn.Module, example: Tensor | tuple[Any, ...] | None = None
) -> FoldReport:
    """Remove the biases of convolutions and linear layers directly before a batch norm.

    Batch norm subtracts the mean, so such a bias has no effect in training, but takes a gradient, optimizer state
    and time. The running mean of the batch norm is lowered by the bias, so that the outputs in evaluation stay the
    same up to rounding. Create the optimizer afterwards.

    A bias is removed only if ``torch.fx`` traces, both in training and in evaluation, that the model calls the
    layer once, that nothing but the batch norm takes the result, and that neither has hooks.

    Args:
        model: the model, which changes in place.
        example: an input of the model, or a tuple of its inputs. Biases of linear layers are removed only with it,
            because a batch norm of three-dimensional input normalises another dimension than the bias has. The
            model runs once in evaluation mode.

    Returns:
        The layers that have changed, and those that have not, with the reason.

    Raises:
        ValueError: ``torch.fx`` cannot trace the model. Nothing has changed then.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).eval()
        >>> before = model(torch.ones(1, 3, 8, 8))
        >>> shoestring.nn.fold_bias_before_batch_norm(model)
        FoldReport(folded={'0': '1'}, kept={})
        >>> torch.testing.assert_close(model(torch.ones(1, 3, 8, 8)), before)
    """
    modules = dict(model.named_modules())
    pairs = _pairs(model)
    shapes = _dimensions(model, [norm for _, norm in pairs], example)
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    report = FoldReport()
    for name, norm_name in pairs:
        layer, norm = modules[name], modules[norm_name]
        reason = _reason_to_keep(layer, norm, shapes.get(norm_name))
        if reason is None and owners[id(layer.bias)] > 1:
            reason = "another layer has the same bias"
        if reason is not None:
            report.kept[name] = reason
            continue
        bias: Any = layer.bias
        mean: Any = norm.running_mean
        if mean is not None:
            mean.sub_(bias)
        layer.bias = None
        report.folded[name] = norm_name
    return report


def _reason_to_keep(layer: nn.Module, norm: nn.Module, dimensions: int | None) -> str | None:
    """Return why the bias of a layer before a batch norm cannot be removed, or None if it can."""
    if any(m._forward_hooks or m._forward_pre_hooks for m in (layer, norm)):
        return "a hook sees the layer's result"
    if list(layer._parameters) != ["weight", "bias"]:
        return "the layer has other parameters than weight and bias"
    if isinstance(norm, nn.modules.lazy.LazyModuleMixin):
        return "the batch norm is not initialised"
    if isinstance(layer, nn.Linear) and dimensions is None:
        return "no example shows that the batch norm normalises the features"
    if isinstance(layer, nn.Linear) and dimensions != 2:
        return "the batch norm normalises another dimension than the features"
    return None


def _pairs(model: nn.Module) -> list[tuple[str, str]]:
    """Return layers with a bias whose result goes into a batch norm and nowhere else, with the batch norm."""
    modes = [(module, module.training) for module in model.modules()]
    pairs_by_mode: list[list[tuple[str, str]]] = []
    try:
        for training in (True, False):
            model.train(training)
            pairs_by_mode.append(_pairs_of(model, fx.Tracer().trace(model)))
    except Exception as error:
        raise ValueError(
            "fold_bias_before_batch_norm: model: expected a model that torch.fx can trace, received "
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode
    return [pair for pair in pairs_by_mode[0] if pair in pairs_by_mode[1]]


def _pairs_of(model: nn.Module, graph: fx.Graph) -> list[tuple[str, str]]:
    """Return the pairs of a layer with a bias and the batch norm that alone reads its result, in one graph."""
    # A tracer names a module by the first of its names, so that shared modules are counted together.
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    pairs = []
    for node in graph.nodes:
        if node.op != "call_module" or calls[node.target] > 1 or node.target in read:
            continue
        layer = model.get_submodule(node.target)
        if not isinstance(layer, (nn.Linear, _ConvNd)) or layer.bias is None or len(node.users) != 1:
            continue
        user = next(iter(node.users))
        if user.op != "call_module" or calls[user.target] > 1 or user.args[:1] != (node,):
            continue
        if isinstance(model.get_submodule(str(user.target)), _BatchNorm):
            pairs.append((str(node.target), str(user.target)))
    return pairs


def _dimensions(
    model: nn.Module, norms: list[str], example: Tensor | tuple[Any, ...] | None
) -> dict[str, int]:
    """Return the numbers of dimensions of the inputs of batch norms, from a run with the example."""
    if example is None:
        return {}
    dimensions: dict[str, int] = {}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _module, inputs, name=name: dimensions.__setitem__(name, inputs[0].dim())
        )
        for name in norms
    ]
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()(*(example if isinstance(example, tuple) else (example,)))
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes:
            module.training = mode
    return dimensions
