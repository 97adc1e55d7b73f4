"""Time the C++ example train_gpt and `shoestring train` in turns, on a model of the same shape."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from shoestring.training.config import PRESETS


def text_of_the_library(path: Path, size: int) -> None:
    """Write the source of Python's standard library to a file, at most ``size`` bytes."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    path.write_bytes(b"".join(source.read_bytes() for source in sources)[:size])


def compare_cpp(program: Path, precision: str, quick: bool, rounds: int, threads: int) -> dict[str, Any]:
    """Train with both programs in turns, and print the tokens/s of each and the ratio.

    Args:
        program: train_gpt, built from examples/cpp.
        precision: "fp32" or "bf16".
        quick: use a tiny model.
        rounds: runs of each program.
        threads: threads of each program.

    Returns:
        The row of the JSON file.
    """
    name, vocabulary, size = ("tiny", 512, 200_000) if quick else ("medium", 16_384, 8_000_000)
    preset = PRESETS[name]
    shared = ["--batch-size", 4, "--seq-len", 64 if quick else 512, "--steps", 6, "--precision", precision,
              "--threads", threads, "--eval-every", 1000, "--checkpoint-every", 1000]  # fmt: skip
    shape = ["--layers", preset.layers, "--hidden", preset.hidden, "--heads", preset.heads, "--kv-heads", preset.kv_heads]  # fmt: skip
    seconds: dict[str, list[float]] = {"python": [], "cpp": []}
    with tempfile.TemporaryDirectory() as scratch:
        text, tokens = Path(scratch) / "text.txt", Path(scratch) / "tokens.bin"
        text_of_the_library(text, size)
        shoestring = [sys.executable, "-W", "ignore", "-m", "shoestring"]
        _run([*shoestring, "tokenize", "--data", text, "--out", tokens, "--vocab-size", vocabulary])
        for i in range(rounds):
            python, cpp = Path(scratch) / f"python{i}", Path(scratch) / f"cpp{i}"
            data = ["--data", text, "--preset", name, "--vocab-size", vocabulary, "--device", "cpu"]
            _run([*shoestring, "train", *data, "--out", python, *shared])
            steps = [json.loads(line) for line in (python / "metrics.jsonl").read_text().splitlines()]
            # The first step also allocates memory.
            seconds["python"] += [1 / step["tokens_per_second"] for step in steps[1:]]
            # On the CPU, `shoestring train` uses the host allocator by default.
            output = _run([program, "--data", tokens, "--out", cpp, "--host-allocator", *shape, *shared])
            rates = [float(rate) for rate in re.findall(r"^step .* ([\d.]+) tokens/s", output, re.MULTILINE)]
            seconds["cpp"] += [1 / rate for rate in rates[1:]]
    rate = {which: 1 / sorted(found)[len(found) // 2] for which, found in seconds.items()}
    print(f"\ntrain_gpt (C++) and shoestring train (Python), {name}, {precision}: {rate['cpp']:.0f} and "
          f"{rate['python']:.0f} tokens/s; C++ is {rate['cpp'] / rate['python']:.2f} times as fast")  # fmt: skip
    return {
        "name": f"{name}, {precision}",
        "C++ tokens/s": rate["cpp"],
        "Python tokens/s": rate["python"],
        "C++ / Python": rate["cpp"] / rate["python"],
    }


def _run(command: list[Any]) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout
