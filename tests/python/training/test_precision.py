"""The default of --precision takes the fastest precision that agrees with fp32, and has no other effect."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cli_helpers import TINY, TUNE, assert_same_weights, losses, run, succeed, text
from report_helpers import Page, write_run
from shoestring.checkpoint.measure import metered
from shoestring.data.batches import Blocks
from shoestring.planning.candidates import NoPlanError
from shoestring.training.config import PRESETS, TrainConfig
from shoestring.training.report.write import write_comparison
from shoestring.training.run import loop, precision
from shoestring.training.run.folder import Run
from shoestring.training.run.models import build_preset, fused_loss
from shoestring.training.run.precision import Trial, choose_precision, planned_in_precision
from shoestring.training.run.processes import Processes

pytestmark = pytest.mark.usefixtures("blank_images")

Runner = Callable[..., Trial]


class Notes(list[str]):
    """Progress of a run that keeps the notes."""

    def step(self, metrics: dict[str, Any]) -> None:
        pass

    def note(self, text: str) -> None:
        self.append(text)


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., loop.Trainer]:
    """Return a function that makes a trainer of a tiny Llama in a run folder."""

    def make(**options: Any) -> loop.Trainer:
        config = TrainConfig(**({"seq_len": 32, "batch_size": 4, "steps": 100} | options))
        (tmp_path / "run.json").write_text(json.dumps({"command": "train", "threads": 1, "fingerprint": {}}))
        torch.manual_seed(0)
        model = build_preset(PRESETS["tiny"], 300, 32, 0)
        tokens = np.random.default_rng(0).integers(0, 300, 32 * 64 + 1).astype(np.uint16)
        data = Blocks(tokens, config.seq_len)
        where = Run(config, "train", tmp_path, fingerprint=config.fixed())
        return loop.Trainer(where, model, fused_loss(model, 8), data, data, Notes())

    return make


def runner(calls: list[str], **trials: Trial | Exception) -> Runner:
    """Return a runner of trials that answers from a table, and records the precisions."""

    def answer(trainer: loop.Trainer, name: str, batch: loop.Batch) -> Trial:
        calls.append(name)
        found = trials[name]
        if isinstance(found, Exception):
            raise found
        return found

    return answer


def trial(seconds: float, loss: float = 5.0, norm: float = 2.0) -> Trial:
    return Trial(loss, norm, seconds)


EXACT = trial(1.0)


@pytest.mark.parametrize(
    ("bf16", "options", "taken"),
    [
        (trial(1.6), {}, ["fp32", "bf16"]),
        (trial(0.5), {}, ["bf16"]),
        (trial(1.6, loss=6.0), {}, ["fp32"]),
        (trial(1.6), {"precision": "fp32"}, ["fp32"]),
    ],
)
def test_bf16_is_taken_if_no_plan_in_fp32_fits(
    bf16: Trial,
    options: dict[str, Any],
    taken: list[str],
    trainer: Callable[..., loop.Trainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plans of one precision after the other do not fit. A precision that disagrees, or is not open, is not tried."""
    monkeypatch.setattr(precision, "candidates", lambda config, device: ["fp32", "bf16"])
    monkeypatch.setattr(precision, "run_pass", runner([], fp32=EXACT, bf16=bf16))
    planned: list[str] = []
    built: list[str] = []

    def plan(one: loop.Trainer) -> None:
        planned.append(one.run.config.precision)
        raise NoPlanError("it does not fit")

    one = trainer(**options)
    with pytest.raises(NoPlanError, match="it does not fit"):
        planned_in_precision(one, lambda config: built.append(config.precision), plan)
    assert planned == taken and built == [name for name in taken if name == "bf16"]
    if taken == ["fp32", "bf16"]:
        assert one.progress[-1] == "--precision auto: bf16, since no plan in fp32 fits"
        assert json.loads((one.run.folder / "run.json").read_text())["fingerprint"]["precision"] == "bf16"
        planned.clear()
        assert planned_in_precision(trainer(), None, lambda one: one.run.config.precision) == "fp32"


@pytest.mark.parametrize(
    ("trials", "chosen", "said"),
    [
        ({"bf16": trial(0.5)}, "bf16", "bf16 2.00"),
        ({"bf16": trial(0.98)}, "fp32", "bf16 1.02"),
        ({"bf16": trial(2.5)}, "fp32", "bf16 refused: 2.5 times as slow"),
        ({"bf16": trial(0.5, loss=5.01, norm=2.01)}, "bf16", "bf16 2.00"),
        ({"bf16": trial(0.5, loss=6.0)}, "fp32", "bf16 refused: its loss is 6, that of fp32 is 5"),
        ({"bf16": trial(0.5, loss=math.nan)}, "fp32", "bf16 refused: its loss is nan"),
        ({"bf16": trial(0.5, norm=math.inf)}, "fp32", "bf16 refused: its gradient norm is inf"),
        ({"bf16": trial(0.5, norm=3.0)}, "fp32", "bf16 refused: its gradient norm is 3, that of fp32 is 2"),
        ({"bf16": RuntimeError("no such operator\nmore")}, "fp32", "bf16 refused: no such operator"),
        ({"tf32": trial(0.6), "bf16": trial(0.5), "fp16": trial(0.48)}, "bf16", "fp16 2.08"),
        ({"tf32": trial(0.6), "bf16": trial(0.5), "fp16": trial(0.4)}, "fp16", "fp16 2.50"),
        ({"tf32": trial(0.5), "bf16": trial(0.5), "fp16": trial(0.5)}, "tf32", "tf32 2.00, bf16 2.00"),
        ({"bf16": trial(0.5), "fp16": trial(0.3, loss=5.05)}, "bf16", "fp16 refused: its loss is 5.05"),
    ],
)
def test_the_choice_follows_times_and_agreement(
    trials: dict[str, Any],
    chosen: str,
    said: str,
    trainer: Callable[..., loop.Trainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(precision, "candidates", lambda config, device: ["fp32", *trials])
    monkeypatch.setattr(precision, "run_pass", runner(calls, fp32=EXACT, **trials))
    one = trainer()
    choose_precision(one)
    [note] = one.progress
    assert note.startswith(f"--precision auto: {chosen} (") and said in note
    assert f"--precision {'fp32' if chosen != 'fp32' else 'bf16'} takes another" in note
    assert one.run.config.precision == one.run.fingerprint["precision"] == chosen
    assert one.scaler.is_enabled() == (chosen == "fp16")
    record = json.loads((one.run.folder / "run.json").read_text())
    assert record["fingerprint"] == one.run.fingerprint and record["command"] == "train"
    for name in trials:
        assert calls.count(name) == (1 if f"{name} refused" in note else precision.ROUNDS)


def test_a_refusal_in_a_later_round_counts(
    trainer: Callable[..., loop.Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last micro-batch of bf16 disagrees; the median takes one slow trial of fp16."""
    answers = {
        "fp32": [EXACT] * 5,
        "bf16": [trial(0.5), trial(0.5), trial(0.5, loss=9)],
        "fp16": [trial(1.9), trial(0.4), trial(0.4)],
    }
    monkeypatch.setattr(precision, "candidates", lambda config, device: [*answers])
    monkeypatch.setattr(precision, "run_pass", lambda trainer, name, batch: answers[name].pop(0))
    one = trainer()
    choose_precision(one)
    assert one.run.config.precision == "fp16" and "bf16 refused" in one.progress[0]


@pytest.mark.parametrize(
    ("options", "pass_seconds", "reason"),
    [
        ({"steps": 49}, 1e-3, "49 micro-batches, fewer than 50"),
        ({"steps": 60, "batch_size": 2}, 30.0, "trials of others would take too long"),
    ],
)
def test_short_runs_keep_fp32(
    options: dict[str, Any],
    pass_seconds: float,
    reason: str,
    trainer: Callable[..., loop.Trainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(
        precision, "run_pass", runner(calls, fp32=trial(pass_seconds), bf16=trial(pass_seconds / 2))
    )
    one = trainer(**options)
    choose_precision(one)
    assert one.run.config.precision == "fp32" and reason in one.progress[0]
    assert "bf16" not in calls and len(calls) == (0 if options["steps"] < 50 else 2)


@pytest.mark.parametrize(("seconds", "rows"), [(1e-3, 2), (2.0, 1)])
def test_slow_steps_are_tried_with_fewer_rows(
    seconds: float, rows: int, trainer: Callable[..., loop.Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a micro-batch, or fewer rows if that takes more than 20 s."""
    sizes: list[int] = []

    def answer(trainer: loop.Trainer, name: str, batch: loop.Batch) -> Trial:
        sizes.append(len(batch[0]))
        return trial(seconds)

    monkeypatch.setattr(precision, "run_pass", answer)
    choose_precision(trainer(steps=5000))
    assert sizes == [1, 1, *[rows] * 2 * precision.ROUNDS]


@pytest.mark.parametrize("strategy", ["zero3", "hsdp"])
def test_weights_that_are_split_later_are_not_tried(
    strategy: str, trainer: Callable[..., loop.Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "run_pass", runner([]))
    one = trainer(parallel=strategy)
    one.run = Run(one.run.config, "train", one.run.folder, processes=Processes(0, 2))
    monkeypatch.setattr(precision, "LEAST_MICRO_BATCHES", 1)
    choose_precision(one)
    assert one.run.config.precision == "fp32" and f"--parallel {strategy} splits" in one.progress[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["fp32", "bf16", "fp16"]),
        ({"step_in_backward": True}, ["fp32", "bf16"]),
        ({"parallel": "zero2"}, ["fp32", "bf16"]),
    ],
)
def test_candidates_fit_the_options(
    options: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_fp16_supported", lambda: True)
    cpu = torch.device("cpu")
    assert precision.candidates(TrainConfig(**options), cpu) == expected
    monkeypatch.setattr(torch.cpu, "_is_amx_fp16_supported", lambda: False)
    assert precision.candidates(TrainConfig(**options), cpu) == ["fp32", "bf16"]


def test_bf16_weights_need_no_choice() -> None:
    assert TrainConfig(weights="bf16-remainder").precision == "bf16"
    assert TrainConfig().precision == "auto" and TrainConfig().autocast is None


@pytest.mark.parametrize(
    "options", [{}, {"activations": "recompute"}, {"memory_budget": "1MiB"}, {"batch_size": 1}, {"steps": 60}]
)
def test_a_trial_changes_nothing(
    options: dict[str, Any], trainer: Callable[..., loop.Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, gradients, buffers, random state and the blocks' methods are as before."""
    monkeypatch.setattr(precision, "SHARE", 100.0)
    monkeypatch.setattr(precision, "WARM_UP", 100.0)  # a slow trial does not end the others
    one = trainer(**options)
    model: nn.Module = one.model
    model.register_buffer("count", torch.zeros(()))

    def count(module: nn.Module, *_: Any) -> None:
        module.count += 1  # type: ignore[operator]

    model.register_forward_hook(count)
    parameters = list(model.parameters())
    parameters[0].grad = torch.full_like(parameters[0], 3.0)
    before = [p.detach().clone() for p in parameters]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    methods = {name: set(vars(module)) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    passes: list[Trial] = []
    true = precision.run_pass
    monkeypatch.setattr(precision, "run_pass", lambda *args: passes.append(true(*args)) or passes[-1])
    choose_precision(one)
    assert len(passes) == 2 + 2 * precision.ROUNDS and all(p.loss > 0 and p.norm > 0 for p in passes)
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
    assert (parameters[0].grad == 3).all() and all(p.grad is None for p in parameters[1:])
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
    assert methods == {name: set(vars(module)) for name, module in model.named_modules()}
    assert not any(p._post_accumulate_grad_hooks for p in parameters)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_trial_has_the_loss_and_norm_of_training(name: str, trainer: Callable[..., loop.Trainer]) -> None:
    """They are those of backward with whole gradients, and agree with fp32 in this model."""
    one = trainer()
    batch = precision.some_batch(one, one.longest_rows())
    found, exact = precision.run_pass(one, name, batch), precision.run_pass(one, "fp32", batch)
    loss = one.largest_batch()
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in one.model.parameters()])
    assert (exact.loss, exact.norm) == pytest.approx((loss.item(), norm.item()), rel=1e-5)
    assert precision._disagreement(one, name, found, exact) is None and found.loss != exact.loss


def test_a_trial_takes_no_more_memory_than_training_in_16_bits(trainer: Callable[..., loop.Trainer]) -> None:
    """Training has all gradients and the activations of all rows."""
    one = trainer(batch_size=32)
    one.follow(
        Run(TrainConfig(seq_len=32, batch_size=32, steps=100, precision="bf16"), "train", one.run.folder)
    )
    one.model.train()
    with metered() as meter:
        one.largest_batch().backward()
        training = meter.peak()
    one.model.zero_grad()
    with metered() as meter:
        precision._compare(one, ["fp32", "bf16"], precision._rows(one, 2, 1.0) or [])
        assert 0 < meter.peak() <= training


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(text())
    return path


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let bf16 be measured as faster; return the precisions of the trials that run."""
    calls: list[str] = []
    monkeypatch.setattr(precision, "LEAST_MICRO_BATCHES", 1)
    monkeypatch.setattr(precision, "SHARE", 100.0)
    true = precision.run_pass

    def run(trainer: loop.Trainer, name: str, batch: loop.Batch) -> Trial:
        calls.append(name)
        return true(trainer, name, batch)._replace(seconds={"fp32": 2e-3}.get(name, 1e-3))

    monkeypatch.setattr(precision, "run_pass", run)
    return calls


STEPS = ["--steps", 6, "--eval-every", 3, "--checkpoint-every", 3]
AUTO = ["--precision", "auto"]
BF16 = ["--precision", "bf16"]


def test_a_run_has_the_bits_of_its_choice_also_resumed(
    data: Path, tmp_path: Path, faster: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    train = ["train", "--data", data, *TINY, *STEPS]
    succeed(*train, *BF16, "--out", tmp_path / "bf16")
    assert not faster
    capsys.readouterr()
    succeed(*train, *AUTO, "--out", tmp_path / "auto")
    assert faster.count("bf16") == precision.ROUNDS
    assert (
        capsys.readouterr().out.count(
            "--precision auto: bf16 (speed of forward and backward over fp32: bf16 2.00"
        )
        == 1
    )
    assert losses(tmp_path / "auto") == losses(tmp_path / "bf16")
    assert_same_weights(tmp_path / "auto/model", tmp_path / "bf16/model")
    for name in ("run.json", "summary.json"):
        content = json.loads((tmp_path / "auto" / name).read_text())
        assert content.get("fingerprint", content)["precision"] == "bf16"
    page = Page((tmp_path / "auto/report.html").read_text("utf-8"))
    assert ["precision", "bf16"] in page.rows() or page.pairs()["precision"] == ["bf16"]
    faster.clear()
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "auto", again)
    shutil.rmtree(again / "checkpoints/step-00000006")
    shutil.rmtree(again / "model")
    succeed(*train, *AUTO, "--out", again, "--resume")
    assert not faster and losses(again) == losses(tmp_path / "bf16")
    assert_same_weights(again / "model", tmp_path / "bf16/model")
    assert run(*train, *BF16, "--out", again, "--resume") == 0
    capsys.readouterr()
    assert run(*train, "--precision", "fp32", "--out", again, "--resume") == 2
    assert "precision differs: the run has 'bf16', this command has 'fp32'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--quantize=nf4", "--quantize=none", "--full"])
@pytest.mark.parametrize("baseline", [[], ["--baseline"]])
def test_weights_below_adapters_have_the_dtype_of_the_choice(
    option: str, baseline: list[str], data: Path, tmp_path: Path, faster: list[str]
) -> None:
    """They are loaded anew, also to merge, so that a run has the bits of one with the option."""
    succeed("train", "--data", data, "--out", tmp_path / "base", *TINY, "--steps", 1)
    own = TUNE[:-2] if option == "--full" else [*TUNE, "--merge"]
    tune = ["finetune", "--model", tmp_path / "base/model", "--data", data, *own, *STEPS, option, *baseline]
    succeed(*tune, *BF16, "--out", tmp_path / "bf16")
    assert not faster
    succeed(*tune, *AUTO, "--out", tmp_path / "auto")
    assert faster and losses(tmp_path / "auto") == losses(tmp_path / "bf16")
    for result in ("model",) if option == "--full" else ("model", "adapter"):
        assert_same_weights(tmp_path / "auto" / result, tmp_path / "bf16" / result)


def test_runs_that_differ_in_precision_have_a_column_of_it(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, fingerprint={"precision": name}) for name in ("fp32", "bf16")]
    head, *rows = write_comparison(runs, tmp_path)
    assert head[-1] == "precision" and [row[-1] for row in rows] == ["fp32", "bf16"]
    assert write_comparison(runs[:1] * 2, tmp_path)[0][-1] == "speed ratio"
