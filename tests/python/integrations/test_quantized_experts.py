"""Test stacks of experts as codes: loaded, applied, trained with adapters, saved, merged, and refused by name.

References are the same models with dense stacks that hold the dequantised codes, run by transformers' own loop.
"""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shoestring
from moe_models import MODELS, moe_model
from shoestring.integrations.transformers.load import load_dense
from shoestring.quantization import quantized_stacks

FORMS: dict[str, dict[str, Any]] = {
    "nf4": {"quant_type": "nf4", "double_quant": True},
    "fp4": {"quant_type": "fp4", "block_size": 128},
    "int4": {"quant_type": "int4"},
    "int8": {"quant_type": "int8"},
}
CASES = [(kind, "nf4") for kind in MODELS] + [
    (kind, form) for kind in ("qwen3_moe", "gpt_oss") for form in FORMS if form != "nf4"
]
TOKENS = torch.arange(20)[None] % 90


@pytest.fixture(autouse=True)
def no_stack_stays_dense() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*stay dense.*")
        yield


def write(folder: Path, kind: str, **fields: Any) -> Path:
    moe_model(kind, **fields).save_pretrained(folder, max_shard_size="100KB")
    return folder


def quantize(weight: Tensor, quant_type: str, block_size: int = 64, double_quant: bool = False) -> Any:
    if quant_type == "int8":
        return shoestring.quantize_int8(weight)
    return shoestring.quantize_4bit(weight, quant_type, block_size, double_quant)


def is_stack(name: str) -> bool:
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def reference(folder: Path, dtype: torch.dtype, form: dict[str, Any]) -> Any:
    """Return transformers' model with eager experts, whose quantised weights are the dequantised codes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    linear = {f"{n}.weight" for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in linear or is_stack(name):
                p.copy_(quantize(p, **form).dequantize())
    return model


def stacks(model: nn.Module) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if is_stack(name.replace(".base_layer", ""))}


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_load_quantized_quantises_every_expert(tmp_path: Path, kind: str, form: str) -> None:
    folder, options = write(tmp_path, kind), FORMS[form]
    model = shoestring.load_quantized(folder, dtype=torch.float32, **options)
    assert shoestring.count_experts(model) == shoestring.ExpertCount(MODELS[kind][2], 0)
    dense = load_dense(folder, dtype=torch.float32, device="cpu")
    assert shoestring.count_experts(dense) == (0, MODELS[kind][2])
    for name, stack in stacks(model).items():
        wanted = quantize(dense.get_parameter(name), **options)
        assert not stack.requires_grad, name
        for part, expected in zip(stack.parts(), wanted.parts(), strict=True):
            assert torch.equal(part, expected), name
    with torch.no_grad():
        expected, received = reference(folder, torch.float32, options)(TOKENS).logits, model(TOKENS).logits
    # Both compute in fp32, and add the products of experts and features in other orders.
    assert (received - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("kind", MODELS)
def test_dense_files_load_as_transformers_loads_them(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = write(tmp_path, kind)
    names = {n for file in folder.glob("*.safetensors") for n in load_file(file)}
    assert any("experts.0." in name for name in names) or kind == "gpt_oss"
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    found = load_dense(folder, dtype=torch.bfloat16, device="cpu").state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    if kind in ("glm4_moe", "deepseek_v3"):  # transformers keeps it in fp32
        assert {t.dtype for n, t in found.items() if "e_score_correction_bias" in n} == {torch.float32}


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_one_matrix_at_a_time_is_in_memory(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = set()
    whole = quantized_stacks.quantize_parts

    def record(x: Tensor, *args: Any, **options: Any) -> Any:
        sizes.add(x.shape[0])
        return whole(x, *args, **options)

    monkeypatch.setattr(quantized_stacks, "quantize_parts", record)
    shoestring.load_quantized(write(tmp_path, kind))
    assert sizes == {1}


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_apply_gives_the_loaded_codes(tmp_path: Path, kind: str, form: str) -> None:
    from transformers import AutoModelForCausalLM

    folder, options = write(tmp_path, kind), dict(FORMS[form])
    loaded = shoestring.load_quantized(folder, dtype=torch.bfloat16, **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    options["quantize"] = options.pop("quant_type")
    shoestring.lora.apply(model, rank=2, target_modules=["o_proj"], **options)
    assert shoestring.count_experts(model) == shoestring.count_experts(loaded)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, loaded(TOKENS).logits)


def train(model: Any, steps: int) -> list[float]:
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.03)
    losses = []
    for _ in range(steps):
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("kind", MODELS)
def test_adapters_of_experts_train_as_on_dense_stacks(tmp_path: Path, kind: str) -> None:
    folder, options = write(tmp_path, kind), FORMS["nf4"]
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    losses = []
    for model in (
        shoestring.load_quantized(folder, dtype=torch.float32, **options),
        reference(folder, torch.float32, options),
    ):
        torch.manual_seed(4)
        shoestring.lora.apply(model, rank=2, target_modules=["o_proj"], target_parameters=parameters)
        # B begins with zeros, so A would have no gradient.
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.02)
        model(TOKENS, labels=TOKENS).loss.backward()
        adapters = {n: p for n, p in model.named_parameters() if "lora_" in n and "experts" in n}
        assert len(adapters) == 4 * MODELS[kind][2] // (8 if kind == "qwen3_moe" else 4)
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in adapters.values())
        model.zero_grad()
        losses.append(train(model, 20))
    assert losses[0][-1] < losses[0][0] - 0.02
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_all_linear_reaches_quantised_stacks(tmp_path: Path) -> None:
    model = shoestring.load_quantized(write(tmp_path, "qwen3_moe"))
    shoestring.lora.apply(model, rank=2, target_modules="all-linear")
    adapted = {n.partition(".lora_")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert {f"model.layers.{i}.mlp.experts" for i in (0, 1)} <= adapted


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_saved_models_load(tmp_path: Path, form: str) -> None:
    model = shoestring.load_quantized(write(tmp_path / "dense", "qwen3_moe"), **FORMS[form])
    shoestring.save_quantized(model, tmp_path / "codes")
    again = shoestring.load_quantized(tmp_path / "codes")
    assert shoestring.count_experts(again) == (16, 0)
    state, other = model.state_dict(), again.state_dict()
    assert state.keys() == other.keys()
    assert all(torch.equal(other[name], tensor) for name, tensor in state.items())
    prefix = "model.layers.0.mlp.experts.gate_up_proj"
    if form == "nf4":
        text = bytes(state[f"{prefix}.quant_state.bitsandbytes__nf4"].tolist())
        assert json.loads(text)["shape"] == [8, 128, 64] and state[prefix].shape == (8 * 128 * 64 // 2, 1)
    else:
        assert state[prefix].dtype == torch.int8 and state[f"{prefix}.SCB"].shape == (8, 128)


@pytest.mark.parametrize("form", FORMS)
def test_state_dicts(tmp_path: Path, form: str) -> None:
    folder = write(tmp_path, "mixtral")
    model = shoestring.load_quantized(folder, **FORMS[form])
    wanted = model(TOKENS).logits
    state = copy.deepcopy(model.state_dict())
    for stack in stacks(model).values():
        stack.packed.zero_()
    model.load_state_dict(state)
    assert torch.equal(model(TOKENS).logits, wanted)
    # Dense stacks are quantised.
    dense = load_dense(folder, dtype=torch.bfloat16, device="cpu").state_dict()
    mixed = {n: t for n, t in state.items() if not any(n.startswith(s) for s in stacks(model))}
    mixed |= {name: dense[name] for name in stacks(model)}
    for stack in stacks(model).values():
        stack.packed.zero_()
    model.load_state_dict(mixed)
    assert torch.equal(model(TOKENS).logits, wanted)
    pattern = r"experts\.\w+_proj: expected codes with load_state_dict\(assign=True\)"
    with pytest.raises(ValueError, match=pattern):
        model.load_state_dict(mixed, assign=True)
    other = shoestring.load_quantized(folder, quant_type="fp4" if form != "fp4" else "nf4")
    with pytest.raises((RuntimeError, ValueError), match="expected the form of"):
        other.load_state_dict(state)


def test_copies_and_pickles(tmp_path: Path) -> None:
    model = shoestring.load_quantized(write(tmp_path, "mixtral"))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.state_dict().keys() == model.state_dict().keys()
        for stack in stacks(model).values():
            stack.packed.fill_(3)
        other.load_state_dict(model.state_dict())
        assert all((stack.packed == 3).all() for stack in stacks(other).values())


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("requantize", [False, True])
def test_merging(tmp_path: Path, kind: str, requantize: bool) -> None:
    model = shoestring.load_quantized(write(tmp_path, kind), dtype=torch.float32)
    codes = {name: stack.dequantize() for name, stack in stacks(model).items()}
    shoestring.lora.apply(
        model, rank=2, target_modules=["o_proj"], target_parameters=["gate_up_proj", "down_proj"]
    )
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    with torch.no_grad():
        adapted = model(TOKENS).logits
        report = shoestring.lora.merge(model, requantize=requantize)
        merged = model(TOKENS).logits
        assert set(report.layers) >= {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"}
        if requantize:
            assert shoestring.count_experts(model).dense == 0 and report.error > 0
        else:
            assert shoestring.count_experts(model).quantized == 0
            assert (merged - adapted).norm() <= 1e-4 * adapted.norm()
            assert all(not torch.equal(stack, codes[name]) for name, stack in stacks(model).items())
        shoestring.lora.unmerge(model)
        assert torch.equal(model(TOKENS).logits, adapted)
    assert shoestring.count_experts(model).dense == 0


def test_weights_on_a_disk_have_the_same_bits(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "qwen3_moe")
    expected = shoestring.load_quantized(folder, double_quant=True)
    model = shoestring.load_quantized(folder, double_quant=True, to=f"nvme:{tmp_path}")
    assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)


def change(folder: Path, edit: Any) -> None:
    """Let a function change the tensors of the one file of a model."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda t: t.pop(EXPERT),
            r"down_proj has shape \[7, 64, 64\] .* asks for \[8, 64, 64\]|received .*experts.4",
        ),
        (lambda t: t.pop(EXPERT.replace("down", "up")), r"gate_up_proj: expected tensors"),
        (lambda t: t.update({EXPERT.replace("3", "9"): t.pop(EXPERT)}), "in the place of expert 3"),
        (lambda t: t.update({EXPERT: t[EXPERT][:, :32].clone()}), r"down_proj: expected tensors"),
        (
            lambda t: t.update({EXPERT.replace("experts.3", "expert.3"): t[EXPERT].clone()}),
            "not in the architecture",
        ),
    ],
    ids=["missing", "half missing", "number", "shape", "unknown"],
)
def test_files_of_experts_that_do_not_fit(tmp_path: Path, edit: Any, message: str) -> None:
    moe_model("qwen3_moe").save_pretrained(tmp_path)
    change(tmp_path, edit)
    for load in (
        lambda: shoestring.load_quantized(tmp_path),
        lambda: load_dense(tmp_path, dtype=torch.float32, device="cpu"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            load()
        assert "\n" not in str(caught.value)


def test_experts_that_stay_dense_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, "mixtral")
    for skip in ("experts", "gate_up_proj", "model.layers.0.mlp.experts"):
        model = shoestring.load_quantized(folder, skip_modules=[skip])
        assert shoestring.count_experts(model) == ((4, 4) if "layers" in skip else (0, 8))
    with pytest.raises(ValueError, match="expected names of linear layers or experts, received 'expert'"):
        shoestring.load_quantized(folder, skip_modules=["expert"])


@pytest.mark.parametrize(
    ("fields", "form", "reason"),
    [
        ({"hidden_act": "tanh"}, "nf4", "moe_experts does not compute the gate or norm of MixtralExperts"),
        (
            {"hidden_size": 40, "intermediate_size": 24},
            "nf4",
            "1920 elements of a matrix are not a number of whole",
        ),
    ],
    ids=["gate", "blocks"],
)
def test_stacks_that_cannot_be_codes_stay_dense_with_a_warning(
    tmp_path: Path, fields: dict[str, Any], form: str, reason: str
) -> None:
    from transformers import AutoModelForCausalLM

    if "hidden_size" in fields:  # 2 * 24 * 40 elements are 30 blocks of 64, 7.5 of 256
        form, options = "nf4", {"block_size": 256}
    else:
        options = {}
    folder = write(tmp_path, "mixtral", **fields)
    with pytest.warns(UserWarning, match=rf"load_quantized: 4 stacked weight.*{reason}"):
        model = shoestring.load_quantized(folder, quant_type=form, dtype=torch.float32, **options)
    assert shoestring.count_experts(model) == (0, 8)
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with pytest.warns(UserWarning, match=rf"lora.apply: quantize: 4 stacked weight.*{reason}"):
        shoestring.lora.apply(dense, rank=2, target_modules=["o_proj"], quantize=form, **options)
    with torch.no_grad():
        assert torch.allclose(dense(TOKENS).logits, model(TOKENS).logits, atol=1e-5)


def test_eager_experts_refuse_codes(tmp_path: Path) -> None:
    model = shoestring.load_quantized(write(tmp_path, "mixtral"))
    model.set_experts_implementation("eager")
    with pytest.raises(NotImplementedError, match="QuantizedTensor: .*not defined on codes"):
        model(TOKENS)


@pytest.mark.parametrize("form", FORMS)
def test_modules_of_shoestring(form: str) -> None:
    torch.manual_seed(0)
    moe = shoestring.nn.MoE(64, 64, experts=4, top_k=2, shared_hidden=64)
    options = {**FORMS[form], "quantize": FORMS[form]["quant_type"]}
    del options["quant_type"]
    expected = copy.deepcopy(moe)
    with torch.no_grad():
        for stack in (expected.experts.gate_up_proj, expected.experts.down_proj):
            stack.copy_(quantize(stack, **FORMS[form]).dequantize())
    quantized = shoestring.lora.apply(
        nn.Sequential(moe), rank=2, target_modules=None, target_parameters=["down_proj"], **options
    )
    assert shoestring.count_experts(quantized) == (4, 0)
    x = torch.randn(30, 64)
    route = moe.router(x)
    arguments = x, route.index, route.weight
    with torch.no_grad():
        assert torch.allclose(moe.experts(*arguments), expected.experts(*arguments), atol=1e-5)
