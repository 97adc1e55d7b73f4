"""Test plans of several processes: the command `plan --world`, and runs of two processes of the CPU (Gloo)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoestring
from cli_helpers import TINY, TUNE, assert_same_weights, losses, refuse, succeed, text, write_jsonl
from cli_server import Commands

pytestmark = pytest.mark.usefixtures("blank_images")
STEPS = ["--steps", 6, "--checkpoint-every", 3, "--eval-every", 3, "--device", "cpu"]
FREE = ["--device-memory", "free"]
WORLD = ["--world", 2, "--link", "10Gbit,50us"]
# The strategy that sends the fewest bytes is the fastest over this link.
SLOW = """
from shoestring.distributed.links import Link
from shoestring.training.run import plan
plan.measure_link = lambda device: Link.parse("10Mbit,1ms")
"""
# The plan has a strategy that is not given, as if no other fitted.
SPLIT = """
from shoestring.training.run import plan
true = plan.plan_training
def split(*arguments, fixed, **options):
    return true(*arguments, fixed={"parallel": "zero3"} | fixed, **options)
plan.plan_training = split
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Commands]:
    with Commands() as commands:
        yield commands


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(text())
    return path


@pytest.fixture(scope="module")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "run"
    succeed("train", "--data", data, "--out", folder, *TINY, "--steps", 1)
    return folder / "model"


def trained(server: Commands, folder: Path, *arguments: object, code: str = "") -> str:
    """Run a command in two processes, of which only the first says something; return what it says."""
    first, other = server.together(folder, *arguments, code=code)
    assert (first.code, other.code) == (0, 0), first.errors + other.errors
    assert "report:" in first.out and other.out == ""
    return first.out


def refused(server: Commands, folder: Path, *arguments: object, code: str = "") -> str:
    """Run a command in two processes that both end with code 2 and the same line; return the line."""
    first, other = server.together(folder, *arguments, code=code)
    assert (first.code, other.code) == (2, 2), first.errors + other.errors
    assert first.errors == other.errors and first.errors.count("\n") == 1
    return first.errors


def recorded(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "run.json").read_text())
    return content


def as_planned(run: Path, *more: object) -> list[object]:
    """Return the options of a run without a plan that does what the plan of two processes says."""
    record = recorded(run)
    plan = record["plan"]
    assert record["processes"] == 2 and plan["offload"] == "none" and not plan["step_in_backward"]
    rows = ["--batch-size", plan["micro_batch"], "--accumulate", 2 * plan["accumulate"]]
    state = ["--optimizer-state", plan["optimizer_state"]]
    return [*rows, *state, "--parallel", plan["parallel"], "--device-memory", "none", *more]


def shortened(run: Path) -> None:
    """Let a finished run end with its first checkpoint."""
    shutil.rmtree(run / "checkpoints/step-00000006")
    shutil.rmtree(run / "model")


def test_plan_of_processes_that_are_not_here(
    data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", *TUNE, "--model", model, "--data", data, *FREE, *WORLD]
    succeed(*command, "--json", tmp_path / "plan.json")
    plan = shoestring.TrainingPlan.load(tmp_path / "plan.json")
    printed = capsys.readouterr().out
    assert f"{plan.parallel} over 2 processes; the plan and the memory of one of them:" in printed
    assert f"rows in each process, {plan.parallel}, fp32, " in printed
    assert f"--parallel {plan.parallel}: a batch takes {plan.seconds:.3g} s over 10Gbit,50us" in printed
    assert ", in which a rank sends " in printed and " MiB of gradients" in printed
    assert "tokens/s; memory by phase:" in printed
    # By default, each process has a micro-batch in a step.
    assert plan.micro_batch * plan.accumulate == 4
    succeed(*command, "--parallel", "zero3")
    assert "--parallel zero3: as given: a batch takes " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--world", 2], "--world 2: expected --link as well, such as 10Gbit,50us, received none"),
        (["--link", "1Gbit,1ms"], "--link 1Gbit,1ms: expected --world as well, received none"),
        (["--parallel", "ddp"], "--parallel ddp: expected --world as well, received none"),
        (["--world", 2, "--link", "fast"], "--link: expected bandwidth,latency, such as 100Mbit,30ms"),
        (["--world", 2, "--link", "1Gbit,fast"], "--link: expected a latency such as 30ms or 5us"),
        (["--world", 1, "--link", "1Gbit,1ms"], "--link 1Gbit,1ms: expected none for one process"),
        (["--world", 0], "--world: expected at least 1, got 0"),
        (["--world", "two"], "--world: expected an integer, got two"),
        ([*WORLD, "--accumulate", 3], "--accumulate: expected a multiple of the 2 processes"),
        ([*WORLD, "--parallel", "none"], "--parallel: expected auto, ddp, zero1, zero2 or zero3 with --world 2"),
        ([*WORLD, "--parallel", "hsdp"], "--parallel hsdp: expected an option for which plans are made"),
        ([*WORLD, "--compress", "8bit"], "--compress 8bit: expected an option for which plans are made"),
        ([*WORLD, "--offload-weights", "nvme:."], "--offload-weights nvme:.: expected an option for which"),
        ([*WORLD, "--step-in-backward"], "--parallel auto: expected no --step-in-backward, received both"),
        ([*WORLD, "--precision", "fp16"], "--parallel auto: expected no --precision fp16, received both"),
    ],
)  # fmt: skip
def test_plan_refuses_wrong_processes(
    options: list[object], expected: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = [each for each in TUNE if each not in ("--precision", "fp32")]
    message = refuse(capsys, "plan", *short, "--model", "x", "--data", data, *options)
    assert message.startswith(f"shoestring: error: {expected}"), message


def test_plan_is_made_by_one_process(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = refuse(capsys, "plan", *TUNE, "--model", "x", "--data", data)
    assert (
        "plan: expected one process, which plans for as many as --world says, got the 2 of torchrun"
        in message
    )


@pytest.mark.parametrize(
    "options", [["--parallel", "hsdp"], ["--parallel", "ddp", "--compress", "8bit"]], ids=" ".join
)
def test_what_is_not_planned_is_refused_by_name(
    options: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--data", data, "--out", tmp_path / "run", *TINY, *FREE, *options]
    named = " ".join(options[-2:])
    assert f"--device-memory free: expected no {named}, received both" in refuse(capsys, *command)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--parallel", "zero1", "--optimizer-state", "fp32"],
        ["--parallel", "zero2", "--accumulate", 4],
        ["--parallel", "zero3", "--activations", "recompute"],
    ],
    ids=lambda options: " ".join(map(str, options)) or "open",
)
@pytest.mark.sample(2)
def test_planned_processes_have_the_bits_of_their_options(
    options: list[object], server: Commands, data: Path, tmp_path: Path
) -> None:
    """The link is measured. Options that are given stay, and the run has the losses and weights of one without a plan."""
    train = ["train", "--data", data, *TINY, *STEPS]
    printed = trained(server, tmp_path, *train, *FREE, *options, "--out", tmp_path / "planned")
    record = recorded(tmp_path / "planned")
    plan = record["plan"]
    assert f"rows in each process, {plan['parallel']}, fp32, " in printed
    rows = 4 * (4 if "--accumulate" in options else 2)
    assert 2 * plan["micro_batch"] * plan["accumulate"] == rows
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert plan["parallel"] == given.get("--parallel", plan["parallel"])
    assert plan["optimizer_state"] == given.get("--optimizer-state", plan["optimizer_state"])
    if "--activations" in given:
        assert {block["treatment"] for block in plan["checkpoints"]} == {"recompute"}
    if "--accumulate" in given:
        assert plan["micro_batch"] == 4
    assert record["fingerprint"].get("sharded_weights", False) == (plan["parallel"] == "zero3")
    summary = json.loads((tmp_path / "planned/summary.json").read_text())
    assert summary["parallel"] == plan["parallel"] and summary["planned_peak"] == plan["peak_bytes"]
    assert len(summary["peak_of_processes"]) == 2

    same = as_planned(tmp_path / "planned", *(options[-2:] if "--activations" in given else ()))
    trained(server, tmp_path, *train, *same, "--out", tmp_path / "given")
    assert losses(tmp_path / "planned") == losses(tmp_path / "given")
    assert_same_weights(tmp_path / "planned/model", tmp_path / "given/model")


@pytest.mark.parametrize("split", [False, True])
def test_a_resumed_run_keeps_its_plan_and_its_processes(
    split: bool, server: Commands, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ["train", "--data", data, *TINY, *STEPS, *FREE]
    run, again = tmp_path / "run", tmp_path / "again"
    trained(server, tmp_path, *train, "--out", run, code=SPLIT if split else SLOW)
    plan = recorded(run)["plan"]
    assert plan["parallel"] == ("zero3" if split else "ddp")
    shutil.copytree(run, again)
    shortened(again)
    shutil.copytree(again, tmp_path / "other")
    for more in ([], ["--parallel", "auto"]):
        trained(server, tmp_path, *train, *more, "--out", again, "--resume")
        assert recorded(again)["plan"] == plan and recorded(again)["processes"] == 2
        assert losses(again) == losses(run)
        assert_same_weights(again / "model", run / "model")
        shortened(again)
    other = "zero1" if split else "zero2"
    message = refused(server, tmp_path, *train, "--parallel", other, "--out", again, "--resume")
    assert f"parallel differs: {plan['parallel']} as planned, then {other}; leave the option out" in message

    alone = [*train, "--accumulate", 2, "--out", tmp_path / "other", "--resume"]
    before = (tmp_path / "other/run.json").read_bytes()
    message = refuse(capsys, *alone)
    assert "processes: expected 2, as planned, got 1; start as many, or give --replan as well" in message
    if split:
        message = refuse(capsys, *alone, "--replan")
        assert (
            "expected two or more processes, since the run has split its weights (zero3), got one" in message
        )
    assert (tmp_path / "other/run.json").read_bytes() == before
    if not split:
        # State of whole weights is stored in another form than that of split ones, which zero3 would need.
        trained(server, tmp_path, *train, "--out", again, "--resume", "--replan", code=SPLIT)
        assert recorded(again)["plan"]["parallel"] == "zero2" and losses(again)[:3] == losses(run)[:3]
        succeed(*alone, "--replan")
        record = recorded(tmp_path / "other")
        assert record["processes"] == 1 and record["plan"]["parallel"] == "none"
        assert losses(tmp_path / "other")[:3] == losses(run)[:3] and len(losses(tmp_path / "other")) == 6
        message = refused(server, tmp_path, *train, "--out", tmp_path / "other", "--resume")
        assert "processes: expected 1, as planned, got 2" in message
    (again / "run.json").write_text(json.dumps(recorded(again) | {"processes": 0}))
    message = refused(server, tmp_path, *train, "--out", again, "--resume")
    assert f"{again / 'run.json'}: processes: expected the number that the plan is of" in message


def test_errors_of_the_first_process_reach_all(server: Commands, data: Path, tmp_path: Path) -> None:
    train = ["train", "--data", data, *TINY, *STEPS, "--out", tmp_path / "run"]
    message = refused(server, tmp_path, *train, "--device-memory", "1MiB")
    assert "--device-memory 1MiB: expected device_memory of at least " in message
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())
    broken = """
from shoestring.training.run import plan
def fails(*_, **options):
    raise ZeroDivisionError("the planner is broken")
plan.plan_training = fails
"""
    first, other = server.together(tmp_path, *train, *FREE, code=broken)
    assert first.code == 1 and "ZeroDivisionError: the planner is broken" in first.errors
    assert other.code == 2 and other.errors == "shoestring: error: the planner is broken\n"


def test_processes_without_options_are_planned_if_that_pays(
    server: Commands, data: Path, tmp_path: Path
) -> None:
    train = ["train", "--data", data, *TINY, *STEPS]
    printed = trained(server, tmp_path, *train, "--out", tmp_path / "short")
    assert "plan: none, since the run has 6 micro-batches, fewer than 50" in printed
    assert "plan" not in recorded(tmp_path / "short")
    # Without a plan, the free memory decides, as with --parallel auto.
    assert json.loads((tmp_path / "short/summary.json").read_text())["parallel"] == "ddp"
    pays = "from shoestring.training.run import plan\nplan.LEAST_MICRO_BATCHES, plan.SECONDS = 1, 0.0\n"
    printed = trained(
        server, tmp_path, *train, "--parallel", "zero1", "--out", tmp_path / "planned", code=pays
    )
    assert "--parallel zero1: as given: a batch takes " in printed
    assert recorded(tmp_path / "planned")["plan"]["parallel"] == "zero1"


def test_finetune_with_a_quantised_base(server: Commands, model: Path, tmp_path: Path) -> None:
    records = [{"prompt": f"the cat {i}", "completion": "sat on a mat"} for i in range(40)]
    tune = ["finetune", "--model", model, "--data", write_jsonl(tmp_path / "data.jsonl", list(records))]
    tune += [*TUNE, *STEPS]
    trained(server, tmp_path, *tune, "--device-memory", "8GiB", "--out", tmp_path / "planned")
    trained(server, tmp_path, *tune, *as_planned(tmp_path / "planned"), "--out", tmp_path / "given")
    assert losses(tmp_path / "planned") == losses(tmp_path / "given")
    assert_same_weights(tmp_path / "planned/adapter", tmp_path / "given/adapter")
