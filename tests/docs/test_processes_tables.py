"""The tables of docs/guides/choosing_processes.md are what `shoestring estimate --world` computes now."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import processes_tables  # noqa: E402


def test_tables_are_computed_now() -> None:
    text = processes_tables.PAGE.read_text()
    assert text.count("| 1.1 B |") == 5 + len(processes_tables.WAYS)
    assert processes_tables.page() == text, "run scripts/processes_tables.py --write"
