"""Measure the rates of this machine on which a plan rests, and keep them in a file."""

from __future__ import annotations

import hashlib
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoestring._load import read_build
from shoestring.checkpoint.offload import offload_activations
from shoestring.core.device import default_device, forked_rng, is_asynchronous, is_cuda, synchronize
from shoestring.core.errors import InputError
from shoestring.optim.adamw import AdamW
from shoestring.planning.machine import (
    DTYPES,
    STATE_FORMATS,
    WEIGHT_ROUNDINGS,
    Link,
    Machine,
    read_machine,
    write_machine,
)

ELEMENTS = 4 << 20  # parameters of the optimizer steps; the steps of all settings in turn exceed the caches
COPY_BYTES = 64 << 20  # size of the buffer of the copy
# (tokens, input features, output features) of the products, by whether the device is asynchronous. A GPU needs more
# tokens to fill its multiprocessors.
GEMM_SHAPES = {
    False: ((512, 1024, 2048), (2048, 1024, 2048)),
    True: ((2048, 2048, 2048), (8192, 4096, 4096)),
}
ROUNDS = 7  # number of times that each rate is measured
SHORTEST = 0.002  # a sample repeats its work until it takes about this many seconds
TORCH_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The parts of /proc/cpuinfo's flags that decide which kernels run.
INSTRUCTIONS = ("avx", "amx", "fma", "f16c")

Clock = Callable[[], float]


@dataclass
class Probe:
    """Some work of known size that is timed several times.

    Args:
        name: the name of the rate.
        make: allocates what the work needs, and returns the function that does the work.
        work: amount of the work: floating-point operations, bytes or elements.
        seconds: the samples so far.
    """

    name: str
    make: Callable[[], Callable[[], object]]
    work: int
    seconds: list[float] = field(default_factory=list)
    run: Callable[[], object] | None = None
    calls: int = 1
    longest: float = 0.0

    def sample(self, device: torch.device, clock: Clock) -> None:
        """Take a sample. The first one only prepares and warms up, and decides how often others repeat the work."""
        if self.run is None:
            self.run = self.make()
            alone = self._timed(device, clock)
            if alone < 10 * SHORTEST:  # a part of such a short time was that of the preparation
                alone = self._timed(device, clock)
            self.calls = max(1, min(1000, round(SHORTEST / max(alone, 1e-9))))
            self.longest = alone * self.calls
            return
        taken = self._timed(device, clock)
        self.longest = max(self.longest, taken)
        self.seconds.append(taken / self.calls)

    def _timed(self, device: torch.device, clock: Clock) -> float:
        assert self.run is not None
        synchronize(device)
        start = clock()
        for _ in range(self.calls):
            self.run()
        synchronize(device)
        return clock() - start


def measure_machine(
    device: torch.device | str | None = None,
    *,
    seconds: float = 20.0,
    disk: str | os.PathLike[str] | None = None,
    refresh: bool = False,
    file: str | os.PathLike[str] | None = None,
) -> Machine:
    """Measure the rates of this machine, or return those that an earlier call has measured.

    The rates are those of matrix products, copies, AdamW steps, and copies to the host and to a disk. Each rate is
    the median of repeated runs, in turn with those of the other rates. The result is kept in a file for each
    machine, in ``$XDG_CACHE_HOME/shoestring/machines`` or ``~/.cache/shoestring/machines``. The name of the file
    depends on the CPU, the GPU, their instruction sets, the number of threads, and the versions of PyTorch and
    shoestring. The measurement takes about 1 GB of memory on the CPU, and, by the sizes of its tensors,
    about 2 GB on a GPU.

    Args:
        device: the device to measure. Defaults to PyTorch's accelerator, else the CPU.
        seconds: limit of the time of the measurement. A rate that is not reached in this time is None, and
            ``not_measured`` says so.
        disk: a folder on a disk for offloaded data. The speed of reading and writing there is measured, too.
        refresh: whether to measure again, and to replace the file.
        file: the path of the file, in place of that in the cache.

    Returns:
        The rates. If the file in the cache is damaged, it is replaced.

    Raises:
        ValueError: an argument is out of range, or ``file`` is damaged, or of another machine or version.
        OSError: ``disk`` is not a folder, or ``file`` cannot be written.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> machine = shoestring.measure_machine("cpu", seconds=0.5, file=folder.name + "/machine.json")
        >>> machine.device, "link" in machine.not_measured or machine.link.in_bytes_per_second > 0
        ('cpu', True)
        >>> shoestring.measure_machine("cpu", file=folder.name + "/machine.json") == machine
        True
    """
    if not seconds > 0:
        raise ValueError(f"measure_machine: seconds: expected a positive number, received {seconds}")
    place = torch.device(device) if device is not None else default_device()
    identity = machine_identity(place)
    folder = _folder(disk)
    path = Path(file) if file is not None else cache_file(identity)
    known = None if refresh else _known(path, identity, is_named=file is not None)
    if known is not None and (folder is None or folder in known.disks):
        return known
    if known is not None and folder is not None:
        machine = replace(known, disks={**known.disks, folder: measure_copies(place, folder)})
    else:
        machine = _measure(place, identity, seconds, folder, time.perf_counter)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_machine(path, machine)
    return machine


def machine_identity(device: torch.device) -> dict[str, str]:
    """Return the names and versions on which the rates of a device depend."""
    flags = sorted(set(filter(lambda flag: flag.startswith(INSTRUCTIONS), _cpuinfo("flags").split())))
    identity = {
        "device": device.type,
        "cpu": _cpuinfo("model name") or "unknown",
        "instructions": " ".join([*flags, torch.ops.shoestring._cpu_capability()]),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "shoestring": read_build().version,
    }
    if is_asynchronous(device):
        properties = torch.get_device_module(device).get_device_properties(device)
        identity["accelerator"] = properties.name
        identity["capability"] = f"{getattr(properties, 'major', 0)}.{getattr(properties, 'minor', 0)}"
    return identity


def cache_file(identity: dict[str, str]) -> Path:
    """Return the path of the file in the cache for a machine."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "shoestring", "machines", f"{digest}.json")


def _known(path: Path, identity: dict[str, str], is_named: bool) -> Machine | None:
    """Return the machine in a file, or None if there is none; refuse a wrong file that the user has named."""
    try:
        machine = read_machine(path, "measure_machine")
        different = [
            key for key in {*identity, *machine.identity} if identity.get(key) != machine.identity.get(key)
        ]
        if different:
            raise InputError(
                f"measure_machine: {path}: expected the file of this machine, received that of another one: "
                f"{', '.join(sorted(different))}. Pass refresh=True to replace the file"
            )
    except FileNotFoundError:
        return None
    except InputError:
        if is_named:
            raise
        return None
    return machine


def _folder(disk: str | os.PathLike[str] | None) -> str | None:
    """Return the path of a folder without links, or None."""
    if disk is None:
        return None
    folder = os.path.realpath(disk)
    if not os.path.isdir(folder):
        raise NotADirectoryError(f"measure_machine: disk: expected a folder, received {os.fspath(disk)!r}")
    return folder


def _measure(
    device: torch.device, identity: dict[str, str], seconds: float, folder: str | None, clock: Clock
) -> Machine:
    """Measure all rates of a device within a time."""
    deadline = clock() + seconds
    reasons: dict[str, str] = {}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(forked_rng())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        # Copies to the host and to a disk are measured first, since a short time has to suffice for them.
        disks = {folder: measure_copies(device, folder)} if folder is not None else {}
        link = measure_copies(device, None) if clock() < deadline else None
        late = f"the time of {seconds:g} s was up"
        if link is None:
            reasons["link"] = late
        probes = [Probe("copy_bytes_per_second", lambda: _copy(device), 2 * COPY_BYTES)]
        probes += [
            Probe(
                f"optimizer_seconds.{rounding}.{state}",
                lambda rounding=rounding, state=state: _optimizer(device, state, rounding),  # type: ignore[misc]
                ELEMENTS,
            )
            for rounding in WEIGHT_ROUNDINGS
            for state in STATE_FORMATS
        ]
        for dtype in DTYPES:
            reason = _reason_against(dtype, device)
            if reason:
                reasons[f"gemm_flops.{dtype}"] = reason
                continue
            probes += [
                Probe(
                    f"gemm_flops.{dtype}",
                    lambda dtype=dtype, shape=shape: _products(device, dtype, *shape),  # type: ignore[misc]
                    6 * shape[0] * shape[1] * shape[2],
                )
                for shape in GEMM_SHAPES[is_asynchronous(device)]
            ]
        run_probes(probes, device, deadline, clock)
    measured = rates_of(probes)
    for probe in probes:
        if probe.name not in measured:
            reasons[probe.name] = late
    name, memory = _device_memory(device)
    return Machine(
        name,
        device.type,
        torch.get_num_threads(),
        memory,
        identity,
        {dtype: measured.get(f"gemm_flops.{dtype}") for dtype in DTYPES},
        measured.get("copy_bytes_per_second"),
        {
            rounding: {
                state: None if rate is None else 1 / rate
                for state in STATE_FORMATS
                for rate in [measured.get(f"optimizer_seconds.{rounding}.{state}")]
            }
            for rounding in WEIGHT_ROUNDINGS
        },
        link,
        disks,
        reasons,
    )


def run_probes(probes: list[Probe], device: torch.device, deadline: float, clock: Clock) -> None:
    """Take up to ROUNDS samples of each probe, in rounds of random order, until the time is up."""
    order = random.Random(0)
    turn = probes  # the first round is in order, so that a short time measures the same rates each time
    for _ in range(ROUNDS + 1):
        for probe in turn:
            if clock() + _expected(probe, probes) < deadline:
                probe.sample(device, clock)
        turn = order.sample(probes, len(probes))


def _expected(probe: Probe, probes: list[Probe]) -> float:
    """Return the seconds of the next sample, or, for the first one, what probes of the same rate let expect."""
    alike = [other for other in probes if other.name == probe.name and other.run is not None]
    return probe.longest or max(
        (other.longest / other.calls * probe.work / other.work for other in alike), default=0.0
    )


def rates_of(probes: list[Probe]) -> dict[str, float]:
    """Return the work per second of each rate: that of all its probes together, if each has a sample."""
    work: dict[str, int] = {}
    seconds: dict[str, float | None] = {}
    for probe in probes:
        taken = statistics.median(probe.seconds) if probe.seconds else None
        sum_so_far = seconds.get(probe.name, 0.0)
        work[probe.name] = work.get(probe.name, 0) + probe.work
        seconds[probe.name] = None if taken is None or sum_so_far is None else sum_so_far + taken
    return {name: work[name] / taken for name, taken in seconds.items() if taken}


def copy_rate(device: torch.device, machine: Machine | None) -> float:
    """Return the bytes per second of copies in the memory of a machine, by default of this one, measured if need be."""
    known = machine or known_machine(device)
    if known is not None and known.copy_bytes_per_second is not None:
        return known.copy_bytes_per_second
    probe = Probe("copy", lambda: _copy(device), 2 * COPY_BYTES)
    run_probes([probe], device, float("inf"), time.perf_counter)
    return rates_of([probe])["copy"]


def _copy(device: torch.device) -> Callable[[], object]:
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def _optimizer(device: torch.device, state_format: str, weight_rounding: str) -> Callable[[], object]:
    dtype = torch.float32 if weight_rounding == "nearest" else torch.bfloat16
    options = {"state_format": state_format, "weight_rounding": weight_rounding}
    return optimizer_step(AdamW, device, dtype, ELEMENTS, **options)


def optimizer_step(
    kind: Any, device: torch.device, dtype: torch.dtype, elements: int, **options: Any
) -> Callable[[], object]:
    """Return a function that takes a step of an optimizer of so many elements, with gradients that stay."""
    weight = nn.Parameter(torch.randn(elements, device=device).to(dtype))
    weight.grad = torch.randn(elements, device=device).to(dtype)
    step: Callable[[], object] = kind([weight], lr=1e-5, **options).step
    return step


def known_machine(device: torch.device) -> Machine | None:
    """Return this machine as :func:`measure_machine` has measured it before, or None."""
    identity = machine_identity(device)
    return _known(cache_file(identity), identity, is_named=False)


def _products(
    device: torch.device, dtype: str, tokens: int, inputs: int, outputs: int
) -> Callable[[], object]:
    """Return a function that computes the three products of a linear layer: its output and both gradients."""

    def random_tensor(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(TORCH_DTYPES[dtype])

    x, weight, grad = (
        random_tensor(tokens, inputs),
        random_tensor(outputs, inputs),
        random_tensor(tokens, outputs),
    )

    def run() -> None:
        with _fp32_precision("high" if dtype == "tf32" else "highest"):
            torch.mm(x, weight.t())
            torch.mm(grad, weight)
            torch.mm(grad.t(), x)

    return run


@contextmanager
def _fp32_precision(precision: str) -> Iterator[None]:
    """Set the precision of fp32 products inside the ``with`` block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _reason_against(dtype: str, device: torch.device) -> str:
    """Return why products of a dtype are not measured, or an empty text."""
    if dtype in ("fp32", "tf32"):
        try:
            torch.get_float32_matmul_precision()
        except RuntimeError:
            return "the precision of fp32 products is set for each backend"
    if dtype == "tf32":
        if not is_cuda(device):
            return f"TF32 is a format of NVIDIA's GPUs, and the device is {device.type}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "the GPU has no TF32"
    return ""


def measure_copies(device: torch.device, folder: str | None) -> Link:
    """Measure copies to the host, or to a disk if there is a folder."""
    measured = offload_activations(device=device, folder=folder).measure_link(1)
    return Link(measured["out_bytes_per_second"], measured["in_bytes_per_second"], measured["copy_share"])


def _device_memory(device: torch.device) -> tuple[str, int]:
    """Return the name of the device, and the bytes of its memory."""
    if is_asynchronous(device):
        properties = torch.get_device_module(device).get_device_properties(device)
        return properties.name, properties.total_memory
    return _cpuinfo("model name") or "CPU", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cpuinfo(key: str) -> str:
    """Return the first value that /proc/cpuinfo has for a key, or an empty text."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == key:
                    return value.strip()
    except OSError:
        pass
    return ""
