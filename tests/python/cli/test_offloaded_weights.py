"""Test --offload-weights and --keep of `finetune` and `estimate`: the same bits, refusals, faults and figures."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from cli_helpers import TINY, TUNE, assert_same_weights, losses, refuse, succeed, text
from offload_faults import disturb_offload
from shoestring.checkpoint import weights as offloaded
from shoestring.optim import AdamW
from shoestring.training.config import Preset
from shoestring.training.estimate.config import EstimateConfig
from shoestring.training.estimate.step import estimate
from shoestring.training.run import loop
from shoestring.training.run.models import build_preset, fused_loss

pytestmark = pytest.mark.usefixtures("blank_images")

LAYERS = 4
FULL = ["--full", "--step-in-backward"]
REMAINDER = [*FULL, "--precision", "bf16", "--weights", "bf16-remainder", "--offload", "stream"]
LORA = ["--quantize", "none", "--merge"]
# Runs without --offload-weights, to which those with it are compared.
PLAIN: dict[str, list[str]] = {"nf4": [], "lora": LORA, "full": FULL, "remainder": REMAINDER}


@pytest.fixture(autouse=True, scope="module")
def no_reports() -> Iterator[None]:
    """Draw no reports, which take most of the time of small runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoestring.training.run.execute.write_report", lambda run: None)
        yield


@pytest.fixture(autouse=True)
def small_weights_leave(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the matrices of small models leave, but not the weights of norms; end all faults of transfers."""
    monkeypatch.setattr(offloaded, "LEAST", 1024)
    yield
    disturb_offload()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a model with more blocks than are on the device at a time, and a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "text.txt").write_text(text())
    succeed(
        "train", "--data", folder / "text.txt", "--out", folder / "run", *TINY, "--steps", "1", "--baseline"
    )
    torch.manual_seed(0)
    build_preset(Preset(64, LAYERS, 2, 2, 192), 300, 32, 0).save_pretrained(folder / "run" / "model")
    (folder / "data.txt").write_text(text(60).upper())
    return folder / "run" / "model"


def command(model: Path, out: Path, *more: object) -> list[object]:
    data = model.parent.parent / "data.txt"
    steps = ["--steps", "4", "--eval-every", "2", "--checkpoint-every", "2", "--lr", "1e-2"]
    tune = TUNE[:-2] if "--full" in more else TUNE  # adapters alone have a rank
    return ["finetune", "--model", model, "--data", data, "--out", out, *tune, *steps, *more]


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of the runs in PLAIN."""
    folder = tmp_path_factory.mktemp("plain")
    for name, options in PLAIN.items():
        succeed(*command(model, folder / name, *options))
    return {name: folder / name for name in PLAIN}


def assert_same_run(one: Path, two: Path) -> None:
    assert losses(one) == losses(two)
    for result in ("adapter", "model"):
        assert (one / result).exists() == (two / result).exists()
        if (one / result).exists():
            assert_same_weights(one / result, two / result)
    [newest] = {max((run / "checkpoints").iterdir()).name for run in (one, two)}
    assert_same_weights(one / "checkpoints" / newest, two / "checkpoints" / newest)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nf4", []),
        ("nf4", ["--activations", "recompute", "--keep", "30KB"]),
        ("nf4", ["--activations", "offload", "--offload", "stream"]),
        ("nf4", ["--memory-budget", "1GB"]),
        ("lora", ["--keep", "250KB"]),
        ("full", ["--activations", "recompute"]),
        ("remainder", ["--keep", "150KiB"]),
    ],
    ids=lambda value: "_".join(value).replace("--", "") if isinstance(value, list) else value,
)
def test_runs_have_the_same_bits(
    name: str, options: list[str], model: Path, plain: dict[str, Path], tmp_path: Path
) -> None:
    place = f"nvme:{tmp_path}"
    out = tmp_path / "run"
    succeed(*command(model, out, *PLAIN[name], *options, "--offload-weights", place))
    assert_same_run(out, plain[name])
    [part] = [p for p in json.loads((out / "summary.json").read_text())["memory"] if p["name"] == "weights"]
    [before] = [
        p for p in json.loads((plain[name] / "summary.json").read_text())["memory"] if p["name"] == "weights"
    ]
    assert "MB of them in a file" in part["formula"] and part["measured"] < 0.9 * before["measured"]
    assert part["measured"] == pytest.approx(part["expected"], rel=0.02)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("name", ["nf4", "full"])
@pytest.mark.parametrize("first", [False, True], ids=["then with", "then without"])
def test_a_run_is_resumed_with_other_places(
    name: str, first: bool, model: Path, plain: dict[str, Path], tmp_path: Path
) -> None:
    out, place = tmp_path / "run", ["--offload-weights", f"nvme:{tmp_path}", "--keep", "20KB"]
    if first:
        succeed(*command(model, out, *PLAIN[name], *place))
    else:
        shutil.copytree(plain[name], out)
    shutil.rmtree(max((out / "checkpoints").iterdir()))  # the run continues in the middle
    for result in ("adapter", "model"):
        shutil.rmtree(out / result, ignore_errors=True)
    succeed(*command(model, out, *PLAIN[name], "--resume", *([] if first else place)))
    assert_same_run(out, plain[name])


@pytest.mark.nightly
def test_a_compiled_run_has_the_same_bits(model: Path, tmp_path: Path) -> None:
    for name, more in (("plain", []), ("away", ["--offload-weights", f"nvme:{tmp_path}"])):
        torch._dynamo.reset()
        succeed(*command(model, tmp_path / name, "--compile", *more))
    torch._dynamo.reset()
    assert_same_run(tmp_path / "away", tmp_path / "plain")


PLACE = "nvme:{folder}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["ram"], "--offload-weights: expected none | cpu | nvme:DIR, got ram"),
        (["stream"], "--offload-weights: expected none | cpu | nvme:DIR, got stream"),
        (["nvme:"], "--offload-weights: expected none | cpu | nvme:DIR, got nvme:"),
        (
            ["cpu"],
            "--offload-weights cpu: expected nvme:DIR with --device cpu, whose weights are in host memory",
        ),
        (["none", "--keep", "1GiB"], "--keep 1GiB: expected --offload-weights as well, got none; add it"),
        ([PLACE, "--keep", "much"], "--keep: expected a number of bytes, or a string such as"),
        ([PLACE, "--keep", "-1"], "--keep: expected a number of bytes, or a string such as"),
        ([PLACE, "--baseline"], "--offload-weights nvme:{folder}: expected no --baseline, received both"),
        (
            [PLACE, "--full"],
            "expected --step-in-backward with --full, since a trained weight is stepped while",
        ),
        (
            [PLACE, *FULL, "--offload", "cpu"],
            "expected --offload none, stream or nvme:DIR with --full, got --offload cpu, which steps weights",
        ),
        (
            [PLACE, *FULL, "--compile"],
            "expected no --compile with --full, since the last bits of results would",
        ),
        (
            [PLACE, *FULL, "--optimizer", "schedule-free-adamw"],
            "expected no --optimizer schedule-free-adamw with --full, since it changes all weights at once",
        ),
        (["nvme:{folder}/none"], "--offload-weights nvme:{folder}/none: {folder}/none/shoestring-swap-"),
        (["nvme:{folder}/a.txt"], "cannot create the file: Not a directory"),
        (["nvme:/proc"], "--offload-weights nvme:/proc: /proc/shoestring-swap-"),
    ],
    ids=lambda value: "_".join(value).replace("--", "").replace("/", "") if isinstance(value, list) else "",
)
def test_refusals(
    options: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").touch()
    given = [option.format(folder=tmp_path) for option in options]
    line = refuse(capsys, *command(model, tmp_path / "run", "--offload-weights", *given))
    assert message.format(folder=tmp_path) in line
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("options", [[], ["--quantize", "none"]], ids=["nf4", "lora"])
def test_a_full_disk(
    options: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(
        "shoestring.cli.finetune.check_weights_folder", lambda place: disturb_offload(0, 2, 28)
    )
    out, place = tmp_path / "run", f"nvme:{tmp_path}"
    line = refuse(capsys, *command(model, out, *options, "--offload-weights", place))
    assert f"--offload-weights {place}: {tmp_path}/shoestring-swap-" in line
    assert "No space left on device" in line and not list(tmp_path.iterdir())


@pytest.mark.parametrize("transfers", [1, 7], ids=["forward", "backward"])
def test_a_failed_transfer_in_a_step(
    transfers: int, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    save = loop.save_checkpoint

    def save_and_fail(*arguments: Any, **options: Any) -> Path:
        result = save(*arguments, **options)
        disturb_offload(0, transfers, 5)
        return result

    monkeypatch.setattr(loop, "save_checkpoint", save_and_fail)
    place = f"nvme:{tmp_path}"
    line = refuse(capsys, *command(model, tmp_path / "run", *FULL, "--offload-weights", place))
    assert f"--offload-weights {place}: {tmp_path}/shoestring-swap-" in line and "Input/output error" in line
    assert line.endswith(f"; the last checkpoint in {tmp_path}/run is kept")
    monkeypatch.setattr(loop, "save_checkpoint", save)
    disturb_offload()
    succeed(*command(model, tmp_path / "run", *FULL, "--offload-weights", place, "--resume"))


def adapted(model: nn.Module, kind: str) -> nn.Module:
    if kind == "full":
        return model
    model.requires_grad_(False)
    return shoestring.lora.apply(model, rank=4, quantize=None if kind == "lora" else kind)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["nf4", "int8", "lora", "full"])
def test_estimates_are_those_of_a_run(
    kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks on the device, bytes of the file and traffic are exact; so are the weights that stay."""
    monkeypatch.setattr(offloaded, "LEAST", 5000)  # the embedding and the output layer stay
    draw = random.Random(seed)
    shape, full = Preset(128, draw.randint(4, 6), 4, 4, 384), kind == "full"
    config = EstimateConfig(
        model="", offload_weights=f"nvme:{tmp_path}", keep=draw.choice(["0", "300KB", "1MiB"]), device="cpu",
        rank=None if full else 4, step_in_backward=full, accumulate=draw.randint(1, 2),
    )  # fmt: skip
    print(shape, config)
    with torch.device("meta"):
        found = estimate(adapted(build_preset(shape, 8, 64, 0), kind), config)
    model = build_preset(shape, 8, 64, 0).train()
    loss = fused_loss(model, 64)
    model = adapted(model, kind)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, step_in_backward=full)
    keep = {"0": 0, "300KB": 300_000, "1MiB": 1 << 20}[config.keep]
    whole = shoestring.training.memory.weight_bytes(model)
    handle = shoestring.offload_weights(
        model, f"nvme:{tmp_path}", keep=keep, optimizer=optimizer if full else None
    )
    figures: list[dict[str, int]] = []
    for _ in range(3):
        for number in range(config.accumulate):
            tokens = torch.randint(8, (2, 16))
            adds = full and number + 1 < config.accumulate
            with optimizer.accumulate() if adds else nullcontext():
                loss(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        figures.append(handle.statistics())
    device = {item.name: item.bytes for item in found.memory["device"]}
    assert figures[-1]["away"] == figures[-1]["disk"] == found.totals()["disk"]
    assert device.get("weights in flight", 0) == figures[-1]["device"]
    moved = [figures[-1][name] - figures[-2][name] for name in ("fetched", "written")]
    assert moved == [found.traffic.get(name, 0) for name in ("disk read", "disk written")]
    away = whole - (device["weights"] or 0)
    assert 0 <= figures[-1]["away"] - away < 8192 * shape.layers  # padding


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_estimates_of_tables_are_those_of_a_run(tied: bool, tmp_path: Path) -> None:
    """The output layer is read as often as the estimate says, and of the embedding at most a row for each token."""
    shape = Preset(64, 4, 2, 2, 192, tied=tied)
    config = EstimateConfig(
        model="", offload_weights=f"nvme:{tmp_path}", device="cpu", rank=4, batch_size=2, seq_len=400, workspace_mb=4
    )  # fmt: skip
    with torch.device("meta"):
        found = estimate(adapted(build_preset(shape, 5000, 400, 0), "lora"), config)
    model = build_preset(shape, 5000, 400, 0).train()
    loss = fused_loss(model, 4)
    handle = shoestring.offload_weights(adapted(model, "lora"), f"nvme:{tmp_path}")
    tokens = torch.randint(5000, (2, 400))
    figures = []
    for _ in range(2):
        loss(tokens, tokens).backward()
        figures.append(handle.statistics())
    assert figures[-1]["away"] == figures[-1]["disk"] == found.totals()["disk"]
    read = figures[1]["fetched"] - figures[0]["fetched"]
    unread = (tokens.numel() - len(tokens.unique())) * 64 * 4  # rows of tokens that occur several times
    assert read == found.traffic["disk read"] - unread


def test_estimates_of_a_large_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloaded, "LEAST", 1 << 16)
    options = ["--model", "1b", "--precision", "bf16", "--weights", "bf16", "--json"]
    options += ["--device", "cuda", "--batch-size", "1", "--seq-len", "2048"]
    away = {}
    for name, more in (
        ("all", ["--step-in-backward"]),
        ("nvme", ["--step-in-backward", "--offload-weights", "nvme:/nowhere", "--keep", "1GiB"]),
        ("cpu", ["--rank", "8", "--quantize", "nf4", "--offload-weights", "cpu"]),
    ):
        succeed("estimate", *options, *more)
        away[name] = json.loads(capsys.readouterr().out)
    device = {name: {i["name"]: i["bytes"] for i in each["memory"]["device"]} for name, each in away.items()}
    host = {name: {i["name"]: i["bytes"] for i in each["memory"]["host"]} for name, each in away.items()}
    block = 2 * (2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 5632)
    stay = (1 << 30) // block
    assert device["nvme"]["weights"] == device["all"]["weights"] - (22 - stay) * block
    assert device["nvme"]["weights in flight"] == host["nvme"]["weights in flight"] == 3 * block
    assert away["nvme"]["totals"]["disk"] == (22 - stay) * block
    read, written = 2 * (20 - stay) * block, (22 - stay) * block
    assert away["nvme"]["traffic"] == {
        "disk read": read, "disk written": written, "host to device": read, "device to host": written,
    }  # fmt: skip
    assert away["nvme"]["options"]["keep"] == 1 << 30
    assert away["nvme"]["options"]["offload_weights"] == "nvme:/nowhere"
    size = host["cpu"]["weights"] // 22
    # 8 waves of 256 tokens for the logits, 2 chunks of 1,536 tokens for the gradients, and rows of the embedding
    table = 16384 * 2048 * 2
    assert host["cpu"]["embedding and output layer"] == 2 * table
    assert away["cpu"]["traffic"] == {"host to device": 40 * size + 10 * table + 2048 * 2048 * 2}
    assert device["cpu"]["weights in flight"] == 2 * size and away["cpu"]["totals"]["disk"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["stream"], "--offload-weights: expected none | cpu | nvme:DIR, got stream"),
        (
            ["cpu", "--device", "cpu", "--rank", "8"],
            "--offload-weights cpu: expected nvme:DIR with --device cpu",
        ),
        (["none", "--keep", "1GiB"], "--keep 1GiB: expected --offload-weights as well, got none; add it"),
        (["cpu", "--keep", "x", "--rank", "8"], "--keep: expected a number of bytes, or a string such as"),
        (["cpu"], "--offload-weights cpu: expected --step-in-backward with no --rank"),
        (
            ["cpu", "--step-in-backward", "--offload", "cpu"],
            "--offload-weights cpu: expected --offload none, stream or nvme:DIR with no --rank, got --offload cpu",
        ),
    ],
    ids=lambda value: "_".join(value).replace("--", "") if isinstance(value, list) else "",
)
def test_refusals_of_estimate(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refuse(
        capsys, "estimate", "--model", "mini", "--device", "cuda", "--offload-weights", *options
    )
