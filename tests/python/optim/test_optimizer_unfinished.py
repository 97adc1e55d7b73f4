"""Tests of steps and backward passes that fail or are interrupted.

Afterwards the optimizer continues with the same bits, or its error tells the user to load a checkpoint.
"""

import _thread
import copy
import errno
import functools
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from offload_faults import disturb_offload
from operator_faults import replaced
from shoestring.optim import SAM, AdamW
from shoestring.optim.interrupts import Uninterrupted

MODES = [(None, False), ("cpu", False), ("stream", False), ("nvme", False)]
MODES += [(place, True) for place, _ in MODES]
IDS = [f"{place}{' in backward' if within else ''}" for place, within in MODES]


def disturb(delay: int = 0, fail_after: int = -1, error: int = 0) -> None:
    disturb_offload(delay, fail_after, error)


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGINT)
    yield
    disturb()
    assert signal.getsignal(signal.SIGINT) is handler


@functools.lru_cache(200)
def random_factors(step: int, sizes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(size, generator=generator) for size in sizes]


class Run:
    """Three parameters in two groups and their optimizer.

    With a large `size`, the state of the first parameter is offloaded in several chunks, which are stepped
    one by one.
    """

    def __init__(
        self, place: str | None, within: bool, folder: Path, clip: float | None = None, size: int = 3000
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(torch.randn(n, generator=generator)) for n in (size, 700, 300)]
        groups = [{"params": self.params[:1]}, {"params": self.params[1:]}]
        where = f"nvme:{folder}" if place == "nvme" else place
        self.opt = AdamW(
            groups, lr=1e-2, state_format="fp32", offload=where, step_in_backward=within, max_grad_norm=clip
        )

    def loss(self, step: int) -> Tensor:
        factors = random_factors(step, tuple(p.numel() for p in self.params))
        return sum(((p * x).sum() for p, x in zip(self.params, factors, strict=True)), torch.zeros(()))

    def step(self, step: int, micro: int = 1) -> None:
        for i in range(micro - 1):
            with self.opt.accumulate():
                self.loss(1000 * step + i).backward()
        self.loss(step).backward()
        self.opt.step()
        self.opt.zero_grad()

    def saved(self) -> tuple[list[Tensor], dict[str, Any]]:
        return [p.detach().clone() for p in self.params], copy.deepcopy(self.opt.state_dict())

    def load(self, saved: tuple[list[Tensor], dict[str, Any]]) -> None:
        with torch.no_grad():
            for p, value in zip(self.params, saved[0], strict=True):
                p.copy_(value)
        self.opt.load_state_dict(saved[1])

    def bits(self) -> list[Tensor]:
        found = [p.detach().clone() for p in self.params]
        return found + [t.clone() for p in self.params for _, t in sorted(self.opt.state[p].items())]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@functools.cache
def reference(steps: tuple[int, ...], micro: int, **options: Any) -> list[Tensor]:
    run = Run(None, False, Path(), **options)
    for step in steps:
        run.step(step, micro)
    return run.bits()


def go_on(run: Run, saved: tuple[list[Tensor], dict[str, Any]], micro: int) -> str:
    """After a failed step 2, drop its gradients and take step 3.

    Returns:
        "loaded" if step 3 raised an error that requires a checkpoint, which is then loaded; else "went on".
    """
    run.opt.zero_grad()
    try:
        run.step(3, micro)
    except RuntimeError as refusal:
        assert "Load the weights and the optimizer's state of a checkpoint" in str(refusal)
        run.opt.zero_grad()
        run.load(saved)
        run.step(3, micro)
        return "loaded"
    return "went on"


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(("place", "within"), MODES, ids=IDS)
@pytest.mark.sample(14)
def test_an_operator_that_fails(
    place: str | None,
    within: bool,
    clip: float | None,
    micro: int,
    tmp_path: Path,
) -> None:
    """After the operator fails, the step can be repeated or dropped, or a checkpoint must be loaded.

    In the test, the first, the second or the third call of the operator in a step fails. If a checkpoint is
    needed, the next step raises an error that says so.
    """
    # Without offload="cpu", step_in_backward clips by the norm of the previous step, so results differ from
    # the reference.
    exact = not within or place == "cpu"
    without = reference((0, 1, 3), micro, clip=clip)
    with_it = reference((0, 1, 2, 3), micro, clip=clip)
    outcomes = set()
    for fails_at in range(3):
        for repeats in (False, True):
            run = Run(place, within, tmp_path, clip)
            for step in range(2):
                run.step(step, micro)
            saved, calls = run.saved(), 0

            def failing(call: Callable[[], None]) -> None:
                nonlocal calls
                calls += 1
                if calls == fails_at + 1:
                    raise MemoryError("no memory")
                call()

            try:
                with replaced("adamw_", failing):
                    run.step(2, micro)
                failed = False
            except MemoryError:
                failed = True
            if not failed:
                outcomes.add("whole")
                continue
            if repeats and not within:
                run.opt.step()
                run.opt.zero_grad()
                run.step(3, micro)
                assert same(run.bits(), with_it)
            else:
                outcomes.add(go_on(run, saved, micro))
                assert not exact or same(run.bits(), without)
    assert "whole" in outcomes or within
    # With step_in_backward and offload="cpu", another bucket of parameters may be stepped at the same time,
    # so a failed step cannot be dropped.
    assert "went on" in outcomes or (within and place == "cpu")


@pytest.mark.parametrize("within", [False, True], ids=["", "in backward"])
def test_a_disk_that_fails(within: bool, tmp_path: Path) -> None:
    """After a read or write of offloaded state fails, training goes on, if needed from a checkpoint.

    In each run a different read or write fails. The failed step may have updated none, some or all of the
    parameters.
    """
    size = 2_500_000  # number of elements of a parameter whose offloaded state takes three chunks
    without = reference((0, 1, 3), 1, size=size)
    with_it = reference((0, 1, 2, 3), 1, size=size)
    outcomes = set()
    for fail_after in range(0, 18, 2):
        run = Run("nvme", within, tmp_path, size=size)
        for step in range(2):
            run.step(step)
        saved = run.saved()
        disturb(fail_after=fail_after, error=errno.EIO)
        try:
            run.step(2)
        except RuntimeError as error:
            assert "Input/output error" in str(error)
        else:
            outcomes.add("no failure")
            continue
        finally:
            disturb()
        outcome = go_on(run, saved, 1)
        if outcome == "went on" and same(run.bits(), with_it):
            outcome = "finished"
        else:
            assert same(run.bits(), without), f"{fail_after}: {outcome}"
        outcomes.add(outcome)
    assert outcomes >= {"loaded", "finished"} and (within or "went on" in outcomes), outcomes


@pytest.mark.parametrize(("place", "within"), MODES, ids=IDS)
def test_a_backward_that_fails(place: str | None, within: bool, tmp_path: Path) -> None:
    """Training continues after a backward pass that fails when some gradients are already computed.

    The failing backward pass is the last one of a step, or that of an earlier micro-batch.
    """

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("no gradient")

    def fail(run: Run) -> None:
        q = run.params[2]
        head = Fail.apply(q.clone()).sum()
        with pytest.raises(ValueError, match="no gradient"):
            (head + run.loss(2)).backward()

    without = reference((0, 1, 3), 3)
    for in_accumulate in (False, True):
        run = Run(place, within, tmp_path)
        for step in range(2):
            run.step(step, 3)
        saved = run.saved()
        if in_accumulate:
            with run.opt.accumulate():
                run.loss(7).backward()
            with run.opt.accumulate():
                fail(run)
        else:
            fail(run)
        outcome = go_on(run, saved, 3)
        assert outcome == "went on" or (within and not in_accumulate)
        assert same(run.bits(), without)


def test_sums_of_a_failed_micro_batch_are_not_used(tmp_path: Path) -> None:
    run = Run(None, False, tmp_path)
    with pytest.raises(ValueError, match="stop"), run.opt.accumulate():
        run.params[1].register_post_accumulate_grad_hook(lambda p: (_ for _ in ()).throw(ValueError("stop")))
        run.loss(0).backward()
    with pytest.raises(
        RuntimeError, match=r"AdamW: step: expected whole sums .* Call zero_grad\(\) to drop them"
    ):
        run.opt.step()


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(("place", "within"), MODES, ids=IDS)
@pytest.mark.sample(8)
def test_ctrl_c_at_random_times(
    place: str | None, within: bool, micro: int, tmp_path: Path, seed: int
) -> None:
    """An interrupted step is taken completely or not at all.

    Repeating the steps that were not taken gives the bits of training without interrupts.
    """
    rng, count, interrupts = random.Random(seed), 25, 0
    expected = reference(tuple(range(count)), micro)
    run = Run(place, within, tmp_path)
    disturb(delay=200)
    began = time.perf_counter()
    run.step(0, micro)
    typical = time.perf_counter() - began
    step = 1
    while step < count:
        timer = threading.Timer(rng.uniform(0, 1.5 * typical), _thread.interrupt_main)
        threads = _thread._count()
        try:
            try:
                timer.start()
                run.step(step, micro)
            finally:
                timer.join()
                # An interrupt that was deferred to the end of backward arrives from a thread of its own.
                end = time.monotonic() + 2
                while _thread._count() > threads and time.monotonic() < end:
                    time.sleep(0.001)
                time.sleep(0.005)
        except KeyboardInterrupt:
            interrupts += 1
        run.opt.zero_grad()
        # If the interrupt came outside of backward, gradient sums of earlier micro-batches are left. Drop
        # them.
        run.opt._core.drop()
        steps = {int(run.opt.state[p]["step"]) for p in run.params}
        assert len(steps) == 1 and steps <= {step, step + 1}, f"interrupt {interrupts}: {steps}"
        step = steps.pop()
    assert interrupts > 5
    assert same(run.bits(), expected)


def test_interrupts_wait_and_a_second_one_does_not() -> None:
    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            seen.append("inner")
        seen.append("outer")
    assert seen == ["inner", "outer"]
    with pytest.raises(KeyboardInterrupt), Uninterrupted(), Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        seen.append("once")
        signal.raise_signal(signal.SIGINT)
        seen.append("twice")
    assert seen[2:] == ["once"]
    with pytest.raises(KeyboardInterrupt):
        try:
            with Uninterrupted():
                signal.raise_signal(signal.SIGINT)
                raise ValueError
        except ValueError:
            seen.append("lost")
    assert "lost" not in seen

    numbers: list[int] = []
    before = {
        s: signal.signal(s, lambda number, _: numbers.append(number)) for s in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        with Uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            assert numbers == []
        assert sorted(numbers) == [signal.SIGINT, signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    thread = threading.Thread(target=lambda: Uninterrupted().start())
    thread.start()
    thread.join()


class FailsAtTheSecondWhere(TorchDispatchMode):
    """Raise MemoryError in the second call of ``torch.where``, with which SAM moves the second weight."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += "where" in str(func)
        if "where" in str(func) and self.calls == 2:
            raise MemoryError
        return func(*args, **(kwargs or {}))


def test_sam_takes_the_weights_back_where_a_half_fails() -> None:
    p, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    opt = SAM([p, other], AdamW, lr=0.1)
    p.grad = torch.ones(3)
    other.grad = torch.ones(3)
    with pytest.raises(MemoryError), FailsAtTheSecondWhere():
        opt.first_step()
    assert torch.equal(p, torch.ones(3))
    opt.first_step(zero_grad=True)
    with pytest.raises(RuntimeError, match=r"Call zero_grad\(\) and second_step\(\) to restore the weights"):
        opt.first_step()
    opt.zero_grad()
    opt.second_step()
    assert torch.equal(p, torch.ones(3))


EXIT = """
import os, sys, torch, torch._dynamo
from shoestring.optim import AdamW
sys.path.append(sys.argv[2])
from offload_faults import disturb_offload
from operator_faults import replaced
for how, place in (("cycle", f"nvme:{sys.argv[1]}"), ("raise", "cpu"), ("", "")):
    if how and (process := os.fork()) == 0:
        break
    if how:
        print(how, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
if not how:
    sys.exit()
disturb_offload(20000)
params = [torch.nn.Parameter(torch.randn(3000)) for _ in range(4)]
opt = AdamW(params, offload=place, step_in_backward=True)
for step in range(2):
    sum(p.square().sum() for p in params).backward()
    if step == 0:
        opt.step()
        opt.zero_grad()
if how == "cycle":
    opt.self = opt
else:
    raise SystemExit(3)
"""


def test_an_exit_with_work_under_way(tmp_path: Path) -> None:
    """A process that ends while its optimizer works ends with its own exit code and without a message.

    One process imports the libraries and forks the two that end, each before PyTorch starts a thread.
    """
    command = [sys.executable, "-c", EXIT, str(tmp_path), str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == "", str(done)
    assert done.stdout.split("\n") == ["cycle 0", "raise 3", ""]
