"""Compute the figures of a finished run: losses, speed, and the memory of each part."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoestring.core.errors import InputError
from shoestring.optim import state_sizes
from shoestring.training import memory
from shoestring.training.estimate import formulas
from shoestring.training.optimizers import trained
from shoestring.training.report.metrics import read_metrics
from shoestring.training.run.device import weight_dtype

if TYPE_CHECKING:
    from shoestring.training.run.loop import Trainer

LAST = 10  # number of last steps over which the final training loss is averaged, since one step is noisy


@dataclass
class Part:
    """One bar of the memory chart: a part of the process's memory, with its computed and measured bytes."""

    name: str
    formula: str
    expected: int | None  # bytes that the formula gives, or None if there is no formula
    measured: int  # bytes that were measured


def summarise(trainer: Trainer, baseline: int, peak: int, seconds: float) -> dict[str, Any]:
    """Return the content of summary.json, with memory in bytes and time in seconds.

    ``tokens_per_second`` is the median over steps, so evaluations, checkpoints and pauses do not affect it.
    """
    run, log = trainer.run, trainer.run.folder / "metrics.jsonl"
    rows = read_metrics(log)
    if not rows:
        raise InputError(f"{log}: holds no step; the model is saved, the report is not written")
    # Leave the first step out of the timing, since it also warms up threads and caches.
    speeds = [row["tokens_per_second"] for row in rows[1:] or rows]
    return {
        "baseline": run.config.baseline,
        "steps": run.config.steps,
        "trained_parameters": sum(p.numel() for p in trained(trainer.model)),
        "train_loss": statistics.fmean(row["loss"] for row in rows[-LAST:]),
        "val_loss": trainer.val_loss,
        "best_val_loss": trainer.best_val_loss,
        "tokens": sum(row["tokens"] for row in rows),
        "tokens_per_second": statistics.median(speeds),
        "seconds": seconds,
        "data_seconds": sum(row.get("data_seconds", 0) for row in rows),
        "device": str(run.device),
        "precision": run.config.precision,
        "peak_memory": max([peak, *(row.get("device_peak", row["peak"]) for row in rows)]),
        "host_peak_memory": max(row["peak"] for row in rows),
        **_device(rows),
        "threads": torch.get_num_threads(),
        "memory": [asdict(part) for part in memory_parts(trainer, baseline, peak)],
    }


def _device(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return what the steps measured of an accelerator: its reserved memory, and its mean utilisation."""
    measured: dict[str, float] = {}
    reserved = [row["device_reserved"] for row in rows if "device_reserved" in row]
    if reserved:
        measured["device_reserved"] = max(reserved)
    busy = [row["device_utilization"] for row in rows if "device_utilization" in row]
    if busy:
        measured["device_utilization"] = statistics.fmean(busy)
    return measured


def memory_parts(trainer: Trainer, baseline: int, peak: int) -> list[Part]:
    """Split the peak memory of this process into parts, each with its formula and its measured bytes."""
    config, model = trainer.run.config, trainer.model
    # PyTorch's AdamW if config.baseline is set, else optimizers of shoestring
    optimizers: list[Any] = trainer.optimizers
    params = trained(model)
    count = sum(p.numel() for p in params)
    weights, expected_weights, weights_formula = _weights(model)
    if trainer.offloaded is not None:
        figures = trainer.offloaded.statistics()
        away = figures["away"] - figures["device"]
        weights, expected_weights = weights - away, expected_weights - away
        where = "host memory" if config.weights_place == "cpu" else "a file"
        weights_formula += f": {away / 1e6:.2f} MB of them in {where}"
    if config.baseline:
        # PyTorch's AdamW keeps two fp32 moments per trained element, and a 4-byte step counter per tensor.
        optimizer_formula, expected_optimizer = "8 B x trained", 8 * count + 4 * len(params)
    else:
        # By default, AdamW keeps two 8-bit codes per element, and two fp32 scales per block of 256.
        expected_optimizer = sum(
            sum(state_sizes.optimizer_state(each).bytes().values()) for each in optimizers
        )
        size = f"{expected_optimizer / max(1, count):.3g}"
        if config.optimizer == "adamw" and config.weights != "bf16-remainder":
            size = {"fp32": "8", "bf16": "4", "8bit": "(2 + 8/256)"}.get(config.optimizer_state, size)
        optimizer_formula = f"{size} B x trained, tensors in blocks of 256"
    measured = sum(memory.optimizer_bytes(each) for each in optimizers)
    on_host = config.place is not None and trainer.run.device.type != "cpu"
    if on_host:
        optimizer_formula += ", in host memory"
    in_file = config.place not in (None, "cpu", "stream")
    if in_file:
        optimizer_formula += f": {expected_optimizer / 1e6:.2f} MB in a file"
    if on_host or in_file:
        expected_optimizer = measured = 0
    optimizer = [Part("optimizer", optimizer_formula, expected_optimizer, measured)]
    if config.place == "cpu" and not on_host:
        copies, host_bytes = sum(2 * p.nbytes for p in params), sum(each.host_bytes for each in optimizers)
        optimizer.append(
            Part("offload", "trained weights and their gradients once more, for the CPU", copies, host_bytes)
        )
    width = weight_dtype(config.weights).itemsize  # bytes of a trained weight, and of its gradient
    activations, activations_formula = _activations(trainer)
    parts = [
        Part("program", "Python, PyTorch, libraries", None, baseline),
        Part("weights", weights_formula, expected_weights, weights),
        Part("gradients", f"{width:g} B x trained", width * count, formulas.tensor_bytes(params)),
        *optimizer,
        Part("activations", activations_formula, activations, trainer.saved_activations),
    ]
    tokens = config.batch_size * config.seq_len
    vocab = model.get_output_embeddings().weight.shape[0]
    if config.baseline:
        formula, expected = f"logits and gradient, 2 x {tokens} x {vocab} x 4 B", 8 * tokens * vocab
    else:
        formula, expected = "loss workspace", config.workspace_mb << 20
    formula += " (the backward pass and the allocator come on top)"
    rest = peak - sum(part.measured for part in parts)
    return [*parts, Part("buffers", formula, expected, max(0, rest))]


def _weights(model: nn.Module) -> tuple[int, int, str]:
    """Return the measured bytes of the weights, the bytes that the formula gives, and the formula.

    A 4-bit element takes 0.5 bytes, plus 1/64 of the fp32 scale of its block, or of an 8-bit scale whose fp32 scale serves
    256 blocks. An int8 element takes 1 byte, and each int8 row has a 4-byte scale.
    """
    counts = Counter[float]()  # bytes per element of a weight -> number of such elements
    for parameter in model.parameters():
        # the quantisation state of a bitsandbytes weight, or None
        state = getattr(parameter, "quant_state", None)
        packed = state is not None or hasattr(parameter, "__tensor_flatten__")
        nested = getattr(state if state is not None else parameter, "nested", None)
        is_nested = isinstance(nested, Tensor) or bool(nested)
        scales = 1 / 64 + 4 / (64 * 256) if is_nested else 4 / 64
        size = 0.5 + scales if packed else parameter.element_size()
        if isinstance(nested, Tensor):  # the table of scales
            counts[4] += nested.numel() - parameter.numel() // (64 * 256)
        if getattr(parameter, "quant_type", None) == "int8":
            size = 1
            counts[4] += parameter.shape[0]
        counts[size] += parameter.numel() if state is None else math.prod(state.shape)
    formula = " + ".join(f"{size:g} B x {count / 1e6:.2f} M" for size, count in counts.items())
    return memory.weight_bytes(model), int(sum(size * count for size, count in counts.items())), formula


def _activations(trainer: Trainer) -> tuple[int | None, str]:
    """Return the bytes of activations that a formula expects, or None, and the formula."""
    config = trainer.run.config
    if config.activations == "offload" and config.memory_budget is None:
        return trainer.saved_activations, "copied to host memory"
    if trainer.run.plan is not None:
        return None, "as planned for --device-memory"
    if trainer.planned_activations is not None:
        return trainer.planned_activations, "as planned under --memory-budget"
    tokens = config.batch_size * config.seq_len
    formula = formulas.activations(
        trainer.model,
        tokens,
        baseline=config.baseline,
        gradient_checkpointing=config.activations == "recompute",
        size=weight_dtype(config.weights).itemsize,
    )
    return (None, "not known for this architecture") if formula is None else (formula.bytes, formula.formula)
