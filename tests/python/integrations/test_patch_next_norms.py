"""A decoder layer computes the norm after it with its residual sum, and changes no bit of a step."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shoestring
from shoestring.integrations.transformers import next_norms, residuals
from tiny_decoder import build_decoder

PATCH = {"attention": False, "linear": False}


class Adds(TorchDispatchMode):
    """Count the sums of two tensors of hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        adds = func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
        self.count += adds and isinstance(args[1], Tensor) and args[0].shape == args[1].shape == (2, 33, 64)
        return func(*args, **(kwargs or {}))


def step(model: Any, autocast: bool = False) -> list[Tensor]:
    ids = torch.arange(66).remainder(97).view(2, 33)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids).loss
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def assert_same(ours: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def pair(name: str = "Llama", monkeypatch: pytest.MonkeyPatch | None = None, **extra: Any) -> tuple[Any, Any]:
    """Return a patched model, and one whose layers compute no norm of others."""
    patched, plain = build_decoder(name, **extra), build_decoder(name, **extra)
    shoestring.patch(patched, **PATCH)
    with pytest.MonkeyPatch.context() as context:
        context.setattr(residuals, "next_norms", lambda *_: {})
        shoestring.patch(plain, **PATCH)
    return patched, plain


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Qwen3"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_the_same_bits_without_sums(name: str, autocast: bool) -> None:
    extra = {"head_dim": 16} if name == "Gemma2" else {}
    patched, plain = pair(name, **extra)
    counts = []
    for model in (patched, plain):
        with Adds() as adds:
            step(model, autocast)
        counts.append(adds.count)
    assert_same(step(patched, autocast), step(plain, autocast))
    # Each layer has a sum in forward and one of gradients in backward. Under autocast, the norm after the last
    # layer, which is not rounded, reads its sum by itself.
    assert counts[0] < counts[1]
    assert not any(next_norms.PENDING in m.__dict__ for m in patched.modules())


def test_hidden_states_and_evaluation() -> None:
    patched, plain = pair()
    ids = torch.arange(66).remainder(97).view(2, 33)
    states = [m(input_ids=ids, output_hidden_states=True).hidden_states for m in (patched, plain)]
    assert_same(list(states[0]), list(states[1]))
    with torch.no_grad():
        assert torch.equal(patched(input_ids=ids).logits, plain(input_ids=ids).logits)
    with torch.inference_mode():
        assert torch.equal(patched(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_hooks_that_change_the_sum() -> None:
    """The norm of a sum that a hook replaces or changes in place is computed anew."""

    def scaled(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return out * 2

    def in_place(_: nn.Module, __: Any, out: Tensor) -> None:
        out.data.mul_(1)  # the version does not change, and neither do the values
        with torch.no_grad():
            out.mul_(2)

    for hook in (scaled, in_place):
        patched, plain = pair()
        for model in (patched, plain):
            model.model.layers[0].register_forward_hook(hook)
        with torch.no_grad():
            expected = plain(input_ids=torch.arange(40)[None]).logits
        ours = patched(input_ids=torch.arange(40)[None]).logits
        assert torch.equal(ours, expected)


def test_hooks_of_the_next_layer_and_norm() -> None:
    patched, plain = pair()
    seen: list[str] = []
    for model in (patched, plain):
        second = model.model.layers[1]
        second.register_forward_pre_hook(lambda *_: seen.append("layer"))
        second.input_layernorm.register_forward_hook(lambda _, __, out: seen.append("norm") or 2 * out)
        model.model.norm.register_full_backward_hook(lambda *_: seen.append("backward"))
    assert_same(step(patched), step(plain))
    assert seen == 2 * ["layer", "norm", "backward"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_and_offload(reentrant: bool) -> None:
    patched, _ = pair()
    expected = step(patched)
    with shoestring.offload_activations(exclude=list(patched.parameters())):
        assert_same(step(patched), expected)
    patched.train()
    patched.gradient_checkpointing_enable({"use_reentrant": reentrant})
    patched.enable_input_require_grads()
    ids = torch.arange(66).remainder(97).view(2, 33)
    loss = patched(input_ids=ids, labels=ids).loss
    loss.backward()
    assert_same([loss.detach(), *(p.grad for p in patched.parameters())], expected)
    assert not any(next_norms.PENDING in m.__dict__ for m in patched.modules())


def test_a_norm_that_is_not_called() -> None:
    """The norm of a sum whose reader is skipped is dropped by undo(), by copies and by the next forward."""
    patched = build_decoder()
    report = shoestring.patch(patched, **PATCH)
    first, second = patched.model.layers
    x, tables = torch.randn(1, 33, 64), torch.randn(1, 33, 16)
    total = first(x, position_embeddings=(tables, tables))
    gone = weakref.ref(total)
    assert next_norms.PENDING in second.input_layernorm.__dict__
    assert next_norms.PENDING not in copy.deepcopy(second.input_layernorm).__dict__
    step(patched)
    del total
    gc.collect()
    assert gone() is None
    first(x, position_embeddings=(tables, tables))
    report.undo()
    private = (next_norms.PENDING, next_norms.NEXT)
    assert not any(name in m.__dict__ for m in patched.modules() for name in private)


@pytest.mark.parametrize("recomputed", [[0], [1], [0, 2]])
def test_a_kept_layer_before_a_recomputed_one(recomputed: list[int]) -> None:
    """The layer that is recomputed computes its first norm itself, in forward as in its recomputation."""
    patched, plain = pair(num_hidden_layers=3)
    expected = step(plain)
    assert_same(step(patched), expected)
    shoestring.checkpoint_model(patched, [f"model.layers.{i}" for i in recomputed])
    assert_same(step(patched), expected)
