"""Test that threads and signal handlers which share a prefetcher get whole batches, each once, or an error."""

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from queue_device import queue_device
from shoestring.data import Prefetcher, prefetcher


@pytest.fixture(params=["cpu", "queue"])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cpu") if request.param == "cpu" else queue_device()


def numbered(number: int) -> Tensor:
    return torch.full((100,), number)


def is_batch(found: Any, number: int) -> bool:
    return isinstance(found, Tensor) and torch.equal(found.cpu(), numbered(number))


class Held:
    """A prefetcher whose source blocks until ``free`` is set. Calls of it end in threads of their own."""

    def __init__(self, device: torch.device) -> None:
        self.entered, self.free = threading.Event(), threading.Event()
        self.numbers: list[int] = []
        self.batches = Prefetcher(self.source, device, stop=2)
        self._ended: queue.SimpleQueue[object] = queue.SimpleQueue()

    def source(self, number: int) -> Tensor:
        self.numbers.append(number)
        self.entered.set()
        self.free.wait(60)
        return numbered(number)

    def next(self) -> Any:
        return next(self.batches)

    def call(self, function: Callable[[], object]) -> None:
        def thread() -> None:
            try:
                self._ended.put(function())
            except Exception as error:
                self._ended.put(error)

        threading.Thread(target=thread, daemon=True).start()

    def ended(self) -> object:
        """Return the result or the exception of the call that ends next. Free the source if none ends."""
        try:
            return self._ended.get(timeout=20)
        except queue.Empty:
            self.free.set()
            raise AssertionError("no call has ended while the source blocks") from None


ALONE = (
    "Prefetcher: {}: expected one thread at a time, got a call while another thread waits for batch 0. "
    "Call next from one thread, or hold a lock around next and the use of its batch."
)


def test_a_second_thread_in_next_is_an_error(device: torch.device) -> None:
    held = Held(device)
    held.call(held.next)
    assert held.entered.wait(20)
    held.call(held.next)
    assert str(held.ended()) == ALONE.format("next")
    held.free.set()
    assert is_batch(held.ended(), 0)
    assert is_batch(next(held.batches), 1)
    # Two readers would have read batches twice.
    assert list(held.batches) == [] and held.numbers == [0, 1]


def test_load_state_dict_beside_next_is_an_error(device: torch.device) -> None:
    held = Held(device)
    held.call(held.next)
    assert held.entered.wait(20)
    held.call(lambda: held.batches.load_state_dict({"position": 1}))
    assert str(held.ended()) == ALONE.format("load_state_dict")
    assert held.batches.state_dict() == {"position": 0}
    held.free.set()
    assert is_batch(held.ended(), 0)
    assert is_batch(next(held.batches), 1)


def test_close_ends_a_next_that_waits(device: torch.device) -> None:
    held = Held(device)
    held.call(held.next)
    assert held.entered.wait(20)
    held.call(held.batches.close)
    assert str(held.ended()).startswith(
        "Prefetcher: expected an open prefetcher, got a closed one. Create a new"
    )
    held.free.set()
    assert held.ended() is None and held.batches.state_dict() == {"position": 0}


def next_closed_at(batches: Prefetcher, line: int) -> Tensor | None:
    """Return next(batches), and close the prefetcher before the n-th line of its code that this thread runs.

    Returns None if ``next`` raises because the prefetcher is closed.
    """
    lines = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != prefetcher.__file__:
            return None
        lines += event == "line"
        if event == "line" and lines == line:
            sys.settrace(None)
            batches.close()
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        batch: Tensor = next(batches)
    except RuntimeError as error:
        assert str(error).startswith("Prefetcher: expected an open prefetcher, got a closed one")
        return None
    finally:
        sys.settrace(former)
    return batch


@pytest.mark.parametrize("taken", [0, 2])
def test_close_at_each_moment_of_next(taken: int, device: torch.device) -> None:
    """``next`` returns a batch, or raises and keeps the position. Signal handlers and other threads may close."""
    raised = 0
    for line in range(1, 100):
        batches = Prefetcher(numbered, device)
        for _ in range(taken):
            next(batches)
        batch = next_closed_at(batches, line)
        if batch is not None:
            assert is_batch(batch, taken)
        assert batches.state_dict() == {"position": taken + (batch is not None)}
        raised += batch is None
        if batches._ring is not None:
            batches.close()
            break
    else:
        raise AssertionError("next has more lines")
    assert raised > 10


def test_a_signal_handler_may_close(device: torch.device) -> None:
    """The handler runs in the thread that is in ``next``, and interrupts it at any place."""
    held = Held(device)

    def close(*_: object) -> None:
        held.free.set()
        held.batches.close()

    def send() -> None:
        held.entered.wait(20)
        os.kill(os.getpid(), signal.SIGUSR1)

    former = signal.signal(signal.SIGUSR1, close)
    try:
        held.call(send)
        with pytest.raises(RuntimeError, match="Prefetcher: expected an open prefetcher, got a closed one"):
            next(held.batches)
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert held.batches.state_dict() == {"position": 0}


def test_two_threads_lose_no_batch(device: torch.device) -> None:
    """Threads that take turns by chance get each batch once, whole, or an error."""
    count = 300
    batches = Prefetcher(lambda number: (numbered(number), number), device, depth=4, stop=count)
    taken: list[int] = []
    errors: list[str] = []

    def consume() -> None:
        while True:
            try:
                x, number = next(batches)
            except StopIteration:
                return
            except Exception as error:
                errors.append(str(error))
                if "expected one thread at a time" not in errors[-1]:
                    return
                continue
            taken.append(number)
            if device.type == "cpu" and not torch.equal(x, numbered(number)):
                errors.append(f"batch {number} has the tensor of another")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=consume, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(taken) == list(range(count))
    assert {error.partition(", got")[0] for error in errors} <= {
        "Prefetcher: next: expected one thread at a time"
    }
