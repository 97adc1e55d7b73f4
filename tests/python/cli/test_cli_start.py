"""The shoestring command starts fast: it does not import PyTorch for help and for usage errors.

It reports a missing Python package in one line.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRACED = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None  # its import fails
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {blocked!r} else real(name, package)
sys.argv = ["shoestring", *{arguments!r}]
import shoestring_command
code = shoestring_command.main()
print("torch" in sys.modules and sys.modules["torch"] is not None, file=sys.stderr)
sys.exit(code)
"""


def start(*arguments: str, blocked: tuple[str, ...] = ()) -> tuple[int, str, list[str]]:
    """Run the entry point of the installed script. Return its exit code, stdout, and the lines of stderr.

    The last line on stderr says whether the entry point has imported torch.
    """
    program = TRACED.format(blocked=blocked, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr.splitlines()


def seconds(*arguments: str) -> float:
    """Return the processor time of a shoestring command in a process of its own, in seconds.

    Unlike elapsed time, it does not depend on what else the machine runs.
    """
    before = os.times()
    subprocess.run([sys.executable, "-m", "shoestring", *arguments], capture_output=True, timeout=120)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--help"], ""),
        (["train", "--help"], ""),
        (["estimate", "--help"], ""),
        (["train", "--steps", "many"], "--steps: expected an integer, got many"),
        (["train", "--lr", "abc"], "--lr: expected a number, got abc"),
        (["train", "--data", "x", "--out", "y", "--seed", "-1"], "--seed: expected 0 to 4294967295, got -1"),
        (["train", "--data", "x", "--out", "y", "--preset", "huge"], "--preset: expected tiny | mini"),
        (["finetune", "--data", "x"], "Missing option"),
        (
            ["finetune", "--data=x", "--out=y", "--model=z", "--baseline", "--quantize=int8"],
            "nf4 | none with --baseline",
        ),
        (["estimate", "--model", "tiny", "--optimizer", "adam"], "--optimizer: expected adamw | lion | "),
        (["compare", "nowhere"], "nowhere: not a finished run (no run.json in it)"),
        (["no-such-command"], "No such command 'no-such-command'"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_without_pytorch(arguments: list[str], message: str) -> None:
    code, output, errors = start(*arguments, blocked=("torch", "transformers.models"))
    assert errors[-1] == "False" and code == (2 if message else 0)
    assert (message in errors[0] and len(errors) == 2) if message else "Usage: shoestring" in output


def test_tokenize_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The command does not register the operators, so none of its imports may call one."""
    (tmp_path / "text.txt").write_text("one word and another word\n" * 100)
    out = tmp_path / "text.tokens"
    code, output, errors = start(
        "tokenize", "--data", str(tmp_path / "text.txt"), "--vocab-size", "270", "--out", str(out)
    )
    assert code == 0 and out.exists() and "tokens in" in output, errors


@pytest.mark.alone
def test_help_takes_less_than_a_second() -> None:
    assert min(seconds("--help") for _ in range(3)) < 1
    assert min(seconds("train", "--steps", "0") for _ in range(3)) < 1


@pytest.mark.parametrize("missing", [("typer",), ("matplotlib", "transformers"), ("numpy",)])
def test_packages_that_are_missing(missing: tuple[str, ...]) -> None:
    for arguments in (["--help"], ["train"], []):
        code, output, errors = start(*arguments, blocked=missing)
        assert (code, output, len(errors)) == (2, "", 2)
        assert (
            all(name in errors[0] for name in missing)
            and "pip install --no-build-isolation '.[cli]'" in errors[0]
        )


def test_import_is_whole_elsewhere(tmp_path: Path) -> None:
    """If another package runs under `python -m`, importing shoestring is complete, not lazy."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text(
        "import shoestring, torch; torch.ops.shoestring._cpu_capability()"
    )
    (tmp_path / "theirs" / "main.py").write_text(
        "import shoestring; print(shoestring.__version__, len(shoestring.__all__))"
    )
    theirs = subprocess.run(
        [sys.executable, "-m", "theirs.main", "shoestring"], capture_output=True, text=True, cwd=tmp_path, timeout=120,
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[3] / 'python'}:{tmp_path}"},
    )  # fmt: skip
    assert theirs.returncode == 0, theirs.stderr
    lazy = "import shoestring_command, shoestring; print(shoestring.__version__, len(shoestring.__all__)); shoestring.lora.apply"
    ours = subprocess.run([sys.executable, "-c", lazy], capture_output=True, text=True, timeout=120)
    assert ours.stdout == theirs.stdout and ours.returncode == 0, ours.stderr


def test_a_closed_pipe_and_a_poor_terminal() -> None:
    command = f"{sys.executable} -m shoestring --help | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("Usage") and "Traceback" not in done.stderr
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    arguments = [sys.executable, "-m", "shoestring", "compare", "ä"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, env=environment)
    assert (
        done.returncode == 2
        and done.stderr == "shoestring: error: \\xe4: not a finished run (no run.json in it)\n"
    )
