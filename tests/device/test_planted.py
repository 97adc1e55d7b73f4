"""The detector finds planted mistakes in every mode, and says nothing about the same code without them."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from host_accesses import PROGRAMS
from modes import mode_of
from simdev import device as simdev

FOLDER = Path(__file__).parent
MODES = ("eager", "lazy", "delay1")


@pytest.fixture(params=MODES)
def planted(request: pytest.FixtureRequest) -> None:
    """Run the test in one mode of the device; the test looks at the findings itself."""
    simdev.configure(mode_of(request.param))
    simdev.take_findings()


def findings() -> list[str]:
    torch.accelerator.synchronize()
    return simdev.take_findings()


def sevens() -> torch.Tensor:
    x = torch.ones(1000, device="simdev")
    for _ in range(6):
        x.add_(1)
    return x


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("is_right", [True, False])
def test_missing_wait_event(is_right: bool) -> None:
    other = torch.Stream("simdev")
    x = sevens()
    if is_right:
        other.wait_stream(torch.accelerator.current_stream())
    with other:
        y = x + 1
    found = findings()
    assert y.cpu().eq(8).all() or not is_right
    if is_right:
        assert not found
    else:
        assert len(found) == 1
        assert "race: aten::add.out (stream" in found[0]
        assert "reads 4000 bytes that aten::add.out (stream 0 of device 0" in found[0]
        assert "test_missing_wait_event" in found[0]


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("is_right", [True, False])
def test_missing_record_stream(is_right: bool) -> None:
    other = torch.Stream("simdev")
    x = sevens()
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        y = x + 1
    if is_right:
        x.record_stream(other)
    del x
    torch.full((1000,), 3.0, device="simdev")
    found = findings()
    assert y.cpu().eq(8).all() or not is_right
    if is_right:
        assert not found
    else:
        assert len(found) == 1
        assert "race: free() (stream 0 of device 0" in found[0]
        assert "writes 4000 bytes that aten::add.out" in found[0]


@pytest.mark.usefixtures("planted")
def test_result_of_a_stream_that_nobody_waits_for() -> None:
    other = torch.Stream("simdev")
    with other:
        x = sevens()
    x.cpu()
    found = findings()
    assert found
    assert "copy to the host" in found[0]


@pytest.mark.usefixtures("planted")
def test_host_synchronisation_orders_streams() -> None:
    other = torch.Stream("simdev")
    with other:
        x = sevens()
    other.synchronize()
    assert x.cpu().eq(7).all()
    assert not findings()


@pytest.mark.usefixtures("planted")
def test_wait_of_another_host_thread() -> None:
    """A wait of another thread counts only if something orders the two threads."""
    torch.ops.simdev_planted.after_wait_of_thread(sevens(), True)
    assert not findings()
    torch.ops.simdev_planted.after_wait_of_thread(sevens(), False)
    (found,) = findings()
    assert "race: add after the wait" in found


@pytest.mark.usefixtures("planted")
def test_queue_orders_host_threads() -> None:
    x, waited = sevens(), queue.Queue[bool]()

    def wait() -> None:
        torch.accelerator.synchronize()
        waited.put(True)

    thread = threading.Thread(target=wait)
    thread.start()
    assert waited.get()
    with torch.Stream("simdev"):
        x.add_(1)
    thread.join()
    assert not findings()
    torch.accelerator.synchronize()
    assert x.cpu().eq(8).all()


def test_stack_of_the_earlier_operation() -> None:
    simdev.configure(simdev.Mode(stacks=True))
    other = torch.Stream("simdev")
    x = sevens()
    with other:
        x.add_(1)
    (found,) = findings()
    assert 'test_planted.py", line' in found.partition("The earlier one")[2]
    simdev.configure(simdev.Mode())


@pytest.fixture(scope="module")
def host_accesses() -> dict[str, dict[str, tuple[int, str]]]:
    """Return how each program of host_accesses.py ended in each mode, and what it wrote to stderr."""
    path = f"{FOLDER}:{os.environ['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, FOLDER / "host_accesses.py", *MODES],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    ends: dict[str, dict[str, tuple[int, str]]] = json.loads(done.stdout)
    return ends


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mode_name", MODES)
def test_host_access(host_accesses: dict[str, dict[str, tuple[int, str]]], name: str, mode_name: str) -> None:
    status, errors = host_accesses[name][mode_name]
    assert PROGRAMS[name][1] in errors
    assert status == -signal.SIGSEGV
    assert 'File "<string>", line 1' in errors  # faulthandler's stack


@pytest.mark.usefixtures("planted")
def test_pinned_memory_after_a_wait() -> None:
    x = sevens()
    p = torch.zeros(1000).pin_memory()
    assert p.is_pinned()
    p.copy_(x, non_blocking=True)
    event = torch.Event("simdev")
    event.record()
    event.synchronize()
    assert p[500] == 7
    x.copy_(p, non_blocking=True)
    assert p[500] == 7  # reading below a copy that reads is no mistake
    event.record()
    event.synchronize()
    p[500] = 1


@pytest.mark.usefixtures("planted")
def test_neighbour_in_pinned_page() -> None:
    p = torch.zeros(3000).pin_memory()
    p[1000:2000].copy_(sevens(), non_blocking=True)
    p[999] = 5
    p[2000] = 6
    torch.accelerator.synchronize()
    assert p[[999, 1000, 1999, 2000]].tolist() == [5, 7, 7, 6]


@pytest.mark.usefixtures("planted")
def test_kernel_errors_are_sticky() -> None:
    x = torch.ones(10, device="simdev")
    y = x.index_select(0, torch.tensor([5000], device="simdev"))
    assert y.shape == (1,)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"aten::index_select failed on stream 0.*index out of range"):
            torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match="aten::index_select failed"):
        x + 1
    simdev.clear_error()
    assert x.sum() == 10
    assert not findings()
