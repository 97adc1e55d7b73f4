"""Run a pass of a run's model before the run begins, without side effects."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from shoestring.checkpoint.measure import gradients_aside
from shoestring.core.device import synchronize
from shoestring.data.batches import labelled
from shoestring.training.config import LoopConfig
from shoestring.training.optimizers import trained
from shoestring.training.run.device import DTYPES, autocast, float32_products
from shoestring.training.run.loop import Batch, Trainer

LEAST_MICRO_BATCHES = 50  # trials do not pay in a run of fewer
LONG = 10**12  # about the floating-point operations of a second on a CPU
LOSS_SCALE = 2.0**16  # the first factor of PyTorch's GradScaler


class Trial(NamedTuple):
    """Loss, norm of all gradients, and time of forward and backward of one micro-batch."""

    loss: float
    norm: float
    seconds: float


def takes_seconds(trainer: Trainer) -> bool:
    """Return whether forward and backward of the longest row take seconds, as those of a large model on a CPU do."""
    weights: int = sum(parameter.numel() for parameter in trainer.model.parameters())
    operations = 6 * weights * trainer.train.count(trainer.longest_rows()[:1])
    return trainer.run.device.type == "cpu" and operations > LONG


def some_batch(trainer: Trainer, rows: list[int]) -> Batch:
    """Return a micro-batch of these rows on the device; of the row of a run with one row in a batch, the second half."""
    if trainer.run.config.batch_size > 1:
        batch = trainer.batch(trainer.train, rows)
    else:
        # Completions, whose tokens are labelled, are at the end of rows.
        inputs, labels = (tensor[:, tensor.shape[1] // 2 :] for tensor in trainer.train.rows(rows[:1]))
        batch = (inputs, labels, {})
    result: Batch = _pytree.tree_map_only(Tensor, lambda tensor: tensor.to(trainer.run.device), batch)
    return result


def run_pass(trainer: Trainer, precision: str, batch: Batch) -> Trial:
    """Run forward and backward of a micro-batch without side effects."""
    device, (inputs, labels, more) = trainer.run.device, batch
    scale = LOSS_SCALE if precision == "fp16" else 1.0
    items = max(1, labelled(labels.cpu()))
    norms: list[Tensor] = []

    def measure(parameter: Tensor) -> None:
        if parameter.grad is not None:
            norms.append(torch.linalg.vector_norm(parameter.grad))

    hooks = [parameter.register_post_accumulate_grad_hook(measure) for parameter in trained(trainer.model)]
    try:
        with gradients_aside(trainer.model), float32_products(precision == "tf32"):
            synchronize(device)
            began = time.perf_counter()
            with autocast(precision if precision in DTYPES and precision != "fp32" else None, device):
                loss = trainer.loss(inputs, labels, items=items, **more)
            (loss * scale).backward()
            synchronize(device)
            seconds = time.perf_counter() - began
            norm = torch.linalg.vector_norm(torch.stack(norms).float()) / scale if norms else torch.zeros(())
            return Trial(loss.item(), norm.item(), seconds)
    finally:
        for hook in hooks:
            hook.remove()


def micro_batches(config: LoopConfig, processes: int) -> int:
    """Return the number of micro-batches that each process trains in the run."""
    return config.steps * config.accumulate // processes
