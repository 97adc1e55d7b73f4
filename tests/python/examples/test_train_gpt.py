"""The C++ example train_gpt builds against the installed package, trains, resumes, and saves a model.

transformers loads the saved model.
"""

import math
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cli_helpers import refuse
from cpp_examples import (
    ENVIRONMENT,
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
from shoestring.files.lock import locked

VOCAB, TOKENS, HELD_OUT = 512, 20_000, 0.02


@pytest.fixture(scope="module")
def program() -> Path:
    return build_example("train_gpt")


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return learnable_tokens(TOKENS, VOCAB)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tokens: np.ndarray) -> Path:
    return token_file(tmp_path_factory.mktemp("data") / "tokens.bin", tokens)


def killed_after(program: Path, data: Path, out: Path, step: int, *options: str) -> None:
    """Start a training run, and kill it with SIGKILL when it has printed the line of step ``step``."""
    command = [program, "--data", data, "--out", out, *SMALL, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        for line in process.stdout:
            if line.startswith(f"step {step}/"):
                process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


@pytest.fixture(scope="module")
def whole(program: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the example train_gpt without interruption, once for all tests that compare with it."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    done = train(program, data, out)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_loss_falls(whole: tuple[Path, str]) -> None:
    out, output = whole
    curve = losses(output)
    assert len(curve) == 30
    assert curve[0] == pytest.approx(math.log(VOCAB), rel=0.02)
    assert curve[-1] < 0.7 * curve[0]
    assert {p.name for p in out.glob("checkpoint-*")} == {
        "checkpoint-25.safetensors",
        "checkpoint-30.safetensors",
    }


def test_a_memory_budget_changes_nothing_else(
    program: Path, data: Path, whole: tuple[Path, str], tmp_path: Path
) -> None:
    done = train(program, data, tmp_path / "small", "--memory-budget", "1MiB", "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert "activations within 1 MiB: " in done.stdout
    # The output names the number of layers that the example recomputes to stay within the memory budget.
    assert int(done.stdout.split("1 MiB: ")[1].split()[0]) > 0
    assert losses(done.stdout)[:1] == losses(whole[1])[:1]
    assert losses(train(program, data, tmp_path / "free", "--steps", "3").stdout) == losses(done.stdout)
    none = train(program, data, tmp_path / "none", "--memory-budget", "1 MiB", "--hidden", "256")
    assert (
        none.returncode == 2
        and "budget: expected at least" in none.stderr
        and len(none.stderr.splitlines()) == 1
    )


@pytest.mark.parametrize("where", ["cpu", "stream", "nvme"])
@pytest.mark.sample(1)
def test_offloaded_state_changes_nothing_else(
    program: Path, data: Path, whole: tuple[Path, str], tmp_path: Path, where: str
) -> None:
    place = f"nvme:{tmp_path}" if where == "nvme" else where
    done = train(program, data, tmp_path / "run", "--offload", place)
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == losses(whole[1])
    none = train(program, data, tmp_path / "none", "--offload", f"nvme:{tmp_path}/nowhere")
    assert none.returncode == 2 and "No such file" in none.stderr and len(none.stderr.splitlines()) == 1
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--activations", "recompute"],
        ["--activations", "offload"],
        ["--memory-budget", "8MiB", "--activations", "offload"],
        ["--log-every", "7"],
        ["--device", "cpu"],
        ["--host-allocator"],
    ],
)
@pytest.mark.sample(3)
def test_options_that_change_no_bit(
    program: Path, data: Path, whole: tuple[Path, str], tmp_path: Path, options: list[str]
) -> None:
    done = train(program, data, tmp_path / "run", *options)
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == losses(whole[1])
    expected = (whole[0] / "model.safetensors").read_bytes()
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize("accumulate", ["1", "3"])
def test_a_step_in_backward_is_the_step(program: Path, data: Path, tmp_path: Path, accumulate: str) -> None:
    saved = []
    for name, options in (("after", []), ("within", ["--step-in-backward"])):
        # Clipping uses the norm of the step before, so it is off. fp32 gradients are summed in the same order.
        options += ["--clip", "0", "--steps", "6", "--optimizer-state", "fp32", "--accumulate", accumulate]
        done = train(program, data, tmp_path / name, *options)
        assert done.returncode == 0, done.stderr
        saved.append(load_file(tmp_path / name / "model.safetensors"))
    for key, tensor in saved[0].items():
        assert torch.allclose(saved[1][key], tensor, rtol=1e-5, atol=1e-6), key


# For each optimizer, the state of a matrix, besides "step" and the scales of codes.
STATES = {
    "adamw": {"exp_avg", "exp_avg_sq"},
    "lion": {"exp_avg"},
    "sgd": {"momentum_buffer"},
    "ademamix": {"exp_avg", "exp_avg_slow", "exp_avg_sq"},
    "schedule-free-adamw": {"offset", "exp_avg_sq"},
    "lamb": {"exp_avg", "exp_avg_sq"},
    "adafactor": {"row_var", "col_var", "variance"},
    "came": {
        "exp_avg",
        "exp_avg_sq",
        "exp_avg_res_row",
        "exp_avg_res_col",
        "exp_avg_sq_row",
        "exp_avg_sq_col",
    },
    "muon": {"momentum_buffer"},
}


@pytest.mark.parametrize("optimizer", STATES)
@pytest.mark.sample(3)
def test_every_optimizer_resumes_exactly(program: Path, data: Path, tmp_path: Path, optimizer: str) -> None:
    options = ["--optimizer", optimizer, "--steps", "10", "--optimizer-state", "bf16"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    done = train(program, data, whole, *options)
    assert done.returncode == 0, done.stderr
    curve = losses(done.stdout)
    assert len(curve) == 10 and all(map(math.isfinite, curve))
    resumed.mkdir()
    shutil.copy(whole / "checkpoint-5.safetensors", resumed)
    again = train(program, data, resumed, "--resume", *options)
    assert again.returncode == 0 and losses(again.stdout) == curve[5:], again.stderr
    saved = load_file(whole / "checkpoint-10.safetensors")
    for key, tensor in load_file(resumed / "checkpoint-10.safetensors").items():
        assert torch.equal(tensor, saved[key]), key
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    # The first optimizer's first group has the matrices, of which the second is one of a layer.
    prefix = "optimizer.0.0.1."
    state = {key.removeprefix(prefix) for key in saved if key.startswith(prefix)} - {"step"}
    assert state == STATES[optimizer]
    if optimizer == "muon":  # the embedding and vectors are AdamW's
        assert {"optimizer.1.0.0.exp_avg_sq", "optimizer.1.1.0.exp_avg_sq"} <= saved.keys()


@pytest.mark.parametrize(
    ("precision", "weights"),
    [("bf16", "fp32"), ("bf16", "bf16"), ("bf16", "bf16-stochastic"), ("bf16", "bf16-remainder"), ("fp16", "fp32")],
)  # fmt: skip
@pytest.mark.sample(2)
def test_products_and_weights_in_16_bits(
    program: Path, data: Path, whole: tuple[Path, str], tmp_path: Path, precision: str, weights: str
) -> None:
    done = train(program, data, tmp_path / "run", "--precision", precision, "--weights", weights)
    assert done.returncode == 0, done.stderr
    # Later losses depend on rounding, because the learning rate is high.
    assert losses(done.stdout)[:5] == pytest.approx(losses(whole[1])[:5], rel=0.02)
    assert losses(done.stdout) != losses(whole[1])
    saved = load_file(tmp_path / "run" / "checkpoint-30.safetensors")
    dtype = torch.float32 if weights == "fp32" else torch.bfloat16
    assert {tensor.dtype for key, tensor in saved.items() if key.startswith("model.")} == {dtype}
    assert any(key.endswith("weight_remainder") for key in saved) == (weights == "bf16-remainder")
    name = str(dtype).removeprefix("torch.")
    assert f'"dtype": "{name}"' in (tmp_path / "run" / "config.json").read_text()


@pytest.mark.parametrize("state", ["8bit", "fp32"])
@pytest.mark.parametrize("optimizer", ["schedule-free-adamw", "adamw", "muon"])
@pytest.mark.sample(2)
def test_the_saved_model_is_the_evaluated_one(
    program: Path, data: Path, tokens: np.ndarray, tmp_path: Path, optimizer: str, state: str
) -> None:
    """The file holds the weights whose validation loss the program prints, also when a finished run is resumed."""
    from transformers import LlamaForCausalLM

    out, count = tmp_path / "out", (TOKENS - 1) // SEQ_LEN
    first = count - int(count * HELD_OUT)
    blocks = [tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(first, count)]
    rows = torch.from_numpy(np.stack(blocks).astype(np.int64))
    for more in ([], ["--resume"]):
        done = train(
            program, data, out, "--steps", "10", "--optimizer", optimizer, "--optimizer-state", state, *more
        )
        assert done.returncode == 0, done.stderr
        model = LlamaForCausalLM.from_pretrained(out)
        with torch.no_grad():
            logits = model(rows[:, :-1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten()).item()
        assert loss == pytest.approx(validation_loss(done.stdout), abs=1e-5)


FP16 = [[], ["--baseline"], ["--optimizer", "muon", "--accumulate", "2"]]


@pytest.mark.parametrize("options", FP16, ids=" ".join)
def test_fp16_resumes_exactly(program: Path, data: Path, tmp_path: Path, options: list[str]) -> None:
    options = ["--precision", "fp16", "--steps", "10", *options]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    done = train(program, data, whole, *options)
    assert done.returncode == 0, done.stderr
    resumed.mkdir()
    shutil.copy(whole / "checkpoint-5.safetensors", resumed)
    again = train(program, data, resumed, "--resume", *options)
    assert again.returncode == 0 and losses(again.stdout) == losses(done.stdout)[5:], again.stderr
    saved, found = (load_file(folder / "checkpoint-10.safetensors") for folder in (whole, resumed))
    assert saved.keys() == found.keys()
    assert all(torch.equal(tensor, found[key]) for key, tensor in saved.items())
    # No step has overflowed, so the scale is the first one, and all steps count towards its growth.
    assert saved["part.scaler.scale"] == 65536 and saved["part.scaler._growth_tracker"] == 10


def copy_with_scale(source: Path, folder: Path, scale: float) -> dict[str, torch.Tensor]:
    """Copy a checkpoint to a new folder, with another scale of the loss; return its tensors."""
    saved = load_file(source) | {"part.scaler.scale": torch.tensor(scale)}
    with safe_open(source, "pt") as file:
        metadata = {key: value for key, value in file.metadata().items() if key != "checksum"}
    checksum = torch.classes.shoestring.ContentChecksum(metadata)
    for name in sorted(saved):
        checksum.add(name, saved[name])
    metadata["checksum"] = checksum.text()
    folder.mkdir()
    save_file(saved, folder / source.name, metadata)
    return saved


@pytest.mark.parametrize("options", FP16, ids=" ".join)
def test_a_step_that_overflows_is_skipped(
    program: Path, data: Path, tmp_path: Path, options: list[str]
) -> None:
    """The step halves the scale, and changes neither the weights nor the state of the optimizer."""
    options = ["--precision", "fp16", "--steps", "8", *options]
    assert train(program, data, tmp_path / "run", *options).returncode == 0
    out = tmp_path / "overflow"
    saved = copy_with_scale(tmp_path / "run" / "checkpoint-5.safetensors", out, 2.0**60)
    done = train(program, data, out, "--resume", "--checkpoint-every", "1", *options)
    assert done.returncode == 0 and len(losses(done.stdout)) == 3, done.stderr
    for step in (7, 8):
        found = load_file(out / f"checkpoint-{step}.safetensors")
        assert found.pop("part.scaler.scale") == 2.0 ** (60 - (step - 5))
        assert found.pop("part.scaler._growth_tracker") == 0
        assert all(torch.equal(tensor, saved[key]) for key, tensor in found.items())


def test_steps_are_taken_once_the_scale_has_fallen(program: Path, data: Path, tmp_path: Path) -> None:
    options = ["--precision", "fp16", "--steps", "60", "--checkpoint-every", "30"]
    assert train(program, data, tmp_path / "run", *options).returncode == 0
    out = tmp_path / "overflow"
    saved = copy_with_scale(tmp_path / "run" / "checkpoint-30.safetensors", out, 2.0**40)
    assert train(program, data, out, "--resume", *options).returncode == 0
    found = load_file(out / "checkpoint-60.safetensors")
    taken = int(found["part.scaler._growth_tracker"])
    assert 0 < taken < 30 and found["part.scaler.scale"] == 2.0 ** (40 - (30 - taken))
    assert not torch.equal(found["model.model.norm.weight"], saved["model.model.norm.weight"])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_late_read_names_the_first_bad_step(
    program: Path, data: Path, tmp_path: Path, precision: str
) -> None:
    """Steps after the first loss that is not finite change nothing until the host reads the loss."""
    errors = []
    for every in ("1", "30"):
        done = train(program, data, tmp_path / every, "--lr", "1e30", "--clip", "0", "--log-every", every,
                     "--checkpoint-every", "30", "--precision", precision)  # fmt: skip
        refused(done, "; training stopped before the weights changed")
        errors.append(done.stderr)
    assert errors[0] == errors[1]
    assert int(errors[0].split("step ")[1].split(":")[0]) < 20
    assert not list(tmp_path.glob("*/checkpoint-*"))


def test_a_step_reads_nothing_from_the_device(program: Path, data: Path, tmp_path: Path) -> None:
    library, root = tmp_path / "libcount_reads.so", Path(torch.__file__).parent
    source = Path(__file__).with_name("count_reads.cpp")
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", source, f"-I{root}/include", "-o", library]
    subprocess.run([str(word) for word in command], check=True)
    reads = {}
    for options in (
        "",
        "--accumulate 2 --optimizer muon",
        "--activations recompute",
        "--precision fp16",
        "--baseline",
    ):
        for steps in ("4", "8"):
            done = train(program, data, tmp_path / f"run{len(reads)}", *options.split(), "--steps", steps,
                         "--checkpoint-every", "100", env=ENVIRONMENT | {"LD_PRELOAD": str(library)})  # fmt: skip
            assert done.returncode == 0, done.stderr
            reads[options, steps] = int(done.stderr.split()[-2])
        # The CPU kernel of the fused loss's backward reads its factor, which lies on the CPU, for each of its two
        # gradients. LibTorch's AdamW cannot skip a step, so the host must know whether to step.
        of_step = {"--baseline": 1, "--accumulate 2 --optimizer muon": 4}.get(options, 2)
        assert reads[options, "8"] - reads[options, "4"] == 4 * of_step, options


def test_plain_is_the_same_training(
    program: Path, data: Path, whole: tuple[Path, str], tmp_path: Path
) -> None:
    done = train(program, data, tmp_path / "plain", "--baseline")
    assert done.returncode == 0, done.stderr
    # The first losses with and without --baseline agree, because the optimizers have not stepped yet.
    assert losses(done.stdout)[0] == pytest.approx(losses(whole[1])[0], abs=1e-4)
    assert validation_loss(done.stdout) == pytest.approx(validation_loss(whole[1]), rel=0.01)


@pytest.mark.parametrize("plain", [False, True])
def test_resume_after_a_kill_is_exact(
    program: Path, data: Path, whole: tuple[Path, str], tmp_path: Path, plain: bool
) -> None:
    options = ["--baseline"] if plain else []
    expected = whole[0]
    if plain:
        expected = tmp_path / "whole"
        assert train(program, data, expected, *options).returncode == 0
    out = tmp_path / "killed"
    killed_after(program, data, out, 13, *options)
    assert not (out / "model.safetensors").exists()
    newest = max(out.glob("checkpoint-*"), key=lambda p: int(p.stem.split("-")[1]))
    # A broken disk may leave a truncated checkpoint. The example skips the truncated file with a message.
    torn = out / "checkpoint-29.safetensors"
    torn.write_bytes(newest.read_bytes()[:-100])

    done = train(program, data, out, "--resume", *options)
    assert done.returncode == 0, done.stderr
    assert "passed over a damaged checkpoint" in done.stderr
    assert f"from step {newest.stem.split('-')[1]}" in done.stdout
    assert not torn.exists()
    assert (out / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    resumed, unbroken = (load_file(folder / "checkpoint-30.safetensors") for folder in (out, expected))
    assert resumed.keys() == unbroken.keys()
    assert all(torch.equal(resumed[key], unbroken[key]) for key in resumed)
    state = "exp_avg" if plain else "exp_avg_scale"
    assert f"optimizer.0.0.0.{state}" in resumed  # of the embedding


def test_transformers_computes_the_same(whole: tuple[Path, str], tokens: np.ndarray) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    out, output = whole
    blocks = (TOKENS - 1) // SEQ_LEN
    held_out = int(blocks * HELD_OUT)
    rows = np.stack([tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(blocks - held_out, blocks)])
    rows = torch.from_numpy(rows.astype(np.int64))

    def loss(**changes: object) -> float:
        model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, **changes)
        assert isinstance(model, LlamaForCausalLM)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        with torch.no_grad():
            logits = model(input_ids=rows[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()

    assert loss() == pytest.approx(validation_loss(output), abs=1e-5)
    # If the example used another rotary embedding or norm epsilon than transformers, this comparison would
    # fail. The next two assertions show that another rope_theta or rms_norm_eps moves the loss by more than
    # three times its tolerance.
    assert (
        abs(loss(rope_parameters={"rope_type": "default", "rope_theta": 1.0}) - validation_loss(output))
        > 3e-5
    )
    assert abs(loss(rms_norm_eps=1e-2) - validation_loss(output)) > 3e-5


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--size", "1"], "'--size' is no option"),
        (["--steps"], "--steps: expected a value"),
        (["--steps", "0"], "--steps: expected a whole number from 1 to 1000000000, got 0"),
        (["--steps", "--lr", "1"], "--steps: expected a whole number from 1 to 1000000000, got --lr"),
        (["--lr", "nan"], "--lr: expected a number from 0 to 1e+38, got nan"),
        (["--hidden", "36"], "--hidden: expected a multiple of twice --heads, 8, got 36"),
        (["--kv-heads", "3"], "--kv-heads: expected a divisor of --heads, 4, got 3"),
        (["--precision", "fp8"], "--precision: expected fp32 | tf32 | bf16 | fp16, got fp8"),
        (
            ["--precision", "fp16", "--step-in-backward"],
            "--precision fp16: expected no --step-in-backward, received both",
        ),
        (
            ["--precision", "fp16", "--weights", "bf16"],
            "--weights bf16: expected --precision bf16 with bf16 weights, got --precision fp16",
        ),
        (["--val-fraction", "1"], "--val-fraction: expected 0 to less than 1, got 1"),
        (["--eval-every", "0"], "--eval-every: expected a whole number from 1 to 1000000000, got 0"),
        (
            ["--precision", "tf32", "--device", "cpu"],
            "--precision tf32: expected a CUDA device, which computes in TF32, got cpu",
        ),
        (["--device", "gpu"], "--device: expected auto, cpu, cuda or cuda:N, got gpu"),
        (["--device", "xla:9"], "finds to be cpu; got xla:9"),
        (
            ["--weights", "bf16"],
            "--weights bf16: expected --precision bf16 with bf16 weights, got --precision fp32",
        ),
        (["--offload", "nvme:"], "--offload: expected none, cpu, stream or nvme:DIR, got nvme:"),
        (
            ["--memory-budget", "2 TB"],
            "--memory-budget: expected a number of bytes, or a size such as 6GiB or 500MB, got 2 TB",
        ),
        (
            ["--memory-budget", "2GiB", "--activations", "recompute"],
            "--memory-budget 2GiB: expected no --activations recompute, received both",
        ),
        (
            ["--optimizer", "muon", "--step-in-backward"],
            "--optimizer muon: expected no --step-in-backward, received both",
        ),
        (["--optimizer", "lion", "--baseline"], "--optimizer lion: expected no --baseline, received both"),
        (["--step-in-backward", "--baseline"], "--step-in-backward: expected no --baseline, received both"),
        (["--resume"], "there is no checkpoint"),
        (["--out", "/proc/none/run"], "cannot make the folder"),
        (["--lr", "1e30", "--clip", "0"], "; training stopped before the weights changed"),
        (["--lr", "1e30", "--clip", "0", "--baseline"], "; training stopped before the weights changed"),
        (
            ["--lr", "1e30", "--clip", "0", "--precision", "fp16"],
            "; training stopped before the weights changed",
        ),
        (
            ["--lr", "1e30", "--clip", "0", "--step-in-backward"],
            "; training stopped before the weights changed",
        ),
    ],
)
@pytest.mark.sample(6)
def test_bad_options(program: Path, data: Path, tmp_path: Path, options: list[str], part: str) -> None:
    refused(train(program, data, tmp_path / "out", *options), part)
    assert not list(tmp_path.glob("out/*"))


def test_a_run_is_not_mixed_with_another(
    program: Path, data: Path, whole: tuple[Path, str], tmp_path: Path
) -> None:
    out, _ = whole
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    other = token_file(tmp_path / "other.bin", np.zeros(TOKENS))
    refused(train(program, data, out), "holds a run already; continue it with --resume or give another --out")
    refused(
        train(program, data, out, "--resume", "--hidden", "64"),
        "expected hidden 64, received 32: the file belongs to another run",
    )
    refused(
        train(program, data, out, "--resume", "--baseline"),
        "expected baseline yes, received no: the file belongs to another run",
    )
    refused(train(program, other, out, "--resume"), "expected data ", "belongs to another run")
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_a_full_disk(program: Path, data: Path, tmp_path: Path) -> None:
    # A limit on the size of files acts like a full disk. Python ignores the signal SIGXFSZ, and so does the
    # example, which inherits this from Python.
    limit = (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    done = train(program, data, tmp_path / "out", restore_signals=False,
                 preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))  # fmt: skip
    refused(done, "checkpoint-5.safetensors: cannot write: File too large")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_a_checkpoint(
    program: Path, data: Path, whole: tuple[Path, str], tmp_path: Path, number: signal.Signals
) -> None:
    out, command = tmp_path / "out", [program, "--data", data, "--out", tmp_path / "out", *SMALL]
    options: list[str] = ["--checkpoint-every", "1000"]
    for _ in range(2):
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [*command, *options], stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT
        ) as process:
            next(line for line in process.stdout if line.startswith("step "))
            process.send_signal(number)
            _, errors = process.communicate()
        assert process.returncode == 128 + number, errors
        assert any(out.glob("checkpoint-*"))
        step = max(int(path.stem.split("-")[1]) for path in out.glob("checkpoint-*"))
        assert errors.splitlines()[-1] == f"train_gpt: checkpoint at step {step}, continue with --resume"
        assert not (out / ".lock").exists() and not (out / "model.safetensors").exists()
        options = ["--checkpoint-every", "1000", "--resume"]
    assert train(program, data, out, "--resume").returncode == 0
    assert (out / "model.safetensors").read_bytes() == (whole[0] / "model.safetensors").read_bytes()


def test_a_second_signal_ends_at_once(program: Path, data: Path, tmp_path: Path) -> None:
    # These options make a training step long, so that both signals arrive within one step.
    wide = [
        "--hidden",
        "256",
        "--layers",
        "4",
        "--batch-size",
        "256",
        "--steps",
        "2",
        "--threads",
        "1",
    ]
    command = [program, "--data", data, "--out", tmp_path / "out", *SMALL, *wide]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert "M parameters" in process.stdout.readline()
        time.sleep(0.2)
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            line = process.stderr.readline()
        process.wait(timeout=10)
    assert process.returncode == 143 and line == "second signal: exit at once\n"
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_a_flipped_bit_is_passed_over(
    program: Path, data: Path, whole: tuple[Path, str], tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        out = tmp_path / "out"
        shutil.copytree(whole[0], out)
        newest = out / "checkpoint-30.safetensors"
        raw = bytearray(newest.read_bytes())
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        newest.write_bytes(raw)
        done = train(program, data, out, "--resume")
        assert done.returncode == 0 and "passed over a damaged checkpoint: " in done.stderr
        assert f"{newest}: " in done.stderr and "from step 25" in done.stdout
        assert (out / "model.safetensors").read_bytes() == (whole[0] / "model.safetensors").read_bytes()
        shutil.rmtree(out)


def test_two_programs_on_one_folder(
    program: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text("some text " * 1000)
    command = [program, "--data", data, "--out", out, *SMALL, "--steps", "100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        # The last run of this test continues from the checkpoint of step 5, which is written before step 6 ends.
        next(line for line in process.stdout if line.startswith("step ") and int(line[5:].split("/")[0]) > 5)
        process.send_signal(signal.SIGSTOP)
        (out / "checkpoint-1.safetensors.tmp1-0").write_text("half")
        for more in ([], ["--resume"]):
            refused(train(program, data, out, *more), f"--out {out}: in use by process {process.pid}")
            line = refuse(capsys, "train", "--data", text, "--out", out, "--preset", "tiny", *more)
            assert f"--out {out}: in use by process {process.pid}" in line
        assert (out / "checkpoint-1.safetensors.tmp1-0").exists()
        process.kill()
    # The lock file still exists after the kill, but the lock is free.
    with locked(out / ".lock", "--out"):
        refused(train(program, data, out, "--resume"), f"--out {out}: in use by process {os.getpid()}")
    done = train(program, data, out, "--resume", "--steps", "100")
    assert done.returncode == 0 and not list(out.glob("*.tmp*")) and not (out / ".lock").exists()


def test_needs_no_python(program: Path) -> None:
    done = subprocess.run([program, "--help"], capture_output=True, text=True, env={"PATH": os.devnull})
    assert done.returncode == 0
    assert "--resume" in done.stdout
    linked = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    assert "libshoestring.so" in linked and "libpython" not in linked
