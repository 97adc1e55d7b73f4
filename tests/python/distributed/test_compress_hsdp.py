"""Test gradients that "hsdp" compresses between machines: four processes as two machines of two (CPU, Gloo)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shoestring
from processes import assert_replicated, run, whole
from shoestring.distributed import compress as hooks
from shoestring.ops import compressed_gradient_bytes
from shoestring.optim import AdamW, Muon
from shoestring.optim.sharded import local

BLOCKS = {8: 256, 4: 128, 1: 256}


class Net(nn.Module):
    """A model of three units of ``fully_shard``, whose rows two ranks cannot share evenly. Forward may leave out blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(32, 65)
        self.blocks = nn.ModuleList(nn.Linear(65, 65) for _ in range(2))

    def forward(self, x: Tensor, blocks: int = 2) -> Tensor:
        x = self.first(x).tanh()
        for block in self.blocks[:blocks]:
            x = x + block(x)
        return x


def loss_of(net: nn.Module, step: int, rank: int, **options: Any) -> Tensor:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + rank))
    return net(x, **options).square().mean()


def prepared(compress: str | None) -> tuple[Any, Any, list[Any]]:
    """Return a net in four processes, its report, and its Compressor."""
    made: list[Any] = []
    original = hooks.compressor

    def kept(*arguments: Any) -> Any:
        made.append(original(*arguments))
        return made[-1]

    hooks.compressor = kept
    net = Net()
    report = shoestring.parallelize(net, "hsdp", mesh=(2, 2), compress=compress)
    hooks.compressor = original
    return net, report, made


def flat_gradients(unit: Any) -> tuple[Tensor, Tensor]:
    """Return this rank's gradients of a unit as FSDP2 averages them, with padding, and a mask without it."""
    values, masks = [], []
    for sharded in unit._get_fsdp_state()._fsdp_param_group.fsdp_params:
        p = sharded.sharded_param
        own = local(p.grad).detach().double().flatten()
        size = math.ceil(p.shape[0] / 2) * (p.numel() // p.shape[0])
        values.append(torch.cat([own, own.new_zeros(size - own.numel())]))
        masks.append(torch.arange(size) < own.numel())
    return torch.cat(values), torch.cat(masks)


def _adds_up(rank: int, bits: int) -> None:
    """The sum of what a rank receives and of what the codes have left out is the mean of all gradients."""
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    net, report, [core] = prepared(f"{bits}bit")
    plain, plain_report, none = prepared(None)
    assert not none
    units = [*net.blocks, net]
    loss_of(net, 0, rank).backward()
    sizes = [flat_gradients(unit)[0].numel() for unit in units]
    core.reset()
    given = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    received = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    steps, largest, before = 8, 0.0, core.sent_bytes()
    for step in range(steps):
        for m in (net, plain):
            m.zero_grad()
        with report.no_sync():  # sends nothing
            sent = core.sent_bytes()
            loss_of(net, 50 + step, rank).backward()
            assert core.sent_bytes() == sent
        loss_of(net, step, rank).backward()
        with plain_report.no_sync():
            loss_of(plain, 50 + step, rank).backward()
        loss_of(plain, step, rank).backward()
        for number, (unit, other) in enumerate(zip(units, [*plain.blocks, plain], strict=True)):
            (own, mask), (exact, _) = flat_gradients(unit), flat_gradients(other)
            assert_replicated(own, replicas)
            received[number] += own
            given[number] += exact  # the mean over all ranks, whose mean over replicas is the same
            largest = max(largest, exact.abs().max().item(), own.abs().max().item())
            if step == 0 and bits > 1:  # each of two hops rounds to half a level
                levels = 127 if bits == 8 else 7
                assert 0 < (own - exact).abs().max() <= 1.3 * exact.abs().max() * 2 / levels
    expected_bytes = 0
    for number, size in enumerate(sizes):
        _, mask = flat_gradients(units[number])
        left = core.residual(number).double()
        means = torch.zeros_like(left)
        own = core.residual_of_means(number)
        part = math.ceil(math.ceil(size / BLOCKS[bits]) / 2)
        first = dist.get_rank(replicas) * part * BLOCKS[bits]
        means[first : first + own.numel()] = own.double()
        dist.all_reduce(left, group=replicas)
        dist.all_reduce(means, group=replicas)
        # Sums round to fp32 in each step, in the reduce-scatter, two codecs and the mean.
        found = (received[number] + left / 2 + means)[mask]
        torch.testing.assert_close(
            found, given[number][mask], rtol=0, atol=steps * 8 * 2.0**-24 * max(1, steps * largest)
        )
        expected_bytes += 2 * part * compressed_gradient_bytes(1, bits=bits)  # two hops, to one other replica
    assert core.sent_bytes() - before == steps * expected_bytes
    assert core.residual_bytes() == pytest.approx(report.rank_bytes.residual, rel=0.25)
    report.undo()
    plain_report.undo()


@pytest.mark.parametrize("bits", [8, 4, 1])
@pytest.mark.sample(2)
def test_what_replicas_receive_and_what_is_left_add_up(bits: int, tmp_path: Path) -> None:
    run(4, tmp_path, _adds_up, bits)


def optimizers_of(net: nn.Module) -> list[Any]:
    vectors, matrices = ([p for p in net.parameters() if p.ndim == n] for n in (1, 2))
    return [
        AdamW(vectors, lr=1e-2, max_grad_norm=0.01, state_format="fp32"),
        Muon(matrices, lr=1e-2, state_format="fp32"),  # other blocks of state would have other codes
    ]


def _continues(rank: int, folder: Path) -> None:
    """Norms, matrices that are stepped whole, files and checkpoints are those of "hsdp" without compression."""
    net, report, _ = prepared("4bit")
    assert all(p.device_mesh.ndim == 1 for p in net.parameters())
    alone = Net()
    optimizers, others = optimizers_of(net), optimizers_of(alone)
    for step in range(2):
        loss_of(net, step, rank).backward()
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            assert p.grad is not None
            q.grad = whole(p.grad).clone()
        for optimizer in (*optimizers, *others):
            optimizer.step()
            optimizer.zero_grad()
        assert optimizers[0].grad_norm is not None and others[0].grad_norm is not None
        torch.testing.assert_close(optimizers[0].grad_norm, others[0].grad_norm, rtol=1e-6, atol=0)
        assert_replicated(optimizers[0].grad_norm)
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        assert_replicated(whole(p))
        torch.testing.assert_close(whole(p), q, rtol=0, atol=0 if p.ndim == 2 else 1e-7)
    shoestring.save_training(folder / "run.safetensors", net, optimizers, step=2)
    dcp.save({"model": net.state_dict()}, checkpoint_id=folder / "checkpoint")
    other, other_report, _ = prepared(None)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    again, again_report, _ = prepared("8bit")
    loaded = shoestring.load_training(folder / "run.safetensors", again, optimizers_of(again))
    assert loaded.step == 2
    for p, q, r in zip(net.parameters(), other.parameters(), again.parameters(), strict=True):
        assert torch.equal(local(p), local(q)) and torch.equal(local(p), local(r))
    for each in (report, other_report, again_report):
        each.undo()
    assert [type(p) for p in net.parameters()] == [nn.Parameter] * 6


def test_norms_matrices_and_files(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    run(4, tmp_path, _continues, tmp_path / "files")


def _leaves_out(rank: int) -> None:
    """A block that all ranks leave out keeps its residual, and later steps go on."""
    net, report, [core] = prepared("8bit")
    for step, blocks in enumerate([2, 1, 2]):
        net.zero_grad()
        before = None if step == 0 else [core.residual(number).clone() for number in range(3)]
        loss_of(net, step, rank, blocks=blocks).backward()
        for p in net.parameters():
            if p.grad is not None:
                assert_replicated(whole(p.grad))
        if before is not None:
            changed = [not torch.equal(core.residual(number), before[number]) for number in range(3)]
            assert changed == [True, blocks == 2, True]
    report.undo()


def test_blocks_that_take_no_part(tmp_path: Path) -> None:
    run(4, tmp_path, _leaves_out)


def _refuses(rank: int) -> None:
    def refusal(**options: Any) -> str:
        with pytest.raises(ValueError, match="^parallelize: ") as error:
            shoestring.parallelize(Net(), "hsdp", **options)
        return str(error.value)

    assert refusal(compress="8bit", mesh=(1, 2)) == (
        "parallelize: compress: expected several machines with 'hsdp', which compresses gradients between machines alone, "
        "received '8bit' with a mesh of (1, 2). Pass another mesh, or use 'zero3'."
    )
    assert refusal(mesh=init_device_mesh("cpu", (2, 1))) == (
        "parallelize: mesh: expected names of its two dimensions, received none. Pass mesh_dim_names to init_device_mesh."
    )
    net = Net()  # machines of one process
    report = shoestring.parallelize(net, "hsdp", mesh=(2, 1), compress="8bit")
    loss_of(net, 0, rank).backward()
    for p in net.parameters():
        assert p.grad is not None
        assert_replicated(whole(p.grad))
    report.undo()


def test_meshes(tmp_path: Path) -> None:
    run(2, tmp_path, _refuses)
