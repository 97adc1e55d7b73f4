"""Test shoestring.parallelize and shard over several processes (CPU, Gloo)."""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoestring
from processes import assert_replicated, launch, run, whole
from shoestring.distributed import broadcast_module, mean_over_ranks, shard
from shoestring.optim import LAMB, SGD, AdamW, GaLore, Lion, Muon, ScheduleFreeAdamW
from shoestring.optim.sharded import local
from split_models import adapted, model

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hsdp"]


def loss_of(net: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 256, generator=generator).to(next(net.parameters()).dtype)
    return net(x).square().mean()


def train_alone(ranks: int, optimizer: Any, options: dict[str, Any], micro: int = 1) -> nn.Module:
    """Train as all ranks together do: each gradient is the mean of those of the ranks."""
    net = model(options.pop("dtype", torch.float32))
    opt = optimizer(net.parameters(), **options)
    for step in range(4):
        opt.zero_grad()
        for rank in range(ranks):
            for part in range(micro):
                (loss_of(net, 10 * step + part, rank) / ranks).backward()
        opt.step()
    return net


def _is_one_process(rank: int, strategy: str, optimizer: Any, options: dict[str, Any]) -> None:
    ranks = dist.get_world_size()
    net = model(options.get("dtype", torch.float32))
    if rank > 0:  # the parameters of rank 0 count
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
    mesh = (2, ranks // 2) if strategy == "hsdp" else None
    report = shoestring.parallelize(net, strategy, mesh=mesh)
    assert report.strategy == strategy and report.ranks == ranks
    plain = {name: value for name, value in options.items() if name != "dtype"}
    opt = optimizer(net.parameters(), **plain)
    for step in range(4):
        opt.zero_grad()
        loss_of(net, 10 * step, rank).backward()
        opt.step()
    alone = train_alone(ranks, optimizer, dict(options))
    # Two gradients have one sum. Of more, the order of the additions changes the last bits.
    exact = ranks == 2 and opt.max_grad_norm is None
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        assert_replicated(whole(p))
        if exact:
            assert torch.equal(whole(p), q)
        elif options.get("state_format") == "4bit":
            # Last bits decide the codes of a few elements, whose weights then differ by less than a step.
            difference = (whole(p) - q).abs()
            assert difference.max() <= options["lr"] and difference.gt(2e-3).double().mean() <= 1e-3
        else:
            torch.testing.assert_close(whole(p), q, rtol=0, atol=2e-3)
    if opt.max_grad_norm is not None:
        assert opt.grad_norm is not None
        assert_replicated(opt.grad_norm)
    report.undo()
    report.undo()
    for name, p in net.named_parameters():
        assert type(p) is nn.Parameter and dict(model().named_parameters())[name].shape == p.shape
    assert [type(m) for m in net.modules()] == [type(m) for m in model().modules()]
    assert list(net.state_dict()) == list(model().state_dict())
    loss_of(net, 0, rank).backward()  # nothing is sent


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (AdamW, dict(lr=1e-2)),
        (AdamW, dict(lr=1e-2, state_format="4bit", max_grad_norm=0.1)),
        (AdamW, dict(lr=1e-2, dtype=torch.bfloat16, weight_rounding="stochastic", seed=3)),
        (Lion, dict(lr=1e-3, dtype=torch.bfloat16, weight_rounding="remainder")),
        (SGD, dict(lr=0.1, momentum=0.9, state_format="fp32", max_grad_norm=0.1)),
    ],
    ids=["adamw", "adamw-4bit-clip", "adamw-stochastic", "lion-remainder", "sgd-clip"],
)
@pytest.mark.sample(10)
def test_training_is_that_of_one_process(
    strategy: str, ranks: int, optimizer: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    if strategy == "hsdp" and ranks == 3:
        pytest.skip("3 ranks have no mesh of two dimensions above 1")
    if ranks > 2 and "dtype" in options:
        pytest.skip("the rounding of a sum of three numbers in bf16 depends on their order")
    if strategy in ("zero3", "hsdp") and options.get("weight_rounding") == "stochastic":
        pytest.skip("each shard has random bits of its own")
    run(ranks, tmp_path, _is_one_process, strategy, optimizer, options)


def _whole_parameters(rank: int, strategy: str, optimizer: Any) -> None:
    net = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 8, bias=False))
    report = shoestring.parallelize(net, strategy)
    alone = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 8, bias=False))
    alone.load_state_dict(net.state_dict())
    opt, other = optimizer(net.parameters(), lr=1e-2), optimizer(alone.parameters(), lr=1e-2)
    for step in range(3):
        gradients = []
        for _ in range(2):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
            gradients.append(x)
        opt.zero_grad()
        other.zero_grad()
        net(gradients[rank]).square().mean().backward()
        alone(gradients[0]).square().mean().backward()
        opt.step()
        other.step()
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q)
    held = [p for p in net.parameters() if opt.state.get(p)]
    assert len(held) == 1  # each rank has one of the two parameters
    report.undo()


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("optimizer", [LAMB, Muon])
def test_optimizers_of_whole_parameters(strategy: str, optimizer: Any, tmp_path: Path) -> None:
    run(2, tmp_path, _whole_parameters, strategy, optimizer)


def _micro_batches(rank: int, strategy: str, how: str) -> None:
    net = model()
    report = shoestring.parallelize(net, strategy)
    opt = AdamW(net.parameters(), lr=1e-2)
    for step in range(4):
        opt.zero_grad()
        for part in range(3):
            loss = loss_of(net, 10 * step + part, rank)
            if how == "no_sync" and part < 2:
                with report.no_sync():
                    loss.backward()
            else:
                loss.backward()
        opt.step()
    alone = train_alone(2, AdamW, dict(lr=1e-2), micro=3)
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q, rtol=0, atol=2e-3)
        assert_replicated(whole(p))


@pytest.mark.parametrize("strategy", STRATEGIES[:4])
@pytest.mark.parametrize("how", ["no_sync", "each"])
def test_accumulation(strategy: str, how: str, tmp_path: Path) -> None:
    run(2, tmp_path, _micro_batches, strategy, how)


def _statistics(rank: int, strategy: str) -> None:
    """After each backward that sends gradients, all ranks have the running statistics of rank 0."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(256, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
    net.register_buffer("codes", torch.zeros(3))
    report = shoestring.parallelize(net, strategy)
    net.codes.fill_(rank)
    opt = AdamW(net.parameters(), lr=1e-2)
    norm: Any = net[1]

    def is_that_of_rank_0(t: Tensor) -> bool:
        first = t.clone()
        dist.broadcast(first, 0)
        return torch.equal(first, t)

    for step in range(3):
        with report.no_sync():
            loss_of(net, 10 + step, rank).backward()
        assert is_that_of_rank_0(norm.running_mean) == (rank == 0)
        loss = loss_of(net, step, rank)
        own = norm.running_var.clone()
        loss.backward()
        assert torch.equal(own, norm.running_var) == (rank == 0)
        assert all(map(is_that_of_rank_0, norm.buffers())) and norm.num_batches_tracked == 2 * step + 2
        assert is_that_of_rank_0(net.codes) == (rank == 0)
        opt.step()
        opt.zero_grad()
    with torch.no_grad():
        if rank == 0:
            net.eval()(torch.ones(2, 256))  # communicates nothing
    net.train()
    report.undo()
    loss_of(net, 0, rank).backward()
    assert is_that_of_rank_0(norm.running_mean) == (rank == 0)
    plain = nn.Linear(4, 4)
    shoestring.parallelize(plain, strategy).undo()
    assert all(not p._backward_hooks for p in plain.parameters())


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_running_statistics_are_those_of_rank_0(strategy: str, tmp_path: Path) -> None:
    run(2, tmp_path, _statistics, strategy)


def _bytes(rank: int, strategy: str, offload: str | None = None) -> None:
    """Compare the bytes of a rank between backward and step with the formula, from the allocator's counts."""
    ranks = dist.get_world_size()
    with shoestring.host_allocator() as allocator:
        blocks = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
        net = nn.Sequential(nn.Linear(512, 512, bias=False), blocks)
        elements = sum(p.numel() for p in net.parameters())
        report = shoestring.parallelize(net, strategy, offload=offload)
        opt = AdamW(net.parameters())
        if strategy == "zero2":  # smaller buckets than by default, since the model is small
            for p in net.parameters():
                del p._shoestring_splits_steps
            opt = AdamW(net.parameters())
            shard(opt, gradients=True, bucket_bytes=1 << 20)
            report._optimizers[:] = [opt]
        x = torch.randn(4, 512)
        for _ in range(2):
            opt.zero_grad()
            net(x).square().mean().backward()
            allocated = allocator.stats().allocated
            opt.step()
        own = report.rank_bytes
        entries = [entry for p in net.parameters() if (entry := opt.state.get(p))]
        state = sum(local(t).nbytes for entry in entries for name, t in entry.items() if name != "step")
        weights = sum(local(p).nbytes for p in net.parameters())
        assert (own.weights, own.state) == (weights, state)
        assert own.weights * (ranks if strategy == "zero3" else 1) == 4 * elements
        assert own.gradients * (ranks if strategy in ("zero2", "zero3") else 1) == 4 * elements
        assert own.state * (ranks if strategy != "ddp" else 1) == elements * (2 + 8 / 256)
        # "zero2" sends four buckets and fills one, "zero3" may still send one unit; each is a parameter of 1 MiB
        more = {"zero2": 5 << 20, "zero3": 1 << 20}.get(strategy, 0)
        total = own.total - (own.weights if offload is not None else 0)
        assert total <= allocated <= total * 1.01 + more + (1 << 16), (strategy, allocated, own)


@pytest.mark.parametrize("strategy", STRATEGIES[:4])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_a_rank(strategy: str, ranks: int, tmp_path: Path) -> None:
    run(ranks, tmp_path, _bytes, strategy)


def test_weights_in_a_file_take_no_memory(tmp_path: Path) -> None:
    run(2, tmp_path, _bytes, "zero3", f"nvme:{tmp_path}")


def _resumes(rank: int, strategy: str, folder: Path, saves: bool) -> None:
    net = model()
    report = shoestring.parallelize(net, strategy)
    opt = AdamW(net.parameters(), lr=1e-2)
    alone = model()
    other = AdamW(alone.parameters(), lr=1e-2)

    def train(net: nn.Module, opt: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            opt.zero_grad()
            loss_of(net, step, 0).backward()  # the same on all ranks
            opt.step()

    train(alone, other, range(3))
    if saves:
        train(net, opt, range(3))
        saved = opt.state_dict()
        for mine, its in zip(saved["state"].values(), other.state_dict()["state"].values(), strict=True):
            assert mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in mine)
        shoestring.optim.save_optimizer(opt, folder / "optimizer.safetensors")
        shoestring.save_training(folder / "run.safetensors", net, opt, step=3)
        if rank == 0:
            torch.save(saved, folder / "optimizer.pt")
    else:
        assert shoestring.load_training(folder / "run.safetensors", net, opt).step == 3
        train(net, opt, range(3, 4))
        with torch.no_grad():
            for p, q in zip(net.parameters(), alone.parameters(), strict=True):
                p.copy_(q)
        shoestring.optim.load_optimizer(opt, folder / "optimizer.safetensors")
        opt.load_state_dict(torch.load(folder / "optimizer.pt"))
    train(net, opt, range(3, 5))
    train(alone, other, range(3, 5))
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q)
    report.undo()


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_state_is_saved_and_loaded_by_any_number_of_processes(strategy: str, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    stores = tmp_path / "stores"
    stores.mkdir()
    run(2, stores, _resumes, strategy, files, True)
    for ranks in (1, 2, 4):
        run(ranks, stores, _resumes, strategy, files, False)


def _schedule_free(rank: int, strategy: str) -> None:
    net, alone = model(), model()
    report = shoestring.parallelize(net, strategy)
    opt, other = (ScheduleFreeAdamW(m.parameters(), lr=1e-2, warmup_steps=0) for m in (net, alone))
    for step in range(3):
        for m, o in ((net, opt), (alone, other)):
            o.zero_grad()
            loss_of(m, step, 0).backward()  # the same on both ranks
            o.step()
    for switch in ("eval", "train", "eval"):
        getattr(opt, switch)()
        getattr(other, switch)()
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            assert torch.equal(p, q)
    report.undo()


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_schedule_free_moves_whole_weights(strategy: str, tmp_path: Path) -> None:
    run(2, tmp_path, _schedule_free, strategy)


def _adapters(rank: int, strategy: str, quantize: str | None) -> None:
    net, alone = adapted(quantize), adapted(quantize)
    dtype = (
        next(p for p in net.parameters() if not p.requires_grad).dtype if quantize is None else torch.float32
    )
    report = shoestring.parallelize(net, strategy)
    opt, other = (
        AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2, state_format="fp32", eps=1e-4)
        for m in (net, alone)
    )
    for step in range(4):
        inputs = [
            torch.randn(4, 256, generator=torch.Generator().manual_seed(10 * step + r)).to(dtype)
            for r in range(2)
        ]
        opt.zero_grad()
        other.zero_grad()
        net(inputs[rank]).float().square().mean().backward()
        for x in inputs:
            (alone(x).float().square().mean() / 2).backward()
        opt.step()
        other.step()
    for (_, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
        if q.requires_grad:
            torch.testing.assert_close(whole(p), q, rtol=0, atol=1e-5 if quantize else 1e-3)
    frozen = sum(local(p).nbytes for p in net.parameters() if not p.requires_grad)
    assert strategy != "zero3" or frozen * 2 == sum(
        p.nbytes for p in alone.parameters() if not p.requires_grad
    )
    report.undo()
    x = torch.randn(4, 256).to(dtype)
    torch.testing.assert_close(net(x), alone(x), rtol=0, atol=1e-4 if quantize else 0.1)


@pytest.mark.parametrize("strategy", STRATEGIES[:4])
@pytest.mark.parametrize("quantize", [None, "nf4", "int8"])
def test_adapters(strategy: str, quantize: str | None, tmp_path: Path) -> None:
    """Frozen bases in bf16 or few bits are split by zero3 alone, and adapters train as in one process."""
    run(2, tmp_path, _adapters, strategy, quantize)


def refusal(call: Any) -> str:
    with pytest.raises((ValueError, RuntimeError, TypeError)) as error:
        call()
    return str(error.value)


def _refuses(rank: int) -> None:
    net = model()
    parallel = shoestring.parallelize
    assert refusal(lambda: parallel(net, "fsdp")) == (
        "parallelize: strategy: expected auto, ddp, zero1, zero2, zero3, hsdp, received 'fsdp'"
    )
    assert refusal(lambda: parallel(net, "zero3", mesh=(3,))) == (
        "parallelize: mesh: expected a product of 2, the number of processes, received (3,)"
    )
    assert refusal(lambda: parallel(net, "hsdp", mesh=(2,))) == (
        "parallelize: mesh: expected 2 dimensions with 'hsdp', received (2,)"
    )
    assert refusal(lambda: parallel(net, "zero1", mesh=(2,))) == (
        "parallelize: mesh: expected none with 'zero1', which takes all processes, received one"
    )
    assert refusal(lambda: parallel(nn.Linear(2, 2).requires_grad_(False))) == (
        "parallelize: model: expected parameters that require gradients, received none"
    )
    assert refusal(lambda: parallel(net, "zero3", offload="disk")) == (
        "parallelize: offload: expected None, cpu or nvme:DIR, received 'disk'"
    )
    assert refusal(lambda: parallel(net, "zero1", offload="nvme:.")) == (
        "parallelize: offload: expected None with 'zero1', which keeps whole weights, received 'nvme:.'. Use 'zero3', or "
        "give offload to the optimizer."
    )
    assert refusal(lambda: parallel(net, offload="cpu")) == (
        "parallelize: offload: expected nvme:DIR for a model on the CPU, whose weights are in host memory already, "
        "received 'cpu'"
    )
    missing = refusal(lambda: parallel(net, offload="nvme:/missing"))
    assert missing.startswith("parallelize: offload: /missing/shoestring-swap-") and "No such file" in missing
    for strategy in 2 * ("ddp", "zero1", "zero2", "zero3"):
        report = parallel(net, strategy)
        assert refusal(lambda: parallel(net)) == (
            "parallelize: model: expected a model of one process, received one that is parallel already; call undo() "
            "of its report"
        )
        report.undo()

    report = parallel(net, "zero2")
    assert refusal(lambda: loss_of(net, 0, rank)) == (
        "parallelize: zero2: expected optimizers of shoestring.optim, made after parallelize, for all trained "
        "parameters, received none for 0.weight"
    )
    opt = AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(net, 0, rank)).backward()
    assert refusal(lambda: scaler.step(opt)).startswith(
        "AdamW: step: expected neither a GradScaler nor a Guard of the optimizer with split gradients (ZeRO-2)"
    )
    whole_state = (
        "expected an optimizer whose state is in this process, received one whose state processes have split"
    )
    assert "to copy or pickle it" in refusal(lambda: copy.deepcopy(opt))
    assert whole_state in refusal(lambda: setattr(opt, "step_in_backward", True))
    assert 'expected "stream" or "nvme:DIR" where processes have split the steps, received "cpu"' in refusal(
        lambda: AdamW(net.parameters(), offload="cpu")
    )
    assert "expected an optimizer without step_in_backward" in refusal(
        lambda: AdamW(net.parameters(), step_in_backward=True)
    )
    report.undo()
    assert "expected an optimizer that was made after undo()" in refusal(opt.step)

    assert 'expected offload="stream" or "nvme:DIR", received "cpu"' in refusal(
        lambda: shard(AdamW(net.parameters(), offload="cpu"))
    )
    stepped = AdamW(net.parameters())
    loss_of(net, 0, rank).backward()
    stepped.step()
    assert "expected an optimizer before its first step" in refusal(lambda: shard(stepped))
    assert refusal(lambda: shard(torch.optim.SGD(net.parameters(), lr=1))) == (
        "shard: optimizer: expected an optimizer of shoestring.optim with state for each parameter, such as AdamW, "
        "received SGD"
    )
    assert "received GaLore" in refusal(lambda: shard(GaLore([nn.Parameter(torch.ones(8, 8))], rank=2)))
    report = parallel(net, "zero3")
    assert "expected plain parameters, received DTensors" in refusal(lambda: shard(AdamW(net.parameters())))
    report.undo()
    assert refusal(lambda: mean_over_ranks(torch.ones(2, dtype=torch.long))) == (
        "mean_over_ranks: tensor: expected a floating-point dtype, received torch.int64"
    )
    assert mean_over_ranks(torch.tensor([1.0 + rank])).item() == 1.5
    other = nn.Linear(4, 4 + rank)
    assert refusal(lambda: broadcast_module(other)) == (
        "broadcast_module: module: expected the same parameters on all ranks; parameter 0 is weight [4, 4] Float on "
        "rank 0 and weight [5, 4] Float on rank 1"
    )


def test_errors_say_what_was_expected(tmp_path: Path) -> None:
    run(2, tmp_path, _refuses)


def test_one_process_needs_nothing() -> None:
    net = model()
    report = shoestring.parallelize(net, "zero2")
    assert (report.strategy, report.ranks) == ("none", 1)
    with report.no_sync():
        loss_of(net, 0, 0).backward()
    report.undo()


def test_one_process_without_a_group_reads_the_mesh() -> None:
    assert shoestring.parallelize(model(), "hsdp", mesh=(1, 1)).strategy == "none"
    assert refusal(lambda: shoestring.parallelize(model(), "hsdp", mesh=(3, 2))) == (
        "parallelize: mesh: expected a product of 1, the number of processes, received (3, 2)"
    )


def test_one_process_without_a_group_cannot_offload() -> None:
    assert refusal(lambda: shoestring.parallelize(model(), "zero3", offload="nvme:.")) == (
        "parallelize: offload: expected a process group, received none in one process. Use shoestring.offload_weights, "
        "or call init_process_group."
    )


def test_several_processes_need_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refusal(lambda: shoestring.parallelize(model())) == (
        "parallelize: expected an initialised process group, received none; call "
        "torch.distributed.init_process_group() in a program that torchrun has started"
    )


def _starts() -> None:
    report = shoestring.parallelize(model(), "ddp")
    assert (report.strategy, report.ranks, dist.get_backend()) == ("ddp", 2, "gloo")
    report.undo()


def test_torchrun_needs_no_init_process_group() -> None:
    launch(2, _starts)


def _auto(rank: int, rooms: dict[str, float]) -> None:
    net = model()
    whole_bytes = shoestring.parallelize(net, "ddp")
    total = whole_bytes.rank_bytes.total
    whole_bytes.undo()
    for strategy, share in rooms.items():
        # what the ranks can still use, beside the weights that they have
        free = int(share * total / 0.5) - sum(p.nbytes for p in net.parameters())
        room = 2 * free + (10**9 if rank == 1 else 0)
        sys.modules["shoestring.distributed.parallelize"].spare_bytes = lambda room=room: (room, room)
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        report = shoestring.parallelize(net)
        assert report.strategy == strategy and strategy in report.reason, report
        report.undo()


def test_auto_takes_the_first_strategy_that_fits(tmp_path: Path) -> None:
    """With 4 bytes of weights, 4 of gradients and 2.03 of state per element, two ranks have 10.03, 9.02, 7.02 and 5.02."""
    run(2, tmp_path, _auto, {"ddp": 1.01, "zero1": 0.95, "zero2": 0.75, "zero3": 0.55})


def _dies(rank: int, strategy: str) -> None:
    net = model()
    shoestring.parallelize(net, strategy)
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
            assert text.startswith(f"rank {rank} of 3: "), text
            assert text.splitlines()[0].endswith("; rank 2 has ended or is stopped"), text
            os._exit(7)
    raise AssertionError("no error")


@pytest.mark.parametrize("strategy", ["zero2"])
def test_survivors_name_the_rank_that_died(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(torch.multiprocessing.ProcessExitedException) as error:
        run(3, tmp_path, _dies, strategy)
    assert error.value.exit_code in (7, -signal.SIGKILL)
