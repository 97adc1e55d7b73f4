"""`shoestring estimate` predicts state, weights and gradients to the byte, and activations to within 10%."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from cli_helpers import TINY, refuse, run, succeed, text
from shoestring.optim import state_sizes
from shoestring.optim.base import LowMemoryOptimizer
from shoestring.training import memory
from shoestring.training.config import FinetuneConfig, Preset, TrainConfig
from shoestring.training.estimate.config import EstimateConfig
from shoestring.training.estimate.step import Estimate, estimate
from shoestring.training.optimizers import OPTIMIZERS, build, classes, described, make_optimizers
from shoestring.training.optimizers import trained as trained_of
from shoestring.training.options import LOW_RANK
from shoestring.training.run.models import build_preset, fused_loss

pytestmark = pytest.mark.usefixtures("blank_images")

ELEMENTWISE = [name for name in OPTIMIZERS if name not in LOW_RANK]
STATES = ("8bit", "4bit", "bf16", "fp32")


class Net(nn.Module):
    """A model with many kinds of parameters.

    It has an embedding, matrices, vectors, an empty parameter and a frozen matrix. Some sizes are no multiple
    of a block of optimizer state. The state fills more than one of the chunks in which it is offloaded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 16)
        self.first, self.second = nn.Linear(16, 1031), nn.Linear(1031, 2055, bias=False)
        self.last = nn.Linear(2055, 7)
        self.none = nn.Parameter(torch.zeros(0))
        self.frozen = nn.Parameter(torch.ones(16, 16), requires_grad=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens) @ self.frozen
        return self.last(self.second(self.first(x).tanh())) + self.none.sum()


def step(model: nn.Module, optimizers: list[Any]) -> None:
    model(torch.arange(30)).float().square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def sizes(found: Estimate, place: str) -> dict[str, int]:
    """Return the estimated bytes of optimizer state by the name of the state tensor, such as exp_avg."""
    return {
        i.name.removeprefix("state: "): i.bytes for i in found.memory[place] if i.name.startswith("state: ")
    }


@dataclass
class Arena:
    """The memory that an optimizer's core has allocated for some parameters."""

    values: dict[str, Tensor]  # the flat tensors of the state
    weights: list[Tensor]  # copies of the parameters in host memory
    offloaded: Any

    def __post_init__(self) -> None:
        self.step = self.values.pop("step")
        self.accumulated = self.values.pop("accumulated", None)


def arenas_of(optimizers: list[LowMemoryOptimizer]) -> list[Arena]:
    return [Arena(*arena) for opt in optimizers for arena in opt._core.arenas()]


def item(found: Estimate, place: str, name: str) -> int:
    return next((i.bytes or 0 for i in found.memory[place] if i.name == name), 0)


def configured(**options: Any) -> EstimateConfig:
    """Return options of `estimate` without a model folder, because the test passes the model as a module."""
    return EstimateConfig(model="", **options)


def made(
    optimizer: str, config: EstimateConfig, dtype: torch.dtype, **more: Any
) -> tuple[nn.Module, list[Any], Estimate]:
    """Return a model after one step, its optimizers, and the estimate for the model on the meta device."""
    with torch.device("meta"):
        twin = Net().to(dtype)
    found = estimate(twin, config)
    model = Net().to(dtype)
    optimizers = [build(kind, groups, own | more, config) for kind, groups, own in described(model, config)]
    step(model, optimizers)
    return model, optimizers, found


def rest_of(model: nn.Module, optimizers: list[LowMemoryOptimizer]) -> dict[str, int]:
    """Return the bytes of step counts and of other optimizer state that is not in flat tensors, by name."""
    in_arenas = {part for arena in arenas_of(optimizers) for part in arena.values} | {"step"}
    found = [{"step": arena.step.nbytes} for arena in arenas_of(optimizers)]
    for opt in optimizers:
        for entry in opt.state.values():
            found.append({name: value.nbytes for name, value in entry.items() if name not in in_arenas})
    return state_sizes.total(*found)


@pytest.mark.parametrize("weights", ["bf16", "bf16-stochastic", "bf16-remainder"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("optimizer", ELEMENTWISE)
@pytest.mark.sample(36)
def test_state_weights_and_gradients_to_the_byte(optimizer: str, state: str, weights: str) -> None:
    config = configured(optimizer=optimizer, optimizer_state=state, weights=weights, device="cpu")
    model, optimizers, found = made(optimizer, config, torch.bfloat16)
    measured = state_sizes.total(*({k: v.nbytes for k, v in a.values.items()} for a in arenas_of(optimizers)),
                              rest_of(model, optimizers))  # fmt: skip
    assert sizes(found, "device") == measured
    assert sum(measured.values()) == sum(memory.optimizer_bytes(opt) for opt in optimizers)
    trained = trained_of(model)
    assert item(found, "device", "gradients") == sum(p.grad.nbytes for p in trained)
    assert (
        item(found, "device", "weights")
        == memory.weight_bytes(model)
        == sum(p.nbytes for p in model.parameters())
    )
    assert found.trained == sum(p.numel() for p in trained) and found.parameters == found.trained + 256
    assert not found.memory["host"] and not found.memory["disk"] and not found.traffic


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("optimizer", LOW_RANK)
@pytest.mark.sample(8)
def test_low_rank_state_to_the_byte(optimizer: str, state: str, dtype: torch.dtype) -> None:
    """The matrices between the ends are projected; the state is that of the projections and of the base."""
    rank = [] if optimizer == "apollo-mini" else ["rank=10"]
    config = configured(optimizer=optimizer, optimizer_state=state, optimizer_arg=rank, device="cpu")
    model, optimizers, found = made(optimizer, config, dtype)
    assert sum(sizes(found, "device").values()) == sum(memory.optimizer_bytes(opt) for opt in optimizers)
    assert item(found, "device", "gradients") == sum(p.grad.nbytes for p in trained_of(model))
    dense = estimate(model, configured(optimizer_state=state, device="cpu"))
    assert sum(sizes(found, "device").values()) < 0.1 * sum(sizes(dense, "device").values())


@pytest.mark.parametrize("place", ["stream", "nvme"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("optimizer", ELEMENTWISE)
@pytest.mark.sample(24)
def test_offloaded_state_and_its_traffic_to_the_byte(
    optimizer: str, state: str, place: str, tmp_path: Path
) -> None:
    where = f"nvme:{tmp_path}" if place == "nvme" else "stream"
    config = configured(
        optimizer=optimizer, optimizer_state=state, weights="bf16-remainder", offload=where, device="cpu"
    )
    model, optimizers, found = made(optimizer, config, torch.bfloat16, offload=where)
    arenas = arenas_of(optimizers)
    kept = state_sizes.total(*({k: v.nbytes for k, v in arena.values.items()} for arena in arenas))
    on_disk = place == "nvme"
    assert sizes(found, "disk" if on_disk else "host") == kept
    assert sizes(found, "device") == rest_of(model, optimizers)
    if on_disk:
        assert found.totals()["disk"] == file_bytes(tmp_path)
    chunks = [chunk_bytes(arena) for arena in arenas]
    slots = [min(4, len(each)) * max(each) for each in chunks]
    assert item(found, "host", "slots") == max(slots, default=0)
    moved = sum(map(sum, chunks))
    to, back = ("disk read", "disk written") if on_disk else ("host to device", "device to host")
    assert found.traffic == {to: moved, back: moved}


def test_matrices_and_vectors_have_chunks_of_their_own() -> None:
    """Vectors have no weight decay in training, so they are in another group."""
    model = Net()
    found = estimate(model, configured(offload="stream", device="cpu"))
    optimizers: Any = make_optimizers(model, TrainConfig(offload="stream", device="cpu"), clips=False)
    step(model, optimizers)
    arenas = arenas_of(optimizers)
    kept = state_sizes.total(*({k: v.nbytes for k, v in arena.values.items()} for arena in arenas))
    assert len(arenas) > 1 and sizes(found, "host") == kept


def file_bytes(folder: Path) -> int:
    """Return the total size in bytes of the deleted files in ``folder`` that this process has open."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target, info = os.readlink(f"/proc/self/fd/{fd}"), os.stat(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(str(folder)):
            found[info.st_ino] = info.st_size
    return sum(found.values())


def chunk_bytes(arena: Any) -> list[int]:
    """Return the bytes of each chunk in which a flat, offloaded state tensor is copied to the device."""
    offloaded = arena.offloaded
    chunks, found = offloaded.chunks(0, len(arena.step)), []
    offloaded.start(chunks)
    for chunk in chunks:
        found.append(sum(part.nbytes for part in offloaded.take(chunk)))
        offloaded.put(chunk)
    offloaded.finish()
    offloaded.commit()
    return [size for size in found if size] or [0]


def test_chunks_are_those_of_the_offload(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        blocks = [draw.choice([0, 1, 5, 700, 1024, 1500, 9000]) for _ in range(draw.randint(1, 9))]
        splits, per_block = draw.random() < 0.5, draw.choice([4, 520, 1544, 2048])
        offload = torch.classes.shoestring.Offload("test", "stream", torch.device("cpu"))
        like = [torch.empty(0, dtype=torch.uint8)]
        state = torch.classes.shoestring.OffloadedState(offload, like, [per_block], blocks, splits)
        edges = torch.ops.shoestring._chunk_edges(per_block, blocks, splits)
        assert state.total() == edges[-1]
        chunks = list(range(len(edges) - 1))
        state.start(chunks)
        found = []
        for chunk in chunks:
            found.append(state.take(chunk)[0].nbytes)
            state.put(chunk)
        state.finish()
        assert found == [(b - a) * per_block for a, b in itertools.pairwise(edges)], (blocks, splits)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("optimizer", ELEMENTWISE)
@pytest.mark.sample(14)
def test_a_step_on_the_host_to_the_byte(optimizer: str, state: str) -> None:
    config = configured(
        optimizer=optimizer, optimizer_state=state, weights="bf16-remainder", offload="cpu", device="cpu"
    )
    model, optimizers, found = made(optimizer, config, torch.bfloat16, offload="cpu")
    arenas = arenas_of(optimizers)
    kept = state_sizes.total(
        *({k: v.nbytes for k, v in a.values.items()} for a in arenas), rest_of(model, optimizers)
    )
    assert sizes(found, "host") == kept and not sizes(found, "device")
    copies = sum(memory.storage_bytes(arena.weights) for arena in arenas)
    assert item(found, "host", "weights") == item(found, "host", "gradients") == copies
    whole = sum(p.nbytes for p in trained_of(model))
    assert found.traffic == {"device to host": whole, "host to device": whole}


def test_sums_and_steps_in_backward_on_the_host() -> None:
    config = configured(offload="cpu", accumulate=3, step_in_backward=True, device="cpu")
    model, optimizers, found = made("adamw", config, torch.bfloat16, offload="cpu")
    with optimizers[0].accumulate():
        model(torch.arange(30)).float().square().mean().backward()
    step(model, optimizers)
    sums = sum(arena.accumulated.nbytes for arena in arenas_of(optimizers))
    assert item(found, "host", "sums of gradients") == sums
    whole = sum(p.nbytes for p in trained_of(model))
    assert found.traffic == {"device to host": 3 * whole, "host to device": whole}
    alone = estimate(model, configured(offload="cpu", step_in_backward=True))
    assert item(alone, "device", "gradients") == min(whole, 8 << 20)


def test_sums_of_gradients() -> None:
    # Without --step-in-backward, the gradients themselves are the sums.
    alone = estimate(Net(), configured(accumulate=2, offload="cpu", device="cpu"))
    assert item(alone, "host", "sums of gradients") == 0
    assert alone.traffic["device to host"] == sum(p.nbytes for p in trained_of(Net()))
    config = configured(accumulate=2, step_in_backward=True, device="cpu")
    model, optimizers, found = made("adamw", config, torch.bfloat16)
    with optimizers[0].accumulate():
        model(torch.arange(30)).float().square().mean().backward()
    step(model, optimizers)
    assert item(found, "device", "sums of gradients") == sum(
        a.accumulated.nbytes for a in arenas_of(optimizers)
    )


def test_muon_steps_the_matrices_between_the_ends() -> None:
    model = build_preset(Preset(64, 2, 2, 2, 192), 300, 32, 0)
    matrices, others = (group["params"] for _, [group] in classes(model, "muon"))
    names = {p: name for name, p in model.named_parameters()}
    assert all("layers" in names[p] and p.ndim == 2 for p in matrices)
    rest = {names[p] for p in others}
    assert "model.embed_tokens.weight" in rest and "model.norm.weight" in rest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["full", "lora", "nf4", "int8"])
@pytest.mark.parametrize("shape", [Preset(128, 4, 4, 4, 384), Preset(256, 3, 8, 2, 704, tied=False)])
def test_activations_and_quantised_weights(dtype: torch.dtype, kind: str, shape: Preset) -> None:
    def build() -> nn.Module:
        return build_preset(shape, 300, 64, 0).to(dtype)

    def adapt(model: nn.Module) -> nn.Module:
        if kind == "full":
            return model
        model.requires_grad_(False)
        return shoestring.lora.apply(model, rank=8, quantize=None if kind == "lora" else kind)

    with torch.device("meta"):
        twin = adapt(build())
    config = configured(batch_size=4, seq_len=64, precision="fp32" if dtype == torch.float32 else "bf16")
    found = estimate(twin, config)
    model = build().train()
    loss = fused_loss(model, 64)
    model = adapt(model)
    tokens = torch.randint(300, (4, 64))
    with memory.SavedActivations(model) as saved:
        loss(tokens, tokens).backward()
    assert saved.bytes == pytest.approx(item(found, "device", "activations"), rel=0.1)
    assert item(found, "device", "weights") == memory.weight_bytes(model)
    assert item(found, "device", "gradients") == sum(
        p.grad.nbytes for p in model.parameters() if p.grad is not None
    )


def test_a_run_has_what_was_foretold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(text())
    for name, more in (("plain", []), ("again", ["--activations", "recompute"])):
        out = tmp_path / name
        succeed("train", "--data", tmp_path / "text.txt", "--out", out, *TINY, "--steps", "2", *more)
        capsys.readouterr()
        sizes = ["--batch-size", "4", "--seq-len", "32"]
        succeed("estimate", "--model", out / "model", "--json", "--full", *sizes, *more)
        found = json.loads(capsys.readouterr().out)
        parts = {
            part["name"]: part["measured"]
            for part in json.loads((out / "summary.json").read_text())["memory"]
        }
        device = {each["name"]: each["bytes"] for each in found["memory"]["device"]}
        assert device["weights"] == parts["weights"] and device["gradients"] == parts["gradients"]
        assert sum(size for name, size in device.items() if name.startswith("state: ")) == parts["optimizer"]
        assert parts["activations"] == pytest.approx(device["activations"], rel=0.1)
        assert found["totals"]["device"] == sum(device.values())
        assert ("a block computed again" in device) == bool(more)


def test_70_billion_parameters_on_a_small_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = dict(
        model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=128256, hidden_size=8192,
        intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = memory.resident_bytes()
    for path in (tmp_path, tmp_path / "config.json"):
        succeed(
            "estimate",
            "--model",
            path,
            "--json",
            "--full",
            "--offload",
            "nvme:/nowhere",
            "--optimizer-state",
            "4bit",
            "--device",
            "cuda",
        )
        found = json.loads(capsys.readouterr().out)
        assert found["parameters"] == 70_553_706_496
        each = found["totals"]["disk"] / found["parameters"]
        # The optimizer state takes slightly more than 296 bytes per block of 256 parameters, because chunks
        # are padded to multiples of 1024 blocks.
        assert each == pytest.approx(296 / 256, rel=1e-3)
    assert memory.resident_bytes() - before < 1 << 30
    succeed(
        "estimate", "--model", tmp_path, "--rank", "16", "--quantize", "nf4", "--activations", "recompute"
    )
    out = capsys.readouterr().out
    assert "MB" in out and "weights" in out and "a block computed again" in out


def test_an_unknown_architecture_has_no_activations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = dict(model_type="mamba", vocab_size=300, hidden_size=32, num_hidden_layers=2, state_size=8)
    (tmp_path / "config.json").write_text(json.dumps(config))
    succeed("estimate", "--model", tmp_path)
    assert "not known for this architecture" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "/nowhere"],
            "--model /nowhere: no such directory, and not the form of a Hugging Face Hub id (owner/name); presets are tiny",
        ),
        (["--model", "{folder}"], "config.json does not describe a causal language model"),
        (["--optimizer", "adam"], "--optimizer: expected adamw | lion | "),
        (["--optimizer-state", "2bit"], "--optimizer-state: expected 8bit | 4bit | bf16 | fp32, got 2bit"),
        (
            ["--weights", "exact"],
            "--weights: expected fp32 | bf16 | bf16-stochastic | bf16-remainder, got exact",
        ),
        (
            ["--weights", "bf16-remainder", "--precision", "fp16"],
            "--weights bf16-remainder: expected --precision bf16 with bf16 weights, got --precision fp16",
        ),
        (["--offload", "ram"], "--offload: expected none | cpu | stream | nvme:DIR, got ram"),
        (["--offload", "nvme:"], "--offload: expected none | cpu | stream | nvme:DIR, got nvme:"),
        (
            ["--device", "tpu"],
            "--device: expected auto, cpu, cuda, cuda:N or the name of an installed backend of PyTorch, got tpu",
        ),
        (["--precision", "fp8"], "--precision: expected auto | fp32 | tf32 | bf16 | fp16, got fp8"),
        (["--batch-size", "0"], "--batch-size: expected at least 1, got 0"),
        (["--memory-budget", "2 cows"], "--memory-budget: expected a number of bytes, or a string such as"),
        (["--memory-budget", "1MB"], "--memory-budget 1000000: expected at least"),
        (
            ["--memory-budget", "1GB", "--activations", "recompute"],
            "--memory-budget: expected no --activations recompute",
        ),
        (["--quantize", "nf4"], "--quantize nf4: expected --rank as well"),
        (["--quantize", "fp8", "--rank", "8"], "--quantize: expected nf4 | int4 | int8 | none, got fp8"),
        (["--full", "--rank", "8"], "--full: expected no --rank, received both"),
        (["--full", "--quantize", "nf4"], "--full: expected no --quantize nf4, received both"),
        (["--double-quant"], "--double-quant: expected frozen weights in nf4, got dense ones"),
        (
            ["--rank", "8", "--quantize", "int8", "--double-quant"],
            "--double-quant: expected frozen weights in nf4, got int8",
        ),
        (["--memory", "much"], "--memory: expected a number of bytes"),
        (["--rank", "0"], "--rank: expected at least 1, got 0"),
        (["--rank", "8", "--target-modules", "q,w"], "--target-modules q,w, --rank 8: "),
    ],
    ids=lambda value: "_".join(value).strip("-") if isinstance(value, list) else "",
)
def test_errors(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    given = [argument.format(folder=tmp_path) for argument in arguments]
    model = [] if "--model" in given else ["--model", "mini"]
    assert message in refuse(capsys, "estimate", *model, *given)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(text())
    succeed(
        "train", "--data", folder / "text.txt", "--out", folder / "run", *TINY, "--steps", "1", "--baseline"
    )
    return folder


@pytest.mark.parametrize("more", [[], ["--double-quant"], ["--quantize", "none", "--rank", "4"]], ids=str)
def test_it_is_finetune_without_options(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    """The options of `finetune`, and its defaults, give the weights, gradients and state of its run to the byte."""
    model, sizes = trained / "run" / "model", ["--batch-size", "2", "--seq-len", "32"]
    data = ["--data", trained / "text.txt", "--out", tmp_path / "run", "--steps", "1", "--threads", "1"]
    succeed("finetune", "--model", model, *data, *sizes, *more)
    capsys.readouterr()
    succeed("estimate", "--model", model, "--json", *sizes, *more)
    found = json.loads(capsys.readouterr().out)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    parts = {part["name"]: part for part in summary["memory"]}
    device = {each["name"]: each["bytes"] for each in found["memory"]["device"]}
    assert found["trained"] == summary["trained_parameters"]
    # The memory of scales in 8 bits is a multiple of 256 bytes for each of the 14 weights.
    padding = 14 * 255 if "--double-quant" in more else 0
    assert device["weights"] == pytest.approx(parts["weights"]["measured"], abs=padding)
    assert parts["weights"]["measured"] == pytest.approx(parts["weights"]["expected"], rel=0.01)
    assert device["gradients"] == parts["gradients"]["measured"]
    assert (
        sum(size for name, size in device.items() if name.startswith("state: "))
        == parts["optimizer"]["measured"]
    )


def test_defaults_are_those_of_the_commands() -> None:
    tuned = FinetuneConfig(model="folder")
    found = EstimateConfig(model="folder").filled()
    shared = (
        "batch_size",
        "seq_len",
        "accumulate",
        "device",
        "full",
        "rank",
        "double_quant",
        "target_modules",
    )
    assert {name: getattr(found, name) for name in shared} == {name: getattr(tuned, name) for name in shared}
    assert found.quantize == tuned.frozen_format
    preset = EstimateConfig(model="tiny").filled()
    assert (preset.rank, preset.quantize) == (None, "none") and preset == replace(preset, full=False)


def test_auto_precision_has_the_bytes_of_fp32(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is measured, and the output says so; JSON names the precision."""
    shown, found = [], []
    for precision in (["--precision", "auto"], ["--precision", "fp32"]):
        succeed("estimate", "--model", "tiny", *precision)
        shown.append(capsys.readouterr().out)
        succeed("estimate", "--model", "tiny", "--json", *precision)
        found.append(json.loads(capsys.readouterr().out))
    first, rest = shown[0].split("\n", 1)
    assert first.startswith("--precision auto: ") and "these are the bytes of fp32" in first
    assert rest == shown[1] and found[0] == found[1] and found[0]["options"]["precision"] == "fp32"


def test_memory_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    succeed("estimate", "--model", "tiny", "--json")
    size = json.loads(capsys.readouterr().out)["totals"]["device"]
    for limit, fits, line in (
        (size, True, f"fits: {size:,} of the {size:,} bytes of --memory"),
        (size - 1, False, f"does not fit: {size:,} bytes, more than the {size - 1:,} of --memory"),
    ):
        succeed("estimate", "--model", "tiny", "--memory", limit)
        assert capsys.readouterr().out.splitlines()[-1] == line
        succeed("estimate", "--model", "tiny", "--memory", limit, "--json")
        assert json.loads(capsys.readouterr().out)["fits"] is fits


def test_a_model_of_the_hub_is_described_by_its_config_alone(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        shutil.copy(trained / "run" / "model" / "config.json", tmp_path)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    succeed("estimate", "--model", "owner/name", "--json")
    of_hub = json.loads(capsys.readouterr().out)
    succeed("estimate", "--model", trained / "run" / "model", "--json")
    assert of_hub["memory"] == json.loads(capsys.readouterr().out)["memory"]
    assert asked == [("owner/name", ["config.json"])]
    line = refuse(capsys, "estimate", "--model", "owner/name", "--seq-len", "4096")
    assert "--seq-len 4096: expected at most 2048, the positions of " in line


def test_the_budget_bounds_activations(capsys: pytest.CaptureFixture[str]) -> None:
    budget = ["--precision", "bf16", "--memory-budget", "20MB", "--batch-size", "1", "--seq-len", "2048"]
    assert run("estimate", "--model", "mini", *budget, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    device = {each["name"]: each["bytes"] for each in found["memory"]["device"]}
    assert device["activations"] == 20_000_000
