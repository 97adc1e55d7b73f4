"""Test the rules of the monitor on made-up samples, which are pure functions of the samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoestring.runs.monitor_process import judge

GIB = 1024**3
MACHINE = {"cores": 8.0, "memory": 24.0 * GIB, "disk": "vda"}


def sample(**values: Any) -> dict[str, Any]:
    """Return a second of a loop on the CPU that computes in 7 of 8 cores, changed by ``values``."""
    usual = dict(
        seconds=1.0, cpu_seconds=7.0, machine_cpu_seconds=7.1, thread_seconds=1.0, memory_peak=4.0 * GIB,
        machine_memory_peak=6.0 * GIB, processes=1.0, wait_seconds=0.01, starved_seconds=0.01, step_seconds=0.98,
        steps=10.0,
    )  # fmt: skip
    return usual | values


def gpu(**values: float) -> dict[str, float]:
    return dict(busy_seconds=0.95, memory_peak=20.0 * GIB, energy=400.0, is_used=1.0) | values


def found(machine: dict[str, Any] | None = None, **values: Any) -> list[tuple[str, str, str]]:
    """Return resource, evidence and cure of the findings of ten equal samples."""
    report = judge(MACHINE | (machine or {}), [sample(time=float(i + 1), **values) for i in range(10)])
    return [(each.resource, each.evidence, each.cure) for each in report.findings]


def only(machine: dict[str, Any] | None = None, **values: Any) -> tuple[str, str, str]:
    (one,) = found(machine, **values)
    return one


def test_a_loop_that_computes_has_no_finding() -> None:
    assert found() == []
    assert "none found" in str(judge(MACHINE, [sample()]))
    # A disk that is busy, and memory that is nearly full, do not slow such a loop down.
    assert found(disk_seconds=0.9, read_bytes=50e6, machine_memory_peak=22.0 * GIB) == []
    # One core is all that there is.
    assert found({"cores": 1.0}, cpu_seconds=0.99, machine_cpu_seconds=1.0, thread_seconds=0.99) == []
    busy = [gpu(), gpu(is_used=0.0, busy_seconds=0.0)]
    assert found({"gpu_names": ["H", "H"], "gpu_memory": [80.0 * GIB] * 2}, gpus=busy, cpu_seconds=1.0) == []


def test_data() -> None:
    starved = dict(wait_seconds=0.61, starved_seconds=0.61, step_seconds=0.39, cpu_seconds=3.0)
    idle = dict(machine_cpu_seconds=3.1)
    resource, evidence, cure = only({"workers": 1}, **starved, **idle)
    assert resource == "data"
    assert (
        evidence
        == "61 % of the loop waits for the next batch (61 ms per step); the loader has 1 worker process"
    )
    assert "num_workers of the DataLoader to 7" in cure
    assert "shoestring.data.Prefetcher" in only({"workers": 0}, **starved, **idle)[2]
    assert "worker process" not in only(None, **starved, **idle)[1]
    # More workers do not help if no core is free.
    full = dict(cpu_seconds=7.9, machine_cpu_seconds=8.0)
    assert "All cores are busy" in only({"workers": 8}, **starved | full)[2]
    # The loop waits on the host, but the device has work all the time.
    assert found(wait_seconds=0.6, starved_seconds=0.0, step_seconds=0.4) == []
    # A single wait, such as that for the first batch, is no bottleneck.
    assert found(steps=0.0, **starved, **idle) == []


def test_one_thread() -> None:
    one = dict(cpu_seconds=1.0, machine_cpu_seconds=1.1, thread_seconds=0.98)
    resource, evidence, cure = only({"cores": 2.0}, **one)
    assert resource == "cpu" and evidence == "1 of 2 cores are busy: the work runs in one thread"
    assert "torch.get_num_threads()" in cure
    assert found({"cores": 2.0}, **one | {"thread_seconds": 0.5}) == []  # two threads take turns
    assert found({"cores": 2.0}, **one, gpus=[gpu()]) == []  # the thread feeds a GPU
    assert [each[1] for each in found({"cores": 2.0}, **one | {"machine_cpu_seconds": 2.0})] == [
        "other processes use 1 of 2 cores, and no core is free"
    ]


def test_memory() -> None:
    full = dict(memory_peak=20.2 * GIB, machine_memory_peak=23.1 * GIB)
    resource, evidence, cure = only(**full, swapped_bytes=40e6, memory_stall_seconds=0.6)
    assert resource == "memory"
    assert evidence == "RAM peak 23.1 of 24 GiB, of which 20.2 GiB by this run; swapping 40 MB/s"
    assert "smaller batch" in cure
    assert "swapping" not in only(**full)[1]
    assert "other processes" in only(**full | {"memory_peak": 2.0 * GIB})[2]


def test_disk() -> None:
    slow = dict(
        disk_seconds=0.92, read_bytes=180e6, major_faults=300.0, cpu_seconds=1.5, machine_cpu_seconds=1.6
    )
    resource, evidence, _ = only(**slow, steps=0.0, wait_seconds=0.0, starved_seconds=0.0, step_seconds=0.0)
    assert resource == "disk"
    assert evidence == (
        "disk vda is busy 92 % of the time; this run reads 180 and writes 0 MB/s, with 300 page faults a second"
    )
    waits = dict(wait_seconds=0.5, starved_seconds=0.5, step_seconds=0.5)
    assert {each[0] for each in found(**slow, **waits)} == {"data", "disk"}
    assert found(**slow | {"read_bytes": 0.0}, steps=0.0) == []  # other processes use the disk
    # A program without a loop loses nothing to the disk while it computes in all cores.
    assert found(**slow | {"cpu_seconds": 7.9, "machine_cpu_seconds": 8.0}, steps=0.0) == []


def test_gpu() -> None:
    machine = {"gpu_names": ["H100"], "gpu_memory": [80.0 * GIB]}
    resource, evidence, cure = only(machine, gpus=[gpu(busy_seconds=0.23)])
    assert resource == "gpu" and evidence == "GPU 0 is idle 77 % of the time" and ".item()" in cure
    # If the device waits for data, that is the finding.
    starved = dict(wait_seconds=0.6, starved_seconds=0.6, step_seconds=0.4)
    assert [each[0] for each in found(machine, gpus=[gpu(busy_seconds=0.4)], **starved)] == ["data"]
    assert "for heat 40 % of the time" in only(machine, gpus=[gpu(hot_seconds=0.4)])[1]
    assert (
        "limit of its power 80 % of the time (400 W)"
        in only(machine, gpus=[gpu(power_limited_seconds=0.8)])[1]
    )
    assert "memory peak 79 of 80 GiB" in only(machine, gpus=[gpu(memory_peak=79.0 * GIB)])[1]


def test_findings_are_sorted_and_short_runs_have_none() -> None:
    values = dict(
        wait_seconds=0.3,
        starved_seconds=0.3,
        step_seconds=0.7,
        machine_memory_peak=23.8 * GIB,
        memory_peak=2.0 * GIB,
    )
    report = judge(MACHINE, [sample(**values)])
    assert [each.resource for each in report.findings] == ["memory", "data"]
    assert report.findings[0].share >= report.findings[1].share == pytest.approx(0.3)
    assert judge(MACHINE, [sample(**values) | {"seconds": 0.1}]).findings == []
    assert judge(MACHINE, []).findings == [] and "none found" in str(judge({}, []))


def test_totals_add_times_and_take_peaks() -> None:
    report = judge(
        MACHINE, [sample(time=1.0, memory_peak=5.0 * GIB), sample(time=2.0, memory_peak=3.0 * GIB)]
    )
    assert report.total["memory_peak"] == 5 * GIB and report.total["time"] == 2
    assert report.total["cpu_seconds"] == 14 and report.total["steps"] == 20
    values = json.loads(report.to_json())
    assert values["samples"] == report.samples and values["total"] == report.total
    assert judge(values["machine"], values["samples"]) == report


def test_wrong_values_are_refused() -> None:
    for machine, samples in (({"cores": "many"}, []), ({}, [{"seconds": "long"}]), ({}, [{"gpus": [1]}])):
        with pytest.raises(ValueError, match="^monitor: "):
            judge(machine, samples)


def test_plot(tmp_path: Path) -> None:
    report = judge(
        MACHINE | {"gpu_names": ["H"], "gpu_memory": [80.0 * GIB]},
        [sample(time=float(i), gpus=[gpu()]) for i in range(3)],
    )
    report.plot(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"
    report.plot(tmp_path / "run.svg")
    text = (tmp_path / "run.svg").read_text()
    assert text.count('id="axes_') == 6
