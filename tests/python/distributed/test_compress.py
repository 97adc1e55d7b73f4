"""Test compressed gradients over several processes (CPU, Gloo)."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shoestring
from processes import assert_replicated, run, whole
from shoestring.distributed import shard
from shoestring.distributed.compress import BITS, compressor
from shoestring.ops import compressed_gradient_bytes
from shoestring.optim import SGD, AdamW, Lion

COMPRESS = list(BITS)
BLOCKS = {8: 256, 4: 128, 1: 256}


def reduce_all(core: Any, buckets: list[Tensor], params: list[list[Tensor]]) -> None:
    futures = [
        core.all_reduce(bucket, own, i, i == len(buckets) - 1)
        for i, (bucket, own) in enumerate(zip(buckets, params, strict=True))
    ]
    for future in futures:
        future.wait()


def _adds_up(rank: int, bits: int, dtype: torch.dtype) -> None:
    ranks = dist.get_world_size()
    assert dist.group.WORLD is not None
    core = compressor(dist.group.WORLD, f"{bits}bit")
    sizes = [[5], [300, 7, 1000], [1], [128 * 257], [3]]
    params = [[torch.empty(n) for n in bucket] for bucket in sizes]
    received = [torch.zeros(sum(bucket), dtype=torch.float64) for bucket in sizes]
    given = [torch.zeros(sum(bucket), dtype=torch.float64) for bucket in sizes]
    steps = 12
    for step in range(steps):
        buckets = []
        for i, bucket in enumerate(sizes):
            generator = torch.Generator().manual_seed(100 * step + 10 * rank + i)
            gradient = torch.randint(-8, 9, (sum(bucket),), generator=generator).div(64).to(dtype)
            given[i] += gradient.double()
            buckets.append(gradient)
        reduce_all(core, buckets, params)
        for i, bucket in enumerate(buckets):
            assert_replicated(bucket)
            received[i] += bucket.double()
    sent = 0
    for i, bucket in enumerate(sizes):
        left = torch.cat([core.residual_of(p) for p in params[i]]).double()
        means = torch.zeros_like(left)
        own = core.residual_of_means(i)
        records = -(-sum(bucket) // BLOCKS[bits])
        part = -(-records // ranks)
        first = rank * part * BLOCKS[bits]
        means[first : first + own.numel()] = own.double()
        both = given[i] - left
        dist.all_reduce(both)
        dist.all_reduce(means)
        # All ranks receive the mean of the compressed gradients, minus the error of the compressed means. In each step,
        # sums and means below 1 round to fp32 with an error of 2^-24. Results round to the dtype of the gradients.
        rounding = steps * (ranks + 3) * 2.0**-24 + steps * 0.5 * torch.finfo(dtype).eps * (
            dtype != torch.float32
        )
        torch.testing.assert_close(received[i], both / ranks - means, rtol=0, atol=rounding)
        sent += 2 * (ranks - 1) * part * compressed_gradient_bytes(1, bits=bits)
    assert core.sent_bytes() == steps * sent
    core.reset()
    assert all((core.residual_of(p) == 0).all() for bucket in params for p in bucket)


@pytest.mark.parametrize("bits", [8, 4, 1])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.sample(6)
def test_what_all_ranks_receive_and_what_is_left_add_up(
    bits: int, ranks: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Over many steps, nothing is lost but rounding, all ranks have equal bits, and bytes are those of the formula."""
    run(ranks, tmp_path, _adds_up, bits, dtype)


def _residuals_move(rank: int) -> None:
    """DistributedDataParallel makes new buckets after its first step. Residuals stay with their parameters."""
    assert dist.group.WORLD is not None
    core = compressor(dist.group.WORLD, "4bit")
    a, b, c = (torch.empty(n) for n in (300, 500, 200))
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    reduce_all(core, [gradient[:800].clone(), gradient[800:].clone()], [[a, b], [c]])
    before = {p: core.residual_of(p).clone() for p in (a, b, c)}
    assert all(residual.abs().max() > 0 for residual in before.values())
    received = torch.zeros(1000)
    reduce_all(core, [received], [[c, b, a]])
    # Zeros were given, so what arrives comes from the old residuals.
    moved = torch.cat([before[p] - core.residual_of(p) for p in (c, b, a)])
    dist.all_reduce(moved)
    assert received.abs().max() > 0.02
    assert (received - moved / 2).abs().max() <= received.abs().max() / 12  # the codes of the means
    assert core.residual_bytes() == 4 * (1000 + core.residual_of_means(0).numel())


def test_residuals_follow_parameters_to_other_buckets(tmp_path: Path) -> None:
    run(2, tmp_path, _residuals_move)


def _sparse_links(rank: int, bits: int) -> None:
    """A reduce-scatter gives each rank the mean of its part, in one hop."""
    ranks = dist.get_world_size()
    assert dist.group.WORLD is not None
    core = compressor(dist.group.WORLD, f"{bits}bit")
    size, steps = 1001, 10
    received = torch.zeros(size, dtype=torch.float64)
    given = torch.zeros(ranks * size, dtype=torch.float64)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        gradient = torch.randint(-8, 9, (ranks * size,), generator=generator) / 64
        out = torch.empty(size)
        core.reduce_scatter(out, gradient, 5)
        given += gradient.double()
        received += out.double()
    both = given - core.residual(5).double()
    dist.all_reduce(both)
    expected = both.view(ranks, size)[rank] / ranks
    torch.testing.assert_close(received, expected, rtol=0, atol=steps * (ranks + 2) * 2.0**-24)
    assert core.sent_bytes() == steps * (ranks - 1) * compressed_gradient_bytes(size, bits=bits)


@pytest.mark.parametrize("bits", [8, 4, 1])
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_hop_adds_up(bits: int, ranks: int, tmp_path: Path) -> None:
    run(ranks, tmp_path, _sparse_links, bits)


# ---- parallelize --------------------------------------------------------------------------------------------------


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    blocks = nn.Sequential(*(nn.Linear(96, 96) for _ in range(3)))
    return nn.Sequential(nn.Linear(32, 96), nn.Tanh(), blocks, nn.Linear(96, 5, bias=False)).to(dtype)


def loss_of(net: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 32, generator=generator).to(next(net.parameters()).dtype)
    return (net(x) - x[:, :5]).square().mean()


def mesh_of(strategy: str) -> tuple[int, int] | None:
    return (2, dist.get_world_size() // 2) if strategy == "hsdp" else None


def _trains(rank: int, strategy: str, compress: str, dtype: torch.dtype) -> None:
    ranks = dist.get_world_size()
    net, alone = model(dtype), model(dtype)
    report = shoestring.parallelize(net, strategy, mesh=mesh_of(strategy), compress=compress)
    assert report.compress == compress and f"sent by {compress}" in str(report)
    opt, other = (AdamW(m.parameters(), lr=1e-3, state_format="fp32") for m in (net, alone))
    with torch.no_grad():
        untrained = loss_of(net, 30, rank).item()
    for step in range(30):
        opt.zero_grad()
        other.zero_grad()
        if step % 3 == 0:  # two micro-batches, of which the first sends nothing
            with report.no_sync():
                loss_of(net, 1000 + step, rank).backward()
            for r in range(ranks):
                (loss_of(alone, 1000 + step, r) / ranks).backward()
        loss_of(net, step, rank).backward()
        expected = sum(loss_of(alone, step, r) / ranks for r in range(ranks))
        assert isinstance(expected, Tensor)
        expected.backward()
        opt.step()
        other.step()
    for p in net.parameters():
        assert_replicated(whole(p))
    with torch.no_grad():
        found = sum(loss_of(net, 30, r).item() / ranks for r in range(ranks))
        expected_loss = sum(loss_of(alone, 30, r).item() / ranks for r in range(ranks))
    tolerance = {"8bit": 0.01, "4bit": 0.05}.get(compress, 0.2) * (untrained - expected_loss)
    assert abs(found - expected_loss) <= tolerance and expected_loss < untrained / 2, (found, expected_loss)
    assert any(
        not torch.equal(whole(p), q) for p, q in zip(net.parameters(), alone.parameters(), strict=True)
    )
    report.undo()
    for name, p in net.named_parameters():
        assert type(p) is nn.Parameter and dict(model().named_parameters())[name].shape == p.shape
    loss_of(net, 0, rank).backward()  # nothing is sent


CASES = [
    *((strategy, compress) for strategy in ("ddp", "zero1", "zero2", "zero3") for compress in COMPRESS),
    ("ddp", "powersgd"),
    ("zero1", "powersgd"),
]


@pytest.mark.parametrize(("strategy", "compress"), CASES)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.sample(14)
def test_training(strategy: str, compress: str, ranks: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """All ranks have the same bits, and losses are near those of whole gradients."""
    if dtype == torch.bfloat16 and compress == "powersgd":
        pytest.skip("PyTorch's PowerSGD orthogonalises in the dtype of the gradients")
    run(ranks, tmp_path, _trains, strategy, compress, dtype)


@pytest.mark.parametrize("compress", COMPRESS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.sample(1)
def test_training_of_two_machines(compress: str, dtype: torch.dtype, tmp_path: Path) -> None:
    run(4, tmp_path, _trains, "hsdp", compress, dtype)


def _steps_of_sgd(rank: int, strategy: str) -> None:
    """Gradients have the size of whole ones, which AdamW does not show."""
    ranks = dist.get_world_size()
    net, alone = model(), model()
    report = shoestring.parallelize(net, strategy, mesh=mesh_of(strategy), compress="8bit")
    opt, other = (SGD(m.parameters(), lr=0.1, state_format="fp32") for m in (net, alone))
    for step in range(3):
        loss_of(net, step, rank).backward()
        for r in range(ranks):
            (loss_of(alone, step, r) / ranks).backward()
        opt.step()
        other.step()
        opt.zero_grad()
        other.zero_grad()
    moved = error = 0.0
    for p, q, first in zip(net.parameters(), alone.parameters(), model().parameters(), strict=True):
        moved += (q - first).square().sum().item()
        error += (whole(p) - q).square().sum().item()
    assert 0 < error < 0.02**2 * moved
    report.undo()


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "hsdp"])
@pytest.mark.sample(4)
def test_steps_of_sgd(strategy: str, tmp_path: Path) -> None:
    run(4 if strategy == "hsdp" else 3, tmp_path, _steps_of_sgd, strategy)


def _residual_bytes(rank: int, strategy: str) -> None:
    allocated, expected = [], []
    with shoestring.host_allocator() as allocator:
        for compress in (None, "4bit"):
            gc.collect()
            before = allocator.stats().allocated
            blocks = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
            net = nn.Sequential(nn.Linear(512, 512, bias=False), blocks)
            report = shoestring.parallelize(net, strategy, mesh=mesh_of(strategy), compress=compress)
            opt = AdamW(net.parameters())
            for _ in range(3):
                opt.zero_grad()
                net(torch.ones(2, 512)).square().mean().backward()
                opt.step()
            opt.zero_grad()
            gc.collect()
            allocated.append(allocator.stats().allocated - before)
            expected.append(report.rank_bytes.residual)
            report.undo()
            del net, blocks, opt, report
    elements = 5 * 512 * 512 // (2 if strategy == "hsdp" else 1)
    means = elements // 2 if strategy in ("ddp", "zero1", "hsdp") else 0
    assert expected == [0, 4 * (elements + means)]
    assert abs(allocated[1] - allocated[0] - expected[1]) <= 0.02 * expected[1], (allocated, expected)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "hsdp"])
@pytest.mark.sample(4)
def test_bytes_of_residuals(strategy: str, tmp_path: Path) -> None:
    run(4 if strategy == "hsdp" else 2, tmp_path, _residual_bytes, strategy)


def _overflows(rank: int, strategy: str) -> None:
    """A step with infinite gradients shows them on all ranks, and later steps are finite."""
    net = model()
    report = shoestring.parallelize(net, strategy, compress="8bit")
    opt = SGD(net.parameters(), lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for step in range(6):
        opt.zero_grad()
        loss = loss_of(net, step, rank)
        if step == 3 and rank == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        finite = [
            bool(p.grad.isfinite().all()) for p in map(_local_gradient, net.parameters()) if p.grad.numel()
        ]
        assert all(finite) == (step != 3), (step, finite)
        before = [whole(p).clone() for p in net.parameters()]
        scaler.step(opt)
        scaler.update()
        changed = any(not torch.equal(whole(p), q) for p, q in zip(net.parameters(), before, strict=True))
        assert changed == (step != 3)
    assert scaler.get_scale() == 2.0**9
    for p in net.parameters():
        assert_replicated(whole(p))
        assert whole(p).isfinite().all()
    report.undo()


class _Grad:
    def __init__(self, grad: Tensor) -> None:
        self.grad = grad


def _local_gradient(p: Tensor) -> _Grad:
    assert p.grad is not None
    grad: Any = p.grad
    return _Grad(grad.to_local() if hasattr(grad, "to_local") else grad)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_skipped_steps_of_a_scaler(strategy: str, tmp_path: Path) -> None:
    run(2, tmp_path, _overflows, strategy)


def _restarts(rank: int) -> None:
    """After means that are not finite, residuals begin at zero: those of a skipped step have another scale."""
    assert dist.group.WORLD is not None
    core = compressor(dist.group.WORLD, "1bit")
    param = torch.empty(512)
    gradient = torch.randn(512, generator=torch.Generator().manual_seed(rank)) * 2.0**16
    reduce_all(core, [gradient.clone()], [[param]])
    wrong = gradient.clone()
    wrong[0] = torch.inf if rank == 0 else 0.0
    reduce_all(core, [wrong], [[param]])
    assert wrong[:256].isnan().all() and wrong[256:].isfinite().all()
    assert core.residual_of(param)[256:].abs().max() > 2.0**14
    small = torch.zeros(512)
    reduce_all(core, [small], [[param]])
    assert (small == 0).all() and (core.residual_of(param) == 0).all()


def test_residuals_restart_after_a_skipped_step(tmp_path: Path) -> None:
    run(2, tmp_path, _restarts)


# ---- real text ----------------------------------------------------------------------------------------------------


@functools.cache
def text() -> Tensor:
    """Return the bytes of some modules of Python's standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    names = [
        "argparse",
        "ast",
        "inspect",
        "pathlib",
        "pickle",
        "subprocess",
        "tarfile",
        "threading",
        "typing",
    ]
    data = b"".join((folder / f"{name}.py").read_bytes() for name in names)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


class Block(nn.Module):
    """A block of a Llama, without rotary embeddings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 6 * width, bias=False), nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        y: Tensor = x + self.down(F.silu(gate) * up)
        return y


class Llama(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 256, bias=False)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.05)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


def text_loss(net: nn.Module, step: int, rank: int, rows: int = 8, length: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(text()) - length - 1, (rows,), generator=generator)
    ids = torch.stack([text()[start : start + length + 1] for start in starts.tolist()])
    return F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def _reads(rank: int, strategy: str, folder: Path, steps: int) -> None:
    losses = {}
    runs = [(AdamW, 3e-3, compress) for compress in (None, "8bit", "4bit")]
    runs += [(Lion, 1e-3, compress) for compress in (None, "1bit")]
    for optimizer, lr, compress in runs:
        torch.manual_seed(1)
        net = Llama()
        report = shoestring.parallelize(net, strategy, compress=compress)
        opt = optimizer(net.parameters(), lr=lr)
        for step in range(steps):
            opt.zero_grad()
            text_loss(net, step, rank).backward()
            opt.step()
        with torch.no_grad():
            loss = sum(text_loss(net, 10**6 + i, rank, rows=32) for i in range(4))
        assert isinstance(loss, Tensor)
        dist.all_reduce(loss)
        losses[optimizer.__name__, compress] = loss.item() / 8
        report.undo()
    if rank == 0:
        torch.save(losses, folder / "losses.pt")


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
@pytest.mark.sample(1)
def test_losses_on_text_are_within_a_percent(strategy: str, tmp_path: Path) -> None:
    """The loss on text that was not trained on is within 1 % of that of whole gradients, or 5 % with 1 bit."""
    (tmp_path / "results").mkdir()
    run(2, tmp_path, _reads, strategy, tmp_path / "results", 80)
    losses = torch.load(tmp_path / "results/losses.pt")
    for (optimizer, compress), loss in losses.items():
        plain = losses[optimizer, None]
        assert plain < 3.0  # an untrained model has ln 256 = 5.5
        assert loss <= plain * (1.05 if compress == "1bit" else 1.01), (compress, loss, plain)


# ---- refusals -----------------------------------------------------------------------------------------------------


def _refuses(rank: int) -> None:
    net = model()

    def refusal(call: Any) -> str:
        with pytest.raises((ValueError, RuntimeError, TypeError)) as error:
            call()
        return str(error.value).splitlines()[0]

    def parallel(strategy: str, compress: str, net: nn.Module = net) -> str:
        return refusal(lambda: shoestring.parallelize(net, strategy, compress=compress))

    assert parallel("ddp", "2bit") == (
        "parallelize: compress: expected None, 8bit, 4bit, 1bit, powersgd, received '2bit'"
    )
    for strategy in ("zero2", "zero3", "hsdp"):
        assert parallel(strategy, "powersgd") == (
            f"parallelize: compress: expected 8bit, 4bit or 1bit with {strategy!r}, since PowerSGD needs whole gradients, "
            "received 'powersgd'. Or use 'ddp' or 'zero1'."
        )
    assert parallel("ddp", "8bit", model(torch.float64)) == (
        "parallelize: compress: expected trained parameters in fp32, bf16 or fp16, received 0.weight in torch.float64. "
        "Convert it, or leave compress out."
    )
    opt = AdamW(net.parameters())
    assert refusal(lambda: shard(opt, compress="8bit")) == (
        "shard: compress: expected split gradients, received whole ones, for which DataParallel has this option"
    )
    assert refusal(lambda: shard(opt, gradients=True, compress="half")) == (
        'shard: compress: expected "none", "8bit", "4bit" or "1bit", received "half"'
    )


def test_errors_say_what_was_expected(tmp_path: Path) -> None:
    run(2, tmp_path, _refuses)


def _dies(rank: int, strategy: str) -> None:
    net = model()
    shoestring.parallelize(net, strategy, compress="8bit")
    opt = AdamW(net.parameters())
    for step in range(3):
        if step == 2 and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        opt.zero_grad()
        try:
            loss_of(net, step, rank).backward()
            opt.step()
        except RuntimeError as error:
            text = str(error)
            time.sleep(2)  # the other rank hears of the failure
            assert re.search(f"rank {rank} of 3: .*; rank 2 has ended or is stopped", text), text
            os._exit(7)
    raise AssertionError("no error")


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_survivors_name_the_rank_that_died(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(torch.multiprocessing.ProcessExitedException) as error:
        run(3, tmp_path, _dies, strategy)
    assert error.value.exit_code in (7, -signal.SIGKILL)


def _alone(rank: int, strategy: str) -> None:
    nets = [model() for _ in range(2)]
    for net, compress in zip(nets, ("4bit", None), strict=True):
        report = shoestring.parallelize(net, strategy, compress=compress)
        assert report.rank_bytes.residual == 0
        opt = AdamW(net.parameters())
        for step in range(3):
            opt.zero_grad()
            loss_of(net, step, rank).backward()
            opt.step()
        report.undo()
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_group_of_one_process_compresses_nothing(strategy: str, tmp_path: Path) -> None:
    run(1, tmp_path, _alone, strategy)


def test_one_process_compresses_nothing() -> None:
    report = shoestring.parallelize(model(), "ddp", compress="8bit")
    assert (report.strategy, report.ranks, report.rank_bytes.residual) == ("none", 1, 0)
