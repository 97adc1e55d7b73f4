"""Fill the templates of report.html and compare.html with the figures, plots and tables of runs."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoestring.files.read_file import is_number
from shoestring.training.report.colours import COLOURS
from shoestring.training.report.plots import (
    curve_plots,
    loss_plot,
    megabytes,
    part_names,
    parts_plot,
    speed_plot,
    stacked_plot,
)

if TYPE_CHECKING:
    import jinja2

    from shoestring.training.report.write import FinishedRun

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Stat:
    """One large figure of a verdict, with its label, its unit after a space if it needs one, and notes."""

    label: str
    value: str
    unit: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows. A cell is a text, or a text with a note below it."""

    caption: str
    head: list[str]
    rows: list[list[str | tuple[str, str]]]


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _render(template: str, **values: Any) -> str:
    from markupsafe import Markup

    themes = [{part: pair[theme] for part, pair in COLOURS.items()} for theme in (0, 1)]
    # The SVG elements are the only values that are not escaped; inline_svg has escaped their text.
    return _environment().get_template(template).render(light=themes[0], dark=themes[1], svg=Markup, **values)


def _how(run: FinishedRun) -> str:
    """Name the command and the library of a run."""
    return f"{run.record['command']} with {'plain PyTorch' if run.summary['baseline'] else 'shoestring'}"


def run_page(run: FinishedRun) -> str:
    """Return report.html of one run."""
    return _render(
        "report.html",
        title=f"{_how(run)}: {run.name}",
        how=_how(run),
        name=run.name,
        lead=_lead(run),
        verdict=_stats(run),
        curves=curve_plots(run, "run"),
        memory_plot=parts_plot(run, "parts"),
        parts=_parts(run),
        options=options(run),
        environment=environment(run),
    )


def comparison_page(
    heading: str, groups: dict[str, list[FinishedRun]], tables: dict[str, list[list[str]]]
) -> str:
    """Return a page that compares the runs of each group with the first run of the group.

    Args:
        heading: title of the page.
        groups: runs by the heading of the group; the heading of the only group is not shown.
        tables: for each group the rows of its table, headings first.
    """
    sections = [
        _group(name, runs, Table("Ratios are to the first run.", head, [[*row] for row in rows]), f"group{number}")
        for number, (name, runs) in enumerate(groups.items())
        for head, *rows in [tables[name]]
    ]  # fmt: skip
    return _render("compare.html", title=heading, groups=sections)


def _group(name: str, runs: list[FinishedRun], table: Table, prefix: str) -> dict[str, Any]:
    """Return the values of a section of the page that compares runs."""
    return {
        "name": name,
        "first": runs[0].name,
        "verdicts": [(run.name, _ratios(run, runs[0], loss_field(runs))) for run in runs[1:]],
        "table": table,
        "curve": loss_plot(runs, f"{prefix}-loss"),
        "bars": [speed_plot(runs, f"{prefix}-speed"), stacked_plot(runs, f"{prefix}-memory")],
        "memory": _memory_of(runs),
        "options": _options_of(runs),
        "environment": Table(
            "Environment of each run",
            ["", *_names(runs)],
            [[*row] for row in _joined([environment(run) for run in runs])],
        ),
    }


def _lead(run: FinishedRun) -> str:
    """Return one line that says how long the run was: steps, tokens, trained parameters and time."""
    summary, words = run.summary, []
    if "steps" in summary:
        words.append(f"{summary['steps']:,} steps")
    if "tokens" in summary:
        words.append(f"{summary['tokens']:,} tokens")
    if "trained_parameters" in summary:
        words.append(f"{summary['trained_parameters'] / 1e6:,.2f} M trained parameters")
    if "seconds" in summary:
        words.append(f"{summary['seconds']:,.0f} s")
    return ", ".join(words)


def _stats(run: FinishedRun) -> list[Stat]:
    """Return the figures at the top of the page of a run, each with its notes."""
    summary = run.summary
    val, best = summary["val_loss"], summary.get("best_val_loss")
    train = f"{summary['train_loss']:.4f}"
    notes = [] if val is None else [f"training loss {train}"]
    notes.append(f"training loss {run.metrics[0]['loss']:.4f} at step {run.metrics[0]['step']}")
    if best is not None and best != val:
        notes.append(f"best validation loss {best:.4f}")
    loss = ("Training loss", train) if val is None else ("Validation loss", f"{val:.4f}")
    speed = ["median over steps"]
    if "planned_seconds" in summary:
        measured = statistics.median(row["seconds"] for row in run.metrics if "seconds" in row)
        speed.append(f"{measured:.3g} s for a step, planned {summary['planned_seconds']:.3g} s")
    if "data_seconds" in summary:
        speed.append(f"waited for data {summary['data_seconds']:.2f} s of {summary['seconds']:.0f} s")
    if "device_utilization" in summary:
        speed.append(f"device busy {summary['device_utilization']:.0f} %")
    where = "the process"
    memory = []
    if "device_reserved" in summary:
        where = summary["device"]
        memory.append(f"peak of the process {megabytes(summary['host_peak_memory'])} MB")
    if "planned_peak" in summary:
        memory.append(f"planned {megabytes(summary['planned_peak'])} MB")
    return [
        Stat(*loss, "", tuple(notes)),
        Stat("Speed", f"{summary['tokens_per_second']:,.0f}", " tokens/s", tuple(speed)),
        Stat("Peak memory", megabytes(summary["peak_memory"]), " MB", (f"of {where}", *memory)),
    ]


def _parts(run: FinishedRun) -> list[dict[str, str]]:
    """Return the rows of the memory table: the parts, and below them the peaks."""
    rows = [
        {
            "name": part["name"],
            "formula": part["formula"],
            "expected": megabytes(part["expected"]),
            "measured": megabytes(part["measured"]),
            "kind": "part",
        }
        for part in run.summary["memory"]
    ]
    rows += [
        {"name": name, "formula": formula, "expected": "–", "measured": megabytes(size), "kind": "total"}
        for name, formula, size in _peaks(run.summary)
    ]
    return rows


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


def _memory_of(runs: list[FinishedRun]) -> Table:
    """Return the table of the memory of each part and run, as measured, with that by formula as a note."""
    rows: list[list[str | tuple[str, str]]]
    rows = [[name, *(_part(run, name) for run in runs)] for name in part_names(runs)]
    rows.append(["peak", *(megabytes(run.summary["peak_memory"]) for run in runs)])
    return Table("MB as measured, and by formula", ["part", *_names(runs)], rows)


def _part(run: FinishedRun, name: str) -> str | tuple[str, str]:
    """Return the cell of a part of memory, or a dash if the run has no such part."""
    part = next((part for part in run.summary["memory"] if part["name"] == name), None)
    if part is None or part["expected"] is None:
        return megabytes(part and part["measured"])
    return megabytes(part["measured"]), f"by formula {megabytes(part['expected'])}"


def _names(runs: list[FinishedRun]) -> list[str]:
    return [run.name for run in runs]


def loss_field(runs: list[FinishedRun]) -> str:
    """Return the field of summary.json whose ratio compares runs: val_loss if all runs have it."""
    return "val_loss" if all(run.summary["val_loss"] is not None for run in runs) else "train_loss"


def ratio(run: FinishedRun, first: FinishedRun, field: str, digits: int = 3) -> str:
    """Return the ratio of a field of summary.json between two runs, or a dash if it is not finite."""
    divisor = first.summary[field]
    return f"{run.summary[field] / divisor:.{digits}f}" if divisor else "–"


def _ratios(run: FinishedRun, first: FinishedRun, loss: str) -> list[Stat]:
    name = "Validation loss" if loss == "val_loss" else "Training loss"

    def stat(label: str, field: str, digits: int, form: Any, unit: str) -> Stat:
        figure, first_figure = form(run.summary[field]), form(first.summary[field])
        value = ratio(run, first, field, digits)
        notes = (f"{figure}{unit}, {first.name} {first_figure}{unit}",)
        return Stat(label, value, "" if value == "–" else "x", notes)

    return [
        stat(name, loss, 3, "{:.4f}".format, ""),
        stat("Speed", "tokens_per_second", 2, "{:,.0f}".format, " tokens/s"),
        stat("Peak memory", "peak_memory", 2, megabytes, " MB"),
    ]


def _value(value: Any) -> str:
    """Format the value of an option: text as it is, a list with commas, and anything else as JSON."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and value and not any(isinstance(each, (dict, list)) for each in value):
        return ", ".join(map(_value, value))
    return value if isinstance(value, str) else json.dumps(value)


def options(run: FinishedRun) -> list[tuple[str, str]]:
    """Return name and value of each recorded option of a run."""
    fingerprint = run.record["fingerprint"]
    return [(key, _value(value)) for key, value in fingerprint.items() if key not in ("data", "model_files")]


def _options_of(runs: list[FinishedRun]) -> dict[str, Table]:
    """Return two tables of options by run: "all" of them, and those that "differ"."""
    rows = _joined([options(run) for run in runs])
    head = ["option", *_names(runs)]
    return {
        "differ": Table("Options that differ", head, [[*row] for row in rows if len(set(row[1:])) > 1]),
        "all": Table("All options", head, [[*row] for row in rows]),
    }


def _joined(columns: list[list[tuple[str, str]]]) -> list[list[str]]:
    """Join lists of pairs into rows of a table: the key, and the value in each list, or a dash."""
    values = [dict(column) for column in columns]
    keys = dict.fromkeys(key for column in values for key in column)
    return [[key, *(column.get(key, "–") for column in values)] for key in keys]


def environment(run: FinishedRun) -> list[tuple[str, str]]:
    """Return name and value of what a run ran on: command, version of PyTorch, device, threads and data."""
    record, summary = run.record, run.summary
    rows = [("command", f"shoestring {record['command']}")]
    for label, values, key in (
        ("PyTorch", record, "torch"),
        ("device", summary, "device"),
        ("CPU threads", summary, "threads"),
        ("host allocator", record, "host_allocator"),
    ):
        if key in values:
            rows.append((label, _value(values[key])))
    for label, key in (("data", "data"), ("model files", "model_files")):
        files = record["fingerprint"].get(key)
        if isinstance(files, list) and files:
            rows.append((label, _files(files)))
    return rows


def _files(files: list[Any]) -> str:
    """Describe files in one line: how many there are, and their size if each has one."""
    count = "1 file" if len(files) == 1 else f"{len(files):,} files"
    sizes = [file[1] for file in files if isinstance(file, list) and len(file) > 1 and is_number(file[1])]
    return f"{count}, {megabytes(sum(sizes))} MB" if len(sizes) == len(files) else count
