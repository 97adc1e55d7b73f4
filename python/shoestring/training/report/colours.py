"""The colours of the reports and their plots, in a light and in a dark theme."""

from __future__ import annotations

# Colours by the part that they play, each in a light and in a dark theme. Text has a contrast of at least 4.5
# with the background, and a line or bar of at least 3. All light colours differ, since svg finds the
# part that a colour plays by its value.
COLOURS = {
    "paper": ("#ffffff", "#14171c"),
    "panel": ("#f4f6f9", "#1c2027"),
    "ink": ("#1f2430", "#e7eaf0"),
    "muted": ("#566072", "#a5aebd"),
    "line": ("#dde1e9", "#343b47"),
    "run-1": ("#2563b0", "#70abf0"),
    "run-2": ("#c4502c", "#f08c66"),
    "run-3": ("#2c7a58", "#5fc495"),
    "run-4": ("#8553a5", "#c79be0"),
    "run-5": ("#8a6812", "#d9b34f"),
    "run-6": ("#5d6675", "#a9b3c2"),
    "program": ("#8b94a4", "#747e8f"),
    "weights": ("#2a68b4", "#5c9de6"),
    "gradients": ("#5a90cc", "#9cc7f7"),
    "optimizer": ("#2f8260", "#55b88c"),
    "offload": ("#7b5a9f", "#b693da"),
    "activations": ("#b0730d", "#e0a840"),
    "buffers": ("#b23f6b", "#e883a8"),
}
PARTS = ("program", "weights", "gradients", "optimizer", "offload", "activations", "buffers")
RUN_COLOURS = 6
LIGHT = {part: light for part, (light, _) in COLOURS.items()}


def run_colour(number: int) -> str:
    """Return the name of the colour of run ``number``, counted from 0; colours repeat after RUN_COLOURS."""
    return f"run-{number % RUN_COLOURS + 1}"
