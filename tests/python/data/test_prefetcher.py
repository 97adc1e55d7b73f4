"""Test that prefetched batches are those of a plain loop, on the CPU and on an asynchronous device."""

import doctest
import gc
import subprocess
import sys
import threading
import time
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils.data import DataLoader, TensorDataset

from queue_device import compute, queue_device, set_copy_seconds
from shoestring.data import Prefetcher, prefetcher

Pair = namedtuple("Pair", "x y")


@pytest.fixture(params=["cpu", "queue"])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cpu") if request.param == "cpu" else queue_device()


def numbered(number: int) -> Tensor:
    return torch.full((100,), number)


def nested(number: int) -> Any:
    """Return a batch with all kinds of tensors and structures; sizes vary with the number."""
    generator = torch.Generator().manual_seed(number)
    n = 1 + number * 37 % 50
    x = torch.randn(n, 6, generator=generator)
    return {
        "x": [x, x.t(), x[:, ::2], x[0].expand(4, 6)],
        "pair": Pair(x.bfloat16(), (x > 0, torch.arange(n, dtype=torch.uint8))),
        "ordered": OrderedDict(b=torch.empty(0, n), a=torch.tensor(n), none=None),
        "complex": torch.view_as_complex(x.view(n, 3, 2)).conj(),
        "others": [number, "text", 1.5, (), {}, {"deep": [[x.half()]]}],
        "leaf": torch.nn.Parameter(x),
    }


def assert_same(ours: Any, expected: Any, device: torch.device) -> None:
    left, structure = _pytree.tree_flatten(ours)
    right, wanted = _pytree.tree_flatten(expected)
    assert structure == wanted
    for a, b in zip(left, right, strict=True):
        if not isinstance(b, Tensor):
            assert type(a) is type(b) and a == b
            continue
        assert a.device == device and a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.detach().cpu(), b.detach())


def test_batches_of_any_nesting(device: torch.device) -> None:
    for depth in (1, 2, 5):
        with Prefetcher(nested, device, depth=depth, stop=20) as batches:
            for number in range(20):
                assert_same(next(batches), nested(number), device)
            for _ in range(2):
                with pytest.raises(StopIteration):
                    next(batches)


@pytest.mark.parametrize(
    "bare", [numbered, lambda n: (), lambda n: None, lambda n: [n]], ids=["tensor", "empty", "None", "int"]
)
def test_batches_without_structure_or_tensors(bare: Callable[[int], Any], device: torch.device) -> None:
    for number, batch in enumerate(Prefetcher(bare, device, stop=5)):
        assert_same(batch, bare(number), device)


def test_a_source_that_fills_buffers(device: torch.device) -> None:
    """Tensors of `empty` come back with their values, whole, as views, and beside other tensors."""

    def source(number: int, empty: Callable[[Any, torch.dtype], Tensor]) -> Any:
        n = 1 + number * 37 % 50
        x, y = empty((n, 6), torch.int64), empty([n], torch.uint8)
        assert x.shape == (n, 6) and y.shape == (n,) and x.dtype == torch.int64 and y.dtype == torch.uint8
        x.numpy()[:] = number
        y.fill_(number)
        return {"x": [x, x[: n // 2, 2:]], "y": y, "other": numbered(number), "none": empty((0, 3), x.dtype)}

    def host_memory(size: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype)

    for depth in (1, 2, 5):
        with Prefetcher(source, device, depth=depth, stop=40, fills_buffers=True, poison=True) as batches:
            for number in range(40):
                assert_same(next(batches), source(number, host_memory), device)


def test_buffers_are_those_that_are_copied() -> None:
    """From the second round on, `empty` returns the memory that the copy to the device reads."""
    places: list[int] = []

    def source(number: int, empty: Callable[[Any, torch.dtype], Tensor]) -> Tensor:
        x = empty((100,), torch.int64).fill_(number)
        places.append(x.data_ptr())
        return x

    with Prefetcher(source, queue_device(), stop=20, fills_buffers=True) as batches:
        assert [int(batch.cpu()[0]) for batch in batches] == list(range(20))
    assert places[2:4] * 9 == places[2:] and places[2] != places[3]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader(workers: int, device: torch.device) -> None:
    """Batches of a shuffled DataLoader are those of a plain loop with the same seed, in each pass."""
    data = TensorDataset(torch.randn(37, 5), torch.arange(37))
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    for seed in range(2):
        torch.manual_seed(seed)
        expected = list(loader)
        torch.manual_seed(seed)
        found = [[t.cpu().clone() for t in batch] for batch in Prefetcher(loader, device)]
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y))


def test_iterables(device: torch.device) -> None:
    items = [numbered(i) for i in range(6)]
    for source in (items, iter(items), (x for x in items), TensorDataset(torch.stack(items))):
        found = [_pytree.tree_leaves(batch)[0].cpu().clone() for batch in Prefetcher(source, device)]
        assert len(found) == 6 and all(map(torch.equal, found, items))
    assert len(list(Prefetcher(items, device, stop=4))) == 4
    assert list(Prefetcher([], device)) == []


def test_a_run_resumes_at_every_position(device: torch.device) -> None:
    items = [nested(i) for i in range(6)]
    for source in (nested, items):
        for stopped in range(7):
            with Prefetcher(source, device, stop=6) as first:
                for _ in range(stopped):
                    next(first)
                state = first.state_dict()
            assert state == {"position": stopped} == first.state_dict()
            loaded = Prefetcher(source, device, stop=6)
            loaded.load_state_dict(state)
            for resumed in (loaded, Prefetcher(source, device, start=stopped, stop=6)):
                for number in range(stopped, 6):
                    assert_same(next(resumed), items[number], device)
                assert list(resumed) == []
                # another pass over the same source
                resumed.load_state_dict({"position": 4})
                assert len(list(resumed)) == 2


def test_a_state_that_does_not_fit(device: torch.device) -> None:
    items = [numbered(i) for i in range(3)]
    batches = Prefetcher(items, device, stop=5)
    assert next(batches)[0] == 0 if device.type == "cpu" else next(batches) is not None
    for state in ({}, {"position": "1"}, {"position": True}, {"position": -1}, {"position": 6}):
        with pytest.raises((ValueError, RuntimeError), match="Prefetcher: (state|start|stop): expected"):
            batches.load_state_dict(state)
    # the failed calls have changed nothing
    assert_same(next(batches), items[1], device)
    batches.load_state_dict({"position": 3})
    assert list(batches) == []
    batches.load_state_dict({"position": 4})
    with pytest.raises(
        ValueError, match="start: expected at most 3, the number of batches of the source, got 4"
    ):
        next(batches)
    once = Prefetcher(iter(items), device)
    once.load_state_dict({"position": 1})
    assert_same(next(once), items[1], device)
    with pytest.raises(ValueError, match="Prefetcher: source: expected an iterable that can begin again"):
        once.load_state_dict({"position": 0})
    assert_same(next(once), items[2], device)


@pytest.mark.parametrize("bad", [0, 1, 4])
@pytest.mark.parametrize(
    "error", [KeyError("x"), SystemExit(3), OSError(5, "disk")], ids=lambda e: type(e).__name__
)
def test_an_exception_comes_with_its_batch(error: BaseException, bad: int, device: torch.device) -> None:
    def source(number: int) -> Tensor:
        if number == bad:
            raise error
        return numbered(number)

    def generator() -> Iterator[Tensor]:
        for number in range(9):
            yield source(number)

    for each in (source, generator()):
        batches = Prefetcher(each, device, depth=3)
        for number in range(bad):
            time.sleep(0.002)  # the reader fails before its batch is asked for
            assert_same(next(batches), numbered(number), device)
        for _ in range(2):
            with pytest.raises(type(error)) as raised:
                next(batches)
            assert raised.value is error
            assert batches.state_dict() == {"position": bad}


def test_stop_iteration_does_not_end_the_loop_of_a_callable() -> None:
    items = iter([numbered(0)])
    batches = Prefetcher(lambda _: next(items), "cpu")
    next(batches)
    with pytest.raises(
        RuntimeError, match="source: expected batch 1, got StopIteration. Give the prefetcher"
    ):
        next(batches)


class Unknown:
    def __init__(self) -> None:
        self.x = torch.ones(2)


def test_wrong_batches(device: torch.device) -> None:
    for wrong in (torch.eye(3).to_sparse(), torch.ones(2, device="meta")):
        batches = Prefetcher([numbered(0), (numbered(1), wrong)], device)
        next(batches)
        with pytest.raises(
            (ValueError, RuntimeError),
            match="Prefetcher: source: expected dense tensors on the CPU, got .* as tensor 1 of batch 1. Return",
        ):
            next(batches)
    for unknown in (Unknown(), UserDict(x=torch.ones(2))):
        with pytest.raises(
            TypeError, match=f"that torch.utils._pytree knows, got {type(unknown).__name__} in batch 0"
        ):
            next(Prefetcher([{"x": unknown}], device))


def test_the_example_in_the_documentation() -> None:
    failed, run = doctest.testmod(prefetcher)
    assert failed == 0 < run


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="Prefetcher: source: expected a callable or an iterable, got int"):
        Prefetcher(3, "cpu")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="source: expected a callable with fills_buffers, got list"):
        Prefetcher([numbered(0)], "cpu", fills_buffers=True)
    for arguments, message in (
        ({"depth": 0}, "depth: expected at least 1, got 0"),
        ({"start": -1}, "start: expected at least 0, got -1"),
        ({"start": 3, "stop": 2}, "stop: expected at least start, which is 3, got 2"),
        ({"device": "meta"}, "device: expected the CPU or an accelerator of this PyTorch, got meta"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=f"Prefetcher: {message}") as raised:
            Prefetcher(numbered, **({"device": "cpu"} | arguments))
        assert "\n" not in str(raised.value)


def test_the_cpu_gets_the_tensors_of_the_source() -> None:
    items = [(torch.ones(3), torch.eye(2).t()) for _ in range(4)]
    for batch, item in zip(Prefetcher(items, "cpu"), items, strict=True):
        assert all(a is b or a.data_ptr() == b.data_ptr() for a, b in zip(batch, item, strict=True))


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "Prefetcher"]


def test_close_and_garbage_end_the_reader(device: torch.device) -> None:
    before = set(readers())
    for taken in range(6):
        for way in ("close", "garbage"):
            inside = threading.Event()

            def source(number: int) -> Tensor:
                inside.set()
                time.sleep(0.003)
                inside.clear()
                return numbered(number)

            batches = Prefetcher(source, device, depth=1 + taken % 3)
            for _ in range(taken):
                next(batches)
            if way == "garbage":
                del batches
                gc.collect()
            else:
                batches.close()
                batches.close()
                with pytest.raises(
                    RuntimeError, match="Prefetcher: expected an open prefetcher, got a closed one"
                ):
                    next(batches)
                with pytest.raises(RuntimeError, match="got a closed one"):
                    batches.load_state_dict({"position": 0})
                assert batches.state_dict() == {"position": taken}
            assert not inside.is_set() and set(readers()) <= before


def test_python_exits_with_an_open_prefetcher() -> None:
    code = """
import time, torch
from shoestring.data import Prefetcher
batches = Prefetcher(lambda n: (time.sleep(0.05), torch.ones(3))[1], "cpu", depth=3)
next(batches)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_interrupts_a_wait() -> None:
    """Ctrl-C interrupts ``next`` while the source is stuck."""
    code = """
import os, signal, threading, time, torch
from shoestring.data import Prefetcher
free = threading.Event()
batches = Prefetcher(lambda n: free.wait(60), "cpu")
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
began = time.monotonic()
try:
    next(batches)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - began < 15)
free.set()
print(next(batches))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted True\nTrue\n", "")


def test_importing_imports_neither_transformers_nor_tokenizers() -> None:
    code = """
import sys
from shoestring.data import Prefetcher
print([name for name in ("transformers", "tokenizers", "rich", "typer") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_interpreter_runs_while_next_waits() -> None:
    """``next`` holds no GIL while it waits: another thread counts meanwhile, and so does the source."""
    counts = [0]

    def source(number: int) -> Tensor:
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            counts[0] += 1
        return numbered(number)

    with Prefetcher(source, "cpu", stop=2) as batches:
        assert len(list(batches)) == 2
        # The second batch was read while the loop waited for the first, or after.
        assert batches.seconds_waited > 0.05
    assert counts[0] > 100 and batches.seconds_waited > 0.05


def test_two_prefetchers_at_once(device: torch.device) -> None:
    pairs = zip(Prefetcher(nested, device, stop=9), Prefetcher(numbered, device, depth=3), strict=False)
    for number, (a, b) in enumerate(pairs):
        assert_same(a, nested(number), device)
        assert_same(b, numbered(number), device)


def test_late_readers_find_poison() -> None:
    for poison in (False, True):
        batches = Prefetcher(lambda number: torch.full((9,), 1.0), queue_device(), stop=1, poison=poison)
        first = next(batches)
        version = first._version
        assert list(batches) == [] and first._version > version
        time.sleep(0.05)
        assert first.cpu().isnan().all() == poison


def test_the_device_reads_its_own_batches() -> None:
    """The host runs ahead of slow steps and slow copies, and each step reads its own batch all the same."""
    set_copy_seconds(0.002)
    results = [compute(batch, 0.003) for batch in Prefetcher(numbered, queue_device(), stop=15, poison=True)]
    set_copy_seconds(0)
    assert all(torch.equal(result.cpu(), numbered(number)) for number, result in enumerate(results))


@pytest.mark.alone
@pytest.mark.parametrize("link", ["copy", "source"])
def test_a_slow_link_is_hidden(link: str) -> None:
    """Steps of t with copies of 0.9 t take at most 5 % longer than without copies, but for the first copy."""
    step, copy, count = 0.02, 0.018, 25

    def source(number: int) -> Tensor:
        time.sleep(copy if link == "source" else 0)
        return numbered(number)

    def seconds() -> float:
        began = time.perf_counter()
        with Prefetcher(source, queue_device(), stop=count) as batches:
            if link == "copy":
                # The device works through its queue, and the host waits for it at the end.
                for batch in batches:
                    last = compute(batch, step)
                last.cpu()
            else:
                for _ in batches:
                    time.sleep(step)
        return time.perf_counter() - began

    set_copy_seconds(copy if link == "copy" else 0)
    try:
        seconds()
        # A busy machine delays some attempts, but cannot make one faster.
        best = min(seconds() for _ in range(4))
    finally:
        set_copy_seconds(0)
    print(f"{best:.3f} s for {count} steps of {step} s with copies of {copy} s")
    assert count * step < best <= 1.05 * count * step + copy
