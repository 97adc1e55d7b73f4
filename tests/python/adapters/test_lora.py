import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shoestring
from lora_models import llama, logits, randomise
from shoestring.lora import LoraLinear
from shoestring.nn import QuantizedLinear


@pytest.mark.parametrize("options", [{}, {"init": "gaussian"}, {"rslora": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_starts_as_peft_does(options: dict, dtype: torch.dtype) -> None:
    """The same seed gives the same adapters as PEFT on the same layers; the base model does not change."""
    peft = pytest.importorskip("peft")
    ours, theirs = llama(True, dtype), llama(True, dtype)
    before = logits(ours)
    torch.manual_seed(5)
    assert shoestring.lora.apply(ours, rank=8, alpha=16, **options) is ours
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear", use_rslora=options.get("rslora", False),
        init_lora_weights=options.get("init", True),
    )  # fmt: skip
    theirs = peft.get_peft_model(theirs, config)
    mine = {k: v for k, v in ours.named_parameters() if v.requires_grad}
    peers = {
        k.removeprefix("base_model.model.").removesuffix(".weight"): v
        for k, v in theirs.named_parameters()
        if v.requires_grad
    }
    assert mine.keys() == peers.keys() and len(mine) == 28
    for name, value in mine.items():
        assert value.dtype == torch.float32 and torch.equal(value, peers[name]), name
    if dtype == torch.float32:
        torch.testing.assert_close(logits(ours), before)  # lora_B is zero, so the logits do not change
        torch.manual_seed(1)
        randomise(ours)
        torch.manual_seed(1)
        randomise(theirs)
        assert (logits(ours) - logits(theirs)).abs().max() <= 1e-6
        assert (logits(ours) - before).abs().max() > 1e-2


@pytest.mark.parametrize("rslora", [False, True], ids=["lora", "rslora"])
def test_files_go_to_peft_and_back(tmp_path: Path, rslora: bool) -> None:
    peft = pytest.importorskip("peft")
    ours = randomise(shoestring.lora.apply(llama(), rank=4, alpha=12, rslora=rslora))
    expected = logits(ours)
    shoestring.lora.save_adapter(ours, tmp_path / "ours")
    assert sorted(os.listdir(tmp_path / "ours")) == ["adapter_config.json", "adapter_model.safetensors"]
    theirs = peft.PeftModel.from_pretrained(llama(), str(tmp_path / "ours")).eval()
    assert (logits(theirs) - expected).abs().max() <= 1e-6
    theirs.save_pretrained(str(tmp_path / "theirs"))
    for adapter in ("ours", "theirs"):
        bare = shoestring.lora.load_adapter(llama(), tmp_path / adapter)
        assert (logits(bare) - expected).abs().max() <= 1e-6
        other = shoestring.lora.apply(llama(), rank=4, alpha=1)
        own = next(p for p in other.parameters() if p.requires_grad)
        assert (
            # load_adapter keeps the parameter objects, so an optimizer that holds the parameters stays valid.
            logits(shoestring.lora.load_adapter(other, tmp_path / adapter)) - expected
        ).abs().max() <= 1e-6
        assert own is next(p for p in other.parameters() if p.requires_grad)


@pytest.mark.parametrize("quantize", ["nf4", "int4", "int8"])
def test_an_adapter_of_peft_over_a_quantised_base(tmp_path: Path, quantize: str) -> None:
    """An adapter of PEFT gives the same logits over quantised weights as over their dequantised values."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True)
    base = llama()
    shoestring.lora.apply(base, rank=1, quantize=quantize)
    # lora_B is zero, so merging replaces each quantised weight by its dequantised values.
    shoestring.lora.merge(base, reversible=False)
    theirs = randomise(peft.get_peft_model(base, config)).eval()
    theirs.save_pretrained(str(tmp_path))
    ours = shoestring.lora.apply(llama(), rank=4, quantize=quantize, dora=True)
    assert (logits(shoestring.lora.load_adapter(ours, tmp_path)) - logits(theirs)).abs().max() <= 2e-6


def test_ranks_and_alphas_by_pattern(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "layers.1.mlp.up_proj"], rank_pattern={"up_proj": 2},
        alpha_pattern={"layers.0.self_attn.q_proj": 5},
    )  # fmt: skip
    theirs = randomise(peft.get_peft_model(llama(), config)).eval()
    theirs.save_pretrained(str(tmp_path / "theirs"))
    ours = shoestring.lora.load_adapter(llama(), tmp_path / "theirs")
    assert (logits(ours) - logits(theirs)).abs().max() <= 1e-6
    shoestring.lora.save_adapter(ours, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(llama(), str(tmp_path / "ours")).eval()
    assert (logits(again) - logits(theirs)).abs().max() <= 1e-6


def test_minimal_old_file(tmp_path: Path) -> None:
    ours = randomise(shoestring.lora.apply(llama(), rank=4, alpha=8, target_modules=["v_proj"]))
    shoestring.lora.save_adapter(ours, tmp_path)
    # The configuration does not contain lora_alpha; PEFT's default is 8.
    minimal = {"peft_type": "LORA", "r": 4, "target_modules": ["v_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(minimal))
    weights = tmp_path / "adapter_model.safetensors"
    # save_file without metadata removes the digest of the configuration from the weights file
    save_file(load_file(weights), weights)
    assert torch.equal(logits(shoestring.lora.load_adapter(llama(), tmp_path)), logits(ours))


@pytest.mark.parametrize("quantize", [None, "nf4", "int4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merge_is_exact_and_unmerge_restores_every_byte(quantize: str | None, dtype: torch.dtype) -> None:
    model = randomise(shoestring.lora.apply(llama(dtype=dtype), rank=4, quantize=quantize))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    expected = logits(model)
    layer = model.model.layers[0].mlp.up_proj
    for _ in range(3):
        weight = layer.weight.dequantize(torch.float32) if quantize else layer.weight
        A, B = layer.lora_A["default"], layer.lora_B["default"]
        exact = weight.double() + layer.adapters["default"].scaling * B.double() @ A.double()
        shoestring.lora.merge(model)
        assert type(layer) is nn.Linear and layer.weight.dtype == dtype
        assert not any("lora" in key or "absmax" in key for key in model.state_dict())
        # The merged weight is rounded once, by at most half a unit in the last place. The fp32 sum before the
        # rounding has a small error too.
        unit = torch.finfo(dtype).eps / 2 + 4 * torch.finfo(torch.float32).eps
        assert ((layer.weight.double() - exact).abs() <= unit * exact.abs() + 1e-6 * exact.abs().max()).all()
        if dtype == torch.float32:
            torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
        shoestring.lora.unmerge(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert torch.equal(logits(model), expected)
    shoestring.lora.merge(model, reversible=False)
    with pytest.raises(ValueError, match="lora.unmerge: model: expected a model that was merged"):
        shoestring.lora.unmerge(model)


def test_qlora_trains_and_resumes() -> None:
    model = shoestring.lora.apply(llama(tied=True), rank=4, quantize="nf4", double_quant=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight and type(model.lm_head) is nn.Linear
    ids = torch.randint(97, (4, 16))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    twin = shoestring.lora.apply(llama(tied=True), rank=4, quantize="nf4", double_quant=True)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(logits(twin), logits(model))


@pytest.mark.parametrize("quantize", [None, "nf4", "int8"])
def test_compiles_whole(quantize: str | None) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8, bias=False))
    randomise(shoestring.lora.apply(model, rank=4, quantize=quantize, target_modules=["0", "2"]))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    trained = [p for p in model.parameters() if p.requires_grad]
    for tokens in (3, 5):
        x = torch.randn(tokens, 64)
        for a, b in zip(
            torch.autograd.grad(compiled(x).sum(), trained),
            torch.autograd.grad(model(x).sum(), trained),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


def test_dropout() -> None:
    """In training, dropout zeroes elements of lora_A's input, by a seed from PyTorch's random generator.

    In evaluation, there is no dropout.
    """
    torch.manual_seed(2)
    layer = nn.Sequential(nn.Linear(16, 12))
    x = torch.randn(5, 16)
    randomise(shoestring.lora.apply(layer, rank=4, alpha=8, target_modules=["0"], dropout=0.4))
    linear = layer[0]
    torch.manual_seed(9)
    y = layer(x)
    torch.manual_seed(9)
    dropped = shoestring.seeded_dropout(x, 0.4)
    low = dropped @ linear.lora_A["default"].t() @ linear.lora_B["default"].t()
    torch.testing.assert_close(y, x @ linear.weight.t() + linear.bias + 2 * low)
    whole = x @ linear.lora_A["default"].t() @ linear.lora_B["default"].t()
    torch.testing.assert_close(layer.eval()(x), x @ linear.weight.t() + linear.bias + 2 * whole)


def test_targets() -> None:
    def chosen(target_modules: object, model: nn.Module | None = None) -> list[str]:
        model = shoestring.lora.apply(model or llama(), rank=2, target_modules=target_modules)
        return [n for n, m in model.named_modules() if isinstance(m, LoraLinear)]

    assert chosen(["q_proj", "1.mlp.up_proj"]) == [
        "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj",
    ]  # fmt: skip
    assert chosen(r".*\.0\..*[kv]_proj") == [
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.v_proj",
    ]
    assert chosen(["lm_head"]) == ["lm_head"]
    assert chosen("all-linear", nn.Sequential(nn.Linear(4, 4), nn.ReLU(), QuantizedLinear(64, 2))) == [
        "0",
        "2",
    ]
    # As in QLoRA, all linear layers except the head are quantised, whether they have an adapter or not.
    model = shoestring.lora.apply(llama(), rank=2, target_modules=["q_proj"], quantize="nf4")
    assert type(model.model.layers[0].mlp.up_proj) is QuantizedLinear and type(model.lm_head) is nn.Linear
    # apply changes the layer in place, so that hooks and other references to the layer keep working.
    model = nn.Sequential(nn.Linear(4, 4))
    layer, seen = model[0], []
    layer.register_forward_hook(lambda *_: seen.append(1))
    shoestring.lora.apply(model, rank=2, target_modules=["0"])
    model(torch.randn(2, 4))
    assert model[0] is layer and seen == [1]


def test_errors(tmp_path: Path) -> None:
    apply, load = shoestring.lora.apply, shoestring.lora.load_adapter
    for options, message in [
        ({"rank": 0}, "rank: expected an integer of at least 1, received 0"),
        ({"alpha": float("nan")}, "alpha: expected a finite number"),
        ({"quantize": "int3"}, "quantize: expected None, 'nf4', 'fp4', 'int4' or 'int8', received 'int3'"),
        (
            {"quantize": "int4", "double_quant": True},
            "double_quant: expected False with quantize 'int4', whose scales are bf16",
        ),
        (
            {"quantize": "int8", "block_size": 64},
            "block_size and double_quant: expected None and False with quantize 'int8'",
        ),
        (
            {"quantize": "int8", "double_quant": True},
            "block_size and double_quant: expected None and False with quantize 'int8'",
        ),
        ({"quantize": "nf4", "block_size": 48}, "block_size: expected one of .* received 48"),
        ({"init": "lora"}, "init: expected 'default', .* or 'pissa_niter_N', received 'lora'"),
        ({"dropout": 1.0}, r"dropout: expected a probability in \[0, 1\), received 1.0"),
        (
            {"target_modules": ["qkv"]},
            "received 'qkv', which matches nothing; this model has down_proj, embed_tokens, gate",
        ),
        ({"target_modules": ["mlp"]}, "expected linear layers .* received model.layers.0.mlp, a LlamaMLP"),
    ]:
        with pytest.raises(ValueError, match=message):
            apply(llama(), **options)
    with pytest.raises(
        ValueError, match="quantize: expected fp32, bf16 or fp16 weights, received torch.float64 in 0"
    ):
        apply(nn.Sequential(nn.Linear(64, 4)).double(), quantize="nf4")
    model = apply(llama(), rank=2, target_modules=["q_proj"])
    with pytest.raises(
        ValueError, match="adapter_name: expected a new name, but the model has an adapter 'default'"
    ):
        apply(model)
    for function in (shoestring.lora.merge, lambda m: shoestring.lora.save_adapter(m, tmp_path / "no")):
        with pytest.raises(ValueError, match="expected a model with adapters, received one without"):
            function(llama())
    assert not (tmp_path / "no").exists()

    shoestring.lora.save_adapter(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    weights = (tmp_path / "adapter_model.safetensors").read_bytes()
    with pytest.raises(
        ValueError, match="expected a layer of the model that can have the adapter, found none of that name"
    ):
        load(nn.Sequential(nn.Linear(4, 4)), tmp_path)
    small = llama()
    small.model.layers[1].self_attn.q_proj = nn.Linear(64, 32)
    with pytest.raises(ValueError, match=r"expected lora_A \(2, 64\), lora_B \(32, 2\), received"):
        load(small, tmp_path)
    # A failed load leaves the model without adapters.
    assert not any(isinstance(m, LoraLinear) for m in small.modules())
    with pytest.raises(ValueError, match="expected values for model.layers.0.self_attn.v_proj"):
        load(apply(llama(), target_modules=["q_proj", "v_proj"]), tmp_path)
    for change, message in [
        (
            {"use_qalora": True},
            "use_qalora: expected null or false, since nothing else is supported here, received true",
        ),
        ({"bias": "some"}, "bias: expected 'none' or 'all' or 'lora_only'"),
        ({"peft_type": "BOFT"}, 'peft_type: expected LORA, .*, received "BOFT"'),
    ]:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=message):
            load(llama(), tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="adapter_config.json: not valid JSON"):
        load(llama(), tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes(weights[:-5])
    with pytest.raises(ValueError, match="expected a safetensors file, received a damaged one"):
        load(llama(), tmp_path)
    with pytest.raises(FileNotFoundError):
        load(llama(), tmp_path / "nowhere")
