"""Test fragments, overlap and processes that come and go in DiLoCo (CPU, Gloo)."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from diloco_reference import parameters, reference, train
from processes import assert_replicated, run
from shoestring.distributed import DiLoCo, LocalSGD, survivors
from shoestring.distributed import diloco as module
from shoestring.optim import AdamW

# An average rounds a weight below 4 about eight times, and the momentum adds up ten averages.
ROUNDING = 4 * 2.0**-24 * 8 * 10


def made(params: list[Tensor], kind: type[DiLoCo] = DiLoCo, **options: Any) -> DiLoCo:
    return kind(torch.optim.SGD(params, lr=1.0), **options)


def anchors(outer: DiLoCo) -> list[Tensor]:
    return [t for t in outer.state_dict()["anchor"] if t is not None]


def _is_the_reference(rank: int, cases: list[dict[str, Any]]) -> None:
    module.BUCKET = 50  # several buckets in each fragment
    for case in cases:
        params = parameters(rank)
        outer = made(params, **case)
        changed = []
        for step in range(1, 19):
            train(params, step, rank)
            changed.append(outer.step())
            for anchor in anchors(outer):
                assert_replicated(anchor)
        count, overlap, every = case.get("fragments", 1), case.get("overlap", 0), case["every"]
        ends = [((f + 1) * every // count + overlap + i * every) for f in range(count) for i in range(18)]
        assert [step for step, c in enumerate(changed, 1) if c] == sorted({e for e in ends if e <= 18}), case
        if overlap == 0:
            outer.average()
        expected = reference(dist.get_world_size(), 18, **case)[rank]
        for p, q in zip(params, expected, strict=True):
            torch.testing.assert_close(p.double(), q, rtol=0, atol=ROUNDING * 18 / every, msg=str(case))


CASES: list[dict[str, Any]] = [
    {"every": 6},
    {"every": 6, "fragments": 3},
    {"every": 7, "fragments": 3, "lr": 0.4, "momentum": 0.0},
    {"every": 6, "overlap": 2},
    {"every": 6, "fragments": 2, "overlap": 5},  # two fragments are under way at the same time
    {"every": 6, "fragments": 6, "overlap": 1, "alpha": 0.0},
    {"every": 5, "fragments": 2, "overlap": 3, "alpha": 0.8},
]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weights_are_those_of_the_reference(ranks: int, tmp_path: Path) -> None:
    run(ranks, tmp_path, _is_the_reference, CASES)


def _bytes_of_steps(outer: DiLoCo, steps: int) -> list[int]:
    """Return the bytes that this process sends in each step."""
    sent = [0]
    for _ in range(steps):
        outer.step()
        sent.append(outer._core.sent_bytes())
    return [after - before for before, after in itertools.pairwise(sent)]


def _sends_less_at_a_time(rank: int) -> None:
    ranks = dist.get_world_size()
    # 0.53 bytes are 68 for 128 elements.
    whole = {None: 2 * 4 * 8 * 512 * (ranks - 1) // ranks, "4bit": 2 * 68 * 4 * 8 * (ranks - 1) // ranks}
    for compress, total in whole.items():
        for overlap in (0, 2):
            for fragments in (1, 2, 4):
                params = [torch.ones(512) for _ in range(8)]
                outer = made(params, every=8, compress=compress, fragments=fragments, overlap=overlap)
                found = _bytes_of_steps(outer, 8 + overlap)
                # With overlap, the two hops of a compressed average leave in two steps.
                hops = 2 if compress and overlap else 1
                steps = [n for n in found[:8] if n > 0]
                assert max(steps) == total // fragments // hops, (compress, overlap, fragments, found)
                if overlap == 0:
                    assert sum(found) == total and len(steps) == fragments
    # Fragments of different parameters differ by the largest one at most.
    sizes = [1000, 3, 700, 64, 64, 64, 64, 900, 1, 128, 0, 512]
    outer = made([torch.ones(n) for n in sizes], every=3, fragments=3)
    found = [n * ranks // (2 * 4 * (ranks - 1)) for n in _bytes_of_steps(outer, 3)]
    assert sum(found) == sum(sizes) and max(found) <= sum(sizes) / 3 * 4 / 3, found


def test_fragments_send_less_at_a_time(tmp_path: Path) -> None:
    run(2, tmp_path, _sends_less_at_a_time)


SECONDS = 0.6


def _waits(rank: int, compress: str | None, overlap: int) -> list[float]:
    """Return the seconds of the steps 4 to 7, before the first of which the last rank is late."""
    params = parameters(rank)
    outer = made(params, every=4, compress=compress, overlap=overlap)
    for step in range(1, 4):
        train(params, step, rank)
        outer.step()
    dist.barrier()
    if rank == 1:
        time.sleep(SECONDS)
    found = []
    for _ in range(4):
        began = time.monotonic()
        outer.step()
        found.append(time.monotonic() - began)
    return found


def _overlaps(rank: int) -> None:
    for compress in (None, "8bit"):
        waits = _waits(rank, compress, 0)
        dist.barrier()
        if rank == 0:
            assert waits[0] > SECONDS / 2 and max(waits[1:]) < SECONDS / 2, (compress, waits)
        # The first hop may take two steps with `compress`, and the whole average three without.
        waits = _waits(rank, compress, 3)
        dist.barrier()
        if rank == 0:
            late = 2 if compress else 3
            assert max(waits[:late]) < SECONDS / 2 < waits[late], (compress, waits)


def test_training_goes_on_during_an_average(tmp_path: Path) -> None:
    """A process that is ahead waits in the step that needs the average, and not before."""
    run(2, tmp_path, _overlaps)


def _resumes(rank: int, folder: Path) -> None:
    module.BUCKET = 50
    for case in ({"every": 6, "fragments": 2, "overlap": 4}, {"every": 5, "fragments": 3}):
        for at in (4, 9):  # an average is under way at both steps
            params = parameters(rank)
            outer = made(params, **case)
            saved: dict[str, Any] = {}
            for step in range(1, 20):
                train(params, step, rank)
                outer.step()
                if step == at:
                    assert ("overlap" in case) == any(begun >= 0 for begun in outer.state_dict()["begun"])
                    torch.save({"params": params, "outer": outer.state_dict()}, folder / f"{rank}.pt")
                    saved = torch.load(folder / f"{rank}.pt")
            again = parameters(rank)
            other = made(again, **case)
            for p, q in zip(again, saved["params"], strict=True):
                p.copy_(q)
            other.load_state_dict(saved["outer"])
            assert other.steps == at
            for step in range(at + 1, 20):
                train(again, step, rank)
                other.step()
            for p, q in zip(again, params, strict=True):
                assert torch.equal(p, q), (case, at)
    # A state has had steps, anchor and momentum alone.
    outer = made(parameters(0), every=6)
    state = outer.state_dict() | {"steps": 5}
    outer.load_state_dict({name: state[name] for name in ("steps", "anchor", "momentum")})
    assert outer.steps == 5 and outer.step()
    before = outer.state_dict()
    with pytest.raises(ValueError, match="DiLoCo: state: begun: expected 1 fragments, received 2"):
        outer.load_state_dict(before | {"begun": [-1, -1]})
    with pytest.raises(ValueError, match="DiLoCo: state: expected an entry mean.0, received none"):
        outer.load_state_dict(before | {"begun": [3]})
    assert outer.steps == before["steps"]


def test_a_run_resumes_within_an_average(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    run(2, tmp_path, _resumes, tmp_path / "files")


def _feeds_errors_back(rank: int) -> None:
    """Sums of what was sent and of the residuals are the sums of all differences, so no error grows with time."""
    ranks, every = dist.get_world_size(), 4
    for overlap in (0, 2):
        params = parameters(0)
        outer = made(params, LocalSGD, every=every, compress="4bit", fragments=2, overlap=overlap, alpha=0.0)
        exact = [p.double() for p in params]
        moves = [torch.zeros_like(p) for p in exact]  # means of all ranks, since the last average
        begun: dict[int, Tensor] = {}
        largest = 0.0
        for step in range(1, 161):
            train(params, step, rank)
            for r in range(ranks):
                theirs = [torch.zeros_like(p) for p in exact]
                train(theirs, step, r)
                for move, own in zip(moves, theirs, strict=True):
                    move += own / ranks
            outer.step()
            for p in range(len(params)):
                due = 2 if p % 2 == 0 else 0
                if step % every == due:
                    begun[p] = moves[p].clone()
                    largest = max(largest, ranks * moves[p].abs().max().item())
                if (step - overlap) % every == due and p in begun:
                    exact[p] += begun.pop(p)
                    moves[p].zero_()  # with alpha = 0, moves since the begin are lost
        # A code of 7 is the largest difference and residual, so a residual is at most 1 / 13 of the difference. The
        # means of the second hop have one, too.
        worst = 0.0
        for f, anchor in enumerate(anchors(outer)):
            whole = torch.cat([exact[p].flatten() for p in range(f, len(params), 2)])
            worst = max(worst, (anchor.double() - whole).abs().max().item())
        assert 0 < worst < 2 * largest / 13, (overlap, worst, largest)


def test_compressed_averages_feed_errors_back(tmp_path: Path) -> None:
    run(2, tmp_path, _feeds_errors_back)


# ---- Processes that come and go

HOW = ("plain", "4bit", "half")
OFTEN: dict[str, Any] = {"every": 4, "fragments": 2, "overlap": 1}


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(8, 4)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(x) - x[:, :4]).square().mean()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, outer: DiLoCo, which: range, rank: int) -> None:
    for step in which:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
        outer.step()


def connect(folder: Path, name: str, rank: int, world: int) -> None:
    store = f"file://{folder / name}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    model = net()
    return model, AdamW(model.parameters(), lr=2e-2)


def ends_well(model: nn.Module, outer: DiLoCo, group: dist.ProcessGroup | None = None) -> None:
    """Compare the loss of the averaged weights with that of the first weights."""
    outer.average()
    for anchor in anchors(outer):
        assert_replicated(anchor, group)
    with torch.no_grad():
        assert loss_of(model, 1000, 0) < loss_of(net(), 1000, 0) / 4


def _survives(rank: int, folder: Path, how: str) -> None:
    """Let rank 2 end before an average, or when it has sent the first of two buckets ("half")."""
    connect(folder, f"store-{how}", rank, 3)
    model, optimizer = parts()
    module.BUCKET = 32  # the weight and the bias have buckets of their own
    options = {"every": 5, "momentum": 0.5} if how == "half" else OFTEN
    outer = DiLoCo(optimizer, compress="4bit" if how == "4bit" else None, **options)
    with pytest.raises(
        RuntimeError, match="survivors: group: expected a group of which a collective has failed"
    ):
        survivors()
    steps(model, optimizer, outer, range(1, 10), rank)
    # An average begins in step 10.
    if rank == 2:
        if how == "half":
            dist.all_reduce(torch.zeros(32))
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    weights = [p.detach().clone() for p in model.parameters()]
    before = [t.clone() for name in ("anchor", "momentum") for t in outer.state_dict()[name]]
    with pytest.raises(RuntimeError, match=f"rank {rank} of 3: .*; rank 2 has ended or is stopped"):
        outer.step()
        if how == "plain":
            outer.state_dict()  # waits for the average under way
        outer.step()
    state = outer.state_dict()
    assert all(begun == -1 for begun in state["begun"])
    after = [t for name in ("anchor", "momentum") for t in state[name]]
    assert all(map(torch.equal, model.parameters(), weights)) and all(map(torch.equal, after, before))
    assert survivors() == [0, 1]
    group = dist.new_group([0, 1], use_local_synchronization=True)
    outer.regroup(group)
    assert dist.get_world_size(group) == 2 and outer.steps in (10, 11)
    steps(model, optimizer, outer, range(12, 60), rank)
    ends_well(model, outer, group)
    (folder / f"ended-{how}-{rank}").touch()
    os._exit(0)  # the group of three cannot end in order


def _hears_of_a_failure(rank: int, folder: Path) -> None:
    """Let rank 1 find that rank 2 has ended, while rank 0 trains."""
    connect(folder, "store-hears", rank, 3)
    _, optimizer = parts()
    outer = DiLoCo(optimizer, every=500)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        with pytest.raises(RuntimeError, match="rank 2 has ended or is stopped"):
            dist.barrier()
    else:
        expected = (
            r"rank 0 of 3: DiLoCo: step \d+: expected all ranks to go on, received an error on another rank; "
            "rank 2 has ended or is stopped"
        )
        with pytest.raises(RuntimeError, match=expected):
            for _ in range(400):
                outer.step()
                time.sleep(0.05)
    assert survivors() == [0, 1]
    (folder / f"heard-{rank}").touch()
    os._exit(0)


def _joins(rank: int, folder: Path, is_new: bool) -> None:
    model, optimizer = parts()
    if is_new:
        connect(folder, "second", rank, 3)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(rank)
        outer = DiLoCo(optimizer, **OFTEN)
        assert outer.steps == 22
        for p, anchor in zip(model.parameters(), anchors(outer), strict=True):
            assert torch.equal(p.flatten(), anchor)
    else:
        connect(folder, "first", rank, 2)
        outer = DiLoCo(optimizer, **OFTEN)
        steps(model, optimizer, outer, range(1, 23), rank)
        weights, before = (
            [p.detach().clone() for p in model.parameters()],
            [a.clone() for a in anchors(outer)],
        )
        dist.barrier()
        dist.destroy_process_group()
        connect(folder, "second", rank, 3)
        outer.regroup()
        assert all(map(torch.equal, model.parameters(), weights))
        assert all(map(torch.equal, anchors(outer), before))
    for anchor in anchors(outer):
        assert_replicated(anchor)
    steps(model, optimizer, outer, range(23, 60), rank)
    ends_well(model, outer)
    (folder / f"joined-{rank}").touch()
    dist.barrier()
    dist.destroy_process_group()


def test_processes_come_and_go(tmp_path: Path) -> None:
    """The last of three is killed and two go on; a third joins two. All run at the same time."""
    context = multiprocessing.get_context("forkserver")
    started = [
        *(context.Process(target=_survives, args=(r, tmp_path, how)) for how in HOW for r in range(3)),
        *(context.Process(target=_hears_of_a_failure, args=(r, tmp_path)) for r in range(3)),
        *(context.Process(target=_joins, args=(r, tmp_path, r == 2)) for r in range(3)),
    ]
    for process in started:
        process.start()
    try:
        for process in started:
            process.join(90)
    finally:
        for process in started:
            process.kill()
    found = {path.name for path in tmp_path.iterdir() if "store" not in path.name}
    expected = {f"ended-{how}-{r}" for how in HOW for r in range(2)} | {f"joined-{r}" for r in range(3)}
    expected |= {"heard-0", "heard-1"}
    assert found - {"first", "second"} == expected


def _takes_the_newest(rank: int) -> None:
    """A rank that has missed an average receives it; one that has not keeps its progress."""
    half = dist.new_group([0, 1])
    for overlap in (0, 2):
        params = parameters(0)
        outer = made(params, every=6, overlap=overlap)
        # Ranks 0 and 1 average without rank 2, as if it had failed within the average.
        if rank < 2:
            outer.regroup(half)
            train(params, 1, rank)
            outer.average()
            train(params, 2, rank)
            outer.step()
        else:
            train(params, 1, rank)
        own, newest = [p.clone() for p in params], [a.clone() for a in anchors(outer)]
        outer.regroup()
        for anchor in anchors(outer):
            assert_replicated(anchor)
        assert outer.steps == 1
        averaged = anchors(outer)[0]
        if rank < 2:
            assert torch.equal(averaged, newest[0]) and all(map(torch.equal, params, own))
        else:
            mixed = torch.lerp(averaged, torch.cat([p.flatten() for p in own]), 0.5 if overlap else 0.0)
            assert not torch.equal(averaged, newest[0])
            assert torch.equal(torch.cat([p.flatten() for p in params]), mixed)
    expected = "DiLoCo: every: expected the same on all ranks, received 6 on rank 0 and 7 on rank 1"
    with pytest.raises(ValueError, match=f"^{expected}$"):
        made(parameters(0), every=6 + min(rank, 1))


def test_regroup_takes_the_newest_average(tmp_path: Path) -> None:
    run(3, tmp_path, _takes_the_newest)
