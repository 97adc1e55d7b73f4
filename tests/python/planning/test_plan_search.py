"""Compare the search of the planner with a planner that tries everything, on random situations."""

import json
import random
import time
from typing import Any

import pytest
import torch

from planning.situations import FREEDOMS, everything, plan, random_situation

SITUATIONS = range(20)


def fails(situation: dict[str, Any], freedom: str, **fixed: str) -> str:
    with pytest.raises(ValueError, match=r"^plan_training: ") as caught:
        plan(situation, freedom, **fixed)
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize("number", SITUATIONS)
def test_fastest_of_all_plans(number: int, seed: int) -> None:
    rng = random.Random(f"{seed} {number}")
    situation = random_situation(rng)
    before: dict[str, float] = {}
    for freedom in FREEDOMS:
        tried = everything(situation, freedom)
        low, high = min(one.peak for one in tried), max(one.peak for one in tried)
        slowest = float("inf")
        for budget in (None, low, (3 * low + high) // 4, (low + high) // 2, high):
            for disk in (None, rng.randint(0, 700)):
                given = situation | {"device_memory": budget, "disk": disk}
                best = min((one.seconds for one in tried if one.fits(given)), default=None)
                if best is None:
                    least = min(one.peak for one in tried if one.fits(given | {"device_memory": None}))
                    assert f"device_memory of at least {least} bytes" in fails(given, freedom)
                    continue
                found = plan(given, freedom)
                assert found["seconds"] == pytest.approx(best, abs=1e-9)
                assert found["least_seconds"] == found["seconds"]
                assert budget is None or found["peak_bytes"] <= budget
                assert max(phase["bytes"] for phase in found["phases"]) == found["peak_bytes"]
                # The plan is one of those that were tried.
                assert any(
                    (one.peak, one.host, one.disk)
                    == (found["peak_bytes"], found["host_bytes"], found["disk_bytes"])
                    and one.seconds == pytest.approx(found["seconds"], abs=1e-9)
                    for one in tried
                )
                assert found["micro_batch"] * found["accumulate"] == situation["batch_size"]
                if disk is None and budget is not None:
                    assert found["seconds"] <= slowest  # more memory never gives a slower plan
                    slowest = found["seconds"]
        assert "device_memory of at least" in fails(situation | {"device_memory": low - 1}, freedom)
        before[freedom] = plan(situation, freedom)["seconds"]
    assert before["exact"] >= before["rounding"] >= before["method"]


@pytest.mark.parametrize("number", range(4))
def test_frontier_and_alternatives(number: int, seed: int) -> None:
    rng = random.Random(f"{seed} {number}")
    situation = random_situation(rng)
    found = plan(situation)
    tried = everything(situation, "exact")
    for point in found["frontier"]:
        best = min(one.seconds for one in tried if one.peak <= point["peak_bytes"])
        assert point["seconds"] == pytest.approx(best, abs=1e-9)
    peaks = [point["peak_bytes"] for point in found["frontier"]]
    assert peaks == sorted(set(peaks)) and peaks[0] == min(one.peak for one in tried)
    faster = [each for each in found["alternatives"] if each["freedom"] == "rounding"]
    best = min(one.seconds for one in everything(situation, "rounding"))
    assert [each["seconds"] for each in faster] == ([pytest.approx(best)] if best < found["seconds"] else [])


@pytest.mark.parametrize("number", range(6))
def test_fixed_choices(number: int, seed: int) -> None:
    """A given choice is respected, and the rest is planned around it; a reason says what a choice gains."""
    rng = random.Random(f"{seed} {number}")
    situation = random_situation(rng)
    low = min(one.peak for one in everything(situation, "rounding"))
    situation["device_memory"] = low + rng.randint(0, 400)
    found = plan(situation, "rounding")
    for lever, value in (
        ("micro_batch", str(found["micro_batch"])),
        ("precision", found["precision"]),
        ("offload", found["offload"]),
        ("optimizer_state", found["optimizer_state"]),
    ):
        again = plan(situation, "rounding", **{lever: value})
        assert again["seconds"] == found["seconds"]
        assert all(
            reason["text"].endswith("as given") for reason in again["reasons"] if reason["lever"] == lever
        )
    for reason in found["reasons"]:
        lever = reason["lever"]
        if not lever:
            continue
        usual = {"micro_batch": str(situation["batch_size"]), "step_in_backward": "false"}
        usual |= {"precision": "fp32", "offload": "none", "weights_place": "none"}
        usual |= {"optimizer_state": "8bit", "activations": "keep", "tiles": "none"}
        try:
            other = plan(situation, "rounding", **{lever: usual[lever]})
        except ValueError:
            assert "without it, no plan fits" in reason["text"]
        else:
            is_as_fast = other["seconds"] < 1.005 * found["seconds"]  # within half a percent
            expected = "as fast as without it" if is_as_fast else f"{other['seconds']:.3g} s"
            assert other["seconds"] >= found["seconds"] and expected in reason["text"]


def test_nothing_is_switched_on_without_need(seed: int) -> None:
    situation = random_situation(random.Random(seed))
    for form in situation["forms"]:
        form["optimizers"] = form["optimizers"][:1]
    high = max(one.peak for one in everything(situation, "exact"))
    found = plan(situation | {"device_memory": high})
    assert found["micro_batch"] == situation["batch_size"] and found["weights_place"] == "none"
    assert {block["treatment"] for block in found["checkpoints"]} == {"keep"}
    assert [reason["text"] for reason in found["reasons"]] == [
        f"nothing is switched on: it fits with {(high - found['peak_bytes']) / 2**20:.1f} MiB to spare"
    ]


def test_several_hundred_blocks_are_planned_in_time() -> None:
    """200 blocks and 10 micro-batches take at most 2 s (figure of the documentation), here with room for a busy machine."""
    rng = random.Random(0)
    situation = random_situation(rng)
    [form, _] = situation["forms"]
    for one in form["passes"]:
        for kinds in (one["freed"], one["kept"]):
            for block in kinds:
                for choice in block["choices"]:
                    for name in ("bytes", "forward_bytes", "backward_bytes"):
                        choice[name] = choice[name] * 1_000_003
    situation |= {"forms": [form], "batch_size": 512, "blocks": [str(i) for i in range(200)]}
    form["kinds"] = [0, *(2 + i % 2 for i in range(200)), 1]
    began = time.perf_counter()
    found = plan(situation)
    assert time.perf_counter() - began < 20
    low, high = found["frontier"][0]["peak_bytes"], found["peak_bytes"]
    began = time.perf_counter()
    found = plan(situation | {"device_memory": (low + high) // 2})
    assert time.perf_counter() - began < 20
    assert found["peak_bytes"] <= (low + high) // 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected 1 to 1048576, received 0"),
        ({"device_memory": -1}, "a budget: expected at least 0 bytes, received -1"),
        ({"forms": []}, "forms: expected one or more, received none"),
        ({"blocks": ["a"] * 9}, r"forms\[0\].kinds: expected 11"),
        ({"batch_size": "2"}, "situation.batch_size: expected a whole number below 2\\^63, received string"),
        ({"reserve_bytes": 2.5}, "situation.reserve_bytes: expected a whole number"),
        ({"gpu": 1}, 'situation: expected none but the fields of this version, received "gpu"'),
        (
            {"workspaces": [1, 2]},
            "workspaces: expected one for each of 1 choices of the last block, received 2",
        ),
        ({"format_version": 2}, "expected format_version 1, received 2; plan anew"),
        ({"format": "x"}, 'expected JSON whose field "format" is "shoestring.situation"'),
    ],
)
def test_wrong_situations(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(random_situation(random.Random(0)) | change)


def test_wrong_options_and_missing_fields() -> None:
    situation = random_situation(random.Random(0))
    for name in situation:
        less = {key: value for key, value in situation.items() if key != name}
        with pytest.raises(ValueError, match=f"situation: expected the field {name}, received none"):
            plan(less)
    assert "freedom: expected exact | rounding | method, received all" in fails(situation, "all")
    assert "fixed: gpu: expected the name of a choice" in fails(situation, "exact", gpu="1")
    assert "fixed: precision: expected bf16 | fp32, received fp8" in fails(
        situation, "exact", precision="fp8"
    )
    assert "received several" in fails(situation, "exact", micro_batch="several")


def test_plans_are_checked_when_they_are_read(tmp_path: Any) -> None:
    found = plan(random_situation(random.Random(0)))
    path = str(tmp_path / "plan.json")
    torch.ops.shoestring._save_plan(json.dumps(found), path)
    assert json.loads(torch.ops.shoestring._load_plan(path)) == found
    for change in ({"seconds": "fast"}, {"levers": {}}, {"format_version": 0}):
        with pytest.raises(ValueError, match=r"^TrainingPlan: from_json"):
            torch.ops.shoestring._check_plan(json.dumps(found | change))
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ValueError, match=r"^TrainingPlan: load: .*plan.json: not valid JSON"):
        torch.ops.shoestring._load_plan(path)
