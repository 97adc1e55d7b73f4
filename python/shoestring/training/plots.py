"""Draw the plots of the reports: loss curves, memory by part, and speed."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoestring.training.report import Run

RUN_COLOURS = ["#2563b0", "#d1603d", "#3d8f6b", "#8a5aa8", "#b08a2e", "#5b6472"]
PART_COLOURS = {
    "program": "#c9ced8", "weights": "#2563b0", "gradients": "#6aa5e0", "optimizer": "#3d8f6b",
    "activations": "#e0a63c", "buffers": "#d1603d",
}  # fmt: skip
INK, FAINT = "#1f2430", "#e3e6ec"
WINDOW = 20  # the moving average of the training loss spans about 1/WINDOW of the steps of a run


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _prepare(axes: Any, title: str, x: str = "", y: str = "", grid: str = "y") -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold")
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.tick_params(labelsize=9, colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.grid(axis=grid, color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)


def smooth(values: list[float]) -> list[float]:
    """Return the exponential moving average of ``values``, with bias correction as in Adam."""
    past = 1 - 1 / max(1.0, len(values) / WINDOW)
    mean, smoothed = 0.0, []
    for count, value in enumerate(values, 1):
        mean = past * mean + (1 - past) * value
        smoothed.append(mean / (1 - past**count))
    return smoothed


def _curves(axes: Any, run: Run, colour: str, label: str = "", dashed: bool = False) -> None:
    steps = [row["step"] for row in run.metrics]
    losses = [row["loss"] for row in run.metrics]
    over = 3 if dashed else 2  # draw dashed curves on top, so that both of two equal curves are visible
    axes.plot(steps, losses, color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(
        steps,
        smooth(losses),
        color=colour,
        linewidth=1.8,
        label=label or "training",
        linestyle=(0, (4, 4)) if dashed else "-",
        zorder=over,
    )
    val = [(row["step"], row["val_loss"]) for row in run.metrics if "val_loss" in row]
    if val:
        marker = {"marker": "D", "markerfacecolor": "none"} if dashed else {"marker": "o"}
        axes.plot(
            *zip(*val),
            color=colour,
            markersize=5,
            linewidth=0,
            label=f"{label} validation".strip(),
            zorder=over,
            **marker,
        )


def draw_run(run: Run) -> bytes:
    """Draw loss curves, and beside them the computed and the measured memory of each part; return a PNG."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(11, 4.4)
    left, right = figure.subplots(1, 2, width_ratios=[1.1, 1])
    _prepare(left, "Loss", "step", "nats a token")
    _curves(left, run, RUN_COLOURS[0])
    left.legend(frameon=False, fontsize=9)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    parts = run.summary["memory"]
    _prepare(right, f"Memory: peak of the process {run.summary['peak_memory'] / 1e6:,.0f} MB", "MB", grid="x")
    places = range(len(parts))
    expected = [(part["expected"] or 0) / 1e6 for part in parts]
    measured = [part["measured"] / 1e6 for part in parts]
    colours = [PART_COLOURS.get(part["name"], FAINT) for part in parts]
    right.barh([place + 0.2 for place in places], measured, 0.38, color=colours)
    right.barh(
        [place - 0.2 for place in places],
        expected,
        0.38,
        color="white",
        edgecolor=colours,
        hatch="////",
        linewidth=0.8,
    )
    most = max([*expected, *measured, 1])
    for place, formula, value, part in zip(places, expected, measured, parts):
        right.text(value + most * 0.01, place + 0.2, f"{value:,.0f}", va="center", fontsize=8, color=INK)
        if part["expected"] is not None:
            right.text(
                formula + most * 0.01,
                place - 0.2,
                f"{formula:,.0f} by formula",
                va="center",
                fontsize=8,
                color="#6b7280",
            )
    right.set_yticks(list(places), [part["name"] for part in parts])
    right.set_xlim(0, most * 1.25)
    right.xaxis.set_major_formatter("{x:,.0f}")
    right.invert_yaxis()
    return _png(figure)


def draw_comparison(runs: list[Run]) -> bytes:
    """Draw loss curves, memory stacked by part, and speed of all runs; return a PNG."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(13, 4.4 + 0.25 * max(0, len(runs) - 3))
    curves, memory, speed = figure.subplots(1, 3, width_ratios=[1.25, 1.15, 0.8])
    _prepare(curves, "Loss", "step", "nats a token")
    for number, run in enumerate(runs):
        _curves(
            curves, run, RUN_COLOURS[number % len(RUN_COLOURS)], run.name, dashed=bool(run.summary["plain"])
        )
    curves.legend(frameon=False, fontsize=8)
    curves.xaxis.set_major_locator(MaxNLocator(integer=True))
    names = [run.name for run in runs]
    places = list(range(len(runs)))
    _prepare(memory, "Peak memory, MB", grid="x")
    starts = [0.0] * len(runs)
    for part in PART_COLOURS:
        widths = [
            next((p["measured"] / 1e6 for p in run.summary["memory"] if p["name"] == part), 0.0)
            for run in runs
        ]
        memory.barh(places, widths, 0.6, left=starts, color=PART_COLOURS[part], label=part)
        starts = [start + width for start, width in zip(starts, widths)]
    for place, total in zip(places, starts):
        memory.text(total + max(starts) * 0.01, place, f"{total:,.0f}", va="center", fontsize=9, color=INK)
    memory.set_xlim(0, max(starts) * 1.15)
    memory.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.45, -0.08))
    _prepare(speed, "Tokens/s (median)", grid="x")
    rates = [run.summary["tokens_per_second"] for run in runs]
    speed.barh(places, rates, 0.6, color=[RUN_COLOURS[i % len(RUN_COLOURS)] for i in places])
    for place, rate in zip(places, rates):
        speed.text(rate + max(rates) * 0.02, place, f"{rate:,.0f}", va="center", fontsize=9, color=INK)
    speed.set_xlim(0, max(rates) * 1.25)
    for axes in (memory, speed):
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_yticks(places, names if axes is memory else [""] * len(names))
        axes.invert_yaxis()
    return _png(figure)
