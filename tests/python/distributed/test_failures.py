"""Test that the errors of collectives name the ranks and the collective (several processes, CPU, Gloo)."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import processes  # noqa: F401  # imports what the processes need, once
import shoestring
from ports import free_port
from processes import run
from shoestring.optim import AdamW

TIMEOUT = 2.0
RANKS = 3
FAULTS = ("kill", "stop", "throw", "idle", "shape", "order")
AT = r"; ranks 0, 1 are at collective (?P<at>\d+), {} of \[4\] Float; rank 2 is at collective (?P=at), all_reduce of \[{}\] Float"
ENDS = {
    "shape": AT.format("all_reduce", 6),
    "order": AT.format("broadcast from rank 0", 4),
}  # all ranks raise
IDLE = r"(; rank.*)?; rank 2 is at collective \d+, .*"
GONE = "; rank 2 has ended or is stopped"


def _diverge(rank: int, fault: str) -> None:
    """Let the last rank issue a sum of another shape, or two collectives in another order."""
    is_last = rank == RANKS - 1
    summed, sent = torch.ones(6 if fault == "shape" and is_last else 4), torch.ones(4)
    if fault == "order" and not is_last:
        dist.broadcast(sent, 0)
    dist.all_reduce(summed)
    if fault == "order" and is_last:
        dist.broadcast(sent, 0)


def _misbehave(fault: str) -> None:
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    if fault == "throw":
        raise ValueError("the loss is not finite")
    if fault == "idle":
        time.sleep(TIMEOUT + 4)
        os._exit(0)


def _fails(rank: int, folder: Path, strategy: str, fault: str) -> None:
    """Train until the last rank misbehaves; write the seconds until the error, and the error."""
    torch.set_num_threads(1)
    store = f"file://{folder / f'{strategy}-{fault}-store'}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
    shoestring.parallelize(net, strategy)
    opt = AdamW(net.parameters())
    for _ in range(2):
        opt.zero_grad()
        net(torch.randn(4, 32)).square().mean().backward()
        opt.step()
    dist.barrier()
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=TIMEOUT))
    began = time.monotonic()
    if rank == RANKS - 1:
        _misbehave(fault)
    try:
        if fault in ENDS:
            _diverge(rank, fault)
        for _ in range(2):
            opt.zero_grad()
            net(torch.randn(4, 32)).square().mean().backward()
            opt.step()
    except RuntimeError as error:
        (folder / f"{strategy}-{fault}-{rank}").write_text(f"{time.monotonic() - began}\n{error}")
        os._exit(7)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.sample(2)
def test_errors_name_the_rank(strategy: str, tmp_path: Path) -> None:
    """All ranks that live raise within the timeout and two seconds more. All faults run at the same time."""
    context = multiprocessing.get_context("forkserver")
    started = {
        (fault, rank): context.Process(target=_fails, args=(rank, tmp_path, strategy, fault))
        for fault in FAULTS
        for rank in range(RANKS)
    }
    for process in started.values():
        process.start()
    try:
        for (fault, rank), process in started.items():
            if rank < RANKS - 1 or fault in ENDS:
                process.join(60)
                assert process.exitcode == 7, (fault, rank, process.exitcode)
    finally:
        for process in started.values():
            process.kill()
            process.join()
    for fault in FAULTS:
        for rank in range(RANKS if fault in ENDS else RANKS - 1):
            seconds, text = (tmp_path / f"{strategy}-{fault}-{rank}").read_text().split("\n", 1)
            assert float(seconds) < TIMEOUT + 2 + 1, (fault, rank, seconds)  # 1 s as the machine is busy
            where = r"collective \d+, [a-z_]+( (from|to) rank \d)?( \(AVG\))? of (\d+ tensors, first )?\[.*\] Float: .*"
            end = ENDS.get(fault, IDLE if fault == "idle" else GONE)
            assert re.fullmatch(rf"rank {rank} of 3: ([a-z ]+: )?{where}{end}", text.split("\n")[0]), (
                fault,
                text,
            )


def _collectives(rank: int) -> list[torch.Tensor]:
    """Return the results of all collectives of torch.distributed that Gloo has."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    own = torch.arange(4.0) + rank
    results = []

    def out(*shape: int) -> torch.Tensor:
        results.append(torch.zeros(*shape))
        return results[-1]

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        dist.all_reduce(out(4).copy_(own), op)
    work: Any = dist.all_reduce(out(4).copy_(own), async_op=True)
    (value,) = work.get_future().then(lambda future: future.value()).wait()
    assert torch.equal(value, results[-1]) and work.wait() and work.is_completed() and work.is_success()
    assert work.wait(timedelta(seconds=5))
    dist.broadcast(out(4).copy_(own), 1)
    dist.reduce(out(4).copy_(own), 1)
    dist.all_gather([out(4) for _ in range(RANKS)], own)
    dist.all_gather_into_tensor(out(4 * RANKS), own)
    dist.reduce_scatter_tensor(out(2), torch.arange(2.0 * RANKS) + rank)
    dist.gather(own, [out(4) for _ in range(RANKS)] if rank == 2 else None, 2)
    dist.scatter(out(4), [own + i for i in range(RANKS)] if rank == 1 else None, 1)
    dist.all_to_all_single(out(RANKS), torch.arange(1.0 * RANKS) + rank)
    splits = [1 + (rank + i) % RANKS for i in range(RANKS)]  # a symmetric matrix
    dist.all_to_all_single(out(sum(splits)), torch.arange(1.0 * sum(splits)) + rank, splits, splits)
    sparse = out(4).copy_(own).to_sparse()
    dist.all_reduce(sparse)
    results.append(sparse.to_dense())
    with dist.distributed_c10d._coalescing_manager():
        for _ in range(2):
            dist.all_reduce(out(4).copy_(own))
    objects: list[Any] = [None] * RANKS
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": i} for i in range(RANKS)]
    sends = [
        dist.P2POp(dist.isend, own, (rank + 1) % RANKS),
        dist.P2POp(dist.irecv, out(4), (rank - 1) % RANKS),
    ]
    for request in dist.batch_isend_irecv(sends):
        request.wait()
    if rank == 0:
        assert dist.recv(out(4)) in (1, 2)
        dist.recv(results[-1])
    else:
        dist.send(torch.ones(4), 0)
    dist.barrier()
    dist.monitored_barrier()
    results.append(functional.all_reduce(own, "sum", dist.group.WORLD) + 0)
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    split = distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0)])
    results.append(split.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()]).to_local() + 0)
    return results


def _goes_through(rank: int) -> None:
    group: Any = dist.group.WORLD
    cpu = torch.device("cpu")
    gloo = group._get_backend(cpu)
    assert type(gloo) is dist.ProcessGroupGloo
    expected = _collectives(rank)
    reports = [shoestring.parallelize(nn.Linear(4, 4), strategy) for strategy in ("ddp", "zero1", "zero3")]
    named = group._get_backend(cpu)
    assert type(named) is not dist.ProcessGroupGloo and dist.get_backend() == named.name() == "gloo"
    assert (named.rank(), named.size(), named.supports_splitting) == (rank, RANKS, True)
    assert not named.supports_coalescing
    group.set_timeout(timedelta(seconds=50))
    assert gloo.options._timeout == timedelta(seconds=50) and group._get_sequence_number_for_group() > 0
    for found, result in zip(_collectives(rank), expected, strict=True):
        assert torch.equal(found, result)

    # The errors of arguments and of a time that the caller gives are no failures of the group.
    with pytest.raises(
        RuntimeError, match=rf"rank {rank} of 3: collective \d+, all_reduce of 2 tensors, first \[1\]"
    ):
        group.allreduce([torch.ones(1), torch.ones(2)]).wait()
    dist.barrier()
    if rank == 0:
        work: Any = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(
            RuntimeError, match=r"timed out! \(rank 0 of 3: collective \d+, all_reduce of \[1\] Float"
        ):
            work.wait(timedelta(milliseconds=100))
        dist.distributed_c10d._store_based_barrier(
            rank, group.get_group_store(), "late", RANKS, timedelta(seconds=9)
        )
        work.wait()
    else:
        dist.distributed_c10d._store_based_barrier(
            rank, group.get_group_store(), "late", RANKS, timedelta(seconds=9)
        )
        dist.all_reduce(torch.ones(1))

    for report in reports:
        assert group._get_backend(cpu) is named
        report.undo()
    assert group._get_backend(cpu) is gloo
    reports[0].undo()
    dist.barrier()


def test_collectives_are_those_of_the_backend(tmp_path: Path) -> None:
    run(RANKS, tmp_path, _goes_through)


def _ends(rank: int, folder: Path, port: int, destroys: bool) -> None:
    """End on rank 0, which holds the store, before rank 1; write what the process prints to a file."""
    with (folder / f"errors-{rank}").open("w") as errors:
        os.dup2(errors.fileno(), 2)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    report = shoestring.parallelize(nn.Linear(4, 4), "zero1")
    report.undo()
    net = nn.Linear(4, 4)
    shoestring.parallelize(net, "ddp")  # the threads that listen need other keys now
    net(torch.ones(1, 4)).sum().backward()  # the network holds the group from now on
    dist.barrier()
    if rank == 1:
        time.sleep(1)
    if destroys:
        dist.destroy_process_group()
    atexit._run_exitfuncs()  # processes of multiprocessing do not run them
    if rank == 1:
        time.sleep(0.5)


@pytest.mark.parametrize("destroys", [False, True])
def test_a_rank_that_ends_first_is_no_failure(destroys: bool, tmp_path: Path) -> None:
    """PyTorch would print stacks where a rank asks the store of a process that has ended."""
    port = free_port()
    context = multiprocessing.get_context("forkserver")
    started = [context.Process(target=_ends, args=(rank, tmp_path, port, destroys)) for rank in range(2)]
    for process in started:
        process.start()
    for rank, process in enumerate(started):
        process.join(60)
        assert (process.exitcode, (tmp_path / f"errors-{rank}").read_text()) == (0, "")
