"""shoestring.patch fuses projections of the same input: results stay the same, and memory use falls."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from relative_error import relative_error
from tiny_decoder import build_decoder


def build(name: str = "Llama", **extra: Any) -> Any:
    return build_decoder(name, **extra).eval()


def adapt(model: Any, seed: int = 1, **options: Any) -> Any:
    torch.manual_seed(seed)
    shoestring.lora.apply(model, rank=4, alpha=8, **options)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return model


def step(model: Any) -> list[Tensor]:
    """Return the loss of a step and the gradients of all trained parameters."""
    ids = torch.arange(22).remainder(97).view(2, 11)
    loss = model(input_ids=ids, labels=ids).loss
    trained = [p for p in model.parameters() if p.requires_grad]
    return [loss, *torch.autograd.grad(loss, trained)]


# Qwen2 has biases of query, key and value. Mixtral has no Llama-style MLP. Gemma has a GELU instead of a
# SiLU.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "lora": ("Llama", {}, 4),
    "nf4": ("Llama", {"quantize": "nf4"}, 4),
    "int8": ("Llama", {"quantize": "int8"}, 4),
    "dora": ("Llama", {"dora": True, "quantize": "nf4"}, 4),
    "some": ("Llama", {"target_modules": ["q_proj", "up_proj", "down_proj"], "quantize": "nf4"}, 4),
    "biases": ("Qwen2", {"rslora": True}, 4),
    "no MLP": ("Mixtral", {"target_modules": ["q_proj", "v_proj"]}, 2),
    "gelu": ("Gemma", {}, 2),
}


@pytest.mark.parametrize("first", [True, False], ids=["patched first", "adapted first"])
@pytest.mark.parametrize("case", CASES)
def test_same_loss_and_gradients(case: str, first: bool) -> None:
    name, options, fused = CASES[case]
    extra = {"num_local_experts": 4} if name == "Mixtral" else {"head_dim": 16} if name == "Gemma" else {}
    plain, patched = adapt(build(name, **extra), **options), build(name, **extra)
    off = dict.fromkeys(("attention", "experts", "norms", "rope", "mlp", "linear", "embedding"), False)
    if first:
        report = shoestring.patch(patched, **off)
        adapt(patched, **options)
    else:
        report = shoestring.patch(adapt(patched, **options), **off)
    assert len(report.changes) == 1 + fused, str(report)
    for ours, expected in zip(step(patched), step(plain), strict=True):
        assert relative_error(ours, expected) <= 2e-5
    report.undo()
    assert all(
        "shoestring" not in type(m).forward.__module__
        for n, m in patched.named_modules()
        if n.endswith("mlp")
    )
    for ours, expected in zip(step(patched), step(plain), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_trained_weights() -> None:
    """If a model has no adapters, fusing its projections does not change a bit of its logits."""
    plain, patched = build(), build()
    shoestring.patch(patched, attention=False, norms=False, rope=False, mlp=False, linear=False)
    assert torch.equal(step_logits(patched), step_logits(plain))


def test_dropout_generation_hooks_and_copies() -> None:
    model = adapt(build(), dropout=0.5, quantize="nf4")
    reference = adapt(build(), quantize="nf4")
    report = shoestring.patch(model)
    # In eval mode there is no dropout, so the results equal those of the model without dropout.
    for ours, expected in zip(step(model), step(reference), strict=True):
        assert relative_error(ours, expected) <= 2e-5
    model.train()
    torch.manual_seed(3)
    first = step(model)
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(step(model), first, strict=True))
    assert not torch.equal(step(model)[0], first[0])
    model.eval()
    ids = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))
    seen: list[str] = []
    layer = model.model.layers[0]
    for name in ("q_proj", "v_proj"):
        layer.self_attn.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    layer.mlp.down_proj.register_forward_hook(lambda *_: seen.append("down_proj"))
    hooked = step(model)[0]
    assert seen == ["q_proj", "v_proj", "down_proj"]
    torch.testing.assert_close(hooked, step(reference)[0])
    assert type(copy.deepcopy(layer.mlp)) is type(reference.model.layers[0].mlp)
    report.undo()
    assert type(layer.mlp) is type(reference.model.layers[0].mlp)
    assert type(layer.self_attn) is type(reference.model.layers[0].self_attn)


def test_an_adapter_for_each_row() -> None:
    model = adapt(build())
    adapt(model, seed=2, adapter_name="other")
    names = ["default", "other"]
    with shoestring.lora.adapters_per_row(model, names):
        expected = step_logits(model)
    report = shoestring.patch(model)
    with shoestring.lora.adapters_per_row(model, names):
        torch.testing.assert_close(step_logits(model), expected, rtol=1e-5, atol=1e-5)
    report.undo()


def step_logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(22).remainder(97).view(2, 11)).logits


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_memory_and_checkpoints(checkpointing: bool) -> None:
    """A patched MLP has four tensors of the intermediate size, and saves two of them for backward.

    With activation checkpointing, the results of patched and unpatched models agree.
    """

    def kept(model: Any) -> int:
        storages: dict[int, int] = {}

        def note(t: Tensor) -> Tensor:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        ids = torch.arange(64).remainder(97).view(1, 64)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            model(input_ids=ids, labels=ids)
        return sum(storages.values())

    plain, patched = (adapt(build(intermediate_size=512), quantize="nf4").train() for _ in range(2))
    shoestring.patch(plain, projections=False, mlp=False)
    shoestring.patch(patched, attention=False)
    if checkpointing:
        for model in (plain, patched):
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        for ours, expected in zip(step(patched), step(plain), strict=True):
            assert relative_error(ours, expected) <= 2e-5
    else:
        # Each of the two patched layers saves neither silu(gate) nor silu(gate) * up. Each of these tensors
        # is (64, 512) in fp32.
        assert kept(plain) - kept(patched) >= 2 * 2 * 64 * 512 * 4


def test_compiles() -> None:
    model = adapt(build(), quantize="nf4")
    shoestring.patch(model)
    expected = step(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for ours, exact in zip(step(compiled), expected, strict=True):
        assert relative_error(ours, exact) <= 1e-5
