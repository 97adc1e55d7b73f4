"""The C++ programs train as a plan of Python says, with the bits of the options that equal it, and drop nothing of it."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shoestring
from cpp_examples import (
    ENVIRONMENT,
    SEQ_LEN,
    build_example,
    learnable_tokens,
    losses,
    refused,
    token_file,
    train,
)
from planning.situations import Json, plan, random_situation

VOCAB, ROWS = 512, 8
KEEP = ["keep", "keep"]


@pytest.fixture(scope="module")
def program() -> Path:
    return build_example("train_gpt")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return token_file(tmp_path_factory.mktemp("data") / "tokens.bin", learnable_tokens(6_000, VOCAB))


def plan_file(path: Path, treatments: list[str], **changes: Any) -> str:
    """Write a plan of 8 rows in a step for a model of as many layers as treatments."""
    content: Json = plan(random_situation(random.Random(0)))
    blocks = [
        {"block": f"model.layers.{i}", "treatment": name, "pending_bytes": 0, "link_bytes": 0}
        for i, name in enumerate(treatments)
    ]
    plain = {"micro_batch": ROWS, "accumulate": 1, "precision": "fp32", "optimizer_state": "8bit", "offload": "none",
             "step_in_backward": False, "weights_place": "none", "tiles": {}, "checkpoints": blocks}  # fmt: skip
    shoestring.TrainingPlan(content | plain | changes).save(path)
    return str(path)


@pytest.mark.parametrize(
    ("treatments", "changes", "options"),
    [
        (KEEP, {}, []),
        (KEEP, {"micro_batch": 2, "accumulate": 4}, ["--batch-size", "2", "--accumulate", "4"]),
        (["recompute", "recompute"], {"precision": "bf16"}, ["--activations", "recompute", "--precision", "bf16"]),
        (["offload", "offload"], {}, ["--activations", "offload"]),
        (["keep attention", "keep attention and products"], {"optimizer_state": "fp32"}, ["--optimizer-state", "fp32"]),
        (["recompute, input offloaded", "keep"], {"step_in_backward": True}, ["--step-in-backward"]),
        (KEEP, {"offload": "cpu", "workspace_mb": 1}, ["--offload", "cpu", "--workspace-mb", "1"]),
        (KEEP, {"precision": "bf16", "weights": "bf16"}, ["--precision", "bf16", "--weights", "bf16"]),
    ],
)  # fmt: skip
@pytest.mark.sample(3)
def test_a_plan_is_the_options_that_equal_it(
    program: Path, data: Path, tmp_path: Path, treatments: list[str], changes: Json, options: list[str]
) -> None:
    path = plan_file(tmp_path / "plan.json", treatments, **changes)
    followed = train(program, data, tmp_path / "followed", "--steps", "4", "--plan", path)
    assert followed.returncode == 0, followed.stderr
    given = train(program, data, tmp_path / "given", "--steps", "4", *options)
    assert given.returncode == 0, given.stderr
    assert losses(followed.stdout) == losses(given.stdout) and len(losses(given.stdout)) == 4
    files = [tmp_path / run / "model.safetensors" for run in ("followed", "given")]
    assert files[0].read_bytes() == files[1].read_bytes()
    kept = treatments.count("keep")
    assert f", {kept} of 2 layers keep their activations; predicted " in followed.stdout
    # The run goes on with the options that equal the plan, and with the plan.
    for more in (options, ["--plan", path]):
        again = train(program, data, tmp_path / "followed", "--steps", "4", "--resume", *more)
        assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("treatments", "changes", "options", "message"),
    [
        (["keep"] * 3, {}, [], "blocks: expected the 3 planned ones, received 2; plan anew for this model"),
        (KEEP, {"checkpoints": [{"block": f"h.{i}", "treatment": "keep", "pending_bytes": 0, "link_bytes": 0}
                                for i in range(2)]}, [], "blocks: expected h.0 as block 0, received model.layers.0"),
        (KEEP, {"micro_batch": 2}, [], "micro_batch: expected 8 rows in a step, as --batch-size says, got 1 x 2"),
        (KEEP, {"precision": "as the weights"}, [], "precision: expected a value of --precision, got as the weights"),
        (KEEP, {"weights": "fp64"}, [], "weights: expected a value of --weights, got fp64"),
        (KEEP, {}, ["--weights", "bf16"], "weights: expected bf16, as --weights says, got fp32"),
        (KEEP, {"adapters": "lora"}, [], "adapters: expected none, since train_gpt does nothing else, got lora"),
        (KEEP, {"quantize": "nf4"}, [], "quantize: expected none, since train_gpt does nothing else, got nf4"),
        (KEEP, {"weights_place": "cpu"}, [], "weights_place: expected none, since train_gpt does nothing else, got cpu"),
        (KEEP, {"tiles": {"lm_head": 64}}, [], "tiles: expected none, since train_gpt does nothing else, got lm_head=64"),
        (KEEP, {"workspace_mb": 2}, ["--workspace-mb", "2"], "expected no --workspace-mb, received both"),
        (KEEP, {}, ["--accumulate", "1"], "expected no --accumulate, received both"),
        (KEEP, {}, ["--precision", "fp32"], "expected no --precision, received both"),
        (KEEP, {}, ["--optimizer-state", "8bit"], "expected no --optimizer-state, received both"),
        (KEEP, {}, ["--step-in-backward"], "expected no --step-in-backward, received both"),
        (KEEP, {}, ["--offload", "cpu"], "expected no --offload, received both"),
        (KEEP, {}, ["--activations", "keep"], "expected no --activations, received both"),
        (KEEP, {}, ["--memory-budget", "1GiB"], "expected no --memory-budget, received both"),
        (KEEP, {}, ["--baseline"], "expected no --baseline, received both"),
        (KEEP, {}, ["--parallel", "ddp"], "--parallel ddp: expected no --plan "),
        (KEEP, {"step_in_backward": True}, ["--optimizer", "muon"], "--optimizer muon: expected no --step-in-backward"),
    ],
)  # fmt: skip
@pytest.mark.sample(4)
def test_plans_that_cannot_be_followed(
    program: Path, data: Path, tmp_path: Path, treatments: list[str], changes: Json, options: list[str], message: str
) -> None:  # fmt: skip
    path = plan_file(tmp_path / "plan.json", treatments, **changes)
    refused(train(program, data, tmp_path / "run", "--plan", path, *options), message)
    assert not (tmp_path / "run").exists()


def test_files_that_are_no_plan(program: Path, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    refused(train(program, data, tmp_path / "run", "--plan", str(path)), f"--plan {path}: cannot open")
    path.write_text("{")
    refused(train(program, data, tmp_path / "run", "--plan", str(path)), f"--plan {path}: not valid JSON")
    content = json.loads(Path(plan_file(path, KEEP)).read_text())
    path.write_text(json.dumps(content | {"offload": "tape"}))
    refused(
        train(program, data, tmp_path / "run", "--plan", str(path)),
        f"--plan {path}.offload: expected none | cpu",
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2,
                             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **shape)).save_pretrained(folder)
    return folder


def finetune(model: Path, data: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [build_example("finetune"), "--model", model, "--data", data, "--out", out, "--steps", "4", "--threads",
               "2", "--seq-len", str(SEQ_LEN), "--rank", "4", "--json", out.with_suffix(".json"), *options]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)


def test_finetune_follows_a_plan(model: Path, data: Path, tmp_path: Path) -> None:
    """Frozen weights leave as planned, and losses are those of the options that equal the plan."""
    place = f"nvme:{tmp_path}"
    changes = {"micro_batch": 4, "accumulate": 2, "weights_place": place, "keep": 100_000, "quantize": "int8"}
    path = plan_file(tmp_path / "plan.json", ["recompute", "keep attention"], **changes)
    followed = finetune(
        model, data, tmp_path / "followed", "--plan", path, "--batch-size", "8", "--quantize", "int8"
    )
    assert followed.returncode == 0, followed.stderr
    options = [
        "--batch-size",
        "4",
        "--accumulate",
        "2",
        "--offload-weights",
        place,
        "--keep",
        "100000",
        "--quantize",
        "int8",
    ]
    given = finetune(model, data, tmp_path / "given", *options, "--activations", "recompute")
    assert given.returncode == 0, given.stderr
    results = [json.loads((tmp_path / f"{run}.json").read_text()) for run in ("followed", "given")]
    assert results[0]["losses"] == results[1]["losses"] and len(results[0]["losses"]) == 4
    assert results[0]["weights_fetched_bytes"] > results[0]["weights_away_bytes"] > 0
    name = "adapter_model.safetensors"
    assert (tmp_path / "followed" / name).read_bytes() == (tmp_path / "given" / name).read_bytes()
    for more, message in (
        (["--offload-weights", "none"], f"--plan {path}: expected no --offload-weights, received both"),
        (["--keep", "1MiB"], f"--plan {path}: expected no --keep, received both"),
        ([], f"--quantize: expected int8, as planned in {path}, got nf4"),
    ):
        done = finetune(model, data, tmp_path / "none", "--plan", path, *more)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    path = plan_file(tmp_path / "plan.json", KEEP, weights_place=place, tiles={"lm_head": 64})
    done = finetune(model, data, tmp_path / "none", "--plan", path)
    assert (
        done.returncode == 2
        and "tiles: expected none, since finetune brings whole layers, got " in done.stderr
    )
    path = plan_file(tmp_path / "plan.json", ["keep"] * 3)
    done = finetune(model, data, tmp_path / "none", "--plan", path)
    assert done.returncode == 2 and "blocks: expected the 3 planned ones, received 2" in done.stderr
    assert not (tmp_path / "none").exists()


def test_programs_follow_plans_of_python(program: Path, model: Path, data: Path, tmp_path: Path) -> None:
    """A plan of the model in Python has the names of the blocks of the programs, with adapters and without."""
    planned = LlamaForCausalLM.from_pretrained(model)

    def example(rows: int) -> torch.Tensor:
        tokens = torch.arange(rows * SEQ_LEN).view(rows, SEQ_LEN) % VOCAB
        loss: torch.Tensor = planned(input_ids=tokens, labels=tokens).loss
        return loss

    path, fixed = tmp_path / "plan.json", {"activations": "recompute", "micro_batch": 2, "precision": "bf16"}
    for run in ("train", "finetune"):
        if run == "finetune":
            shoestring.lora.apply(planned, rank=4)
        shoestring.plan_training(planned, example=example, batch_size=ROWS, fixed=fixed).save(path)
        if run == "train":
            done = train(program, data, tmp_path / run, "--steps", "2", "--plan", str(path))
        else:
            done = finetune(model, data, tmp_path / run, "--plan", str(path))
        assert done.returncode == 0, done.stderr
        assert (
            "plan: 4 x 2 rows, bf16, " in done.stdout
            and " 0 of 2 layers keep their activations" in done.stdout
        )
