"""The commands report each kind of bad input in one line on stderr, exit with code 2, and leave no files."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from cli_helpers import TINY, TUNE, refuse, run, succeed, text, write_jsonl
from shoestring.training.run.positions import positions_of


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "text.txt").write_text(text())
    succeed(
        "train", "--data", folder / "text.txt", "--out", folder / "run", *TINY, "--steps", "1", "--baseline"
    )
    return folder / "run"


def write(content: bytes, name: str = "data.txt") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def empty_folder(folder: Path) -> Path:
    (folder / "data").mkdir()
    return folder / "data"


GOOD = b'{"text": "a b c"}\n'


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "none.txt", "none.txt: no such file or directory"),
        (write(b""), "data.txt: the file is empty"),
        (empty_folder, "no non-empty file matches '*'"),
        (write(b"good \xff bad"), "data.txt: not UTF-8 at byte 5 "),
        (write(GOOD + b'{"text": \n', "a.jsonl"), "a.jsonl: line 2 is not valid JSON"),
        (write(GOOD + b'["text"]\n', "a.jsonl"), "a.jsonl: line 2 is not a JSON object but a list"),
        (
            write(GOOD + b'{"body": "x"}\n', "a.jsonl"),
            "a.jsonl: line 2 has no \"text\" string; its fields are ['body']",
        ),
        (write(b'{"text": ""}\n', "a.jsonl"), "no text in the 1 file(s)"),
        (
            write(GOOD + b'{"text": 5}\n', "a.jsonl"),
            'a.jsonl: line 2: expected a string "text", got a number',
        ),
        (write(GOOD + b'{"text": null}\n', "a.jsonl"), 'line 2: expected a string "text", got null'),
        (
            write(GOOD + b'{"text": "a \\ud800"}\n', "a.jsonl"),
            "a.jsonl: line 2 holds '\\ud800', half of a character",
        ),
        (
            write(GOOD + b'{"text": "a", "n": ' + b"9" * 4301 + b"}\n", "a.jsonl"),
            "line 2 holds an integer of too many digits",
        ),
        (write(b"\xef\xbb\xbf"), "no text in the 1 file(s)"),
        (write(b"[" * 100_000, "a.jsonl"), "a.jsonl: line 1 is not valid JSON"),
        (
            write(b'{"prompt": "a", "completion": "b"}\n', "pc.jsonl"),
            "pc.jsonl: line 1 has no \"text\" string; its fields are ['completion', 'prompt']; `shoestring finetune` "
            "trains on prompt/completion records",
        ),
        (
            write(b"a,b\n1,2\n", "a.csv"),
            "a.csv: expected text or JSON records, got a CSV table; write its rows as JSONL",
        ),
        (write(b"too short"), "too few for a training and a validation block of --seq-len 32"),
    ],
    ids=lambda value: value[:24].replace(" ", "-") if isinstance(value, str) else "",
)
def test_bad_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], Path], message: str
) -> None:
    out = tmp_path / "deep" / "run"
    assert message in refuse(capsys, "train", "--data", make(tmp_path), "--out", out, *TINY, "--baseline")
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [{"prompt": "a", "completion": "b"}, {"prompt": "a"}],
            'line 2: expected the strings "prompt" and "completion"',
        ),
        ([{"prompt": "a", "completion": ""}], "line 1: the completion is empty"),
        ([{"messages": []}], 'line 1: expected a list "messages"'),
        ([{"messages": [{"role": "user", "content": "a"}]}], 'line 1: no message has the role "assistant"'),
        ([{"messages": [{"role": "user", "content": 3}]}], "line 1: each message needs the strings"),
        ([{"messages": [{"content": "a"}]}], "line 1: each message needs the strings"),
        ([{"instruction": "a"}], "line 1 has the fields ['instruction']"),
        ([{"prompt": "a", "completion": 5}], 'and "completion"; "completion" is a number'),
        ([{"messages": {"role": "user"}}], 'expected a list "messages"; "messages" is an object'),
        ([{"messages": [{"role": "user", "content": True}]}], '"content" is true or false'),
        ([{"prompt": "\udfff", "completion": "b"}], "line 1 holds '\\udfff', half of a character"),
        ([{"prompt": "a " * 100, "completion": "b"}] * 3, "no example has a completion within --seq-len 32"),
        ([{"prompt": "a", "completion": "b"}], "1 record(s) are too few"),
    ],
    ids=lambda value: value[:24].replace(" ", "-") if isinstance(value, str) else "",
)
def test_bad_examples(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], records: list[object], message: str
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", records)
    line = refuse(
        capsys,
        "finetune",
        "--model",
        run_folder / "model",
        "--data",
        file,
        "--out",
        tmp_path / "run",
        *TUNE,
        "--baseline",
    )
    assert message in line
    assert not (tmp_path / "run").exists()


def header(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Return a function that applies ``change`` to the header of a model's safetensors file."""

    def damage(model: Path) -> None:
        file = model / "model.safetensors"
        raw = file.read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        fields = json.loads(raw[8 : 8 + size])
        change(fields)
        new = json.dumps(fields).encode()
        file.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + size :])

    return damage


def offsets(fields: dict, move: Callable[[int, int], list[int]]) -> None:
    fields["model.norm.weight"]["data_offsets"] = move(*fields["model.norm.weight"]["data_offsets"])


def raw(change: Callable[[bytes], bytes], name: str = "model.safetensors") -> Callable[[Path], None]:
    return lambda model: (model / name).write_bytes(change((model / name).read_bytes())) and None


def index(text: str) -> Callable[[Path], None]:
    """Return a function that puts an index of sharded weights in place of a model's one file of weights."""

    def change(model: Path) -> None:
        (model / "model.safetensors").rename(model / "weights.safetensors")
        (model / "model.safetensors.index.json").write_text(text)

    return change


def config(**fields: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        value = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**value, **fields}))

    return change


UNSOUND = "model.safetensors: not a valid safetensors file ("


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: (model / "config.json").unlink(), "no config.json there"),
        (lambda model: (model / "config.json").write_text("{"), "config.json: not valid JSON"),
        (config(model_type="no-such-model"), "config.json does not describe a causal language model"),
        (lambda model: (model / "model.safetensors").unlink(), "no weights there"),
        (lambda model: (model / "tokenizer.json").write_text("{}"), "the tokenizer cannot be loaded"),
        (raw(lambda b: b[: len(b) // 2]), UNSOUND),
        (raw(lambda b: b[:5]), UNSOUND),
        (raw(lambda b: b""), UNSOUND),
        # The length field claims a safetensors header of 2^64 - 1 bytes.
        (raw(lambda b: b"\xff" * 8 + b[8:]), UNSOUND),
        (raw(lambda b: b + b"more"), UNSOUND),
        # The data of one tensor in the safetensors file overlaps that of the next tensor.
        (header(lambda f: offsets(f, lambda a, b: [a, b + 4])), UNSOUND),
        (header(lambda f: offsets(f, lambda a, b: [b, a])), UNSOUND),
        (header(lambda f: offsets(f, lambda a, b: [a, 1 << 60])), UNSOUND),
        (header(lambda f: f["model.norm.weight"].update(shape=[1 << 40, 1 << 40])), UNSOUND),
        (header(lambda f: f["model.norm.weight"].update(dtype="F99")), UNSOUND),
        (
            header(lambda f: f.update(extra=f.pop("model.norm.weight"))),
            "missing, the first is model.norm.weight",
        ),
        (config(hidden_size=128), "in the weights, but config.json asks for"),
        (
            config(vocab_size=301),
            "model.embed_tokens.weight has shape [300, 64] in the weights, but config.json asks for [301, 64]",
        ),
        (
            index('{"weight_map": {"a": "../x.safetensors"}}'),
            "names the weight file '../x.safetensors', which is not in the directory",
        ),
        (index("[]"), "not a valid index of sharded weights"),
    ],
    ids=lambda value: "",
)
def test_bad_model(
    run_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
    message: str,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(run_folder / "model", model)
    damage(model)
    data = write(text(20).encode())(tmp_path)
    assert message in refuse(
        capsys, "finetune", "--model", model, "--data", data, "--out", tmp_path / "run", *TUNE, "--baseline"
    )
    assert not (tmp_path / "run").exists()


def test_rows_longer_than_the_positions(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(text(20).encode())(tmp_path)
    model = run_folder / "model"
    line = refuse(
        capsys,
        "finetune",
        "--model",
        model,
        "--data",
        data,
        "--out",
        tmp_path / "run",
        *TUNE,
        "--seq-len",
        "2049",
    )
    assert (
        f"--seq-len 2049: expected at most 2048, the positions of {model}; give fewer, or raise max_pos"
        in line
    )
    assert not (tmp_path / "run").exists()
    for fields, most in (
        ({"n_positions": 64}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"factor": 4.0}}, 256),
        ({"text_config": {"max_position_embeddings": 32}}, 32),
        ({"state_size": 8}, None),
    ):
        positions = positions_of(fields)
        assert (positions and positions.number) == most


@pytest.mark.parametrize("model", ["no/such/dir", "/none", "a b"])
def test_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str) -> None:
    data = write(b"text")(tmp_path)
    line = refuse(
        capsys, "finetune", "--model", model, "--data", data, "--out", tmp_path / "run", *TUNE, "--baseline"
    )
    assert f"--model {model}: no such directory" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr", "-1"], "--lr: expected a positive number, got -1.0"),
        (["--lr", "nan"], "--lr: expected a positive number, got nan"),
        (["--steps", "0"], "--steps: expected at least 1, got 0"),
        (
            ["--schedule", "step"],
            "--schedule: expected constant | linear | cosine | wsd | flat-cos | inverse-sqrt, got step",
        ),
        (["--precision", "fp8"], "--precision: expected auto | fp32 | tf32 | bf16 | fp16, got fp8"),
        (["--preset", "huge"], "--preset: expected tiny | mini"),
        (["--vocab-size", "10"], "--vocab-size: expected at least 257"),
        (["--optimizer-state", "2bit"], "--optimizer-state: expected 8bit | 4bit | bf16 | fp32, got 2bit"),
        (["--val-fraction", "1"], "--val-fraction: expected 0 to less than 1, got 1.0"),
        (["--threads", "0"], "--threads: expected at least 1, got 0"),
        (["--memory-budget", "much"], "--memory-budget: expected a number of bytes, or a string such as"),
        (["--memory-budget", "1GiB"], "--memory-budget 1GiB: expected no --baseline"),
        (["--offload", "disk"], "--offload: expected none | cpu | stream | nvme:DIR, got disk"),
        (["--offload", "cpu"], "--offload cpu: expected no --baseline, received both; leave one of them out"),
        (["--checkpoint-every", "0"], "--checkpoint-every: expected at least 1, got 0"),
        (["--tokenizer", "nowhere"], "nowhere: no tokenizer there"),
        (["--no-such-option"], "No such option: --no-such-option"),
        (["--steps", "many"], "--steps: expected an integer, got many"),
        (["--lr", "abc"], "--lr: expected a number, got abc"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    data = write(text(50).encode())(tmp_path)
    assert message in refuse(
        capsys, "train", "--data", data, "--out", tmp_path / "run", *TINY, "--baseline", *options
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options",
    [["--rank", "4"], ["--quantize", "nf4"], ["--alpha", "8"], ["--target-modules", "q_proj"], ["--merge"]],
    ids=lambda options: str(options[0]),
)
def test_full_takes_no_option_of_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    data = write(text(50).encode())(tmp_path)
    line = refuse(
        capsys, "finetune", "--model", tmp_path, "--data", data, "--out", tmp_path / "run", "--full", *options
    )
    assert f"--full: expected no {options[0]}, received both; leave one of them out" in line
    assert not (tmp_path / "run").exists()


def test_no_such_folder_for_the_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, place = write(text(50).encode())(tmp_path), f"nvme:{tmp_path}/none"
    line = refuse(capsys, "train", "--data", data, "--out", tmp_path / "run", *TINY, "--offload", place)
    assert (
        f"--offload {place}: AdamW: offload: {tmp_path}/none/shoestring-swap-" in line
        and "No such file" in line
    )
    assert not (tmp_path / "run").exists()


def test_folder_in_use(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(b"text")(tmp_path)
    assert "the directory is not empty" in refuse(capsys, "train", "--data", data, "--out", tmp_path, *TINY)
    assert "no run.json in it" in refuse(
        capsys, "train", "--data", data, "--out", tmp_path, *TINY, "--resume"
    )
    assert "exists and is not a directory" in refuse(capsys, "train", "--data", data, "--out", data, *TINY)
    line = refuse(
        capsys,
        "finetune",
        "--model",
        run_folder / "model",
        "--data",
        data,
        "--out",
        run_folder,
        *TUNE,
        "--resume",
        "--baseline",
    )
    assert "a run of `shoestring train`, not of `shoestring finetune`" in line


def test_empty_folder_stays_and_stays_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(b"too short")(tmp_path)
    (tmp_path / "run").mkdir()
    refuse(capsys, "train", "--data", data, "--out", tmp_path / "run", *TINY, "--baseline")
    assert list((tmp_path / "run").iterdir()) == []


def test_bad_adapter(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", run_folder / "model", "--adapter", tmp_path, "hello"]
    assert "no adapter_config.json there" in refuse(capsys, *arguments)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\0" * 20)
    assert "not a valid safetensors file" in refuse(capsys, *arguments)


def test_compare_needs_finished_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not a finished run (no run.json in it)" in refuse(capsys, "compare", tmp_path, "--out", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 4 MiB, enough for a tokenizer and at most two checkpoints of the tiny model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True
        ).returncode
    ):
        pytest.skip("a small file system cannot be mounted here; the next test simulates one")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_full_disk(small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(text(50).encode())(tmp_path)
    out = small_disk / "run"
    steps = ["--steps", "6", "--checkpoint-every", "1", "--baseline"]
    line = refuse(capsys, "train", "--data", data, "--out", out, *TINY, *steps)
    assert "No space left on device" in line
    assert not list(out.rglob("*.partial")) and list((out / "checkpoints").iterdir())


@pytest.mark.parametrize("how", ["system", "library"])
def test_full_disk_while_a_checkpoint_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    import errno

    import torch

    saved = torch.save

    def full(value: object, target: IO[bytes]) -> None:
        if "step-00000002" not in str(target.name):
            return saved(value, target)
        if how == "system":
            raise OSError(errno.ENOSPC, "No space left on device", target.name)
        raise RuntimeError("write failed: No space left on device (os error 28)")

    monkeypatch.setattr(torch, "save", full)
    data = write(text(50).encode())(tmp_path)
    steps = ["--steps", "3", "--checkpoint-every", "1", "--baseline"]
    assert "No space left on device" in refuse(
        capsys, "train", "--data", data, "--out", tmp_path / "run", *TINY, *steps
    )
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def test_no_traceback_from_the_command_line(tmp_path: Path) -> None:
    arguments = [
        sys.executable,
        "-m",
        "shoestring.cli",
        "train",
        "--data",
        "none",
        "--out",
        str(tmp_path / "run"),
    ]
    result = subprocess.run(arguments, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "shoestring: error: --data none: no such file or directory\n"


def test_other_errors_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shoestring.cli.train as module

    def broken(_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(module, "check_text", broken)
    data = write(b"text")(tmp_path)
    with pytest.raises(ZeroDivisionError):
        run("train", "--data", data, "--out", tmp_path / "run", *TINY)
