"""Mixtures of experts on the command line: trained from scratch, fine-tuned in six layouts, and estimated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from cli_helpers import TINY, TUNE, losses, refuse, succeed, text, weights
from moe_models import MODELS, moe_model
from shoestring.training import memory
from shoestring.training.config import Preset
from shoestring.training.estimate.config import EstimateConfig
from shoestring.training.estimate.step import estimate
from shoestring.training.run.models import build_preset, fused_loss, parameters_of_token

STEPS = ["--steps", "4", "--eval-every", "4"]
MIXTURE = ["--experts", "4", "--top-k", "2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(text())
    return path


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    succeed("train", "--data", data, "--out", out, *TINY, *STEPS, *MIXTURE)
    return out


def test_train_makes_a_mixtral(trained: Path, data: Path, tmp_path: Path) -> None:
    config = json.loads((trained / "model" / "config.json").read_text())
    assert (config["model_type"], config["num_local_experts"], config["num_experts_per_tok"]) == (
        "mixtral",
        4,
        2,
    )
    found = weights(trained / "model")
    assert sum("experts.3." in name for name in found) == 2 * 3  # gate, up and down of two layers
    # Plain PyTorch computes the same run, with the loss that balances the experts.
    plain = tmp_path / "plain"
    succeed("train", "--data", data, "--out", plain, *TINY, *STEPS, *MIXTURE, "--baseline")
    for ours, theirs in zip(losses(trained), losses(plain), strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-4) and ours[1] == pytest.approx(theirs[1], rel=1e-3)


def test_a_run_goes_on_with_its_experts(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["train", "--data", data, *TINY, *MIXTURE, "--checkpoint-every", "2", "--schedule", "constant"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    succeed(*options, "--out", whole, "--steps", "4")
    succeed(*options, "--out", parts, "--steps", "2")
    line = refuse(capsys, *options, "--out", parts, "--steps", "2", "--resume", "--top-k", "1")
    assert "top_k differs: the run has 2, this command has 1" in line


def test_what_is_refused(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "--data", data, "--out", tmp_path / "run", *TINY]
    assert "--top-k 2: expected --experts with it, got none" in refuse(capsys, *train, "--top-k", "2")
    line = refuse(capsys, *train, "--experts", "2", "--top-k", "3")
    assert "--top-k: expected 1 to --experts, 2, got 3" in line
    line = refuse(capsys, "estimate", "--model", tmp_path, "--experts", "4")
    assert "--experts 4: expected a preset as --model" in line
    line = refuse(capsys, "estimate", "--model", "tiny", "--rank", "4", "--target-parameters", ",")
    assert "--target-parameters: expected names separated by commas; got none" in line


@pytest.mark.parametrize("kind", MODELS)
def test_finetune_quantises_and_adapts_every_expert(
    kind: str, trained: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    folder, out = tmp_path / kind, tmp_path / "run"
    moe_model(kind, vocab_size=300).save_pretrained(folder)
    AutoTokenizer.from_pretrained(trained / "tokenizer").save_pretrained(folder)
    targets = ["--target-parameters", "gate_up_proj,down_proj"] if kind == "gpt_oss" else []
    capsys.readouterr()
    succeed(
        "finetune",
        "--model",
        folder,
        "--data",
        data,
        "--out",
        out,
        *TUNE,
        "--steps",
        "20",
        "--lr",
        "1e-2",
        *targets,
    )
    count = MODELS[kind][2]
    assert (
        f"experts: {count}, of which {count} are quantised and {count} have adapters"
        in capsys.readouterr().out
    )
    steps = losses(out)
    assert steps[-1][0] < steps[0][0] - 0.1
    adapters = {n: t for n, t in weights(out / "adapter").items() if "experts" in n and "lora_B" in n}
    layers = count // (8 if kind == "qwen3_moe" else 4)
    assert len(adapters) == 2 * layers and all(t.abs().sum() > 0 for t in adapters.values())
    model: Any = shoestring.load_quantized(folder, dtype=torch.float32)
    shoestring.lora.load_adapter(model, out / "adapter")
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()


@pytest.mark.parametrize("kind", ["full", "lora", "nf4"])
@pytest.mark.parametrize(
    "of", [Preset(128, 4, 4, 4, 384), "qwen3_moe", "deepseek_v3"], ids=["preset", "qwen3_moe", "deepseek_v3"]
)
def test_estimates(of: Preset | str, kind: str) -> None:
    def build() -> Any:
        return moe_model(of) if isinstance(of, str) else build_preset(of, 300, 64, 0, experts=4, top_k=2)

    def adapt(model: nn.Module) -> nn.Module:
        if kind == "full":
            return model
        model.requires_grad_(False)
        return shoestring.lora.apply(model, rank=8, quantize="nf4" if kind == "nf4" else None)

    with torch.device("meta"):
        twin = build()
    config = EstimateConfig(model="", batch_size=4, seq_len=64, precision="fp32")
    found = {part.name: part.bytes for part in estimate(adapt(twin), config).memory["device"]}
    model = build().train()
    loss = fused_loss(model, 64)
    model = adapt(model)
    tokens = torch.randint(90, (4, 64))
    with memory.SavedActivations(model) as saved:
        loss(tokens, tokens).backward()
    if isinstance(of, Preset):  # the attention of the others keeps more than that of a Llama
        assert saved.bytes == pytest.approx(found["activations"], rel=0.1)
    assert found["weights"] == memory.weight_bytes(model)
    assert found["gradients"] == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


def test_the_parameters_of_a_token() -> None:
    with torch.device("meta"):
        dense = build_preset(Preset(64, 2, 2, 2, 192), 300, 32, 0)
        mixture = build_preset(Preset(64, 2, 2, 2, 192), 300, 32, 0, experts=8, top_k=2)
    mlp = 3 * 64 * 192
    assert parameters_of_token(dense) == sum(p.numel() for p in dense.parameters())
    # one more MLP in each of two layers, and a router of 8 rows
    assert parameters_of_token(mixture) == parameters_of_token(dense) + 2 * (mlp + 8 * 64)


def test_the_lines_of_a_patch_name_what_is_left_of_a_mixture() -> None:
    told: list[str] = []
    fused_loss(build_preset(Preset(64, 2, 2, 2, 192), 300, 32, 0, experts=4), 64, told.append)
    assert "experts of shoestring" in told[0] and told[1] == "left to PyTorch: 2 x MixtralTopKRouter"
