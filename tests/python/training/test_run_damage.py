"""Test that damaged run folders and unusable paths give exit code 2 and one line of help on stderr."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli_helpers import TINY, assert_same_weights, losses, refuse, run, succeed, text
from file_limit import file_limit
from shoestring.files.atomic import disk_error
from shoestring.training.run.checkpoint import CHECKSUMS, checkpoints

pytestmark = pytest.mark.usefixtures("blank_images")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "text.txt"
    file.write_text(text())
    return file


def train(data: Path, out: Path, *more: object) -> list[object]:
    return ["train", "--data", data, "--out", out, *TINY, "--steps", "6", "--checkpoint-every", "2", *more]


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    succeed(*train(data, out))
    return out


@pytest.fixture
def finished(whole: Path, tmp_path: Path) -> Path:
    """Return a copy of a finished run without its final model, so that a resumed run must write it again."""
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.pt", "state.json", CHECKSUMS])
def test_a_flipped_bit_is_named(
    data: Path, whole: Path, finished: Path, capsys: pytest.CaptureFixture[str], seed: int, name: str
) -> None:
    newest = checkpoints(finished)[-1]
    raw, rng = (newest / name).read_bytes(), random.Random(seed)
    for _ in range(3):
        damaged = bytearray(raw)
        damaged[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        (newest / name).write_bytes(damaged)
        line = refuse(capsys, *train(data, finished, "--resume"))
        assert (
            f"{newest}: the checkpoint is damaged (" in line and "; remove it to continue from step 4" in line
        )
        assert name in line or name == CHECKSUMS
    shutil.rmtree(newest)
    succeed(*train(data, finished, "--resume"))
    assert losses(finished) == losses(whole)
    assert_same_weights(finished / "model", whole / "model")


def test_the_only_checkpoint_is_damaged(
    data: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(checkpoints(finished)[0])
    (checkpoints(finished)[0] / "optimizer.pt").unlink()
    assert "remove it to begin again" in refuse(capsys, *train(data, finished, "--resume"))


def test_checkpoints_without_checksums_continue(data: Path, whole: Path, finished: Path) -> None:
    for checkpoint in checkpoints(finished):
        (checkpoint / CHECKSUMS).unlink()
    shutil.rmtree(checkpoints(finished)[-1])
    succeed(*train(data, finished, "--resume"))
    assert losses(finished) == losses(whole)
    assert_same_weights(finished / "model", whole / "model")


@pytest.mark.parametrize(
    "content",
    ["{}", "[]", "", "null", '{"step": "6"}', '{"step": 5}', '{"step": true}', '{"step": 6, "val_loss": "low"}',
     '{"step": 6, "best_val_loss": [1]}', "[" * 100_000, '{"step": ' + "9" * 5000 + "}"],
)  # fmt: skip
def test_a_damaged_state(
    data: Path, finished: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    newest = checkpoints(finished)[-1]
    (newest / "state.json").write_text(content)
    # Remove the checksums, which checkpoints of older versions do not have either.
    (newest / CHECKSUMS).unlink()
    line = refuse(capsys, *train(data, finished, "--resume"))
    assert f"{newest}: the checkpoint is damaged (" in line and "remove it to continue from step 4" in line


@pytest.mark.parametrize(
    "content",
    ["{}", "[]", "", "1", '{"command": 1, "fingerprint": {}, "threads": 1}', "[" * 100_000,
     '{"command": "train", "fingerprint": [], "threads": 1}', '{"command": "train", "fingerprint": {}, "threads": "1"}',
     '{"command": "train", "fingerprint": {}, "threads": 0}',
     '{"command": "train", "fingerprint": {}, "threads": 100000}'],
)  # fmt: skip
def test_a_damaged_record(
    data: Path, finished: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (finished / "run.json").write_text(content)
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    assert "run.json: not the record of a run (" in refuse(capsys, *train(data, finished, "--resume"))
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    if "threads" not in content:
        refuse(capsys, "compare", finished, "--out", finished)


def test_metrics_without_a_row(data: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (finished / "metrics.jsonl").write_text("")
    line = refuse(capsys, *train(data, finished, "--resume"))
    assert "metrics.jsonl: holds no step; the model is saved, the report is not written" in line
    assert (finished / "model").is_dir()


@pytest.mark.parametrize("damage", ["[]", '{"step": "3"}', '{"step": 3}', "\x00" * 40, "[" * 100_000, ""])
@pytest.mark.sample(3)
def test_metrics_with_a_damaged_row(
    data: Path, whole: Path, finished: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    # Without the newest checkpoint, the resumed run trains steps 5 and 6 again.
    shutil.rmtree(checkpoints(finished)[-1])
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    lines[2] = damage
    (finished / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    succeed(*train(data, finished, "--resume"))
    assert "metrics.jsonl is damaged: 1 of the 4 steps so far are not in it" in capsys.readouterr().out
    expected = losses(whole)
    assert losses(finished) == expected[:2] + expected[3:]
    assert_same_weights(finished / "model", whole / "model")
    assert json.loads((finished / "summary.json").read_text())["steps"] == 6


@pytest.mark.parametrize(
    "change",
    [{"train_loss": "low"}, {"memory": [1]}, {"memory": [{"name": "weights"}]}, {"memory": {}}, {"val_loss": "x"},
     {"peak_memory": None}, {"baseline": None}],
    ids=str,
)  # fmt: skip
def test_a_damaged_summary(
    finished: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object]
) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    (finished / "summary.json").write_text(json.dumps({**summary, **change}))
    assert f"{finished}: run.json, summary.json or metrics.jsonl is damaged (" in refuse(
        capsys, "compare", finished, "--out", finished
    )


@pytest.mark.parametrize("content", ["[]", "3", "", "{", "[" * 100_000])
def test_a_summary_that_is_no_object(
    finished: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (finished / "summary.json").write_text(content)
    refuse(capsys, "compare", finished, "--out", finished)


@pytest.fixture(params=["below a file", "proc", "sys", "long name", "read-only"])
def no_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield the path of a run folder that cannot be created, for example below a file."""
    (tmp_path / "file").write_text("")
    places = {
        "below a file": tmp_path / "file" / "sub" / "run",
        "proc": Path("/proc/run"),
        "sys": Path("/sys/kernel/run"),
        "long name": tmp_path / ("x" * 300),
    }
    if request.param in places:
        yield places[request.param]
        return
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a read-only file system cannot be mounted here")
    yield folder / "run"
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_place_without_a_folder(data: Path, capsys: pytest.CaptureFixture[str], no_place: Path) -> None:
    for more in ([], ["--resume"]):
        assert f"--out {no_place}: " in refuse(capsys, *train(data, no_place, *more))
    for command in ("demo", "tokenize"):
        more = ["--data", data, "--vocab-size", 300] if command == "tokenize" else []
        assert str(no_place) in refuse(capsys, command, *more, "--out", no_place)


@pytest.mark.parametrize(
    ("size", "named"),
    [
        (300, "run.json"),
        (2000, "tokenizer"),
        (200_000, "checkpoints/step-00000002/weights.safetensors"),
    ],
)
def test_a_limit_on_files_is_a_disk_error(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int, named: str
) -> None:
    with file_limit(size):
        line = refuse(capsys, *train(data, tmp_path / "run"))
    assert f"{tmp_path}/run/{named}: File too large; what was complete before is kept" in line
    assert not list((tmp_path / "run").rglob("*.partial"))


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO"])
@pytest.mark.parametrize(
    "wrap", [lambda error: error, lambda error: RuntimeError(f"write failed: {error.strerror}")]
)
def test_disk_errors(name: str, wrap: Callable[[OSError], Exception]) -> None:
    import errno

    code = getattr(errno, name)
    found = disk_error(wrap(OSError(code, os.strerror(code))))
    assert found is not None and found.errno == code


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_too_little_room_for_the_state(
    data: Path, small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refuse(capsys, *train(data, tmp_path / "run", "--offload", f"nvme:{small_disk}"))
    assert f"--offload nvme:{small_disk}: " in line
    assert not (tmp_path / "run").exists() and list(small_disk.iterdir()) == []


def test_the_last_checkpoint_is_promised_only_where_it_is(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hot = ["--lr", "1e30", "--warmup", "0", "--clip", "0", "--baseline"]
    for every, kept in ((1, True), (6, False)):
        out = tmp_path / f"run{every}"
        line = refuse(capsys, *train(data, out, *hot, "--checkpoint-every", every))
        assert ("the last checkpoint in" in line) is kept is bool(checkpoints(out))


def test_folders_of_other_names_are_no_checkpoints(data: Path, whole: Path, finished: Path) -> None:
    newest = checkpoints(finished)[-1]
    shutil.copytree(newest, newest.with_name(newest.name + ".bak"))
    (newest.with_name("step-notes.txt")).write_text("")
    assert run(*train(data, finished, "--resume")) == 0
    assert_same_weights(finished / "model", whole / "model")
