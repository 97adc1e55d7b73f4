"""Random situations for the planner, and a planner that tries everything."""

import itertools
import json
import random
from dataclasses import dataclass
from typing import Any

import torch

Json = dict[str, Any]


def plan(situation: Json, freedom: str = "exact", **fixed: str) -> Json:
    """Return the plan of the C++ planner as a dictionary."""
    text = json.dumps({"format": "shoestring.situation", "format_version": 1} | situation)
    result: Json = json.loads(torch.ops.shoestring._plan_training(text, freedom, fixed))
    return result


def random_block(rng: random.Random, names: list[str]) -> Json:
    """Return a block at one row. Times are multiples of 1/8 s, which floating-point numbers represent exactly."""
    size, forward = rng.randint(20, 120), rng.randint(1, 9) / 8
    least = rng.randint(1, size // 4)
    costs = {
        "keep": (size, 0.0),
        "recompute": (least, forward),
        "keep attention": (least + rng.randint(1, 10), rng.randint(1, 8) * forward / 8),
    }
    forward_bytes, backward_bytes = rng.randint(size // 2, size * 2), rng.randint(size // 2, size * 2)
    return {
        "forward_seconds": forward,
        "backward_seconds": rng.randint(1, 16) / 8,
        "gradient_bytes": 0,
        "choices": [
            {
                "name": name,
                "bytes": costs[name][0],
                "extra_seconds": costs[name][1],
                "link_bytes": 0,
                "forward_bytes": max(forward_bytes, costs[name][0]),
                "backward_bytes": max(backward_bytes, costs[name][0]),
            }
            for name in names
        ],
    }


def scaled(block: Json, rows: int, speed: float, gradient: int = 0) -> Json:
    """Return a block for so many rows. ``gradient``: bytes of gradients that its backward leaves behind."""
    choices = [
        choice
        | {name: choice[name] * rows for name in ("bytes", "forward_bytes", "backward_bytes")}
        | {"extra_seconds": choice["extra_seconds"] * rows * speed}
        for choice in block["choices"]
    ]
    for choice in choices:
        choice["backward_bytes"] += gradient
    times = {name: block[name] * rows * speed for name in ("forward_seconds", "backward_seconds")}
    return block | times | {"choices": choices, "gradient_bytes": gradient}


def optimizer_way(rng: random.Random, **given: Any) -> Json:
    return {
        "state": "8bit",
        "step_in_backward": False,
        "offload": "none",
        "freedom": "exact",
        "device_bytes": rng.randint(50, 200),
        "host_bytes": 0,
        "disk_bytes": 0,
        "step_bytes": rng.randint(0, 100),
        "gradient_bytes": 0,
        "sum_bytes": 0,
        "seconds": rng.randint(1, 8) / 8,
        "backward_seconds": 0.0,
        "sum_seconds": rng.randint(0, 4) / 8,
    } | given


def random_form(rng: random.Random, count: int, speed: float, **given: Any) -> Json:
    kinds = [random_block(rng, ["keep"]), random_block(rng, ["keep"])]
    names = ["keep", "recompute", "keep attention"][: rng.randint(2, 3)]
    kinds += [random_block(rng, names) for _ in range(2)]
    gradients = [rng.randint(0, 60) for _ in kinds]
    other_speed = speed * rng.choice([0.5, 0.75, 1.0, 1.25])  # of a backward that leaves its gradients
    order = [0, *(rng.choice([2, 3]) for _ in range(count)), 1]
    return {
        "precision": "fp32",
        "weights": "fp32",
        "adapters": "none",
        "quantize": "none",
        "freedom": "exact",
        "gradient_bytes": sum(gradients[kind] for kind in order),
        "load_bytes": rng.randint(0, 300),
        "saving_bytes": rng.randint(0, 300),
        "kinds": order,
        "passes": [
            {
                "rows": rows,
                "freed": [scaled(block, rows, speed) for block in kinds],
                "kept": [
                    scaled(block, rows, other_speed, gradient)
                    for block, gradient in zip(kinds, gradients, strict=True)
                ],
            }
            for rows in (1, 4)
        ],
        "optimizers": [
            optimizer_way(rng),
            optimizer_way(rng, state="fp32"),
            optimizer_way(
                rng,
                step_in_backward=True,
                gradient_bytes=rng.randint(1, 60),
                sum_bytes=rng.randint(50, 200),
                backward_seconds=rng.randint(1, 8) / 8,
            ),
            optimizer_way(rng, offload="nvme:D", device_bytes=8, host_bytes=40, disk_bytes=rng.randint(100, 300)),
        ],
        "places": [
            {
                "place": "none",
                "keep": 0,
                "tiles": {},
                "device_bytes": 400,
                "host_bytes": 0,
                "disk_bytes": 0,
                "seconds": 0.0,
            },
            {
                "place": "nvme:D",
                "keep": 0,
                "tiles": {"head": 64},
                "device_bytes": rng.randint(50, 200),
                "host_bytes": 20,
                "disk_bytes": 400,
                "seconds": rng.randint(1, 60) / 4,
            },
        ],
    } | given  # fmt: skip


def random_situation(rng: random.Random) -> Json:
    count = rng.randint(1, 3)
    return {
        "model": "m",
        "machine": "this",
        "blocks": [f"layers.{i}" for i in range(count)],
        "workspaces": [],
        "batch_size": rng.choice([1, 2, 4, 6]),
        "device_memory": None,
        "host_memory": None,
        "disk": None,
        "host_is_device": rng.random() < 0.5,
        "reserve_bytes": rng.randint(0, 500),
        "out_bytes_per_second": 0.0,
        "in_bytes_per_second": 0.0,
        "copy_share": 0.0,
        "prefetch": 1,
        "forms": [
            random_form(rng, count, 1.0),
            random_form(rng, count, rng.choice([0.25, 0.5, 2.0]), precision="bf16", freedom="rounding"),
        ],
    }


@dataclass(frozen=True)
class Tried:
    """A plan of the brute force: its memory by place, and the seconds of a batch."""

    peak: int
    host: int
    disk: int
    seconds: float

    def fits(self, situation: Json) -> bool:
        limits = [situation[name] for name in ("device_memory", "host_memory", "disk")]
        used = (self.peak, self.host, self.disk)
        return all(limit is None or size <= limit for size, limit in zip(used, limits, strict=True))


FREEDOMS = ("exact", "rounding", "method")


def everything(situation: Json, freedom: str) -> list[Tried]:
    """Return all plans of a situation, computed one by one, phase by phase."""
    tried = []
    batch = situation["batch_size"]
    for form in situation["forms"]:
        if FREEDOMS.index(form["freedom"]) > FREEDOMS.index(freedom):
            continue
        one = next(each for each in form["passes"] if each["rows"] == 1)
        blocks = [one["freed"][kind] for kind in form["kinds"]]
        gradients = [one["kept"][kind]["gradient_bytes"] for kind in form["kinds"]]
        for rows in (rows for rows in range(1, batch + 1) if batch % rows == 0):
            for way, place in itertools.product(form["optimizers"], form["places"]):
                for chosen in itertools.product(*(block["choices"] for block in blocks)):
                    tried.append(_try(situation, form, way, place, rows, blocks, gradients, chosen))
    return tried


def _try(
    situation: Json,
    form: Json,
    way: Json,
    place: Json,
    rows: int,
    blocks: list[Json],
    gradients: list[int],
    chosen: tuple[Json, ...],
) -> Tried:
    passes = situation["batch_size"] // rows
    resident = situation["reserve_bytes"] + place["device_bytes"] + way["device_bytes"]
    if situation["host_is_device"]:
        resident += way["host_bytes"] + place["host_bytes"]
    peaks = [situation["reserve_bytes"] + place["device_bytes"] + form["load_bytes"]]
    peaks.append(resident + form["saving_bytes"])
    peaks.append(resident + way["step_bytes"] + (0 if way["step_in_backward"] else form["gradient_bytes"]))
    grown = [0]  # gradients at the begin of each block's backward, in the last micro-batch
    for gradient in reversed(gradients[1:]):
        grown.append(grown[-1] + gradient)
    grown.reverse()
    held = 0
    for i, choice in enumerate(chosen):
        if way["step_in_backward"]:
            before = after = way["gradient_bytes"] + (way["sum_bytes"] if passes > 1 else 0)
        elif passes > 1:
            before = after = form["gradient_bytes"]
        else:
            before, after = 0, grown[i] + gradients[i]
        peaks.append(resident + held + choice["forward_bytes"] * rows + before)
        peaks.append(resident + held + choice["backward_bytes"] * rows + after)
        held += choice["bytes"] * rows
    seconds = sum(
        rows * (block["forward_seconds"] + block["backward_seconds"] + choice["extra_seconds"])
        for block, choice in zip(blocks, chosen, strict=True)
    )
    if passes == 1 and not way["step_in_backward"]:
        freed, kept = (form["passes"][0][name][0]["forward_seconds"] for name in ("freed", "kept"))
        seconds *= kept / freed  # the passes that leave gradients differ by one factor
    total = passes * max(seconds, place["seconds"]) + (passes - 1) * way["sum_seconds"]
    total += way["seconds"] + way["backward_seconds"]
    return Tried(
        max(peaks), way["host_bytes"] + place["host_bytes"], way["disk_bytes"] + place["disk_bytes"], total
    )
