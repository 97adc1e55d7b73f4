"""Test C++ programs of several processes: collectives, data parallelism, and what happens if a rank fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpp_processes import PROGRAM, finish, run, skip_without_gloo, start
from ports import free_port


@pytest.fixture(autouse=True, scope="module")
def _needs_gloo() -> None:
    skip_without_gloo()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_collectives(ranks: int) -> None:
    run(ranks, "collectives")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("views", [0, 1], ids=["copies", "views"])
@pytest.mark.parametrize(("bucket_bytes", "micro_batches"), [(64, 1), (64, 3), (1 << 20, 2)])
@pytest.mark.sample(8)
def test_gradients_are_those_of_one_process(
    ranks: int, bucket_bytes: int, micro_batches: int, views: int
) -> None:
    run(ranks, "data_parallel", bucket_bytes, micro_batches, views)


@pytest.mark.parametrize("test", ["checkpointed", "running_statistics", "tokens"])
def test_two_ranks(test: str) -> None:
    run(2, test)


@pytest.mark.parametrize("ranks", [1, 2])
def test_threads_add_gradients_up(ranks: int) -> None:
    run(ranks, "data_parallel_threads")


def test_training_hardly_depends_on_the_number_of_ranks() -> None:
    """The 8-bit optimizer steps all ranks alike. Losses differ by the rounding of sums alone."""
    one, *others = ([float(x) for x in run(ranks, "train", 8)[0].split()[:-1]] for ranks in (1, 2, 4))
    assert len(one) == 8 and one[-1] < one[0]
    for other in others:
        assert other == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("splits", [0, 1], ids=["whole", "split"])
@pytest.mark.parametrize(("compress", "tolerance"), [("8bit", 0.01), ("4bit", 0.03), ("1bit", 0.15)])
@pytest.mark.sample(3)
def test_training_with_compressed_gradients(compress: str, tolerance: float, splits: int) -> None:
    """All ranks stay equal bit for bit, and losses stay near those of whole gradients."""
    expected = [float(x) for x in run(1, "train", 12)[0].split()[:-1]]
    alone = [float(x) for x in run(1, "train", 12, compress, splits)[0].split()[:-1]]
    assert alone == expected  # one process sends nothing
    for ranks in (2, 3):
        found = [float(x) for x in run(ranks, "train", 12, compress, splits)[0].split()[:-1]]
        assert found == pytest.approx(expected, rel=tolerance) and found != expected


def test_compression_says_what_it_expects() -> None:
    for out in run(2, "compress_refuses"):
        assert out.splitlines()[:-1] == [
            'DataParallel: compress: expected "none", "8bit", "4bit" or "1bit", received "2bit"',
            "DataParallel: compress: expected parameters in fp32, bf16 or fp16, received weight in Double. Convert it, "
            "or compress none.",
            "shard: compress: expected split gradients, received whole ones, for which DataParallel has this option",
            'shard: compress: expected "none", "8bit", "4bit" or "1bit", received "half"',
        ]


# The parameters of the test have 27 blocks of 256 elements with state in few bits and 2 blocks in fp32.
STATE_BYTES = {"8bit": 2 * 256 + 2 * 4, "4bit": 2 * 128 + 40, "bf16": 4 * 256, "fp32": 8 * 256}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("state", STATE_BYTES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "remainder"])
@pytest.mark.sample(8)
def test_split_steps_have_the_bits_of_whole_steps(ranks: int, state: str, rounding: str) -> None:
    """Each rank has the state of its blocks: that of one process, divided, to within one block of each format."""
    remainder = 2 * 256 * (rounding == "remainder")
    few, full = STATE_BYTES[state] + remainder, STATE_BYTES["fp32"] + remainder
    for rank, out in enumerate(run(ranks, "zero", "adamw", state, rounding)):
        own, whole = map(int, out.split()[:2])
        assert whole == 27 * few + 2 * full
        counts = (27, 2) if state != "fp32" else (29, 0)  # of one arena of each format
        expected = [
            len(range(*slice(rank * -(-n // ranks), (rank + 1) * -(-n // ranks)).indices(n))) for n in counts
        ]
        assert own == expected[0] * few + expected[1] * full


@pytest.mark.parametrize("optimizer", ["sgd", "lamb", "adafactor", "came", "muon"])
def test_optimizers_that_are_split(optimizer: str) -> None:
    """LAMB, Adafactor, CAME and Muon step whole parameters, so each parameter has one rank."""
    for ranks in (2, 3):
        found = [out.split()[:2] for out in run(ranks, "zero", optimizer, "8bit", "nearest")]
        owned = sum(int(own) for own, _ in found)
        assert owned == int(found[0][1]) and all(int(own) < owned for own, _ in found)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("bucket_bytes", [64, 8192, 25 << 20])
@pytest.mark.parametrize(
    ("optimizer", "state", "rounding"),
    [
        ("adamw", "8bit", "nearest"),
        ("adamw", "4bit", "stochastic"),
        ("sgd", "fp32", "remainder"),
        ("lamb", "8bit", "nearest"),
        ("muon", "bf16", "nearest"),
    ],
)
@pytest.mark.sample(8)
def test_split_gradients_give_the_steps_of_one_process(
    ranks: int, bucket_bytes: int, optimizer: str, state: str, rounding: str
) -> None:
    run(ranks, "split_gradients", optimizer, state, rounding, bucket_bytes, 1, "sends", "all")


@pytest.mark.parametrize("how", ["sums", "sends"])
@pytest.mark.parametrize("last", ["all", "unused", "late"])
def test_split_gradients_of_micro_batches(how: str, last: str) -> None:
    run(3, "split_gradients", "adamw", "8bit", "nearest", 4096, 3, how, last)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "adafactor"])
@pytest.mark.parametrize("state", ["8bit", "4bit"])
@pytest.mark.sample(3)
def test_files_are_those_of_one_process(optimizer: str, state: str, tmp_path: Path) -> None:
    """Three processes save what one would save; two and four continue it bit for bit."""
    for ranks, how in ((3, "save"), (1, "load"), (2, "load"), (4, "load")):
        run(ranks, "zero_files", optimizer, state, "nearest", tmp_path, how)


def test_split_steps_exclude_what_needs_whole_state() -> None:
    (out,) = run(1, "zero_refuses")
    state = (
        "expected an optimizer whose state is in this process, received one whose state processes have split"
    )
    assert [line.removeprefix("AdamW: ") for line in out.splitlines()[:-1]] == [
        "set_shard: expected an optimizer before its first step, received one that has a state",
        'set_shard: expected offload="stream" or "nvme:DIR", received "cpu"',
        "set_shard: expected contiguous parameters, received one that is not contiguous",
        'set_offload: expected "stream" or "nvme:DIR" where processes have split the steps, received "cpu"',
        f"set_step_in_backward: {state}",
    ]


def test_torchrun_starts_the_program() -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        "--no-python",
    ]
    done = subprocess.run([*command, PROGRAM, "train", "2"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("passed") == 2, done.stderr


@pytest.mark.parametrize("more", [0, 1], ids=["shape", "number"])
def test_other_parameters_are_named_on_all_ranks(more: int) -> None:
    for code, _, errors in finish(start(3, "other_model", more)):
        assert code == 2 and errors == (
            "DataParallel: module: expected the same parameters on all ranks; parameter 2 is 1.weight [2, 4] Float "
            "on rank 0 and 1.weight [3, 4] Float on rank 1\n"
        )


def test_unused_parameters() -> None:
    for code, _, errors in finish(start(2, "fault", "unused")):
        assert code == 2 and errors == (
            "DataParallel: backward: loss: expected a loss that uses all trained parameters, received one that "
            "does not use second, bias. Freeze them before, or pass find_unused(true).\n"
        )
    run(2, "fault", "found")
    for code, _, errors in finish(start(2, "fault", "unused", 3000, 1)):
        assert code == 2 and errors == (
            "shard: expected a backward that computes the gradients of all parameters, received one that does not "
            "use parameter 1 of shape [6, 4], 2 of shape [4] of the optimizer. Freeze them before the first step, "
            "or pass find_unused.\n"
        )
    run(2, "fault", "found", 3000, 1)


def test_parameters_that_are_trained_later_are_refused() -> None:
    for code, _, errors in finish(start(2, "fault", "thawed")):
        assert code == 2 and errors == (
            "DataParallel: module: expected gradients of the parameters that were trained at the beginning, received a "
            "module that trains unused, too, whose gradient the ranks would not average. Make DataParallel with "
            "find_unused(true) while it requires gradients, and freeze it afterwards.\n"
        )


def outputs_of(
    survivors: list[subprocess.Popen[str]], lost: subprocess.Popen[str], seconds: float
) -> list[tuple[str, str]]:
    """Return both outputs of the processes that go on, which must end in time; kill the one that does not."""
    began = time.monotonic()
    try:
        found = [process.communicate(timeout=30) for process in survivors]
    finally:
        taken = time.monotonic() - began
        lost.send_signal(signal.SIGKILL)
    assert taken < seconds
    return found


@pytest.mark.parametrize(
    ("kind", "splits"), [("kill", 0), ("stop", 0), ("throw", 0), ("kill", 1), ("stop", 1)]
)
@pytest.mark.sample(3)
def test_survivors_name_the_rank_that_failed(kind: str, splits: int) -> None:
    """Each rank ends within the timeout of 3 s and 2 s more, after start and two steps."""
    processes = start(3, "fault", kind, 3000, splits)
    *survivors, last = processes
    found = outputs_of(survivors, last, 3 + 2 + 5)
    what = "reduction of gradients" if splits else "DataParallel: backward 3"
    for rank, (process, (_, errors)) in enumerate(zip(survivors, found, strict=True)):
        assert process.returncode == 2 and re.fullmatch(
            rf"rank {rank} of 3: {what}: .*; rank 2 has ended or is stopped\n",
            errors,
        ), errors
    last.communicate()


def test_survivors_of_the_rank_that_holds_the_store() -> None:
    """The store of rank 0 does not answer while the process is stopped."""
    first, *survivors = start(3, "fault", "stop_first", 2000)
    found = outputs_of(survivors, first, 2 + 2 + 5)
    for rank, (_, errors) in enumerate(found, start=1):
        end = "; rank 0, which holds the store, has ended or is stopped\n"
        assert errors.startswith(f"rank {rank} of 3: DataParallel: backward 3: ") and errors.endswith(end), (
            errors
        )
    first.communicate()


@pytest.mark.parametrize("splits", [0, 1])
def test_ranks_that_diverge_say_where_they_are(splits: int) -> None:
    """Gloo would compute with the bytes of other collectives, or end the process."""
    processes = {kind: start(3, "fault", kind, 2000, splits) for kind in ("shape", "order")}
    for kind, found in processes.items():
        done = finish(found, 2 + 2 + 10)
        for rank, (code, _, errors) in enumerate(done):
            where = re.search(" is at collective ([0-9]+)", errors)
            assert where is not None, errors
            at = f"at collective {where[1]}, "
            if kind == "shape":
                others, last = "all_reduce of [4] Float", "all_reduce of [6] Float"
            else:
                others, last = "broadcast from rank 0 of [4] Float", "all_reduce of [4] Float"
            assert code == 2 and errors.startswith(f"rank {rank} of 3: "), errors
            assert f"; ranks 0, 1 are {at}{others}" in errors and f"; rank 2 is {at}{last}" in errors, errors


def refused(**environment: str) -> str:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    plain = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [PROGRAM, "missing"],
        env=plain | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    return done.stderr.splitlines()[-1]


def test_bad_environments() -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert refused(RANK="0", **place) == (
        "init_process_group: WORLD_SIZE: expected the environment variable that torchrun sets, received none. Start "
        "the program with torchrun, or pass the option."
    )
    wrong = "init_process_group: RANK: expected a number from 0 to 1, received "
    for rank in ("2", "-1", "first", "1x"):
        assert refused(RANK=rank, WORLD_SIZE="2", **place) == wrong + rank
    assert "MASTER_PORT: expected a number from 1 to 65535, received 65536" in refused(
        RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="65536"
    )
    nobody = refused(RANK="0", WORLD_SIZE="2", **place)
    assert nobody.startswith("init_process_group: rank 0 of 2: expected all ranks within 2000 ms, received ")
    assert nobody.endswith("; rank 1 has ended or is stopped")
    late = refused(RANK="1", WORLD_SIZE="2", **place)
    assert late.startswith(
        f"init_process_group: rank 1 of 2: expected the store at 127.0.0.1:{place['MASTER_PORT']}, "
    )
