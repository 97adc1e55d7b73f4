"""The rates of measure_machine, with a clock that only the measured work moves, and the file that keeps them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shoestring
from shoestring.core.errors import InputError
from shoestring.planning import measure
from shoestring.planning.machine import Link, Machine, write_machine
from shoestring.planning.measure import ELEMENTS, GEMM_SHAPES, ROUNDS, Probe, rates_of, run_probes

CPU = torch.device("cpu")
GEMMS = {"fp32": 0.5, "bf16": 0.125, "fp16": 2.0}  # seconds that each product takes on the fake clock


class FakeClock:
    """A clock that stands still but for the work that the tests let it measure."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> Callable[[], None]:
        """Return work of known duration."""

        def run() -> None:
            self.now += seconds

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A clock on which a copy takes 0.25 s, a step of AdamW 0.5 s, and products the times of GEMMS."""
    clock = FakeClock()
    monkeypatch.setattr(measure, "_copy", lambda device: clock.work(0.25))
    monkeypatch.setattr(measure, "_optimizer", lambda device, state, rounding: clock.work(0.5))
    monkeypatch.setattr(measure, "_products", lambda device, dtype, *shape: clock.work(GEMMS[dtype]))
    monkeypatch.setattr(measure, "measure_copies", lambda device, folder: Link(3e9, 2e9, 0.5))
    return clock


def test_work_of_known_duration_has_the_known_rate(clock: FakeClock) -> None:
    identity = measure.machine_identity(CPU)
    machine = measure._measure(CPU, identity, 1e6, "/data", clock)
    assert machine.copy_bytes_per_second == 2 * (64 << 20) / 0.25  # bytes read and bytes written
    for rounding in ("nearest", "stochastic", "remainder"):
        assert machine.optimizer_seconds[rounding] == pytest.approx(
            dict.fromkeys(machine.optimizer_seconds["nearest"], 0.5 / ELEMENTS)
        )
    flops = sum(3 * 2 * m * k * n for m, k, n in GEMM_SHAPES[False])  # three products of each shape
    for dtype, seconds in GEMMS.items():
        assert machine.gemm_flops[dtype] == pytest.approx(flops / (len(GEMM_SHAPES[False]) * seconds))
    assert machine.link == Link(3e9, 2e9, 0.5) and machine.disks == {"/data": Link(3e9, 2e9, 0.5)}
    assert machine.gemm_flops["tf32"] is None and machine.identity == identity
    assert machine.not_measured == {
        "gemm_flops.tf32": "TF32 is a format of NVIDIA's GPUs, and the device is cpu"
    }
    assert machine.threads == torch.get_num_threads() and machine.memory_bytes > 1 << 28


def test_rates_that_a_short_time_does_not_reach_say_so(clock: FakeClock) -> None:
    machine = measure._measure(CPU, measure.machine_identity(CPU), 4.0, None, clock)
    late = [name for name, reason in machine.not_measured.items() if reason == "the time of 4 s was up"]
    assert "gemm_flops.fp16" in late and "gemm_flops.bf16" in late
    assert dict(machine.rates())["gemm_flops.fp16"] is None
    assert clock.now <= 100 + 4.0 + 0.5  # a first sample, whose time is not known before, may end late
    nothing = measure._measure(CPU, measure.machine_identity(CPU), 1e-9, None, clock)
    assert all(rate is None for name, rate in nothing.rates() if name != "link")


def probe(clock: FakeClock, name: str, seconds: float, work: int) -> Probe:
    return Probe(name, lambda: clock.work(seconds), work)


def test_short_work_is_repeated_and_the_median_counts() -> None:
    clock = FakeClock()
    short, long = probe(clock, "short", 1e-4, 10), probe(clock, "long", 0.5, 10)
    run_probes([short, long], CPU, 1e9, clock)
    assert short.calls == 20 and long.calls == 1
    assert len(short.seconds) == len(long.seconds) == ROUNDS
    assert rates_of([short, long]) == pytest.approx({"short": 1e5, "long": 20})
    short.seconds[0] = long.seconds[-1] = 1000.0
    assert rates_of([short, long]) == pytest.approx({"short": 1e5, "long": 20})


def test_probes_of_one_rate_are_taken_together() -> None:
    clock = FakeClock()
    probes = [probe(clock, "rate", 1.0, 10), probe(clock, "rate", 3.0, 50)]
    run_probes(probes, CPU, 1e9, clock)
    assert rates_of(probes) == {"rate": 15.0}
    probes[1].seconds.clear()
    assert rates_of(probes) == {}


def test_a_product_that_would_take_too_long_is_not_begun() -> None:
    """On a CPU without products in fp16, the second shape would take many times the whole time."""
    clock = FakeClock()
    probes = [probe(clock, "slow", 2.0, 10), probe(clock, "slow", 8.0, 40)]
    run_probes(probes, CPU, clock.now + 7.0, clock)
    assert probes[0].seconds == [2.0, 2.0] and probes[1].run is None


def test_measures_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    drawn = torch.rand(1)
    torch.manual_seed(7)
    precision = torch.get_float32_matmul_precision()
    file = tmp_path / "new" / "machine.json"
    machine = shoestring.measure_machine("cpu", seconds=0.4, file=file, disk=tmp_path)
    assert (
        torch.rand(1) == drawn
        and torch.get_float32_matmul_precision() == precision
        and torch.is_grad_enabled()
    )
    rates = dict(machine.rates())
    assert all(isinstance(rate, Link) or rate > 0 for rate in rates.values() if rate is not None)
    assert rates["copy_bytes_per_second"] is not None or "copy_bytes_per_second" in machine.not_measured
    [(folder, disk)] = machine.disks.items()
    assert folder == str(tmp_path.resolve()) and disk.in_bytes_per_second > 0
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]  # no swap file stays behind
    monkeypatch.setattr(measure, "_measure", None)
    assert shoestring.measure_machine("cpu", file=file) == machine


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    """Put the cache into a temporary folder, and measure with a fake clock; return the machines measured so far."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made: list[Machine] = []

    def fake(device: Any, identity: Any, seconds: float, folder: str | None, clock: Any) -> Machine:
        disks = {folder: Link(1.0, 2.0, 0.5)} if folder is not None else {}
        base = shoestring.hardware_profile("nvidia-h200")
        made.append(
            replace(base, device=device.type, identity=identity, disks=disks, memory_bytes=1 + len(made))
        )
        return made[-1]

    monkeypatch.setattr(measure, "_measure", fake)
    monkeypatch.setattr(measure, "measure_copies", lambda device, folder: Link(4.0, 5.0, 0.25))
    return made


def cached(tmp_path: Path) -> Path:
    [path] = (tmp_path / "cache/shoestring/machines").iterdir()
    return path


def test_the_cache_is_read_until_refresh(counted: list[Machine], tmp_path: Path) -> None:
    first = shoestring.measure_machine("cpu")
    assert shoestring.measure_machine("cpu") == first and len(counted) == 1
    again = shoestring.measure_machine("cpu", refresh=True)
    assert len(counted) == 2 and again != first
    assert (
        shoestring.measure_machine("cpu") == again
        and json.loads(cached(tmp_path).read_text())["memory_bytes"] == 2
    )


def test_a_folder_is_added_to_the_file(counted: list[Machine], tmp_path: Path) -> None:
    first = shoestring.measure_machine("cpu")
    (tmp_path / "disk").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "disk")
    with_disk = shoestring.measure_machine("cpu", disk=tmp_path / "disk")
    assert (
        with_disk == replace(first, disks={str(tmp_path / "disk"): Link(4.0, 5.0, 0.25)})
        and len(counted) == 1
    )
    assert shoestring.measure_machine("cpu") == with_disk
    assert shoestring.measure_machine("cpu", disk=tmp_path / "other") == with_disk
    with pytest.raises(NotADirectoryError, match="measure_machine: disk: expected a folder, received"):
        shoestring.measure_machine("cpu", disk=tmp_path / "none")


@pytest.mark.parametrize("threads", [1, 2])
def test_machines_have_files_of_their_own(threads: int, counted: list[Machine], tmp_path: Path) -> None:
    shoestring.measure_machine("cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        shoestring.measure_machine("cpu")
    finally:
        torch.set_num_threads(before)
    files = list((tmp_path / "cache/shoestring/machines").iterdir())
    assert len(files) == len(counted) == 1 + (threads != before)


def foreign(key: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        machine = shoestring.hardware_profile(path)
        write_machine(path, replace(machine, identity={**machine.identity, key: "another"}))

    return write


def other_version(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "shoestring_machine": 0}))


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "damaged": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "not valid JSON"),
    "empty": (lambda path: path.write_bytes(b""), "not valid JSON"),
    "other version": (other_version, "expected version 1, received 0"),
    "other CPU": (foreign("cpu"), "expected the file of this machine, received that of another one: cpu."),
    "other PyTorch": (foreign("torch"), "expected the file of this machine, received that of another one: torch."),
    "other key": (foreign("more"), "expected the file of this machine, received that of another one: more."),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_file_is_never_used(wrong: str, counted: list[Machine], tmp_path: Path) -> None:
    damage, message = WRONG[wrong]
    shoestring.measure_machine("cpu")
    path = cached(tmp_path)
    damage(path)
    assert shoestring.measure_machine("cpu").memory_bytes == 2  # the one in the cache is measured anew
    assert shoestring.hardware_profile(path) == counted[-1]
    damage(path)
    before = path.read_bytes()
    with pytest.raises(InputError, match=re.escape(f"measure_machine: {path}: ") + ".*" + re.escape(message)):
        shoestring.measure_machine("cpu", file=path)
    assert path.read_bytes() == before
    assert shoestring.measure_machine("cpu", file=path, refresh=True) == shoestring.hardware_profile(path)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_the_time_is_positive(seconds: float, counted: list[Machine]) -> None:
    with pytest.raises(ValueError, match="measure_machine: seconds: expected a positive number"):
        shoestring.measure_machine("cpu", seconds=seconds)
    assert not counted
