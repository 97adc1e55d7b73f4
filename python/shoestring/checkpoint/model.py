"""Define ``checkpoint_model``, which checkpoints named blocks, or as many as a byte budget requires."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.checkpoint.blocks import Treatment, find_blocks, treat
from shoestring.checkpoint.costs import apply_treatments, measure_model
from shoestring.checkpoint.function import Keep
from shoestring.checkpoint.measure import gradients_aside, no_collection, sharded_modules
from shoestring.checkpoint.offload import offload_activations
from shoestring.checkpoint.planner import CheckpointPlan, checkpoint_plan
from shoestring.core.module_argument import check_module

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass
class CheckpointReport:
    """The treatment that ``checkpoint_model`` chose for each block; ``undo`` restores the model.

    Attributes:
        blocks: the name and the treatment of each block, in order: "keep" (nothing is recomputed),
            "recompute", or for example "keep attention" (everything but the results of attention is
            recomputed).
        plan: with a budget, the plan, which predicts the peak memory and the time of one forward and
            backward. Its first and last block stand for the computation before and after the blocks.
        budget: the budget in bytes, if one was given.
        held_bytes: with a budget, the predicted bytes of activations on the device between forward and
            backward.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        >>> report = shoestring.checkpoint_model(model, [torch.nn.Linear])
        >>> report.blocks
        [('0', 'recompute'), ('1', 'recompute')]
        >>> report.undo()
    """

    blocks: list[tuple[str, str]]
    plan: CheckpointPlan | None = None
    budget: int | None = None
    held_bytes: int | None = None
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Remove the checkpoints from the model. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        lines: list[list[str]] = []
        for name, choice in self.blocks:
            if lines and lines[-1][2] == choice:
                lines[-1][1] = name
            else:
                lines.append([name, name, choice])
        text = [
            f"{first if first == last else f'{first} to {last}'}: {choice}" for first, last, choice in lines
        ]
        if self.plan is not None and self.budget is not None:
            text.append(
                f"predicted: {self.plan.peak_bytes / 2**20:.1f} MiB of activations (budget {self.budget / 2**20:.1f}), "
                f"{self.plan.seconds:.3g} s for forward and backward"
            )
        return "\n".join(text)


def checkpoint_model(
    model: nn.Module,
    blocks: Sequence[str | type | nn.Module] | None = None,
    *,
    keep: Sequence[Keep] = (),
    budget: int | str | None = None,
    example: Callable[[], Tensor] | Mapping[str, Any] | Sequence[Any] | None = None,
    offload: offload_activations | None = None,
) -> CheckpointReport:
    """Put blocks of a model under :func:`checkpoint`: all of them, or as many as a byte budget requires.

    With ``budget`` and ``example``, the function measures each kind of block once, alone, with every possible
    treatment of its activations: kept, recomputed, or recomputed except for attention or for matrix products.
    It measures the computation before and after the blocks in one whole step. An exact dynamic program
    (:func:`checkpoint_plan`) then picks the fastest treatments whose peak memory is within the budget.
    Gradients are bitwise the same with every choice of treatments.

    Args:
        model: the model, which is changed in place. Only this instance changes: state dicts, copies and files
            of it do not contain the change. Call ``checkpoint_model`` before ``torch.compile``, and before or
            after DDP and FSDP2's ``fully_shard``. After DDP or FSDP2 and with a budget, all processes have to
            call it. In this case the parameters that FSDP2 gathers around the blocks count as activations, so
            the real peak is lower than the plan says.
        blocks: names with wildcards (``"model.layers.*"``), classes or modules. None takes the outermost
            lists (``nn.ModuleList``, ``nn.Sequential``) of at least two modules of one class, such as a
            transformer's layers.
        keep: without a budget, the operators whose results each block keeps, as in :func:`checkpoint`.
        budget: limit of the peak memory of activations and temporaries in one forward and backward, in bytes
            or for example "6GiB" or "500 MB". It excludes weights, gradients and optimizer state.
        example: the forward of one training step, with a batch as large as in training. Either a function
            that returns the loss, or the model's arguments (a mapping or a sequence). With arguments, the
            loss is the ``.loss`` of the output, or the sum of its first tensor. Gradients, buffers and
            random state are restored afterwards.
        offload: with a budget, lets blocks offload their saved tensors (or, if recomputed, their input) to
            the host or a disk. The bandwidth is measured and enters the plan.

    Returns:
        A report of the treatment of each block.

    Raises:
        ValueError: ``blocks`` matches no module, contains a block inside another, or has a block with a
            checkpoint already; or there is a budget without an example, or with a model on a device whose
            allocator reports nothing to PyTorch's profiler.
        RuntimeError: the budget is too small for any plan; the message gives the smallest possible budget.

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
        >>> batch = torch.randn(64, 16)
        >>> report = shoestring.checkpoint_model(model, [torch.nn.Linear], budget="1MiB", example=[batch])
        >>> report.plan.peak_bytes <= 2**20
        True
        >>> model(batch).sum().backward()
    """
    check_module("checkpoint_model", model)
    modules = find_blocks(model, blocks)
    names = {module: name for name, module in modules.items()}
    if budget is None:
        if example is not None:
            raise ValueError(
                "checkpoint_model: example: expected None without a budget; pass budget=, or leave example "
                "out"
            )
        undo = [treat(module, Treatment(keep)) for module in modules.values()]
        choice = "recompute" if not keep else "recompute but for " + ", ".join(map(str, keep))
        return CheckpointReport([(name, choice) for name in modules], _undo=undo)
    if keep:
        raise ValueError(
            "checkpoint_model: keep: expected no operators with a budget, since the plan chooses them; leave "
            "out keep or budget"
        )
    if example is None:
        raise ValueError(
            "checkpoint_model: example: expected a function that returns the loss of one batch, since a "
            "budget is given; received None"
        )
    try:
        limit = parse_bytes(budget)
    except ValueError as error:
        raise ValueError(f"checkpoint_model: budget: {error}") from None
    for name in sharded_modules(model):
        block = next((block for block in modules if name.startswith(block + ".")), None)
        # Each process makes its own plan. If processes recompute different blocks, collectives inside a block
        # would deadlock, so a block must not contain a module that is sharded separately.
        if block is not None:
            raise ValueError(
                f"checkpoint_model: blocks: {name} is sharded separately inside {block}: make the plan "
                "before fully_shard, or shard blocks as a whole"
            )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with no_collection(), gradients_aside(model):
        costs = measure_model(
            "checkpoint_model", model, list(modules.values()), _step(model, example), device, offload
        )
    row = costs.row()
    most = sum(costs.of_kind[kind]["keep"].held for kind in costs.step.kinds)
    link: dict[str, Any] = offload.measure_link(most) if offload is not None else {}
    plan = checkpoint_plan(row, limit, **link)
    links = [block.choices[choice].link_bytes for block, choice in zip(row, plan.choices, strict=True)]
    undo = apply_treatments(
        costs.step.modules, plan.names[1:-1], plan.pending_bytes[2:], links[1:-1], offload
    )
    held_bytes = sum(block.choices[choice].bytes for block, choice in zip(row, plan.choices, strict=True))
    chosen = [
        (names[module], name) for module, name in zip(costs.step.modules, plan.names[1:-1], strict=True)
    ]
    return CheckpointReport(chosen, plan, limit, held_bytes, undo)


def _step(model: nn.Module, example: Any) -> Callable[[], Tensor]:
    """Return a function that runs the model on the example and returns its loss, or the sum of an output."""
    if callable(example):
        result: Callable[[], Tensor] = example
        return result

    def step() -> Tensor:
        result = model(**example) if isinstance(example, Mapping) else model(*example)
        loss = getattr(result, "loss", None)
        if isinstance(loss, Tensor):
            return loss
        return (
            next(leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor))
            .float()
            .sum()
        )

    return step


def parse_bytes(budget: int | str) -> int:
    """Return the number of bytes that ``budget`` means: a number, or text such as "6GiB" or "500 MB"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B|)\s*", str(budget).upper())
    if not match or isinstance(budget, bool) or not 0 < float(match[1]) * UNITS[match[2]] < 1 << 63:
        raise ValueError(
            f'expected a number of bytes, or a string such as "6GiB" or "500 MB", received {budget!r}'
        )
    return int(float(match[1]) * UNITS[match[2]])
