"""The module ``torch.simdev``: what PyTorch and the tests ask of the device.

The functions up to ``manual_seed_all`` are those that PyTorch expects of the module of a backend. The others
select how the device behaves, and report what it has seen.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

BUILD = Path(os.environ.get("SHOESTRING_BUILD", Path(__file__).parents[3] / "build")).resolve()
LIBRARY = BUILD / "tests/device/libsimdev.so"

_in_bad_fork = False
_initialized = True  # torch.utils.checkpoint saves the states of generators only if this is true


def load() -> None:
    """Register the backend with PyTorch; do nothing if it is registered or not built.

    shoestring's libraries are loaded first, so that the device's kernels take the place of the GPU's.
    """
    if hasattr(torch, "simdev") or not LIBRARY.exists():
        return
    _load_shoestring()
    torch.ops.load_library(str(LIBRARY))
    torch.ops.simdev.register_backend()
    torch._register_device_module("simdev", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.ops.simdev.connect_kernels()
    for name_space in ("aten", "shoestring"):
        torch.ops.simdev.prefer_cpu_kernels(name_space)
    torch.ops.simdev.separate_host_threads()
    os.register_at_fork(after_in_child=_after_fork)
    configure(Mode.from_environment())


def _load_shoestring() -> None:
    # This repeats what shoestring._load does, because importing the package would import it before its time.
    spec = importlib.util.find_spec("shoestring")
    if spec is None or spec.origin is None:
        raise ImportError("simdev: the package shoestring is not on PYTHONPATH")
    libraries = Path(spec.origin).parent / "lib"
    torch.ops.load_library(str(libraries / "libshoestring.so"))
    build = json.loads((libraries / "build.json").read_text())
    if build["cuda"] is not None and torch.version.cuda is not None:
        torch.ops.load_library(str(libraries / "libshoestring_cuda.so"))


def _after_fork() -> None:
    global _in_bad_fork
    _in_bad_fork = counts().operations > 0  # streams have threads since their first operation


def _lazy_init() -> None:
    if _in_bad_fork:
        raise RuntimeError("simdev: a forked process has no threads of streams; use the start method spawn")


def _is_in_bad_fork() -> bool:
    return _in_bad_fork


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return int(torch.ops.simdev.device_count())


def current_device() -> int:
    return int(torch.ops.simdev.current_device())


def set_device(device: torch.device | str | int) -> None:
    torch.ops.simdev.set_device(_index(device))


def _index(device: torch.device | str | int | None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


@contextmanager
def device(to: torch.device | str | int) -> Iterator[None]:
    """Make a device current inside a ``with`` block."""
    before = current_device()
    set_device(to)
    try:
        yield
    finally:
        set_device(before)


def current_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def Stream(priority: int = 0) -> torch.Stream:
    return torch.Stream("simdev", priority=priority)


def stream(to: torch.Stream) -> torch.Stream:
    """Return the stream, which is a context manager that makes itself current."""
    return to


def Event() -> torch.Event:
    return torch.Event("simdev")


def synchronize(device: torch.device | str | int | None = None) -> None:
    torch.accelerator.synchronize(_index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True


def get_rng_state(device: torch.device | str | int | None = None) -> torch.Tensor:
    state: torch.Tensor = torch.ops.simdev.get_rng_state(_index(device))
    return state


def set_rng_state(state: torch.Tensor, device: torch.device | str | int | None = None) -> None:
    torch.ops.simdev.set_rng_state(state, _index(device))


def manual_seed(seed: int) -> None:
    torch.ops.simdev.manual_seed(seed, current_device())


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        torch.ops.simdev.manual_seed(seed, index)


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def memory_allocated(device: torch.device | str | int | None = None) -> int:
    return counts(device).bytes


def get_device_properties(device: torch.device | str | int | None = None) -> SimpleNamespace:
    return SimpleNamespace(name="simdev", total_memory=1 << 40)


def max_memory_allocated(device: torch.device | str | int | None = None) -> int:
    return counts(device).peak_bytes


def reset_peak_memory_stats(device: torch.device | str | int | None = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


@dataclass(frozen=True)
class Mode:
    """How the device behaves.

    Attributes:
        lazy: streams run only operations that the host or another stream waits for.
        delay_us: every fourth operation begins late, by a random time of at most this many microseconds.
        seed: the seed of the delays.
        blocking: the host waits for each operation. Results of all modes must equal those of this one.
        emulate: shoestring's operators run their host functions of CUDA and emulated kernels. Otherwise they
            run the CPU's kernels in the threads of streams.
        stacks: findings hold the Python stack of the earlier operation, and synchronisations have one. This is
            slow.
    """

    lazy: bool = False
    delay_us: int = 0
    seed: int = 0
    blocking: bool = False
    emulate: bool = False
    stacks: bool = False

    @staticmethod
    def from_environment() -> "Mode":
        """Read a mode from ``SIMDEV_MODE``, for example ``lazy,stacks`` or ``delay_us=300,seed=7``."""
        mode = Mode()
        for setting in filter(None, os.environ.get("SIMDEV_MODE", "").split(",")):
            name, _, value = setting.partition("=")
            given: dict[str, Any] = {name: int(value) if value else True}
            mode = replace(mode, **given)
        return mode


@dataclass(frozen=True)
class Counts:
    """Counts of events since the process began.

    Attributes:
        operations: operations of all streams, waits and allocations included.
        synchronisations: times that the host waited for a stream, an event or a copy.
        waits: times that the host waited for the shape of a result, which a GPU might not need.
        allocations: blocks of memory of a device that were allocated.
        fresh_allocations: allocations for which no freed memory was found.
        bytes: memory in use, in bytes.
        peak_bytes: the largest value of ``bytes``.
    """

    operations: int
    synchronisations: int
    waits: int
    allocations: int
    fresh_allocations: int
    bytes: int
    peak_bytes: int


def configure(mode: Mode) -> None:
    """Set how all streams behave from now on."""
    torch.ops.simdev.configure(mode.lazy, mode.delay_us, mode.seed, mode.blocking, mode.emulate, mode.stacks)


def counts(device: torch.device | str | int | None = None) -> Counts:
    """Return the counts of the process and of a device."""
    return Counts(*torch.ops.simdev.counts(_index(device)))


def take_findings() -> list[str]:
    """Return the mistakes that the detector has found since the last call."""
    return list(torch.ops.simdev.take_findings())


def take_synchronisations() -> list[str]:
    """Return the reasons for which the host has waited since the last call, in order."""
    return list(torch.ops.simdev.take_synchronisations())


def clear_error() -> None:
    """Forget the error of a kernel. As on a GPU, every call raises it until then."""
    torch.ops.simdev.clear_error()
