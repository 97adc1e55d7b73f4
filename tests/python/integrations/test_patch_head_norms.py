"""shoestring.patch fuses the norms of query and key heads with the rotary embedding that follows them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_patch import batch
from test_patch_layers import SMALL, batch_of, operators, patch_layers
from test_patch_layers import make as make_other
from torch import nn

import shoestring

transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
Qwen3Attention, apply_rotary_pos_emb, eager_attention_forward = (
    getattr(modeling, name) for name in ("Qwen3Attention", "apply_rotary_pos_emb", "eager_attention_forward")
)

MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Gemma3": {"model_type": "gemma3_text"},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Lfm2": {"layer_types": ["full_attention", "conv"]},
}


def make(name: str, dtype: torch.dtype = torch.float32) -> Any:
    transformers.logging.set_verbosity_error()
    config = getattr(transformers, ("Gemma3Text" if name == "Gemma3" else name) + "Config")(
        **SMALL, **MODELS[name]
    )
    model = getattr(transformers, name + "ForCausalLM")(config)
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model.to(dtype).eval()


@pytest.mark.parametrize("name", MODELS)
def test_head_norms_join_the_rotation(name: str) -> None:
    """Fusing head norms with the rotary embedding does not change logits and gradients in fp32.

    A patched model runs no separate head norms. Undoing the patch restores them.
    """
    model = make(name)
    plain = copy.deepcopy(model)
    kinds = [type(module) for module in model.modules()]
    report = shoestring.patch(model)
    layers = sum("rotary" in change.what for change in report.changes)
    assert sum("norms of queries and keys" in change.what for change in report.changes) == layers > 0, str(
        report
    )
    ids = batch()["input_ids"]
    calls = operators(lambda: model(ids))
    norms = sum("RMSNorm" in change.what for change in report.changes)
    assert sum("rms_norm" in call for call in calls) == norms - 2 * layers
    assert operators(lambda: plain(ids)) and sum("shoestring::rope" in call for call in calls) == layers
    for each in (model, plain):
        each(**batch_of(ids)).loss.backward()
    ours, expected = model(ids).logits, plain(ids).logits
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    largest = max(g.norm() for g in gradients.values())
    for n, p in model.named_parameters():
        if n in gradients:
            assert (p.grad - gradients[n]).norm() <= 1e-4 * max(gradients[n].norm(), 0.1 * largest), n
    report.undo()
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("name", ["Qwen3", "Gemma3"])
def test_joined_head_norms_in_16_bits_are_no_worse(name: str) -> None:
    model = make(name, torch.bfloat16)
    plain = copy.deepcopy(model)
    ids = batch()["input_ids"]
    exact = copy.deepcopy(model).double()(ids).logits
    assert "norms of queries and keys with their rotation" in str(patch_layers(model))
    ours, eager = ((each(ids).logits.double() - exact).norm() for each in (model, plain))
    assert ours <= 1.2 * eager


@pytest.mark.parametrize("name", ["Qwen3", "Gemma3"])
def test_head_norms_join_under_autocast(name: str) -> None:
    """Under autocast, the norms of 16-bit heads join the rotation although their weights are fp32."""
    model = make(name)
    layers = sum("rotary" in change.what for change in patch_layers(model).changes)
    ids = batch()["input_ids"]
    plain_calls = operators(lambda: model(ids))
    with torch.autocast("cpu", torch.bfloat16):
        calls = operators(lambda: model(ids))
    for part in ("shoestring::rope", "rms_norm"):
        assert sum(part in call for call in calls) == sum(part in call for call in plain_calls) >= layers
    loss = model(**batch_of(ids)).loss
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(**batch_of(ids)).loss, loss, rtol=0.05, atol=0)


def test_head_norms_that_cannot_join() -> None:
    """Head norms stay separate if they normalise all heads together, as in Olmo 2, or if they have hooks."""
    report = patch_layers(make_other("Olmo2"))
    assert "model.layers.0.self_attn: left alone: norms of queries and keys that something" in str(report)
    model = make("Qwen3")
    plain = copy.deepcopy(model)
    shoestring.patch(model)
    ids = batch()["input_ids"]
    seen: list[torch.Size] = []
    model.model.layers[0].self_attn.q_norm.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-3, atol=1e-3)
    assert seen == [(2, 11, 4, 16)]


class Reading(Qwen3Attention):
    """Qwen3 attention that applies tanh to the queries between their norm and the rotary embedding."""

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any, **kwargs: Any
    ) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q.tanh(), k, *position_embeddings)
        out, weights = eager_attention_forward(self, q, k, v, attention_mask, self.scaling)
        return self.o_proj(out.flatten(-2)), weights


def test_norms_that_something_else_reads() -> None:
    model = make("Qwen3", torch.float32)
    model.model.layers[1].self_attn.__class__ = Reading
    ids = batch()["input_ids"]
    expected = model(ids).logits
    report = patch_layers(model)
    text = str(report)
    assert "model.layers.1.self_attn: left alone: norms of queries and keys that something else" in text
    assert "model.layers.0.self_attn: norms of queries and keys with" in text
    assert "model.layers.1.self_attn: fused rotary" in text
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["Qwen3", "Gemma3"])
@pytest.mark.sample(1)
def test_joined_head_norms_elsewhere(name: str) -> None:
    """Fused head norms work with torch.compile, checkpointing, copies, and generation with a cache."""
    model = make(name)
    plain = copy.deepcopy(model)
    shoestring.patch(model)
    ids = batch()["input_ids"]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, plain(ids).logits, rtol=1e-3, atol=1e-3)
    generated = [each.generate(ids, max_new_tokens=5, do_sample=False) for each in (model, plain)]
    assert torch.equal(*generated)
    other = copy.deepcopy(model)
    assert [type(module) for module in other.modules()] == [type(module) for module in plain.modules()]
    for each in (model, plain):
        each.gradient_checkpointing_enable()
        each.train()(**batch_of(ids)).loss.backward()
    ours, expected = (each.model.layers[0].self_attn.q_norm.weight.grad for each in (model, plain))
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["Qwen3", "Qwen3Moe"])
@pytest.mark.usefixtures("small_weights_leave")
def test_head_norms_of_weights_that_are_away(name: str, tmp_path: Path) -> None:
    """The trial of the fused norms read weights that were in a file, failed, and left the norms alone."""
    here = make(name).requires_grad_(False)
    away = copy.deepcopy(here)
    handle = shoestring.offload_weights(away, f"nvme:{tmp_path}")
    reports = [shoestring.patch(model, logits=False) for model in (here, away)]
    changes = [[(change.where, change.what) for change in report.changes] for report in reports]
    assert changes[0] == changes[1]
    ids = batch()["input_ids"]
    losses = [model(input_ids=ids, labels=ids).loss for model in (here, away)]
    assert torch.equal(losses[0], losses[1]) and handle.statistics()["fetched"] > 0
