"""Test optimizers that need whole parameters, with parameters that processes split by rows (CPU, Gloo)."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from processes import run, whole
from shoestring.optim import APOLLO, CAME, LAMB, Adafactor, APOLLOMini, GaLore, Muon
from shoestring.optim.base import LowMemoryOptimizer

# Rows are whole blocks of 256 elements of state. Of four processes, one has no row of the second matrix, and three
# have none of the third.
SHAPES = ((96, 256), (3, 512), (1, 256), (130, 256), (256, 512))
# The all-reduces of three steps.
REDUCTIONS: dict[type, int] = {Muon: 0, LAMB: 3, Adafactor: 6, CAME: 9, APOLLO: 3, APOLLOMini: 3, GaLore: 5}
# Adafactor and CAME take vectors, whose squares are split, and batches of matrices, too.
MORE_SHAPES = (*SHAPES, (3072,), (256,), (6, 4, 64), (5, 3, 16, 16), (0, 256))


def sent_elements(events: Any) -> list[int]:
    """Return the elements of each all-to-all, in pairs: parts for the owners, and results of the own matrix."""
    name = "_c10d_functional::all_to_all_single"
    return [math.prod(event.input_shapes[0]) for event in events if event.name == name]


def _steps(rank: int, world: int, kind: type, options: dict[str, Any], replicas: int) -> None:
    generator = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if "weight_rounding" in options else torch.float32
    has_exact_sums = "d" in options
    # Weights that are this small do not change the step size of Adafactor, so their norm does not count.
    scale = 1e-5 if has_exact_sums else 1
    shapes = SHAPES if kind is Muon else MORE_SHAPES
    values = [(scale * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]

    def gradient(shape: torch.Size) -> Tensor:
        if has_exact_sums:  # of squares
            return torch.randint(-3, 4, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)

    mesh: DeviceMesh = init_device_mesh("cpu", (world,) if replicas == 1 else (replicas, world // replicas))
    placements = [Shard(0)] if replicas == 1 else [Replicate(), Shard(0)]

    def split(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, placements)

    parts = [Parameter(split(v)) for v in values]
    alone = [Parameter(v.clone()) for v in values]
    ours, other = (kind(params, lr=1e-2, **options) for params in (parts, alone))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        for _ in range(3):
            for p, q in zip(parts, alone, strict=True):
                q.grad = gradient(q.shape)
                p.grad = split(q.grad)
            ours.step()
            other.step()
    for p, q in zip(parts, alone, strict=True):
        if kind is Muon or has_exact_sums:
            assert torch.equal(whole(p), q)
        elif q.numel() > 0:
            # Sums are those of one process in another order, so each of the three steps may round otherwise.
            rounding = 3 * torch.finfo(q.dtype).eps * q.abs().max().item()
            torch.testing.assert_close(whole(p), q, rtol=1e-5, atol=rounding)
    reductions = sum(event.name == "_c10d_functional::all_reduce" for event in profile.events())
    expected = REDUCTIONS[kind] * (1 + ("min_quantize_size" in options))
    if options.get("max_grad_norm") is not None:
        expected += 3
    assert reductions == expected
    if kind is Muon:
        # A process sends each of its elements once, and each element of a matrix that it owns once: at most 8 bytes
        # an element of the momentum in fp32, twice what it takes.
        elements = sent_elements(profile.events())
        ranks = world // replicas
        assert sum(elements[::2]) == 3 * sum(p.to_local().numel() for p in parts)
        most = max(math.prod(shape) for shape in SHAPES)
        assert sum(elements[1::2]) <= 3 * max(most, 1.4 * sum(v.numel() for v in values) / ranks)


@pytest.mark.parametrize(("world", "replicas"), [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Muon, {}),
        (Muon, dict(state_format="4bit", weight_decay=0.1, nesterov=False)),
        (Muon, dict(weight_rounding="remainder", max_grad_norm=None)),
        (LAMB, dict(state_format="fp32")),
        (Adafactor, dict(state_format="fp32", weight_decay=0.1)),
        (Adafactor, dict(state_format="8bit", beta1=0.9, d=4.0, min_quantize_size=257)),
        (
            Adafactor,
            dict(state_format="4bit", beta1=0.9, d=4.0, min_quantize_size=257, weight_rounding="remainder"),
        ),
        (CAME, dict(state_format="fp32", weight_decay=0.1)),
        # GaLore makes projections in the first and the third step. eps keeps steps of AdamW continuous.
        (GaLore, dict(state_format="fp32", rank=4, update_proj_gap=2, weight_decay=0.1, eps=0.1)),
        (
            GaLore,
            dict(
                state_format="fp32", rank=8, projection="left", eps=0.1, max_grad_norm=1.0, update_proj_gap=2
            ),
        ),
        (APOLLO, dict(state_format="fp32", rank=4, update_proj_gap=2, weight_decay=0.1)),
        (APOLLO, dict(state_format="fp32", rank=4, max_grad_norm=1.0)),
        (APOLLOMini, dict(state_format="fp32")),
    ],
)
@pytest.mark.sample(7)
def test_steps_are_those_of_one_process(
    world: int, replicas: int, kind: type, options: dict[str, Any], tmp_path: Path
) -> None:
    """Each matrix is whole on its owner for a moment, so Muon's bits do not depend on the processes.

    Those of Adafactor do not either where sums of squares are exact, and no update is limited.
    """
    run(world, tmp_path, _steps, world, kind, options, replicas)


def _steps_in_backward(rank: int) -> None:
    torch.manual_seed(1)
    nets = [nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3))) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    for layer in nets[0]:
        fully_shard(layer)
    for net in nets:
        optimizer = Muon(net.parameters(), lr=1e-2, step_in_backward=True)
        for step in range(3):
            x = torch.randn(8, 256, generator=torch.Generator().manual_seed(step))
            net(x).square().mean().backward()
            optimizer.step()
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(whole(p), q)


def test_steps_within_backward(tmp_path: Path) -> None:
    run(2, tmp_path, _steps_in_backward)


def _refuses(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    param = Parameter(distribute_tensor(torch.ones(4, 8), mesh, [Shard(1)]))
    rows = Parameter(distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)]))
    for kind in (Muon, LAMB, Adafactor, CAME, GaLore, APOLLO, APOLLOMini):
        expected = (
            f"{kind.__name__}: params[0]: expected a DTensor that is split by rows over one dimension of its mesh, as "
            "fully_shard does, received placements (Shard(dim=1),)"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            kind([param])
        for offload in ("cpu", "stream") if issubclass(kind, LowMemoryOptimizer) else ():
            expected = (
                f"{kind.__name__}: offload: expected none where processes have split the parameters, since the rule needs "
                f'whole ones, received "{offload}"; use AdamW, Lion or SGD'
            )
            with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
                kind([rows], offload=offload)


def test_columns_and_offload_are_refused(tmp_path: Path) -> None:
    run(2, tmp_path, _refuses)
