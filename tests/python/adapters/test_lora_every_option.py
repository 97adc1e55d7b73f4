"""Every option, in files: PEFT reads what shoestring writes, and what PEFT writes is read as in PEFT or refused.

The options are the fields of the installed classes, so a new option of shoestring or PEFT fails until it has a case.
test_lora_base.py tests resized vocabularies, test_lora_layers.py convolutions and experts, test_lora_several.py sums.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_models import llama, logits
from shoestring import lora
from shoestring.quantization.quantized_tensor import QuantizedTensor

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT says which options it ignores

CONFIG = "adapter_config.json"
NAMES = ["q_proj", "down_proj"]
# For each option of LoraOptions, arguments of lora.apply with other values than the defaults.
LORA: dict[str, list[dict[str, Any]]] = {
    "target_modules": [
        {"target_modules": ["self_attn.v_proj", "layers.1.mlp.up_proj", "lm_head"]},
        {"target_modules": r".*\.1\..*(q|up|down)_proj"},
        {"target_modules": ["embed_tokens", "k_proj", "q_proj", "down_proj"]},
    ],
    "exclude_modules": [{"exclude_modules": ["layers.0.self_attn.k_proj"]}, {"exclude_modules": r".*\.1\..*v_proj"}],
    "layers_to_transform": [{"layers_to_transform": 1, "target_modules": NAMES}],
    "layers_pattern": [{"layers_to_transform": [0, 1], "layers_pattern": "layers", "target_modules": NAMES}],
    "modules_to_save": [{"modules_to_save": ["lm_head"]}, {"modules_to_save": ["model.norm", "embed_tokens"]}],
    "bias": [{"bias": "all"}, {"bias": "lora_only"}],
    "task_type": [{"task_type": "CAUSAL_LM"}, {"task_type": "FEATURE_EXTRACTION"}],
    "rank": [{"rank": 1}, {"rank": 70}],
    "alpha": [{"alpha": 2.5}],
    "rank_pattern": [{"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down.*": 6}}],
    "alpha_pattern": [{"alpha_pattern": {"layers.1.self_attn.q_proj": 5, "down_proj": 0.5}}],
    "rslora": [{"rslora": True}],
    "dora": [{"dora": True}],
    "dropout": [{"dropout": 0.25}],
    "lora_bias": [{"lora_bias": True}],
    "init": [{"init": i} for i in ("gaussian", "eva", "random", "orthogonal", "pissa", "pissa_niter_2", "olora")],
    "loftq_iterations": [{"init": "loftq", "loftq_iterations": 2, "quantize": "nf4"}],
    "trainable_token_indices": [
        {"trainable_token_indices": [5, 0, 96]},
        {"trainable_token_indices": {"embed_tokens": [5], "lm_head": [5]}},
    ],
    "ensure_weight_tying": [{"ensure_weight_tying": True, "modules_to_save": ["embed_tokens"]}],
}  # fmt: skip
QUANTIZE: list[dict[str, Any]] = [
    {"quantize": "nf4"}, {"quantize": "fp4", "double_quant": True}, {"quantize": "int4", "block_size": 32},
    {"quantize": "int8"}, {"quantize": "nf4", "init": "pissa"}, {"quantize": "int8", "init": "olora"},
]  # fmt: skip
SINGLE = [*itertools.chain(*LORA.values()), *QUANTIZE]
PAIRS = [a | b for a, b in itertools.combinations(SINGLE, 2) if not a.keys() & b.keys()]
OTHERS: list[Any] = [
    lora.IA3Options(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    lora.IA3Options(target_modules=r".*(up|down)_proj", feedforward_modules=r".*0.*down_proj", modules_to_save=["lm_head"]),
    lora.IA3Options(target_modules=NAMES, exclude_modules=["layers.1.mlp.down_proj"]),
    lora.VeraOptions(rank=6, target_modules=NAMES, d_initial=0.3, seed=7, dropout=0.2, task_type="CAUSAL_LM"),
    lora.VeraOptions(rank=6, target_modules=NAMES, save_projection=False, seed=2**40, bias="vera_only"),
    lora.VeraOptions(rank=6, target_modules=["v_proj"], bias="all", layers_to_transform=[1], layers_pattern="layers"),
    lora.VeraOptions(rank=6, target_modules=["q_proj"], modules_to_save=["norm"], exclude_modules=r".*\.0\..*"),
    lora.PrefixOptions(tokens=3, task_type="CAUSAL_LM"),
    lora.PrefixOptions(tokens=3, projection=True, hidden_size=20),
    lora.PrefixOptions(tokens=3, init="zero"),
    lora.PromptOptions(tokens=3, task_type="CAUSAL_LM"),
    lora.PromptOptions(tokens=5, init="vocabulary"),
]  # fmt: skip
MODULES = {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"}
# The options of each class that no case sets. PEFT's IA3 lacks these options, and virtual tokens select no modules.
EXCEPT: dict[Any, set[str]] = {
    lora.LoraOptions: {"target_parameters"},  # test_lora_moe.py and test_lora_layers.py
    lora.IA3Options: {"layers_to_transform", "layers_pattern", "bias", "feedforward"},
    lora.VeraOptions: set(),
    lora.PrefixOptions: MODULES | {"bias"},
    lora.PromptOptions: MODULES | {"bias"},
}


def change(model: nn.Module) -> nn.Module:
    """Change every trained parameter."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


def differs(a: Tensor, b: Tensor) -> bool:
    # virtual tokens have logits too
    return bool((a[:, -b.shape[1] :] - b).abs().max() > 2e-4)


def label(value: Any) -> str:
    return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else repr(value)


def quantised_base(model: nn.Module, base: nn.Module) -> nn.Module:
    """Give ``base`` the weights for which the file of a quantised model is exact."""
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, QuantizedTensor):
            dense = weight.dequantize(torch.float32)
            if "default" in getattr(layer, "initial_A", {}):
                scaling = layer.adapters["default"].scaling
                dense = dense + scaling * layer.initial_B["default"] @ layer.initial_A["default"]
            base.get_submodule(name).weight.data.copy_(dense)
    return base


def reads_as_ours(apply: Callable[[nn.Module], nn.Module], options: Any, tied: bool, folder: Path) -> None:
    try:
        model = apply(llama(tied, biased=True))
    except ValueError as error:
        assert isinstance(options, dict)
        assert any(name in str(error) or repr(value) in str(error) for name, value in options.items()), error
        pytest.skip(f"refused by name: {error}")
    expected = logits(change(model))
    base = quantised_base(model, llama(tied, biased=True))
    assert differs(expected, logits(base))
    lora.save_adapter(model, folder)
    same(logits(peft.PeftModel.from_pretrained(base, str(folder)).eval()), expected)


@pytest.mark.sample(20)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("options", [*SINGLE, *PAIRS], ids=label)
def test_peft_reads_every_pair_of_options(options: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    reads_as_ours(lambda base: lora.apply(base, **{"rank": 4, "alpha": 6} | options), options, tied, tmp_path)


@pytest.mark.sample(4)
@pytest.mark.parametrize("options", OTHERS, ids=lambda o: f"{type(o).__name__}{OTHERS.index(o)}")
def test_peft_reads_every_option_of_other_kinds(options: Any, tmp_path: Path) -> None:
    reads_as_ours(lambda base: lora.apply(base, options), options, False, tmp_path)


@pytest.mark.parametrize("kind", EXCEPT)
def test_every_option_of_shoestring_has_a_case(kind: Any) -> None:
    cases = SINGLE if kind is lora.LoraOptions else [vars(own) for own in OTHERS if type(own) is kind]
    default = vars(kind())
    changed = {name for case in cases for name, value in case.items() if value != default.get(name)}
    assert default.keys() - EXCEPT[kind] <= changed


@pytest.mark.parametrize(
    "name", ["b", "model", "q_proj", "0", "lora_A", "base_layer", "two words", "Überschrift"]
)
@pytest.mark.sample(3)
def test_names_of_adapters(name: str, tmp_path: Path) -> None:
    model = lora.apply(llama(), rank=4, target_modules=NAMES, modules_to_save=["lm_head"])
    expected = {"default": logits(change(model))}
    lora.apply(model, rank=2, target_modules=["down_proj", "embed_tokens"], adapter_name=name)
    expected[name] = logits(change(model))
    lora.save_adapter(model, tmp_path)
    for own, folder in (("default", tmp_path), (name, tmp_path / name)):
        same(logits(peft.PeftModel.from_pretrained(llama(), str(folder)).eval()), expected[own])
    again = lora.load_adapter(lora.load_adapter(llama(), tmp_path), tmp_path, name)
    same(logits(again), expected[name])


# For each field of PEFT's LoraConfig, values with which PEFT saves an adapter, and whether load_adapter reads it onto a
# tied model. If it does not, its error names the field.
FIELDS: dict[str, list[tuple[dict[str, Any], bool]]] = {
    "r": [({"r": 1}, True)],
    "lora_alpha": [({"lora_alpha": 3.5}, True)],
    "target_modules": [({"target_modules": "all-linear"}, True), ({"target_modules": r".*\.0\..*[qv]_proj"}, True)],
    "exclude_modules": [({"exclude_modules": ["layers.0.mlp.down_proj"]}, True), ({"exclude_modules": r".*\.0\..*"}, True)],
    "lora_dropout": [({"lora_dropout": 0.5}, True)],
    "fan_in_fan_out": [({"fan_in_fan_out": True}, True)],
    "bias": [({"bias": "all"}, True), ({"bias": "lora_only"}, True)],
    "use_rslora": [({"use_rslora": True}, True)],
    "modules_to_save": [({"modules_to_save": ["lm_head", "norm"]}, True)],
    "init_lora_weights": [
        *(({"init_lora_weights": i}, True) for i in (False, "gaussian", "orthogonal", "mica", "eva", "pissa", "olora")),
        ({"init_lora_weights": "pissa_niter_2"}, False),
        ({"init_lora_weights": "pissa", "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"down_proj": 5}}, True),
        ({"init_lora_weights": "olora", "use_rslora": True}, True),
    ],
    "layers_to_transform": [({"layers_to_transform": 1}, True), ({"layers_to_transform": [0]}, True)],
    "layers_pattern": [({"layers_to_transform": [1], "layers_pattern": ["h", "layers"]}, True)],
    "rank_pattern": [({"rank_pattern": {"q_proj": 7, r"layers\.1\.mlp.*": 2}}, True)],
    "alpha_pattern": [({"alpha_pattern": {"0.self_attn.q_proj": 7, r"layers\.1\.mlp.*": 2}}, True)],
    "trainable_token_indices": [
        ({"trainable_token_indices": [3, 1]}, True),
        ({"trainable_token_indices": {"lm_head": [2], "embed_tokens": [3]}}, True),
    ],
    "loftq_config": [({"loftq_config": {"loftq_bits": 2}}, True)],
    "eva_config": [
        ({"init_lora_weights": "eva", "eva_config": peft.EvaConfig(rho=1.0, adjust_scaling_factors=False)}, True),
        ({"init_lora_weights": "eva", "eva_config": peft.EvaConfig(rho=2.0, whiten=True), "use_rslora": True}, True),
    ],
    "corda_config": [({"corda_config": {"corda_method": "kpm"}}, True)],
    "lora_ga_config": [({"lora_ga_config": {"direction": "random"}}, True)],
    "use_dora": [({"use_dora": True}, True)],
    "qalora_group_size": [({"qalora_group_size": 8}, True)],
    "megatron_core": [({"megatron_core": "other.core"}, True)],
    "runtime_config": [({"runtime_config": peft.LoraRuntimeConfig(ephemeral_gpu_offload=True)}, True)],
    "lora_bias": [({"lora_bias": True}, True)],
    "target_parameters": [({"target_parameters": ["k_proj.weight"]}, True)],
    "alora_invocation_tokens": [({"alora_invocation_tokens": [1], "task_type": "CAUSAL_LM"}, False)],
    "layer_replication": [({"layer_replication": [(0, 2), (1, 2)]}, False)],
    "velora_config": [({"velora_config": {}}, False)],
    "kasa_config": [({"kasa_config": {}}, False)],
    "monteclora_config": [({"monteclora_config": {}}, False)],
    "use_bdlora": [({"use_bdlora": {"target_modules_bd_a": ["q_proj"], "nblocks": 2, "match_strict": False}}, False)],
    "ensure_weight_tying": [
        ({"ensure_weight_tying": True, "modules_to_save": ["embed_tokens"]}, True),
        ({"ensure_weight_tying": True, "trainable_token_indices": [3, 1]}, True),
        ({"ensure_weight_tying": True, "target_modules": ["embed_tokens", "q_proj"]}, False),
    ],
    "task_type": [({"task_type": "CAUSAL_LM"}, True), ({"task_type": "FEATURE_EXTRACTION"}, True)],
    "inference_mode": [({"inference_mode": True}, True)],
}  # fmt: skip
# Fields that need other software, and their values in a file that load_adapter refuses.
WRITTEN: dict[str, Any] = {
    "use_qalora": True, "megatron_config": {"hidden_size": 64}, "arrow_config": {"top_k": 2}, "peft_type": "LOKR",
    "auto_mapping": {"base_model_class": "MistralForCausalLM", "parent_library": "transformers"},
}  # fmt: skip
# Fields that only describe the adapter, and values in a file that load_adapter reads as before.
DESCRIBED: dict[str, Any] = {"base_model_name_or_path": "a/b", "revision": "c", "peft_version": "99.0.0"}


def test_every_field_of_peft_has_a_case() -> None:
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert fields == FIELDS.keys() | WRITTEN.keys() | DESCRIBED.keys()


def peft_adapter(options: dict[str, Any], folder: Path, tied: bool) -> Tensor:
    """Save a changed adapter of PEFT; return the logits of PEFT's own reload."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": NAMES} | options)
    model = peft.get_peft_model(llama(tied, biased=True), config)
    if options.get("init_lora_weights") == "eva":
        batches = [{"input_ids": torch.randint(97, (4, 32))} for _ in range(3)]
        peft.initialize_lora_eva_weights(model, batches, show_progress_bar=False)
    if options.get("inference_mode"):
        model.set_requires_grad("default", True)
    change(model)
    model.save_pretrained(str(folder))
    return logits(peft.PeftModel.from_pretrained(llama(tied, biased=True), str(folder)).eval())


CASES = [(field, *case) for field, cases in FIELDS.items() for case in cases]


@pytest.mark.sample(20)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("field", "options", "loads"), CASES, ids=[f"{f}-{label(o)}" for f, o, _ in CASES])
def test_every_field_of_peft_loads_or_is_refused(
    field: str, options: dict[str, Any], loads: bool, tied: bool, tmp_path: Path
) -> None:
    try:
        expected = peft_adapter(options, tmp_path, tied)
    except (ValueError, NotImplementedError) as error:
        pytest.skip(f"PEFT refuses it: {error}")
    if loads or (field == "ensure_weight_tying" and not tied):
        base = llama(tied, biased=True)
        assert differs(expected, logits(base))
        same(logits(lora.load_adapter(base, tmp_path)), expected)
        return
    with pytest.raises(ValueError, match=field):
        lora.load_adapter(llama(tied, biased=True), tmp_path)


def test_written_fields(tmp_path: Path) -> None:
    expected = peft_adapter({}, tmp_path, False)
    saved = json.loads((tmp_path / CONFIG).read_text())
    for name, value in WRITTEN.items():
        (tmp_path / CONFIG).write_text(json.dumps(saved | {name: value}))
        named = {"auto_mapping": "MistralForCausalLM"}.get(name, name)
        with pytest.raises(ValueError, match=named):
            lora.load_adapter(llama(biased=True), tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps(saved | DESCRIBED))
    same(logits(lora.load_adapter(llama(biased=True), tmp_path)), expected)


def prepared(init: str, config: Any, base: nn.Module) -> nn.Module:
    """Return PEFT's model with an adapter whose initialisation reads inputs or gradients of the base."""
    ids = torch.randint(97, (8, 32))
    if init == "corda":
        from peft.tuners.lora.corda import preprocess_corda

        preprocess_corda(base, config, run_model=lambda: [base(row[None]) for row in ids])
    if init == "lora_ga":
        from peft.tuners.lora.loraga import preprocess_loraga

        preprocess_loraga(base, config, lambda: base(ids, labels=ids).loss.backward())
    return peft.get_peft_model(base, config)


CHANGED: dict[str, dict[str, Any]] = {
    "pissa": {}, "pissa_niter_2": {}, "olora": {}, "corda": {"corda_config": {"corda_method": "ipm"}},
    "lora_ga": {"lora_ga_config": {}},
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "more",
    [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"down_proj": 5}}],
    ids=label,
)
@pytest.mark.parametrize("init", CHANGED)
def test_initialisations_that_change_the_base(init: str, more: dict[str, Any], tmp_path: Path) -> None:
    options = (
        {"r": 4, "lora_alpha": 6, "target_modules": NAMES, "init_lora_weights": init} | CHANGED[init] | more
    )
    model = prepared(init, peft.LoraConfig(**options), llama())
    model.save_pretrained(str(tmp_path / "first"))
    change(model)
    expected = logits(model)
    model.save_pretrained(str(tmp_path / "plain"))
    if init not in ("pissa", "olora"):
        with pytest.raises(ValueError, match=f'init_lora_weights: .* received "{init}"'):
            lora.load_adapter(llama(), tmp_path / "plain")
    model.save_pretrained(
        str(tmp_path / "converted"), path_initial_model_for_weight_conversion=str(tmp_path / "first")
    )
    theirs = peft.PeftModel.from_pretrained(llama(), str(tmp_path / "converted")).eval()
    ours = lora.load_adapter(llama(), tmp_path / "converted")
    same(logits(ours), logits(theirs))
    same(logits(ours), expected)
