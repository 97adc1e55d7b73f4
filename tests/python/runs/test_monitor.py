"""Test Monitor with programs that have, or have not, a bottleneck. test_monitor_rules.py tests the rules alone."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shoestring
import shoestring.data
from build_folder import library
from queue_device import compute as device_compute
from queue_device import queue_device, set_event_times

MIB = 2**20


def compute(seconds: float) -> None:
    """Use this much processor time of this thread, however many other processes run."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Items that each take a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((4,), float(index))


def resources(report: shoestring.MonitorReport) -> list[str]:
    return [each.resource for each in report.findings]


def test_a_loop_that_waits() -> None:
    loader = torch.utils.data.DataLoader(Slow(0.02), batch_size=2)
    monitor = shoestring.Monitor(interval=0.1)
    seen = []
    for batch in monitor.watch(loader):
        seen.append(batch)
        time.sleep(0.005)
    time.sleep(0.2)  # is not a step
    report = monitor.stop()
    torch.testing.assert_close(torch.cat(seen)[:, 0], torch.arange(12.0))
    total = report.total
    assert total["steps"] == 6 and total["wait_seconds"] >= 0.24
    assert 0.03 <= total["step_seconds"] <= total["seconds"] - total["wait_seconds"] - 0.15
    finding = next(each for each in report.findings if each.resource == "data")
    assert finding.share == pytest.approx(
        total["wait_seconds"] / (total["wait_seconds"] + total["step_seconds"])
    )
    assert (
        "of the loop waits for the next batch" in finding.evidence
        and "0 worker processes" in finding.evidence
    )
    assert finding.evidence in str(report) and json.loads(report.to_json())["machine"]["workers"] == 0


def test_a_loop_that_computes_has_no_false_finding() -> None:
    monitor = shoestring.Monitor(interval=0.1)
    for _ in monitor.watch([torch.ones(8)] * 10):
        compute(0.04)
    report = monitor.stop()
    assert report.total["steps"] == 10 and report.total["cpu_seconds"] >= 0.35
    # Other processes on this machine may leave no core free, and Python computes in one thread.
    assert set(resources(report)) <= {"cpu"}


@pytest.mark.alone
def test_a_loop_in_one_thread() -> None:
    if (os.cpu_count() or 1) < 2 or os.getloadavg()[0] > 0.5:
        pytest.skip("needs a free core")
    monitor = shoestring.Monitor(interval=0.1)
    for _ in monitor.watch([None] * 10):
        compute(0.1)
    report = monitor.stop()
    assert "the work runs in one thread" in str(report)


def test_steps_are_those_of_the_loop_if_it_names_them() -> None:
    with shoestring.Monitor(interval=0.1) as monitor:
        for _ in monitor.watch(range(5)):
            time.sleep(0.02)
            with monitor.step():
                time.sleep(0.01)
        with monitor.wait():
            time.sleep(0.05)
    total = monitor.report().total
    assert (
        total["steps"] == 5
        and 0.05 <= total["step_seconds"] < 0.1 <= total["step_seconds"] + total["wait_seconds"]
    )
    with monitor.step():
        pass
    assert monitor.report().total["steps"] == 5  # stopped


def test_loops_that_end_early() -> None:
    monitor = shoestring.Monitor(interval=0.1)
    for number in monitor.watch(range(10)):
        if number == 3:
            break
    gc.collect()
    time.sleep(0.1)
    with pytest.raises(ZeroDivisionError):
        for _ in monitor.watch(1 / (2 - i) for i in range(9)):
            pass
    assert list(monitor.watch([])) == []
    total = monitor.stop().total
    assert total["steps"] == 5 and total["step_seconds"] < 0.1


def test_a_batch_lives_no_longer_than_without_a_monitor() -> None:
    import weakref

    alive: list[int] = []

    def batches() -> Iterator[torch.Tensor]:
        last = None
        for _ in range(3):
            if last is not None:
                alive.append(int(last() is not None))
            batch = torch.ones(4)
            last = weakref.ref(batch)
            yield batch
            del batch

    monitor = shoestring.Monitor(interval=1.0)
    for batch in monitor.watch(batches()):
        del batch
    assert alive == [0, 0]


@pytest.mark.alone
def test_memory_counts_shared_pages_once_and_peaks() -> None:
    code = """
import os, sys, time, mmap
block = mmap.mmap(-1, 300 << 20)  # shared with children
block.write(b"1" * (300 << 20))
import shoestring, json
monitor = shoestring.Monitor(interval=0.1)
pids = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        sum(block[::4096])  # maps every page
        time.sleep(60)
        os._exit(0)
    pids.append(pid)
time.sleep(1.5)
base = monitor.report().total
short = bytearray(400 << 20)
del short
peak = monitor.stop().total
for pid in pids:
    os.kill(pid, 9)
print(json.dumps([base["memory_peak"], peak["memory_peak"], base["processes"]]))
"""
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    base, peak, processes = json.loads(out.stdout)
    assert processes == 3
    assert 300 * MIB < base < 800 * MIB  # 900 MiB if the block counted for each process
    assert peak >= base + 300 * MIB


def test_workers_of_a_loader_count_and_do_not_disturb() -> None:
    loader = torch.utils.data.DataLoader(Slow(0.15), batch_size=2, num_workers=1)
    monitor = shoestring.Monitor(interval=0.1)
    assert len(list(monitor.watch(loader))) == 6
    report = monitor.stop()
    assert report.machine["workers"] == 1 and report.total["processes"] >= 2
    assert "1 worker process" in str(report)


def test_a_forked_child_measures_nothing() -> None:
    code = """
import os, shoestring
monitor = shoestring.Monitor(interval=0.1)
pid = os.fork()
if pid == 0:
    with monitor.step():
        pass
    empty = monitor.report().samples == [] and monitor.stop().total["steps"] == 0
    del monitor
    os._exit(0 if empty else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert monitor.stop().samples
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_gpus_of_nvml() -> None:
    folder = library("nvml/libnvidia-ml.so.1").parent
    code = """
import shoestring, time
monitor = shoestring.Monitor(interval=0.1)
time.sleep(0.5)
report = monitor.stop()
total, (gpu,) = report.total, report.total["gpus"]
assert report.machine["gpu_names"] == ["Stand-in"] and gpu["is_used"] == 1
assert abs(gpu["busy_seconds"] / total["seconds"] - 0.25) < 1e-6
assert abs(gpu["energy"] / total["seconds"] - 250) < 1e-3
print(report)
"""
    path = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    out = subprocess.run(
        [sys.executable, "-c", code],
        check=True, capture_output=True, text=True, timeout=120, env={**os.environ, "LD_LIBRARY_PATH": path},
    ).stdout  # fmt: skip
    assert "GPU 0 is idle 75 % of the time" in out and "for heat 100 % of the time" in out


@pytest.mark.parametrize("times", [True, False])
def test_a_wait_that_the_device_does_not_notice_is_no_bottleneck(times: bool) -> None:
    batches = shoestring.data.Prefetcher([torch.ones(4)], queue_device())
    x = next(batches)  # a tensor on the device
    set_event_times(times)
    try:
        waits = {}
        # The seconds that a step takes on the device. The host waits 0.03 s for its data.
        for work in (0.0, 0.15):
            monitor = shoestring.Monitor(interval=0.1, device=queue_device())
            for _ in range(15):
                with monitor.wait():
                    time.sleep(0.03)
                with monitor.step():
                    device_compute(x, work)
                    time.sleep(0.01)
            time.sleep(0.3)
            report = monitor.stop()
            waits[work] = report.total
            assert ("data" in resources(report)) == (work == 0)
    finally:
        set_event_times(True)
        torch.empty(4).copy_(x)  # waits until the device has no work
    assert waits[0.0]["starved_seconds"] > 0.3 and waits[0.0]["wait_seconds"] >= 0.45
    assert waits[0.15]["starved_seconds"] < 0.1 and waits[0.15]["wait_seconds"] >= 0.45


def test_devices() -> None:
    assert shoestring.Monitor(device="cpu").stop().total["device_memory_peak"] == 0
    with pytest.raises(
        ValueError, match="^Monitor: device: expected the CPU or an accelerator of this PyTorch"
    ):
        shoestring.Monitor(device="meta")


@pytest.mark.parametrize("interval", [0.0, 0.09, 11, -1, float("nan"), float("inf")])
def test_intervals_out_of_range(interval: float) -> None:
    with pytest.raises(ValueError, match="^Monitor: interval: expected 0.1 to 10 seconds, received "):
        shoestring.Monitor(interval=interval)


def test_it_leaves_no_thread() -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    monitors = [shoestring.Monitor() for _ in range(3)]
    assert threads() == before + 3 and threading.active_count() >= 1
    monitors[0].stop()
    with monitors[1]:
        pass
    del monitors
    gc.collect()
    assert threads() == before


def test_plot_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = shoestring.Monitor(interval=0.1).stop()
    report.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        report.plot(tmp_path / "b.png")
