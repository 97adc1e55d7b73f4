"""Tests of compress_gradient_ and decompress_mean_, the codecs of gradients on slow links."""

import pytest
import torch
from torch import Tensor

from references.quantization import CODECS, compress_gradient_reference, decompress_mean_reference
from shoestring.ops import compress_gradient_, compressed_gradient_bytes, decompress_mean_

pytestmark = pytest.mark.device

all_bits = pytest.mark.parametrize("bits", [8, 4, 1])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Element counts: none, around a SIMD register, around one and two blocks, enough for several threads.
SIZES = [0, 1, 7, 127, 128, 129, 255, 256, 257, 511, 4097, 2**17 + 3]


def compress(error: Tensor, gradient: Tensor, bits: int) -> Tensor:
    codes = torch.empty(compressed_gradient_bytes(gradient.numel(), bits=bits), dtype=torch.uint8)
    compress_gradient_(error, gradient, codes, bits=bits)
    return codes


def decompress(codes: Tensor, numel: int, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.empty(numel, dtype=dtype)
    decompress_mean_(out, codes, bits=bits)
    return out


def same(x: Tensor, y: Tensor) -> bool:
    """Return whether two fp32 tensors have the same bits, except that all NaN count as equal."""
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(
        x.nan_to_num(7).view(torch.int32), y.nan_to_num(7).view(torch.int32)
    )


def wide(size: int, seed: int = 0) -> Tensor:
    """Return random numbers with magnitudes over about seven decades."""
    generator = torch.Generator().manual_seed(size + seed)
    return torch.randn(size, generator=generator) * torch.randn(size, generator=generator).mul(3).exp()


@all_bits
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_codes_and_errors_are_those_of_the_reference(capability: str, bits: int, dtype: torch.dtype) -> None:
    for size in SIZES:
        gradient = wide(size).clamp(-6e4, 6e4).to(dtype)
        error = wide(size, 1)
        expected_codes, expected_error = compress_gradient_reference(error, gradient, bits=bits)
        codes = compress(error, gradient, bits)
        assert torch.equal(codes, expected_codes), size
        assert same(error, expected_error), size
        for ranks in (1, 2, 3, 5):
            rows = torch.stack([compress(wide(size, r), gradient, bits) for r in range(ranks)])
            expected = decompress_mean_reference(rows, numel=size, bits=bits)
            assert same(decompress(rows, size, bits, dtype).float(), expected.to(dtype).float()), size


@all_bits
def test_ties_and_every_code(capability: str, bits: int) -> None:
    """Elements on and beside the boundaries of codes round as in the reference."""
    block, _, levels = CODECS[bits]
    codes = torch.arange(-levels, levels + 1).float()
    x = torch.cat([codes, codes[:-1] + 0.5, torch.tensor([0.0, -0.0, float(levels), -float(levels)])])
    x = torch.nn.functional.pad(x, (0, -x.numel() % (block - 1))).view(-1, block - 1)
    x = torch.nn.functional.pad(x, (1, 0), value=float(levels)).flatten()
    for factor in (1.0, 1.5, 2.0**-70, 2.0**100, 0.7):
        for direction in (None, -torch.inf, torch.inf):
            moved = x * factor if direction is None else (x * factor).nextafter(torch.tensor(direction))
            error = torch.zeros_like(moved)
            expected_codes, expected_error = compress_gradient_reference(error, moved, bits=bits)
            assert torch.equal(compress(error, moved, bits), expected_codes)
            assert same(error, expected_error)
    if bits > 1:  # all codes occur
        integers = decompress(compress(torch.zeros_like(x), x, bits)[None], x.numel(), bits)
        assert integers.round().unique().numel() == 2 * levels + 1


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_sent_and_what_is_left_add_up_exactly(capability: str, bits: int) -> None:
    """The values of codes and the subtraction are exact for gradients of any magnitude."""
    for seed in range(20):
        scale = 2.0 ** torch.randint(-125, 120, (1,), generator=torch.Generator().manual_seed(seed)).item()
        gradient = wide(4096, seed).clamp(-64, 64) * scale
        error = torch.zeros(4096)
        sent = decompress(compress(error, gradient, bits)[None], 4096, bits)
        assert torch.equal(sent.double() + error.double(), gradient.double())
        block, _, levels = CODECS[bits]
        top = gradient.view(-1, block).abs().amax(1, keepdim=True)
        assert (
            error.view(-1, block).abs() <= torch.where(top < 2.0**-100, top, top / (2 * levels) * 1.0001)
        ).all()


@all_bits
def test_sum_of_many_steps(capability: str, bits: int) -> None:
    """The codes of all steps and the last error are the sum of all gradients."""
    steps, size = 200, 1000
    # Integers times a power of two: their sums are exact, so with 8 and 4 bits everything is.
    generator = torch.Generator().manual_seed(3)
    gradients = torch.randint(-8, 9, (steps, size), generator=generator) / 1024.0
    error, sent = torch.zeros(size), torch.zeros(size, dtype=torch.float64)
    for gradient in gradients:
        before = error.double() + gradient.double()
        sent += decompress(compress(error, gradient, bits)[None], size, bits).double()
        # Each step rounds the sum of error and gradient once; with 1 bit, the subtraction rounds, too.
        assert before.abs().max() < 2
    rounding = steps * 2 * 2.0**-24 * 2
    torch.testing.assert_close(sent + error.double(), gradients.double().sum(0), rtol=0, atol=rounding)
    assert error.abs().max() <= {8: 0.02, 4: 0.02, 1: 0.5}[bits]


@all_bits
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf, 3e38], ids=str)
def test_non_finite_gradients_stay_visible(capability: str, bits: int, wrong: float) -> None:
    """They make their block NaN, and neither other blocks nor later steps."""
    block = CODECS[bits][0]
    size = 3 * block - 5
    for at in (0, block - 1, block + 3, size - 1):
        gradient, error = wide(size).clamp(-100, 100), wide(size, 1).clamp(-100, 100)
        expected = error.clone()
        compress(expected, gradient, bits)
        gradient[at] = wrong
        codes, wanted = compress_gradient_reference(error, gradient, bits=bits)
        found = compress(error, gradient, bits)
        assert torch.equal(found, codes) and same(error, wanted)
        inside = torch.zeros(size, dtype=torch.bool)
        inside[at // block * block : at // block * block + block] = True
        values = decompress(found[None], size, bits)
        assert values[inside].isnan().all() and values[~inside].isfinite().all()
        assert (error[inside] == 0).all() and torch.equal(error[~inside], expected[~inside])
        mean = decompress(
            torch.stack([compress(torch.zeros(size), torch.ones(size), bits), found]), size, bits
        )
        assert mean[inside].isnan().all() and mean[~inside].isfinite().all()


@all_bits
def test_tiny_gradients_stay_in_the_error(capability: str, bits: int) -> None:
    gradient = torch.full((300,), 1e-40)
    error = torch.zeros(300)
    values = decompress(compress(error, gradient, bits)[None], 300, bits)
    assert torch.equal(values + error, gradient)
    zeros = decompress(compress(torch.zeros(300), torch.zeros(300), bits)[None], 300, bits)
    assert torch.equal(zeros, torch.zeros(300))


@all_bits
def test_layouts(bits: int) -> None:
    """Strided gradients, unaligned views, longer rows and other shapes give the codes of contiguous tensors."""
    gradient = wide(30 * 50).view(30, 50)
    expected_error = torch.zeros(30, 50)
    expected = compress(expected_error, gradient.t().contiguous(), bits)
    error = torch.zeros(50, 30)
    assert torch.equal(compress(error, gradient.t(), bits), expected)
    assert torch.equal(error.flatten(), expected_error.flatten())
    for offset in (1, 3):
        moved = torch.cat([torch.zeros(offset), gradient.t().flatten()])[offset:]
        error = torch.zeros(1500 + offset)[offset:]
        assert torch.equal(compress(error, moved, bits), expected)
        assert torch.equal(error, expected_error.flatten())
        for dtype in DTYPES:
            out = torch.empty(1500 + offset, dtype=dtype)[offset:]
            longer = torch.nn.functional.pad(expected, (0, offset))[None]
            decompress_mean_(out, longer, bits=bits)
            assert torch.equal(out, decompress(expected[None], 1500, bits, dtype))
        shifted = torch.cat([expected.new_zeros(offset), expected])[offset:][None]
        assert torch.equal(decompress(shifted, 1500, bits), decompress(expected[None], 1500, bits))
    columns = torch.stack([expected, expected], 1).t()
    assert torch.equal(decompress(columns, 1500, bits), decompress(expected[None], 1500, bits))


def test_bytes() -> None:
    """A parameter takes 1.016, 0.531 or 0.141 bytes."""
    for bits, share in ((8, 1.015625), (4, 0.53125), (1, 0.140625)):
        assert compressed_gradient_bytes(1 << 20, bits=bits) == share * (1 << 20)
        assert compressed_gradient_bytes(0, bits=bits) == 0
        assert compressed_gradient_bytes(1, bits=bits) == CODECS[bits][1]


@all_bits
def test_opcheck(bits: int) -> None:
    operators = torch.ops.shoestring
    codes = torch.zeros(compressed_gradient_bytes(300, bits=bits), dtype=torch.uint8)
    options = {"bits": bits}
    torch.library.opcheck(
        operators.compress_gradient_.default, (torch.zeros(300), torch.randn(300), codes), options
    )
    compress_gradient_(torch.zeros(300), torch.randn(300), codes, bits=bits)
    torch.library.opcheck(operators.decompress_mean_.default, (torch.zeros(300), codes[None]), options)


@pytest.mark.sample(simt=0)  # what Inductor compiles is the same for emulated kernels
def test_compiled() -> None:
    @torch.compile(fullgraph=True, dynamic=True)
    def round_trip(error: Tensor, gradient: Tensor, codes: Tensor) -> Tensor:
        torch.ops.shoestring.compress_gradient_(error, gradient, codes, bits=8)
        out = torch.empty_like(gradient)
        torch.ops.shoestring.decompress_mean_(out, codes[None], bits=8)
        return out + error

    for size in (300, 700):
        gradient = torch.randn(size)
        codes = torch.zeros(compressed_gradient_bytes(size, bits=8), dtype=torch.uint8)
        assert torch.equal(round_trip(torch.zeros(size), gradient, codes), gradient)


def test_errors() -> None:
    error, gradient = torch.zeros(300), torch.zeros(300)
    codes = torch.zeros(520, dtype=torch.uint8)

    def refused(error: Tensor, gradient: Tensor, codes: Tensor, bits: int = 8) -> str:
        with pytest.raises((RuntimeError, ValueError)) as found:
            compress_gradient_(error, gradient, codes, bits=bits)
        return str(found.value).splitlines()[0]

    assert refused(error, gradient.int(), codes) == (
        "compress_gradient_: gradient: expected fp32, bf16 or fp16, received Int. Convert it, or leave it uncompressed."
    )
    assert refused(error, gradient, codes, 2) == "compress_gradient_: bits: expected 8, 4 or 1, received 2"
    assert refused(error.half(), gradient, codes) == (
        "compress_gradient_: error: expected contiguous fp32 with 300 elements, as gradient has, received Half [300]"
    )
    assert "error: expected contiguous fp32 with 300" in refused(error[1:], gradient, codes)
    assert refused(error, gradient, codes[1:]) == (
        "compress_gradient_: codes: expected contiguous uint8 of shape (520) for 300 elements in 8 bits, received "
        "Byte [519]"
    )
    with pytest.raises(
        RuntimeError, match=r"decompress_mean_: codes: expected uint8 of shape \(ranks, 520 or more\)"
    ):
        decompress_mean_(gradient, codes, bits=8)
    with pytest.raises(
        RuntimeError, match="decompress_mean_: out: expected fp32, bf16 or fp16, received Long"
    ):
        decompress_mean_(gradient.long(), codes[None], bits=8)
    with pytest.raises(RuntimeError, match="decompress_mean_: out: expected a contiguous tensor"):
        decompress_mean_(torch.zeros(20, 30).t(), codes[None], bits=8)
    with pytest.raises(ValueError, match="compressed_gradient_bytes: bits: expected 8, 4 or 1, received 3"):
        compressed_gradient_bytes(1, bits=3)
    with pytest.raises(ValueError, match="numel: expected at least 0, received -1"):
        compressed_gradient_bytes(-1, bits=8)
