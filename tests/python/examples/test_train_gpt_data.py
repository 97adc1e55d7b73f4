"""The C++ example train_gpt reads its data ahead, refuses bad data, and holds data out for validation."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cpp_examples import (
    ENVIRONMENT,
    SMALL,
    build_example,
    learnable_tokens,
    losses,
    refused,
    token_file,
    train,
    validation_loss,
)

TOKENS = learnable_tokens(20_000, 512)


@pytest.fixture(scope="module")
def program() -> Path:
    return build_example("train_gpt")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return token_file(tmp_path_factory.mktemp("data") / "tokens.bin", TOKENS)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda path, tokens: path, "cannot open: No such file"),
        (lambda path, tokens: path.parent, "not a token file"),
        (lambda path, tokens: (path.write_bytes(b""), path)[1], "not a token file"),
        (lambda path, tokens: (path.write_text("text " * 100), path)[1], "not a token file"),
        (lambda path, tokens: token_file(path, tokens, magic=b"shoetok\x02"), "not a token file"),
        (
            lambda path, tokens: token_file(path, tokens, width=3),
            "expected 2 or 4 bytes per token, received 3",
        ),
        (lambda path, tokens: token_file(path, tokens, vocab=0), "received the size 0"),
        (
            lambda path, tokens: token_file(path, tokens, count=2**63),
            "the header says 9223372036854775808 tokens",
        ),
        (
            lambda path, tokens: token_file(path, tokens, count=len(tokens) + 1),
            "the header says 20001 tokens of 2 bytes, but 40000",
        ),
        (lambda path, tokens: token_file(path, tokens[:0]), "holds no token"),
        (lambda path, tokens: token_file(path, tokens[:33]), "33 tokens are too few"),
        (lambda path, tokens: token_file(path, tokens, vocab=100), "outside the vocabulary of 100"),
    ],
)
@pytest.mark.sample(5)
def test_bad_data(program: Path, tmp_path: Path, make: Callable[..., Path], part: str) -> None:
    refused(train(program, make(tmp_path / "tokens.bin", TOKENS), tmp_path / "out"), "--data", part)
    assert not list(tmp_path.glob("out/*"))


def test_a_file_that_is_cut_while_it_is_read(program: Path, tmp_path: Path) -> None:
    data, out = token_file(tmp_path / "tokens.bin", TOKENS), tmp_path / "out"
    command = [program, "--data", data, "--out", out, *SMALL, "--steps", "2000"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT) as process:
        next(line for line in process.stdout if line.startswith("step "))
        process.send_signal(signal.SIGSTOP)
        os.truncate(data, 1000)
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors == f"train_gpt: error: --data {data}: cannot read: it was cut\n"
    assert any(out.glob("checkpoint-*")) and not (out / "model.safetensors").exists()


def test_the_time_of_waiting_for_data(program: Path, data: Path, tmp_path: Path) -> None:
    library = tmp_path / "libslow_reads.so"
    source = Path(__file__).with_name("slow_reads.c")
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True)
    waited = {}
    for name, preload in (("quick", ""), ("slow", str(library))):
        done = train(
            program, data, tmp_path / name, "--steps", "4", env=ENVIRONMENT | {"LD_PRELOAD": preload}
        )
        assert done.returncode == 0, done.stderr
        waited[name] = float(done.stdout.split(", waited ")[1].split(" s for data")[0])
    # The slow reads take 0.16 s per micro-batch, and the steps take a part of it.
    assert waited["slow"] > waited["quick"] + 0.1


def test_nothing_is_held_out(program: Path, data: Path, tmp_path: Path) -> None:
    done = train(program, data, tmp_path / "out", "--val-fraction", "0", "--eval-every", "10")
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 30 and " val" not in done.stdout
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("optimizer", ["adamw", "schedule-free-adamw"])
def test_validates_every_few_steps(program: Path, data: Path, tmp_path: Path, optimizer: str) -> None:
    """A validation within a run has the loss of a run that ends there."""
    shared = ["--optimizer", optimizer, "--schedule", "constant", "--eval-batches", "1"]
    within = train(program, data, tmp_path / "within", *shared, "--eval-every", "10")
    assert within.returncode == 0, within.stderr
    values = [line.split("  val ")[1].split()[0] if "  val " in line else None
              for line in within.stdout.splitlines() if line.startswith("step ")]  # fmt: skip
    assert values[:9] == [None] * 9
    assert values[9:19] == [values[9]] * 10 and values[19:] == [values[19]] * 11
    for steps in (10, 20):
        alone = train(program, data, tmp_path / str(steps), *shared, "--steps", str(steps))
        assert float(values[steps - 1]) == pytest.approx(validation_loss(alone.stdout), abs=1e-3)
    assert float(values[9]) > float(values[19]) > validation_loss(within.stdout)
    # Schedule-free AdamW trains at one point and evaluates at another, which is the result.
    trained, result = (
        load_file(tmp_path / "within" / f"{name}.safetensors") for name in ("checkpoint-30", "model")
    )
    name = "model.norm.weight"
    assert torch.equal(trained[f"model.{name}"], result[name]) == (optimizer == "adamw")


def test_resume_compares_the_whole_token_file(program: Path, tmp_path: Path) -> None:
    """A token that was edited in the middle of a large file is other data, with the same size."""
    tokens = learnable_tokens(3_000_000, 512)
    path, out = tmp_path / "tokens.bin", tmp_path / "out"
    options = ["--val-fraction", "0.0001", "--steps", "1"]
    assert train(program, token_file(path, tokens), out, *options).returncode == 0
    tokens[1_500_001] ^= 1
    refused(train(program, token_file(path, tokens), out, "--resume", *options), "data")
