"""Running statistics of batch norm for averaged weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoestring.optim.host_copy import HostCopy


def update_batch_norm(
    batches: Iterable[Any], model: nn.Module, device: int | str | torch.device | None = None
) -> None:
    """Compute the running statistics of all batch norm layers again, as ``torch.optim.swa_utils.update_bn`` does.

    Averaged weights need it if the statistics were not averaged. The statistics are reset, and become the mean
    over the batches, whatever the layers' momenta are. The model runs in training mode without gradients.
    Other than PyTorch's function, this one restores the training mode of every module and all momenta, also if
    an exception is raised, and then it restores the statistics as well. A layer that no batch reaches, such as one
    in a branch that stochastic depth leaves out, is left with reset statistics: switch stochastic depth off before.

    Args:
        batches: inputs of the model: tensors, or lists or tuples whose first element is the input.
        model: the model. Without batch norm layers nothing happens.
        device: device to which each input is copied first. None leaves inputs where they are.

    Raises:
        ValueError: there is no batch. The statistics are those from before.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)).eval()
        >>> batches = [torch.ones(4, 2), torch.full((4, 2), 3.0)]
        >>> shoestring.optim.update_batch_norm(batches, model)
        >>> model[0].running_mean
        tensor([2., 2.])
        >>> model.training
        False
    """
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if not layers:
        return
    momenta = [layer.momentum for layer in layers]
    modes = [(module, module.training) for module in model.modules()]
    statistics = HostCopy([], [], layers)
    count = 0

    def counted() -> Iterator[Any]:
        nonlocal count
        for batch in batches:
            count += 1
            yield batch

    try:
        torch.optim.swa_utils.update_bn(
            counted(), model, torch.device(device) if device is not None else None
        )
        if not count:
            raise ValueError("update_batch_norm: batches: expected at least one batch, received none")
    except BaseException:
        statistics.restore()
        raise
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for module, mode in modes:
            module.training = mode
