"""Find the plans that are measured beside the fastest one: the next best, and the plainest."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping

import torch

from shoestring.core.errors import InputError
from shoestring.planning.situation import Json

Levers = Mapping[str, str]
LONGEST = 2.0  # seconds of all searches
# The choices of a plan that are compared, and those of plain training. "precision" is "as the weights" for weights
# that are not fp32.
PLAIN = {
    "precision": "fp32", "optimizer_state": "8bit", "step_in_backward": "false", "offload": "none", "activations": "keep",
}  # fmt: skip

# Levers that the model has decided before it is measured, and those that may have one value in all forms.
OF_THE_MODEL = {"weights_place", "keep", "tiles"}
OF_FORMS = ("precision", "weights", "adapters", "quantize")


class NoPlanError(InputError):
    """No plan fits. The message says the least budgets with which one does, or which freedom has one."""


def search(situation: Json, freedom: str, fixed: Levers) -> Json:
    """Return the fastest plan that C++ finds.

    Raises:
        NoPlanError: no plan fits.
        ValueError: a choice that is given does not exist.
    """
    text = json.dumps({"format": "shoestring.situation", "format_version": 1} | situation)
    try:
        found: Json = json.loads(torch.ops.shoestring._plan_training(text, freedom, dict(fixed)))
    except ValueError as error:
        # Other errors name an argument.
        if str(error).startswith("plan_training: expected "):
            raise NoPlanError(error) from None
        raise
    # Nothing else was measured, so a reason could only say that no plan fits without them.
    decided = OF_THE_MODEL | {
        lever for lever in OF_FORMS if len({form[lever] for form in situation["forms"]}) == 1
    }
    found["reasons"] = [
        reason for reason in found["reasons"] if reason["lever"] not in decided - fixed.keys()
    ]
    return found


def others(situation: Json, freedom: str, given: Levers, best: Json) -> tuple[Json | None, Json | None]:
    """Return the next best plan after the fastest one, and the plainest that fits; None if it is another of the three.

    The next best plan differs in a choice of the micro-batch, the precision or the optimizer, or in the treatment of a
    block.
    """
    began = time.perf_counter()
    plain = next(_plain(situation, freedom, given), None)
    found = [] if plain is None or _same(plain, best) else [plain]
    for smaller, fixed in _changes(situation, given, best):
        if time.perf_counter() - began > LONGEST:
            break
        found += _fitting(smaller, freedom, fixed)
    different = [one for one in found if not _same(one, best)]
    second = min(different, key=lambda one: float(one["seconds"]), default=None)
    if second is plain:
        second = None
    return second, None if plain is None or _same(plain, best) else plain


def _plain(situation: Json, freedom: str, given: Levers) -> Iterator[Json]:
    """Yield the plainest plans that fit, from the largest micro-batch to the smallest."""
    plain = {
        name: value
        for name, value in PLAIN.items()
        if name != "precision" or value in {form["precision"] for form in situation["forms"]}
    }
    for rows in reversed(_micro_batches(situation)):
        yield from _fitting(situation, freedom, plain | {"micro_batch": str(rows)} | dict(given))


def _changes(situation: Json, given: Levers, best: Json) -> Iterator[tuple[Json, Levers]]:
    """Yield situations and choices with which the fastest plan is another one."""
    yield situation | {"device_memory": int(best["peak_bytes"]) - 1}, given
    ways = [way for form in situation["forms"] for way in form["optimizers"]]
    values: dict[str, list[str]] = {
        "micro_batch": [str(rows) for rows in reversed(_micro_batches(situation))],
        "precision": [form["precision"] for form in situation["forms"]],
        "activations": ["keep", "recompute"],
        "optimizer_state": [way["state"] for way in ways],
        "offload": [way["offload"] for way in ways],
        "step_in_backward": ["false", "true"],
    }
    for lever, names in values.items():
        if lever not in given:
            now = str(best.get(lever)).lower() if lever == "step_in_backward" else str(best.get(lever))
            for value in dict.fromkeys(names):
                if value != now:
                    yield situation, {**given, lever: value}


def _fitting(situation: Json, freedom: str, fixed: Levers) -> Iterator[Json]:
    """Yield the fastest plan if one fits."""
    try:
        yield search(situation, freedom, fixed)
    except ValueError:
        return


def _micro_batches(situation: Json) -> list[int]:
    batch: int = situation["batch_size"]
    return [rows for rows in range(1, batch + 1) if batch % rows == 0]


def _same(one: Json, other: Json) -> bool:
    """Return whether two plans train in the same way."""

    def way(plan: Json) -> tuple[object, ...]:
        return (
            plan["micro_batch"],
            *(plan[name] for name in PLAIN if name != "activations"),
            *(block["treatment"] for block in plan["checkpoints"]),
        )

    return way(one) == way(other)
