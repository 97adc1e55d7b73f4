"""`shoestring train` and `finetune` with ``--device simdev``: bitwise equal to the CPU, and nothing waits in a step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from simdev import device as simdev

from cli_helpers import TINY, TUNE, assert_same_weights, losses, refuse, succeed, text
from shoestring.integrations.transformers.products import Products
from shoestring.training.run.loop import Trainer

pytestmark = pytest.mark.usefixtures("blank_images")

TRAIN = [
    (),
    ("--offload", "stream", "--activations", "offload", "--optimizer-state", "8bit"),
    ("--offload", "cpu", "--step-in-backward", "--clip", "0.5"),
    ("--optimizer", "muon", "--memory-budget", "2MB", "--activations", "offload", "--accumulate", "2"),
    ("--offload", "cpu", "--optimizer", "lion"),
]
FINETUNE = [
    ("--quantize", "nf4"),
    ("--full", "--offload", "nvme", "--activations", "recompute"),
]

READER = "prefetcher.py"  # a file in the stack of the thread that fills host memory after its copy


@pytest.fixture(autouse=True)
def equal_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with tiles, some products have a kernel whose sums have another order than PyTorch's."""
    monkeypatch.setattr(Products, "add", lambda self, layers: False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text(text())
    succeed(*command("train", folder, folder / "base", "cpu", "--steps", 1))
    return folder


def command(kind: str, data: Path, out: Path, device: str, *more: object) -> list[object]:
    """Return the arguments of a run of four steps, in which "nvme" stands for the offload to a folder."""
    tune = TUNE[:-2] if "--full" in more else TUNE  # adapters alone have a rank
    own = TINY if kind == "train" else [*tune, "--model", data / "base" / "model", "--val-fraction", 0.2]
    options = [f"nvme:{data}" if option == "nvme" else option for option in more]
    steps = ["--steps", 4, "--eval-every", 2, "--checkpoint-every", 4, "--device", device]
    return [kind, "--data", data / "text.txt", "--out", out, *own, *steps, *options]


def compare(kind: str, options: tuple[str, ...], data: Path, out: Path) -> None:
    """Run a command on both devices; losses, gradient norms, validation losses and weights are equal."""
    expected = data / "-".join(["cpu", kind, *options]).replace("/", "")
    if not expected.exists():
        succeed(*command(kind, data, expected, "cpu", *options))
    succeed(*command(kind, data, out, "simdev", *options))
    assert len(losses(out)) == 4 and losses(out) == losses(expected)
    folder = next(name for name in ("model", "adapter") if (out / name).exists())
    assert_same_weights(out / folder, expected / folder)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["device"] == "simdev:0" and summary["peak_memory"] > 0


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("options", TRAIN, ids=lambda options: " ".join(options) or "plain")
def test_train_equals_cpu(data: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    compare("train", options, data, tmp_path / "run")


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(
    "options",
    [
        ("--precision", "bf16", "--weights", "bf16-remainder", "--offload", "cpu", "--step-in-backward"),
        ("--precision", "fp16", "--offload", "stream"),
    ],
    ids=" ".join,
)
def test_autocast_is_close_to_cpu(data: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Autocast rounds other operators on an accelerator than on the CPU, so results differ by roundings.

    A rounding to bf16 changes a number by at most 2^-9 of it. The losses of the first step, a sum over few
    layers, differ by far less than the bound; that of the fourth follows three updates of the weights.
    """
    succeed(*command("train", data, tmp_path / "cpu", "cpu", *options))
    succeed(*command("train", data, tmp_path / "simdev", "simdev", *options))
    for found, expected in zip(losses(tmp_path / "simdev"), losses(tmp_path / "cpu"), strict=True):
        assert found[0] == pytest.approx(expected[0], rel=2**-8)
        assert found[1] == pytest.approx(expected[1], rel=2**-5)


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("options", FINETUNE, ids=" ".join)
def test_finetune_equals_cpu(data: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    compare("finetune", options, data, tmp_path / "run")


@pytest.mark.parametrize("options", [(), ("--activations", "offload")], ids=" ".join)
def test_only_the_log_waits(
    mode: simdev.Mode, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """From the second step on, no thread but the reader of batches waits between the losses that the log reads."""
    waited: list[list[str]] = []
    simdev.configure(simdev.replace(mode, stacks=True))

    def counting(whole: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            simdev.take_synchronisations()
            result = whole(*arguments, **named)
            waited.append([entry for entry in simdev.take_synchronisations() if READER not in entry])
            return result

        return counted

    for name in ("_accumulate", "_step"):
        monkeypatch.setattr(Trainer, name, counting(getattr(Trainer, name)))
    succeed(*command("train", data, tmp_path / "run", "simdev", "--log-every", 2, *options))
    assert len(waited) == 8 and waited[2:] == [[]] * 6


def test_an_index_selects_the_device(data: Path, tmp_path: Path) -> None:
    succeed(*command("train", data, tmp_path / "run", "simdev:1"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["device"] == "simdev:1"
    assert torch.accelerator.current_device_index() == 0


def test_a_device_that_is_not_there(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refuse(capsys, *command("train", data, tmp_path / "run", "simdev:2"))
    assert line.endswith("finds to be cpu and simdev:0 to simdev:1; got simdev:2")
    line = refuse(capsys, *command("train", data, tmp_path / "run", "simulated"))
    assert "the name of an installed backend of PyTorch, got simulated" in line


def test_a_plan_offloads_activations(data: Path, tmp_path: Path) -> None:
    """With --device-memory, blocks may offload activations, and the run has the bits of one without a plan."""
    state = ("--optimizer-state", "8bit")
    succeed(*command("train", data, tmp_path / "cpu", "cpu", *state))
    planned = ("--device-memory", "1GiB", "--activations", "offload", "--accumulate", 1)
    out = tmp_path / "planned"
    succeed(*command("train", data, out, "simdev", *state, *planned))
    plan = json.loads((out / "run.json").read_text())["plan"]
    assert {block["treatment"] for block in plan["checkpoints"]} == {"offload"} and plan["host_bytes"] > 0
    assert losses(out) == losses(tmp_path / "cpu")
    assert_same_weights(out / "model", tmp_path / "cpu" / "model")
