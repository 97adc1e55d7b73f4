"""Test target_modules of mixtures of experts, whose layers transformers stacks into parameters."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lora_models import assert_files_agree, logits, randomise
from shoestring import checkpoint, lora, register_experts
from shoestring.adapters.experts import LoraExperts

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.conversion_mapping")

EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": EXPERTS | {"mlp_only_layers": [1]},
    "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 24},  # PEFT does not know this one
    "DeepseekV3": {
        "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    },
}  # fmt: skip


@functools.cache
def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=97, num_hidden_layers=2, **(sizes | MODELS[kind])
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def build(kind: str = "Mixtral") -> nn.Module:
    model = copy.deepcopy(_model(kind))
    torch.manual_seed(5)
    return model


def ours_and_theirs(kind: str, options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 3} | options)
    return (
        lora.apply(build(kind), copy.deepcopy(config)),
        peft.get_peft_model(build(kind), copy.deepcopy(config)).eval(),
    )


def by_name_in_peft(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the trained parameters of a model with our adapters, by their names in a PEFT model."""
    found = {}
    for name, layer in model.named_modules():
        for attribute in getattr(layer, "PARAMETERS", {}):
            key, _, ending = layer.PARAMETERS[attribute].rpartition(".")
            held = getattr(layer, attribute, {})
            if "default" in held:
                found[f"base_model.model.{name}.{key}.default.{ending}"] = held["default"]
    return found


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("Mixtral", {"target_modules": "all-linear"}),
    "rslora": ("Mixtral", {"target_modules": "all-linear", "use_rslora": True}),
    "random": ("Mixtral", {"target_modules": "all-linear", "init_lora_weights": False}),
    "list": ("Mixtral", {"target_modules": ["q_proj", "experts.w1", "w3", "w2"]}),
    "pattern": ("Mixtral", {"target_modules": r".*\.(q_proj|experts\.w[13])"}),
    "router": ("Mixtral", {"target_modules": ["gate"], "rank_pattern": {"gate.weight": 3}}),
    "Qwen3Moe": ("Qwen3Moe", {"target_modules": "all-linear"}),
    "down_proj": ("Qwen3Moe", {"target_modules": ["k_proj", "down_proj"]}),
    "Qwen2Moe": ("Qwen2Moe", {"target_modules": "all-linear"}),
    "DeepseekV3": ("DeepseekV3", {"target_modules": "all-linear"}),
}


@pytest.mark.parametrize("case", CASES)
def test_experts_and_router_as_in_peft(case: str, tmp_path: Path) -> None:
    ours, theirs = ours_and_theirs(*CASES[case])
    mine = by_name_in_peft(ours)
    peers = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    assert mine.keys() == peers.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, peers[name])
        value.data += 0.1 * torch.randn_like(value)
        peers[name].data.copy_(value)
    expected = logits(ours)
    assert (expected - logits(theirs)).abs().max() <= 1e-6
    assert (expected - logits(build(CASES[case][0]))).abs().max() > 1e-3
    assert_files_agree(ours, tmp_path, lambda: build(CASES[case][0]))


def test_stacked_layers_have_the_scaling_of_both(tmp_path: Path) -> None:
    model = lora.apply(build(), rank=2, alpha=6, quantize="nf4")
    experts, router = model.model.layers[0].mlp.experts, model.model.layers[0].mlp.gate
    assert isinstance(experts, LoraExperts) and isinstance(router, LoraExperts)
    assert experts.lora_A_gate_up_proj["default"].shape == (4 * 4, 32)
    assert experts.lora_A_down_proj["default"].shape == (4 * 2, 48)
    lora.save_adapter(randomise(model), tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    key = "model.layers.0.mlp.experts.gate_up_proj"
    assert (saved["r"], saved["rank_pattern"]["^" + key], saved["alpha_pattern"]["^" + key]) == (2, 4, 12)
    assert (
        key in saved["target_parameters"] and "model.layers.1.mlp.gate.weight" in saved["target_parameters"]
    )


def test_loraplus_knows_the_matrices_of_experts() -> None:
    model = lora.apply(build(), rank=2)
    groups = lora.loraplus_param_groups(model, lr=1.0, lr_ratio=4.0)
    fast = {id(p) for group in groups if group["lr"] == 4.0 for p in group["params"]}
    expected = {id(p) for name, p in model.named_parameters() if "lora_B" in name}
    assert fast == expected and len(fast) == 14


def test_errors() -> None:
    for options, message in [
        (
            {"target_modules": ["q_proj", "w1"]},
            "target_modules: expected both w1 and w3, .* received 'w1' alone",
        ),
        (
            {"target_modules": r".*layers\.0.*q_proj"},
            "a pattern that matches all modules of a name, .* not match model.layers.1.self_attn.q_proj",
        ),
        ({"target_modules": r".*\.0\.mlp\.experts\.w\d"}, "does not match model.layers.1.mlp.experts.w"),
        (
            {"target_modules": "all-linear", "dora": True},
            "no dora and lora_bias with target_param",
        ),
        ({"target_modules": ["gate"], "init": "orthogonal"}, "linear layers and embeddings for 'orthogonal'"),
    ]:
        with pytest.raises(ValueError, match=message):
            lora.apply(build(), rank=2, **options)


FORMER = {
    "Mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "Qwen3Moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}


def former_file(
    kind: str, folder: Path, layers: tuple[str, ...], rslora: bool = False
) -> dict[str, torch.Tensor]:
    """Write an adapter as PEFT did with transformers 4: LoRA of each layer of each expert."""
    from safetensors.torch import save_file

    block, names = FORMER[kind]
    hidden, features = (48, 32) if kind == "Mixtral" else (24, 32)
    shapes = dict(zip(names, ((hidden, features), (hidden, features), (features, hidden)), strict=True))
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    blocks = (0, 1) if kind == "Mixtral" else (0,)
    for i in blocks:
        for e in range(4):
            for layer in layers:
                out, features_in = shapes[layer]
                key = f"base_model.model.model.layers.{i}.{block}.experts.{e}.{layer}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(2, features_in, generator=generator)
                tensors[f"{key}.lora_B.weight"] = torch.randn(out, 2, generator=generator)
    q = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    for i in (0, 1):
        tensors[q.format(i, "A")] = torch.randn(2, 32, generator=generator)
        tensors[q.format(i, "B")] = torch.randn(32, 2, generator=generator)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", *layers], use_rslora=rslora)
    config.save_pretrained(folder)
    return tensors


@pytest.mark.parametrize("kind", FORMER)
@pytest.mark.parametrize("which", ["all", "down"])
def test_files_of_transformers_4_load(kind: str, which: str, tmp_path: Path) -> None:
    gate, up, down = FORMER[kind][1]
    layers = (gate, up, down) if which == "all" else (down,)
    tensors = former_file(kind, tmp_path, layers)
    expected = build(kind)
    with torch.no_grad():
        for key in tensors:
            if not key.endswith("lora_A.weight"):
                continue
            change = 1.5 * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
            name = (
                key.removeprefix("base_model.model.")
                .removesuffix(".lora_A.weight")
                .replace("block_sparse_moe", "mlp")
            )
            if "experts" not in name:
                expected.get_parameter(f"{name}.weight").add_(change)
                continue
            module, expert, layer = name.rsplit(".", 2)
            stack = expected.get_parameter(f"{module}.{'down_proj' if layer == down else 'gate_up_proj'}")
            half = stack.shape[1] // 2
            rows = {gate: slice(half), up: slice(half, None), down: slice(None)}[layer]
            stack[int(expert), rows].add_(change)
    ours = lora.load_adapter(build(kind), tmp_path)
    assert (logits(ours) - logits(expected)).abs().max() <= 1e-4 * logits(expected).abs().max()
    if which == "all":  # PEFT itself converts both layers of gate_up alone
        theirs = peft.PeftModel.from_pretrained(build(kind), tmp_path).eval()
        assert (logits(ours) - logits(theirs)).abs().max() <= 1e-4 * logits(expected).abs().max()
    # What is saved again has the stacks.
    lora.save_adapter(ours, tmp_path / "again")
    assert torch.equal(logits(lora.load_adapter(build(kind), tmp_path / "again")), logits(ours))


def test_files_of_transformers_4_that_lack_an_expert(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    former_file("Mixtral", tmp_path, ("w1", "w3", "w2"))
    file, key = (
        tmp_path / "adapter_model.safetensors",
        "base_model.model.model.layers.1.block_sparse_moe.experts.2.w3.lora_B.weight",
    )
    tensors = load_file(file)
    removed = tensors.pop(key)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"experts: expected lora_B of w3 of each of 4 experts, .* received none of expert 2"
    ):
        lora.load_adapter(build(), tmp_path)
    save_file(tensors | {key: removed[:3].clone()}, file, {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"experts: expected the same shapes for all experts, received others"
    ):
        lora.load_adapter(build(), tmp_path)


@pytest.mark.parametrize("how", ["eager", "grouped_mm", "shoestring", "quantised"])
def test_dropout_of_experts(how: str) -> None:
    """A mask changes the adapters alone, is drawn anew, and has the results without dropout as its mean."""
    model = build("Qwen3Moe")
    model.set_experts_implementation(
        "eager" if how == "quantised" else register_experts() if how == "shoestring" else how
    )
    options: dict[str, Any] = {"quantize": "int8"} if how == "quantised" else {}
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    lora.apply(model, rank=2, target_modules=[], target_parameters=parameters, dropout=0.5, **options)
    whole = logits(model)
    model.train()
    assert torch.equal(logits(model), whole)  # B is 0
    randomise(model)
    expected = logits(model.eval())
    model.train()
    torch.manual_seed(0)
    first, second = logits(model), logits(model)
    torch.manual_seed(0)
    assert torch.equal(logits(model), first) and not torch.equal(first, second)
    ids = torch.arange(12)[None]
    run = functools.partial(lambda ids: model(input_ids=ids, labels=ids).loss)
    grads = []
    for call in (run, lambda ids: checkpoint(run, ids)):
        torch.manual_seed(3)
        model.zero_grad()
        call(ids).backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)) and len(grads[0]) == 4
    layer: Any = model.model.layers[0].mlp.experts
    x, index, weight = torch.randn(7, 32), torch.arange(14).view(7, 2) % 4, torch.rand(7, 2)
    with torch.no_grad():
        layer.lora_B_down_proj["default"].zero_()  # after the gate, the mean is another one
        samples = torch.stack([layer(x, index, weight) for _ in range(2)])
        model.eval()
        assert not torch.equal(samples[0], samples[1]) and layer(x, index, weight).isfinite().all()
    assert expected.isfinite().all()


def test_dropout_needs_products() -> None:
    model = lora.apply(
        build("Qwen3Moe"), rank=2, target_modules=[], target_parameters=["experts.down_proj"], dropout=0.5
    )
    layer: Any = model.model.layers[0].mlp.experts.train()
    with pytest.raises(
        ValueError, match="lora: dropout: expected experts that multiply rows by their stacks"
    ):
        layer.down_proj.sum()
    lora.apply(
        model, rank=2, target_modules=[], target_parameters=["experts.down_proj"], adapter_name="other"
    )
    lora.set_adapter(model, ["default", "other"])
    with pytest.raises(
        ValueError, match=r"one probability of the active adapters of experts, received \[0.0, 0.5\]"
    ):
        _ = layer.down_proj
