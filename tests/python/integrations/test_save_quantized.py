"""shoestring loads the quantised checkpoints that transformers with bitsandbytes saves, and vice versa."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_load_quantized import TOKENS, dense, write_model

import shoestring

KINDS = [
    {"quant_type": "nf4"},
    {"quant_type": "nf4", "double_quant": True},
    {"quant_type": "fp4", "block_size": 128},
    {"quant_type": "int8"},
]


def assert_same(theirs: torch.nn.Module, ours: torch.nn.Module) -> None:
    # The models run without no_grad: under no_grad, bitsandbytes would multiply in bf16 on a CPU with bf16
    # units.
    torch.testing.assert_close(theirs(TOKENS).logits, ours(TOKENS).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_a_round_trip_keeps_every_bit(tmp_path: Path, options: dict[str, Any], tied: bool) -> None:
    folder = write_model(tmp_path / "dense", tie_word_embeddings=tied, attention_bias=True)
    model = shoestring.load_quantized(folder, **options, skip_modules=["k_proj"])
    shoestring.save_quantized(model, tmp_path / "saved", max_shard_bytes=100_000)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    again = shoestring.load_quantized(tmp_path / "saved")
    assert type(again.model.layers[0].self_attn.k_proj) is torch.nn.Linear
    wanted = model.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in again.state_dict().items())
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("options", KINDS[:3], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_bitsandbytes_reads_ours(tmp_path: Path, options: dict[str, Any], tied: bool) -> None:
    pytest.importorskip("bitsandbytes")
    # With 256 columns, no quantisation block spans two rows of a weight. The CPU kernel of bitsandbytes
    # 0.50.2 uses wrong scales for blocks that span two rows.
    folder = write_model(tmp_path / "dense", tie_word_embeddings=tied, intermediate_size=256)
    model = shoestring.load_quantized(folder, dtype=torch.float32, **options)
    shoestring.save_quantized(model, tmp_path / "saved", max_shard_bytes=100_000)
    theirs = dense(tmp_path / "saved", torch.float32)
    assert (
        type(theirs.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
        and type(theirs.lm_head) is torch.nn.Linear
    )
    assert_same(theirs, model)


def test_bitsandbytes_reads_our_int8(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = shoestring.load_quantized(write_model(tmp_path / "dense"), quant_type="int8", dtype=torch.float32)
    shoestring.save_quantized(model, tmp_path / "saved")
    theirs = dense(tmp_path / "saved", torch.float32)
    # Linear8bitLt of bitsandbytes also rounds its input to 8 bits, so logits differ. The test compares the
    # weights.
    for name, layer in model.named_modules():
        if isinstance(layer, shoestring.nn.QuantizedLinear):
            other = theirs.get_submodule(name)
            assert type(other).__name__ == "Linear8bitLt"
            assert torch.equal(other.weight.data, layer.weight.packed) and torch.equal(
                other.weight.SCB, layer.weight.absmax
            )
    with torch.no_grad():
        expected = model(TOKENS).logits
        assert (theirs(TOKENS).logits - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(
    "options",
    [
        {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"bnb_4bit_quant_type": "fp4"},
        {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
    ],
    ids=str,
)
def test_what_bitsandbytes_saved_loads(tmp_path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **options)
    folder = write_model(tmp_path / "dense")
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    model = shoestring.load_quantized(tmp_path / "theirs", dtype=torch.float32)
    assert isinstance(model.model.layers[1].mlp.down_proj, shoestring.nn.QuantizedLinear)
    assert_same(theirs, model)
    with pytest.raises(
        ValueError, match="its weights are nf4 or fp4 already: .* received 'int8', None and False"
    ):
        shoestring.load_quantized(tmp_path / "theirs", quant_type="int8")


def test_what_bitsandbytes_saved_in_8_bits_loads(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder = write_model(tmp_path / "dense")
    config = BitsAndBytesConfig(load_in_8bit=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    model = shoestring.load_quantized(tmp_path / "theirs", dtype=torch.float32)
    layer = model.model.layers[0].self_attn.q_proj
    assert layer.weight.quant_type == "int8"
    assert torch.equal(layer.weight.packed, theirs.model.layers[0].self_attn.q_proj.weight.data)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        assert (model(TOKENS).logits - expected).norm() < 0.02 * expected.norm()


def test_damaged_codes_are_refused(tmp_path: Path) -> None:
    model = shoestring.load_quantized(write_model(tmp_path / "dense"), double_quant=True)
    shoestring.save_quantized(model, tmp_path / "saved")
    file, key = tmp_path / "saved/model.safetensors", "model.layers.0.mlp.up_proj.weight"
    whole = load_file(file)
    state = f"{key}.quant_state.bitsandbytes__nf4"
    fields = json.loads(bytes(whole[state].tolist()))

    def text(**changed: Any) -> torch.Tensor:
        return torch.tensor(list(json.dumps({**fields, **changed}).encode()), dtype=torch.uint8)

    for part, value, message in [
        ("", whole[key][:5].clone(), "expected 12288 bytes and 384 scales, received 5 and 384"),
        (
            ".absmax",
            whole[key + ".absmax"][:5].clone(),
            "expected 12288 bytes and 384 scales, received 12288 and 5",
        ),
        (".absmax", None, "expected bitsandbytes' parts, but .*absmax' is missing"),
        (".quant_map", torch.ones(16), "expected the nf4 values"),
        (".nested_absmax", torch.ones(7), "nested_absmax and nested_quant_map: expected 2 and 256 values"),
        (state.removeprefix(key), torch.ones(7, dtype=torch.uint8), "expected bitsandbytes' JSON"),
        (state.removeprefix(key), text(blocksize=63), "received 'nf4' in blocks of 63"),
        (
            state.removeprefix(key),
            text(shape=[128, 192]),
            r"expected shape \(192, 128\), received \(128, 192\)",
        ),
    ]:
        changed = {**whole, key + part: value}
        save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file)
        with pytest.raises(ValueError, match=message):
            shoestring.load_quantized(tmp_path / "saved")


def test_models_that_no_config_describes(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "dense")
    with pytest.raises(
        ValueError, match="expected nf4, fp4 or int8 layers, received int4, which bitsandbytes does not have"
    ):
        shoestring.save_quantized(shoestring.load_quantized(folder, quant_type="int4"), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(ValueError, match="QuantizedLinear layers of one quant_type, received none"):
        shoestring.save_quantized(dense(folder, torch.float32), tmp_path / "saved")
    model = shoestring.load_quantized(folder)
    layer = model.model.layers[0].mlp
    layer.up_proj = shoestring.nn.QuantizedLinear(128, 192, bias=False, quant_type="int8")
    with pytest.raises(ValueError, match="received int8 and nf4"):
        shoestring.save_quantized(model, tmp_path / "saved")
    shoestring.lora.apply(model, rank=4, target_modules=["up_proj"])
    with pytest.raises(ValueError, match="expected linear layers without adapters"):
        shoestring.save_quantized(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_former_model_goes_and_other_files_stay(tmp_path: Path) -> None:
    model = shoestring.load_quantized(write_model(tmp_path / "dense"))
    folder = tmp_path / "saved"
    shoestring.save_quantized(model, folder, max_shard_bytes=100_000)
    assert (folder / "model.safetensors.index.json").exists()
    (folder / "tokenizer.json").write_text("mine")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("mine as well")
    shoestring.save_quantized(model, folder)
    names = {"adapter", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "tokenizer.json").read_text() == "mine"
    assert (folder / "adapter" / "adapter_config.json").read_text() == "mine as well"
    again = shoestring.load_quantized(folder).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


def test_folders_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    model = shoestring.load_quantized(write_model(tmp_path / "dense"))
    folder = tmp_path / "home"
    folder.mkdir()
    for name in ("thesis.tex", "model.safetensors"):
        (folder / name).write_text("mine")
        with pytest.raises(ValueError, match=f"directory: expected .* which holds {name} and no config.json"):
            shoestring.save_quantized(model, folder)
        assert [path.name for path in tmp_path.glob("home*")] == ["home"] and (
            folder / name
        ).read_text() == "mine"
        (folder / name).unlink()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="save_quantized: directory: expected a folder, received a file"):
        shoestring.save_quantized(model, tmp_path / "file")
    # save_quantized may write into this existing folder, because it is empty.
    shoestring.save_quantized(model, folder)


def test_files_one_by_one_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shoestring.load_quantized(write_model(tmp_path / "dense"))
    folder = tmp_path / "saved"
    shoestring.save_quantized(model, folder)
    (folder / "mine").write_text("mine")
    monkeypatch.chdir(folder)
    with pytest.raises(
        ValueError, match="holds, the current directory; .* or overwrite=True .* without a complete model"
    ):
        shoestring.save_quantized(model, ".")
    inode = (folder / "model.safetensors").stat().st_ino
    assert (folder / "mine").read_text() == "mine"
    shoestring.save_quantized(model, ".", overwrite=True)
    assert (folder / "model.safetensors").stat().st_ino != inode and (folder / "mine").read_text() == "mine"
    # After a crash while files are replaced, a folder may have no config.json.
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="no config.json"):
        shoestring.save_quantized(model, ".")
    shoestring.save_quantized(model, ".", overwrite=True)
    again = shoestring.load_quantized(folder).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())
