"""Read finished runs; write report.html and report.png of one, or compare.html and compare.png of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoestring.core.errors import InputError
from shoestring.files.atomic import atomic_file
from shoestring.files.read_file import is_number, read_json
from shoestring.training.report.metrics import read_metrics
from shoestring.training.report.page import comparison_page, loss_field, ratio, run_page
from shoestring.training.report.plots import draw_comparison, draw_run, megabytes

# Numeric fields of summary.json that the reports show, and that not every run has.
OPTIONAL = {
    "best_val_loss",
    "data_seconds",
    "device_reserved",
    "device_utilization",
    "planned_peak",
    "planned_seconds",
    "seconds",
    "steps",
    "tokens",
    "trained_parameters",
}


@dataclass(frozen=True)
class FinishedRun:
    """The contents of a finished run folder."""

    name: str
    folder: Path
    record: dict[str, Any]  # content of run.json
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]


def read_run(folder: Path) -> FinishedRun:
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
    return FinishedRun(folder.resolve().name, folder, record, summary, metrics)


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
        baseline=lambda value: isinstance(value, bool),
    )  # fmt: skip
    if isinstance(summary, dict):  # fields that only some runs have
        later = OPTIONAL & summary.keys()
        kinds = dict.fromkeys(later, is_number)
        if "best_val_loss" in later:
            kinds["best_val_loss"] = optional
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


def read_runs(folders: list[Path]) -> list[FinishedRun]:
    """Read finished runs. Name each by its folder, with parent folders if the folder's name is not unique."""
    runs = [read_run(folder) for folder in folders]
    paths = [list(run.folder.resolve().parts) for run in runs]
    names = []
    for number, path in enumerate(paths):
        others = [other for other in paths if other != path]
        length = next(
            (n for n in range(1, len(path)) if all(other[-n:] != path[-n:] for other in others)), len(path)
        )
        before = paths[:number].count(path)  # number of earlier runs in the list with the same folder
        names.append("/".join(path[-length:]) + (f" ({before + 1})" if before else ""))
    return [replace(run, name=name) for run, name in zip(runs, names)]


def figures(run: FinishedRun) -> dict[str, str]:
    """Return the figures of a run for the tables: pairs of a label with its unit and the formatted value."""
    summary = run.summary
    val = summary["val_loss"]
    return {
        "training loss": f"{summary['train_loss']:.4f}",
        "validation loss": "–" if val is None else f"{val:.4f}",
        "tokens/s": f"{summary['tokens_per_second']:,.0f}",
        "peak memory, MB": megabytes(summary["peak_memory"]),
    }


def _table(runs: list[FinishedRun]) -> list[list[str]]:
    """Return the rows of a table of runs, headings first, whose last columns are ratios to the first run.

    The loss ratio uses the validation loss if every run has one, and the training loss otherwise. Runs that differ in
    ``--precision`` have a column of it.
    """
    head = ["run", *figures(runs[0]), "loss ratio", "memory ratio", "speed ratio"]
    fields = (loss_field(runs), "peak_memory", "tokens_per_second")
    rows = [
        [run.name, *figures(run).values(), *(ratio(run, runs[0], field) for field in fields)] for run in runs
    ]
    precisions = [str(run.record["fingerprint"].get("precision", "–")) for run in runs]
    if len(set(precisions)) > 1:  # ratios then compare more than the code
        head.append("precision")
        rows = [[*row, precision] for row, precision in zip(rows, precisions)]
    return [head, *rows]


def write_report(folder: Path) -> None:
    """Write report.png and report.html into the folder of a finished run."""
    run = read_run(folder)
    _write(folder / "report.png", draw_run(run))
    _write_page(folder / "report.html", run_page(run))


def write_comparison(folders: list[Path], out: Path) -> list[list[str]]:
    """Write compare.png and compare.html into ``out``; return the table's rows, headings first.

    Each row ends with the ratios of its run to the first run.
    """
    runs = read_runs(folders)
    table = _table(runs)
    *names, last = [run.name for run in runs]
    name = f"{', '.join(names)} and {last}" if names else last
    _write(out / "compare.png", draw_comparison(runs))
    _write_page(out / "compare.html", comparison_page("Comparison of runs", {name: runs}, {name: table}))
    return table


def write_sections(out: Path, title: str, groups: dict[str, list[Path]]) -> dict[str, list[list[str]]]:
    """Write report.html, with a table and plots for each group of runs, to ``out``; return the tables."""
    runs = {name: read_runs(folders) for name, folders in groups.items()}
    tables = {name: _table(members) for name, members in runs.items()}
    for name, members in runs.items():
        _write(out / f"{name}.png", draw_comparison(members))
    _write_page(out / "report.html", comparison_page(title, runs, tables))
    return tables


def _write(path: Path, content: bytes) -> None:
    with atomic_file(path) as file:
        file.write(content)


def _write_page(path: Path, page: str) -> None:
    # A folder's name may hold bytes that are no UTF-8, which Python reads as surrogates.
    _write(path, page.encode("utf-8", errors="replace"))
