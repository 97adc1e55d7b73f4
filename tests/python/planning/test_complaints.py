"""Test what users complain about in other planners and batch size finders. Each docstring is a complaint."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from cli_helpers import TINY, refuse, succeed, text
from cli_server import Commands
from planning.situations import Json, everything, plan, random_situation
from ports import free_port
from shoestring.optim import AdamW
from shoestring.training.run import loop

MIB = 2**20


class Training:
    """A step of a small model on a device that has room for some rows, and for fewer once there is optimizer state."""

    def __init__(self, room: int, room_with_state: int | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2)
        self.rooms = (room, room if room_with_state is None else room_with_state)
        self.sizes: list[int] = []
        self.has_moved: list[bool] = []

    def __call__(self, rows: int) -> None:
        before = self.model[0].weight.detach().clone()
        room = self.rooms[bool(self.optimizer.state_dict()["state"])]
        self.sizes.append(rows)
        self.optimizer.zero_grad()
        self.model(torch.randn(rows, 16)).square().mean().backward()
        if rows > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 266.00 MiB.")
        self.optimizer.step()
        self.has_moved.append(not torch.equal(self.model[0].weight, before))

    def find(self, step: Callable[[int], None] | None = None, **options: Any) -> shoestring.BatchSizeSearch:
        return shoestring.find_batch_size(step or self, self.model, self.optimizer, **options)


# ---- the largest batch


@pytest.mark.parametrize("room", [5, 64, 100, 10**6])
@pytest.mark.parametrize("at_most", [64, 100])
def test_the_size_that_is_found_was_tried(room: int, at_most: int) -> None:
    """The finder returns a size that it has never tried."""
    training = Training(room)
    found = training.find(at_most=at_most)
    assert found.batch_size == min(room, at_most)
    assert training.sizes.count(found.batch_size) == 2


def test_each_trial_trains() -> None:
    """All trials succeed because none of them runs a batch, if the search starts in the middle of a run."""
    training = Training(room=20)
    for _ in range(3):
        training(4)
    training.has_moved.clear()
    found = training.find(at_most=64)
    fitting = [trial for trial in found.trials if trial.fits]
    assert len(training.has_moved) == 2 * len(fitting) and all(training.has_moved)


def test_training_has_memory_with_the_size_that_is_found() -> None:
    """Training runs out of memory with the size found, since the search did not count the optimizer's state."""
    training = Training(room=40, room_with_state=30)
    found = training.find(at_most=64)
    assert found.batch_size == 30 and not training.optimizer.state_dict()["state"]
    for _ in range(3):
        training(found.batch_size)


def test_a_failure_of_validation_gives_a_smaller_size() -> None:
    """The finder breaks if memory runs out during validation instead of training."""
    training = Training(room=64)

    def step(rows: int) -> None:
        training(rows)
        training.model.eval()
        with torch.no_grad():
            training.model(torch.randn(2 * rows, 16))
            if 2 * rows > 49:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 266.00 MiB.")
        training.model.train()

    assert training.find(step, at_most=64).batch_size == 24
    assert all(module.training for module in training.model.modules())


def test_a_first_size_that_is_too_large_gives_no_batch_of_one_row() -> None:
    """The search ends at one row if its first size is too large, and grows without a limit if nothing fails."""
    training = Training(room=50)
    with pytest.raises(RuntimeError, match="expected a size that fits, received 60, which does not"):
        training.find(at_most=1000, at_least=60)
    assert training.sizes == [60]
    training = Training(room=10**9)
    assert training.find(at_most=100).batch_size == max(training.sizes) == 100


def test_few_sizes_are_tried() -> None:
    """Each size that is tried compiles the model anew, and the search tries many."""
    training = Training(room=700)
    training.find(at_most=1000)
    assert len(set(training.sizes)) <= 2 * 10  # 2^10 > 1000
    sizes = set()
    model = nn.Sequential(nn.Linear(8, 32), nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))))

    def example(rows: int) -> Tensor:
        sizes.add(rows)
        loss: Tensor = model(torch.randn(rows, 8)).square().mean()
        return loss

    shoestring.plan_training(model, example=example, batch_size=48)
    assert len(sizes) <= 2 + 3  # two are measured, and three plans are compared


def test_what_would_have_fitted_is_said() -> None:
    """The error says how much could not be allocated, which users take for what is missing."""
    model = nn.Linear(1000, 1000)
    optimizer = AdamW(model.parameters())
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 266.00 MiB.")
    total = shoestring.memory_advice(model).total
    advice = shoestring.memory_advice(model, optimizer, batch_size=64, error=error, needed=2 * total)
    # The step needs the whole device and more, of which 266 MiB are a small part.
    assert advice.activations is not None and advice.activations > 2 * total
    assert advice.fitting is not None and 16 <= advice.fitting <= 32
    assert f"A micro-batch of {advice.fitting} rows would have fitted" in str(advice)
    training = Training(room=0)
    with pytest.raises(RuntimeError, match=r"which does not\. The device has .* A step holds weights"):
        training.find(at_most=8)


# ---- plans of a whole step


def situations(seed: int, number: int = 12) -> list[Json]:
    return [random_situation(random.Random(f"{seed} complaints {i}")) for i in range(number)]


def budgets(situation: Json) -> list[int]:
    """Return budgets of device memory in their order, from the least with a plan to one that is enough for all plans."""
    peaks = [one.peak for one in everything(situation, "exact")]
    low, high = min(peaks), max(peaks)
    return [low + (high - low) * i // 8 for i in range(9)]


def test_no_plan_changes_the_batch(seed: int) -> None:
    """The micro-batch is halved while the accumulation stays, so that training has another batch."""
    micro_batches = set()
    for situation in situations(seed):
        for budget in budgets(situation):
            found = plan(situation | {"device_memory": budget})
            assert found["micro_batch"] * found["accumulate"] == situation["batch_size"]
            micro_batches.add((situation["batch_size"], found["micro_batch"]))
    assert any(micro < batch for batch, micro in micro_batches)


def test_more_memory_gives_no_slower_plan(seed: int) -> None:
    """With more memory, the plan is slower, or its peak is above the budget."""
    for situation in situations(seed):
        seconds = float("inf")
        for budget in budgets(situation):
            found = plan(situation | {"device_memory": budget})
            assert found["peak_bytes"] <= budget and found["seconds"] <= seconds
            seconds = found["seconds"]


def test_the_automatic_batch_can_be_switched_off(seed: int) -> None:
    """The micro-batch is chosen automatically, and a given one is not kept."""
    for situation in situations(seed):
        for rows in (n for n in range(1, situation["batch_size"] + 1) if situation["batch_size"] % n == 0):
            assert plan(situation, micro_batch=str(rows))["micro_batch"] == rows


def test_a_planner_without_a_plan_says_what_is_missing(seed: int) -> None:
    """The tuner ends with "no optimal configuration", and says neither why nor what would help."""
    for situation in situations(seed):
        least = budgets(situation)[0]
        with pytest.raises(ValueError, match="device_memory of at least") as caught:
            plan(situation | {"device_memory": least - 1})
        said = re.search(r"device_memory of at least (\d+) bytes", str(caught.value))
        assert said is not None and int(said[1]) == least
        assert plan(situation | {"device_memory": least})["peak_bytes"] == least


def test_a_micro_batch_that_does_not_fit_is_explained(seed: int) -> None:
    """The planner takes another micro-batch than the whole batch, and does not say why."""
    explained = 0
    for situation in situations(seed):
        for budget in budgets(situation):
            found = plan(situation | {"device_memory": budget})
            if found["micro_batch"] == situation["batch_size"]:
                continue
            [reason] = [each["text"] for each in found["reasons"] if each["lever"] == "micro_batch"]
            whole = {"micro_batch": str(situation["batch_size"])}
            try:
                other = plan(situation | {"device_memory": budget}, **whole)
            except ValueError:
                assert "without it, no plan fits" in reason
            else:
                is_as_fast = other["seconds"] < 1.005 * found["seconds"]
                assert ("as fast as without it" if is_as_fast else f"{other['seconds']:.3g} s") in reason
            explained += 1
    assert explained


def test_no_plan_is_slower_than_plain_training(seed: int) -> None:
    """The planned run is slower than a run without any of the techniques, which would have fitted."""
    plain = {"activations": "keep", "offload": "none", "weights_place": "none", "step_in_backward": "false"}
    compared = 0
    for situation in situations(seed):
        for budget in budgets(situation):
            given = situation | {"device_memory": budget}
            try:
                other = plan(given, micro_batch=str(situation["batch_size"]), **plain)
            except ValueError:
                continue
            assert plan(given)["seconds"] <= other["seconds"]
            compared += 1
    assert compared


def test_memory_is_told_before_a_run(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody can ask before a run whether it fits, and for what the memory is needed."""
    for situation in situations(seed, 3):
        found = plan(situation)
        assert {phase["name"] for phase in found["phases"]} >= {"loading", "optimizer step", "saving"}
        assert max(phase["bytes"] for phase in found["phases"]) == found["peak_bytes"]
    succeed("estimate", "--model", "tiny", "--memory", "1GiB", "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is True
    parts = {each["name"]: each["bytes"] for each in told["memory"]["device"]}
    assert {"weights", "gradients", "state: exp_avg", "activations"} <= parts.keys()
    assert sum(parts.values()) == told["totals"]["device"]


# ---- training


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(text())
    return path


def steps_of(folder: Path) -> list[Json]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_late_failure_starts_nothing_anew(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory runs out after hours of training, and the run starts from its beginning with a smaller batch."""
    train = ["train", "--data", data, *TINY, "--steps", 6, "--checkpoint-every", 2, "--out", tmp_path / "run"]
    step, calls = loop.Trainer._step, []

    def fails_in_the_fifth(trainer: loop.Trainer, *arguments: Any) -> None:
        calls.append(trainer.run.config.batch_size)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 266.00 MiB.")
        step(trainer, *arguments)

    monkeypatch.setattr(loop.Trainer, "_step", fails_in_the_fifth)
    line = refuse(capsys, *train)
    assert "out of memory (CUDA out of memory" in line and "take a smaller --batch-size" in line
    assert len(calls) == 5
    succeed(*train, "--resume")
    assert len(calls) == 5 + 2 and len(set(calls)) == 1  # steps 5 and 6, with the same batch
    assert [row["step"] for row in steps_of(tmp_path / "run")] == [*range(1, 7)]


@pytest.mark.fresh  # the peak of this process may be that of other tests
def test_the_peak_within_a_step_is_logged(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is sampled between steps, so that the figures show the trough and not the peak."""
    train = ["train", "--data", data, *TINY, "--steps", 4, "--no-host-allocator"]
    succeed(*train, "--out", tmp_path / "plain")
    step = loop.Trainer._step

    def allocates(trainer: loop.Trainer, *arguments: Any) -> None:
        torch.ones(64 * MIB)  # 256 MiB, freed at once
        step(trainer, *arguments)

    monkeypatch.setattr(loop.Trainer, "_step", allocates)
    succeed(*train, "--out", tmp_path / "run")
    for plain, row in zip(steps_of(tmp_path / "plain"), steps_of(tmp_path / "run"), strict=True):
        assert row["peak"] >= plain["peak"] + 200 * MIB > row["rss"]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["peak_memory"] >= max(row["peak"] for row in steps_of(tmp_path / "run"))


# The step of one process fails, that of the other succeeds.
FAILS = """
from shoestring.training.run import loop
step, count = loop.Trainer._step, 0
def fails(trainer, *arguments):
    global count
    count += 1
    if count == 3 and os.environ["RANK"] == "1":
        raise MemoryError("simulated")
    step(trainer, *arguments)
loop.Trainer._step = fails
"""


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.sample(1)
def test_processes_do_not_wait_for_one_that_has_failed(strategy: str, data: Path, tmp_path: Path) -> None:
    """Processes run out of memory at different moments, and the others wait for ever."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    train = ["train", "--data", data, *TINY, "--steps", 6, "--device", "cpu", "--parallel", strategy]
    logs = [tmp_path / str(rank) for rank in range(2)]
    with Commands() as commands:
        processes = []
        for rank, log in enumerate(logs):
            environment = {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            code = f"import os; os.environ.update({environment!r})\n{FAILS}"
            processes.append(commands.start(*train, "--out", tmp_path / "run", log=log, code=code))
        codes = [commands.wait(process) for process in processes]
    waiting, failed = (log.read_text() for log in logs)
    assert codes == [2, 2], waiting + failed
    assert "out of memory (simulated)" in failed
    assert "start the processes again with --resume" in waiting
