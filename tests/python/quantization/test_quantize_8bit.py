"""Tests of quantize_8bit and dequantize_8bit, the 8-bit codes of optimizer state."""

import pytest
import torch

from references.quantization import dequantize_8bit_reference, dynamic_map, quantize_8bit_reference
from shoestring.ops import dequantize_8bit, quantize_8bit

pytestmark = pytest.mark.device

both_maps = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
# Element counts: around a SIMD register, around one block, around many blocks, none, and enough for several
# threads.
SIZES = [1, 7, 255, 256, 257, 4095, 4097, 0, 2**16 + 3]


@both_maps
def test_codes_stand_for_bitsandbytes_values(capability: str, signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    codes = torch.arange(256, dtype=torch.uint8)
    values = dequantize_8bit(codes, torch.ones(1), signed=signed)
    assert torch.equal(values, dynamic_map(signed))
    # bitsandbytes computes its map with torch.linspace, so the last bits of its values are inexact.
    theirs = functional.create_dynamic_map(signed).to(values.device)
    torch.testing.assert_close(values, theirs, rtol=1e-6, atol=0)
    zero = 127 if signed else 0
    assert values[zero] == 0 and values[255] == 1


@both_maps
def test_encoding_is_exact_beside_every_boundary(capability: str, signed: bool) -> None:
    """Codes equal the reference at midpoints between codes, and up to four fp32 numbers to either side."""
    values = dynamic_map(signed)
    beside = [(values[1:] + values[:-1]) / 2]
    for direction in (-2.0, 2.0):
        x = beside[0]
        for _ in range(4):
            x = x.nextafter(torch.tensor(direction))
            beside.append(x)
    x = torch.cat([*beside, values, torch.logspace(-44, 0, 5000), torch.rand(20000)])
    x = x[(x.abs() <= 1) if signed else (x >= 0) & (x <= 1)]
    for scale in (1.0, 2.0**-140, 2.0**100):  # one of the scales is subnormal, and its reciprocal overflows
        full = torch.nn.functional.pad(x, (0, -len(x) % 255)).view(-1, 255)
        # Each block begins with `scale`, which is its largest element.
        full = (torch.cat([torch.ones(len(full), 1), full], 1) * scale).flatten()
        codes, scales = quantize_8bit(full, signed=signed)
        expected, expected_scales = quantize_8bit_reference(full, signed=signed)
        assert torch.equal(codes, expected) and torch.equal(scales, expected_scales)


@both_maps
def test_codes_of_random_values(capability: str, signed: bool) -> None:
    for size in SIZES:
        # Random numbers with magnitudes over about seven decades.
        x = torch.randn(size) * torch.randn(size).mul(4).exp()
        x = x if signed else x.abs()
        codes, scale = quantize_8bit(x, signed=signed)
        expected, expected_scale = quantize_8bit_reference(x, signed=signed)
        assert torch.equal(codes, expected) and torch.equal(scale, expected_scale)
        back = dequantize_8bit(codes, scale, signed=signed)
        reference = dequantize_8bit_reference(codes, scale, signed=signed)
        torch.testing.assert_close(back, reference, rtol=1e-6, atol=0)
        assert (back.sign() * x.sign() >= 0).all()
        if not signed:
            assert ((back == 0) == (x == 0)).all()


def test_codes_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    x = torch.randn(2**16)
    codes, scale = (t.cpu() for t in quantize_8bit(x, signed=True))
    x, values = x.cpu(), functional.create_dynamic_map().cpu()
    theirs, state = functional.quantize_blockwise(x, code=values, blocksize=256)
    assert torch.equal(scale, state.absmax)
    # The CPU kernel of bitsandbytes does not always take the nearest code. Where the codes differ, ours has
    # no larger error.
    scaled = x / scale.repeat_interleave(256)
    distance, their_distance = ((scaled - values[c.int()]).abs() for c in (codes, theirs))
    assert (codes != theirs).double().mean() < 5e-3 and (distance <= their_distance + 1e-7).all()


@both_maps
def test_parts_at_any_offset(signed: bool) -> None:
    """quantize_8bit gives the same codes for unaligned or strided tensors as for contiguous ones."""
    x = torch.rand(1500)
    codes, scale = quantize_8bit(x, signed=signed)
    for offset in (1, 4):
        part = torch.cat([torch.zeros(offset), x])[offset:]
        assert all(
            torch.equal(a, b) for a, b in zip(quantize_8bit(part, signed=signed), (codes, scale), strict=True)
        )
        moved = torch.cat([codes.new_zeros(offset), codes])[offset:]
        assert torch.equal(
            dequantize_8bit(moved, scale, signed=signed), dequantize_8bit(codes, scale, signed=signed)
        )
    square = x.view(30, 50).t()
    assert torch.equal(
        quantize_8bit(square, signed=signed)[0], quantize_8bit(square.contiguous(), signed=signed)[0]
    )


def test_codec_opcheck() -> None:
    torch.library.opcheck(
        torch.ops.shoestring.quantize_8bit.default, (torch.randn(3, 200),), {"signed": True}
    )
    codes = (torch.randint(256, (300,), dtype=torch.uint8), torch.rand(2))
    torch.library.opcheck(torch.ops.shoestring.dequantize_8bit.default, codes, {"signed": False})


def test_codec_errors() -> None:
    with pytest.raises(RuntimeError, match="quantize_8bit: x: expected fp32, received BFloat16"):
        quantize_8bit(torch.zeros(3).bfloat16(), signed=True)
    with pytest.raises(RuntimeError, match="dequantize_8bit: codes: expected uint8"):
        dequantize_8bit(torch.zeros(3), torch.zeros(1), signed=True)
    with pytest.raises(RuntimeError, match="dequantize_8bit: scale: expected fp32 of shape \\(1\\)"):
        dequantize_8bit(torch.zeros(3, dtype=torch.uint8), torch.zeros(2), signed=True)
