import pytest
import torch
from conftest import relative_error
from torch import Tensor

import shoestring
from shoestring.ops import lora_linear_reference

pytestmark = pytest.mark.device

OPERATOR = torch.ops.shoestring.lora_linear.default
# (tokens, in, out, rank): a vector's worth; odd; rows that straddle blocks; more rows than one panel of 1 MiB.
SHAPES = [(1, 64, 32, 4), (3, 5, 7, 2), (33, 100, 70, 16), (40, 2048, 300, 8)]


def make(shape: tuple[int, int, int, int], dtype: torch.dtype, adapter: torch.dtype) -> dict[str, Tensor]:
    tokens, columns, rows, rank = shape
    return {
        "x": torch.randn(tokens, columns).to(dtype),
        "bias": torch.randn(rows).to(dtype),
        "lora_A": torch.randn(rank, columns).to(adapter) / columns**0.5,
        "lora_B": torch.randn(rows, rank).to(adapter),
        "dropped": torch.nn.functional.dropout(torch.randn(tokens, columns), 0.3).to(dtype),
    }


@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropped"])
@pytest.mark.parametrize("base", ["dense", "nf4", "nested", "int8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_worse_than_eager(capability: str, shape: tuple[int, int, int, int], base: str, dropout: bool) -> None:
    """Output and all gradients are no further from fp64 than eager PyTorch's."""
    if capability == "simt" and shape[1] > 1000:
        shape = (*shape[:2], 70, shape[3])  # 600,000 elements are slow there
    # fp32 adapters over a 16-bit base are the usual case.
    for dtype, adapter in ((torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.float16,) * 2):
        tensors = make(shape, dtype, adapter)
        if not dropout:
            del tensors["dropped"]
        weight = (torch.randn(shape[2], shape[1]) / shape[1] ** 0.5).to(dtype)
        if base == "int8":
            weight = shoestring.quantize_int8(weight)
        elif base != "dense":
            weight = shoestring.quantize_4bit(weight, nested=base == "nested")
        dense = weight if base == "dense" else weight.dequantize(torch.float32)
        upstream = torch.randn(shape[0], shape[2]).to(dtype)
        results = []
        # On CUDA the products are in dtype. With the avx512 kernels, bf16 ones are bf16 where the CPU has units for them;
        # elsewhere on the CPU they are fp32.
        narrow = capability in ("cuda", "simt") or (dtype, capability) == (torch.bfloat16, "avx512")
        eager_dtype = dtype if narrow else torch.float32
        for compute in (None, torch.float64, eager_dtype):
            leaves = {k: t.detach().to(compute or t.dtype).requires_grad_() for k, t in tensors.items()}
            if compute is None:
                y = shoestring.lora_linear(weight=weight, scaling=0.7, **leaves)
                assert y.dtype == dtype
            else:
                y = lora_linear_reference(weight=dense.to(compute), scaling=0.7, **leaves)
            results.append((y, *torch.autograd.grad(y, tuple(leaves.values()), upstream.to(y.dtype))))
        for name, ours, exact, eager in zip(("y", *tensors), *results, strict=True):
            assert ours.shape == exact.shape
            bound = 1.5 * relative_error(eager.to(ours.dtype), exact) + 2e-7
            assert relative_error(ours, exact) <= bound, (name, dtype)


@pytest.mark.parametrize("base", ["dense", "nf4", "int8"])
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropped"])
def test_gradcheck(base: str, dropout: bool) -> None:
    t = {k: v.double().requires_grad_() for k, v in make((4, 5, 6, 2), torch.float64, torch.float64).items()}
    if not dropout:
        del t["dropped"]
    weight = torch.randn(6, 5, dtype=torch.float64)
    if base == "nf4":
        weight = shoestring.quantize_4bit(weight.float(), block_size=32)
    elif base == "int8":
        weight = shoestring.quantize_int8(weight.float())
    names = tuple(t)
    assert torch.autograd.gradcheck(
        lambda *leaves: shoestring.lora_linear(weight=weight, scaling=1.3, **dict(zip(names, leaves, strict=True))),
        tuple(t.values()),
    )


def test_opcheck() -> None:
    t = {k: v.requires_grad_() for k, v in make((4, 64, 6, 2), torch.float32, torch.float32).items()}
    q = shoestring.quantize_4bit(torch.randn(6, 64))
    rest = (t["bias"], t["lora_A"], t["lora_B"])
    torch.library.opcheck(OPERATOR, (t["x"], torch.randn(6, 64), None, None, *rest), {"scaling": 2.0})
    torch.library.opcheck(OPERATOR, (t["x"], q.packed, q.absmax, None, *rest, t["dropped"]), {"scaling": 2.0})
    codes, nested = torch.ops.shoestring.quantize_absmax(q.absmax.flatten())
    int8, options = shoestring.quantize_int8(torch.randn(6, 64)), {"quant_type": "int8", "block_size": 64}
    torch.library.opcheck(OPERATOR, (t["x"], int8.packed, int8.absmax, None, *rest), options)
    detached = tuple(v.detach() for v in rest)
    torch.library.opcheck(OPERATOR, (t["x"].detach(), q.packed, codes, nested, *detached), {"scaling": 2.0})


def test_only_what_is_needed() -> None:
    """Gradients that nobody asked for are not made; x is saved once; strides and an empty batch work."""
    t = make((6, 64, 10, 4), torch.float32, torch.float32)
    weight, A, B = torch.randn(10, 64), t["lora_A"].requires_grad_(), t["lora_B"].requires_grad_()
    x = torch.randn(64, 6).t()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        y = shoestring.lora_linear(x, weight, A, B)
    assert sorted(s.numel() for s in saved) == sorted([x.numel(), 6 * 4, weight.numel(), A.numel(), B.numel()])
    expected = lora_linear_reference(x, weight, A, B)
    torch.testing.assert_close(y, expected)
    for a, b in zip(torch.autograd.grad(y.sum(), (A, B)), torch.autograd.grad(expected.sum(), (A, B)), strict=True):
        torch.testing.assert_close(a, b)
    empty = shoestring.lora_linear(torch.randn(0, 64), weight, A, B)
    assert empty.shape == (0, 10)
    assert all(not g.any() for g in torch.autograd.grad(empty.sum(), (A, B)))


def test_autocast_repeatable_and_no_double_backward() -> None:
    t = make((6, 64, 10, 4), torch.float32, torch.float32)
    weight, A, B = torch.randn(10, 64), t["lora_A"].requires_grad_(), t["lora_B"].requires_grad_()
    with torch.autocast(t["x"].device.type, torch.bfloat16):
        y = shoestring.lora_linear(t["x"], weight, A, B)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, shoestring.lora_linear(t["x"].bfloat16(), weight.bfloat16(), A, B))
    first, second = (shoestring.lora_linear(t["x"], weight, A, B) for _ in range(2))
    assert torch.equal(first, second)
    gradient = torch.autograd.grad(first.sum(), A, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="lora_linear: the backward pass is not differentiable"):
        gradient.sum().backward()


def test_errors() -> None:
    t = make((3, 64, 10, 4), torch.float32, torch.float32)
    x, A, B, weight = t["x"], t["lora_A"], t["lora_B"], torch.randn(10, 64)
    with pytest.raises(RuntimeError, match=r"lora_linear: lora_A: expected shape \(rank, 63\)"):
        shoestring.lora_linear(x[:, 1:], weight, A, B)
    with pytest.raises(RuntimeError, match=r"lora_linear: lora_B: expected shape \(out_features, 4\)"):
        shoestring.lora_linear(x, weight, A, B[:, 1:])
    with pytest.raises(RuntimeError, match=r"lora_linear: weight: expected shape \(10, 64\)"):
        shoestring.lora_linear(x, weight[1:], A, B)
    with pytest.raises(RuntimeError, match="lora_linear: weight: expected x's dtype and device"):
        shoestring.lora_linear(x, weight.bfloat16(), A, B)
    with pytest.raises(RuntimeError, match="lora_linear: weight: expected a frozen weight"):
        shoestring.lora_linear(x, weight.requires_grad_(), A, B)
