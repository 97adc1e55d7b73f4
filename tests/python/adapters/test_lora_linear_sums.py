"""Test the products of lora_linear on the CPU that decode the weight and add the low-rank term as they sum."""

import math

import pytest
import torch
from torch import Tensor

import shoestring
from relative_error import relative_error
from shoestring.ops import LoraWeight, lora_linear_group
from thread_counts import assert_same_bits


def adapted(rows: int, columns: int, rank: int, quant_type: str = "nf4") -> tuple[LoraWeight, Tensor]:
    """Return a quantised layer with an fp32 adapter, and its dense weight in fp64."""
    weight = shoestring.quantize_4bit(torch.randn(rows, columns) / columns**0.5, quant_type, block_size=64)
    A = (torch.randn(rank, columns) / columns**0.5).requires_grad_()
    B = torch.randn(rows, rank).requires_grad_()
    return LoraWeight(weight, lora_A=A, lora_B=B, scaling=0.5), weight.dequantize(torch.float32).double()


def thread_counts(capability: str, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers of threads that give the same bits.

    Without AVX2, products are those of PyTorch's library, whose bits may depend on the number of threads.
    """
    return (2, 2) if capability == "plain" else counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_on_any_number_of_threads(capability: str, dtype: torch.dtype) -> None:
    layers = [adapted(rows, 333, 5)[0] for rows in (200, 65)]
    x = torch.randn(77, 333).to(dtype).requires_grad_()
    leaves = [x, *(t for layer in layers for t in (layer.lora_A, layer.lora_B) if t is not None)]

    def run() -> list[Tensor]:
        outputs = lora_linear_group(x, layers)
        return [*outputs, *torch.autograd.grad(sum(y.square().sum() for y in outputs), leaves)]

    assert_same_bits(run, thread_counts(capability, (1, 2, 3, 7, 2)))


# Shapes (tokens, in_features, out_features). 300 tokens of 15,000 numbers exceed the panels that threads share,
# so the sum is kept in fp32 between rounds. 600 tokens are divided into groups with AMX. In the others, tokens
# are more than the features, and rows end inside blocks of the quantised weight.
SHAPES = [(300, 15000, 320), (600, 700, 620), (130, 100, 33), (9, 65, 9)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounds_groups_and_blocks(capability: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Results are as close to fp64 as products of eager PyTorch with the dense weight in the same dtype."""
    tokens, columns, rows = shape
    weight = shoestring.quantize_4bit(torch.randn(rows, columns) / columns**0.5)
    dense = weight.dequantize(torch.float32).double()
    A, B = torch.randn(4, columns) / columns**0.5, torch.randn(rows, 4)
    gain, bias = torch.rand(rows) + 0.5, torch.randn(rows)
    x = torch.randn(tokens, columns).to(dtype).requires_grad_()
    upstream = torch.randn(tokens, rows).to(dtype)
    y = shoestring.lora_linear(x, weight, A, B, gain=gain, bias=bias)
    (grad_x,) = torch.autograd.grad(y, x, upstream)

    def reference(compute: torch.dtype, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        w, rounded = dense.to(compute), x.detach().to(compute)
        low = rounded.to(wide) @ A.to(wide).T @ B.to(wide).T
        scaled = upstream.to(wide) * gain.to(wide)
        by_w = scaled.to(compute) @ w
        by_low = scaled @ B.to(wide) @ A.to(wide)
        return (
            ((rounded @ w.T).to(wide) + low) * gain.to(wide) + bias.to(wide),
            by_w.to(wide) + by_low,
        )

    exact = reference(torch.float64, torch.float64)
    narrow = dtype == torch.bfloat16 and capability in ("avx512", "amx")
    eager = reference(dtype if narrow else torch.float32, torch.float32)
    for ours, right, theirs in zip((y, grad_x), exact, eager, strict=True):
        assert ours.dtype == dtype
        assert relative_error(ours, right) <= 1.2 * relative_error(theirs.to(dtype), right) + 2e-7


def test_fp32_adapters_of_bf16_inputs_are_exact(capability: str) -> None:
    """Products of bf16 inputs with fp32 adapters have the rounding error of fp32 products."""
    layer, _ = adapted(96, 160, 8)
    A, B = layer.lora_A, layer.lora_B
    assert A is not None and B is not None
    x, upstream = torch.randn(50, 160).bfloat16(), torch.randn(50, 96).bfloat16()
    (y,) = lora_linear_group(x, [layer])
    grad_A, grad_B = torch.autograd.grad(y, (A, B), upstream)
    exact_A = 0.5 * (upstream.double() @ B.double()).T @ x.double()
    exact_B = 0.5 * upstream.double().T @ (x.double() @ A.double().T)
    assert relative_error(grad_A, exact_A) < 1e-6
    assert relative_error(grad_B, exact_B) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# More tokens than are summed at a time, and more columns than are read in a run.
@pytest.mark.parametrize("shape", [(1, 30), (130, 33), (389, 2085)], ids=str)
def test_gradient_of_the_gain(capability: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    tokens, rows = shape
    weight, bias = torch.randn(rows, 20).to(dtype), torch.randn(rows)
    gain = (torch.rand(rows) + 0.5).requires_grad_()
    x, upstream = torch.randn(tokens, 20).to(dtype), torch.randn(tokens, rows).to(dtype)

    def run() -> Tensor:
        return shoestring.lora_linear(x, weight, None, None, bias, gain=gain)

    y = run()
    ((grad,), *_) = assert_same_bits(
        lambda: torch.autograd.grad(run(), gain, upstream), thread_counts(capability, (1, 2, 3))
    )
    exact = (upstream.double() * (y.detach().double() - bias.double())).sum(0) / gain.detach().double()
    assert relative_error(grad, exact) < 1e-6


@pytest.mark.parametrize("rank", [1, 8, 21, 22, 64, 65])
def test_few_columns_of_split_products(capability: str, rank: int) -> None:
    """Products of bf16 rows with an fp32 lora_A or lora_B are exact where they end inside tiles."""
    for tokens, columns, rows in ((9, 100, 70), (70, 65, 33)):
        A = (torch.randn(rank, columns) / columns**0.5).requires_grad_()
        B, weight = torch.randn(rows, rank).requires_grad_(), torch.zeros(rows, columns).bfloat16()
        strided = torch.randn(tokens, columns + 9).bfloat16()[:, 9:]
        upstream = torch.randn(tokens, rows).bfloat16()
        y = shoestring.lora_linear(strided, weight, A, B)
        grad_A, grad_B = torch.autograd.grad(y, (A, B), upstream)
        low, wide = strided.double() @ A.detach().double().T, upstream.double()
        assert relative_error(grad_A, (wide @ B.detach().double()).T @ strided.double()) < 1e-6
        assert relative_error(grad_B, wide.T @ low) < 1e-6


@pytest.mark.parametrize("value", [math.inf, -math.inf, 3.4e38])
def test_adapters_that_overflow(capability: str, value: float) -> None:
    """An infinite or huge number in the adapter gives infinity, as in fp32, and not NaN."""
    layer, dense = adapted(40, 64, 3)
    A, B = layer.lora_A, layer.lora_B
    assert A is not None and B is not None
    with torch.no_grad():
        B[5, 1] = value
    x = torch.randn(20, 64).bfloat16()
    (y,) = lora_linear_group(x, [layer])
    low = x.float() @ A.T
    expected = (x.float() @ dense.float().T + 0.5 * low @ B.T).bfloat16()
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)
