"""The page of benchmarks: the text of benchmarks/README.md, and a table for each benchmark of each result file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def page() -> str:
    """Return the Markdown of the page, without its title."""
    text = (REPOSITORY / "benchmarks/README.md").read_text()
    body = re.sub(r"\A# .*\n+", "", text)
    parts = [body]
    for path in sorted((REPOSITORY / "benchmarks/results").glob("*.json")):
        parts += _machine(json.loads(path.read_text()), path.name)
    return "\n\n".join(parts) + "\n"


def _machine(data: dict[str, Any], name: str) -> list[str]:
    """Return the paragraphs on the results of one machine."""
    parts = [
        f"## All figures: {data['machine']}",
        f"PyTorch {data['torch']}. Source: `benchmarks/results/{name}`. The last column is the time of a row divided "
        "by the time of the first row of its case. Above 1, the first row is faster.",
    ]
    for benchmark in data["benchmarks"]:
        timed = [table for table in benchmark["tables"] if _is_timed(table)]
        # A benchmark of shoestring has the name of its script.
        parts.append(f"### `{benchmark['benchmark']}`")
        rows = [
            "| case | candidate | ms | rate | time / time of first row |",
            "| --- | --- | --: | --: | --: |",
        ]
        for table in timed:
            for index, row in enumerate(table["rows"]):
                case = table["title"] if index == 0 else ""
                rows.append(
                    f"| {_cell(case)} | {_cell(row['name'])} | {_number(row['seconds'] * 1e3)} "
                    f"| {_number(row['rate'])} {table['unit']} | {row['ratio']:.2f} |"
                )
        if timed:
            parts.append("\n".join(rows))
        others = [table for table in benchmark["tables"] if not _is_timed(table)]
        parts += [_other(table) for table in _joined(others)]
    return parts


def _is_timed(table: dict[str, Any]) -> bool:
    return all(row.keys() >= {"name", "seconds", "rate", "ratio"} for row in table["rows"])


def _joined(tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join tables of one title, in order."""
    joined: dict[str, dict[str, Any]] = {}
    for table in tables:
        joined.setdefault(table["title"], {"title": table["title"], "rows": []})["rows"] += table["rows"]
    return list(joined.values())


def _other(table: dict[str, Any]) -> str:
    """Return a table whose columns are the fields of its rows."""
    columns = list(dict.fromkeys(key for row in table["rows"] for key in row))
    lines = [
        f"{_cell(table['title'])}:\n",
        "| " + " | ".join(_cell(column.replace("_", " ")) for column in columns) + " |",
        "|" + " --- |" * len(columns),
    ]
    lines += [
        "| " + " | ".join(_value(row.get(column)) for column in columns) + " |" for row in table["rows"]
    ]
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return _cell(", ".join(f"{key}: {each}" for key, each in value.items()))
    if isinstance(value, float):
        return _number(value)
    return f"{value:,}" if isinstance(value, int) else _cell("" if value is None else str(value))


def _number(value: float) -> str:
    """Return a number with three significant digits, and without an exponent."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 4
    return f"{value:,.{digits}f}"


def _cell(text: str) -> str:
    """Escape what Markdown would read as markup in a cell of plain text."""
    return "".join(f"\\{c}" if c in "|*_<[`$" else c for c in text)
