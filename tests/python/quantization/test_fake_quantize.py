"""Fake quantisation: its values are those of quantising and dequantising, its gradient is straight-through."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shoestring
from references.quantization import fake_quantize_reference, int4_scales
from shoestring.quantization.quantize_4bit import code_values

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("nf4", "fp4", "int4", "int8")
# Formats of the tests that are not about sizes: every type, and double quantisation.
FORMS = (
    ("nf4", None, False),
    ("fp4", 128, False),
    ("int4", 32, False),
    ("int8", None, False),
    ("nf4", 64, True),
)
# The CPU handles 4096 elements at a time, a CUDA thread block 8192 of NF4 and half a warp a block of int4.
SIZES = (1, 7, 33, 100, 4096, 4097, 8192 + 2048 + 5)
# Row lengths for int8: short rows, of which the CPU handles several at a time, rows around its 4096 elements
# and around the 4096 that a CUDA thread block keeps in registers.
COLUMNS = (1, 7, 64, 100, 1000, 2056, 4096, 4096 + 3, 4096 + 8)


def values(n: int, dtype: torch.dtype, special: int) -> Tensor:
    """Return normal numbers in which one run of ``special`` elements each is zero, tiny, huge or not finite."""
    x = torch.randn(n)
    changes = (
        lambda t: t * 0,
        lambda t: t * 1e-30,
        lambda t: t * 1e-39,
        lambda t: t * 1e4,
        lambda t: t * 0 + 1.5,
    )
    for i, change in enumerate(changes):
        part = slice(i * special, (i + 1) * special)
        x[part] = change(x[part])
    for i, wrong in enumerate((float("inf"), -float("inf"), float("nan"))):
        if n > (6 + i) * special + 3:
            x[(6 + i) * special + 3] = wrong
    return x.to(dtype)


def quantized(x: Tensor, kind: str, block: int | None, double_quant: bool = False) -> Tensor:
    """Quantise and dequantise x by the project's operators for stored weights."""
    if kind == "int8":
        return shoestring.quantize_int8(x).dequantize()
    return shoestring.quantize_4bit(x, kind, block or 64, double_quant).dequantize()


def bits(x: Tensor) -> Tensor:
    """Return the elements as integers, in which zeros differ by their signs; every NaN is the same number."""
    integer = torch.int32 if x.dtype == torch.float32 else torch.int16
    return torch.where(x.isnan(), torch.full_like(x, torch.nan), x).view(integer)


def assert_bits(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    assert torch.equal(bits(a), bits(b))


@pytest.mark.device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.sample(6, simt=3)
@pytest.mark.parametrize("block", [32, 64, 256, 512, 1024, 4096])
@pytest.mark.parametrize("kind", ["nf4", "fp4", "int4"])
def test_values_are_those_of_the_stored_weight(
    capability: str, kind: str, block: int, dtype: torch.dtype
) -> None:
    for n in SIZES:
        x = values(n, dtype, min(block, 200))
        y = shoestring.fake_quantize(x, kind, block)
        assert_bits(y, quantized(x, kind, block))


@pytest.mark.device
def test_a_short_last_block_of_tiny_numbers(capability: str) -> None:
    """The scale of an incomplete last block is at least 1e-38, which matters for numbers that are smaller."""
    for kind in ("nf4", "fp4", "int4"):
        for tiny in (0, 1e-39, 1e-30):
            x = torch.randn(64 + 33)
            x[64:] *= tiny
            assert_bits(shoestring.fake_quantize(x, kind), quantized(x, kind, 64))


@pytest.mark.device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_values_are_those_of_the_stored_weight(capability: str, dtype: torch.dtype) -> None:
    for columns in COLUMNS:
        x = values(23 * columns, dtype, columns).view(23, columns)
        assert_bits(shoestring.fake_quantize(x, "int8"), quantized(x, "int8", None))


@pytest.mark.device
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_reference(capability: str, form: tuple[str, int | None, bool]) -> None:
    """Values and gradients equal those of the reference in plain PyTorch."""
    for dtype in DTYPES:
        x = values(40 * 96, dtype, 96).view(40, 96).requires_grad_()
        y, expected = shoestring.fake_quantize(x, *form), fake_quantize_reference(x, *form)
        assert torch.allclose(y, expected, rtol=0, atol=0, equal_nan=True), dtype
        upstream = torch.randn_like(y)
        (a,), (b,) = (torch.autograd.grad(t, x, upstream) for t in (y, expected))
        assert torch.equal(a, b) and torch.equal(a, upstream)


def test_double_quant_is_that_of_the_stored_weight(capability: str) -> None:
    for kind, block in (("nf4", 64), ("fp4", 32), ("nf4", 4096)):
        for dtype in DTYPES:
            for n in (1, 33, 70_001):
                x = torch.randn(n).to(dtype)
                assert_bits(shoestring.fake_quantize(x, kind, block, True), quantized(x, kind, block, True))


@pytest.mark.device
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradient_is_straight_through(form: tuple[str, int | None, bool]) -> None:
    """Every element receives the gradient of its quantised value, however often it is differentiated."""
    x = torch.randn(8, 64, requires_grad=True)
    y = shoestring.fake_quantize(x, *form)
    upstream = torch.randn(64, 8).t()  # strides that are not those of x
    assert torch.equal(torch.autograd.grad(y, x, upstream, retain_graph=True)[0], upstream)
    # d/dx sum(y^3) is 3 y^2, and its derivative 6 y: the second pass differentiates through y again.
    (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 3 * y.square(), rtol=1e-6, atol=0)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * y, rtol=1e-6, atol=0)
    with torch.no_grad():
        assert not shoestring.fake_quantize(x, *form).requires_grad
    assert not shoestring.fake_quantize(x.detach(), *form).requires_grad


@pytest.mark.device
def test_nothing_is_saved_for_backward() -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        shoestring.fake_quantize(torch.randn(8, 64, requires_grad=True))
    assert not saved


@pytest.mark.device
def test_scales_by_the_largest_magnitude_clip_nothing() -> None:
    """With NF4, FP4 and int8, an element differs from its value by half the widest gap at most, at the ends too."""
    x = torch.randn(64, 256)
    for kind in ("nf4", "fp4", "int8"):
        rows = x if kind == "int8" else x.view(-1, 64)
        top = rows.abs().amax(1, keepdim=True)
        gap = 1 / 127 if kind == "int8" else float(code_values(kind).sort().values.diff().max())
        y = shoestring.fake_quantize(x, kind).view_as(rows)
        assert ((y - rows).abs() <= top * gap / 2 * (1 + 1e-5)).all(), kind
        assert (y.abs() <= top).all(), kind


def test_int4_may_clip_and_passes_the_gradient() -> None:
    """The fit of int4 leaves some extremes outside its grid. They receive their gradient like all others."""
    x = torch.randn(1 << 16)
    x[::200] *= 6
    x.requires_grad_()
    scale, offset = int4_scales(shoestring.quantize_4bit(x, "int4").absmax)
    code = (x.detach().view(-1, 64) - offset.unsqueeze(1)) / scale.unsqueeze(1)
    outside = (code < -8.5) | (code > 7.5)
    assert outside.any()
    shoestring.fake_quantize(x, "int4").sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.device
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_strides_dimensions_and_nothing(form: tuple[str, int | None, bool]) -> None:
    x = torch.randn(96, 40).t()
    y = shoestring.fake_quantize(x, *form)
    assert y.is_contiguous() and torch.equal(y, shoestring.fake_quantize(x.contiguous(), *form))
    experts = torch.randn(3, 5, 64)[:, ::2]
    assert torch.equal(
        shoestring.fake_quantize(experts, *form), shoestring.fake_quantize(experts.clone(), *form)
    )
    nothing = torch.empty(0, 64, requires_grad=True)
    y = shoestring.fake_quantize(nothing, *form)
    assert y.shape == (0, 64) and torch.autograd.grad(y.sum(), nothing)[0].shape == (0, 64)


@pytest.mark.device
def test_memory_that_is_not_aligned(capability: str) -> None:
    for kind in KINDS:
        for dtype in DTYPES:
            x = values(90 * 104, dtype, 104).view(90, 104)
            shifted = torch.empty(90 * 104 + 1, dtype=dtype)[1:].view(90, 104).copy_(x)
            assert_bits(shoestring.fake_quantize(shifted, kind), shoestring.fake_quantize(x, kind))


@pytest.mark.alone
def test_allocates_only_its_result() -> None:
    """No codes are held: at the peak, tensors take as many bytes as the argument and the result."""
    x = torch.randn(256, 1024)
    with shoestring.host_allocator() as allocator:
        for kind in KINDS:
            before = allocator.stats().allocated
            allocator.reset_peaks()
            y = shoestring.fake_quantize(x, kind)
            assert allocator.stats().peak_allocated - before == y.nbytes, kind
            del y


def test_any_number_of_threads() -> None:
    x = torch.randn(3000, 101)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, before):
        torch.set_num_threads(threads)
        results.append([shoestring.fake_quantize(x, kind) for kind in KINDS])
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.device
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_opcheck_and_compile(form: tuple[str, int | None, bool]) -> None:
    op = torch.ops.shoestring.fake_quantize.default
    options = dict(zip(("quant_type", "block_size", "double_quant"), form, strict=True))
    for x in (torch.randn(5, 64), torch.randn(5, 64, requires_grad=True)):
        # Gradients of a step function cannot be compared with finite differences, so opcheck compares traces.
        torch.library.opcheck(op, (x,), options)

    def loss(x: Tensor) -> Tensor:
        return (shoestring.fake_quantize(torch.tanh(x), *form) * 2).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = torch.randn(rows, 64, requires_grad=True)
        assert torch.equal(compiled(x), loss(x))
        (a,), (b,) = torch.autograd.grad(compiled(x), x), torch.autograd.grad(loss(x), x)
        assert torch.equal(a, b)


@pytest.mark.device
def test_autocast_keeps_the_dtype() -> None:
    x = torch.randn(8, 64)
    with torch.autocast(x.device.type, torch.bfloat16):
        y = shoestring.fake_quantize(x, "int8")
    assert torch.equal(y, shoestring.fake_quantize(x, "int8"))


@pytest.mark.device
def test_errors() -> None:
    x = torch.randn(4, 64)
    for options, message in (
        ({"quant_type": "nf5"}, "quant_type: expected 'nf4', 'fp4', 'int4' or 'int8', received 'nf5'"),
        ({"block_size": 48}, "block_size: expected a power of two from 32 to 4096, received 48"),
        (
            {"quant_type": "int8", "block_size": 64},
            "block_size and double_quant: expected None and False with",
        ),
        (
            {"quant_type": "int8", "double_quant": True},
            "block_size and double_quant: expected None and False",
        ),
        ({"quant_type": "int4", "double_quant": True}, "double_quant: expected False with quant_type 'int4'"),
    ):
        with pytest.raises(RuntimeError, match=f"fake_quantize: {message}"):
            shoestring.fake_quantize(x, **options)
    with pytest.raises(RuntimeError, match="fake_quantize: x: expected fp32, bf16 or fp16, received Double"):
        shoestring.fake_quantize(x.double())
    for empty in (torch.tensor(1.0), torch.empty(4, 0)):
        with pytest.raises(RuntimeError, match=r"fake_quantize: x: expected shape \(..., columns\) with one"):
            shoestring.fake_quantize(empty, "int8")
