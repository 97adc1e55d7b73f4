"""Test the rule which products compute a trainable dense layer: this package's, or PyTorch's."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import shoestring
import shoestring.adapters.together


@pytest.mark.alone
def test_rule_by_measurement(capability: str) -> None:
    """Our products are chosen where they are far faster than PyTorch's, and left where they are far slower.

    Without oneDNN, PyTorch's products in bf16 take many times as long as ours. With AMX, those of oneDNN take a
    fraction of the time of our kernels without AMX.
    """

    def choice(dtype: torch.dtype) -> tuple[bool, float]:
        found: tuple[bool, float] = torch.ops.shoestring._linear_choice(dtype, torch.float32, 512, [384, 128])
        return found

    with torch.backends.mkldnn.flags(enabled=False):
        first, again = choice(torch.bfloat16), choice(torch.bfloat16)
    measures = capability in ("avx2", "avx512")
    assert first[0] == again[0] == (capability != "plain")
    assert again[1] == 0 and (first[1] == 0 or measures)
    if measures and torch.cpu._is_amx_tile_supported():
        assert not choice(torch.bfloat16)[0]
    assert not choice(torch.float16)[0]
    small = torch.ops.shoestring._linear_choice(torch.float32, torch.float32, 16, [16])
    assert tuple(small) == (False, 0.0)


def test_modules_follow_the_rule(capability: str) -> None:
    """nn.GatedMLP and nn.Attention have the bits of our products where the rule chooses them."""
    torch.manual_seed(0)
    mlp = shoestring.nn.GatedMLP(512, 384, dtype=torch.bfloat16)
    layer = shoestring.nn.Attention(512, 4, bias=True, dtype=torch.bfloat16)
    x = torch.randn(64, 512, dtype=torch.bfloat16)
    with torch.backends.mkldnn.flags(enabled=False):
        own = torch.ops.shoestring._linear_choice(torch.bfloat16, torch.bfloat16, 512, [384, 384])[0]
        assert own == (capability != "plain")
        out, projected = (
            mlp(x),
            shoestring.adapters.together.forward_together(x, [layer.q_proj, layer.k_proj]),
        )
        if not own:
            return
        gate, up = shoestring.linear_group(x, [mlp.gate_proj.weight, mlp.up_proj.weight])
        expected = shoestring.linear(shoestring.swiglu(gate, up), mlp.down_proj.weight)
        assert torch.equal(out, expected)
        both = [layer.q_proj, layer.k_proj]
        expected_both = shoestring.linear_group(x, [p.weight for p in both], [p.bias for p in both])
        assert all(torch.equal(a, b) for a, b in zip(projected, expected_both, strict=True))


def test_modules_call_layers_with_hooks() -> None:
    mlp, seen = shoestring.nn.GatedMLP(64, 96), []
    for layer in (mlp.gate_proj, mlp.down_proj):
        layer.register_forward_hook(lambda module, args, output: seen.append(module))
    mlp(torch.randn(40, 64))
    assert seen == [mlp.gate_proj, mlp.down_proj]


def test_fake_tensors_are_left_to_pytorch() -> None:
    """Products of fake tensors are PyTorch's; a measurement would time nothing."""
    mlp = shoestring.nn.GatedMLP(512, 384)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert mlp(torch.empty(64, 512)).shape == (64, 512)
