"""Write report.html and report.png of one run, or compare.html and compare.png of several runs."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoestring.core.errors import InputError
from shoestring.files.atomic import atomic_file
from shoestring.files.read_file import is_number, read_json
from shoestring.training.metrics import read_metrics
from shoestring.training.plots import draw_comparison, draw_run

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2430; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
img { width: 100%; } table { border-collapse: collapse; } td, th { padding: .25rem .9rem .25rem 0; text-align: left; }
th { border-bottom: 2px solid #d5d9e2; } td { border-bottom: 1px solid #eceef3; } .n { text-align: right; }
"""


@dataclass(frozen=True)
class Run:
    """The contents of a finished run folder."""

    name: str
    folder: Path
    record: dict[str, Any]  # content of run.json
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]


def read_run(folder: Path) -> Run:
    """Read the files of a finished run; raise InputError if the folder holds no finished run."""
    try:
        record = read_json(folder / "run.json", "run.json")
        summary = read_json(folder / "summary.json", "summary.json")
        metrics = read_metrics(folder / "metrics.jsonl")
    except FileNotFoundError as error:
        name = Path(str(error.filename)).name
        raise InputError(f"{folder}: not a finished run (no {name} in it)") from None
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{folder}: not a finished run ({error})") from None
    _check(folder, record, summary, metrics)
    return Run(folder.resolve().name, folder, record, summary, metrics)


def _check(folder: Path, record: Any, summary: Any, metrics: list[Any]) -> None:
    """Raise InputError if a file of a run lacks a field for the reports, or has a value of a wrong type."""

    def has(value: Any, **kinds: Callable[[Any], bool]) -> list[str]:
        fields = value if isinstance(value, dict) else {}
        return [name for name, fits in kinds.items() if name not in fields or not fits(fields[name])]

    def optional(value: Any) -> bool:
        return value is None or is_number(value)

    def text(value: Any) -> bool:
        return isinstance(value, str)

    def parts(value: Any) -> bool:
        kinds = {"name": text, "formula": text, "expected": optional, "measured": is_number}
        return isinstance(value, list) and not any(has(part, **kinds) for part in value)

    wrong = has(record, command=text, fingerprint=lambda value: isinstance(value, dict))
    wrong += has(
        summary, train_loss=is_number, val_loss=optional, tokens_per_second=is_number, peak_memory=is_number, memory=parts,
        plain=lambda value: isinstance(value, bool),
    )  # fmt: skip
    if isinstance(summary, dict):  # fields that only some runs have
        later = {"data_seconds", "device_utilization", "device_reserved"} & summary.keys()
        kinds = dict.fromkeys(later, is_number)
        if "data_seconds" in later:
            kinds["seconds"] = is_number
        if "device_reserved" in later:
            kinds |= {"device": text, "host_peak_memory": is_number}
        wrong += has(summary, **kinds)
    wrong += [name for row in metrics for name in has(row, step=is_number, loss=is_number)][:1]
    if wrong or not metrics:
        raise InputError(
            f"{folder}: run.json, summary.json or metrics.jsonl is damaged ({', '.join(wrong) or 'no steps'})"
        )


def read_runs(folders: list[Path]) -> list[Run]:
    """Read finished runs. Name each by its folder, with parent folders if the folder's name is not unique."""
    runs = [read_run(folder) for folder in folders]
    ends = [list(run.folder.resolve().parts) for run in runs]
    names = []
    for number, own in enumerate(ends):
        others = [other for other in ends if other != own]
        length = next(
            (n for n in range(1, len(own)) if all(other[-n:] != own[-n:] for other in others)), len(own)
        )
        before = ends[:number].count(own)  # number of earlier runs in the list with the same folder
        names.append("/".join(own[-length:]) + (f" ({before + 1})" if before else ""))
    return [replace(run, name=name) for run, name in zip(runs, names)]


def megabytes(count: float | None) -> str:
    """Format a number of bytes as whole MB (10^6 bytes), and None as a dash."""
    return "–" if count is None else f"{count / 1e6:,.0f}"


def figures(run: Run) -> dict[str, str]:
    """Return the figures of a run for the tables: pairs of a label with its unit and the formatted value."""
    summary = run.summary
    val = summary["val_loss"]
    return {
        "training loss": f"{summary['train_loss']:.4f}",
        "validation loss": "–" if val is None else f"{val:.4f}",
        "tokens/s": f"{summary['tokens_per_second']:,.0f}",
        "peak memory, MB": megabytes(summary["peak_memory"]),
    }


def write_report(folder: Path) -> None:
    """Write report.png and report.html into the folder of a finished run."""
    run = read_run(folder)
    picture = draw_run(run)
    parts = [
        [part["name"], part["formula"], megabytes(part["expected"]), megabytes(part["measured"])]
        for part in run.summary["memory"]
    ]
    parts += [[name, formula, "–", megabytes(size)] for name, formula, size in _peaks(run.summary)]
    settings = [
        [key, json.dumps(value)]
        for key, value in run.record["fingerprint"].items()
        if key not in ("data", "model_files")
    ]
    body = (
        f"<h1>{html.escape(_title(run))}</h1>{_image(picture, 'loss curves and memory')}"
        + "<h2>Result</h2>" + _table([], [[key, value] for key, value in (figures(run) | _times(run.summary)).items()])
        + "<h2>Memory</h2>" + _table(["part", "formula", "by formula, MB", "measured, MB"], parts, numbers=2)
        + "<h2>Settings</h2>" + _table([], settings)
    )  # fmt: skip
    _write(folder, "report", picture, body, _title(run))


def _peaks(summary: dict[str, Any]) -> list[tuple[str, str, float]]:
    """Return name, meaning and bytes of each peak of memory: of the process, and of an accelerator."""
    process = ("peak of the process", "high-water mark of the resident set")
    if "device_reserved" not in summary:
        return [(*process, summary["peak_memory"])]
    return [
        (f"peak of {summary['device']}", "largest memory that was allocated at once", summary["peak_memory"]),
        (f"reserved on {summary['device']}", "held by the allocator", summary["device_reserved"]),
        (*process, summary["host_peak_memory"]),
    ]


def _times(summary: dict[str, Any]) -> dict[str, str]:
    """Return rows of the result table that tell whether the device had work all the time."""
    found = {}
    if "data_seconds" in summary:
        found["waited for data"] = f"{summary['data_seconds']:.2f} s of {summary['seconds']:.0f} s"
    if "device_utilization" in summary:
        found["device busy"] = f"{summary['device_utilization']:.0f} %"
    return found


def write_comparison(folders: list[Path], out: Path) -> list[list[str]]:
    """Write compare.png and compare.html into ``out``; return the table's rows, headings first.

    Each row ends with the ratios of its run to the first run.
    """
    runs = read_runs(folders)
    picture = draw_comparison(runs)
    _write(
        out,
        "compare",
        picture,
        _section(" and ".join(run.name for run in runs), runs, picture),
        "Comparison of runs",
    )
    return _joined(runs)


def write_sections(out: Path, title: str, groups: dict[str, list[Path]]) -> dict[str, list[list[str]]]:
    """Write report.html, with a table and a picture for each group of runs, to ``out``; return the tables."""
    body, tables = f"<h1>{html.escape(title)}</h1>", {}
    for name, folders in groups.items():
        runs = read_runs(folders)
        picture = draw_comparison(runs)
        with atomic_file(out / f"{name}.png") as file:
            file.write(picture)
        body += _section(name, runs, picture)
        tables[name] = _joined(runs)
    _write_page(out / "report.html", body, title)
    return tables


def _section(title: str, runs: list[Run], picture: bytes) -> str:
    head, rows = comparison(runs)
    names = [part["name"] for part in runs[0].summary["memory"]]
    memory = [[name, *(megabytes(_part(run, name)) for run in runs)] for name in names]
    return (
        f"<h2>{html.escape(title)}</h2>{_image(picture, 'loss, memory and speed of each run')}"
        + _table(head, rows, numbers=len(head) - 1)
        + "<h2>Memory, MB, measured</h2>" + _table(["part", *(run.name for run in runs)], memory, numbers=len(runs))
    )  # fmt: skip


def _joined(runs: list[Run]) -> list[list[str]]:
    head, rows = comparison(runs)
    return [head, *rows]


def comparison(runs: list[Run]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of a table of runs, whose last columns are ratios to the first run.

    The loss ratio uses the validation loss if every run has one, and the training loss otherwise.
    """
    first = runs[0].summary
    loss = "val_loss" if all(run.summary["val_loss"] is not None for run in runs) else "train_loss"
    head = ["run", *figures(runs[0]), "loss ratio", "memory ratio", "speed ratio"]
    rows = []
    for run in runs:
        ratios = [
            run.summary[loss] / first[loss],
            run.summary["peak_memory"] / first["peak_memory"],
            run.summary["tokens_per_second"] / first["tokens_per_second"],
        ]
        rows.append([run.name, *figures(run).values(), *(f"{ratio:.3f}" for ratio in ratios)])
    return head, rows


def _part(run: Run, name: str) -> float | None:
    return next((part["measured"] for part in run.summary["memory"] if part["name"] == name), None)


def _title(run: Run) -> str:
    how = "plain PyTorch" if run.summary["plain"] else "shoestring"
    return f"{run.record['command']} with {how}: {run.name}"


def _image(picture: bytes, text: str) -> str:
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'


def _table(head: list[str], rows: list[list[str]], numbers: int = 0) -> str:
    def cells(tag: str, row: list[str]) -> str:
        right = len(row) - numbers  # index of the first numeric column, which is right-aligned
        return "".join(
            f"<{tag}{' class=n' if i >= right else ''}>{html.escape(str(cell))}</{tag}>"
            for i, cell in enumerate(row)
        )

    top = f"<tr>{cells('th', head)}</tr>" if head else ""
    below = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table>{top}{below}</table>"


def _write(folder: Path, name: str, picture: bytes, body: str, title: str) -> None:
    with atomic_file(folder / f"{name}.png") as file:
        file.write(picture)
    _write_page(folder / f"{name}.html", body, title)


def _write_page(path: Path, body: str, title: str) -> None:
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    with atomic_file(path) as file:
        file.write(f'<!doctype html><html lang="en">{head}{body}</html>\n'.encode())
