"""Test --device, --precision and --weights, and that a training step does not wait for the device."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from cli_helpers import TINY, TUNE, losses, refuse, succeed, text
from shoestring.core.errors import InputError
from shoestring.data.batches import Blocks
from shoestring.training import memory
from shoestring.training.report.metrics import read_metrics
from shoestring.training.report.write import write_report
from shoestring.training.run import loop
from shoestring.training.run.device import check_precision, find_device
from shoestring.training.run.readings import Readings

pytestmark = pytest.mark.usefixtures("blank_images")


def accelerator(monkeypatch: pytest.MonkeyPatch, kind: str, count: int, current: int = 0) -> None:
    """Let PyTorch report ``count`` accelerators of a kind."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)


def test_the_cpu_is_found() -> None:
    assert find_device("cpu") == find_device("cpu:0") == torch.device("cpu")
    if not torch.accelerator.is_available():
        assert find_device("auto") == torch.device("cpu")


def test_an_accelerator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator(monkeypatch, "cuda", 4, current=2)
    assert find_device("auto") == find_device("cuda") == torch.device("cuda:2")
    assert find_device("cuda:3") == torch.device("cuda:3") and find_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="finds to be cpu and cuda:0 to cuda:3; got cuda:4"):
        find_device("cuda:4")
    with pytest.raises(InputError, match="got xpu"):
        find_device("xpu")
    accelerator(monkeypatch, "mps", 1)
    assert find_device("auto") == torch.device("mps:0")
    with pytest.raises(InputError, match="finds to be cpu and mps:0; got cuda"):
        find_device("cuda")


@pytest.mark.parametrize("name", ["", "gpu", "cuda:-1", "cuda:x", "cpu:1", "meta", "cuda", "cuda:0"])
def test_a_device_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    with pytest.raises(InputError, match=f"--device: expected .* got ?{name}$") as caught:
        find_device(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weights", "bf16"], "--weights bf16: expected --precision bf16 with bf16 weights"),
        (
            ["--weights", "bf16-stochastic", "--precision", "fp16"],
            "--weights bf16-stochastic: expected --precision bf16 with bf16 weights, got --precision fp16",
        ),
        (
            ["--precision", "tf32"],
            "--precision tf32: expected a CUDA device, which computes in TF32, got cpu",
        ),
        (["--precision", "fp16", "--step-in-backward"], "--precision fp16: expected no --step-in-backward"),
        (["--optimizer", "muon", "--step-in-backward"], "--optimizer muon: expected no --step-in-backward"),
        (
            ["--optimizer", "apollo", "--step-in-backward"],
            "--optimizer apollo: expected no --step-in-backward",
        ),
        (["--optimizer", "galore", "--offload", "cpu"], "--optimizer galore: expected no --offload cpu"),
        (
            ["--optimizer", "galore", "--precision", "bf16", "--weights", "bf16-remainder"],
            "--optimizer galore: expected no --weights bf16-remainder",
        ),
        (["--optimizer", "lion", "--baseline"], "--optimizer lion: expected no --baseline"),
        (["--activations", "offload", "--baseline"], "--activations offload: expected no --baseline"),
        (
            ["--activations", "recompute", "--memory-budget", "1GiB"],
            "--memory-budget 1GiB: expected no --activations recompute",
        ),
        (
            ["--optimizer-arg", "beta=1"],
            "--optimizer-arg: expected NAME=VALUE, where NAME is one of betas, eps",
        ),
        (["--optimizer-arg", "betas"], "--optimizer-arg: expected NAME=VALUE"),
        (["--optimizer-arg", "betas=(2,3)"], "--optimizer adamw betas=(2,3): AdamW: betas: expected"),
        (
            ["--optimizer-arg", "eps=x"],
            "--optimizer adamw eps=x: AdamW: eps: expected a number of at least 0, received x",
        ),
        (["--log-every", "0"], "--log-every: expected at least 1, got 0"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_options_that_do_not_fit_together(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    """They are refused before the data are read."""
    monkeypatch.setattr("shoestring.cli.train.find_files", None)
    (tmp_path / "text.txt").write_text(text())
    given = ["--data", tmp_path / "text.txt", "--out", tmp_path / "run", "--device", "cpu", *TINY, *options]
    assert message in refuse(capsys, "train", *given)
    assert not (tmp_path / "run").exists()


def test_tf32_needs_cuda_and_16_bits_fit_every_device() -> None:
    check_precision("tf32", "fp32", torch.device("cuda:1"))
    for weights in ("fp32", "bf16", "bf16-stochastic", "bf16-remainder"):
        for device in ("cpu", "cuda", "mps"):
            check_precision("bf16", weights, torch.device(device))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text(text())
    succeed(*command("train", folder, folder / "base", "--steps", 1))
    return folder


def command(kind: str, data: Path, out: Path, *more: object) -> list[object]:
    own = TINY if kind == "train" else [*TUNE, "--model", data / "base" / "model", "--val-fraction", 0.2]
    steps = ["--steps", 6, "--eval-every", 3, "--checkpoint-every", 4, "--device", "cpu"]
    return [kind, "--data", data / "text.txt", "--out", out, *own, *steps, *more]


COMBINATIONS = [
    ["--optimizer", "muon"],
    ["--optimizer", "schedule-free-adamw", "--optimizer-state", "bf16"],
    ["--optimizer", "lion", "--optimizer-arg", "betas=(0.9,0.98)", "--offload", "stream"],
    ["--optimizer", "sgd", "--optimizer-arg", "nesterov=True", "--optimizer-state", "4bit"],
    ["--precision", "bf16", "--weights", "bf16-remainder", "--step-in-backward", "--accumulate", "2"],
    ["--precision", "bf16", "--weights", "bf16-stochastic", "--offload", "cpu", "--step-in-backward"],
    ["--precision", "fp16", "--optimizer", "adafactor"],
    ["--optimizer", "galore", "--optimizer-arg", "rank=4", "--optimizer-arg", "update_proj_gap=3"],
    ["--precision", "fp16", "--optimizer", "apollo", "--optimizer-arg", "rank=4"],
    ["--optimizer", "apollo-mini", "--optimizer-state", "4bit", "--accumulate", "2"],
    ["--activations", "offload"],
    ["--activations", "offload", "--memory-budget", "2MB"],
    ["--baseline", "--precision", "fp16"],
    ["--baseline", "--precision", "bf16", "--weights", "bf16"],
]


@pytest.mark.parametrize("kind", ["train", "finetune"])
@pytest.mark.parametrize("options", COMBINATIONS, ids=" ".join)
@pytest.mark.sample(6)
def test_combinations_train_and_resume_bit_for_bit(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: list[str]
) -> None:
    succeed(*command(kind, data, tmp_path / "whole", *options))
    whole = losses(tmp_path / "whole")
    assert len(whole) == 6
    if kind == "train":
        assert whole[-1][0] < whole[0][0]
    stop = "--resume", "--log-every", "2"  # the values that are logged do not depend on when they are read
    with monkeypatch.context() as patch:
        fit = loop.Trainer.fit

        def half(self: loop.Trainer, start: int = 0) -> None:
            patch.setattr(loop.signals, "received", lambda: True if self.saved == 4 else None)
            fit(self, start)

        patch.setattr(loop.Trainer, "fit", half)
        succeed(*command(kind, data, tmp_path / "half", *options))
        assert len(losses(tmp_path / "half")) == 4
    succeed(*command(kind, data, tmp_path / "half", *options, *stop))
    assert losses(tmp_path / "half") == whole


def test_a_budget_with_steps_in_backward(data: Path, tmp_path: Path) -> None:
    """The backward passes that plan the budget step no parameter."""
    for name, more in (("plain", []), ("planned", ["--memory-budget", "1GiB"])):
        succeed(*command("train", data, tmp_path / name, "--step-in-backward", *more))
    assert losses(tmp_path / "planned") == losses(tmp_path / "plain")


class Waits(TorchDispatchMode):
    """Count the operators that make the host wait for the device, between two steps."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.NAMES:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--optimizer", "muon"],
        ["--accumulate", "2", "--offload", "stream"],
        ["--activations", "recompute"],
    ],
    ids=" ".join,
)
def test_a_step_does_not_wait(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """Only logs, evaluations and checkpoints may read values from the device.

    Plain runs wait in each forward, where transformers looks for packed sequences.
    """
    waits = Waits()

    def counting(whole: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            with waits:
                return whole(*arguments, **named)

        return counted

    for name in ("_accumulate", "_step"):
        monkeypatch.setattr(loop.Trainer, name, counting(getattr(loop.Trainer, name)))
    succeed(*command("train", data, tmp_path / "run", "--log-every", 3, *options))
    assert waits.found == []
    # The counter finds a wait that is planted.
    monkeypatch.setattr(Readings, "add_loss", lambda self, loss: self._losses.append(loss * loss.item()))
    succeed(*command("train", data, tmp_path / "planted", "--log-every", 3, *options))
    assert waits.found


def rows(
    readings: Readings, values: list[tuple[list[float], float]], wait: bool = False
) -> list[dict[str, Any]]:
    for number, (step_losses, norm) in enumerate(values):
        for value in step_losses:
            readings.add_loss(torch.tensor(value))
        readings.add_norm(torch.tensor(norm))
        readings.end_step({"step": number, "tokens": 8})
    return readings.end_interval(wait)


def test_readings_of_the_cpu_are_read_at_once() -> None:
    readings = Readings(torch.device("cpu"), 2, 2)
    first = rows(readings, [([1.0, 2.0], 3.0), ([0.5, 0.25], 4.0)])
    assert [(row["loss"], row["grad_norm"]) for row in first] == [(3.0, 3.0), (0.75, 4.0)]
    assert rows(readings, [([1.0, 1.0], 1.0)])[0]["loss"] == 2.0 and readings.end_interval(wait=True) == []


def test_readings_of_a_device_are_read_one_interval_late(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Event:
        def __init__(self, device: object) -> None: ...

        def record(self, stream: object) -> None:
            assert stream == "stream of cuda:1"
            events.append("record")

        def synchronize(self) -> None:
            events.append("synchronize")

    real = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, pin_memory=False: real(*shape))
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"stream of {device}")
    readings = Readings(torch.device("cuda:1"), 1, 1)
    assert rows(readings, [([1.0], 5.0)]) == [] and events == ["record"]
    assert [row["loss"] for row in rows(readings, [([2.0], 5.0)])] == [1.0]
    assert events == ["record", "record", "synchronize"]
    assert [row["loss"] for row in rows(readings, [([3.0], 5.0)], wait=True)] == [2.0, 3.0]
    assert readings.end_interval(wait=True) == []


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
@pytest.mark.parametrize(
    "options",
    [["--log-every", "4"], ["--baseline", "--log-every", "4"], ["--optimizer", "galore", "--log-every", "4"]],
    ids=" ".join,
)
def test_a_step_that_is_not_finite_changes_no_weight(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    what: str,
) -> None:
    """The steps after the bad one, which run before the host reads its loss, change nothing either."""
    trainers: list[loop.Trainer] = []
    accumulate = loop.Trainer._accumulate

    def spoiled(self: loop.Trainer, step: int, *arguments: Any, **named: Any) -> None:
        trainers[:] = [self]
        if step == 2:
            if what == "loss":
                loss = self.loss
                self.loss = lambda *given, **more: loss(*given, **more) * torch.nan
            else:
                weight = next(p for p in self.model.parameters() if p.requires_grad)
                weight.register_hook(lambda grad: grad * torch.inf)
        accumulate(self, step, *arguments, **named)

    constant = ["--schedule", "constant", "--warmup", 0, "--eval-every", 100, "--checkpoint-every", 100]
    succeed(*command("train", data, tmp_path / "two", "--steps", 2, *constant, *options))
    monkeypatch.setattr(loop.Trainer, "_accumulate", spoiled)
    line = refuse(capsys, *command("train", data, tmp_path / "run", *constant, *options))
    assert f"step 3: the {what} is " in line and "training stopped before the weights changed" in line
    [saved] = (tmp_path / "two" / "checkpoints").glob("*/weights.safetensors")
    expected = load_file(saved)
    for name, weight in trainers[0].model.named_parameters():
        if name in expected:
            assert torch.equal(weight, expected[name]), name


def test_loss_scaling_skips_steps_that_overflow(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient that overflows under fp16 lowers the scale and skips the step; the run goes on."""
    scales: list[float] = []
    step = loop.Trainer._step

    def noted(self: loop.Trainer, *arguments: Any) -> None:
        if len(scales) == 1:
            next(p for p in self.model.parameters() if p.grad is not None).grad.mul_(torch.inf)
        step(self, *arguments)
        scales.append(self.scaler.get_scale())

    monkeypatch.setattr(loop.Trainer, "_step", noted)
    succeed(*command("train", data, tmp_path / "run", "--precision", "fp16"))
    assert scales[1:] == [scales[0] / 2] * 5 and len(losses(tmp_path / "run")) == 6


def test_the_time_that_steps_wait_for_data_is_reported(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step waits for its data. The data of later steps are read during the steps before them."""
    rows = Blocks.rows

    def slow(self: Blocks, *arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.3)
        return rows(self, *arguments)

    monkeypatch.setattr(Blocks, "rows", slow)
    succeed(*command("train", data, tmp_path / "run", "--eval-every", 6))
    waited = [row["data_seconds"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert waited[0] >= 0.3 and sum(waited) < 6 * 0.3 + 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["data_seconds"] == pytest.approx(sum(waited))
    report = (tmp_path / "run" / "report.html").read_text()
    assert f"waited for data {sum(waited):.2f} s of {summary['seconds']:.0f} s" in report


def test_report_of_a_run_on_a_device(data: Path, tmp_path: Path, blank_images: pytest.MonkeyPatch) -> None:
    """The report of a run on an accelerator has its peaks, and those of the process beside it."""
    blank_images.undo()
    run = tmp_path / "run"
    succeed(*command("train", data, run))
    assert '<th scope="row">peak of the process<' in (run / "report.html").read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert "device_reserved" not in summary
    figures = {"device": "cuda:1", "peak_memory": 5e6, "device_reserved": 7e6, "device_utilization": 62.5}
    (run / "summary.json").write_text(json.dumps(summary | figures))
    write_report(run)
    report = (run / "report.html").read_text()
    for name, value in (("peak of cuda:1", "5.00"), ("reserved on cuda:1", "7.00")):
        assert re.search(f'<th scope="row">{name}<.*?<td>–</td><td>{value}</td>', report), name
    assert "device busy 62 %" in report
    (run / "summary.json").write_text(json.dumps(summary | figures | {"device_reserved": "much"}))
    with pytest.raises(InputError, match="device_reserved"):
        write_report(run)


def test_memory_of_a_device_is_its_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda:1")
    for name, size in (("memory_allocated", 5), ("max_memory_allocated", 7), ("memory_reserved", 9)):
        monkeypatch.setattr(torch.accelerator, name, lambda given, size=size: size if given == device else -1)
    monkeypatch.setattr(torch.cuda, "utilization", lambda given: 83)
    used = memory.usage(device)
    assert (used["device"], used["device_peak"], used["device_reserved"]) == (5, 7, 9) and used[
        "rss"
    ] > 1 << 20
    assert memory.in_use(device) == 5 and memory.in_use(torch.device("cpu")) > 1 << 20
    assert memory.utilization(device) == {"device_utilization": 83}
    assert memory.utilization(torch.device("cpu")) == {} and "device" not in memory.usage(torch.device("cpu"))

    def missing(_: object) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    assert memory.utilization(device) == {}


def test_generate_and_summary_name_the_device(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads((data / "base" / "summary.json").read_text())["device"] == "cpu"
    options = ["--max-new-tokens", 2, "--device", "cpu", "--precision", "bf16"]
    succeed("generate", "the", "--model", data / "base" / "model", *options)
    assert "--device: expected" in refuse(
        capsys, "generate", "the", "--model", data / "base" / "model", "--device", "tpu"
    )
