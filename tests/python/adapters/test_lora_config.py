"""Test PEFT's configuration objects: each option works as in PEFT or raises an error that names it."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lora_models import assert_files_agree, llama, logits, randomise, trained
from shoestring import lora
from shoestring.lora import LoraLinear

peft = pytest.importorskip("peft")

ATTENTION = ["q_proj", "v_proj"]
HONOURED = {
    "all-linear": {"target_modules": "all-linear"},
    "pattern": {"target_modules": r".*\.1\..*(up|down)_proj"},
    "exclude list": {"target_modules": "all-linear", "exclude_modules": ["down_proj", "layers.0.self_attn.q_proj"]},
    "exclude pattern": {"target_modules": ATTENTION, "exclude_modules": r".*layers\.0.*"},
    "one layer": {"target_modules": ATTENTION, "layers_to_transform": 1},
    "layers": {"target_modules": ATTENTION, "layers_to_transform": [1], "layers_pattern": ["blocks", "layers"]},
    "ranks and alphas": {
        "target_modules": ATTENTION, "rank_pattern": {"v_proj": 2, "layers.0.self_attn.q_proj": 5},
        "alpha_pattern": {"q_proj": 1.5},
    },
    "rslora": {"target_modules": ATTENTION, "use_rslora": True},
    "dora": {"target_modules": ATTENTION, "use_dora": True},
    "gaussian": {"target_modules": ATTENTION, "init_lora_weights": "gaussian"},
    "random": {"target_modules": [*ATTENTION, "embed_tokens"], "init_lora_weights": False},
    "random dora": {"target_modules": [*ATTENTION, "embed_tokens"], "init_lora_weights": False, "use_dora": True},
    "random lora_bias": {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, "lora_bias": True},
    "orthogonal": {"target_modules": [*ATTENTION, "embed_tokens"], "init_lora_weights": "orthogonal"},
    "orthogonal dora": {"target_modules": ATTENTION, "init_lora_weights": "orthogonal", "use_dora": True},
    "default modules": {"target_modules": None},
    "bias all": {"target_modules": ATTENTION, "bias": "all"},
    "bias lora_only": {"target_modules": ["q_proj", "down_proj"], "bias": "lora_only"},
    "lora_bias": {"target_modules": ["q_proj", "down_proj"], "lora_bias": True},
    "modules_to_save": {"target_modules": "all-linear", "modules_to_save": ["lm_head", "mlp"]},
    "dropout": {"target_modules": ATTENTION, "lora_dropout": 0.25},
    "task": {"target_modules": ATTENTION, "task_type": "CAUSAL_LM", "inference_mode": False},
}  # fmt: skip


def biased() -> nn.Module:
    """Build a model with biases in attention and MLP. (Qwen2 has biases in some of these layers.)"""
    return llama(biased=True)


@pytest.mark.parametrize("name", HONOURED)
def test_honoured_as_in_peft(name: str, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, lora_alpha=6, **HONOURED[name])
    torch.manual_seed(5)
    ours = lora.apply(biased(), config)
    torch.manual_seed(5)
    theirs = peft.get_peft_model(biased(), config).eval()
    mine, peers = trained(ours), trained(theirs)
    assert mine.keys() == peers.keys() and mine
    for key, value in mine.items():
        torch.testing.assert_close(value, peers[key], rtol=1e-6, atol=1e-6)
        value.data += 0.02 * torch.randn_like(value)
        peers[key].data.copy_(value)
    assert (logits(ours) - logits(theirs)).abs().max() <= 1e-6
    changed = (logits(ours) - logits(biased())).abs().max()
    assert changed > 1e-3
    assert_files_agree(ours, tmp_path, biased)
    # The saved configuration contains the value of the option lora_dropout.
    assert (
        json.loads((tmp_path / "ours" / "adapter_config.json").read_text())["lora_dropout"]
        == config.lora_dropout
    )


def test_every_field_of_peft_is_known() -> None:
    """An unknown option of PEFT raises an error if its value is not the default."""

    @dataclasses.dataclass
    class Newer(peft.LoraConfig):
        use_something: bool = False

    assert lora.apply(llama(), Newer(target_modules=ATTENTION)) is not None
    with pytest.raises(
        ValueError, match="lora.apply: config: use_something: expected False, .* received True"
    ):
        lora.apply(llama(), Newer(target_modules=ATTENTION, use_something=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_replication": [(0, 1)]}, "layer_replication: expected null or false"),
        ({"use_qalora": True}, "use_qalora: expected null or false"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens: expected null or false"),
        ({"init_lora_weights": "mica"}, "init: expected 'default', .*, received 'mica'"),
        ({"init_lora_weights": "orthogonal", "r": 3}, "rank: expected an even number .*, received 3"),
        ({"modules_to_save": ["score"]}, "modules_to_save: expected names of modules, received 'score'"),
        ({"bias": "vera_only"}, "bias: expected 'none' or 'all' or 'lora_only', received 'vera_only'"),
    ],
    ids=str,
)
def test_refused_by_name(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        lora.apply(llama(), peft.LoraConfig(**({"target_modules": ATTENTION} | options)))
    assert "\n" not in str(error.value)


def test_refuses_other_methods_and_options_twice() -> None:
    with pytest.raises(ValueError, match='config: peft_type: expected LORA, .*, received "BOFT"'):
        lora.apply(llama(), peft.BOFTConfig(target_modules=ATTENTION))
    with pytest.raises(
        ValueError,
        match="rank: expected the option inside config, since config is given; received it as an argument",
    ):
        lora.apply(llama(), peft.LoraConfig(target_modules=ATTENTION), rank=4)
    model = lora.apply(biased(), bias="all")
    with pytest.raises(
        ValueError, match="bias: expected 'none', since the adapter 'default' trains the base's biases"
    ):
        lora.apply(model, bias="lora_only", adapter_name="b")
    with pytest.raises(
        ValueError, match="layers_to_transform: expected None unless target_modules is a list"
    ):
        lora.apply(llama(), layers_to_transform=1)
    with pytest.raises(
        ValueError, match="layers_to_transform: expected layer numbers, since layers_pattern is given"
    ):
        lora.apply(llama(), target_modules=ATTENTION, layers_pattern="layers")


def test_a_trained_copy_stands_beside_the_original() -> None:
    base = biased()
    model = lora.apply(
        biased(), rank=2, target_modules=ATTENTION, modules_to_save=["lm_head"], quantize="nf4"
    )
    lora.apply(model, rank=2, target_modules=ATTENTION, adapter_name="b", modules_to_save=["lm_head"])
    head = model.lm_head
    randomise(model, "b")
    assert head.weight is head.modules_to_save["b"].weight and head.weight.requires_grad
    assert (
        not head.original_module.weight.requires_grad
        and not head.modules_to_save["default"].weight.requires_grad
    )
    assert torch.equal(head.original_module.weight, base.lm_head.weight)
    with lora.disable_adapter(model):
        assert head.weight is head.original_module.weight
    lora.set_adapter(model, "default")
    assert head.weight is head.modules_to_save["default"].weight
    with pytest.raises(
        ValueError,
        match="set_adapter: .* expected at most one adapter with a trained copy .* of lm_head, received",
    ):
        lora.set_adapter(model, ["default", "b"])
    with pytest.raises(
        ValueError, match="adapters_per_row: .* received 'b', which has a TrainedCopy at lm_head"
    ):
        lora.adapters_per_row(model, ["b"]).__enter__()
    lora.set_adapter(model, "b")
    expected = logits(model)
    lora.merge(model)
    assert type(model.lm_head) is nn.Linear
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    lora.unmerge(model)
    assert model.lm_head is head and torch.equal(logits(model), expected)
    for name in ("default", "b"):
        lora.delete_adapter(model, name)
    assert model.lm_head is head.original_module and not any(
        isinstance(m, LoraLinear) for m in model.modules()
    )


def test_trained_copies_are_left_alone_by_later_adapters() -> None:
    model = lora.apply(
        llama(), rank=2, target_modules=ATTENTION, modules_to_save=["lm_head", "mlp"], quantize="nf4"
    )
    copied = model.model.layers[0].mlp.modules_to_save["default"].up_proj
    # The trained copy of the module is not quantised.
    assert type(copied) is nn.Linear and copied.weight.requires_grad
    assert type(model.model.layers[0].self_attn.k_proj).__name__ == "QuantizedLinear"
    lora.apply(model, rank=2, adapter_name="b")  # the default of target_modules is "all-linear"
    chosen = [n for n, m in model.named_modules() if isinstance(m, LoraLinear) and "b" in m.adapters]
    assert len(chosen) == 8 and not any("modules_to_save" in n or "original_module" in n for n in chosen)
    with pytest.raises(
        ValueError, match="modules_to_save: expected modules without adapters .* has a LoraLinear"
    ):
        lora.apply(model, rank=2, target_modules=["k_proj"], modules_to_save=["q_proj"], adapter_name="c")
    with pytest.raises(
        ValueError, match="target_modules: expected linear layers .* received lm_head, a TrainedCopy"
    ):
        lora.apply(model, rank=2, target_modules=["lm_head"], adapter_name="c")
    quantised = lora.apply(llama(), rank=2, target_modules=ATTENTION, quantize="nf4")
    with pytest.raises(
        ValueError, match="modules_to_save: .* received model.layers.0.mlp, which has a QuantizedLinear"
    ):
        lora.apply(quantised, rank=2, target_modules=ATTENTION, modules_to_save=["mlp"], adapter_name="b")


def test_trained_biases_and_lora_bias_merge() -> None:
    model = lora.apply(biased(), rank=2, alpha=8, target_modules=ATTENTION, bias="all", lora_bias=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    ids = torch.randint(97, (2, 8))
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert all(p.grad is not None for n, p in model.named_parameters() if n.endswith(".bias"))
    randomise(model)
    expected, trained_names = logits(model), set(trained(model))
    lora.merge(model)  # merging adds the bias of lora_B, multiplied by the adapter's scaling of 4
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    lora.unmerge(model)
    assert torch.equal(logits(model), expected) and set(trained(model)) == trained_names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["q_proj", "v_porj"]}, "target_modules: .* 'v_porj', which matches nothing; the nearest are v_proj"),
        ({"target_modules": ["self_atn.q_proj"]}, "'self_atn.q_proj', .* nothing; the nearest are self_attn.q_proj"),
        ({"target_modules": ["q_proj", "x", "y"]}, "received 'x', 'y', which match nothing; this model has down_proj"),
        ({"target_modules": ["q_proj", ""]}, "received '', which matches nothing"),
        ({"exclude_modules": ["lm_haed"]}, "exclude_modules: .* 'lm_haed', which matches nothing; the nearest are lm_head"),
        ({"exclude_modules": r".*layers\.9.*"}, "exclude_modules: expected a pattern for names of modules, received"),
        ({"modules_to_save": ["lm_head", "score"]}, "modules_to_save: expected names of modules, received 'score'"),
        ({"target_parameters": ["experts.up"], "target_modules": ["q_proj"]}, "target_parameters: expected names of parameters"),
        ({"rank_pattern": {"v_porj": 2}}, "rank_pattern: .* received 'v_porj', which matches nothing; the nearest are v_proj"),
        ({"alpha_pattern": {"lm_head": 2}}, "alpha_pattern: .* layers with an adapter, received 'lm_head', which"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1, 7]}, "received 7, which no layer has; .* 0, 1$"),
        ({"config": lora.IA3Options(target_modules=["k_proj"], feedforward_modules=["down_proj"])}, "feedforward_modules: "),
    ],
)  # fmt: skip
def test_names_that_match_nothing_are_refused(options: dict, message: str) -> None:
    model = llama()
    with pytest.raises(ValueError, match=message):
        lora.apply(model, **options)
    assert all(p.requires_grad for p in model.parameters())


def test_an_unknown_option_is_refused_with_the_names_that_exist() -> None:
    model = llama()
    with pytest.raises(TypeError, match="^lora.apply: r: expected one of the options target_modules, .*; PEFT's r is rank here$"):  # fmt: skip
        lora.apply(model, r=8)
    with pytest.raises(TypeError, match="^lora.apply: rnak: .*, rank, alpha, .* received another$"):
        lora.apply(model, rnak=8)
    assert all(p.requires_grad for p in model.parameters())


def test_spaces_around_names_do_not_count() -> None:
    model = lora.apply(
        llama(), rank=2, target_modules=[" q_proj", "v_proj "], exclude_modules=[" layers.0.self_attn.q_proj"]
    )
    assert sum(name.endswith("lora_A.default") for name, _ in model.named_parameters()) == 3


def test_a_file_may_name_more_modules_than_the_model_has(tmp_path: Path) -> None:
    """A file's configuration may name modules that the model does not have.

    PEFT's configurations are often written for several architectures.
    """
    lora.save_adapter(lora.apply(llama(), rank=2, target_modules=["q_proj"]), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config |= {
        "target_modules": ["q_proj", "c_attn"],
        "rank_pattern": {"c_attn": 4},
        "exclude_modules": ["wte"],
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    # Remove the digest of the configuration from the weights file, because files of PEFT have no digest.
    weights = tmp_path / "adapter_model.safetensors"
    save_file(load_file(weights), weights)
    model = lora.load_adapter(llama(), tmp_path)
    assert sum(isinstance(module, LoraLinear) for module in model.modules()) == 2
