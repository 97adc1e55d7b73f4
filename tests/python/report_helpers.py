"""Helpers for tests of reports: write the folder of a finished run, and read a page of HTML as a browser would."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

# Elements that have no end tag, in HTML.
VOID = {"meta", "img", "br", "link"}
MB = 1_000_000
PARTS = [
    ("program", "Python, PyTorch, libraries", None, 700 * MB),
    ("weights", "4 B x 2.50 M", 10 * MB, 10 * MB),
    ("gradients", "4 B x trained", 10 * MB, 10 * MB),
    ("optimizer", "(2 + 8/256) B x trained", 5_080_000, 5_080_000),
    ("activations", "1024 x 4 x 128 x 4 B", 38_797_312, 38_940_672),
    ("buffers", "loss workspace", 67_108_864, 76_722_336),
]


def write_run(
    folder: Path,
    *,
    command: str = "train",
    steps: int = 40,
    summary: dict[str, Any] | None = None,
    fingerprint: dict[str, Any] | None = None,
    memory: list[tuple[str, str, int | None, int]] = PARTS,
    metrics: dict[str, Any] | None = None,
) -> Path:
    """Write run.json, summary.json and metrics.jsonl of a finished run.

    Args:
        summary: fields of summary.json that are added or replaced.
        fingerprint: options that are added or replaced.
        metrics: fields of every line of metrics.jsonl that are added or replaced.
    """
    options = {"batch_size": 8, "lr": 0.004, "betas": [0.9, 0.95], "optimizer_arg": None, "compile": False}
    data = {"data": [["a.txt", 1_500_000], ["b.txt", 250_000]]}
    record = {
        "command": command,
        "torch": "2.11.0+cpu",
        "threads": 2,
        "fingerprint": options | (fingerprint or {}) | data,
    }
    values = {
        "baseline": False,
        "steps": steps,
        "trained_parameters": 2_500_000,
        "train_loss": 3.25,
        "val_loss": 3.5,
        "best_val_loss": 3.4375,
        "tokens": 8192 * steps,
        "tokens_per_second": 10_527.4,
        "seconds": 61.4,
        "data_seconds": 1.25,
        "device": "cpu",
        "threads": 2,
        "peak_memory": 842 * MB,
        "host_peak_memory": 842 * MB,
        "memory": [dict(zip(("name", "formula", "expected", "measured"), part)) for part in memory],
    }
    rows = [
        {
            "step": step,
            "loss": 3 + 5 * math.exp(-step / 10) + 0.2 * math.sin(step * 7.1),
            "lr": 0.004,
            "grad_norm": 1 + 0.5 * math.sin(step * 3.3),
            "tokens": 8192,
            "seconds": 0.8,
            "tokens_per_second": 10_000 + 700 * math.sin(step * 5.7),
            "rss": 800 * MB,
            "peak": 842 * MB,
            **({"val_loss": 3.5 + 1 / step} if step % 10 == 0 else {}),
            **(metrics or {}),
        }
        for step in range(1, steps + 1)
    ]
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "summary.json").write_text(json.dumps(values | (summary or {})))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Page(HTMLParser):
    """A page of HTML: its elements in order, its text, and the text of chosen elements.

    Raises AssertionError if an end tag does not match its start tag.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []  # the text of each element, that of its descendants included
        self._open: list[int] = []
        self.feed(text)
        self.close()
        assert not self._open, [self.elements[number] for number in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), attrs
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self.texts.append("")
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        opened = self.elements[self._open.pop()][0]
        assert opened == tag, f"<{opened}> is closed by </{tag}>"

    def handle_data(self, data: str) -> None:
        for number in self._open:
            self.texts[number] += data

    def all(self, *tags: str) -> list[tuple[dict[str, str], str]]:
        """Return attributes and text of each element with one of these tags, white space collapsed."""
        return [
            (attributes, " ".join(text.split()))
            for (tag, attributes), text in zip(self.elements, self.texts)
            if tag in tags
        ]

    def text(self, tag: str) -> str:
        """Return the text of the only element with this tag."""
        [(_, text)] = self.all(tag)
        return text

    def rows(self) -> list[list[str]]:
        """Return the cells of each row of all tables."""
        rows: list[list[str]] = []
        for (tag, _), text in zip(self.elements, self.texts):
            if tag == "tr":
                rows.append([])
            elif tag in ("th", "td"):
                rows[-1].append(" ".join(text.split()))
        return rows

    def pairs(self) -> dict[str, list[str]]:
        """Return the texts that follow each term of all lists of definitions."""
        found: dict[str, list[str]] = {}
        term = ""
        for (tag, _), text in zip(self.elements, self.texts):
            if tag == "dt":
                term = text
                found[term] = []
            elif tag == "dd":
                found[term].append(" ".join(text.split()))
        return found
