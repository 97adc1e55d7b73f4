"""Test FullyShard in C++ programs of several processes."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from cpp_processes import run, skip_without_gloo

# The elements of the parameters of the test's three blocks.
BLOCKS = ((70 * 41, 5), (0, 300 * 7, 256), (1, 33 * 33))
STATE_BYTES = {"8bit": 2 * 256 + 2 * 4, "4bit": 2 * 128 + 40, "bf16": 4 * 256, "fp32": 8 * 256}


@pytest.fixture(autouse=True, scope="module")
def _needs_gloo() -> None:
    skip_without_gloo()


def places(block: tuple[int, ...], ranks: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the elements of a rank's part of a block, and begin and end of each parameter in the block."""
    end, found = 0, []
    for numel in filter(None, block):
        begin = math.ceil(end / 256) * 256
        end = begin + numel
        found.append((begin, end))
    return math.ceil(math.ceil(end / 256) / ranks) * 256, found


def bytes_of(rank: int, ranks: int, element: int, state: str, remainder: bool) -> tuple[int, list[int]]:
    """Return the bytes of optimizer state of a rank, and those of its part of each block."""
    few = 0
    for block in BLOCKS:
        size, found = places(block, ranks)
        for begin, end in found:
            elements = max(0, min(end, (rank + 1) * size) - max(begin, rank * size))
            of_block = STATE_BYTES[state if end - begin >= 100 else "fp32"] + 2 * 256 * remainder
            few += math.ceil(elements / 256) * of_block
    return few, [places(block, ranks)[0] * element for block in BLOCKS]


@pytest.mark.parametrize(("ranks", "split"), [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (8, 8)])
@pytest.mark.parametrize(
    ("state", "rounding"),
    [(s, r) for s in STATE_BYTES for r in ("nearest", "remainder") if s != "bf16" or r == "nearest"],
)
@pytest.mark.parametrize(("micro_batches", "how"), [(1, "sends"), (3, "sends"), (3, "sums")])
@pytest.mark.parametrize("unused", [0, 1])
@pytest.mark.sample(7)
def test_steps_have_the_bits_of_one_process(
    ranks: int, split: int, state: str, rounding: str, micro_batches: int, how: str, unused: int
) -> None:
    """Memory and traffic are the formulas to the byte. With fewer ranks in `split`, the others are replicas.

    State in bf16 is rounded by other random numbers than in one process, so it is compared with a tolerance.
    """
    outputs = run(ranks, "fully_shard", "adamw", state, rounding, micro_batches, how, split, unused)
    for rank, out in enumerate(outputs):
        remainder = rounding == "remainder"
        of_state, of_blocks = bytes_of(rank % split, split, 2 if remainder else 4, state, remainder)
        # Forward gathers all blocks, and backward the first one: the others are still there. The test looks at
        # all parameters five times. Gradients are sent once a micro-batch, or once a step, and those of two replicas
        # are averaged.
        gathers, sends = 4 * micro_batches + 5, 4 * (1 if how == "sums" else micro_batches)
        received = sum(of_blocks) * gathers + of_blocks[0] * 4 * micro_batches
        sent = sum(of_blocks) * sends * (split - 1 + (split < ranks))
        expected = [of_state, sum(of_blocks), received * (split - 1), sent]
        assert list(map(int, out.split()[:4])) == expected


@pytest.mark.parametrize(("ranks", "split"), [(1, 1), (2, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("offload", ["none", "nvme"])
@pytest.mark.parametrize("in_backward", [0, 1])
@pytest.mark.sample(6)
def test_parts_lie_in_a_file_and_step_in_backward(
    optimizer: str, ranks: int, split: int, offload: str, in_backward: int, tmp_path: Path
) -> None:
    """The bits of results and the bytes of parts and state do not depend on these options."""
    place = f"nvme:{tmp_path}" if offload == "nvme" else offload
    common = ("fully_shard", optimizer, "8bit", "remainder", 1, "sends", split)
    assert run(ranks, *common, 0, place, in_backward) == run(ranks, *common)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ranks", "split"), [(2, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize(
    "optimizer", ["sgd", "lion", "ademamix", "lamb", "muon", "adafactor", "adafactor_mean", "came"]
)
@pytest.mark.sample(9)
def test_optimizers(optimizer: str, ranks: int, split: int) -> None:
    """Muon's matrices are whole on their owners, so all bits are those of one process.

    Optimizers with fp32 state sum in another order than one process, so 8-bit codes could differ. The part of a rank
    may begin and end within rows.
    """
    state = "8bit" if optimizer in ("sgd", "lion", "ademamix", "muon") else "fp32"
    run(ranks, "fully_shard", optimizer, state, "nearest", 1, "sends", split)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["galore", "galore_left", "apollo"])
@pytest.mark.sample(4)
def test_low_rank_optimizers(optimizer: str, ranks: int) -> None:
    run(ranks, "fully_shard_low_rank", optimizer)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("recomputed", ["nowhere", "inside", "outside"])
@pytest.mark.sample(4)
def test_a_network_trains_as_in_one_process(ranks: int, recomputed: str) -> None:
    """Bitwise in two processes, with frozen parameters, frozen bytes, checkpoints and LibTorch's AdamW."""
    run(ranks, "fully_shard_adapters", recomputed)


@pytest.mark.parametrize("ranks", [1, 2])
def test_quantised_weights_are_split(ranks: int) -> None:
    """A rank holds, and gathers, 0.516 bytes a weight (NF4, double quantisation) and the adapters: 3.9 times less than bf16."""
    for out in run(ranks, "fully_shard_qlora"):
        own, dense = map(int, out.split()[:2])
        codes, adapters = 256 * 256 * (0.5 + 1 / 64), 2 * 4 * 256 * 4
        bias = 256 * 4
        # Three blocks of codes, scales and biases, each at a multiple of 512 bytes; nested scales are small.
        expected = 3 * (codes + adapters + bias) / ranks
        assert expected <= own <= expected + 3 * 4 * 512
        assert dense / (3 * codes) == pytest.approx(3.88, abs=0.01)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tied_weights_and_evaluations(ranks: int) -> None:
    run(ranks, "fully_shard_tied")


@pytest.mark.parametrize(("ranks", "split"), [(1, 1), (2, 2), (3, 3), (4, 2), (2, 1)])
@pytest.mark.parametrize("bits", [8, 4, 1])
@pytest.mark.parametrize("how", ["sums", "sends"])
@pytest.mark.sample(3)
def test_gradients_in_few_bits(bits: int, ranks: int, split: int, how: str) -> None:
    """Sums of gradients are those of whole ones. Residuals and traffic are the formulas to the byte."""
    record, elements = {8: (260, 256), 4: (68, 128), 1: (36, 256)}[bits]
    parts = [math.ceil(blocks / split) * 256 for blocks in (10 + 1, 9 + 1, 5)]
    for out in run(ranks, "fully_shard_compressed", f"{bits}bit", split, how):
        residuals, sent, own = map(int, out.split()[:3])
        assert own == 4 * sum(parts)
        sends = 1 if how == "sums" else 3
        if split < ranks:  # two hops between two replicas, each of which averages half of the records
            records = [math.ceil(part / elements / 2) for part in parts]
            expected = 4 * sum(parts) * (split - 1) + 2 * record * sum(records)
            left = 4 * (sum(parts) + elements * sum(records))
            assert left - 4 * len(parts) * elements <= residuals <= left
        else:
            expected = record * sum(parts) // elements * (split - 1)
            assert residuals == (4 * split * sum(parts) if split > 1 else 0)
        assert sent == sends * expected


def sum_of(outputs: list[str]) -> str:
    sums = {out.split()[0] for out in outputs}
    assert len(sums) == 1, sums
    return sums.pop()


@pytest.mark.parametrize(
    ("optimizer", "ranks", "split"),
    [
        ("adamw", 3, 3),
        ("adamw", 4, 2),
        ("came", 3, 3),
        ("adafactor_mean", 4, 2),
        ("libtorch", 3, 3),
        ("libtorch", 4, 2),
    ],
)
@pytest.mark.sample(2)
def test_files_are_those_of_one_process(optimizer: str, ranks: int, split: int, tmp_path: Path) -> None:
    """The processes that wrote a file continue it bit for bit, and any number writes the same bytes again.

    The bytes are those of whole weights, which were present while they were saved.
    """
    trained = sum_of(run(ranks, "fully_shard_files", "train", tmp_path, optimizer, split))
    saved = (tmp_path / "run.safetensors").read_bytes()
    assert (tmp_path / "present.safetensors").read_bytes() == saved
    assert sum_of(run(ranks, "fully_shard_files", "resume", tmp_path, optimizer, split)) == trained
    for other in (1, 2, 4):
        run(other, "fully_shard_files", "resume", tmp_path, optimizer)
        assert (tmp_path / "again.safetensors").read_bytes() == saved


def test_threads_accumulate() -> None:
    run(1, "fully_shard_threads")


def test_refusals() -> None:
    for rank, out in enumerate(run(2, "fully_shard_refuses")):
        *lines, _ = out.splitlines()
        pid = re.search(r"shoestring-swap-(\d+)", out)[1]  # type: ignore[index]
        assert lines == [
            "FullyShard: block 1: expected parameters of its own, received one that another block has, too; add both as one "
            "block with keep",
            "FullyShard: block 1: expected parameters that are contiguous and have storages of their own, received one of "
            "[4, 8] in a storage of 128 bytes",
            "FullyShard: module: expected the same parameters on all ranks; parameter 0 is block 1, 0 [4] Float on rank 0 "
            "and block 1, 0 [5] Float on rank 1",
            "FullyShard: block 0: expected whole weights, received some that processes have split: read or change them "
            "within present()",
            "FullyShard: block: expected one of 1 blocks, received 3",
            "FullyShard: parameter: expected a trained parameter of a block, received another tensor of "
            f"[{rank + 4}]",
            "AdamW: set_shard: expected whole parameters, received parts of FullyShard, whose steps are "
            "split",
            "FullyShard: block 0: expected a backward that computes the gradients of all parameters of the block, received "
            "one that does not use parameter 1 of shape [3]; freeze it before add(), or pass find_unused",
            "FullyShard: block 0: expected weights that stay frozen, received one of [5] that was frozen at add() and is "
            "trained now; add it trained, with find_unused(true), and freeze it afterwards",
            "Muon: params[1]: expected a matrix (use AdamW for parameters of other "
            "shapes), received shape [3]",
            "CAME: offload: expected none where processes have split the parameters, since the rule needs "
            'whole ones, received "stream"; use AdamW, Lion or SGD',
            "LAMB: set_step_in_backward: expected none where processes have split the parameters, since "
            "the rule needs whole ones, received true; use AdamW, Lion or SGD",
            'FullyShard: offload: expected "none", "cpu" or "nvme:DIR", received "disk"',
            f"FullyShard: offload: /missing/shoestring-swap-{pid}-0: cannot create the file: No such file or directory",
            'FullyShard: offload: expected parameters on a GPU with "cpu", received some on the CPU, which are in host memory '
            'already; use "nvme:DIR"',
            "new_group: ranks: expected different ranks of 2, received [0, 7]",
            'FullyShard: compress: expected "none", "8bit", "4bit" or "1bit", received "2bit"',
            "FullyShard: compress: expected parameters in fp32, bf16 or fp16, received one of block 0 in Double. Convert it, "
            "or compress none.",
        ]
