"""Test load_quantized: the result equals a loaded model that is then quantised, and memory use is small.

The models have tied or separate embeddings, several shards, or damaged files.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import shoestring
from shoestring.integrations.transformers.load import load_dense

TOKENS = torch.arange(20)[None] % 90


def write_model(folder: Path, **options: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config = LlamaConfig(**{"vocab_size": 90, **shape, **options})
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="150KB")
    return folder


def dense(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def quantize_all(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """Quantise all linear layers of a loaded model except its head, as ``load_quantized`` does."""
    head = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        if type(layer) is torch.nn.Linear and layer is not head:
            parent, _, child = name.rpartition(".")
            setattr(
                model.get_submodule(parent),
                child,
                shoestring.nn.QuantizedLinear.from_linear(layer, **options),
            )
    return model


def states(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**model.state_dict(), **dict(model.named_buffers())}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {"quant_type": "nf4", "double_quant": True},
        {"quant_type": "fp4", "block_size": 128},
        {"quant_type": "int4"},
        {"quant_type": "int8"},
    ],
)
def test_it_is_the_loaded_model_quantised(
    tmp_path: Path, tied: bool, dtype: torch.dtype, options: dict
) -> None:
    folder = write_model(tmp_path, tie_word_embeddings=tied, attention_bias=True)
    model = shoestring.load_quantized(folder, dtype=dtype, **options)
    expected = quantize_all(dense(folder, dtype), **options)
    assert not model.training and model.dtype == dtype
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert type(model.lm_head) is torch.nn.Linear
    found, wanted = states(model), states(expected)
    assert found.keys() == wanted.keys() and any("inv_freq" in name for name in found)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)


def test_other_architectures_get_their_buffers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, OPTConfig

    configs = [
        Gemma3TextConfig(
            vocab_size=90, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=32
        ),
        # GPT-2 uses Conv1D layers, which stay dense.
        GPT2Config(vocab_size=90, n_embd=64, n_layer=2, n_head=2),
        OPTConfig(vocab_size=90, hidden_size=64, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2),
    ]
    for config in configs:
        folder = tmp_path / config.model_type
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        expected = quantize_all(dense(folder, torch.float32), quant_type="int8")
        if config.model_type == "gpt2":
            model = load_dense(folder, dtype=torch.float32, device="cpu")
        else:
            model = shoestring.load_quantized(folder, quant_type="int8", dtype=torch.float32)
        with torch.no_grad():
            assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits), config.model_type


def test_a_model_without_its_head_and_old_buffers(tmp_path: Path) -> None:
    folder = write_model(tmp_path, tie_word_embeddings=True)
    expected = shoestring.load_quantized(folder)
    for file in folder.glob("*.safetensors"):
        renamed = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
        save_file({**renamed, f"{file.stem}.rotary_emb.inv_freq": torch.ones(3)}, file)
    assert torch.equal(shoestring.load_quantized(folder)(TOKENS).logits, expected(TOKENS).logits)


def test_layers_that_stay_dense(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    model = shoestring.load_quantized(folder, skip_modules=["down_proj", "model.layers.1.self_attn.q_proj"])
    left = {name for name, m in model.named_modules() if type(m) is torch.nn.Linear}
    assert left == {
        "lm_head",
        "model.layers.1.self_attn.q_proj",
        *(f"model.layers.{i}.mlp.down_proj" for i in (0, 1)),
    }
    with pytest.raises(
        ValueError, match="skip_modules: expected names of linear layers or experts, received 'nothing'"
    ):
        shoestring.load_quantized(folder, skip_modules=["nothing"])


def test_it_trains(tmp_path: Path) -> None:
    model = shoestring.load_quantized(write_model(tmp_path), double_quant=True)
    shoestring.lora.apply(model.train(), rank=4)
    optimizer = shoestring.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def change(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for file in folder.glob("*.safetensors"):
            tensors = load_file(file)
            if "model.norm.weight" in tensors:
                edit(tensors)
                save_file(tensors, file)

    return damage


def configure(**fields: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return damage


@pytest.mark.parametrize(
    ("damage", "options", "message"),
    [
        (lambda f: (f / "config.json").unlink(), {}, "no config.json there"),
        (configure(model_type="unheard"), {}, "config.json does not describe a causal language model"),
        (
            change(lambda t: t.pop("model.norm.weight")),
            {},
            r"1 weight\(s\) .* missing, the first is model.norm.weight",
        ),
        (
            change(lambda t: t.update(more=torch.ones(2))),
            {},
            r"1 tensor\(s\) .* not in the architecture, .* first is more",
        ),
        (
            change(lambda t: t.update({"model.norm.weight": torch.ones(3)})),
            {},
            r"\[3\] in the weights, .* \[128\]",
        ),
        (configure(vocab_size=91), {}, r"\[90, 128\] in the weights, but config.json asks for \[91, 128\]"),
        (
            configure(quantization_config={"quant_method": "gptq"}),
            {},
            "expected quant_method 'bitsandbytes', received 'gptq'",
        ),
        (
            configure(),
            {"quant_type": "nf5"},
            "quant_type: expected None, 'nf4', 'fp4', 'int4' or 'int8', received 'nf5'",
        ),
        (
            configure(),
            {"quant_type": "int4", "double_quant": True},
            "double_quant: expected False with quant_type 'int4'",
        ),
        (
            configure(),
            {"quant_type": "int8", "double_quant": True},
            "expected None and False with quant_type 'int8'",
        ),
        (configure(), {"block_size": 65}, "block_size: expected one of"),
        (configure(), {"dtype": torch.float64}, "dtype: expected fp32, bf16 or fp16, received torch.float64"),
    ],
    ids=lambda value: "",
)
def test_what_does_not_fit(
    tmp_path: Path, damage: Callable[[Path], None], options: dict, message: str
) -> None:
    folder = write_model(tmp_path)
    damage(folder)
    with pytest.raises(ValueError, match=message) as error:
        shoestring.load_quantized(folder, **options)
    assert "\n" not in str(error.value)


MEASURE = """
import json, sys
import shoestring
from shoestring.training import memory
memory.import_models()
before = memory.resident_bytes()
model = shoestring.load_quantized(sys.argv[1])
print(json.dumps([memory.peak_bytes() - before, memory.weight_bytes(model)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_memory_is_the_quantised_model_and_one_weight(tmp_path: Path) -> None:
    # The 16-bit weights have 64 MB, and the largest of them 4 MB. If the files stayed mapped, or the whole
    # 16-bit model was in memory, memory use would exceed the limit.
    folder = write_model(
        tmp_path, hidden_size=512, intermediate_size=4096, num_hidden_layers=4, vocab_size=512
    )
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    command = [sys.executable, "-c", MEASURE, str(folder)]
    outputs = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(2)]
    # Modules that are compiled during a load take some megabytes more.
    used, weights = min(json.loads(output.stdout.splitlines()[-1]) for output in outputs)
    assert stored > 50e6 and weights < 0.3 * stored
    # 16 MB of this memory limit are for imported Python modules, the interpreter and rounded-up allocations.
    assert used < weights + 4 * 2**20 + 16e6


def test_a_folder_with_an_adapter_is_refused(tmp_path: Path) -> None:
    """The base alone would be another model, and a merged model with its adapter would have the adapter twice."""
    from shoestring.core.errors import InputError
    from shoestring.training.run.models import check_model_directory, load_model

    model = dense(write_model(tmp_path), torch.float32)
    shoestring.lora.save_adapter(shoestring.lora.apply(model, rank=2), tmp_path)
    message = "expected a model, received an adapter, too .adapter_config.json"
    with pytest.raises(ValueError, match=message):
        shoestring.load_quantized(tmp_path)
    for quantize in (None, "nf4"):
        with pytest.raises(InputError, match=message):
            load_model(check_model_directory(tmp_path), torch.float32, quantize)


def test_a_model_of_conv1d_is_refused(tmp_path: Path) -> None:
    """Its layers stayed dense without a word."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=90, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="received GPT2LMHeadModel, of which transformer.h.0.attn.c_attn is a Conv1D"
    ):
        shoestring.load_quantized(tmp_path)
