"""Test `shoestring tokenize`, `compare`, `generate` and `demo`, and running commands in turns."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli_helpers import TINY, refuse, run, succeed, text, write_jsonl
from shoestring.cli import console, demo_data, turns
from shoestring.cli.app import spread
from shoestring.core.errors import InputError
from shoestring.data import progress
from shoestring.data.token_file import read_token_file
from shoestring.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(text())
    for name, state in (("plain", "1"), ("again", "2")):
        arguments = [
            "--data",
            folder / "text.txt",
            "--out",
            folder / name,
            *TINY,
            "--steps",
            "4",
            "--baseline",
            "--seed",
            state,
        ]
        succeed("train", *arguments)
    return [folder / "plain", folder / "again"]


def test_tokenize_trains_and_reuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(text(30))
    file = write_jsonl(tmp_path / "b.jsonl", [{"text": "first"}, {"text": "second"}])
    succeed("tokenize", "--data", tmp_path / "a.txt", file, "--vocab-size", 280, "--out", tmp_path / "t.bin")
    assert capsys.readouterr().out.endswith(f" tokens in {tmp_path / 't.bin'}\n")
    tokenizer = load_tokenizer(tmp_path / "t-tokenizer")
    tokens, vocab = read_token_file(tmp_path / "t.bin")
    assert vocab == len(tokenizer) == 280 and tokens.max() < 280
    assert tokenizer.decode(tokens).split(tokenizer.eos_token) == [text(30), "first", "second", ""]
    again = [
        "tokenize",
        "--data",
        tmp_path / "a.txt",
        "--data",
        file,
        "--tokenizer",
        tmp_path / "t-tokenizer",
    ]
    succeed(*again, "--out", tmp_path / "u.bin")
    assert (tmp_path / "u.bin").read_bytes() == (tmp_path / "t.bin").read_bytes()
    assert "t.bin exists" in refuse(capsys, *again, "--out", tmp_path / "t.bin")
    assert "either --tokenizer DIR" in refuse(
        capsys, *again, "--vocab-size", 280, "--out", tmp_path / "v.bin"
    )


def test_tokenize_makes_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(text(30))
    out = tmp_path / "new" / "deep" / "t.bin"
    refuse(capsys, "tokenize", "--data", tmp_path / "none.txt", "--vocab-size", 280, "--out", out)
    assert not (tmp_path / "new").exists()
    succeed("tokenize", "--data", tmp_path / "a.txt", "--vocab-size", 280, "--out", out)
    assert sorted(path.name for path in out.parent.iterdir()) == ["t-tokenizer", "t.bin"]
    write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "a", "completion": "b"}])
    line = refuse(
        capsys, "tokenize", "--data", tmp_path / "pairs.jsonl", "--vocab-size", 280, "--out", out.parent / "b"
    )
    assert "`shoestring finetune` trains on prompt/completion records" in line
    in_file = tmp_path / "a.txt" / "t.bin"
    assert "--out" in refuse(
        capsys, "tokenize", "--data", tmp_path / "a.txt", "--vocab-size", 280, "--out", in_file
    )


def test_compare_divides_by_the_first(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    succeed("compare", *runs, "--out", tmp_path)
    lines = capsys.readouterr().out.splitlines()
    first, second = (json.loads((folder / "summary.json").read_text()) for folder in runs)
    assert lines[2].split()[0] == "plain" and lines[2].split()[-3:] == ["1.000"] * 3
    assert float(lines[3].split()[-3]) == pytest.approx(second["val_loss"] / first["val_loss"], abs=1e-3)
    assert float(lines[3].split()[-1]) == pytest.approx(
        second["tokens_per_second"] / first["tokens_per_second"], abs=1e-3
    )
    assert (tmp_path / "compare.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "compare.html").read_text().count("<svg ") == 3


def test_compare_tells_equal_names_apart(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("a/x/run", "b/x/run", "own")]
    for folder in folders:
        shutil.copytree(runs[0], folder)
    succeed("compare", *folders, folders[0], "--out", tmp_path)
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[2:6]]
    assert names == ["a/x/run", "b/x/run", "own", "a/x/run (2)"]
    monkeypatch.chdir(folders[2])
    succeed("compare", ".", "--out", tmp_path)
    assert capsys.readouterr().out.splitlines()[2].startswith("own ")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("summary.json", "{}", "is damaged (train_loss"),
        ("summary.json", "[1]", "is damaged (train_loss"),
        ("summary.json", "[" * 100_000, "not a finished run (summary.json: not valid JSON ("),
        ("run.json", "{}", "is damaged (command, fingerprint)"),
        ("metrics.jsonl", "", "is damaged (no steps)"),
        ("metrics.jsonl", "5\n", "is damaged (no steps)"),
        ("metrics.jsonl", '{"step": 1, "loss": "x"}\n', "is damaged (no steps)"),
    ],
)
def test_compare_refuses_damaged_runs(
    runs: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    content: str,
    message: str,
) -> None:
    shutil.copytree(runs[0], tmp_path / "run")
    (tmp_path / "run" / file).write_text(content)
    assert message in refuse(capsys, "compare", tmp_path / "run", "--out", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_generate_continues(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in (1, 1, 2):
        capsys.readouterr()
        succeed("generate", "--model", runs[0] / "model", "--max-new-tokens", 20, "--seed", seed, "the cat")
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    assert "--temperature: expected 0 or more" in refuse(
        capsys, "generate", "--model", runs[0] / "model", "--temperature=-1", "x"
    )
    succeed("generate", "--model", runs[0] / "model", "--max-new-tokens", 2, "")


def test_generate_stays_within_the_positions(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    line = refuse(capsys, "generate", "--model", runs[0] / "model", "--max-new-tokens", 2048, "the cat")
    assert re.search(
        r"--max-new-tokens 2048: expected at most \d+ after a prompt of \d+ tokens, since .* 2048 pos", line
    )


def test_report_escapes_what_it_shows(runs: list[Path], tmp_path: Path) -> None:
    import shutil

    from shoestring.training.report.write import write_report

    shutil.copytree(runs[0], tmp_path / "<script>")
    write_report(tmp_path / "<script>")
    page = (tmp_path / "<script>" / "report.html").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page


def test_demo_text(tmp_path: Path) -> None:
    assert demo_data.standard_library(tmp_path / "a.jsonl") > 5_000_000
    assert demo_data.package_documentation(tmp_path / "b.jsonl") > 100_000
    first = (tmp_path / "b.jsonl").read_bytes()
    demo_data.package_documentation(tmp_path / "b.jsonl")
    assert (tmp_path / "b.jsonl").read_bytes() == first
    assert all(json.loads(line)["text"] for line in first.splitlines())


def fake(monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str]) -> dict[str, list[str]]:
    """Make run_in_turns run small Python scripts in its subprocesses instead of the shoestring command."""
    start = subprocess.Popen
    monkeypatch.setattr(
        turns.subprocess,
        "Popen",
        lambda arguments, **more: start([sys.executable, "-c", arguments[-1]], **more),
    )
    return {name: [script] for name, script in scripts.items()}


BUSY = """
import time
ran = 0.0
while ran < 0.5:
    now = time.perf_counter()
    while time.perf_counter() - now < 0.005: pass
    ran += 0.005
    print("%.4f %.4f" % (now, time.perf_counter()), flush=True)
"""


def test_only_one_runs_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(turns, "TURN", 0.2)
    turns.run_in_turns(fake(monkeypatch, {"one": BUSY, "two": BUSY}), tmp_path)
    owners = []
    for line in capsys.readouterr().out.splitlines():
        owner, _, times = line.partition(" | ")
        owners.append((float(times.split()[0]), owner))
    changes = sum(a[1] != b[1] for a, b in zip(sorted(owners), sorted(owners)[1:]))
    # Lines are sorted by the time at which they were written. Two processes that do not take turns would
    # alternate 100 times or more in 200 lines.
    assert {owner for _, owner in owners} == {
        "one",
        "two",
    } and 1 <= changes <= 60


def test_lines_do_not_show_the_speed_of_a_paused_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(turns, "TURN", 0.3)
    steps = """
import time
for step in range(20):
    began = time.monotonic()
    while time.monotonic() - began < 0.1: pass
    seconds = time.monotonic() - began
    print("%s  %.0f tok/s" % ("slow" if seconds > 0.25 else "quick", 1000 / seconds), flush=True)
"""
    turns.run_in_turns(fake(monkeypatch, {"one": steps, "two": steps}), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 40 and any("slow" in line for line in lines)
    assert all(("(paused)" in line) for line in lines if "slow" in line), lines
    assert sum("tok/s" in line for line in lines) >= 10, lines


def test_what_is_left_is_said_after_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(turns, "TURN", 0.5)
    script = """
import time
for step in range(1, 21):
    time.sleep(0.1)
    print(f"step {step:>2}/20  loss", flush=True)
"""
    began = time.monotonic()
    turns.run_in_turns(
        fake(monkeypatch, {"one": script, "two": script}),
        tmp_path,
        lambda seconds: 600 + sum(seconds.values()),
    )
    took = time.monotonic() - began
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" left")]
    minutes, seconds = zip(*(map(int, line.split()[1].split(":")) for line in lines), strict=True)
    times = [60 * m + s - 600 for m, s in zip(minutes, seconds, strict=True)]
    assert len(times) >= 3 and times == sorted(times, reverse=True), lines
    # A line says what these runs still need, and adds what all of them take.
    assert times[-1] < times[0] and all(took - 1 <= t <= 2 * took + 1 for t in times), (times, took)


def test_a_failing_run_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN", 0.2)
    scripts = {
        "bad": "import sys; sys.exit('no good')",
        "slow": f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)",
    }
    began = time.monotonic()
    with pytest.raises(InputError, match="the run bad ended with exit code 1: no good"):
        turns.run_in_turns(fake(monkeypatch, scripts), tmp_path)
    assert time.monotonic() - began < 20
    if (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text():
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGCONT)


def test_demo_leaves_other_folders_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert "not the directory of a demo" in refuse(capsys, "demo", "--out", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_data_takes_several_files() -> None:
    assert spread(["train", "--data", "a", "b", "--baseline", "--out", "o", "--data", "c"]) == [
        "train", "--data", "a", "--data", "b", "--baseline", "--out", "o", "--data", "c",
    ]  # fmt: skip
    assert spread(["compare", "a", "b", "--out", "c"]) == ["compare", "a", "b", "--out", "c"]


def test_figures_for_people() -> None:
    assert (console.gigabytes(1.234e9), console.gigabytes(56.7e6)) == ("1.23 GB", "57 MB")
    assert (console.clock(59.9), console.clock(3661)) == ("0:59", "1:01:01")


def test_lines_without_a_terminal_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    with console.Console(1000) as shown:
        for step in range(1, 1001):
            shown.step(
                {"step": step, "loss": 1.0, "lr": 0.1, "seconds": 2.0, "tokens_per_second": 5.0, "peak": 1e9},
            )
    lines = capsys.readouterr().out.splitlines()
    assert 20 <= len(lines) <= 22
    assert lines[1] == "step   50/1000  loss 1.000  lr 1.0e-01  5 tok/s  peak 1.00 GB  31:40 left"


def test_time_left_is_that_of_the_last_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with console.Console(20) as shown:
        # Steps 1 and 15 take 500 s, steps before 8 take 10 s, and later steps 2 s. The time left must be
        # predicted from the last steps.
        for step in range(1, 21):
            seconds = 500.0 if step in (1, 15) else 10.0 if step < 8 else 2.0
            shown.step(
                {
                    "step": step,
                    "loss": 1.0,
                    "lr": 0.1,
                    "seconds": seconds,
                    "tokens_per_second": 5.0,
                    "peak": 1e9,
                },
            )
    lines = capsys.readouterr().out.splitlines()
    assert "left" not in lines[0] and lines[1].endswith("3:00 left")
    assert [line.rsplit("  ", 1)[1] for line in lines[17:]] == ["0:04 left", "0:02 left", "0:00 left"]


def test_a_line_has_the_validation_loss_of_its_step_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """The time left has the validations that are to come: after step 4, those of steps 6, 9 and 10."""
    with console.Console(10, eval_every=3) as shown:
        for step in range(1, 11):
            row = {
                "step": step,
                "loss": 1.0,
                "lr": 0.1,
                "seconds": 2.0,
                "tokens_per_second": 5.0,
                "peak": 1e9,
            }
            shown.step(row | ({"val_loss": step / 2, "val_seconds": 100.0} if step % 3 == 0 else {}))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  val ")[1].split()[0] for line in lines if " val " in line] == [
        "1.500",
        "3.000",
        "4.500",
    ]
    left = [line.rsplit("  ", 1)[1] for line in lines[1:]]
    assert (
        left[0] == "0:16 left"
        and left[1] == "5:14 left"
        and left[2] == "5:12 left"
        and left[8] == "0:00 left"
    )
    assert left[7] == "1:42 left"


def test_names_cannot_act_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines, tables, progress lines and errors escape what is hidden in names, and the bar reads no markup."""
    name = "a\x1b[31m\u202e[/b]"
    escaped = "a\\x1b[31m\\u202e[/b]"
    console.say(f"left out {name}")
    console.print_table([[name], ["b"]])
    work = progress.Work(name, 0, time.monotonic())
    assert work.line().startswith(f"{escaped}: ")
    assert capsys.readouterr().out.splitlines()[:2] == [f"left out {escaped}", escaped]
    assert f"{escaped}: no such file" in refuse(
        capsys, "train", "--data", tmp_path / name, "--out", tmp_path / "out"
    )
    assert escaped in refuse(capsys, "compare", tmp_path / name) and escaped in refuse(capsys, f"--{name}")
    assert escaped in refuse(capsys, "tokenize", "--vocab-size", name)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with console.Console(1) as shown:
        shown.note(f"left out {name}")
    assert escaped in capsys.readouterr().out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("train", "finetune", "generate", "compare", "tokenize", "demo"))
