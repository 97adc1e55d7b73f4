"""Tests of optimizers on several processes (CPU, Gloo): FSDP2, HSDP, tensor parallelism, DDP."""

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from processes import assert_replicated, batch, model, run, train, whole
from relative_error import relative_error
from shoestring.optim import SGD, AdamW, Lion
from shoestring.optim.base import LowMemoryOptimizer
from shoestring.optim.sharded import local

# ---- FSDP2 -------------------------------------------------------------------------------------------------


def aligned() -> Module:
    """Return a model whose parameter shards on two processes are whole state blocks of 256 elements."""
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(256, 64, bias=False), torch.nn.Tanh(), torch.nn.Linear(64, 8, bias=False)
    )


def _fsdp_bitwise(rank: int, kind: type[LowMemoryOptimizer], state: str) -> None:
    nets = aligned(), aligned()
    fully_shard(nets[0])
    for net in nets:
        train(net, kind(net.parameters(), lr=1e-2, state_format=state), range(4))
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)


@pytest.mark.parametrize(("kind", "state"), [(AdamW, "8bit"), (Lion, "8bit"), (SGD, "fp32")])
def test_fsdp_is_one_process_bitwise(kind: type, state: str, tmp_path: Path) -> None:
    run(2, tmp_path, _fsdp_bitwise, kind, state)


def _fsdp(rank: int, kind: type[LowMemoryOptimizer], options: dict[str, Any]) -> None:
    sharded, plain = fully_shard(model()), model()
    opt, other = kind(sharded.parameters(), lr=1e-2, **options), kind(plain.parameters(), lr=1e-2, **options)
    train(sharded, opt, range(4))
    train(plain, other, range(4))
    for p, q in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert isinstance(p, DTensor)
        # Sharding moves the boundaries of quantisation blocks, so scales differ. Updates then differ by some
        # hundredths of their size.
        torch.testing.assert_close(
            whole(p), q, rtol=0, atol=1e-6 if options["state_format"] == "fp32" else 2e-3
        )
    if opt.max_grad_norm is not None:
        torch.testing.assert_close(
            opt.grad_norm, other.grad_norm, rtol=1e-4 if options["state_format"] == "fp32" else 1e-2, atol=0
        )
        assert_replicated(opt.grad_norm)


@pytest.mark.parametrize(
    ("world", "kind", "options"),
    [
        (2, AdamW, dict(state_format="8bit")),
        (2, Lion, dict(state_format="fp32", max_grad_norm=0.5)),
        (4, AdamW, dict(state_format="fp32", max_grad_norm=0.5)),
        (4, SGD, dict(state_format="8bit", momentum=0.9, max_grad_norm=0.5)),
    ],
)
def test_fsdp_is_one_process(world: int, kind: type, options: dict, tmp_path: Path) -> None:
    run(world, tmp_path, _fsdp, kind, options)


def _replicas(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    net = model(torch.bfloat16)
    # The optimizer's group has one plain parameter beside the sharded parameters.
    alone = Parameter(torch.ones(300, dtype=torch.bfloat16))
    fully_shard(net, mesh=mesh)
    opt = AdamW(
        [*net.parameters(), alone], state_format="bf16", weight_rounding="stochastic", max_grad_norm=0.5
    )
    for step in range(3):
        opt.zero_grad()
        alone.grad = torch.full_like(alone, 0.01 * (step + 1))
        net(batch(step + 10 * rank, torch.bfloat16)).square().mean().backward()
        opt.step()
    for p in net.parameters():
        assert p.device_mesh.ndim == 2
        assert_replicated(p.to_local(), mesh.get_group("replicas"))
        assert_replicated(opt.state[p]["exp_avg_sq"], mesh.get_group("replicas"))
    assert_replicated(alone)
    first = next(net.parameters()).grad.full_tensor().norm()
    assert opt.grad_norm > first and assert_replicated(opt.grad_norm) is None


def test_hsdp_replicas_stay_equal(tmp_path: Path) -> None:
    run(4, tmp_path, _replicas)


def _tensor_parallel(rank: int) -> None:
    """Step DTensors without FSDP: split columns, Partial gradients, replicas, and stochastic rounding."""
    mesh = init_device_mesh("cpu", (2,))
    start, grad = torch.ones(6, 512, dtype=torch.bfloat16), torch.full((6, 512), 0.25)

    def parameter(placement: Placement) -> Parameter:
        return Parameter(distribute_tensor(start, mesh, [placement]))

    params = [parameter(Shard(1)), parameter(Replicate()), parameter(Shard(0))]
    opt = AdamW(params, weight_rounding="stochastic", max_grad_norm=1.0)

    def step(opt: AdamW, params: list[Parameter]) -> None:
        # The gradient is a Partial DTensor: the sum over two processes, of which each holds one half.
        for p in params:
            p.grad = DTensor.from_local(grad.to(p.dtype) / 2, mesh, [Partial()])
        opt.step()

    for _ in range(2):
        step(opt, params)
    torch.testing.assert_close(opt.grad_norm, (3 * grad.square().sum()).sqrt(), rtol=1e-6, atol=0)
    # The state of the first and the last parameter shares flat tensors. PyTorch cannot copy a DTensor whose
    # shard begins inside of a storage.
    starts = [entry["exp_avg"].to_local().storage_offset() for entry in opt.state_dict()["state"].values()]
    assert starts == [0, 0, 0] and opt.state[params[2]]["exp_avg"].storage_offset() > 0
    assert_replicated(params[1].to_local())
    # The two shards of a parameter have equal weights and gradients here, but stochastic rounding uses
    # different random bits for each shard.
    for p in (params[0], params[2]):
        mine = p.to_local().contiguous()
        others = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(others, mine)
        assert not torch.equal(*others) and relative_error(*others) < 0.01
    again = [Parameter(p.detach().clone()) for p in params]
    other = AdamW(again, weight_rounding="stochastic", max_grad_norm=1.0)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    step(opt, params)
    step(other, again)
    for p, q in zip(params, again, strict=True):
        assert torch.equal(p.to_local(), q.to_local())
        assert all(torch.equal(opt.state[p][k], v) for k, v in other.state[q].items())


def test_tensor_parallel(tmp_path: Path) -> None:
    run(2, tmp_path, _tensor_parallel)


def _skips_together(rank: int) -> None:
    """One process accumulates a gradient that is not finite. Under a GradScaler, both processes skip the step."""
    mesh = init_device_mesh("cpu", (2,))
    p = Parameter(distribute_tensor(torch.ones(4, 300), mesh, [Shard(0)]))
    opt = AdamW([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(2):
        factor = torch.full((2, 300), torch.inf if step == 0 and rank == 1 else 1.0)
        with opt.accumulate():
            scaler.scale((p.to_local() * factor).sum()).backward()
        scaler.scale(p.to_local().sum()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert bool((p.to_local() == 1).all()) == (step == 0)
        assert scaler.get_scale() == 8.0


def test_all_processes_skip_a_step_or_none(tmp_path: Path) -> None:
    run(2, tmp_path, _skips_together)


def _in_backward(rank: int) -> None:
    for clip in (None, 0.5):
        nets = [fully_shard(model()) for _ in range(2)]
        released = AdamW(nets[0].parameters(), step_in_backward=True, max_grad_norm=clip)
        opt = AdamW(nets[1].parameters())
        for step in range(3):
            previous = released.grad_norm
            for net, each in zip(nets, (released, opt), strict=True):
                for micro in range(3):
                    with each.accumulate() if micro < 2 and each is released else nullcontext():
                        (net(batch(3 * step + micro)).square().mean() / 3).backward()
                if each is released:
                    assert all(p.grad is None for p in net.parameters())
                elif clip is not None:  # step_in_backward clips by the gradient norm of the previous step.
                    norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]).full_tensor()
                    if previous is not None:
                        for p in net.parameters():
                            p.grad.mul_((clip / (previous + 1e-6)).clamp(max=1.0))
                each.step()
                each.zero_grad()
            if clip is not None:
                torch.testing.assert_close(released.grad_norm, norm)
        for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            torch.testing.assert_close(p.to_local(), q.to_local(), rtol=1e-4, atol=1e-5)


def test_steps_within_fsdp_backward(tmp_path: Path) -> None:
    run(2, tmp_path, _in_backward)


def _scaler(rank: int) -> None:
    net = fully_shard(model())
    opt = AdamW(net.parameters(), max_grad_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = []
    for step in range(3):
        opt.zero_grad()
        scaler.scale(net(batch(step)).square().mean()).backward()
        if step == 1 and rank == 1:
            next(net.parameters()).grad.to_local()[0, 0] = torch.inf
        before = [p.to_local().clone() for p in net.parameters()]
        scaler.step(opt)
        scaler.update()
        changed = [not torch.equal(p.to_local(), q) for p, q in zip(net.parameters(), before, strict=True)]
        assert all(changed) if step != 1 else not any(changed)
    assert scaler.get_scale() == 512.0


def test_grad_scaler_skips_on_every_process(tmp_path: Path) -> None:
    run(2, tmp_path, _scaler)


def test_no_collective_without_dtensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a collective")

    monkeypatch.setattr(dist, "all_reduce", refuse)
    net = model()
    train(net, AdamW(net.parameters(), max_grad_norm=0.5), range(2))


# ---- errors ------------------------------------------------------------------------------------------------


def _flattened(rank: int) -> None:
    for use_orig_params in (False, True):
        net = FullyShardedDataParallel(
            model(), device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
        with pytest.raises(ValueError, match=r"params\[0\]: expected plain or DTensor parameters"):
            AdamW(net.parameters())


def test_the_older_fsdp_is_refused(tmp_path: Path) -> None:
    run(2, tmp_path, _flattened)


# ---- DDP ---------------------------------------------------------------------------------------------------


def _ddp(rank: int) -> None:
    for view in (False, True):
        nets = [
            DistributedDataParallel(model(torch.bfloat16), gradient_as_bucket_view=view) for _ in range(2)
        ]
        kept, summed = (AdamW(n.parameters(), weight_rounding="stochastic", max_grad_norm=0.5) for n in nets)
        for step in range(3):
            for net, opt in zip(nets, (kept, summed), strict=True):
                opt.zero_grad()
                for micro in range(3):
                    local_only = micro < 2 and not (opt is summed and micro == 1)
                    adds = micro < 2 and opt is summed
                    with (
                        net.no_sync() if local_only else nullcontext(),
                        summed.accumulate() if adds else nullcontext(),
                    ):
                        x = batch(100 * rank + 3 * step + micro, torch.bfloat16)
                        (net(x).square().mean() / 3).backward()
                opt.step()
                for p in net.parameters():
                    assert_replicated(p)
                    assert_replicated(opt.state[p]["exp_avg"])
        for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            # The first optimizer sums the gradients of micro-batches in bf16 and the second in fp32, so
            # results differ slightly.
            torch.testing.assert_close(p, q, rtol=0.02, atol=2e-3)


def _on_the_cpu(rank: int) -> None:
    """Assert that offload="cpu" gives equal bits for sharded and for replicated parameters, with clipping."""
    for sharded in (True, False):
        for in_backward in (False, True) if sharded else (False,):
            nets = [fully_shard(model()) if sharded else DistributedDataParallel(model()) for _ in range(2)]
            plain = AdamW(nets[0].parameters(), max_grad_norm=0.5)
            opt = AdamW(nets[1].parameters(), max_grad_norm=0.5, offload="cpu", step_in_backward=in_backward)
            for step in range(3):
                for net, each in zip(nets, (plain, opt), strict=True):
                    each.zero_grad()
                    for micro in range(3):
                        with (
                            each.accumulate() if micro < 2 else nullcontext(),
                            net.no_sync() if micro < 2 and not sharded else nullcontext(),
                        ):
                            (net(batch(100 * rank + 3 * step + micro)).square().mean() / 3).backward()
                    each.step()
                assert torch.equal(plain.grad_norm, opt.grad_norm)
            for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
                assert torch.equal(local(p), local(q))
                assert torch.equal(plain.state[p]["exp_avg"], opt.state[q]["exp_avg"])


def test_sharded_and_replicated_on_the_cpu(tmp_path: Path) -> None:
    run(2, tmp_path, _on_the_cpu)


def _ddp_refusals(rank: int) -> None:
    net = DistributedDataParallel(model())
    opt = AdamW(net.parameters(), step_in_backward=True)
    with pytest.raises(RuntimeError, match="step_in_backward: expected gradients that are complete"):
        net(batch(0)).sum().backward()
    net = DistributedDataParallel(model())
    opt = AdamW(net.parameters())
    with opt.accumulate(), net.no_sync():
        net(batch(rank)).sum().backward()
    with pytest.raises(RuntimeError, match="expected a last micro-batch outside of accumulate"):
        opt.step()


def test_ddp_replicas_stay_equal(tmp_path: Path) -> None:
    run(2, tmp_path, _ddp)


def test_ddp_refusals(tmp_path: Path) -> None:
    run(2, tmp_path, _ddp_refusals)
