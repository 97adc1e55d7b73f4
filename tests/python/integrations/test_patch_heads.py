"""shoestring.patch supports heads with LoRA adapters or 4-bit weights, and refuses unsuitable heads."""

import copy

import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring.nn import QuantizedLinear

transformers = pytest.importorskip("transformers")

from test_patch import SMALL, batch, build  # noqa: E402

from same_models import assert_same  # noqa: E402


def test_heads_that_are_refused() -> None:
    model = build()
    model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match="output layer: hooks"):
        shoestring.patch(model)
    model = build(tie_word_embeddings=False)
    torch.nn.utils.parametrizations.weight_norm(model.lm_head)
    with pytest.raises(TypeError, match="ParametrizedLinear; expected nn.Linear"):
        shoestring.patch(model)
    with pytest.raises(TypeError, match="expected a Hugging Face transformers model"):
        shoestring.patch(nn.Linear(3, 3))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    with pytest.raises(ValueError, match="meta device"):
        shoestring.patch(model)


def adapted(lora_B: Tensor) -> None:
    nn.init.normal_(lora_B, std=0.5)  # LoRA initialises lora_B with zero, so the adapter would have no effect


def test_our_adapter_on_the_head_and_4_bits() -> None:
    model = build(tie_word_embeddings=False)
    # shoestring.patch runs before lora.apply: each forward uses the head that the model has at that time.
    shoestring.patch(model)
    shoestring.lora.apply(model, rank=4, alpha=8, target_modules=["lm_head"], quantize="nf4")
    adapted(model.lm_head.lora_B["default"])
    assert_same(model, copy.deepcopy(model), batch())
    assert model.lm_head.lora_A["default"].grad is not None
    quantised = build(tie_word_embeddings=False)
    quantised.lm_head = QuantizedLinear.from_linear(quantised.lm_head)
    plain = copy.deepcopy(quantised)
    shoestring.patch(quantised)
    assert_same(quantised, plain, batch())
    dropped = build(tie_word_embeddings=False)
    shoestring.lora.apply(dropped, rank=4, alpha=8, target_modules=["lm_head"], dropout=0.1)
    shoestring.patch(dropped)
    with pytest.raises(TypeError, match="dropout 0.1"):
        dropped.train()(**batch())


def test_several_adapters_or_a_trained_copy_on_the_head() -> None:
    lora = shoestring.lora
    model = lora.apply(build(tie_word_embeddings=False), rank=4, target_modules=["lm_head"])
    lora.apply(model, rank=2, target_modules=["lm_head"], adapter_name="b", init="pissa")
    lora.apply(model, rank=2, target_modules=["lm_head"], adapter_name="c", lora_bias=True)
    for name in ("default", "b"):
        adapted(model.lm_head.lora_B[name])
    lora.set_adapter(model, "default")
    plain = copy.deepcopy(model)
    shoestring.patch(model, logits=False)
    for names in ("default", ["default", "b"]):
        for each in (model, plain):
            lora.set_adapter(each, names)
        assert model(**batch()).logits is None
        assert_same(model, plain, batch())
    lora.set_adapter(model, "c")
    with pytest.raises(TypeError, match="output layer: DoRA, a bias on its adapter or adapters by row"):
        model(**batch())
    model = lora.apply(build(tie_word_embeddings=False), rank=2, modules_to_save=["lm_head"])
    plain = copy.deepcopy(model)
    shoestring.patch(model, logits=False)
    assert model(**batch()).logits is None
    assert_same(model, plain, batch())
    assert model.lm_head.modules_to_save["default"].weight.grad is not None


def test_peft_adapter_on_the_head() -> None:
    """A PEFT adapter on the language model head gets the same gradients with and without shoestring.patch."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["lm_head", "q_proj"])
    model = peft.get_peft_model(build(tie_word_embeddings=False), config).eval()
    adapted(model.base_model.model.lm_head.lora_B["default"].weight)
    plain = copy.deepcopy(model)
    report = shoestring.patch(model, logits=False)
    inputs = batch()
    assert model(**inputs).logits is None
    assert_same(model, plain, inputs)
    assert model.base_model.model.lm_head.lora_A["default"].weight.grad.norm() > 0
    with model.disable_adapter(), plain.disable_adapter():
        torch.testing.assert_close(model(**inputs).loss, plain(**inputs).loss, rtol=1e-5, atol=1e-6)
    report.undo()
    assert model(**inputs).logits is not None
