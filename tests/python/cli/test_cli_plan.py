"""Test --device-memory of train and finetune, and the command plan."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import shoestring
from cli_helpers import SHORT, TINY, TUNE, assert_same_weights, losses, refuse, succeed, text
from shoestring.checkpoint import weights
from shoestring.cli import places
from shoestring.core.process_memory import resident_bytes
from shoestring.training.config import FinetuneConfig, TrainConfig
from shoestring.training.report.plots import megabytes
from shoestring.training.run import loop, plan
from shoestring.training.run.folder import next_budget

pytestmark = pytest.mark.usefixtures("blank_images")

STEPS = ["--steps", 6, "--checkpoint-every", 3, "--eval-every", 100, "--val-fraction", 0]

FREE = ["--device-memory", "free"]


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


def recorded(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "run.json").read_text())
    return content


def as_planned(run: Path) -> list[object]:
    """Return the options of a run without a plan that does what the plan of ``run`` says."""
    plan = recorded(run)["plan"]
    assert not plan["step_in_backward"] and plan["offload"] == "none"
    rows = ["--batch-size", plan["micro_batch"], "--accumulate", plan["accumulate"]]
    return [*rows, "--optimizer-state", plan["optimizer_state"]]


def test_a_planned_run_has_the_bits_of_its_options_also_resumed(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = ["--device-memory", "free", "--batch-size", 8]
    train = ["train", "--data", data, *TINY, *STEPS]
    succeed(*train, *budget, "--out", tmp_path / "planned")
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("plan: ")]
    assert 1 <= len(notes) <= 8 and "rows, fp32, " in notes[0]
    plan = recorded(tmp_path / "planned")["plan"]
    assert plan["micro_batch"] * plan["accumulate"] == 8
    succeed(*train, *as_planned(tmp_path / "planned"), "--out", tmp_path / "given")
    assert losses(tmp_path / "planned") == losses(tmp_path / "given")
    assert_same_weights(tmp_path / "planned/model", tmp_path / "given/model")

    summary = json.loads((tmp_path / "planned/summary.json").read_text())
    assert summary["planned_peak"] == plan["peak_bytes"] and summary["planned_seconds"] == plan["seconds"]
    page = (tmp_path / "planned/report.html").read_text("utf-8")
    assert (
        f"planned {megabytes(plan['peak_bytes'])} MB" in page and f"planned {plan['seconds']:.3g} s" in page
    )

    again = tmp_path / "again"
    shutil.copytree(tmp_path / "planned", again)
    shutil.rmtree(again / "checkpoints/step-00000006")
    shutil.rmtree(again / "model")
    capsys.readouterr()
    succeed(*train, *budget, "--out", again, "--resume")
    assert "plan: " not in capsys.readouterr().out  # nothing is planned anew
    assert recorded(again)["plan"] == plan and losses(again) == losses(tmp_path / "given")
    assert_same_weights(again / "model", tmp_path / "given/model")
    message = refuse(capsys, *train, "--batch-size", 4, "--out", again, "--resume")
    assert "--batch-size x --accumulate: expected 8 rows in a step, as planned, got 4" in message
    message = refuse(capsys, *train, *budget, "--optimizer-state", "bf16", "--out", again, "--resume")
    assert f"optimizer_state differs: {plan['optimizer_state']} as planned, then bf16" in message
    before = (again / "run.json").read_bytes()
    for option, expected in (
        (["--activations", "recompute"], "activations differs: keep as planned, then recompute"),
        (["--memory-budget", "1GiB"], "expected no --memory-budget 1GiB, since the run has a plan"),
    ):
        assert expected in refuse(capsys, *train, "--batch-size", 8, *option, "--out", again, "--resume")
    given = tmp_path / "given"
    message = refuse(capsys, *train, *budget, *as_planned(again), "--out", given, "--resume")
    assert "expected no --device-memory free, since the run has begun without a plan" in message
    assert (again / "run.json").read_bytes() == before

    damaged = recorded(again)
    for changes, expected in (
        ({"model": "Other-0"}, "plan: model: expected the planned one (Other-0), received LlamaForCausalLM-"),
        ({"checkpoints": [{**plan["checkpoints"][0], "block": "none", "treatment": "recompute"}]}, "has no attribute"),
        ({"format_version": 2}, "expected format_version 1, received 2"),
    ):  # fmt: skip
        (again / "run.json").write_text(json.dumps(damaged | {"plan": plan | changes}))
        message = refuse(capsys, *train, *budget, "--out", again, "--resume")
        assert f"{again / 'run.json'}: plan: " in message and expected in message
        assert message.endswith("; give another --out")


def test_options_that_are_given_stay(data: Path, model: Path, tmp_path: Path) -> None:
    """--accumulate fixes the micro-batch, too."""
    tune = ["finetune", "--model", model, "--data", data, *TUNE, "--steps", 2, "--device-memory", "free"]
    given = [
        "--accumulate",
        2,
        "--optimizer-state",
        "bf16",
        "--activations",
        "recompute",
        "--step-in-backward",
    ]
    succeed(*tune, *given, "--out", tmp_path / "run")
    plan = recorded(tmp_path / "run")["plan"]
    assert (plan["micro_batch"], plan["accumulate"]) == (4, 2)
    assert plan["optimizer_state"] == "bf16" and plan["step_in_backward"]
    assert {block["treatment"] for block in plan["checkpoints"]} == {"recompute"}


def test_plan_prints_a_plan_and_trains_nothing(
    data: Path,
    model: Path,
    tmp_path: Path,
    blank_images: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    blank_images.undo()
    tune = [*TUNE, "--model", model, "--data", data, "--device-memory", "free"]
    before = set(tmp_path.iterdir())
    succeed("plan", *tune, "--plot", tmp_path / "plan.png", "--json", tmp_path / "plan.json")
    printed = capsys.readouterr().out
    assert "tokens/s; memory by phase:" in printed and "the fastest plans of other budgets:" in printed
    assert {path.name for path in set(tmp_path.iterdir()) - before} == {"plan.png", "plan.json"}
    plan = shoestring.TrainingPlan.load(tmp_path / "plan.json")
    assert plan.micro_batch * plan.accumulate == 4 and str(plan).splitlines()[0] in printed
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_budgets_that_cannot_be_met(
    data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune = ["finetune", "--model", model, "--data", data, *TUNE, "--steps", 2, "--out", tmp_path / "run"]
    message = refuse(capsys, *tune, "--device-memory", "1MiB")
    least = int(message.partition("device_memory of at least ")[2].split()[0])
    assert least > 0.5 * resident_bytes() and "received 1048576" in message
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())
    for budget in ("2 apples", "0"):
        assert "--device-memory: expected a number of bytes" in refuse(
            capsys, *tune, "--device-memory", budget
        )
    assert "no such" in refuse(capsys, *tune, "--device-memory", "free", "--disk", tmp_path / "none").lower()
    for option in (["--baseline"], ["--compile"], ["--memory-budget", "1GiB"], ["--optimizer", "muon"]):
        message = refuse(capsys, *tune, "--device-memory", "free", *option)
        assert message.startswith("shoestring: error: --device-memory free: expected no --"), message


def test_adapters_are_offered_if_full_training_does_not_fit(
    data: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options: list[dict[str, Any]] = []

    def nothing_fits(*_: Any, **given: Any) -> None:
        options.append(given["fixed"])
        raise ValueError('plan_training: expected larger budgets; with freedom "method" a plan fits')

    monkeypatch.setattr("shoestring.training.run.plan.plan_training", nothing_fits)
    files = ["--data", data, "--out", tmp_path / "run", "--device-memory", "1GiB"]
    tune = ["finetune", "--model", model, *SHORT, "--steps", 2, *files]
    message = refuse(capsys, *tune, "--full")
    assert message.endswith("--device-memory 1GiB: expected larger budgets; without --full a plan fits")
    refuse(capsys, "train", *TINY, *STEPS, *files)
    # A model that was never trained cannot do with adapters, so that they are not measured.
    assert [given.get("adapters") for given in options] == [None, "none"]
    for command in (tune, ["plan", "--model", model, *files[:2]]):
        message = refuse(capsys, *command, "--full", "--freedom", "method")
        assert "--freedom: expected exact | rounding, got method" in message


@pytest.mark.parametrize("planned", [True, False])
def test_a_run_goes_on_with_another_plan_after_memory_ran_out(
    planned: bool,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    train = ["train", "--data", data, *TINY, *STEPS, "--batch-size", 8, "--out", run]
    budget: list[object] = ["--device-memory", "free"] if planned else []
    accumulate = loop.Trainer._accumulate

    def fails_once(self: loop.Trainer, step: int, *args: Any, **options: Any) -> None:
        accumulate(self, step, *args, **options)
        if step == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(loop.Trainer, "_accumulate", fails_once)
    message = refuse(capsys, *train, *budget)
    assert "step 5: out of memory (CUDA out of memory. Tried" in message and "step 4 is saved" in message
    assert ("the next plan needs " in message) == planned
    monkeypatch.undo()
    assert (run / "checkpoints/step-00000004").is_dir() and len(losses(run)) == 4
    message = refuse(capsys, *train, "--replan", *budget)
    assert "--replan: expected --resume as well" in message
    before = losses(run)
    first = recorded(run).get("plan")
    budgets: list[int] = []

    def recorded_budget(*arguments: Any) -> int:
        budgets.append(next_budget(*arguments))
        return budgets[-1]

    monkeypatch.setattr(plan, "next_budget", recorded_budget)
    succeed(*train, "--resume", "--replan", "--device-memory", "free")
    second = recorded(run)["plan"]
    assert losses(run)[:4] == before and len(losses(run)) == 6
    assert second["micro_batch"] * second["accumulate"] == 8
    assert first is None or next_budget(shoestring.TrainingPlan(first)) < first["peak_bytes"]
    assert len(budgets) == planned and all(second["peak_bytes"] <= most for most in budgets)
    assert second["optimizer_state"] == (first["optimizer_state"] if first else "8bit")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--device-memory", "none", "--disk", "."],
            "--disk .: expected no --device-memory none, received both",
        ),
        (
            ["--device-memory", "none", "--freedom", "rounding"],
            "--freedom rounding: expected no --device-memory none, received both",
        ),
        (["--host-memory", "1GiB", "--compile"], "--host-memory 1GiB: expected no --compile, received both"),
        ([*FREE, "--host-memory", "1GiB", "--device", "cpu"], "--host-memory 1GiB: expected a GPU"),
        ([*FREE, "--host-memory", "free"], "--host-memory: expected a number of bytes"),
        ([*FREE, "--disk", ""], "--disk : expected DIR or DIR=LIMIT"),
        ([*FREE, "--disk", "=1GiB"], "--disk =1GiB: expected DIR or DIR=LIMIT"),
        ([*FREE, "--disk", ".=0"], "--disk .=0: expected DIR or DIR=LIMIT"),
        ([*FREE, "--disk", "a=b"], "--disk a=b: expected DIR or DIR=LIMIT"),
        ([*FREE, "--disk", ".=999TB"], "--disk .=999TB: expected at most the"),
        ([*FREE, "--disk", __file__], f"--disk {__file__}: {__file__}: Not a directory"),
        ([*FREE, "--disk", "/proc"], "--disk /proc: /proc: No such file or directory"),
    ],
)
def test_options_that_no_plan_can_follow(
    options: list[str], expected: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refuse(capsys, "train", "--data", data, *TINY, *options, "--out", tmp_path / "run")
    assert message.startswith(f"shoestring: error: {expected}")
    assert not list(tmp_path.iterdir())


def test_given_options_that_a_plan_cannot_have(
    data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune = [
        "finetune",
        "--model",
        model,
        "--data",
        data,
        *TUNE,
        "--device",
        "cpu",
        *FREE,
        "--out",
        tmp_path / "run",
    ]
    for options, expected in (
        (["--activations", "offload"], "--activations: expected keep | "),
        (["--offload", "cpu"], "--offload: expected none, received cpu; a plan has no other here"),
        (["--offload", "nvme:/none"], "--offload nvme:/none: /none: No such file or directory; name an existing folder"),
    ):  # fmt: skip
        assert refuse(capsys, *tune, *options).startswith(f"shoestring: error: {expected}")


def test_a_given_offload_to_a_folder_needs_no_disk(
    data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also, no reason says that the weights would not fit elsewhere, which was not tried."""
    places = ["--offload", f"nvme:{tmp_path}", "--offload-weights", f"nvme:{tmp_path}"]
    tune = ["finetune", "--model", model, "--data", data, *TUNE, "--steps", 1, *FREE, *places]
    succeed(*tune, "--out", tmp_path / "run")
    assert "without it, no plan fits" not in capsys.readouterr().out
    assert recorded(tmp_path / "run")["plan"]["offload"] == f"nvme:{tmp_path}"


def test_layers_leave_in_tiles_if_two_blocks_do_not_fit(
    data: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The budget of the weights has room for 150 kB of a block's 258 kB. A resumed run has the tiles of its plan."""
    monkeypatch.setattr(weights, "LEAST", 1024)
    names = {"hidden_size": 128, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=300, num_key_value_heads=4, max_position_embeddings=32, **names)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "large")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "large")
    place = f"nvme:{tmp_path}"
    tune = [
        "finetune",
        "--model",
        tmp_path / "large",
        "--data",
        data,
        *TUNE,
        *STEPS,
        "--target-modules",
        "q_proj,v_proj",
    ]

    def budget(config: FinetuneConfig, device: torch.device) -> int:
        _, found = places._least(replace(config, offload_weights=place), str(tmp_path / "large"), device)
        (arriving,) = (item.bytes or 0 for item in found.memory["device"] if item.name == places.IN_FLIGHT)
        return places._bytes(found, device) - arriving + 150_000

    monkeypatch.setattr(places, "resident_bytes", lambda: 0)
    monkeypatch.setattr(places, "budget_of", budget)
    budgets = [*FREE, "--disk", tmp_path]
    succeed(*tune, *budgets, "--out", tmp_path / "tiled")
    printed = capsys.readouterr().out
    assert f"to fit --device-memory free: --offload-weights {place} --precision fp32" in printed
    rows = {"gate_proj": 512, "up_proj": 512, "down_proj": 64}
    for name, most in rows.items():
        assert f"to fit --device-memory free: model.layers.*.mlp.{name} in tiles of {most} rows\n" in printed
        assert (
            f"plan: model.layers.*.mlp.{name} in tiles of {most} rows: each takes 0.1 MiB whole, of a budget "
            in printed
        )
    plan = recorded(tmp_path / "tiled")["plan"]
    assert plan["tiles"] == {
        f"model.layers.{i}.mlp.{name}": most for i in range(4) for name, most in rows.items()
    }
    assert plan["weights_place"] == place
    given = [*as_planned(tmp_path / "tiled"), "--device-memory", "none", "--offload-weights", place]
    succeed(*tune, *given, "--out", tmp_path / "whole")
    whole, first = losses(tmp_path / "whole"), losses(tmp_path / "tiled")
    for one, other in zip(first, whole, strict=True):
        assert one[:2] == pytest.approx(other[:2], rel=1e-4)
    assert len(first) == 6

    monkeypatch.setattr(places, "budget_of", lambda *_: 1 << 40)
    shutil.rmtree(tmp_path / "tiled/checkpoints/step-00000006")
    capsys.readouterr()
    succeed(*tune, *budgets, "--out", tmp_path / "tiled", "--resume")
    assert "model.layers.*.mlp.up_proj in tiles of 512 rows" in capsys.readouterr().out
    assert recorded(tmp_path / "tiled")["plan"] == plan and losses(tmp_path / "tiled") == first
    succeed(*tune, *budgets, "--out", tmp_path / "fits")
    assert recorded(tmp_path / "fits")["plan"]["tiles"] == {}


def test_a_model_with_one_block(
    data: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It trains, but neither a plan nor recomputation has blocks to choose from."""
    names = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=300, num_key_value_heads=2, max_position_embeddings=32, **names)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "one")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "one")
    tune = [
        "finetune",
        "--model",
        tmp_path / "one",
        "--data",
        data,
        *TUNE,
        "--steps",
        60,
        "--out",
        tmp_path / "run",
    ]
    for options, expected in (
        (
            [*FREE, "--precision", "auto"],
            "--device-memory free: blocks: found no list of modules of one class",
        ),
        (["--freedom", "rounding"], "--device-memory auto: blocks: found no list of modules of one class"),
        (["--activations", "recompute"], "--activations recompute: found no list of modules of one class"),
    ):
        assert refuse(capsys, *tune, *options).startswith(f"shoestring: error: {expected}")
    monkeypatch.setattr(plan, "SECONDS", 0.0)
    succeed(*tune)
    assert (
        "plan: none, since --device-memory auto: blocks: found no list of modules" in capsys.readouterr().out
    )


def test_a_run_without_options_is_planned_if_that_pays(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ["train", "--data", data, *TINY, "--val-fraction", 0, "--checkpoint-every", 50]
    for options, expected in (
        (["--steps", 2], "plan: none, since the run has 2 micro-batches, fewer than 50"),
        (["--steps", 52], "plan: none, since planning takes about 10 s, more than a tenth of this run"),
        (["--steps", 2, "--compress", "none", "--memory-budget", "1GiB"], "nothing is planned with --memory-budget 1GiB"),
        (["--steps", 2, "--device-memory", "none"], ""),
        (["--steps", 2, "--baseline"], ""),
    ):  # fmt: skip
        succeed(*train, *options, "--out", tmp_path / "-".join(map(str, options)))
        printed = capsys.readouterr().out
        assert expected in printed and ("plan: " in printed) == bool(expected)

    monkeypatch.setattr(plan, "SECONDS", 0.0)
    succeed(*train, "--steps", 52, "--out", tmp_path / "planned")
    content = recorded(tmp_path / "planned")["plan"]
    given = ["--device-memory", "none", *as_planned(tmp_path / "planned")]
    succeed(*train, "--steps", 52, *given, "--out", tmp_path / "given")
    assert losses(tmp_path / "planned") == losses(tmp_path / "given")
    capsys.readouterr()
    for run in ("planned", "given"):  # neither has begun without what it has, so neither is planned anew
        shutil.rmtree(tmp_path / run / "checkpoints/step-00000052")
        options = given if run == "given" else []
        succeed(*train, "--steps", 52, *options, "--out", tmp_path / run, "--resume")
        assert recorded(tmp_path / run).get("plan") == (content if run == "planned" else None)
        assert "plan: 1" not in capsys.readouterr().out

    # Short of memory, a run is planned, however short it is; what does not fit is refused.
    monkeypatch.setattr(plan, "SECONDS", 1e9)
    monkeypatch.setattr(plan, "budget_of", lambda config, device: 1 << 20)
    message = refuse(capsys, *train, "--steps", 52, "--out", tmp_path / "small")
    assert "expected device_memory of at least" in message
    assert message.endswith("; --device-memory none trains without a plan")


def test_options_of_a_configuration_stay(data: Path, tmp_path: Path) -> None:
    """A program that makes a configuration gives no list of the options that it means."""
    config = TrainConfig(activations="recompute", optimizer_state="bf16")
    assert plan._given(config, "none") == {
        "activations": "recompute", "adapters": "none", "optimizer_state": "bf16", "precision": "auto",
    }  # fmt: skip


def test_plan_refuses_what_it_cannot_plan_or_write(
    data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune = [*TUNE, "--model", model, "--data", data]
    same = ["--json", tmp_path / "same", "--plot", tmp_path / "same"]
    for options, expected in (
        (["--baseline"], "--baseline: expected an option for which plans are made"),
        (["--optimizer", "muon"], "--optimizer muon: expected an option for which plans are made"),
        (["--json", tmp_path], f"--json {tmp_path}: Is a directory"),
        (["--json", tmp_path / "none/plan.json"], f"--json {tmp_path}/none/plan.json: No such file or directory"),
        (["--plot", "/proc/plan.png"], "--plot /proc/plan.png: No such file or directory"),
        (same, "--plot and --json: expected two files"),
        (["--resume"], "--resume: expected a new plan"),
    ):  # fmt: skip
        assert refuse(capsys, "plan", *tune, *options).startswith(f"shoestring: error: {expected}")
    assert not list(tmp_path.iterdir())
