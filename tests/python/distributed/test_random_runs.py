"""Compare random runs of several processes with one process, bit for bit (CPU, Gloo)."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from processes import run, whole
from shoestring.optim import SGD, AdamW, Lion

STEPS = 4


class Block(nn.Module):
    """Adds products of parameters and given gradients, so that backward computes just these gradients."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes)

    def forward(self, y: Tensor, gradients: dict[str, Tensor]) -> Tensor:
        for number, p in enumerate(self.params):
            y = y + (p * gradients[f"{self.name}.params.{number}"]).sum()
        return y


class Net(nn.Module):
    """Has blocks, and a weight that two of its modules share."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(case["seed"])
        self.blocks = nn.ModuleList(Block(shapes, case["dtype"]) for shapes in case["shapes"])
        for number, block in enumerate(self.blocks):
            block.name = f"blocks.{number}"
        self.first, self.last = nn.Module(), nn.Module()
        self.first.weight = self.last.weight = nn.Parameter(torch.randn(case["tied"]).to(case["dtype"]))
        for name, p in self.named_parameters():
            p.requires_grad_(name not in case["frozen"])

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        g = gradients["first.weight"]
        y = (self.first.weight * g).sum()
        for block in self.blocks:
            y = block(y, gradients)
        # the gradient of a tied weight has two parts
        return y + (self.last.weight * g).sum()


def draw(seed: int) -> dict[str, Any]:
    """Return the choices of a run."""
    draws = random.Random(seed)
    ranks = draws.choice([1, 2, 3, 4])
    strategy = draws.choice(["ddp", "zero1", "zero2", "zero3", "zero3", "hsdp"])
    splits = strategy in ("zero3", "hsdp")
    state = draws.choice(["8bit", "4bit", "fp32"])
    dtype = draws.choice([torch.float32, torch.bfloat16])
    # Blocks of state in few bits begin where shards begin only if rows are whole blocks.
    columns = [256, 512] if splits and state != "fp32" else [1, 3, 64, 256, 300]
    blocks = draws.choice([0, 1, 3])
    alike = draws.randrange(1, 4)

    def shape() -> tuple[int, ...]:
        return (draws.randrange(1, 9), draws.choice(columns))

    micro = draws.choice([1, 1, 2, 3])
    options: dict[str, Any] = {
        "state_format": state,
        "min_quantize_size": draws.choice([0, 700]),
        "weight_rounding": draws.choice(["nearest", "remainder"]),
        # A norm over parts is rounded otherwise, but no gradient is that large.
        "max_grad_norm": draws.choice([None, 1e9]),
    }
    offload = None
    if splits:
        offload = draws.choice([None, "nvme:"])
        options["step_in_backward"] = micro == 1 and draws.random() < 0.5
    if strategy != "ddp":
        options["offload"] = draws.choice([None, "stream", "nvme:"])
    case = {
        "seed": seed,
        "ranks": ranks,
        "strategy": strategy,
        "mesh": draws.choice([(n, ranks // n) for n in (1, 2, 3, 4) if ranks % n == 0])
        if strategy == "hsdp"
        else None,
        "dtype": dtype,
        "shapes": [[shape() for _ in range(alike)] for _ in range(blocks)],
        "tied": shape(),
        "micro": micro,
        # Without no_sync, DistributedDataParallel divides sums, which are no multiples of 3, a second time.
        "waits": draws.random() < 0.5 or (ranks == 3 and strategy in ("ddp", "zero1")),
        "optimizer": draws.choice([AdamW, Lion, SGD]),
        "options": options,
        "offload": offload,
    }
    names = [f"blocks.{b}.params.{i}" for b in range(blocks) for i in range(alike)]
    case["frozen"] = {name for name in names if draws.random() < 0.2}
    return case


def gradients_of(case: dict[str, Any], net: nn.Module, step: int, micro: int, rank: int) -> dict[str, Tensor]:
    """Return integers, of which all sums are exact; the factor cancels the division by the number of ranks."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    found = {}
    for name, p in net.named_parameters():
        found[name] = torch.randint(-3, 4, p.shape, generator=generator).to(case["dtype"]) * case["ranks"]
    return found


def made(case: dict[str, Any], net: nn.Module, **changes: Any) -> torch.optim.Optimizer:
    more = {"momentum": 0.9} if case["optimizer"] is SGD else {}
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = case["optimizer"](
        trained, lr=1e-2, **more, **case["options"] | changes
    )
    return optimizer


def _run(rank: int, case: dict[str, Any], folder: str) -> None:
    def place(value: str | None) -> str | None:
        return f"nvme:{folder}" if value == "nvme:" else value

    net, alone = Net(case), Net(case)
    report = shoestring.parallelize(net, case["strategy"], mesh=case["mesh"], offload=place(case["offload"]))
    changes = {"offload": place(case["options"].get("offload"))}
    ours = made(case, net, **changes)
    theirs = made(case, alone, offload=None, step_in_backward=False)
    for step in range(STEPS):
        for micro in range(case["micro"]):
            waits = case["waits"] and micro + 1 < case["micro"]
            with report.no_sync() if waits else contextlib.nullcontext():
                net(gradients_of(case, alone, step, micro, rank)).backward()
            for other in range(case["ranks"]):
                given = gradients_of(case, alone, step, micro, other)
                (alone(given) / case["ranks"]).backward()
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    for (name, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(whole(p), q), name
    report.undo()
    for (name, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("number", range(60))
@pytest.mark.sample(5)
def test_random_runs_are_those_of_one_process(number: int, seed: int, tmp_path: Path) -> None:
    case = draw(1000 * seed + number)
    print(case)
    run(case["ranks"], tmp_path, _run, case, str(tmp_path))
