"""Test DiLoCo and LocalSGD in C++ programs of several processes, against the reference and Python."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest
import torch

from cpp_processes import finish, run, skip_without_gloo, start
from diloco_reference import reference
from ports import free_port

# An average rounds a weight below 4 about eight times, and the momentum adds up ten averages.
ROUNDING = 4 * 2.0**-24 * 8 * 10


@pytest.fixture(autouse=True, scope="module")
def _needs_gloo() -> None:
    skip_without_gloo()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("resumes", [0, 1], ids=["whole", "resumed"])
@pytest.mark.parametrize(
    ("kind", "every", "fragments", "overlap"),
    [("diloco", 5, 1, 0), ("diloco", 6, 3, 2), ("local", 4, 2, 0), ("local", 4, 2, 3)],
)
@pytest.mark.sample(10)
def test_weights_are_those_of_the_reference(
    ranks: int, kind: str, every: int, fragments: int, overlap: int, resumes: int
) -> None:
    options: dict[str, Any] = {} if kind == "diloco" else {"lr": 1.0, "momentum": 0.0}
    expected = reference(ranks, 18, every, fragments=fragments, overlap=overlap, **options)
    found = run(ranks, "diloco", kind, every, "none", fragments, overlap, 18, resumes)
    for out, own in zip(found, expected, strict=True):
        values = torch.tensor([float(x) for x in out.split("\n")[0].split()], dtype=torch.float64)
        exact = torch.cat([p.flatten() for p in own])
        torch.testing.assert_close(values, exact, rtol=0, atol=ROUNDING * 18 / every)


@pytest.mark.parametrize(("fragments", "overlap"), [(1, 0), (2, 1)])
def test_few_bits(fragments: int, overlap: int) -> None:
    """All ranks have the same averaged weights, which are near those of the reference."""
    expected = reference(2, 18, 6, fragments=fragments, overlap=overlap)
    for out, own in zip(run(2, "diloco", "diloco", 6, "8bit", fragments, overlap, 18), expected, strict=True):
        values = torch.tensor([float(x) for x in out.split("\n")[0].split()], dtype=torch.float64)
        exact = torch.cat([p.flatten() for p in own])
        # Moves of six steps are below 0.3, so a code of 8 bits is off by 0.3 / 127 / 2 at most in each hop.
        assert 0 < (values - exact).abs().max() < 4 * 0.3 / 127


@pytest.mark.parametrize(("ranks", "overlap"), [(1, 0), (2, 1)])
def test_threads_step_and_read(ranks: int, overlap: int) -> None:
    """Two threads step one object and read its counters, which wait for the collectives of the other thread."""
    run(ranks, "diloco_threads", overlap)


@pytest.mark.parametrize("compress", ["none", "4bit"])
@pytest.mark.parametrize("at_step", [8, 10, 11])
@pytest.mark.sample(3)
def test_survivors_go_on(compress: str, at_step: int) -> None:
    """Averages begin in even steps and end one step later."""
    *survivors, killed = finish(start(3, "diloco_survivors", at_step, compress))
    assert killed[0] == -signal.SIGKILL
    for rank, (code, out, errors) in enumerate(survivors):
        assert code == 0, errors
        error, end = out.splitlines()
        assert end == "passed"
        assert re.fullmatch(rf"rank {rank} of 3: .*; rank 2 has ended or is stopped", error), error


def test_a_process_joins() -> None:
    port = free_port()
    first = start(2, "diloco_join", port)
    second = start(3, "diloco_join", port, port=port, only=2)
    done = finish(first + second)
    assert all(code == 0 and out == "passed\n" for code, out, _ in done), done


def test_errors_say_what_was_expected() -> None:
    same = "expected the same on all ranks, received"
    for out in run(2, "diloco_refuses"):
        assert out.splitlines()[:-1] == [
            "DiLoCo: every: expected at least 1, received 0",
            "DiLoCo: lr: expected a number above 0, received 0",
            "DiLoCo: momentum: expected a number from 0 to below 1, received 1",
            'DiLoCo: compress: expected "none", "8bit", "4bit" or "1bit", received "2bit"',
            "DiLoCo: fragments: expected a number from 1 to every, 4, received 5",
            "DiLoCo: overlap: expected a number of steps from 0 to below every, 4, received 4",
            "DiLoCo: alpha: expected a number from 0 to below 1, received 1",
            "DiLoCo: alpha: expected 0 without overlap, received 0.5",
            "DiLoCo: bucket_bytes: expected a number above 0, received 0",
            f"DiLoCo: every: {same} 4 on rank 0 and 5 on rank 1",
            "DiLoCo: group: expected a process group, received none",
            "DiLoCo: parameters: expected floating-point dtypes, received one in Long. Leave it out.",
            "DiLoCo: module: expected the same parameters on all ranks; parameter 0 is parameter 0 [4] Float on rank 0 "
            "and parameter 0 [5] Float on rank 1",
            "LocalSGD: optimizer: expected one that keeps no second copy of the weights, received ScheduleFreeAdamW. "
            "Use AdamW.",
            "LocalSGD: optimizer: expected one that keeps no second copy of the weights, received one with "
            'weight_rounding("remainder"). Round to nearest or stochastically.',
            "survivors: group: expected a group of which a collective has failed, received one that works",
            "survivors: group: expected a group of several processes of init_process_group(), new_group() or DiLoCo, "
            "received none",
            "DiLoCo: group: expected a process group, received none",
            "LocalSGD: state: momentum: expected buckets of [] elements, received [4]",
            "DiLoCo: state: expected an entry mean.0, received none",
            "DiLoCo: state: begun: expected 1 fragments, received 2",
        ]
