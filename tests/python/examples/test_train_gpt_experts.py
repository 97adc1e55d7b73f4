"""The C++ example train_gpt trains, resumes and saves a model whose MLPs are mixtures of experts.

transformers loads the saved model as a Mixtral.
"""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cpp_examples import (
    SEQ_LEN,
    SMALL,
    build_example,
    learnable_tokens,
    losses,
    refused,
    token_file,
    train,
    validation_loss,
)
from cpp_processes import finish, skip_without_gloo, start

VOCAB, TOKENS, HELD_OUT = 512, 20_000, 0.02
EXPERTS = ["--experts", "4", "--top-k", "2"]


@pytest.fixture(scope="module")
def program() -> Path:
    return build_example("train_gpt")


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return learnable_tokens(TOKENS, VOCAB)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tokens: np.ndarray) -> Path:
    return token_file(tmp_path_factory.mktemp("data") / "tokens.bin", tokens)


@pytest.fixture(scope="module")
def whole(program: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the example without interruption, once for all tests that compare with it."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    done = train(program, data, out, *EXPERTS)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_loss_falls(whole: tuple[Path, str]) -> None:
    curve = losses(whole[1])
    assert len(curve) == 30
    # With small initial logits, the balance is top_k, and z is the square of the logarithm of the experts.
    routers = 0.01 * 2 + 0.001 * math.log(4) ** 2
    assert curve[0] == pytest.approx(math.log(VOCAB) + routers, rel=0.003)
    assert curve[-1] < 0.7 * curve[0]
    saved = load_file(whole[0] / "checkpoint-30.safetensors")
    assert saved["model.model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 2 * 96, 32)
    assert saved["model.model.layers.1.mlp.router.weight"].shape == (4, 32)


def test_transformers_loads_the_model(whole: tuple[Path, str], tokens: np.ndarray) -> None:
    from transformers import AutoModelForCausalLM, MixtralForCausalLM

    out, output = whole
    count = (TOKENS - 1) // SEQ_LEN
    first = count - int(count * HELD_OUT)
    blocks = [tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(first, count)]
    rows = torch.from_numpy(np.stack(blocks).astype(np.int64))
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert isinstance(model, MixtralForCausalLM)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten()).item()
    # The losses of the routers are no part of the validation loss.
    assert loss == pytest.approx(validation_loss(output), abs=1e-5)
    assert json.loads((out / "config.json").read_text())["num_experts_per_tok"] == 2


@pytest.mark.parametrize(
    "options",
    [
        ["--activations", "recompute"],
        ["--activations", "offload"],
        ["--memory-budget", "1600KiB"],
    ],
    ids=" ".join,
)
def test_recomputed_and_offloaded_layers_change_no_bit(
    program: Path, data: Path, whole: tuple[Path, str], tmp_path: Path, options: list[str]
) -> None:
    done = train(program, data, tmp_path / "run", *EXPERTS, *options)
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == losses(whole[1])
    expected = (whole[0] / "model.safetensors").read_bytes()
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
def test_a_run_resumes_exactly(program: Path, data: Path, tmp_path: Path, optimizer: str) -> None:
    options = [*EXPERTS, "--optimizer", optimizer, "--steps", "10"]
    done = train(program, data, tmp_path / "whole", *options)
    assert done.returncode == 0, done.stderr
    (tmp_path / "resumed").mkdir()
    shutil.copy(tmp_path / "whole/checkpoint-5.safetensors", tmp_path / "resumed")
    again = train(program, data, tmp_path / "resumed", "--resume", *options)
    assert again.returncode == 0 and losses(again.stdout) == losses(done.stdout)[5:], again.stderr
    expected, found = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "resumed"))
    assert found == expected


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_products_in_16_bits(
    program: Path, data: Path, whole: tuple[Path, str], tmp_path: Path, precision: str
) -> None:
    done = train(program, data, tmp_path / "run", *EXPERTS, "--precision", precision, "--steps", "5")
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == pytest.approx(losses(whole[1])[:5], rel=0.02)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_processes_train_together(
    program: Path, data: Path, whole: tuple[Path, str], tmp_path: Path, strategy: str
) -> None:
    skip_without_gloo()
    options = [*SMALL, *EXPERTS, "--parallel", strategy, "--threads", "1"]
    first, other = finish(start(2, "--data", data, "--out", tmp_path / "run", *options, program=program))
    assert first[0] == 0 and other == (0, "", ""), (first, other)
    # Each process balances the tokens of its own rows, so the loss differs a little.
    assert losses(first[1])[:5] == pytest.approx(losses(whole[1])[:5], rel=2e-3)
    found = load_file(tmp_path / "run/model.safetensors")
    assert found.keys() == load_file(whole[0] / "model.safetensors").keys()
    assert len(found) == 2 + 2 * (6 + 1 + 4 * 3)


def test_bad_options(program: Path, data: Path, whole: tuple[Path, str], tmp_path: Path) -> None:
    def refuse(*options: str, part: str) -> None:
        refused(train(program, data, tmp_path / "out", *options), part)
        assert not list(tmp_path.glob("out/*"))

    refuse("--experts", "-1", part="--experts: expected a whole number from 0 to 2048, got -1")
    refuse("--experts", "4", "--top-k", "5", part="--top-k: expected 1 to --experts, 4, got 5")
    refuse("--experts", "1", part="--top-k: expected 1 to --experts, 1, got 2")
    refuse("--top-k", "2", part="--top-k: expected --experts with it")
    refused(
        train(program, data, whole[0], "--resume"),
        "expected experts 0, received 4: the file belongs to another run",
    )
