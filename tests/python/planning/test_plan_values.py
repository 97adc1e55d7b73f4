"""Test that plans and situations with wrong values are refused in one line, which names the field."""

from __future__ import annotations

import copy
import functools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shoestring
from planning.situations import Json, plan, random_situation

Place = tuple[str | int, ...]
# A field of a plan, a wrong value, and the end of the message.
PLANS: list[tuple[Place, Any, str]] = [
    (("freedom",), "x", ".freedom: expected exact | rounding | method, received x"),
    (("freedom",), "x\ny" + 40 * "é", ".freedom: expected exact | rounding | method, received x?y" + 18 * "é"),
    (("micro_batch",), 2**62, ".accumulate: expected at most 1048576 rows in a batch, received 4 micro-batches of "),
    (("precision",), "fp8", ".precision: expected fp32 | tf32 | bf16 | fp16 | as the weights, received fp8"),
    (("weights",), "int3", ".weights: expected fp32 | bf16 | bf16-stochastic | "),
    (("adapters",), "dora", ".adapters: expected none | lora, received dora"),
    (("quantize",), "nf5", ".quantize: expected none | nf4 | fp4 | int4 | int8, received nf5"),
    (("optimizer_state",), "2bit", ".optimizer_state: expected 8bit | 4bit | bf16 | fp32, received 2bit"),
    (("offload",), "tape", ".offload: expected none | cpu | stream | nvme:DIR, received tape"),
    (("offload",), "nvme:", ".offload: expected none | cpu | stream | nvme:DIR, received nvme:"),
    (("weights_place",), "stream", ".weights_place: expected none | cpu | nvme:DIR, received stream"),
    (("keep",), -1, ".keep: expected 0 to 2^52, received -1"),
    (("keep",), 5, ".keep: expected 0, since weights_place is none, received 5"),
    (("tiles",), [], ".tiles: expected an object, received array"),
    (("tiles",), {"": 1}, ".tiles: expected names of layers, received an empty one"),
    (("tiles",), {"head": 0}, ".tiles.head: expected 1 to 2^52 rows of a tile, received 0"),
    (("tiles",), {"h\nead": 1.5}, ".tiles.h?ead: expected a whole number below 2^63, received number"),
    (("workspace_mb",), 2**21, ".workspace_mb: expected 0 to 1048576, received 2097152"),
    (("checkpoints", 0, "block"), "", ".checkpoints: expected names of blocks, received an empty one"),
    (("checkpoints", 0, "block"), "layers.1", ".checkpoints: expected each block once, received layers.1 twice"),
    (("checkpoints", 1, "pending_bytes"), -2, ".checkpoints[1].pending_bytes: expected 0 to 2^52, received -2"),
    (("checkpoints", 1, "link_bytes"), 2**53, ".checkpoints[1].link_bytes: expected 0 to 2^52, received 9007"),
    (("phases",), [], ".phases: expected one or more, received none"),
    (("phases", 0, "bytes"), -1, ".phases[0].bytes: expected 0 to 2^52, received -1"),
    (("peak_bytes",), 1, ".peak_bytes: expected the largest of the phases, "),
    (("host_bytes",), -1, ".host_bytes: expected 0 to 2^52, received -1"),
    (("disk_bytes",), -1, ".disk_bytes: expected 0 to 2^52, received -1"),
    (("seconds",), -0.5, ".seconds: expected a finite number of at least 0, received -0.5"),
    (("least_seconds",), 1e9, ".least_seconds: expected at most the seconds, "),
    (("reasons", 0, "lever"), "gpu", ".reasons[0].lever: expected the name of a choice, such as micro_batch, received gpu"),
    (("alternatives", 0, "freedom"), "all", ".alternatives[0].freedom: expected exact | rounding | method, received all"),
    (("alternatives", 0, "levers", "gpu"), "1", ".alternatives[0].levers: expected the name of a choice, "),
    (("alternatives", 0, "levers", "g\nu"), 1, ".alternatives[0].levers.g?u: expected a text, received number"),
    (("alternatives", 0, "levers", "precision"), "1", ".alternatives[0].levers.precision: expected fp32 | "),
    (("alternatives", 0, "levers", "micro_batch"), "-1", ".levers.micro_batch: expected a whole number, received -1"),
    (("alternatives", 0, "levers", "tiles"), "head", ".levers.tiles: expected none, or NAME=ROWS of layers, received head"),
    (("alternatives", 0, "peak_bytes"), -1, ".alternatives[0].peak_bytes: expected 0 to 2^52, received -1"),
    (("frontier", 0, "seconds"), -1, ".frontier[0].seconds: expected a finite number of at least 0, received -1"),
    (("frontier", 0, "micro_batch"), 0, ".frontier[0].micro_batch: expected at least 1, received 0"),
]  # fmt: skip
FORM: Place = ("forms", 0)
CHOICE: Place = (*FORM, "passes", 0, "freed", 2, "choices", 1)
# The same for situations.
SITUATIONS: list[tuple[Place, Any, str]] = [
    (("blocks", 0), "", ".blocks: expected names of blocks, received an empty one"),
    (("blocks", 0), "layers.1", ".blocks: expected each block once, received layers.1 twice"),
    (("device_memory",), 2**53, ".device_memory: expected 0 to 2^52, received 9007199254740992"),
    (("reserve_bytes",), -1, ".reserve_bytes: expected 0 to 2^52, received -1"),
    (("out_bytes_per_second",), -1, ".out_bytes_per_second: expected a finite number of at least 0, received -1"),
    (("copy_share",), 2, ".copy_share: expected 0 to 1, received 2"),
    (("prefetch",), 0, ".prefetch: expected 1 to 4, received 0"),
    (("workspaces",), [-1], ".workspaces: expected 0 to 1048576 MiB, received -1"),
    ((*FORM, "precision"), "fp8", ".forms[0].precision: expected fp32 | "),
    ((*FORM, "weights"), "int3", ".forms[0].weights: expected fp32 | "),
    ((*FORM, "adapters"), "dora", ".forms[0].adapters: expected none | lora, received dora"),
    ((*FORM, "quantize"), "nf5", ".forms[0].quantize: expected none | nf4 | "),
    ((*FORM, "gradient_bytes"), -1, ".forms[0].gradient_bytes: expected 0 to 2^52, received -1"),
    ((*CHOICE, "bytes"), -1, ".forms[0].passes[0].freed[2].choices[1].bytes: expected 0 to 2^52, received -1"),
    ((*CHOICE, "extra_seconds"), -1, ".freed[2].choices[1].extra_seconds: expected a finite number of at least 0, "),
    ((*FORM, "optimizers", 1, "state"), "2bit", ".forms[0].optimizers[1].state: expected 8bit | "),
    ((*FORM, "optimizers", 1, "offload"), "tape", ".forms[0].optimizers[1].offload: expected none | cpu | "),
    ((*FORM, "optimizers", 1, "freedom"), "x", ".forms[0].optimizers[1].freedom: expected exact | "),
    ((*FORM, "optimizers", 1, "sum_bytes"), -1, ".forms[0].optimizers[1].sum_bytes: expected 0 to 2^52, received -1"),
    ((*FORM, "optimizers", 1, "seconds"), -1, ".optimizers[1].seconds: expected a finite number of at least 0, "),
    ((*FORM, "places", 0, "place"), "moon", ".forms[0].places[0].place: expected none | cpu | nvme:DIR, received moon"),
    ((*FORM, "places", 0, "keep"), -1, ".forms[0].places[0].keep: expected 0 to 2^52, received -1"),
    ((*FORM, "places", 1, "tiles", "head"), -1, ".places[1].tiles.head: expected 1 to 2^52 rows of a tile, received -1"),
]  # fmt: skip


@functools.cache
def situation() -> Json:
    """Return a situation of two blocks or more, whose best plan has alternatives and several micro-batches."""
    drawn = (random_situation(random.Random(i)) for i in range(100))
    return next(one for one in drawn if len(one["blocks"]) > 1 and plan_of(one)["alternatives"])


def plan_of(situation: Json) -> Json:
    return plan(situation | {"batch_size": 4}, micro_batch="1")


def changed(content: Json, path: Place, value: Any) -> Json:
    content = copy.deepcopy(content)
    at: Any = content
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return content


def one_line(where: str, message: str) -> str:
    """Return a pattern of a message of one line."""
    return rf"\A{re.escape(where)}.*{re.escape(message)}.*\Z"


@pytest.mark.parametrize(("path", "value", "message"), PLANS)
def test_wrong_values_of_plans(path: Place, value: Any, message: str, tmp_path: Path) -> None:
    wrong = changed(plan_of(situation()), path, value)
    with pytest.raises(ValueError, match=one_line("TrainingPlan: from_json", message)):
        shoestring.TrainingPlan(wrong)
    (tmp_path / "plan.json").write_text(json.dumps(wrong))
    with pytest.raises(ValueError, match=one_line(f"TrainingPlan: load: {tmp_path / 'plan.json'}", message)):
        shoestring.TrainingPlan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(("path", "value", "message"), SITUATIONS)
def test_wrong_values_of_situations(path: Place, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=one_line("plan_training: situation", message)):
        plan(changed(situation(), path, value))


def test_unknown_treatments_of_situations() -> None:
    wrong = copy.deepcopy(situation())
    for one in wrong["forms"][0]["passes"]:
        for blocks in (one["freed"], one["kept"]):
            blocks[2]["choices"][1]["name"] = "forget"
            blocks[3]["choices"][1]["name"] = "forget"
    with pytest.raises(
        ValueError, match=one_line("plan_training: situation", ": a choice: expected keep | recompute | ")
    ):
        plan(wrong)


def test_precisions_of_weights_are_those_of_the_options() -> None:
    """The plan of a model in bfloat16 names its weights as ``--weights`` does."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))).bfloat16()

    def example(rows: int) -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(rows, 8, dtype=torch.bfloat16)).square().mean()
        return loss

    found = shoestring.plan_training(torch.nn.Sequential(model), example=example, batch_size=2, measure=False)
    assert (found.precision, found.weights) == ("as the weights", "bf16")


def test_weights_that_leave_are_in_the_plan(tmp_path: Path) -> None:
    blocks = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(3))).requires_grad_(False)
    model = torch.nn.Sequential(torch.nn.Linear(8, 128), blocks)
    shoestring.offload_weights(model, f"nvme:{tmp_path}", keep=70_000)

    def example(rows: int) -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(rows, 8)).square().mean()
        return loss

    found = shoestring.plan_training(model, example=example, batch_size=2, measure=False)
    assert (found.weights_place, found.keep) == (f"nvme:{tmp_path}", 70_000)
