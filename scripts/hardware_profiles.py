#!/usr/bin/env python3
"""Make the profiles of hardware that ship with the package from the results of `make gpu-check`.

Prints the profile of each results file in benchmarks/results that has the limits of a GPU, or with --write writes the
profiles to python/shoestring/planning/profiles. tests/python/planning/test_profiles.py compares both.

    python scripts/hardware_profiles.py [--write]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from shoestring.planning.machine import (
    DTYPES,
    PROFILES,
    STATE_FORMATS,
    WEIGHT_ROUNDINGS,
    Machine,
    write_machine,
)

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"
LIMITS = {"fp32": "gemm_float32_flops", "bf16": "gemm_bfloat16_flops", "fp16": "gemm_float16_flops"}
MISSING = "the results of this GPU have no such measurement"


def profile(results: dict[str, Any]) -> Machine:
    """Return the profile of a GPU from its results."""
    environment, limits = results["environment"], results["limits"]
    optimizer = optimizer_seconds(results["benchmarks"])
    values: dict[str, Any] = {
        "gemm_flops": {dtype: limits.get(LIMITS.get(dtype, "")) for dtype in DTYPES},
        "copy_bytes_per_second": limits.get("copy_bytes_per_second"),
        "optimizer_seconds": {
            rounding: {state: optimizer.get((rounding, state)) for state in STATE_FORMATS}
            for rounding in WEIGHT_ROUNDINGS
        },
        "link": None,
    }
    return Machine(
        name=environment["gpu"],
        device="cuda",
        threads=environment["cores"],
        memory_bytes=environment["memory_bytes"],
        identity={
            "device": "cuda",
            "accelerator": environment["gpu"],
            "capability": environment["capability"],
            "torch": environment["torch"],
        },
        **values,
        not_measured=dict.fromkeys(without_value(values), MISSING),
    )


def without_value(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the names of the rates that are None."""
    names = []
    for key, value in values.items():
        if isinstance(value, dict):
            names += without_value(value, f"{prefix}{key}.")
        elif value is None:
            names.append(prefix + key)
    return names


def optimizer_seconds(benchmarks: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """Return the seconds per element of AdamW by weight rounding and state format, from its largest benchmark."""
    found = {}
    for benchmark in benchmarks:
        for table in benchmark["tables"]:
            title = re.fullmatch(r"AdamW, one tensor of .*, (float32|bfloat16)", table["title"])
            if title is None:
                continue
            assert table["unit"] == "M params/s"
            for row in table["rows"]:
                name = re.fullmatch(r"shoestring (\w+)(?:, (\w+))?", row["name"])
                # Rows without a rounding are "nearest", which a machine has for fp32 weights alone.
                if name is not None and (name[2] is None) == (title[1] == "float32"):
                    found[name[2] or "nearest", name[1]] = 1e-6 / row["rate"]
    return found


def profiles() -> dict[Path, Machine]:
    """Return the profile of each results file of a GPU, by the path of the profile."""
    found = {}
    for path in sorted(RESULTS.glob("*.json")):
        results = json.loads(path.read_text())
        if "limits" in results:
            found[PROFILES / path.name] = profile(results)
    return found


def main() -> None:
    for path, machine in profiles().items():
        if "--write" in sys.argv[1:]:
            write_machine(path, machine)
        else:
            print(json.dumps(machine.to_json(), indent=2))


if __name__ == "__main__":
    main()
