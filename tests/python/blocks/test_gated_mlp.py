"""Test nn.GatedMLP against plain PyTorch and transformers, and with autocast, adapters, checkpointing."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoestring
from relative_error import relative_error
from shoestring.nn import GatedMLP

ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def make(
    activation: str = "silu", bias: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[GatedMLP, Tensor]:
    module = GatedMLP(40, 56, activation=activation, bias=bias).to(dtype)
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    return module, torch.randn(2, 9, 40).to(dtype)


def plain(module: GatedMLP, x: Tensor) -> Tensor:
    gate, up = (F.linear(x, layer.weight, layer.bias) for layer in (module.gate_proj, module.up_proj))
    return F.linear(ACTIVATIONS[module.activation](gate) * up, module.down_proj.weight, module.down_proj.bias)


def results(function: Any, module: GatedMLP, x: Tensor, upstream: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], upstream.to(y.dtype))]


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_worse_than_a_plain_composition(
    activation: str, bias: bool, dtype: torch.dtype, backend: str
) -> None:
    if dtype == torch.float64 and backend != "cpu":
        pytest.skip("fp64 is for CPU tensors")
    module, x = make(activation, bias, dtype)
    wide, upstream = copy.deepcopy(module).double(), torch.randn(x.shape)
    ours = results(module, module, x, upstream)
    eager = results(lambda x: plain(module, x), module, x, upstream)
    exact = results(lambda x: plain(wide, x), wide, x.double(), upstream)
    floor = {torch.float64: 1e-13, torch.float32: 3e-7, torch.bfloat16: 3e-3}[dtype]
    for a, b, c in zip(ours, eager, exact, strict=True):
        assert relative_error(a, c) <= max(1.5 * relative_error(b, c), floor)


@pytest.mark.parametrize(
    ("name", "activation"), [("Llama", "silu"), ("Qwen3", "silu"), ("Gemma2", "gelu_tanh")]
)
def test_transformers_weights_and_results(name: str, activation: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name + "Config")(
        hidden_size=40, intermediate_size=56, num_attention_heads=4
    )
    modeling = __import__(f"transformers.models.{name.lower()}.modeling_{name.lower()}", fromlist=["*"])
    theirs = getattr(modeling, name + "MLP")(config)
    module = GatedMLP(40, 56, activation=activation)
    module.load_state_dict(theirs.state_dict())
    x, upstream = torch.randn(3, 7, 40), torch.randn(3, 7, 40)
    for a, b in zip(results(module, module, x, upstream), results(theirs, theirs, x, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compiled_autocast_and_checkpointed(activation: str) -> None:
    module, x = make(activation)
    upstream = torch.randn(x.shape)
    expected = results(module, module, x, upstream)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    checkpointed = results(lambda x: shoestring.checkpoint(module, x), module, x, upstream)
    for a, b, c in zip(expected, results(compiled, module, x, upstream), checkpointed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert torch.equal(a, c)
    with torch.autocast("cpu", torch.bfloat16):
        y, *gradients = results(module, module, x, upstream)
    assert y.dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in gradients)
    assert all(relative_error(a, b) < 2e-2 for a, b in zip([y, *gradients], expected, strict=True))


def test_copies_files_and_the_meta_device() -> None:
    module, x = make("gelu_tanh", bias=True)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    empty = GatedMLP(40, 56, activation="gelu_tanh", bias=True, device="meta")
    assert empty(torch.randn(3, 40, device="meta")).shape == (3, 40)
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(module.state_dict())
    for other in (copy.deepcopy(module), torch.load(buffer, weights_only=False), empty):
        assert torch.equal(other(x), module(x))
    assert list(make()[0].state_dict()) == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_adapters(activation: str) -> None:
    """A GatedMLP with adapters gives the same results as plain PyTorch code that calls its three layers.

    For backward, SwiGLU saves two tensors of (18, 56) elements: gate and up. The GELU variants also save
    activation(gate) * up.
    """
    module, x = make(activation)
    shoestring.lora.apply(
        nn.ModuleDict({"mlp": module}), rank=2, target_modules=["gate_proj", "up_proj", "down_proj"]
    )
    for name, p in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    sizes: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        sizes[t.untyped_storage().data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        joined = module(x)
    assert sum(size == 18 * 56 for size in sizes.values()) == (2 if activation == "silu" else 3)

    def plain(module: Any, x: Tensor) -> Tensor:
        result: Tensor = module.down_proj(ACTIVATIONS[activation](module.gate_proj(x)) * module.up_proj(x))
        return result

    exact = plain(copy.deepcopy(module).double(), x.double())
    assert relative_error(joined, exact) <= 2 * relative_error(plain(module, x), exact)


def test_errors() -> None:
    with pytest.raises(
        ValueError, match="activation: expected 'silu', 'gelu' or 'gelu_tanh', received 'relu'"
    ):
        GatedMLP(40, 56, activation="relu")
    with pytest.raises(ValueError, match=r"x: expected \(..., 40\), received \(3, 41\)"):
        GatedMLP(40, 56)(torch.randn(3, 41))
