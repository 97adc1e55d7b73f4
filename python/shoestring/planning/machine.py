"""The rates of a machine, as measured there or as a profile that ships with the package, and their files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from shoestring.core.errors import InputError
from shoestring.files.atomic import write_json
from shoestring.files.read_file import is_integer, is_name, is_number, read_json, shown

VERSION = 1  # version of the format of the files
LARGEST = 1e30  # limit of rates in files, so that products of them are finite
DTYPES = ("fp32", "tf32", "bf16", "fp16")
STATE_FORMATS = ("fp32", "bf16", "8bit", "4bit")
WEIGHT_ROUNDINGS = ("nearest", "stochastic", "remainder")
PROFILES = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Link:
    """The speed of copies that run beside a computation, between the device and host memory or a disk.

    Attributes:
        out_bytes_per_second: from the device.
        in_bytes_per_second: to the device.
        copy_share: the share of the time of a copy by which it delays the computation.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float
    copy_share: float


@dataclass(frozen=True)
class Machine:
    """The rates of a machine, which :func:`measure_machine` has measured or a profile has.

    A rate that is None was not measured, and ``not_measured`` has the reason.

    Attributes:
        name: the CPU or GPU.
        device: PyTorch's type of the device, such as "cpu" or "cuda".
        threads: number of threads of PyTorch's operators on the CPU.
        memory_bytes: memory of the device in bytes.
        identity: the names and versions on which the rates depend.
        gemm_flops: floating-point operations per second of matrix products, by "fp32", "tf32", "bf16" and "fp16".
        copy_bytes_per_second: bytes read plus bytes written per second by a copy in the memory of the device.
        optimizer_seconds: seconds per element of a step of AdamW, by ``weight_rounding`` and ``state_format``. The
            weights are fp32 for "nearest", and bf16 for "stochastic" and "remainder".
        link: copies between the device and host memory.
        disks: copies between the device and a disk, by the path of the folder.
        not_measured: the reason for each rate that is None, by its name, such as "gemm_flops.tf32" or "link".

    Example:
        >>> machine = shoestring.hardware_profile("nvidia-h200")
        >>> f"{machine.gemm_flops['bf16'] / 1e12:.0f} TFLOP/s in bf16"
        '775 TFLOP/s in bf16'
        >>> machine.link is None, machine.not_measured["link"]
        (True, 'the results of this GPU have no such measurement')
    """

    name: str
    device: str
    threads: int
    memory_bytes: int
    identity: Mapping[str, str]
    gemm_flops: Mapping[str, float | None]
    copy_bytes_per_second: float | None
    optimizer_seconds: Mapping[str, Mapping[str, float | None]]
    link: Link | None = None
    disks: Mapping[str, Link] = field(default_factory=dict)
    not_measured: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = {name for name, rate in self.rates() if rate is None}
        if missing != self.not_measured.keys():
            wrong = sorted(missing ^ self.not_measured.keys())
            raise ValueError(
                f"Machine: not_measured: expected a reason for each rate that is None, see {wrong}"
            )

    def rates(self) -> Iterator[tuple[str, float | Link | None]]:
        """Yield the name and the value of each rate but those of disks."""
        yield from ((f"gemm_flops.{dtype}", rate) for dtype, rate in self.gemm_flops.items())
        yield "copy_bytes_per_second", self.copy_bytes_per_second
        for rounding, seconds in self.optimizer_seconds.items():
            yield from ((f"optimizer_seconds.{rounding}.{key}", rate) for key, rate in seconds.items())
        yield "link", self.link

    def to_json(self) -> dict[str, Any]:
        """Return the machine as a JSON object, from which :meth:`from_json` makes an equal machine."""
        return {"shoestring_machine": VERSION, **asdict(self)}

    @staticmethod
    def from_json(content: object, where: str = "Machine.from_json") -> Machine:
        """Return the machine of a JSON object; ``where`` is the beginning of error messages.

        Raises:
            ValueError: the object is not that of :meth:`to_json`, or that of another version.
        """
        return _parsed(content, where)


def read_machine(path: str | os.PathLike[str], where: str) -> Machine:
    """Return the machine of a file; ``where`` is the beginning of error messages.

    Raises:
        FileNotFoundError: the file does not exist.
        InputError: the file is damaged, or has another version.
    """
    where = f"{where}: {os.fspath(path)}"
    return _parsed(read_json(Path(path), where), where)


def write_machine(path: Path, machine: Machine) -> None:
    """Write a machine to a file, atomically."""
    write_json(path, machine.to_json())


def hardware_profile(name: str | os.PathLike[str]) -> Machine:
    """Return the rates of hardware that is not here.

    Args:
        name: the name of a profile that ships with the package, such as "nvidia-h200"; or the path of a file of
            :func:`measure_machine` from another machine, which ends in ``.json``.

    Raises:
        ValueError: there is no profile of this name, or the file is damaged or has another version.
        FileNotFoundError: the file does not exist.

    Example:
        >>> shoestring.hardware_profile("nvidia-h200").name
        'NVIDIA H200'
    """
    text = os.fspath(name)
    if text.endswith(".json"):
        return read_machine(text, "hardware_profile")
    known = sorted(path.stem for path in PROFILES.glob("*.json"))
    if text not in known:
        raise InputError(
            f"hardware_profile: name: expected one of {', '.join(known)}, or a path that ends in .json, "
            f"received {shown(text)}"
        )
    return read_machine(PROFILES / f"{text}.json", "hardware_profile")


def _parsed(content: object, where: str) -> Machine:
    """Check a JSON object of a machine in full, and return the machine."""

    def expect(is_right: bool, key: str, expected: str, received: object) -> None:
        if not is_right:
            raise InputError(f"{where}: {key}: expected {expected}, received {shown(received)}")

    def table(value: object, key: str, names: tuple[str, ...] | None = None) -> dict[str, Any]:
        expect(isinstance(value, dict), key, "an object", value)
        assert isinstance(value, dict)
        if names is not None:
            expect(set(value) == set(names), key, f"the fields {', '.join(names)}", sorted(value))
        expect(all(map(is_name, value)), key, "names", sorted(value))
        return value

    def rate(value: object, key: str) -> float:
        right = is_number(value) and 0 < value < LARGEST  # type: ignore[operator]
        expect(right, key, "a positive number", value)
        return value  # type: ignore[return-value]

    def rates(value: object, key: str, names: tuple[str, ...]) -> dict[str, float | None]:
        row = table(value, key, names)
        return {name: None if row[name] is None else rate(row[name], f"{key}.{name}") for name in names}

    def texts(value: object, key: str) -> dict[str, str]:
        row = table(value, key)
        for name, text in row.items():
            expect(is_name(text), f"{key}.{name}", "a text", text)
        return row

    def link(value: object, key: str) -> Link:
        row = table(value, key, tuple(each.name for each in fields(Link)))
        share = row["copy_share"]
        expect(is_number(share) and 0 <= share <= 1, f"{key}.copy_share", "a number in [0, 1]", share)
        out, back = (
            rate(row[f"{way}_bytes_per_second"], f"{key}.{way}_bytes_per_second") for way in ("out", "in")
        )
        return Link(out, back, share)

    expect(isinstance(content, dict), "content", "an object of a machine", content)
    assert isinstance(content, dict)
    version = content.get("shoestring_machine")
    expect(is_integer(version), "shoestring_machine", "the version of a file of measure_machine", version)
    expect(version == VERSION, "shoestring_machine", f"version {VERSION}", version)
    names = tuple(each.name for each in fields(Machine))
    file = table(
        {name: value for name, value in content.items() if name != "shoestring_machine"}, "content", names
    )
    for name in ("name", "device"):
        expect(is_name(file[name]), name, "a text", file[name])
    for name in ("threads", "memory_bytes"):
        expect(is_integer(file[name]) and file[name] > 0, name, "a positive whole number", file[name])
    optimizer = table(file["optimizer_seconds"], "optimizer_seconds", WEIGHT_ROUNDINGS)
    copy = file["copy_bytes_per_second"]
    try:
        return Machine(
            file["name"],
            file["device"],
            file["threads"],
            file["memory_bytes"],
            texts(file["identity"], "identity"),
            rates(file["gemm_flops"], "gemm_flops", DTYPES),
            None if copy is None else rate(copy, "copy_bytes_per_second"),
            {
                name: rates(optimizer[name], f"optimizer_seconds.{name}", STATE_FORMATS)
                for name in WEIGHT_ROUNDINGS
            },
            None if file["link"] is None else link(file["link"], "link"),
            {folder: link(disk, "disks") for folder, disk in table(file["disks"], "disks").items()},
            texts(file["not_measured"], "not_measured"),
        )
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None
