"""The files that a run saves hold the weights whose validation loss its summary reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_helpers import TINY, TUNE, succeed, text
from shoestring import lora
from shoestring.data.batches import split_blocks
from shoestring.data.token_file import read_token_file
from shoestring.training.config import QUANTIZE
from shoestring.training.optimizers import OPTIMIZERS
from shoestring.training.run.models import check_model_directory, load_model, plain_loss

pytestmark = pytest.mark.usefixtures("blank_images")

STEPS = ["--steps", "5", "--eval-every", "2", "--lr", "2e-2", "--eval-batches", "9", "--batch-size", "4"]
HELD_OUT = ["--val-fraction", "0.05"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(text())
    return path


@pytest.fixture(scope="module")
def base(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("base") / "run"
    succeed("train", "--data", data, "--out", out, *TINY, *STEPS, *HELD_OUT)
    return out / "model"


def loss_of(model: Any, run: Path) -> float:
    """Return the loss of the validation rows of a run."""
    _, val = split_blocks(read_token_file(run / "tokens.bin")[0], 32, 0.05)
    inputs, labels = val.rows(list(range(min(len(val), 36))))
    with torch.no_grad():
        return float(plain_loss(model.eval())(inputs, labels, items=labels.numel()))


def reported(run: Path) -> float:
    return float(json.loads((run / "summary.json").read_text())["val_loss"])


def saved(folder: Path, quantize: str | None = None) -> Any:
    return load_model(check_model_directory(folder), torch.float32, quantize)


def stored(weights: str) -> list[str]:
    return [
        "--weights",
        weights,
        *(["--precision", "bf16"] if weights != "fp32" else ["--precision", "fp32"]),
    ]


@pytest.mark.parametrize("weights", ["fp32", "bf16", "bf16-stochastic", "bf16-remainder"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.sample(4)
def test_a_trained_model(data: Path, tmp_path: Path, optimizer: str, weights: str) -> None:
    if weights.startswith("bf16-") and optimizer in ("galore", "apollo", "apollo-mini"):
        pytest.skip("refused")
    run = tmp_path / "run"
    options = [*TINY, *STEPS, *HELD_OUT, "--optimizer", optimizer, *stored(weights)]
    succeed("train", "--data", data, "--out", run, *options)
    close = 1e-5 if weights == "fp32" else 5e-3
    assert loss_of(saved(run / "model"), run) == pytest.approx(reported(run), rel=close)


@pytest.mark.parametrize("command", ["train", "finetune"])
@pytest.mark.parametrize("state", ["8bit", "fp32"])
@pytest.mark.sample(2)
def test_averaged_weights(data: Path, base: Path, tmp_path: Path, command: str, state: str) -> None:
    """The optimizer steps other weights than those that it evaluates; a finished run saves the latter again."""
    run = tmp_path / "run"
    own = TINY if command == "train" else [*TUNE[:-2], "--full", "--model", base]
    options = [*own, *STEPS, *HELD_OUT, "--optimizer", "schedule-free-adamw", "--optimizer-state", state]
    options += ["--precision", "fp32"]
    for more in ([], ["--resume"]):
        succeed(command, "--data", data, "--out", run, *options, *more)
        assert loss_of(saved(run / "model"), run) == pytest.approx(reported(run), rel=1e-5)


@pytest.mark.parametrize("quantize", QUANTIZE)
@pytest.mark.parametrize("optimizer", ["adamw", "schedule-free-adamw"])
@pytest.mark.sample(3)
def test_an_adapter(data: Path, base: Path, tmp_path: Path, optimizer: str, quantize: str) -> None:
    """On the base that it was trained on; merged into dense weights, it has their loss."""
    run = tmp_path / "run"
    options = [*TUNE, *STEPS, *HELD_OUT, "--optimizer", optimizer, "--quantize", quantize, "--merge"]
    succeed("finetune", "--model", base, "--data", data, "--out", run, *options, "--precision", "fp32")
    dense, model = saved(base), saved(base, None if quantize == "none" else quantize)
    for each in (dense, model):
        lora.load_adapter(each, run / "adapter")
    assert loss_of(model, run) == pytest.approx(reported(run), rel=1e-5)
    assert loss_of(saved(run / "model"), run) == pytest.approx(loss_of(dense, run), rel=1e-5)
