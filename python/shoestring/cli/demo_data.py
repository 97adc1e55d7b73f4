"""Text that every machine with Python has: source of the standard library, and documentation of packages."""

from __future__ import annotations

import json
import random
import sysconfig
import tokenize
from collections.abc import Iterable
from email.parser import Parser
from importlib.metadata import distributions
from pathlib import Path

from shoestring.core.errors import InputError
from shoestring.files.atomic import atomic_file

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}


def standard_library(path: Path) -> int:
    """Write the .py files of the standard library, without its tests, as JSONL; return the bytes written.

    The order is shuffled but always the same.
    """
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    for file in sorted(root.rglob("*.py")):
        if LEFT_OUT.isdisjoint(file.relative_to(root).parts):
            try:
                # this open decodes with the encoding that the Python file declares
                with tokenize.open(file) as opened:
                    texts.append(opened.read())
            except (SyntaxError, UnicodeDecodeError, OSError):
                continue
    return _write(path, texts)


def package_documentation(path: Path) -> int:
    """Write the long descriptions of the installed packages as JSONL; return the bytes written.

    The order is shuffled but always the same.
    """
    texts = {}
    for distribution in distributions():
        metadata = distribution.read_text("METADATA") or ""
        message = Parser().parsestr(metadata)
        body = message.get_payload()
        text = body if isinstance(body, str) and body.strip() else message.get("Description", "")
        if len(text) > 500:  # a shorter package description is no documentation
            texts[message.get("Name", "")] = text
    return _write(path, [texts[name] for name in sorted(texts)])


def _write(path: Path, texts: Iterable[str]) -> int:
    """Write texts as shuffled JSON lines; return the size of the file."""
    records = [
        json.dumps({"text": text.encode("utf-8", "replace").decode()}) for text in texts if text.strip()
    ]
    if not records:
        raise InputError(f"demo: no text found for {path.name} on this machine")
    random.Random(0).shuffle(records)
    with atomic_file(path) as file:
        file.write("".join(record + "\n" for record in records).encode())
    return path.stat().st_size
