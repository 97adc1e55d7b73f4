"""Test gpu_check.py without a GPU: its steps run fake commands and read fake reports."""

import contextlib
import copy
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import emulator_cases

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]
import gpu_check  # noqa: E402
from steps import Failed, Runner, Skipped, Step  # noqa: E402

from benchmarks import common  # noqa: E402

GPU = {
    "gpu": "NVIDIA X1",
    "torch": "2.11.0",
    "torch_cuda": "13.0",
    "capability": "9.0",
    "driver": "1",
    "cores": 2,
    "ram_bytes": 8 << 30,
    "memory_bytes": 1 << 30,
    "memory_free_bytes": 1 << 30,
    "packages": {"pytest": "9", "expecttest": "1"},
}


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path / "logs", budget=60)


@pytest.fixture
def check(runner: Runner, tmp_path: Path) -> gpu_check.Check:
    return gpu_check.Check(runner, tmp_path / "build", copy.deepcopy(GPU))


def test_a_step_that_fails_or_hangs_does_not_stop_the_next(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    def sh(script: str) -> str:
        return runner.command(["sh", "-c", script]).strip()

    def skip() -> str:
        raise Skipped("not here")

    start = time.monotonic()
    runner.run(
        [
            Step("fine", lambda: sh("echo a note"), 5),
            Step("wrong", lambda: sh("echo why; exit 3"), 5),
            Step("hangs", lambda: sh("echo so far; sleep 30 & sleep 30"), 0.3),
            Step("missing", lambda: runner.command(["/no/such/program"]), 5),
            Step("crashes", lambda: sh("kill -9 $$"), 5),
            Step("a bug", lambda: {}["key"], 5),
            Step("not here", skip, 5),
            Step("after wrong", lambda: "never", 5, needs="wrong"),
            Step("after fine", lambda: "well", 5, needs="fine"),
        ]
    )
    # The time limit kills both sleep processes of the step "hangs", also the one in the background.
    assert time.monotonic() - start < 10
    assert [(r.name, r.status, r.note) for r in runner.results] == [
        ("fine", "passed", "a note"),
        ("wrong", "failed", "sh ended with status 3: why"),
        ("hangs", "failed", "sh was stopped at its time limit; its last line: so far"),
        ("missing", "failed", "program could not be started: No such file or directory"),
        ("crashes", "failed", "sh ended with status -9: it printed nothing"),
        ("a bug", "failed", "KeyError: 'key'"),
        ("not here", "skipped", "not here"),
        ("after wrong", "skipped", "needs the step wrong"),
        ("after fine", "passed", "well"),
    ]
    assert runner.failed
    assert runner.table().splitlines()[-1].startswith("2 passed, 5 failed, 2 skipped, ")
    # the output includes the end of the log of the failed step "hangs"
    assert "\nso far\n" in capsys.readouterr().out


def test_what_no_time_is_left_for_is_skipped(tmp_path: Path) -> None:
    runner = Runner(tmp_path, budget=1)
    runner.run([Step("late", lambda: "never", 5)])
    assert (runner.results[0].status, runner.failed) == ("skipped", False)
    assert "--budget-minutes" in runner.results[0].note


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts/gpu_check.py", "--build", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("gpu-check: no GPU here: PyTorch ") and done.stderr.count("\n") == 1


def write_journal(path: Path, *cases: dict[str, str]) -> None:
    with path.open("a") as file:
        for case in cases:
            file.write(json.dumps(case | {"test": f"test_x.py::{case['test']}"}) + "\n")


def test_counts_come_from_the_journal(check: gpu_check.Check, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        {"test": "a", "outcome": "passed"},
        {"test": "b", "outcome": "failed", "message": "x > y\nmore"},
        {"test": "c", "outcome": "skipped", "message": "no bnb"},
    ]

    def pytest_run(arguments: list, env: dict, ok: tuple[int, ...]) -> str:
        write_journal(Path(arguments[-1].split("=")[1]), *cases)
        return ""

    monkeypatch.setattr(check.runner, "command", pytest_run)
    with pytest.raises(Failed, match="^1 passed, 1 failed, 1 skipped; b: x > y$"):
        check.suite(Path("test_x.py"))
    assert check.data["suite"]["test_x"] == {
        "passed": 1,
        "failed": 1,
        "skipped": [{"test": "c", "message": "no bnb"}],
        "failures": [{"test": "b", "message": "x > y"}],
    }
    cases = cases[:1]
    assert check.suite(Path("test_x.py")) == "1 passed, 0 failed, 0 skipped"
    check.gpu["packages"].pop("expecttest")
    assert check.suite(Path("test_x.py")).endswith("; opcheck left out: expecttest is not installed")
    cases = [{"test": "c", "outcome": "skipped", "message": "no bnb"}]
    with pytest.raises(Skipped, match="^no bnb$"):
        check.suite(Path("test_x.py"))
    check.gpu["packages"].pop("pytest")
    with pytest.raises(Skipped, match="has no pytest"):
        check.suite(Path("test_x.py"))


def test_a_test_that_ends_pytest_loses_no_other(
    check: gpu_check.Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pytest crashes in b. The second ends after c, which failed and broke the context."""
    runs = [
        ([{"test": "a", "outcome": "passed"}, {"test": "b"}], Failed("status -11")),
        ([{"test": "c", "outcome": "failed", "message": "no"}], Failed("status 3")),
        ([{"test": "d", "outcome": "passed"}], None),
    ]

    def pytest_run(arguments: list, env: dict, ok: tuple[int, ...]) -> str:
        cases, error = runs.pop(0)
        write_journal(Path(arguments[-1].split("=")[1]), *cases)
        if error:
            raise error
        return ""

    monkeypatch.setattr(check.runner, "command", pytest_run)
    with pytest.raises(Failed, match="^2 passed, 2 failed, 0 skipped; b: it ended the process, or took"):
        check.suite(Path("test_x.py"))
    assert runs == []
    # If pytest can never start, there is no journal, and the step says why.
    runs[:] = [([], Failed("status 4"))]
    with pytest.raises(Failed, match="^status 4$"):
        check.suite(Path("test_x.py"))


def test_the_journal_survives_a_crash_and_a_hang(tmp_path: Path) -> None:
    """pytest writes each test's result at once, and a further pytest runs only the tests that are left."""
    file, journal = tmp_path / "test_y.py", tmp_path / "journal"
    file.write_text(
        "import os, time\nimport pytest\n\ndef test_a():\n    pass\n\ndef test_crash():\n    os.abort()\n\n"
        "def test_hang():\n    time.sleep(60)\n\ndef test_d():\n    assert 1 == 2\n"
    )
    (tmp_path / "conftest.py").write_text((ROOT / "tests/python/conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, f"--journal={journal}"]
    command += ["--seconds-per-test=1", f"--rootdir={tmp_path}"]
    path = os.pathsep.join([str(ROOT / "tests/python"), os.environ["PYTHONPATH"]])
    codes = [
        subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONPATH": path}).returncode
        for _ in range(4)
    ]
    assert codes == [-signal.SIGABRT, 1, 1, 5]
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    ended = {line["test"].partition("::")[2]: line["outcome"] for line in lines if "outcome" in line}
    assert ended == {"test_a": "passed", "test_d": "failed"}
    assert len({line["test"] for line in lines}) == 4


def test_a_step_sees_the_result_of_the_one_before(tmp_path: Path) -> None:
    for turn in range(50):
        runner = Runner(tmp_path / str(turn), budget=60)
        runner.run([Step("first", str, 30), Step("second", str, 30, needs="first")])
        assert [r.status for r in runner.results] == ["passed", "passed"]


def test_a_captured_function_stays_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph uses the memory of the captured function's tensors, so they may not be freed before it."""
    graph = type("Graph", (), {"replay": lambda self: None})
    stream = type("Stream", (), {"wait_stream": lambda self, other: None})
    for name, value in [
        ("Stream", stream),
        ("current_stream", stream),
        ("stream", contextlib.nullcontext),
        ("CUDAGraph", graph),
        ("graph", contextlib.nullcontext),
    ]:
        monkeypatch.setattr(torch.cuda, name, value)
    x = torch.ones(3)
    alive = weakref.ref(x)
    replay = common.graphed(lambda x=x: x + 1)
    del x
    gc.collect()
    assert alive() is not None
    replay()
    del replay
    gc.collect()
    assert alive() is None


def test_steps_run_side_by_side(tmp_path: Path) -> None:
    runner = Runner(tmp_path, budget=60, workers=2)
    meet = threading.Barrier(2, timeout=30)

    def work() -> str:
        meet.wait()
        return runner.command(["sh", "-c", f"echo {threading.get_ident()}"]).strip()

    runner.run([Step("a", work, 30, together=True), Step("b", work, 30, together=True), Step("c", str, 30)])
    assert [r.status for r in runner.results] == ["passed"] * 3 and runner.results[2].name == "c"
    assert len({r.note for r in runner.results}) == 3


@pytest.mark.parametrize(
    ("said", "status", "outcome"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, "ERROR SUMMARY: 0 errors"),
        (
            "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
            0,
            "RACECHECK SUMMARY: 0 hazards",
        ),
        (
            "========= Error: Race reported between Write access at void a::key_gradients<int>(b)+0x1\n"
            "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
            86,
            "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings), all in key_gradients",
        ),
        (
            "========= Error: Race reported between Write access at void a::key_gradients<int>(b)+0x1\n"
            "========= Error: Race reported between Write access at void a::other<int>(b)+0x1\n"
            "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)",
            86,
            Failed,
        ),
        ("========= ERROR SUMMARY: 10 errors", 86, Failed),
        ("not ok adamw: RuntimeError: x\n========= ERROR SUMMARY: 0 errors", 0, Failed),
        ("========= Error: Device not supported", 1, Skipped),
        ("Segmentation fault", 139, Failed),
    ],
)
def test_sanitizer(
    check: gpu_check.Check,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    status: int,
    outcome: str | type,
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(f'#!/bin/sh\nfor last; do :; done\ntouch "$last"\necho "{said}"\nexit {status}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if isinstance(outcome, str):
        assert check.sanitizer("memcheck").startswith(outcome)
    else:
        with pytest.raises(outcome):
            check.sanitizer("memcheck")


def test_benchmarks_that_fail_keep_their_tables(check: gpu_check.Check, tmp_path: Path) -> None:
    file = tmp_path / "bench_x.py"
    table = {
        "title": "t",
        "unit": "GB/s",
        "rows": [
            {"name": "ours", "seconds": 1e-3, "rate": 5.0, "ratio": 1.0},
            {"name": "limit", "seconds": 9e-4, "rate": 6.0, "ratio": 0.9},
        ],
    }
    figures = json.dumps({"benchmark": "x", "tables": [table]})
    file.write_text(f"import sys, pathlib; pathlib.Path(sys.argv[-1]).write_text({figures!r}); sys.exit(1)")
    with pytest.raises(Failed, match="status 1"):
        check.benchmark(file)
    assert gpu_check.figures(check.data["benchmarks"]) == "t: 1.000 ms, 5.0 GB/s; limit 0.90\n"
    file.write_text(
        "import argparse; p = argparse.ArgumentParser(); p.add_argument('--device', choices=['cpu'])\n"
        "p.add_argument('--json'); p.parse_args()"
    )
    with pytest.raises(Skipped, match="CPU only"):
        check.benchmark(file)


def test_gpu_timing_is_a_call_s_share_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark's GPU timing is the time of many calls of a function, divided by the number of calls.

    The test replaces CUDA events by objects that read a clock, which only calls advance.
    """
    now = 0.0

    def take(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return (end.time - self.time) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    calls = []
    candidates = {"short": lambda: calls.append(take(1e-3)), "long": lambda: take(1e-2)}
    times = common.interleave(candidates, 3, "cuda")
    assert {name: len(seconds) for name, seconds in times.items()} == {"short": 3, "long": 3}
    # `calls` lists calls for warm-up and calibration, and more than one call in each of 3 rounds
    assert len(calls) > 3 + 3 + 3 * 2
    assert times["short"] == pytest.approx([1e-3] * 3)
    assert times["long"] == pytest.approx([1e-2] * 3)


def test_rotating_buffers_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "l2_bytes", lambda: 50 << 20)
    made, called = [], []

    def make() -> Callable[[], object]:
        made.append(len(made))
        return lambda index=made[-1]: called.append(index)

    run = common.rotate(make, size=40 << 20, device="cuda")
    # rotate() alternates between several sets of buffers. Its warm-up uses each set twice.
    assert called == [*made, *made]
    called.clear()
    for _ in range(len(made) + 1):
        run()
    assert len(made) * 40 >= 4 * 50 and called == [*made, 0]
    for device, size in (("cpu", 40 << 20), ("cuda", 200 << 20)):
        made.clear()
        common.rotate(make, size=size, device=device)
        assert len(made) == 1


def test_prebuilt_libraries_are_taken(
    check: gpu_check.Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "elsewhere/lib"
    folder.mkdir(parents=True)
    monkeypatch.setenv("SHOESTRING_PREBUILT", str(folder.parent))
    with pytest.raises(Failed, match="expected libshoestring.so somewhere in it"):
        check.build()
    for name in (*gpu_check.LIBRARIES, gpu_check.EMULATOR):
        (folder / name).write_text('{"cuda": null}')
    with pytest.raises(Failed, match="expected a build with CUDA"):
        check.build()
    (folder / "build.json").write_text('{"cuda": "13.0"}')
    assert check.build() == "prebuilt libraries"
    assert (check.package / "lib/libshoestring_cuda.so").exists() and (check.package / "_load.py").exists()
    assert (check.build_folder / "tests/simt" / gpu_check.EMULATOR).exists()


def test_results_are_compared_in_units_in_the_last_place(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    emulator_cases.run("cpu", one)
    emulator_cases.run("cpu", two)
    rows = emulator_cases.compare(one, two)
    assert len(rows) > 100 and all(row["ok"] and row["error"] == 0 for row in rows)
    x = torch.tensor([1.0, 0.5])
    assert emulator_cases.distance(x, torch.tensor([1.0, 0.5 + 2**-22])) == 2
    assert emulator_cases.distance(x, torch.tensor([1.0, float("nan")])) == float("inf")
    codes = torch.zeros(1000, dtype=torch.uint8)
    codes[3] = 1
    assert emulator_cases.distance(codes, torch.zeros_like(codes)) == 1
    assert emulator_cases.distance(torch.ones_like(codes), torch.zeros_like(codes)) == float("inf")
    saved = torch.load(two)
    saved["optimizers"] = "RuntimeError: no"
    saved["dequantize_4bit"]["flat 64 4096 float32"][0][7] += 1
    torch.save(saved, two)
    assert [(r["case"], r["tensor"]) for r in emulator_cases.compare(one, two) if not r["ok"]] == [
        ("dequantize_4bit", "flat 64 4096 float32"),
        ("optimizers", None),
    ]


def test_predictions_are_left_out_in_one_line(check: gpu_check.Check, tmp_path: Path) -> None:
    found = check.predictions(tmp_path / "results.json")
    assert found.startswith("no predictions: gpu_model: --gpu: expected one of ") and found.count("\n") == 0
