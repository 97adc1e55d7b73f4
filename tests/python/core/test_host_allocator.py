"""Test the allocator of CPU tensors from Python: counts, forks, DataLoader workers, compiled code, memory."""

import gc
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shoestring
from children import in_child

MIB = 1 << 20
KEPT = 7


@pytest.fixture
def allocator() -> Iterator[shoestring.HostAllocator]:
    with shoestring.host_allocator() as switched_on:
        yield switched_on
    gc.collect()


def test_statistics_are_exact(allocator: shoestring.HostAllocator) -> None:
    before = allocator.stats()
    allocator.reset_peaks()
    sizes = [1, 1000, 65535, 65536, 3 * MIB + 1]
    tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    assert allocator.stats().allocated - before.allocated == sum(sizes)
    assert allocator.stats().allocations - before.allocations == len(sizes)
    del tensors
    after = allocator.stats()
    assert after.allocated == before.allocated
    assert after.peak_allocated == before.allocated + sum(sizes)
    assert after.peak_held >= after.peak_allocated
    assert allocator.empty_cache() > 0
    assert allocator.stats().held < after.held
    assert allocator.stats().returned > before.returned


def test_contexts_nest() -> None:
    outside = shoestring.host_allocator(enable=False)
    assert not outside.enabled
    with shoestring.host_allocator() as outer:
        with shoestring.host_allocator():
            assert outside.enabled
        assert outer.enabled
        kept = torch.full((MIB,), KEPT)
    assert not outside.enabled
    assert bool((kept == KEPT).all())
    assert outside.stats().allocated >= kept.nbytes
    shoestring.host_allocator()
    outside.disable()
    assert not outside.enabled


def test_errors(allocator: shoestring.HostAllocator) -> None:
    with pytest.raises(ValueError, match="limit: expected a positive number of bytes, got -1"):
        shoestring.host_allocator(limit=-1)
    with pytest.raises(ValueError, match="limit: expected None with enable=False, got 5"):
        shoestring.host_allocator(limit=5, enable=False)
    now = allocator.stats().allocated
    shoestring.host_allocator(limit=now + MIB)
    with pytest.raises(torch.OutOfMemoryError, match="host_allocator: not enough memory: expected"):
        torch.empty(2 * MIB, dtype=torch.uint8)
    shoestring.host_allocator()
    with pytest.raises(torch.OutOfMemoryError, match="the system refused"):
        torch.empty(1 << 46, dtype=torch.uint8)
    assert allocator.stats().allocated == now


def model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    found = nn.Sequential(nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 200))
    for p in found.parameters():
        nn.init.normal_(p, std=0.1, generator=generator)
    return found


def trained(steps: int = 4) -> list[Tensor]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(steps):
        x = torch.randn(100 + 37 * step, 300, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


def test_training_is_bitwise_the_same() -> None:
    expected = trained()
    with shoestring.host_allocator():
        found = trained()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_loop_takes_no_new_memory(allocator: shoestring.HostAllocator) -> None:
    trained(2)
    before = allocator.stats().taken
    for _ in range(5):
        trained(2)
    # A small difference may come from the order in which Python's garbage is collected.
    assert allocator.stats().taken - before <= 4 * MIB


def test_shared_memory_and_numpy(allocator: shoestring.HostAllocator) -> None:
    before = allocator.stats().allocated
    x = torch.arange(MIB)
    array = x.numpy()
    assert int(array[-1]) == MIB - 1
    x.share_memory_()
    assert x.is_shared() and torch.equal(x, torch.arange(MIB))
    del array
    gc.collect()
    assert allocator.stats().allocated == before  # the storage has moved into shared memory
    y = torch.empty(0).resize_(MIB).fill_(KEPT)
    y.resize_(2 * MIB)
    assert bool((y[:MIB] == KEPT).all())


def test_compiled_functions(allocator: shoestring.HostAllocator) -> None:
    x = torch.randn(300, 400, requires_grad=True)
    compiled = torch.compile(lambda t: (t.sin() * 2 + t).sum())
    loss = compiled(x)
    (grad,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(grad, 2 * x.detach().cos() + 1)


class Squares(torch.utils.data.Dataset[Tensor]):
    """Rows of 100,000 equal numbers, made in the worker process."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((100_000,), float(index * index))


@pytest.mark.fresh
def test_dataloader_workers(allocator: shoestring.HostAllocator) -> None:
    with warnings.catch_warnings():
        # Ignore Python's warning about forks of processes with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        loader = DataLoader(Squares(), batch_size=3, num_workers=2, multiprocessing_context="fork")
        rows = torch.cat(list(loader))
    assert torch.equal(rows[:, 0], torch.arange(12.0).square())
    assert torch.equal(rows[:, 0], rows[:, -1])


@pytest.mark.fresh
def test_forked_children(allocator: shoestring.HostAllocator) -> None:
    kept = torch.full((MIB,), KEPT)

    def use() -> None:
        before = allocator.stats().allocated
        own = torch.full((2 * MIB,), 8)
        assert allocator.stats().allocated == before + own.nbytes
        kept.add_(1)
        assert bool((kept == KEPT + 1).all()) and bool((own == 8).all())
        allocator.empty_cache()
        allocator.disable()

    in_child(use)
    assert allocator.enabled
    assert bool((kept == KEPT).all())


# Prints the peak of the tensors, and by how much the process has grown, for batches of several sizes in turn.
GROWTH = """
import torch, shoestring

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

def train(steps, divisor):
    for step in range(steps):
        rows = (700, 2500, 1300, 3100, 400)[step % 5] // divisor
        kept = [torch.ones(rows, 500 + 200 * i) for i in range(8)]
        grads = []
        while kept:
            half = kept.pop().add(1)
            grads.append(torch.ones(400 + 10 * len(kept), half.shape[1]))
            del half

torch.set_num_threads(1)
allocator = shoestring.host_allocator()
train(5, 100)  # loads the libraries
allocator.empty_cache()
start, held = status("VmRSS:"), allocator.stats().held
weights = [torch.zeros(500, 1000 + 300 * i) for i in range(6)]
train(40, 1)
print(allocator.stats().peak_allocated, status("VmHWM:") - start + held)
"""


@pytest.mark.alone
def test_the_process_grows_by_the_peak_of_its_tensors() -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    peak, grown = map(int, done.stdout.split())
    assert peak > 100 * MIB
    assert grown <= 1.05 * peak + 4 * MIB
