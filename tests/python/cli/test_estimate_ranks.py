"""`shoestring estimate --world`: its choice of a strategy, its JSON, and its errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cli_helpers import refuse, succeed

MODEL = ["--model", "mini", "--vocab-size", "512", "--batch-size", "2", "--seq-len", "32"]


def estimated(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    succeed("estimate", *MODEL, "--json", *arguments)
    return json.loads(capsys.readouterr().out)


def test_auto_takes_the_fastest_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    link = ["--world", "4", "--link", "1Gbit,1ms", "--step-seconds", "0.01"]
    found = estimated(capsys, *link)
    rows = {row["strategy"]: row for row in found["compared"]}
    assert list(rows) == ["ddp", "zero1", "zero2", "zero3"]
    assert found["chosen"] == min(rows, key=lambda name: rows[name]["seconds"]) == "ddp"
    assert (
        found["totals"]["device"]
        == rows["ddp"]["bytes"]
        == sum(i["bytes"] for i in found["memory"]["device"])
    )
    assert sum(found["traffic"].values()) == rows["ddp"]["sent"]
    for row in rows.values():
        assert max(0.01, row["link_seconds"]) <= row["seconds"] <= 0.01 + row["link_seconds"]
    # less memory than ddp, then less than all but the one with the least
    least = min(rows, key=lambda name: rows[name]["bytes"])
    assert least == "zero3"
    second = estimated(capsys, *link, "--memory", str(rows["ddp"]["bytes"] - 1))
    assert second["chosen"] != "ddp" and second["reasons"][0].startswith("ddp needs ")
    assert estimated(capsys, *link, "--memory", str(rows["zero3"]["bytes"]))["chosen"] == "zero3"
    none = estimated(capsys, *link, "--memory", "1000")
    assert none["chosen"] == "zero3" and none["reasons"][-1] == "No strategy fits; zero3 needs the least."


def test_times_have_a_basis(capsys: pytest.CaptureFixture[str]) -> None:
    found = estimated(capsys, "--world", "4")
    assert all(row["seconds"] is None and row["link_seconds"] is None for row in found["compared"])
    assert found["reasons"][-1].endswith("without --link, no time is known.")
    assert found["chosen"] == min(found["compared"], key=lambda row: row["sent"])["strategy"]
    found = estimated(capsys, "--world", "4", "--link", "1Gbit,1ms")
    assert all(row["seconds"] is None and row["link_seconds"] > 0 for row in found["compared"])
    succeed("estimate", *MODEL, "--world", "4")
    text = capsys.readouterr().out
    assert "ddp over 4 processes" in text and "Times are" not in text


def test_one_process_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    alone = estimated(capsys)
    found = estimated(
        capsys, "--world", "1", "--parallel", "ddp", "--link", "1Gbit,1ms", "--step-seconds", "2"
    )
    assert found["traffic"] == {} and found["compared"][0]["seconds"] == pytest.approx(2)
    for name in ("weights", "gradients"):
        sizes = [
            next(i["bytes"] for i in each["memory"]["device"] if i["name"] == name) for each in (alone, found)
        ]
        assert sizes[0] == sizes[1]


def test_hsdp_has_a_fast_and_a_slow_link(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--world", "8", "--parallel", "hsdp", "--mesh", "2x4", "--link", "1Gbit,1ms"]
    slow, fast = (
        estimated(capsys, *arguments, *more)["compared"][0] for more in ([], ["--inner-link", "100GB/s,1us"])
    )
    assert slow["sent"] == fast["sent"] and fast["link_seconds"] < 0.3 * slow["link_seconds"]
    both = estimated(capsys, "--world", "8", "--mesh", "2x4")
    assert [row["strategy"] for row in both["compared"]][-1] == "hsdp"


@pytest.mark.parametrize(("strategy", "every"), [("diloco", 500), ("localsgd", 8)])
def test_averages_are_rare(strategy: str, every: int, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--world", "4", "--link", "100Mbit,30ms"]
    ddp = estimated(capsys, *arguments, "--parallel", "ddp")["compared"][0]
    found = estimated(capsys, *arguments, "--parallel", strategy)["compared"][0]
    assert found["sent"] == pytest.approx(ddp["sent"] / every, rel=1e-3)
    assert found["link_seconds"] < ddp["link_seconds"] / every * 1.1
    often = estimated(capsys, *arguments, "--parallel", strategy, "--every", "1", "--compress", "8bit")[
        "compared"
    ][0]
    assert often["sent"] == pytest.approx(ddp["sent"] * 260 / 256 / 4, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world", "0"], "--world: expected at least 1, got 0"),
        (["--world", "2", "--link", "100Xbit,3ms"], "--link: expected a bandwidth such as 100Mbit, 1Gbit/s or 25GB/s, received '100Xbit'"),
        (["--world", "2", "--link", "1Gbit"], "--link: expected bandwidth,latency, such as 100Mbit,30ms"),
        (["--world", "2", "--link", "1Gbit,3min"], "--link: expected a latency such as 30ms or 5us, received '3min'"),
        (["--world", "8", "--parallel", "hsdp"], "--parallel hsdp: expected --mesh REPLICASxSHARDS, such as 2x4 as well"),
        (["--world", "8", "--mesh", "2x3"], "--mesh: expected a product of 8, the number of processes, got 2x3"),
        (["--world", "8", "--mesh", "8"], "--mesh: expected REPLICASxSHARDS, such as 2x4, got 8"),
        (["--world", "8", "--mesh", "2x4", "--parallel", "zero3"], "--parallel zero3: expected no --mesh 2x4"),
        (["--link", "1Gbit,1ms"], "--link 1Gbit,1ms: expected --world as well, received none"),
        (["--parallel", "zero3"], "--parallel zero3: expected --world as well, received none"),
        (["--compress", "8bit"], "--compress 8bit: expected --world as well, received none"),
        (["--world", "2", "--step-seconds", "1"], "--step-seconds: expected --link as well"),
        (["--world", "2", "--step-seconds", "-1", "--link", "1Gbit,1ms"], "--step-seconds: expected above 0, got -1"),
        (["--world", "2", "--parallel", "zero4"], "--parallel: expected auto | ddp | zero1"),
        (["--world", "4", "--accumulate", "6"], "--accumulate: expected a multiple of the 4 processes"),
        (["--world", "2", "--offload", "cpu"], "--world 2: expected no --offload cpu"),
        (["--world", "2", "--parallel", "zero1", "--offload-weights", "nvme:."], "--parallel zero1: expected no --offload-weights nvme:."),
        (["--world", "2", "--parallel", "diloco", "--offload-weights", "nvme:."], "--parallel diloco: expected no --offload-weights nvme:."),
        (["--world", "2", "--parallel", "zero3", "--offload-weights", "nvme:.", "--keep", "1GB"], "--parallel zero3: expected no --keep 1GB"),
        (["--world", "2", "--step-in-backward"], "--world 2: expected no --step-in-backward"),
        (["--world", "4", "--parallel", "hsdp", "--mesh", "2x2", "--compress", "powersgd"], "--compress: expected none | 8bit"),
        (["--world", "4", "--parallel", "hsdp", "--mesh", "1x4", "--compress", "4bit"], "--mesh 1x4: expected no --compress 4bit"),
        (["--world", "2", "--every", "3", "--parallel", "ddp"], "--parallel ddp: expected no --every 3"),
        (["--world", "2", "--inner-link", "1GB/s,1us"], "--inner-link: expected --link and --mesh as well"),
        (["--world", "2", "--parallel", "zero1", "--optimizer", "galore"], "--parallel zero1: expected no --optimizer galore"),
        (["--world", "2", "--parallel", "zero2", "--optimizer", "muon"], "--parallel zero2: expected no --optimizer muon"),
        (["--world", "2", "--parallel", "diloco", "--optimizer", "schedule-free-adamw"], "--parallel diloco: expected no --optimizer schedule-free-adamw"),
        (["--world", "2", "--parallel", "diloco", "--precision", "bf16", "--weights", "bf16-remainder"], "--parallel diloco: expected no --weights bf16-remainder"),
        (["--world", "8", "--mesh", "2x" + "9" * 5000], "--mesh: expected REPLICASxSHARDS, such as 2x4, got 2x9"),
        (["--world", "2", "--memory", "much"], "--memory: expected a number of bytes"),
    ],
    ids=lambda value: "_".join(value).strip("-") if isinstance(value, list) else "",
)  # fmt: skip
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refuse(capsys, "estimate", *MODEL, *arguments)


def test_a_given_strategy_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--world", "2", "--parallel", "zero3", "--memory"]
    size = estimated(capsys, *arguments, "100GB")["compared"][0]["bytes"]
    assert estimated(capsys, *arguments, "100GB")["reasons"] == [
        f"zero3 needs {size:,} of the 100,000,000,000 bytes of --memory."
    ]
    assert estimated(capsys, *arguments, str(size - 1))["reasons"][0] == (
        f"zero3 needs {size:,} bytes, more than the {size - 1:,} of --memory."
    )


def test_auto_says_what_it_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    found = estimated(capsys, "--world", "2", "--optimizer", "muon")
    assert [row["strategy"] for row in found["compared"]] == ["ddp", "zero1", "zero3"]
    assert found["reasons"][0] == "zero2 cannot have --optimizer muon."
