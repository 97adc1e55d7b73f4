"""Draw the plots of the reports: curves of a run, memory by part, and speed.

Each plot exists as axes of a PNG, in the light colours, and as an SVG for a page of HTML, whose colours follow
the page (``svg``).
"""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoestring.training.report.colours import LIGHT, PARTS, run_colour
from shoestring.training.report.svg import inline_svg

if TYPE_CHECKING:
    from shoestring.training.report.write import FinishedRun

INK, MUTED, LINE = LIGHT["ink"], LIGHT["muted"], LIGHT["line"]
WINDOW = 20  # the moving average of the training loss spans about 1/WINDOW of the steps of a run
POINTS = 400  # most points of a curve in an SVG; one pixel shows no more
MARKS = 60  # most marks of validations, for the same reason
LABEL = 36  # most characters of a run's name in a plot
LARGEST = 3.4e38  # the largest number of fp32
PART_LABEL = 16  # most characters of the name of a part of memory
WIDTH = 400  # width of an SVG in CSS pixels, at which its text has 11 pixels


@dataclass(frozen=True)
class Key:
    """One entry of a legend: a colour of COLOURS, a mark ("line", "dashed", "dot", "box" or "tick"), and a text."""

    colour: str
    mark: str
    text: str


@dataclass(frozen=True)
class Plot:
    """A plot for a page of HTML: its title, an ``<svg>`` element, and the entries of its legend."""

    title: str
    svg: str
    legend: tuple[Key, ...] = ()


def shorten(name: str, most: int = LABEL) -> str:
    """Return a name for a plot: on one line, without control characters, and with an ellipsis if it is long."""
    name = "".join(letter if letter.isprintable() else "\ufffd" for letter in name)
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[:half]}…{name[-half:]}"


def legend_label(name: str, most: int = LABEL) -> str:
    """Return a name for a legend of matplotlib, which leaves out labels that begin with an underscore."""
    label = shorten(name, most)
    return f" {label}" if label.startswith("_") else label


def smooth(values: list[float]) -> list[float]:
    """Return the exponential moving average of ``values``, with bias correction as in Adam."""
    past = 1 - 1 / max(1.0, len(values) / WINDOW)
    mean, smoothed = 0.0, []
    for count, value in enumerate(values, 1):
        mean = past * mean + (1 - past) * value
        smoothed.append(mean / (1 - past**count))
    return smoothed


def thin(steps: list[float], values: list[float], most: int = POINTS) -> tuple[list[float], list[float]]:
    """Return at most ``most`` points of a curve: of each group of neighbours, the least and the largest value.

    The first and the last point of the curve are always kept.
    """
    if len(values) <= most:
        return steps, values
    groups = max(1, most // 2 - 1)
    kept_points = {0, len(values) - 1}
    for group in range(groups):
        points = range(len(values) * group // groups, len(values) * (group + 1) // groups)
        kept_points |= {min(points, key=values.__getitem__), max(points, key=values.__getitem__)}
    order = sorted(kept_points)
    return [steps[point] for point in order], [values[point] for point in order]


def _figure(width: float, height: float, dpi: int = 144) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _axes(height: int) -> Any:
    """Return the axes of a figure for an SVG of WIDTH by ``height`` CSS pixels."""
    return _figure(WIDTH / 72, height / 72, 72).subplots()


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A letter that matplotlib's font lacks becomes a box in the PNG. The page shows it.
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _prepare(axes: Any, title: str = "", x: str = "", y: str = "", grid: str = "y", size: float = 9) -> None:
    axes.set_title(title, loc="left", fontsize=size + 2, color=INK, fontweight="bold")
    axes.set_xlabel(x, fontsize=size, color=MUTED)
    axes.set_ylabel(y, fontsize=size, color=MUTED)
    axes.tick_params(labelsize=size, colors=MUTED, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.grid(axis=grid, color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)


def _whole_steps(axes: Any) -> None:
    """Mark only whole steps on the horizontal axis."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.02)


def _series(run: FinishedRun, name: str) -> tuple[list[float], list[float]]:
    """Return the steps that have a finite value called ``name``, and these values.

    The gradient norm of a step that loss scaling skipped is not finite.
    """
    rows = [row for row in run.metrics if abs(row.get(name, math.inf)) <= LARGEST]
    return [row["step"] for row in rows], [row[name] for row in rows]


def _text(axes: Any, x: float, y: float, text: str, size: float, colour: str = INK, **more: Any) -> None:
    # Names are no mathematical formulas, although they may have two dollar signs.
    axes.text(x, y, text, va="center", fontsize=size, color=colour, parse_math=False, **more)


def _draw_losses(axes: Any, run: FinishedRun, colour: str, label: str = "", dashed: bool = False) -> None:
    steps, losses = _series(run, "loss")
    over = 3 if dashed else 2  # draw dashed curves on top, so that both of two equal curves are visible
    axes.plot(*thin(steps, losses), color=colour, alpha=0.3, linewidth=0.8)
    axes.plot(
        *thin(steps, smooth(losses)),
        color=colour,
        linewidth=1.8,
        label=label or "training",
        linestyle=(0, (4, 4)) if dashed else "-",
        zorder=over,
    )
    points = _series(run, "val_loss")
    if points[0]:
        marker = {"marker": "D", "markerfacecolor": "none"} if dashed else {"marker": "o"}
        axes.plot(
            *thin(*points, MARKS),
            color=colour,
            markersize=5,
            linewidth=0,
            label=f"{label} validation".strip(),
            zorder=over,
            **marker,
        )


def _legend(axes: Any, **more: Any) -> None:
    legend = axes.legend(frameon=False, **more)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _draw_parts(axes: Any, run: FinishedRun, size: float) -> None:
    """Draw one bar per part for its measured memory, and a mark at the memory that its formula gives."""
    parts = run.summary["memory"]
    values = [part["measured"] / 1e6 for part in parts]
    formulas = [(part["expected"] or 0) / 1e6 for part in parts]
    most = max([*values, *formulas, 1e-6])
    for row, (part, value) in enumerate(zip(parts, values)):
        colour = LIGHT[part["name"]] if part["name"] in PARTS else MUTED
        axes.barh(row, value, 0.56, color=colour)
        end = value
        if part["expected"] is not None:
            expected = part["expected"] / 1e6
            axes.plot([expected, expected], [row - 0.4, row + 0.4], color=INK, linewidth=1.6)
            end = max(end, expected)
        _text(axes, end + most * 0.025, row, megabytes(part["measured"]), size)
    axes.set_yticks(
        range(len(parts)), [shorten(part["name"], PART_LABEL) for part in parts], parse_math=False
    )
    axes.set_xlim(0, most * 1.2)
    axes.xaxis.set_major_formatter("{x:,.0f}" if most > 5 else "{x:g}")
    axes.invert_yaxis()


def part_names(runs: list[FinishedRun]) -> list[str]:
    """Return the names of all parts of memory of some runs, in the order of PARTS, unknown names at the end."""
    names = dict.fromkeys(part["name"] for run in runs for part in run.summary["memory"])
    return [*(name for name in PARTS if name in names), *(name for name in names if name not in PARTS)]


def _draw_stacks(axes: Any, runs: list[FinishedRun], size: float, above: bool = False) -> None:
    """Draw a bar per run, stacked by part; ``above`` writes the name above the bar instead of beside it."""
    starts, colours = [0.0] * len(runs), {}
    for part in part_names(runs):
        colours[part] = LIGHT[part] if part in PARTS else MUTED
        widths = [
            sum(each["measured"] / 1e6 for each in run.summary["memory"] if each["name"] == part)
            for run in runs
        ]
        axes.barh(
            range(len(runs)),
            widths,
            0.4 if above else 0.6,
            left=starts,
            color=colours[part],
            label=legend_label(part, PART_LABEL),
            edgecolor=LIGHT["paper"],
            linewidth=0.6,
        )
        starts = [start + width for start, width in zip(starts, widths)]
    totals = [run.summary["peak_memory"] for run in runs]
    _label_bars(axes, runs, starts, [megabytes(total) for total in totals], size, above)


def _draw_speeds(axes: Any, runs: list[FinishedRun], size: float, above: bool = False) -> None:
    rates = [run.summary["tokens_per_second"] for run in runs]
    colours = [LIGHT[run_colour(number)] for number in range(len(runs))]
    axes.barh(range(len(runs)), rates, 0.4 if above else 0.6, color=colours)
    _label_bars(axes, runs, rates, [f"{rate:,.0f}" for rate in rates], size, above)


def _label_bars(
    axes: Any, runs: list[FinishedRun], ends: list[float], values: list[str], size: float, above: bool
) -> None:
    """Write the value behind each bar, and the name of the run beside the bar or above it."""
    from matplotlib.ticker import MaxNLocator

    most = max([*ends, 1e-6])
    for row, (run, end, value) in enumerate(zip(runs, ends, values)):
        _text(axes, end + most * 0.02, row, value, size)
        if above:
            _text(axes, 0, row - 0.42, shorten(run.name), size)
    axes.set_xlim(0, most * 1.25)
    axes.set_ylim(len(runs) - 0.6, -0.7 if above else -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    names = ["" if above else shorten(run.name) for run in runs]
    axes.set_yticks(range(len(runs)), names, parse_math=False)


def megabytes(count: float | None) -> str:
    """Format bytes as MB (10^6 bytes), with at most three digits below 100 MB; and None as a dash."""
    if count is None:
        return "–"
    size = count / 1e6
    digits = next(
        (digits for least, digits in ((99.95, 0), (9.995, 1), (0.9995, 2)) if abs(size) >= least), 3
    )
    return f"{size:,.{digits}f}" if size else "0"


def draw_run(run: FinishedRun) -> bytes:
    """Draw loss curves, and beside them the computed and the measured memory of each part; return a PNG."""
    figure = _figure(11, 4.4)
    left, right = figure.subplots(1, 2, width_ratios=[1.1, 1])
    _prepare(left, "Loss", "step", "nats per token")
    _draw_losses(left, run, LIGHT[run_colour(0)])
    _legend(left, fontsize=9)
    _whole_steps(left)
    title = f"Memory at the peak, {megabytes(run.summary['peak_memory'])} MB"
    _prepare(right, title, "MB as measured; black marks: by formula", grid="x")
    _draw_parts(right, run, 8)
    return _png(figure)


def draw_frontier(points: list[tuple[int, float]], chosen: int) -> bytes:
    """Draw speed against the memory of plans, in bytes and tokens/s, and mark the one with ``chosen`` bytes; a PNG."""
    figure = _figure(6, 4)
    axes = figure.subplots()
    _prepare(axes, "Fastest plans", "peak memory, MB", "tokens/s")
    colour = LIGHT[run_colour(0)]
    axes.step([size / 1e6 for size, _ in points], [speed for _, speed in points], where="post", color=colour)
    marked = [(size, speed) for size, speed in points if size == chosen]
    axes.scatter([size / 1e6 for size, _ in marked], [speed for _, speed in marked], color=colour)
    return _png(figure)


def draw_comparison(runs: list[FinishedRun]) -> bytes:
    """Draw loss curves, memory stacked by part, and speed of all runs; return a PNG."""
    figure = _figure(13, 4.4 + 0.25 * max(0, len(runs) - 3))
    curves, memory, speed = figure.subplots(1, 3, width_ratios=[1.25, 1.15, 0.8])
    _prepare(curves, "Loss", "step", "nats per token")
    for number, run in enumerate(runs):
        _draw_losses(
            curves,
            run,
            LIGHT[run_colour(number)],
            legend_label(run.name),
            dashed=bool(run.summary["baseline"]),
        )
    _legend(curves, fontsize=8)
    _whole_steps(curves)
    _prepare(memory, "Peak memory, MB", grid="x")
    _draw_stacks(memory, runs, 9)
    _legend(memory, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.45, -0.08))
    _prepare(speed, "Tokens/s (median)", grid="x")
    _draw_speeds(speed, runs, 9)
    speed.set_yticks(range(len(runs)), [""] * len(runs))
    return _png(figure)


def _from_to(name: str, steps: list[float], values: list[float], form: str) -> str:
    """Describe a curve in words: its first and last value, and its least and largest one."""
    first, last = f"{values[0]:{form}}", f"{values[-1]:{form}}"
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return f"{name}: {first} at step {steps[0]:g}, {last} at step {steps[-1]:g}, least {low}, largest {high}."


def _losses_in_words(run: FinishedRun, name: str = "") -> str:
    prefix = f"{name}, " if name else ""
    words = [_from_to(f"{prefix}training loss", *_series(run, "loss"), ".4g")]
    if any("val_loss" in row for row in run.metrics):
        words.append(_from_to(f"{prefix}validation loss", *_series(run, "val_loss"), ".4g"))
    return " ".join(words)


def loss_plot(runs: list[FinishedRun], name: str) -> Plot:
    """Plot training and validation loss of one or several runs; ``name`` is unique within the page."""
    axes = _axes(260)
    _prepare(axes, "", "step", size=11)
    legend = []
    for number, run in enumerate(runs):
        dashed = bool(run.summary["baseline"]) and len(runs) > 1
        _draw_losses(axes, run, LIGHT[run_colour(number)], dashed=dashed)
        text = "training, moving average" if len(runs) == 1 else run.name
        legend.append(Key(run_colour(number), "dashed" if dashed else "line", text))
    if any("val_loss" in row for run in runs for row in run.metrics):
        legend.append(Key(run_colour(0) if len(runs) == 1 else "muted", "dot", "validation"))
    _whole_steps(axes)
    words = [_losses_in_words(run, "" if len(runs) == 1 else run.name) for run in runs]
    return Plot("Loss, nats per token", inline_svg(axes.figure, name, " ".join(words)), tuple(legend))


def curve_plots(run: FinishedRun, name: str) -> list[Plot]:
    """Plot loss, gradient norm, tokens/s and memory of each step of a run."""
    plots = [loss_plot([run], f"{name}-loss")]
    for key, title, colour, form in (
        ("grad_norm", "Gradient norm", "run-4", ".3g"),
        ("tokens_per_second", "Tokens/s of each step", "run-3", ",.0f"),
    ):
        axes, (steps, values) = _axes(260), _series(run, key)
        if not values:
            continue
        _prepare(axes, "", "step", size=11)
        axes.plot(*thin(steps, values), color=LIGHT[colour], linewidth=1.4)
        axes.set_ylim(0, max([*values, 1e-30]) * 1.08)
        _whole_steps(axes)
        axes.yaxis.set_major_formatter("{x:,g}")
        words = _from_to(title, steps, values, form)
        plots.append(Plot(title, inline_svg(axes.figure, f"{name}-{key}", words)))
    return [*plots, _memory_curve(run, f"{name}-memory")]


def _memory_curve(run: FinishedRun, name: str) -> Plot:
    """Plot the memory in use after each step, of the process and of an accelerator."""
    axes = _axes(260)
    _prepare(axes, "", "step", size=11)
    legend, words, most = [], [], 1e-6
    for key, text, colour in (("rss", "process", "run-6"), ("device", run.summary.get("device"), "run-2")):
        steps, values = _series(run, key)
        if steps:
            values = [value / 1e6 for value in values]
            axes.plot(*thin(steps, values), color=LIGHT[colour], linewidth=1.4)
            legend.append(Key(colour, "line", str(text)))
            words.append(_from_to(f"MB of {text}", steps, values, ",.0f"))
            most = max(most, *values)
    axes.set_ylim(0, most * 1.08)
    _whole_steps(axes)
    axes.yaxis.set_major_formatter("{x:,g}")
    return Plot(
        "Memory in use after each step, MB",
        inline_svg(axes.figure, name, " ".join(words)),
        tuple(legend) if len(legend) > 1 else (),
    )


def parts_plot(run: FinishedRun, name: str) -> Plot:
    """Plot the measured memory of each part, and that of its formula."""
    parts = run.summary["memory"]
    axes = _axes(40 + 34 * max(1, len(parts)))
    _prepare(axes, grid="x", size=11)
    _draw_parts(axes, run, 11)
    words = ", ".join(
        f"{part['name']} {megabytes(part['measured'])} MB"
        + ("" if part["expected"] is None else f" (by formula {megabytes(part['expected'])})")
        for part in parts
    )
    legend = (Key("muted", "box", "measured"), Key("ink", "tick", "by formula"))
    return Plot("Memory at the peak, MB", inline_svg(axes.figure, name, f"Memory by part: {words}."), legend)


def speed_plot(runs: list[FinishedRun], name: str) -> Plot:
    """Plot the median of tokens/s of each run as a bar."""
    axes = _axes(34 + 46 * len(runs))
    _prepare(axes, grid="x", size=11)
    _draw_speeds(axes, runs, 11, above=True)
    words = ", ".join(f"{run.name} {run.summary['tokens_per_second']:,.0f}" for run in runs)
    return Plot("Tokens/s, median over steps", inline_svg(axes.figure, name, f"Tokens/s: {words}."))


def stacked_plot(runs: list[FinishedRun], name: str) -> Plot:
    """Plot the peak memory of each run as a bar that is stacked by part."""
    axes = _axes(34 + 46 * len(runs))
    _prepare(axes, grid="x", size=11)
    _draw_stacks(axes, runs, 11, above=True)
    words = ", ".join(f"{run.name} {megabytes(run.summary['peak_memory'])}" for run in runs)
    legend = tuple(Key(part if part in PARTS else "muted", "box", part) for part in part_names(runs))
    return Plot("Peak memory, MB", inline_svg(axes.figure, name, f"Peak memory in MB: {words}."), legend)
