"""The command line and the data that the examples share."""

from __future__ import annotations

import argparse
from typing import NoReturn

import torch
from torch import Tensor

VOCAB = 64  # number of different tokens in the data


def parser(description: str, steps: int) -> argparse.ArgumentParser:
    """Return a parser with the options ``--device`` and ``--steps``; ``steps`` is the default."""
    made = Parser(description=description)
    made.add_argument(
        "--device", type=_device, default="auto", help="auto, cpu, or for example cuda or cuda:1"
    )
    made.add_argument("--steps", type=count, default=steps, help="number of optimizer steps")
    return made


def sequences(rows: int, length: int) -> Tensor:
    """Return token sequences, (rows, length), that count upwards by 1, 2 or 3 from a random start."""
    start, stride = torch.randint(VOCAB, (rows, 1)), torch.randint(1, 4, (rows, 1))
    return (start + stride * torch.arange(length)) % VOCAB


class Parser(argparse.ArgumentParser):
    """A parser that prints errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _device(text: str) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = ["cpu"]
    if accelerator is not None:
        found += [f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count())]
    if text == "auto":
        return torch.device(found[min(1, len(found) - 1)])
    name = f"{text}:0" if accelerator is not None and text == accelerator.type else text
    if name not in found:
        expected = f"auto or a device of this machine ({', '.join(found)})"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text}. Use --device auto.")
    return torch.device(name)


def count(text: str) -> int:
    """Return the positive whole number that a text holds, for ``type`` of ``add_argument``."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least 1, got {text}. Use --steps 10."
        )
    return int(text)
