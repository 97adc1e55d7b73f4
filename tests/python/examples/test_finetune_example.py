"""The C++ example finetune computes what transformers computes, and PEFT loads the adapter that it saves."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import shoestring
from cli_helpers import TINY, TUNE, losses, succeed, text
from cpp_examples import ENVIRONMENT, REPOSITORY, build_example, learnable_tokens, token_file
from shoestring.nn import QuantizedLinear

VOCAB, TOKENS, SEQ_LEN = 512, 6_000, 32
SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
# Values that differ from the defaults of transformers, so the example must read them from config.json.
# head_dim is not hidden / heads, and theta and eps change every logit.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"tie_word_embeddings": False, "rms_norm_eps": 1e-3},
    "tied": {
        "tie_word_embeddings": True,
        "head_dim": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "parted": {"tie_word_embeddings": True},
}
TRAIN = [
    "--steps",
    "30",
    "--lr",
    "1e-2",
    "--warmup",
    "2",
    "--batch-size",
    "8",
    "--rank",
    "8",
    "--precision",
    "fp32",
]


@pytest.fixture(scope="module")
def program() -> Path:
    return build_example("finetune")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return token_file(tmp_path_factory.mktemp("data") / "tokens.bin", learnable_tokens(TOKENS, VOCAB))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save a Llama in one file, and others in shards: "tied" has one weight for embedding and head.

    The files of "parted" contain another head, although its configuration says that it is tied.
    """
    folders = {}
    for kind, config in KINDS.items():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, **config))
        with torch.no_grad():
            # Larger matrices make logits clearly different from each other, and norm weights become different
            # from 1.
            for p in model.parameters():
                p.mul_(3) if p.dim() == 2 else p.add_(torch.randn_like(p) * 0.1)
            if kind == "parted":
                model.lm_head.weight = nn.Parameter(model.lm_head.weight.flip(0))
        folders[kind] = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folders[kind], max_shard_size="1GB" if kind == "plain" else "200KB")
    assert len(list(folders["tied"].glob("*.safetensors"))) > 2
    return folders


def finetune(
    program: Path, model: Path, data: Path, out: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    command = [program, "--model", model, "--data", data, "--out", out, "--seq-len", str(SEQ_LEN), "--threads", "2",
               "--json", out.with_suffix(".json"), "--logits", out.with_suffix(".safetensors"), *options]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | ENVIRONMENT)


def results(done: subprocess.CompletedProcess[str], out: Path) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Return a run's metrics from its JSON file, the first held-out sequence's logits, and its tokens."""
    assert done.returncode == 0, done.stderr
    tensors = load_file(out.with_suffix(".safetensors"))
    return json.loads(out.with_suffix(".json").read_text()), tensors["logits"], tensors["tokens"]


def held_out(val_fraction: float = 0.02) -> Tensor:
    tokens = learnable_tokens(TOKENS, VOCAB)
    blocks = (TOKENS - 1) // SEQ_LEN
    first = blocks - int(blocks * val_fraction)
    rows = [tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(first, blocks)]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def loss(model: nn.Module, rows: Tensor | None = None) -> float:
    rows = held_out() if rows is None else rows
    with torch.no_grad():
        logits = model(input_ids=rows[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def dequantised(folder: Path, **form: Any) -> LlamaForCausalLM:
    """Return the transformers model with 4-bit quantised linear layers, dequantised to fp32 again."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = shoestring.quantize_4bit(layer.weight, **form).dequantize()
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_computes_what_transformers_does(
    program: Path, models: dict[str, Path], data: Path, kind: str, tmp_path: Path
) -> None:
    out = tmp_path / "none"
    done = finetune(program, models[kind], data, out, "--steps", "0", "--quantize", "none")
    figures, logits, tokens = results(done, out)
    reference = LlamaForCausalLM.from_pretrained(models[kind], dtype=torch.float32)
    assert figures["validation_loss"] == pytest.approx(loss(reference), abs=1e-5)
    assert torch.equal(tokens, held_out()[:1, :-1])
    with torch.no_grad():
        expected = reference(input_ids=tokens).logits
    assert expected.std() > 0.3
    assert (logits - expected).abs().max() < 1e-5
    # With 0 steps, the example trains nothing and saves no adapter.
    assert not out.exists()


def test_validates_on_the_first_batches_held_out(
    program: Path, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    reference = LlamaForCausalLM.from_pretrained(models["plain"], dtype=torch.float32)
    options = ["--steps", "0", "--quantize", "none", "--val-fraction", "0.3", "--batch-size", "4"]
    for number, batches in enumerate((["--eval-batches", "3"], [])):
        out = tmp_path / str(number)
        figures, _, _ = results(finetune(program, models["plain"], data, out, *options, *batches), out)
        rows = held_out(0.3)[: 4 * (3 if batches else 8)]
        assert figures["validation_loss"] == pytest.approx(loss(reference, rows), abs=1e-5)


@pytest.mark.parametrize(("kind", "targets"), [("plain", ""), ("tied", "q_proj,v_proj,down_proj")])
def test_peft_loads_the_adapter(
    program: Path, models: dict[str, Path], data: Path, kind: str, targets: str, tmp_path: Path
) -> None:
    from peft import PeftModel

    out = tmp_path / "adapter"
    options = [*TRAIN, "--target-modules", targets, "--lr-ratio", "4"] if targets else TRAIN
    figures, logits, tokens = results(finetune(program, models[kind], data, out, *options), out)
    assert len(figures["losses"]) == 30
    assert figures["validation_loss"] < 0.95 * figures["validation_loss_before"]
    base = dequantised(models[kind], double_quant=True)
    assert figures["validation_loss_before"] == pytest.approx(loss(base), abs=1e-5)
    model = PeftModel.from_pretrained(base, out)
    assert figures["validation_loss"] == pytest.approx(loss(model), abs=1e-5)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    assert (logits - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max().item())
    adapted = {name.split(".")[-3] for name in load_file(out / "adapter_model.safetensors")}
    assert adapted == set((targets or "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj").split(","))


def test_recomputed_layers_train_the_same(
    program: Path, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    runs = []
    for name, options in (
        ("kept", []),
        ("recomputed", ["--activations", "recompute", "--keep-memory"]),
        ("offloaded", ["--activations", "offload", "--log-every", "7"]),
    ):
        out = tmp_path / name
        results(finetune(program, models["plain"], data, out, *TRAIN, *options), out)
        runs.append(
            (
                json.loads(out.with_suffix(".json").read_text())["losses"],
                load_file(out / "adapter_model.safetensors"),
            )
        )
    for curve, adapter in runs[1:]:
        assert runs[0][0] == curve
        assert all(torch.equal(tensor, adapter[name]) for name, tensor in runs[0][1].items())


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.sample(1)
def test_weights_in_a_file_train_the_same(
    program: Path, data: Path, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, adapters and logits have the bits of a run whose weights are in memory.

    On a CPU with AMX, the loss of a head in memory has tiles of its own, which round in another order.
    """
    if torch.ops.shoestring._cpu_capability() == "amx":
        monkeypatch.setenv("SHOESTRING_CPU", "avx512")
    shape = {**SHAPE, "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=tied)).save_pretrained(tmp_path / "model")
    place = ["--offload-weights", f"nvme:{tmp_path}"]
    for options in ([], ["--quantize", "none", "--activations", "recompute"], ["--memory-budget", "3MB"]):
        runs = []
        for name, more in (("here", []), ("away", place), ("kept", [*place, "--keep", "200KB"])):
            out = tmp_path / name
            train = [
                "--steps",
                "3",
                "--batch-size",
                "4",
                "--rank",
                "4",
                "--precision",
                "bf16",
                *options,
                *more,
            ]
            figures, logits, _ = results(finetune(program, tmp_path / "model", data, out, *train), out)
            runs.append((figures, [logits, *load_file(out / "adapter_model.safetensors").values()]))
        for figures, tensors in runs[1:]:
            assert figures["losses"] == runs[0][0]["losses"]
            assert all(map(torch.equal, tensors, runs[0][1]))
            assert figures["weights_fetched_bytes"] > figures["weights_away_bytes"] > 0
        assert runs[2][0]["weights_away_bytes"] <= runs[1][0]["weights_away_bytes"]


def test_a_full_disk_at_the_report(
    program: Path, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    (tmp_path / "out.json").symlink_to("/dev/full")
    done = finetune(program, models["plain"], data, tmp_path / "out", "--steps", "0")
    assert done.returncode == 2
    assert f"error: --json {tmp_path}/out.json: cannot write: No space left on device" in done.stderr


def test_bf16_and_other_weights(program: Path, models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    expected = loss(LlamaForCausalLM.from_pretrained(models["plain"], dtype=torch.float32))
    for options in (
        ["--quantize", "none"],
        ["--quantize", "int8"],
        ["--quantize", "int4"],
        ["--quantize", "fp4", "--block-size", "32", "--no-double-quant"],
    ):
        out = tmp_path / options[1]
        done = finetune(program, models["plain"], data, out, "--steps", "3", "--precision", "bf16", *options)
        figures, _, _ = results(done, out)
        assert figures["validation_loss_before"] == pytest.approx(
            expected, rel=0.05 if "fp4" in options else 0.01
        )
        assert (out / "adapter_config.json").exists()


def test_a_checkpoint_of_bitsandbytes(
    program: Path, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """If the model's files hold quantised weights, the example uses them as they are, despite --quantize."""
    folder = tmp_path / "quantised"
    folder.mkdir()
    model = LlamaForCausalLM.from_pretrained(models["plain"], dtype=torch.float32)
    for layer in list(model.model.modules()):
        for name, child in layer.named_children():
            if isinstance(child, nn.Linear):
                setattr(layer, name, QuantizedLinear.from_linear(child, "nf4", 128, double_quant=True))
    config = json.loads((models["plain"] / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in model.state_dict().items()}, folder / "model.safetensors")
    out = tmp_path / "out"
    done = finetune(program, folder, data, out, "--steps", "0", "--quantize", "int8")
    figures, _, _ = results(done, out)
    assert figures["validation_loss"] == pytest.approx(
        loss(dequantised(models["plain"], block_size=128, double_quant=True)), abs=1e-5
    )


def test_the_dense_model_never_exists(program: Path, data: Path, tmp_path: Path) -> None:
    sys.path.insert(0, str(REPOSITORY))
    from benchmarks.random_llama import write_random_llama

    write_random_llama(tmp_path / "model", hidden=512, intermediate=1536, layers=8, heads=8, kv_heads=8, vocab_size=VOCAB,
                       dtype=torch.float32)  # fmt: skip
    dense = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    out = tmp_path / "out"
    figures, _, _ = results(finetune(program, tmp_path / "model", data, out, "--steps", "0"), out)
    # Weights in 4 bits with nested scales take 0.129 of their fp32 size. The largest tensor takes 0.03 of the
    # fp32 size while it is loaded. The pages of code that has run take about 13 MB.
    assert figures["loaded_bytes"] - figures["libtorch_bytes"] < 0.4 * dense
    assert figures["loaded_bytes"] <= figures["peak_bytes"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a tiny model for one step; return a folder with ``text.txt`` and ``base/model``."""
    folder = tmp_path_factory.mktemp("base")
    # With so little text, both programs hold out one block of tokens.
    (folder / "text.txt").write_text(text(100))
    succeed("train", "--data", folder / "text.txt", "--out", folder / "base", *TINY, "--steps", "1")
    return folder


def losses_of_both(
    program: Path, base: Path, folder: Path, options: list[str]
) -> tuple[list[float], list[float]]:
    """Train with the program and with `shoestring finetune`; return the losses of both."""
    shared = [*TUNE, "--steps", "8", "--lr", "1e-2", "--seed", "3", *options]
    model, run = base / "base" / "model", folder / "python"
    succeed("finetune", "--model", model, "--data", base / "text.txt", "--out", run, *shared)
    own = ["--no-double-quant", "--json", folder / "cpp.json", "--out", folder / "cpp"]
    command = [program, "--model", model, "--data", run / "tokens.bin", *shared, *own]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    figures = json.loads((folder / "cpp.json").read_text())
    assert figures["data_seconds"] >= 0
    return figures["losses"], [row[0] for row in losses(run)]


@pytest.mark.parametrize(
    "options",
    [
        ["--precision", "bf16"],
        ["--precision", "fp16"],
        # Without clipping, a step of SGD is proportional to the gradients, so it tests that they are unscaled.
        ["--precision", "fp16", "--optimizer", "sgd", "--clip", "0", "--lr", "0.5"],
    ],
)
def test_trains_in_16_bits_what_the_command_line_does(
    program: Path, base: Path, tmp_path: Path, options: list[str]
) -> None:
    found, expected = losses_of_both(program, base, tmp_path, ["--quantize", "none", *options])
    # Both programs round in other places, and each step amplifies the differences.
    assert found[:3] == pytest.approx(expected[:3], rel=2e-4)
    assert found == pytest.approx(expected, rel=0.02)
    assert max(expected[:3]) - min(expected[:3]) > 0.05


@pytest.mark.parametrize(
    "options",
    [
        ["--quantize", "none", "--accumulate", "2"],
        ["--quantize", "none", "--schedule", "wsd", "--optimizer-state", "fp32"],
        ["--quantize", "none", "--schedule", "linear", "--weight-decay", "0.1"],
        ["--quantize", "nf4", "--schedule", "constant", "--target-modules", "q_proj,down_proj"],
        ["--quantize", "none", "--val-fraction", "0"],
    ],
)
def test_trains_what_the_command_line_does(
    program: Path, base: Path, tmp_path: Path, options: list[str]
) -> None:
    """The program and `shoestring finetune` compute equal losses, with the same options and data."""
    found, expected = losses_of_both(program, base, tmp_path, options)
    assert found == pytest.approx(expected, rel=2e-4)
    assert (
        max(expected) - min(expected) > 0.05
    )  # the weights have moved, so the losses test the steps as well
    name = "adapter_model.safetensors"
    adapter, reference = (load_file(tmp_path / path / name) for path in ("cpp", "python/adapter"))
    assert adapter.keys() == reference.keys()
    for key, tensor in reference.items():
        assert (adapter[key] - tensor).norm() <= 2e-2 * tensor.norm(), key


def changed_config(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def without(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors")

    return change


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json: expected a file"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json: expected a JSON object"),
        (lambda folder: (folder / "model.safetensors").unlink(), "expected model.safetensors or model.safetensors.index.json"),
        (changed_config(model_type="gpt2"), "model_type: expected \"llama\""),
        (changed_config(rope_parameters={"rope_type": "llama3", "factor": 8.0}), "rope_type: expected \"default\""),
        (changed_config(rope_scaling={"type": "linear", "factor": 2.0}), "type: expected \"default\""),
        (changed_config(rope_parameters={"rope_theta": -1}), "rope_theta: expected a number above 0, received -1"),
        (changed_config(attention_bias=True), "attention_bias: expected false"),
        (changed_config(hidden_act="gelu"), "hidden_act: expected \"silu\""),
        (changed_config(num_hidden_layers="3"), "num_hidden_layers: expected a whole number"),
        (changed_config(num_key_value_heads=3), "num_key_value_heads: expected a divisor"),
        (changed_config(quantization_config={"quant_method": "gptq"}), "quantization_config: expected none, or"),
        (changed_config(num_hidden_layers=4), "\"model.layers.3.self_attn.q_proj.weight\": expected a tensor of shape [64, 64], received none; 8 more"),
        (changed_config(num_hidden_layers=2), "\"model.layers.2."),
        (changed_config(intermediate_size=64), "expected shape [64, 64] of fp32, bf16, fp16 or fp64, received [96, 64] of Float"),
        (changed_config(vocab_size=500), "expected a vocabulary of at most the model's 500, got 512"),
        (without("model.norm.weight"), "\"model.norm.weight\": expected a tensor of shape [64], received none"),
    ],
)  # fmt: skip
@pytest.mark.sample(6)
def test_bad_models(
    program: Path,
    models: dict[str, Path],
    data: Path,
    tmp_path: Path,
    change: Callable[[Path], object],
    part: str,
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((models["plain"] / name).read_bytes())
    change(folder)
    refused(finetune(program, folder, data, tmp_path / "out"), part)
    assert not (tmp_path / "out").exists()


def test_several_processes_are_refused(
    program: Path, models: dict[str, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    part = "WORLD_SIZE: expected 1, since this program trains in one process, got 2"
    refused(finetune(program, models["plain"], data, tmp_path / "out"), part)
    assert not (tmp_path / "out").exists()


def refused(done: subprocess.CompletedProcess[str], part: str) -> None:
    assert done.returncode == 2
    assert done.stderr.startswith("finetune: error: ") and done.stderr.count("\n") == 1, done.stderr
    assert part in done.stderr


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--size", "1"], "'--size' is no option"),
        (["--rank", "0"], "--rank: expected a whole number from 1 to 16384, got 0"),
        (["--quantize", "nf5"], "--quantize: expected nf4 | fp4 | int4 | int8 | none, got nf5"),
        (
            ["--keep-memory", "--step-in-backward"],
            "--keep-memory: expected no --step-in-backward, received both",
        ),
        (["--target-modules", ","], "--target-modules: expected all-linear, or names separated by commas"),
        (
            ["--init", "loftq", "--quantize", "none"],
            "--init loftq: expected quantised weights, got --quantize none",
        ),
        (["--block-size", "48"], "block_size: expected a power of two"),
        (["--val-fraction", "0", "--steps", "0"], "--steps 0: expected no --val-fraction 0, received both"),
        (["--val-fraction", "0"], "--logits: expected no --val-fraction 0, received both"),
        (
            ["--device", "cuda:0"],
            "--device: expected a device of this machine, which LibTorch finds to be cpu; got cuda:0",
        ),
        (
            ["--target-modules", "w1"],
            "target_modules: expected names of modules, received 'w1', which matches nothing; the module has ",
        ),
        (["--data", "/none"], "--data /none: cannot open"),
        (["--offload-weights", "cpu"], "--offload-weights cpu: expected nvme:DIR on the CPU"),
        (["--offload-weights", "disk"], "--offload-weights: expected none, cpu or nvme:DIR, got disk"),
        (["--offload-weights", "nvme:/none"], "/none/"),
        (["--keep", "1GB"], "--keep: expected --offload-weights, got none"),
        (["--offload-weights", "nvme:.", "--init", "pissa"], "--init pissa: expected no --offload-weights"),
        (["--out", "/proc/none/run", "--steps", "1"], "cannot make the folder"),
        (["--lr", "1e30", "--clip", "0", "--steps", "3"], "; training stopped before the weights changed"),
    ],
)
@pytest.mark.sample(4)
def test_bad_options(
    program: Path, models: dict[str, Path], data: Path, tmp_path: Path, options: list[str], part: str
) -> None:
    refused(finetune(program, models["plain"], data, tmp_path / "out", *options), part)
    assert not (tmp_path / "out").exists()


def test_needs_no_python_and_no_cuda(program: Path) -> None:
    done = subprocess.run([program, "--help"], capture_output=True, text=True, env={"PATH": os.devnull})
    assert done.returncode == 0
    assert "--quantize" in done.stdout
    linked = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    assert "libshoestring.so" in linked and "libpython" not in linked and "libtorch_cuda" not in linked
