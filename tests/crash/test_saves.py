"""Kill a process at any system call of a save. Afterwards the old or the new state must load.

Files in the folder that the save did not write must be unchanged. saves.py and saves.cpp save and load the
files; kill_at.cpp kills the process.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_folder import BUILD, program

KILL_AT = BUILD / "tests/crash/libkill_at.so"
# Without --all, a save is killed at the first, at the last, and at this number of other system calls.
SAMPLE = 4
PAIR = ["expected the weights that were saved with", "adapter_model.safetensors", "adapter_config.json"]
# If a folder has neither the old nor the new state, loading must fail with a message that contains the words
# below.
UNFINISHED = ["no config.json there"]
REFUSED = {
    "adapter": PAIR,
    "adapter_rank": PAIR,
    "result_in_place": UNFINISHED,
    "quantized_in_place": UNFINISHED,
}
PYTHON = [
    "adapter", "adapter_rank", "optimizer", "tokens", "record", "checkpoint", "checkpoint_again", "tokenizer", "result",
    "result_in_place", "quantized", "quantized_in_place",
]  # fmt: skip
CPP = ["safetensors", "model", "adapter", "optimizer"]
FOREIGN = {"mine.txt": "mine", "notes/deep/mine.txt": "mine, deeper"}


class Server:
    """Runs saves.py or saves.cpp with libkill_at.so preloaded; sends commands and reads the replies."""

    def __init__(self, command: list[str | Path]) -> None:
        environment = os.environ | {"LD_PRELOAD": str(KILL_AT), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def ask(self, *words: object) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(*words, file=self.process.stdin, flush=True)
        reply = self.process.stdout.readline().strip()
        assert reply, f"{self.process.args} died"
        return reply

    def save(self, name: str, folder: Path, version: str, n: int = 0) -> int:
        """Save and return the number of counted system calls. If n > 0, the process dies before call n."""
        outcome, calls = self.ask(
            "save", name, folder, version, n, int(not name.endswith("_in_place"))
        ).split()
        assert outcome == ("killed" if n else "saved"), (name, n, outcome)
        return int(calls)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    commands = {
        "python": [sys.executable, Path(__file__).with_name("saves.py")],
        "cpp": program("crash_saves"),
    }
    running = {name: Server(command) for name, command in commands.items()}
    yield running
    for server in running.values():
        assert server.process.stdin is not None
        server.process.stdin.close()
        server.process.wait(timeout=20)


def add_foreign(folder: Path) -> None:
    for place in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        for name, text in FOREIGN.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
        (place / "link").symlink_to("mine.txt")


def assert_foreign(template: Path, folder: Path) -> None:
    """Check that the files of add_foreign are unchanged, except in checkpoints that were removed."""
    for path in template.rglob("*"):
        there = folder / path.relative_to(template)
        if path.parts[-1] not in ("mine.txt", "link") or "step-00000001" in path.parts:
            continue
        assert there.is_symlink() == path.is_symlink() and there.read_text() == path.read_text(), there


@pytest.mark.parametrize(("language", "name"), [*(("python", n) for n in PYTHON), *(("cpp", n) for n in CPP)])
def test_a_kill_leaves_the_old_state_or_the_new(
    language: str,
    name: str,
    servers: dict[str, Server],
    tmp_path: Path,
    seed: int,
    pytestconfig: pytest.Config,
) -> None:
    server, template = servers[language], tmp_path / "template"
    template.mkdir()
    server.save(name, template, "old")
    add_foreign(template)

    def fresh(n: int) -> Path:
        return Path(shutil.copytree(template, tmp_path / str(n), symlinks=True))

    calls = server.save(name, fresh(0), "new")
    assert calls >= 3, "the shim does not see the system calls"
    points = list(range(1, calls + 1))
    if not pytestconfig.getoption("--all") and calls > SAMPLE + 2:
        chosen = random.Random(f"{seed} {language} {name}").sample(points[1:-1], SAMPLE)
        points = sorted([1, *chosen, calls])
    verdicts: Counter[str] = Counter()
    for n in points:
        folder = fresh(n)
        server.save(name, folder, "new", n)
        for checker in servers.values():  # C++ must load the files that Python wrote, and vice versa
            if name not in CPP and checker is servers["cpp"]:
                continue
            verdict = checker.ask("check", name, folder)
            refused = (
                verdict.startswith("refused") and name in REFUSED and all(t in verdict for t in REFUSED[name])
            )
            assert verdict in ("old", "new") or refused, f"killed at call {n} of {calls}: {verdict}"
            verdicts[verdict.split()[0]] += 1
        assert_foreign(template, folder)
        # the files that a killed save left behind do not prevent the next save
        server.save(name, folder, "new")
        assert server.ask("check", name, folder) == "new"
        assert_foreign(template, folder)
        shutil.rmtree(folder)
    print(f"{language} {name}: {len(points)} of {calls} calls: {dict(verdicts)}")
