"""Test `shoestring monitor`: exit codes, signals, terminals, files and wrong input."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoestring.cli.app import spread

PYTHON = sys.executable


def start(*arguments: str | Path, **options: object) -> subprocess.Popen[str]:
    command = [PYTHON, "-m", "shoestring", "monitor", *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def run(*arguments: str | Path) -> tuple[int, str, str]:
    return finish(start(*arguments))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_output_exit_code_and_files(tmp_path: Path) -> None:
    code = """
import sys, time
block = bytearray(200 << 20)
end = time.process_time() + 0.5
while time.process_time() < end: pass
time.sleep(0.5)
print("out")
print("err", file=sys.stderr)
sys.exit(7)
"""
    options = ("--interval", "0.1", "--json", tmp_path / "run.json", "--plot", tmp_path / "run.png")
    status, out, err = run(*options, "--", PYTHON, "-c", code)
    assert status == 7 and out == "out\n" and err.startswith("err\n")
    assert "cores; machine" in err
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["total"]["cpu_seconds"] >= 0.45 and report["total"]["memory_peak"] >= 200e6
    assert len(report["samples"]) >= 5
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"


def test_the_arguments_belong_to_the_program() -> None:
    show = "import sys; print(sys.argv[1:])"
    status, out, _ = run(PYTHON, "-c", show, "--data", "a", "b", "--interval", "5", "--", "--help")
    assert status == 0 and out == "['--data', 'a', 'b', '--interval', '5', '--', '--help']\n"
    assert spread(["monitor", "--", "x", "--data", "a", "b"]) == ["monitor", "--", "x", "--data", "a", "b"]


def test_children_count_after_they_have_ended(tmp_path: Path) -> None:
    burn = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    status, _, err = run("--json", tmp_path / "a.json", "--", PYTHON, "-c", code)
    assert status == 0, err
    assert json.loads((tmp_path / "a.json").read_text())["total"]["cpu_seconds"] >= 0.55


def test_a_program_that_a_signal_ends() -> None:
    status, _, err = run("--", PYTHON, "-c", "import os; os.kill(os.getpid(), 9)")
    assert status == 128 + 9 and "Traceback" not in err


SIGNALS = """
import signal, sys, time
count = 0
def note(number, frame):
    global count
    count += 1
    print(signal.Signals(number).name, flush=True)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
print("ready", flush=True)
end = time.monotonic() + {seconds}
while time.monotonic() < end and count < {until}:
    time.sleep(0.05)
sys.exit(5)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_program_once(number: signal.Signals) -> None:
    process = start("--", PYTHON, "-c", SIGNALS.format(seconds=60, until=2))
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.stdout.readline() == f"{number.name}\n"
    time.sleep(0.3)
    process.send_signal(number)  # a second one ends neither the monitor nor, by itself, the program
    status, out, err = finish(process)
    assert status == 5 and out == f"{number.name}\n" and "cores; machine" in err


def test_nothing_is_left_running(tmp_path: Path) -> None:
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    process = start("--", PYTHON, "-c", code)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    status, _, _ = finish(process)
    assert status == 128 + signal.SIGTERM and not is_alive(int((tmp_path / "pid").read_text()))


def terminal(*arguments: str, keys: bytes = b"", wait_for: bytes = b"") -> tuple[int, bytes]:
    """Run the command on a terminal of its own; write ``keys`` once ``wait_for`` has appeared."""
    pid, main = pty.fork()
    if pid == 0:
        os.execv(PYTHON, [PYTHON, "-m", "shoestring", "monitor", *arguments])
    seen = b""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if select.select([main], [], [], 0.1)[0]:
            try:
                data = os.read(main, 65536)
            except OSError:
                break
            if not data:
                break
            seen += data
        if keys and wait_for in seen:
            os.write(main, keys)
            keys = b""
    os.close(main)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), seen


def test_a_terminal_shows_output_and_measurements() -> None:
    code = "import sys, time; assert sys.stdout.isatty(); print('first line'); time.sleep(1.5); print('last', end='')"
    status, seen = terminal("--interval", "0.1", "--", PYTHON, "-c", code)
    assert status == 0 and seen.count(b"first line") >= 1 and b"last" in seen
    assert b"shoestring monitor" in seen and b"cores; machine" in seen
    status, seen = terminal("--no-live", "--", PYTHON, "-c", "print('plain')")
    assert status == 0 and b"plain" in seen and b"shoestring monitor" not in seen


@pytest.mark.parametrize("live", ["--live", "--no-live"])
def test_ctrl_c_reaches_the_program_once(live: str) -> None:
    code = SIGNALS.format(seconds=2, until=9)
    status, seen = terminal(live, "--", PYTHON, "-c", code, keys=b"\x03", wait_for=b"ready")
    assert status == 5 and seen.count(b"SIGINT") >= 1
    if live == "--no-live":  # the live view repeats lines
        assert seen.count(b"SIGINT") == 1


def test_the_program_reads_the_terminal() -> None:
    status, seen = terminal(
        "--", PYTHON, "-c", "print('got ' + input('name: ')[::-1])", keys=b"abc\n", wait_for=b"name: "
    )
    assert status == 0 and b"got cba" in seen


def test_wrong_input(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    cases = [
        ([], "Missing argument 'command'"),
        (["--"], "Missing argument 'command'"),
        (
            ["--", "no-such-program"],
            "command: expected a program, received no-such-program, which was not found",
        ),
        (["--", str(tmp_path / "text")], "which was not found"),
        (["--interval", "0.01", "--", "true"], "--interval: expected 0.1 to 10 seconds, received 0.01"),
        (["--interval", "x", "--", "true"], "--interval: expected a number, got x"),
        (["--json", str(tmp_path / "no" / "a.json"), "--", "true"], "a.json: No such file or directory"),
        (["--json", str(tmp_path), "--", "true"], "Is a directory"),
        (["--plot", str(tmp_path / "a.xyz"), "--", "true"], "expected a name that ends in one of"),
        (["--plot", "/proc/a.png", "--", "true"], "--plot /proc/a.png: "),
    ]
    for arguments, message in cases:
        status, out, err = run(*arguments)
        assert status == 2 and out == "" and message in err, (arguments, err)
        assert len(err.splitlines()) == 1
    (tmp_path / "text").chmod(0o755)
    status, _, err = run("--", tmp_path / "text")
    assert status == 2 and "Exec format error" in err and len(err.splitlines()) == 1


def test_pytorch_is_not_imported() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['shoestring', 'monitor', '--', 'true']; "
        "import shoestring_command; sys.exit(shoestring_command.main())"
    )
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "bottleneck" in done.stderr, done.stderr
