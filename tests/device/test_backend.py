"""Tests of what PyTorch expects of a backend: loading, memory, streams, events, pinned memory, and operators of all kinds."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from simdev import device as simdev

pytestmark = pytest.mark.usefixtures("mode")


def test_torch_loads_the_backend(mode: simdev.Mode) -> None:
    """`import torch` finds the entry point in a folder on PYTHONPATH. Two modes need no two processes."""
    if not mode.lazy:
        return
    program = "import torch; x = torch.arange(4, device='simdev') * 2; print(x.device, torch.simdev.device_count(), x.tolist())"
    path = f"{Path(__file__).parent}:{os.environ['PYTHONPATH']}"
    environment = os.environ | {"PYTHONPATH": path, "SIMDEV_MODE": "lazy,delay_us=5"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "simdev:0 2 [0, 2, 4, 6]\n"


def test_views_share_memory() -> None:
    x = torch.arange(24.0, device="simdev").view(2, 3, 4)
    y = x.transpose(0, 2)[1:, ::2].unsqueeze(0)
    y.mul_(-1)
    expected = torch.arange(24.0).view(2, 3, 4)
    expected.transpose(0, 2)[1:, ::2].unsqueeze(0).mul_(-1)
    assert y.data_ptr() == x.data_ptr() + 4
    assert torch.equal(x.cpu(), expected)
    assert torch.equal(x.view(torch.int32).cpu(), expected.view(torch.int32))
    assert torch.equal(x[0, 1].to(torch.float64).cpu(), expected[0, 1].double())


def test_shapes_that_depend_on_data() -> None:
    x = torch.tensor([1.0, -1.0, 2.0, -2.0], device="simdev")
    before = simdev.counts()
    positive = x[x > 0]
    assert simdev.counts().waits > before.waits
    assert torch.equal(positive.cpu(), torch.tensor([1.0, 2.0]))
    assert torch.equal(x.nonzero().cpu(), x.cpu().nonzero())
    assert torch.equal(x.unique().cpu(), x.cpu().unique())


def test_outputs_without_elements_are_resized() -> None:
    x, out = torch.ones(3, 4, device="simdev"), torch.empty(0, device="simdev")
    torch.add(x, 1, out=out)
    assert out.shape == (3, 4)
    assert out.cpu().eq(2).all()
    out.resize_(5, 4)
    assert out.flatten()[:12].cpu().eq(2).all()


def test_copies_of_tensors() -> None:
    x = torch.nn.Parameter(torch.arange(3.0, device="simdev"))
    for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), x.clone(), x.detach().to("cpu").to("simdev")):
        assert y.device == x.device
        assert torch.equal(y.cpu(), x.cpu())


def test_memory_is_reused_and_filled_with_nan() -> None:
    x = torch.ones(5000, device="simdev")
    address = x.data_ptr()
    before = simdev.counts()
    del x
    assert simdev.counts().bytes == before.bytes - 20000
    y = torch.empty(5000, device="simdev")
    assert y.data_ptr() == address
    assert y.isnan().all().item()
    # isnan() and all() allocate one block each.
    assert simdev.counts().fresh_allocations - before.fresh_allocations <= 2
    torch.accelerator.reset_peak_memory_stats()
    z = torch.ones(10000, device="simdev")
    assert torch.accelerator.max_memory_allocated() >= torch.accelerator.memory_allocated() >= z.nbytes
    del z
    torch.accelerator.empty_cache()
    assert torch.ones(5000, device="simdev").sum() == 5000


def test_recorded_memory_waits_for_its_stream() -> None:
    other = torch.Stream("simdev")
    x = torch.ones(7000, device="simdev")
    address = x.data_ptr()
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        y = x + 1
    x.record_stream(other)
    del x
    z = torch.zeros(7000, device="simdev")  # its memory is x's if the other stream is over already
    other.synchronize()
    assert y.cpu().eq(2).all()
    assert z.cpu().eq(0).all()
    assert address in [torch.empty(7000, device="simdev").data_ptr(), z.data_ptr()]


def test_events() -> None:
    first, last = torch.Event("simdev", enable_timing=True), torch.Event("simdev", enable_timing=True)
    assert first.query()
    first.record()
    x = torch.ones(1000, device="simdev").cumsum(0)
    last.record()
    while not last.query():
        pass
    assert first.elapsed_time(last) >= 0
    with torch.Stream("simdev") as other:  # the host has seen the event
        y = x + 1
    other.synchronize()
    assert y[-1].item() == 1001


def test_asynchronous_copies_need_pinned_memory() -> None:
    x = torch.ones(1000, device="simdev")
    pinned, plain = torch.empty(1000, pin_memory=True), torch.empty(1000)
    assert pinned.is_pinned()
    assert not plain.is_pinned()
    simdev.take_synchronisations()
    pinned.copy_(x, non_blocking=True)
    x.copy_(pinned, non_blocking=True)
    x.copy_(plain.fill_(2), non_blocking=True)
    plain.fill_(3)  # the copy has read it
    assert simdev.take_synchronisations() == []
    plain.copy_(x, non_blocking=True)
    assert simdev.take_synchronisations() == ["a copy to the host is not asynchronous"]
    assert plain.eq(2).all()
    x.copy_(pinned)
    assert simdev.take_synchronisations() == ["a copy from the host is not asynchronous"]


def test_pinned_memory_is_not_reused_below_a_copy() -> None:
    x = torch.empty(100000, device="simdev")
    for value in range(6):
        x.copy_(torch.full((100000,), float(value)).pin_memory(), non_blocking=True)
        y = x.sum()
    assert y.item() == 500000
