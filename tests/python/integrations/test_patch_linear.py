"""shoestring.patch(linear=True) computes dense layers by linear and linear_group."""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import shoestring
from linear_calls import Calls, choose_ours
from relative_error import relative_error
from shoestring.gemm.linear import PRODUCTS
from shoestring.integrations.transformers import products
from tiny_decoder import build_decoder


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_ours(monkeypatch)


def alone(model: Any, linear: bool | None = True) -> shoestring.PatchReport:
    off = dict.fromkeys(("attention", "norms", "rope", "mlp", "embedding"), False)
    return shoestring.patch(model, linear=linear, **off)


def build_bert() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=97, **shape)).eval()


def step(model: Any) -> list[Tensor]:
    """Return the loss of a step and the gradients of all trained parameters."""
    ids = torch.arange(66).remainder(97).view(2, 33)
    loss = model(input_ids=ids, labels=ids).loss
    return [loss, *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]


def calls(model: Any) -> tuple[int, int]:
    """Return how often a forward with gradients calls linear (one layer) and linear_group (several)."""
    with Calls() as counted:
        step(model)
    return counted.linear, counted.group


# Qwen2 has biases; Gemma has another activation; Mixtral has no Llama-style MLP.
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Gemma", "Mixtral"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_same_loss_and_gradients(name: str, autocast: bool) -> None:
    extra = {"num_local_experts": 4} if name == "Mixtral" else {"head_dim": 16} if name == "Gemma" else {}
    plain, patched = build_decoder(name, **extra), build_decoder(name, **extra)
    alone(plain, linear=False)
    report = alone(patched)
    assert not report.left and "linear layers q_proj/k_proj/v_proj, o_proj" in str(report)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for ours, expected in zip(step(patched), step(plain), strict=True):
            assert ours.dtype == expected.dtype
            assert relative_error(ours, expected) <= (5e-2 if autocast else 2e-5)
    report.undo()
    assert all("Member" not in type(m).__name__ for m in patched.modules())
    assert all(
        torch.equal(a, b) for a, b in zip(step(patched), step(build_decoder(name, **extra)), strict=True)
    )


def test_one_call_for_each_group() -> None:
    model = build_decoder()
    assert calls(model) == (0, 0)
    report = shoestring.patch(model, linear=True)
    # per layer: o_proj and down_proj alone; q/k/v and gate/up as groups. A layer alone without a residual is
    # a call of linear_group in autograd.
    linear, group = calls(model)
    assert linear + group == 2 * 4
    report.undo()
    assert calls(model) == (0, 0)


def test_hooks_and_other_layers() -> None:
    """A hooked, parametrized, frozen or quantised layer, or one of another class, is called as usual."""

    class Other(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    model = build_decoder()
    layers = model.model.layers
    layers[0].self_attn.o_proj.__class__ = Other
    layers[1].mlp.down_proj.register_forward_hook(lambda *_: None)
    parametrizations.weight_norm(layers[1].self_attn.o_proj)
    expected = step(model)
    report = alone(model)
    reasons = dict(report.left)
    assert reasons["model.layers.0.self_attn.o_proj"] == "a subclass of nn.Linear"
    assert "hooks" in reasons["model.layers.1.mlp.down_proj"]
    for ours, exact in zip(step(model), expected, strict=True):
        assert relative_error(ours, exact) <= 2e-5
    # Hooks that are added later still run, on single layers and within groups.
    seen: list[str] = []
    for name in ("k_proj", "o_proj"):
        layer = layers[0].self_attn.get_submodule(name)
        layer.register_forward_pre_hook(lambda *_, name=name: seen.append(name))
    layers[0].mlp.down_proj.register_full_backward_hook(lambda *_: seen.append("backward"))
    for ours, exact in zip(step(model), expected, strict=True):
        assert relative_error(ours, exact) <= 2e-5
    assert seen == ["k_proj", "o_proj", "backward"]


def test_frozen_tied_and_quantised() -> None:
    model = build_decoder()
    model.model.layers[0].requires_grad_(False)
    a, b = model.model.layers[1].self_attn, model.model.layers[1].mlp
    a.k_proj.weight = a.v_proj.weight
    expected = step(model)
    report = alone(model)
    assert any("layers.0" in c.where and "linear layers" in c.what for c in report.changes)
    for ours, exact in zip(step(model), expected, strict=True):
        assert relative_error(ours, exact) <= 2e-5
    # A layer that gets an adapter or a quantised weight after the patch is computed as such.
    shoestring.lora.apply(model, rank=4, alpha=8, quantize="nf4")
    assert type(b.down_proj) is not nn.Linear
    loss = step(model)[0]
    report.undo()
    torch.testing.assert_close(loss, step(model)[0], rtol=1e-5, atol=1e-5)


def test_copies_pickles_and_few_tokens() -> None:
    model = build_decoder().eval()
    ids = torch.tensor([[5, 6, 7]])
    expected = model(input_ids=ids).logits
    report = alone(model)
    layer = model.model.layers[0]
    assert type(copy.deepcopy(layer.mlp)).__mro__[0] is type(build_decoder().model.layers[0].mlp)
    assert type(pickle.loads(pickle.dumps(layer.self_attn))) is type(
        build_decoder().model.layers[0].self_attn
    )
    # Generation has few tokens, and those products are left to PyTorch.
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, expected)
    report.undo()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    plain, patched = build_decoder().train(), build_decoder().train()
    alone(plain, linear=False)
    alone(patched)
    for model in (plain, patched):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    results = []
    for model in (patched, plain):
        ids = torch.arange(66).remainder(97).view(2, 33)
        model(input_ids=ids, labels=ids).loss.backward()
        results.append([p.grad for p in model.parameters()])
    for ours, expected in zip(*results, strict=True):
        assert relative_error(ours, expected) <= 2e-5


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_compiles(autocast: bool) -> None:
    model = build_decoder()
    shoestring.patch(model, linear=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = step(model)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
        for ours, exact in zip(step(compiled), expected, strict=True):
            assert relative_error(ours, exact) <= (5e-2 if autocast else 1e-5)


def test_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(products, "_measured", {})
    model = build_decoder()
    report = alone(model)
    # q/k/v, o, gate/up and down, each in fp32 and in bf16
    assert "linear layers: measured 8 groups" in report.measured and report.measured in str(report)
    faster = set(products._measured.values())
    assert all(library is None or set(library) <= set(PRODUCTS) for library in faster)
    report.undo()
    # A second model with the same shapes measures nothing.
    assert alone(build_decoder()).measured == ""


def test_each_product_by_the_faster_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of the three products choose the library of each; one of the whole group decides last."""
    monkeypatch.undo()
    monkeypatch.setattr(products, "_measured", {})
    for whole, chosen in ((0.9, ("grad_x",)), (1.1, None)):
        products._measured.clear()
        # for each group: forward, grad_x and grad_weight by the library over ours, then ours over eager
        ratios = itertools.cycle([1.2, 0.8, 1.5, whole])
        monkeypatch.setattr(products, "_ratio", lambda *_, ratios=ratios: next(ratios))
        report = alone(build_decoder())
        assert set(products._measured.values()) == {chosen}
        changed = any("linear layers" in change.what for change in report.changes)
        assert changed == (chosen is not None)
        assert {why for _, why in report.left} == (
            set() if changed else {"PyTorch's products are faster on this CPU"}
        )


@pytest.mark.parametrize(
    "ours", [(), (torch.float32,), (torch.bfloat16,), (torch.float32, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("seconds", [0.0, 0.25])
def test_choice_by_default(
    ours: tuple[torch.dtype, ...], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``linear``, the C++ library chooses which layers compute in this package. The test simulates its choice."""
    monkeypatch.setattr(products, "_choice", lambda key: (key[0] in ours, seconds))
    report = alone(build_decoder(), linear=None)
    assert ("linear layers q_proj" in str(report)) == bool(ours)
    assert bool(report.measured) == (seconds > 0) and report.measured in str(report)
    for compute in (torch.float32, torch.bfloat16):
        model = build_decoder()
        with torch.no_grad():
            shoestring.patch(model, linear=None)
        with torch.autocast("cpu", torch.bfloat16, enabled=compute == torch.bfloat16):
            linear, group = calls(model)
        assert linear + group == (2 * 4 if compute in ours else 0), compute


def test_small_layers_are_not_measured(capability: str) -> None:
    report = alone(build_decoder(), linear=None)
    assert report.measured == "" and ("linear layers" in str(report)) == (capability == "amx")


def test_bits_of_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX, the default changes no bit in fp32, and gives the same bits whatever was measured."""
    monkeypatch.setattr(products, "_choice", lambda key: (key[0] == torch.bfloat16, 0.0))
    plain, patched = build_decoder(), build_decoder()
    alone(plain, linear=False)
    alone(patched, linear=None)
    assert all(torch.equal(a, b) for a, b in zip(step(patched), step(plain), strict=True))


def test_an_output_layer_inside_a_module() -> None:
    """The loss computes BERT's output layer, so it is no linear layer of its parent; its transform is."""
    model = build_bert()
    expected = step(model)
    report = alone(model)
    changed = {change.where: change.what for change in report.changes if "linear layers" in change.what}
    assert "cls.predictions" not in changed
    assert changed["cls.predictions.transform"] == "linear layers dense"
    for ours, exact in zip(step(model), expected, strict=True):
        assert relative_error(ours, exact) <= 2e-5
    ids = torch.arange(66).remainder(97).view(2, 33)
    assert model.train()(input_ids=ids, labels=ids).logits is None
