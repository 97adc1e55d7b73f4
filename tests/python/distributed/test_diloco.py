"""Test LocalSGD and DiLoCo over several processes (CPU, Gloo)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shoestring
from processes import assert_replicated, run, whole
from shoestring.distributed import DiLoCo, LocalSGD
from shoestring.distributed import diloco as module
from shoestring.ops import compressed_gradient_bytes
from shoestring.optim import AdamW, ScheduleFreeAdamW


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 5)).to(dtype)


def loss_of(net: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 32, generator=generator).to(next(net.parameters()).dtype)
    return (net(x) - x[:, :5]).square().mean()


def train(net: nn.Module, opt: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        opt.zero_grad()
        loss_of(net, step, rank).backward()
        opt.step()


def simulate(ranks: int, rounds: int, every: int, lr: float, momentum: float) -> list[Tensor]:
    """Compute DiLoCo of several processes in this one, with PyTorch's SGD as the outer optimizer."""
    outer = [p.detach().clone().requires_grad_() for p in model().parameters()]
    sgd = torch.optim.SGD(outer, lr=lr, momentum=momentum, nesterov=momentum > 0)
    nets = [model() for _ in range(ranks)]
    opts = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
    for r in range(rounds):
        for rank, (net, opt) in enumerate(zip(nets, opts, strict=True)):
            train(net, opt, range(r * every, (r + 1) * every), rank)
        for i, p in enumerate(outer):
            p.grad = torch.stack([p.detach() - list(net.parameters())[i].detach() for net in nets]).mean(0)
        sgd.step()
        with torch.no_grad():
            for net in nets:
                for p, q in zip(net.parameters(), outer, strict=True):
                    p.copy_(q)
    return [p.detach() for p in outer]


def _is_the_formula(rank: int, kind: str, small: bool) -> None:
    if small:
        module.BUCKET = 300  # several buckets
    net = model()
    if rank > 0:  # rank 0's weights count
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    ranks = dist.get_world_size()
    outer: DiLoCo
    if kind == "local":
        outer, expected = LocalSGD(opt, every=3), simulate(ranks, 4, 3, 1.0, 0.0)
    else:
        outer, expected = DiLoCo(opt, every=3), simulate(ranks, 4, 3, 0.7, 0.9)
    averaged = []
    for step in range(12):
        train(net, opt, range(step, step + 1), rank)
        averaged.append(outer.step())
    assert averaged == [False, False, True] * 4 and outer.steps == 12
    for p, q in zip(net.parameters(), expected, strict=True):
        assert_replicated(p.detach())
        torch.testing.assert_close(p.detach(), q, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", ["local", "diloco"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("small", [False, True], ids=["one", "buckets"])
def test_weights_are_those_of_the_formula(kind: str, ranks: int, small: bool, tmp_path: Path) -> None:
    run(ranks, tmp_path, _is_the_formula, kind, small)


def _compresses(rank: int, compress: str, dtype: torch.dtype) -> None:
    module.BUCKET = 300
    ranks = dist.get_world_size()
    nets = {name: model(dtype) for name in ("whole", "few")}
    opts = {name: AdamW(net.parameters(), lr=3e-3, state_format="fp32") for name, net in nets.items()}
    outers = {
        name: DiLoCo(opts[name], every=5, compress=compress if name == "few" else None) for name in nets
    }
    for step in range(40):
        for name, net in nets.items():
            train(net, opts[name], range(step, step + 1), rank)
            outers[name].step()
    losses = {}
    for name, net in nets.items():
        for p in net.parameters():
            assert_replicated(p.detach())
        with torch.no_grad():
            losses[name] = sum(loss_of(net, 1000 + i, 0).item() for i in range(8)) / 8
    untrained = loss_of(model(dtype), 1000, 0).item()
    tolerance = {"8bit": 0.02, "4bit": 0.05}.get(compress, 0.2) * untrained
    assert losses["whole"] < untrained / 2 and abs(losses["few"] - losses["whole"]) < tolerance, losses
    few = outers["few"]
    bits = int(compress[0])
    block = 128 if bits == 4 else 256
    parts = [math.ceil(math.ceil(anchor.numel() / block) / ranks) for anchor in few.state_dict()["anchor"]]
    record = compressed_gradient_bytes(1, bits=bits)
    assert few._core.sent_bytes() == 8 * sum(2 * (ranks - 1) * part * record for part in parts)


@pytest.mark.parametrize("compress", ["8bit", "4bit", "1bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_few_bits(compress: str, dtype: torch.dtype, tmp_path: Path) -> None:
    run(2, tmp_path, _compresses, compress, dtype)


def _resumes(rank: int, folder: Path) -> None:
    def parts() -> tuple[nn.Module, torch.optim.Optimizer, DiLoCo]:
        net = model()
        opt = AdamW(net.parameters(), lr=1e-2)
        return net, opt, DiLoCo(opt, every=4)

    def steps(net: nn.Module, opt: torch.optim.Optimizer, outer: DiLoCo, which: range) -> None:
        for step in which:
            train(net, opt, range(step, step + 1), rank)
            outer.step()

    net, opt, outer = parts()
    steps(net, opt, outer, range(10))
    saved: dict[str, Any] = {"net": net.state_dict(), "opt": opt.state_dict(), "outer": outer.state_dict()}
    torch.save(saved, folder / f"{rank}.pt")
    shoestring.save_training(folder / f"{rank}.run", net, opt, outer=outer)
    steps(net, opt, outer, range(10, 17))
    saved = torch.load(folder / f"{rank}.pt")
    for is_run in (False, True):
        again, opt, outer = parts()
        if is_run:
            shoestring.load_training(folder / f"{rank}.run", again, opt, outer=outer)
        else:
            again.load_state_dict(saved["net"])
            opt.load_state_dict(saved["opt"])
            outer.load_state_dict(saved["outer"])
        steps(again, opt, outer, range(10, 17))
        for p, q in zip(net.parameters(), again.parameters(), strict=True):
            assert torch.equal(p, q)
    plain = LocalSGD(opt)
    with pytest.raises(ValueError, match="LocalSGD: state: momentum: expected buckets of"):
        plain.load_state_dict(saved["outer"])


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    run(2, tmp_path, _resumes, tmp_path / "files")


def _shards(rank: int, compress: str | None, options: dict[str, int]) -> None:
    """Two replicas, each of which two processes share by fully_shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    net = model()
    fully_shard(net, mesh=mesh["shards"])
    opt = AdamW(net.parameters(), lr=3e-3, state_format="fp32")
    outer = DiLoCo(opt, mesh["replicas"].get_group(), every=3, compress=compress, **options)
    untrained = loss_of(net, 1000, 0).item()
    for step in range(30):
        train(net, opt, range(step, step + 1), rank)
        outer.step()
    for anchor in outer.state_dict()["anchor"]:
        assert_replicated(anchor, mesh["replicas"].get_group())
    if not options:
        for p in net.parameters():
            assert_replicated(whole(p.detach()))
    with torch.no_grad():
        assert loss_of(net, 1000, 0).item() < untrained / 2


@pytest.mark.parametrize(
    ("compress", "options"),
    [(None, {}), ("8bit", {"fragments": 2, "overlap": 1})],
    ids=["plain", "streaming"],
)
def test_replicas_of_shards(compress: str | None, options: dict[str, int], tmp_path: Path) -> None:
    run(4, tmp_path, _shards, compress, options)


def _refuses(rank: int) -> None:
    opt = AdamW(model().parameters())

    def refusal(call: Any) -> str:
        with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
            call()
        return str(error.value)

    assert refusal(lambda: DiLoCo(opt, every=0)) == "DiLoCo: every: expected at least 1, received 0"
    assert refusal(lambda: DiLoCo(opt, lr=0)) == "DiLoCo: lr: expected a number above 0, received 0"
    assert refusal(lambda: DiLoCo(opt, momentum=1.0)) == (
        "DiLoCo: momentum: expected a number from 0 to below 1, received 1"
    )
    assert refusal(lambda: LocalSGD(opt, compress="powersgd")) == (
        "LocalSGD: compress: expected None, 8bit, 4bit, 1bit, received 'powersgd'"
    )
    assert refusal(lambda: DiLoCo(ScheduleFreeAdamW(model().parameters()))) == (
        "DiLoCo: optimizer: expected one that keeps no second copy of the weights, received ScheduleFreeAdamW. Use AdamW."
    )
    kept = AdamW(model(torch.bfloat16).parameters(), weight_rounding="remainder")
    assert "received AdamW with weight_rounding=remainder" in refusal(lambda: DiLoCo(kept))
    other = AdamW(nn.Linear(4, 4 + rank).parameters())
    assert refusal(lambda: DiLoCo(other)).startswith(
        "DiLoCo: module: expected the same parameters on all ranks; parameter 0 is parameter 0 [4, 4] Float on rank 0"
    )


def test_errors_say_what_was_expected(tmp_path: Path) -> None:
    run(2, tmp_path, _refuses)
