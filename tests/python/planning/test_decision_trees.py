"""Test the advice of other projects on memory: a plain situation for each piece of advice, and the plan that follows.

The model has 1 B parameters in 20 blocks, and rows of 2048 tokens. Each docstring is the advice.
``test_processes.py`` has the advice on several devices. That on tiling a large layer is left out, since the planner does
not choose it.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from planning.situations import Json, plan

MIB, GIB = 2**20, 2**30
PARAMETERS, BLOCKS = 10**9, 20
BLOCK = 48_000_000  # parameters of a block; the embedding and the head have half of the rest each
END = (PARAMETERS - BLOCKS * BLOCK) // 2
# Bytes of activations of a row: of a block until its backward and with recomputation, the most during a block's forward
# and backward, and of the embedding and the head.
KEPT, RECOMPUTED, FORWARD, BACKWARD, EMBEDDED, HEAD = (n * MIB for n in (150, 16, 200, 250, 16, 250))
ROW = EMBEDDED + BLOCKS * KEPT + HEAD  # of a whole pass that recomputes nothing


def block(rows: int, parameters: int, launch: float, *choices: tuple[str, int], ends: int = 0) -> Json:
    """Return a block whose forward takes ``launch`` seconds and 3.5 ms for each row.

    Args:
        parameters: number of parameters whose gradients the backward leaves.
        choices: the treatments, each with its bytes for a row.
        ends: bytes of the most activations of a row, if they are not those of a decoder block.
    """
    forward = launch + 0.0035 * rows
    return {
        "forward_seconds": forward,
        "backward_seconds": 2 * forward,
        "gradient_bytes": 4 * parameters,
        "choices": [
            {
                "name": name,
                "bytes": size * rows,
                "extra_seconds": forward if name == "recompute" else 0.0,
                "link_bytes": 0,
                "forward_bytes": (ends or FORWARD) * rows,
                "backward_bytes": (ends or BACKWARD) * rows + 4 * parameters,
            }
            for name, size in choices
        ],
    }


def blocks(rows: int, share: float, launch: float) -> list[Json]:
    """Return the embedding, the head and a decoder block. ``share``: the part of the parameters with gradients."""
    end, inner = int(share * END), int(share * BLOCK)
    return [
        block(rows, end, launch, ("keep", EMBEDDED), ends=EMBEDDED),
        block(rows, end, launch, ("keep", HEAD), ends=HEAD),
        block(rows, inner, launch, ("keep", KEPT), ("recompute", RECOMPUTED)),
    ]


def way(state: str = "8bit", **given: Any) -> Json:
    """Return AdamW of all parameters, whose state is on the device and needs 2 or 8 bytes per parameter."""
    return {
        "state": state,
        "step_in_backward": False,
        "offload": "none",
        "freedom": "exact",
        "device_bytes": {"8bit": 2, "fp32": 8}[state] * PARAMETERS,
        "host_bytes": 0,
        "disk_bytes": 0,
        "step_bytes": 0,
        "gradient_bytes": 0,
        "sum_bytes": 0,
        "seconds": 0.01,
        "backward_seconds": 0.0,
        "sum_seconds": 0.0,
    } | given


def away(offload: str, seconds: float, **given: Any) -> Json:
    """Return AdamW with fp32 state that is not on the device."""
    where = "disk_bytes" if offload.startswith("nvme") else "host_bytes"
    return way(
        "fp32", offload=offload, seconds=seconds, **{"device_bytes": 0, where: 8 * PARAMETERS, **given}
    )


def place(name: str = "none", seconds: float = 0.0, **given: int) -> Json:
    """Return a place of the weights; on the device, they are fp32."""
    size = {"device_bytes": 4 * PARAMETERS, "host_bytes": 0, "disk_bytes": 0}
    return {"place": name, "keep": 0, "tiles": {}, "seconds": seconds} | size | given


def form(
    ways: list[Json], places: list[Json], trained: float = 1.0, launch: float = 0.0005, **given: Any
) -> Json:
    """Return a form of training. ``trained``: the part of the parameters that is trained."""
    without = [(rows, blocks(rows, 0, launch)) for rows in (1, 2)]
    return {
        "precision": "fp32",
        "weights": "fp32",
        "adapters": "none",
        "quantize": "none",
        "freedom": "exact",
        "gradient_bytes": int(4 * trained * PARAMETERS),
        "load_bytes": 0,
        "saving_bytes": 0,
        "kinds": [0, *[2] * BLOCKS, 1],
        "passes": [
            {"rows": rows, "freed": freed, "kept": blocks(rows, trained, launch)} for rows, freed in without
        ],
        "optimizers": ways,
        "places": places,
    } | given


def gpu(memory: float, batch_size: int, forms: list[Json] | None = None, **given: Any) -> Json:
    """Return the situation of a GPU with so many GiB."""
    return {
        "model": "1 B parameters",
        "machine": "GPU",
        "blocks": [f"layers.{i}" for i in range(BLOCKS)],
        "workspaces": [],
        "batch_size": batch_size,
        "device_memory": int(memory * GIB),
        "host_memory": None,
        "disk": None,
        "host_is_device": False,
        "reserve_bytes": 0,
        "out_bytes_per_second": 0.0,
        "in_bytes_per_second": 0.0,
        "copy_share": 0.0,
        "prefetch": 1,
        "forms": forms or [form([way()], [place()])],
    } | given


def reason(found: Json, lever: str) -> str:
    """Return the text of the only reason for a choice."""
    [text] = [each["text"] for each in found["reasons"] if each["lever"] == lever]
    return str(text)


def switched_on(found: Json) -> set[str]:
    """Return the choices of a plan that have reasons, which are those that differ from plain training."""
    return {each["lever"] for each in found["reasons"]} - {""}


def recomputed(found: Json) -> int:
    return sum(each["treatment"] == "recompute" for each in found["checkpoints"])


def test_the_wanted_batch_fits() -> None:
    """Use no technique that saves memory, since each of them slows training down."""
    found = plan(gpu(16, batch_size=2), "method")
    assert switched_on(found) == set() and (found["micro_batch"], found["accumulate"]) == (2, 1)
    # The peak is that of the head's backward, before the gradients of the blocks exist.
    peak = (4 + 2) * PARAMETERS + 2 * ROW + 4 * END
    assert found["peak_bytes"] == peak
    spare = (16 * GIB - peak) / GIB
    assert [each["text"] for each in found["reasons"]] == [
        f"nothing is switched on: it fits with {spare:.2f} GiB to spare"
    ]


def test_the_batch_is_larger_than_memory() -> None:
    """Accumulate gradients, with the largest micro-batch that fits, and never change the effective batch."""
    found = plan(gpu(16, batch_size=64))
    room = 16 * GIB - (4 + 4 + 2) * PARAMETERS
    assert (found["micro_batch"], found["accumulate"]) == (2, 32) and 2 * ROW < room < 4 * ROW
    assert switched_on(found) == {"micro_batch"}
    assert reason(found, "micro_batch").startswith("32 micro-batches of 2 rows: without it, no plan fits")
    # With twice the memory, the micro-batch is larger, and the batch is the same.
    larger = plan(gpu(32, batch_size=64))
    assert larger["micro_batch"] > 2 and larger["micro_batch"] * larger["accumulate"] == 64


@pytest.mark.parametrize(("memory", "blocks_by_need"), [(12.6, 0), (12.0, 4), (11.5, 8), (11.0, 12)])
def test_one_row_is_still_too_large(memory: float, blocks_by_need: int) -> None:
    """Checkpoint activations. Others checkpoint all blocks, which costs a third of forward and backward."""
    missing = (4 + 4 + 2) * PARAMETERS + ROW - int(memory * GIB)
    assert blocks_by_need == max(0, -(-missing // (KEPT - RECOMPUTED)))
    found = plan(gpu(memory, batch_size=8))
    assert (found["micro_batch"], recomputed(found)) == (1, blocks_by_need)
    longer = found["seconds"] - plan(gpu(16, batch_size=8), micro_batch="1")["seconds"]
    assert longer == pytest.approx(8 * blocks_by_need * 0.004, abs=1e-9)
    if blocks_by_need:
        kept = BLOCKS - blocks_by_need
        text = f"{kept} of 20 blocks keep, {blocks_by_need} of 20 blocks recompute: without it, no plan fits"
        assert reason(found, "activations").startswith(text)


def test_checkpointing_costs_what_was_measured() -> None:
    """Checkpointing makes training about 20 % slower. The plan says how much, and what the other way would cost."""
    # Launches take most of the time of a small micro-batch, so that recomputing is faster than accumulating.
    situation = gpu(16, batch_size=4, forms=[form([way()], [place()], launch=0.02)])
    found = plan(situation)
    other = plan(situation, activations="keep")
    assert found["micro_batch"] == 4 and 0 < recomputed(found) < BLOCKS and other["micro_batch"] == 2
    per_cent = 100 * (other["seconds"] / found["seconds"] - 1)
    text = f"without it, a batch would take {other['seconds']:.3g} s, {per_cent:.1f} % longer"
    assert reason(found, "activations").endswith(text)


@pytest.mark.parametrize(
    ("host", "disk", "chosen"),
    [(64, 0, "stream"), (64, 500, "stream"), (4, 500, "nvme:/fast"), (0.01, 500, "nvme:/fast")],
)
def test_optimizer_state_does_not_fit(host: float, disk: int, chosen: str) -> None:
    """Offload the optimizer's state to the CPU, then to an NVMe disk. The speeds that were measured decide."""
    # 16 bytes per parameter are 14.9 GiB. Each step reads and writes 8 bytes per parameter.
    ways = [
        way("fp32"),
        away("cpu", seconds=4.0),  # a step on the CPU
        away("stream", seconds=16 * PARAMETERS / 25e9),
        away("nvme:/fast", seconds=16 * PARAMETERS / 6e9),
    ]
    forms = [form(ways, [place()])]
    found = plan(gpu(12, 8, forms, host_memory=int(host * GIB), disk=disk * GIB))
    assert found["offload"] == chosen and found["optimizer_state"] == "fp32" and recomputed(found) == 0
    text = reason(found, "offload")
    assert text.startswith(f"--offload {chosen}: without it, no plan fits; the least memory would be 15.")
    # A slow link leaves the state on the CPU, or on the disk if that is faster.
    ways[2] = away("stream", seconds=16 * PARAMETERS / 1e9)
    assert plan(gpu(12, 8, forms))["offload"] == "nvme:/fast"
    assert plan(gpu(12, 8, forms, disk=0))["offload"] == "cpu"


@pytest.mark.parametrize(
    ("host", "link", "drive", "chosen"),
    [(64, 12e9, 3e9, "cpu"), (8, 12e9, 3e9, "nvme:/fast"), (64, 2e9, 3e9, "nvme:/fast")],
)
def test_weights_do_not_fit(host: int, link: float, drive: float, chosen: str) -> None:
    """Offload the weights to the CPU, then to an NVMe disk. The speeds that were measured decide."""
    size = 28 * PARAMETERS  # 7 B weights in fp32, of which 1 % are trained adapters
    slots = 2 * size // 32
    places = [
        place(device_bytes=size),
        place("cpu", 2 * size / link, device_bytes=slots, host_bytes=size),
        place("nvme:/fast", 2 * size / drive, device_bytes=slots, host_bytes=slots, disk_bytes=size),
    ]
    adapters = form([way(device_bytes=PARAMETERS // 50)], places, trained=0.01, adapters="lora")
    found = plan(gpu(16, 8, [adapters], host_memory=host * GIB), adapters="lora")
    assert found["weights_place"] == chosen
    text = reason(found, "weights_place")
    assert text.startswith(f"--offload-weights {chosen}: without it, no plan fits")
    # Copies that are slower than the computation decide on the time, so there are as few micro-batches as possible.
    assert found["seconds"] == pytest.approx(
        found["accumulate"] * 2 * size / (link if chosen == "cpu" else drive) + 0.01
    )
    assert found["accumulate"] <= 2 and plan(gpu(40, 8, [adapters]))["weights_place"] == "none"


def with_copies(situation: Json, link: float) -> Json:
    """Return a situation in which blocks may copy their activations, or their inputs, at so many bytes per second."""
    for each in situation["forms"]:
        for one in (
            kinds[2] for measured in each["passes"] for kinds in (measured["freed"], measured["kept"])
        ):
            names = {"keep": "offload", "recompute": "recompute, input offloaded"}
            one["choices"] += [
                choice | {"name": names[choice["name"]], "bytes": 0, "link_bytes": choice["bytes"]}
                for choice in one["choices"]
            ]
    rates = {"out_bytes_per_second": link, "in_bytes_per_second": link, "copy_share": 0.0}
    return situation | rates


@pytest.mark.parametrize(
    ("link", "counts"),
    [
        (20e9, {"offload": 4, "keep": 16}),
        (2e9, {"recompute": 4, "keep": 16}),
        (0.0, {"recompute": 4, "keep": 16}),
    ],
)
def test_activations_do_not_fit(link: float, counts: dict[str, int]) -> None:
    """Offload activations to the CPU if its link is fast, and recompute them otherwise. The measured speed decides."""
    found = plan(with_copies(gpu(12, 8), link))
    assert Counter(each["treatment"] for each in found["checkpoints"]) == counts
    assert found["host_bytes"] == KEPT * counts.get("offload", 0)
    without, whole = plan(gpu(12, 8)), plan(gpu(16, 8), micro_batch="1")
    if "offload" in counts:
        # The computation of other blocks hides all copies.
        assert (
            found["seconds"] == pytest.approx(whole["seconds"], abs=1e-4)
            and whole["seconds"] < without["seconds"]
        )
    else:
        assert found["seconds"] == without["seconds"]
    assert found["least_seconds"] <= found["seconds"]
    text = ", ".join(f"{counts[name]} of 20 blocks {name}" for name in sorted(counts))
    needed = (4 + 4 + 2) * PARAMETERS + ROW
    assert reason(found, "activations") == (
        f"{text}: without it, no plan fits; the least memory would be {needed / GIB:.2f} GiB"
    )


def test_activations_stay_without_need() -> None:
    found = plan(with_copies(gpu(16, batch_size=2), 200e9))
    assert switched_on(found) == set() and found["host_bytes"] == 0


def test_a_fast_link_gives_larger_micro_batches() -> None:
    """Blocks are offloaded, so that four rows fit, where others recompute to train with one."""
    situation = gpu(11.5, batch_size=8)
    found = plan(with_copies(situation, 200e9))
    assert {each["treatment"] for each in found["checkpoints"]} == {"offload"}
    assert (found["micro_batch"], plan(situation)["micro_batch"]) == (4, 1)
    assert plan(situation)["seconds"] > 1.2 * found["seconds"]


def test_activations_fit_in_host_memory() -> None:
    """The host has room for the activations of some blocks: the first ones are offloaded, and others are recomputed."""
    situation = with_copies(gpu(10.8, 8), 200e9)
    whole = plan(situation)
    assert recomputed(whole) == 0 and whole["host_bytes"] > 4 * KEPT
    for count in (0, 1, 4):
        found = plan(situation | {"host_memory": count * KEPT + KEPT // 2})
        moved = [each["block"] for each in found["checkpoints"] if each["link_bytes"] > 0]
        assert moved == [f"layers.{i}" for i in range(count)]
        assert found["host_bytes"] <= count * KEPT and found["seconds"] > whole["seconds"]
        assert found["peak_bytes"] <= situation["device_memory"]
    # Memory of the host is no other memory than that of a CPU.
    same = plan(situation | {"host_is_device": True})
    assert {each["treatment"] for each in same["checkpoints"]} == {"keep", "recompute"}
    with pytest.raises(ValueError, match="fixed: activations: expected keep"):
        plan(gpu(16, 8), activations="offload")


def test_host_memory_that_lets_activations_leave() -> None:
    """If nothing fits, the message says how much host memory would do, besides how much device memory."""
    smallest = (4 + 4 + 2) * PARAMETERS + EMBEDDED + (BLOCKS - 1) * RECOMPUTED + BACKWARD
    situation = with_copies(gpu(16, 8), 200e9) | {
        "device_memory": smallest - 8 * RECOMPUTED,
        "host_memory": 0,
    }
    with pytest.raises(ValueError, match="^plan_training: expected device_memory of at least") as caught:
        plan(situation)
    least = {
        name: int(size) for name, size in re.findall(r"(\w+) of at least (\d+) bytes", str(caught.value))
    }
    assert 0 < least["host_memory"] <= BLOCKS * KEPT
    for name, size in least.items():
        found = plan(situation | {name: size})
        assert (found["host_bytes"] > 0) == (name == "host_memory")


def with_adapters() -> list[Json]:
    """Return full training, and QLoRA: 0.6 bytes per parameter, and adapters of 1 % of the parameters in fp32."""
    quantized = place(device_bytes=int(0.6 * PARAMETERS))
    lora = form(
        [way(device_bytes=PARAMETERS // 50)],
        [quantized],
        trained=0.01,
        adapters="lora",
        quantize="nf4",
        freedom="method",
    )
    return [form([way()], [place()]), lora]


@pytest.mark.parametrize("freedom", ["exact", "rounding"])
def test_very_little_memory(freedom: str) -> None:
    """Train adapters of a quantised model. The plan does so only with freedom, and says what full training needs."""
    situation = gpu(6, 8, with_adapters())
    with pytest.raises(ValueError, match="^plan_training: expected device_memory of at least") as caught:
        plan(situation, freedom)
    said = str(caught.value).splitlines()[0]
    assert said.endswith('; with freedom "method" a plan fits')
    least = re.search(r"at least (\d+) bytes", said)
    assert least is not None
    # Every block is recomputed for one row: the embedding and the kept inputs of blocks, and the backward of the last one.
    full = (4 + 4 + 2) * PARAMETERS + EMBEDDED + (BLOCKS - 1) * RECOMPUTED + max(RECOMPUTED + HEAD, BACKWARD)
    assert int(least[1]) == full
    enough = plan(situation | {"device_memory": full}, freedom)
    assert enough["adapters"] == "none" and recomputed(enough) == BLOCKS
    found = plan(situation, "method")
    assert (found["adapters"], found["quantize"]) == ("lora", "nf4")
    needed = f"without it, no plan fits; the least memory would be {full / GIB:.2f} GiB"
    assert reason(found, "adapters") == f"--adapters lora: {needed}"
    assert reason(found, "quantize") == f"--quantize nf4: {needed}"


def test_nothing_fits() -> None:
    """Other planners end without a word. The plan says the least of each budget with which a plan exists."""
    host, disk = 8 * PARAMETERS, 8 * PARAMETERS
    ways = [
        way("fp32"),
        away("cpu", 1.0),
        away("nvme:/fast", 3.0, host_bytes=32 * MIB),
    ]
    situation = gpu(12, 8, [form(ways, [place()])], host_memory=4 * GIB, disk=2 * GIB)
    with pytest.raises(ValueError, match="^plan_training: expected device_memory of at least") as caught:
        plan(situation)
    said = str(caught.value).splitlines()[0]
    least = {name: int(size) for name, size in re.findall(r"(\w+) of at least (\d+) bytes", said)}
    # Each budget would do alone: the device has the state, or the host, or the disk.
    smallest = EMBEDDED + (BLOCKS - 1) * RECOMPUTED + max(RECOMPUTED + HEAD, BACKWARD)
    assert least == {
        "device_memory": (4 + 4 + 8) * PARAMETERS + smallest, "host_memory": host, "disk": disk,
    }  # fmt: skip
    for name, size in least.items():
        assert f"{name} of at least {size} bytes ({size / GIB:.2f} GiB), received {situation[name]}" in said
        plan(situation | {name: size})
        with pytest.raises(ValueError, match=f"{name} of at least {size} bytes"):
            plan(situation | {name: size - 1})
