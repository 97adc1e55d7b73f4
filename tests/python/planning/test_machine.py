"""The files of machines and the profiles that ship with the package."""

from __future__ import annotations

import copy
import fnmatch
import json
import math
import os
import re
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

import shoestring
from build_folder import REPOSITORY
from shoestring.core.errors import InputError
from shoestring.planning.machine import PROFILES, Link, read_machine, write_machine

sys.path.insert(0, str(REPOSITORY / "scripts"))
import hardware_profiles

H200 = shoestring.hardware_profile("nvidia-h200")


def with_links() -> shoestring.Machine:
    reasons = {name: reason for name, reason in H200.not_measured.items() if name != "link"}
    disks = {"/data": Link(2.5e9, 1e9, 0.5), "/été": Link(1e8, 1 / 3, 0.0)}
    return replace(H200, link=Link(2e10, 1.5e10, 1.0), disks=disks, not_measured=reasons)


@pytest.mark.parametrize("machine", [H200, with_links()], ids=["without links", "with links"])
def test_a_file_holds_the_same_machine(machine: shoestring.Machine, tmp_path: Path) -> None:
    assert shoestring.Machine.from_json(json.loads(json.dumps(machine.to_json()))) == machine
    write_machine(tmp_path / "machine.json", machine)
    assert os.listdir(tmp_path) == ["machine.json"]
    for name in (tmp_path / "machine.json", str(tmp_path / "machine.json")):
        assert shoestring.hardware_profile(name) == machine
    with pytest.raises(FrozenInstanceError):
        machine.name = "another"  # type: ignore[misc]


DAMAGES: dict[str, tuple[Any, str]] = {
    "name": (3, "name: expected a text, received 3"),
    "device": ("\x1b[2J", "device: expected a text"),
    "threads": (True, "threads: expected a positive whole number, received True"),
    "memory_bytes": (-1, "memory_bytes: expected a positive whole number"),
    "identity": ({"cpu": None}, "identity.cpu: expected a text, received None"),
    "gemm_flops": ({"fp32": 1.0}, "gemm_flops: expected the fields fp32, tf32, bf16, fp16"),
    "copy_bytes_per_second": (0, "copy_bytes_per_second: expected a positive number, received 0"),
    "optimizer_seconds": ([], "optimizer_seconds: expected an object"),
    "link": ({"out_bytes_per_second": 1.0}, "link: expected the fields out_bytes_per_second"),
    "disks": ({"/data": {"out_bytes_per_second": 1, "in_bytes_per_second": 1, "copy_share": 2}}, "copy_share: expected"),
    "not_measured": ({}, "not_measured: expected a reason for each rate that is None"),
    "shoestring_machine": (2, "shoestring_machine: expected version 1, received 2"),
    "another": (1, "content: expected the fields name, device"),
}  # fmt: skip


@pytest.mark.parametrize("field", DAMAGES)
def test_a_damaged_file_is_refused_by_name(field: str, tmp_path: Path) -> None:
    value, message = DAMAGES[field]
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**H200.to_json(), field: value}))
    with pytest.raises(
        InputError, match=re.escape(f"hardware_profile: {path}: ") + ".*" + re.escape(message)
    ):
        shoestring.hardware_profile(path)
    with pytest.raises(InputError, match="^here: "):
        shoestring.Machine.from_json({**H200.to_json(), field: value}, "here")


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0, 0.0, 1e31, "1", True, [1]])
def test_rates_are_positive_numbers(rate: Any) -> None:
    content = copy.deepcopy(H200.to_json())
    content["optimizer_seconds"]["nearest"]["8bit"] = rate
    with pytest.raises(InputError, match=r"optimizer_seconds.nearest.8bit: expected a positive number"):
        shoestring.Machine.from_json(content)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000, b"{}"])
def test_a_file_of_another_kind_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(str(path))):
        read_machine(path, "test")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        shoestring.hardware_profile(tmp_path / "machine.json")
    with pytest.raises(InputError, match="expected a regular file"):
        (tmp_path / "folder.json").mkdir()
        shoestring.hardware_profile(tmp_path / "folder.json")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"expected one of nvidia-h200, or a path .*received 'nvidia-h300'"):
        shoestring.hardware_profile("nvidia-h300")
    with pytest.raises(ValueError, match=r"expected one of nvidia-h200"):
        shoestring.hardware_profile("../profiles/nvidia-h200")


def test_a_rate_that_is_none_has_a_reason() -> None:
    with pytest.raises(ValueError, match=r"not_measured: expected a reason .*'copy_bytes_per_second'"):
        replace(H200, copy_bytes_per_second=None)
    with pytest.raises(ValueError, match=r"not_measured: expected a reason .*'gemm_flops.bf16'"):
        replace(H200, not_measured={**H200.not_measured, "gemm_flops.bf16": "a rate that is there"})


def test_profiles_are_those_of_the_results() -> None:
    made = hardware_profiles.profiles()
    assert sorted(made) == sorted(PROFILES.glob("*.json")), "run scripts/hardware_profiles.py --write"
    for path, machine in made.items():
        assert read_machine(path, "test") == machine, "run scripts/hardware_profiles.py --write"


def test_the_profile_of_the_h200_has_the_figures_of_its_run() -> None:
    results = json.loads((REPOSITORY / "benchmarks/results/nvidia-h200.json").read_text())
    assert H200.gemm_flops["bf16"] == results["limits"]["gemm_bfloat16_flops"]
    assert H200.gemm_flops["fp32"] == results["limits"]["gemm_float32_flops"]
    tables = {table["title"]: table for one in results["benchmarks"] for table in one["tables"]}
    elements = 1000 << 20
    for rounding, title, row in (
        ("nearest", "float32", "shoestring 8bit"),
        ("stochastic", "bfloat16", "shoestring 8bit, stochastic"),
        ("remainder", "bfloat16", "shoestring 8bit, remainder"),
    ):
        rows = {each["name"]: each for each in tables[f"AdamW, one tensor of 1000 Mi, {title}"]["rows"]}
        assert H200.optimizer_seconds[rounding]["8bit"] == pytest.approx(rows[row]["seconds"] / elements)
    assert H200.gemm_flops["fp16"] is None and "no such measurement" in H200.not_measured["gemm_flops.fp16"]


def test_profiles_are_part_of_the_package() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    [patterns] = re.findall(r"\[tool\.setuptools\.package-data\]\nshoestring = (\[.*\])", text)
    for path in PROFILES.iterdir():
        name = str(path.relative_to(REPOSITORY / "python/shoestring"))
        assert any(fnmatch.fnmatch(name, each) for each in json.loads(patterns)), name
