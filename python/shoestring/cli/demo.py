"""`shoestring demo`: train and fine-tune on local text, and compare shoestring with plain PyTorch."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from shoestring.cli.console import print_table, say
from shoestring.cli.demo_data import package_documentation, standard_library
from shoestring.cli.turns import run_in_turns
from shoestring.core.errors import InputError
from shoestring.files.atomic import write_json
from shoestring.files.lock import LOCK, locked
from shoestring.training.report.write import write_sections
from shoestring.training.run.device import find_device

VOCABULARY = 16384
MARK = "demo.json"  # name of a marker file: a folder that contains it belongs to a demo
# 8192 tokens per step. With VOCABULARY tokens in the vocabulary, the logits take half a gigabyte, and plain
# PyTorch holds three such tensors. All runs have the same precision and no plan, so that they can be compared.
SHAPE = [
    "--seq-len", "512", "--batch-size", "16", "--val-fraction", "0.02", "--eval-batches", "2", "--precision", "fp32",
    "--device-memory", "none",
]  # fmt: skip


def demo(out: Path, steps: int, finetune_steps: int, device: str, host_allocator: bool | None = None) -> None:
    """Train, fine-tune and compare; every run is a separate process.

    ``host_allocator`` is the option of the runs with shoestring; the others keep PyTorch's allocator.
    """
    _check(out)
    find_device(device)  # raises InputError before anything is written
    with locked(out / LOCK, f"--out {out}"):
        allocator = {None: [], True: ["--host-allocator"], False: ["--no-host-allocator"]}[host_allocator]
        _demo(out, steps, finetune_steps, device, allocator)


def _demo(out: Path, steps: int, finetune_steps: int, device: str, allocator: list[str]) -> None:
    began = time.monotonic()
    data, train, tune = _prepare(out)
    write_json(out / MARK, {"steps": steps, "finetune_steps": finetune_steps})
    say(
        "a demo of 3 parts: a tokenizer, training, fine-tuning. After the first steps, lines say how long the rest takes"
    )
    size = standard_library(data / "stdlib.jsonl")
    say(
        f"1 of 3: training a tokenizer of {VOCABULARY} tokens on {size / 1e6:.1f} MB, the source of Python's standard library"
    )
    text, tokenizer = str(data / "stdlib.jsonl"), str(data / "stdlib-tokenizer")
    tokens = ["tokenize", "--data", text, "--vocab-size", str(VOCABULARY), "--out", str(data / "stdlib.bin")]
    run_in_turns({"tokenize": tokens}, data)

    shape = [*SHAPE, "--device", device, "--lr", "4e-3"]
    common = ["train", "--data", text, "--tokenizer", tokenizer, "--preset", "mini", *shape, *_steps(steps)]
    say(f"2 of 3: training twice, in turns: {steps} steps with plain PyTorch, and with shoestring")
    trained = {"baseline": ["--baseline"], "shoestring": allocator}
    run_in_turns(
        {name: [*common, *options, "--out", str(train / name)] for name, options in trained.items()},
        train,
        # PEFT takes as long as plain PyTorch for a step, with bitsandbytes and without.
        lambda seconds: (2 * seconds["baseline"] + seconds["shoestring"]) * finetune_steps / steps,
    )

    size = package_documentation(data / "docs.jsonl")
    model, text = str(train / "shoestring" / "model"), str(data / "docs.jsonl")
    common = ["finetune", "--model", model, "--data", text, *shape, *_steps(finetune_steps)]
    say(
        f"3 of 3: fine-tuning on {size / 1e6:.1f} MB of package documentation, in turns: "
        "PEFT, PEFT with bitsandbytes, shoestring (QLoRA)"
    )
    tuned = {
        "peft-lora": ["--baseline", "--quantize", "none"],
        "peft-bitsandbytes": ["--baseline", "--quantize", "nf4"],
        "shoestring": [*allocator, "--quantize", "nf4"],
    }
    commands = {name: [*common, *options, "--out", str(tune / name)] for name, options in tuned.items()}
    run_in_turns(commands, tune)

    groups = {"train": [train / name for name in trained], "finetune": [tune / name for name in tuned]}
    tables = write_sections(out, "shoestring beside plain PyTorch", groups)
    for name, rows in tables.items():
        print(f"\n{name}")
        print_table(rows)
    print(f"\n{time.monotonic() - began:.0f} s in all. Report: {out / 'report.html'}")


def _check(out: Path) -> None:
    """Raise InputError if the folder holds anything other than a demo."""
    if not out.exists() or (out / MARK).is_file():
        return
    if not out.is_dir() or any(path.name != LOCK for path in out.iterdir()):
        raise InputError(f"--out {out}: exists and is not the directory of a demo; give another")


def _prepare(out: Path) -> list[Path]:
    """Create the folders of a demo; replace those of an earlier demo and touch nothing else."""
    _check(out)
    folders = [out / name for name in ("data", "train", "finetune")]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    return folders


def _steps(count: int) -> list[str]:
    """Return the options for a number of steps, with 4 evaluations and 2 checkpoints."""
    every = {"--steps": count, "--eval-every": max(1, count // 4), "--checkpoint-every": max(1, count // 2)}
    return [str(part) for option in every.items() for part in option]
