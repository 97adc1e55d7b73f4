"""Draw the figures of docs/examples/glyphs.md from the JSON file that the other scripts have written.

python examples/python/glyphs/glyph_plot.py docs/examples/glyphs.json
"""

from __future__ import annotations

import argparse
import base64
import io
import json
from pathlib import Path
from typing import Any

import matplotlib
from glyph_diffusion import SHOWN
from matplotlib.figure import Figure
from PIL import Image

matplotlib.rcParams["svg.hashsalt"] = "glyphs"  # equal figures have equal files
COLOURS = {"uniform": "tab:orange", "min_snr": "tab:blue"}
NAMES = {"uniform": "uniform weights", "min_snr": "Min-SNR weights"}


def classifier_figure(results: dict[str, Any]) -> Figure:
    """Draw the last accuracy of each run and seed, some accuracies during training, and the time of a step."""
    figure = Figure((11, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    accuracy, times = results["accuracy"], results["times"]["step_milliseconds"]
    names = list(times)
    for row, name in enumerate(names):
        last = [100 * curve[-1][-1] for curve in accuracy.get(name, {}).values()]
        if not last:
            continue
        left.plot(last, [row] * len(last), "o", color="tab:blue", alpha=0.5)
        left.plot(sum(last) / len(last), row, "|", color="tab:blue", markersize=18, markeredgewidth=2)
    for name in ("plain", "sam", "lawa", "all"):
        if name in accuracy:
            points = [[100 * point[-1] for point in curve] for curve in accuracy[name].values()]
            means = [sum(point) / len(point) for point in zip(*points, strict=True)]
            middle.plot([25, 50, 75, 100], means, "o-", label=name, markersize=3)
    right.barh(range(len(names)), list(times.values()), color="tab:gray")
    for axes in (left, right):
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
    left.set_xlabel("accuracy at the end (%): seeds and mean")
    middle.set_xlabel("share of the steps (%)")
    middle.set_ylabel("accuracy (%)")
    middle.legend(fontsize=8)
    right.set_xlabel("ms per step of 64 glyphs")
    for axes in (left, middle, right):
        axes.grid(axis="both" if axes is middle else "x", alpha=0.3)
    return figure


def diffusion_figure(results: dict[str, Any]) -> Figure:
    """Draw the curves of all seeds above, and the pictures of the first seed below."""
    figure = Figure((9, 6), layout="constrained")
    cells = figure.add_gridspec(2, 3, height_ratios=[1.1, 1])
    curves = [figure.add_subplot(cells[0, column]) for column in range(3)]
    for number, seed in enumerate(results["seeds"].values()):
        for name, colour in COLOURS.items():
            run, label = seed[name], NAMES[name] if number == 0 else None
            for axes, loss in zip(curves, ("uniform", "min_snr"), strict=False):
                axes.plot(run["steps"][3:], run[loss][3:], color=colour, label=label, linewidth=1)
            shown = run["steps"][3::4]
            curves[2].plot(shown, [100 * share for share in run["readable"]], color=colour, linewidth=1)
    for axes, title in zip(
        curves, ("loss, uniform weights", "loss, Min-SNR weights", "readable samples (%)"), strict=True
    ):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("steps")
        axes.grid(alpha=0.3)
    curves[0].legend(fontsize=8)
    picture = Image.open(io.BytesIO(base64.b64decode(next(iter(results["seeds"].values()))["pictures"])))
    axes = figure.add_subplot(cells[1, :])
    axes.imshow(picture, cmap="gray", aspect="equal")
    axes.set_yticks([32, 96, 160, 224], ["held-out font", "autoencoder", *(NAMES[name] for name in COLOURS)])
    axes.set_xticks([64 * i + 32 for i in range(len(SHOWN))], list(SHOWN))
    axes.tick_params(length=0, labelsize=8)
    return figure


def main(arguments: list[str] | None = None) -> list[Path]:
    """Write the figures next to the JSON file, and return their paths."""
    parser = argparse.ArgumentParser(description="Draws the figures of the glyph examples.")
    parser.add_argument("json", type=Path)
    path = parser.parse_args(arguments).json
    results, written = json.loads(path.read_text()), []
    for part, draw in (("classifier", classifier_figure), ("diffusion", diffusion_figure)):
        if part in results:
            written.append(path.with_name(f"{path.stem}_{part}.svg"))
            draw(results[part]).savefig(written[-1], metadata={"Date": None})
    return written


if __name__ == "__main__":
    main()
