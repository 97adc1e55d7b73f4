"""Tests of quantize_state_4bit and dequantize_state_4bit, the 4-bit codes of optimizer state."""

import pytest
import torch
from torch import Tensor

from references.quantization import dequantize_state_4bit_reference, quantize_state_4bit_reference
from shoestring.ops import dequantize_state_4bit, quantize_state_4bit
from shoestring.quantization.quantize_state_4bit import GROUP_4BIT, map_4bit

pytestmark = pytest.mark.device

both_maps = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
roundings = pytest.mark.parametrize(
    "step", [None, 0, 7, 10**6], ids=["nearest", "step 0", "step 7", "step 10^6"]
)
# Element counts: around a SIMD register, around one block, around many blocks, none, and enough for several
# threads.
SIZES = [1, 7, 255, 256, 257, 4095, 4097, 0, 2**16 + 3]


def same(x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> bool:
    """Return whether two pairs of codes and scales are equal.

    NaN scales count as equal, whatever their bits.
    """
    return torch.equal(x[0], y[0]) and bool(((x[1] == y[1]) | (x[1].isnan() & y[1].isnan())).all())


def with_scales(x: Tensor, signed: bool, scale: float) -> Tensor:
    """Return x times ``scale``, with ``scale`` (if signed, ``-scale``) inserted in front of each group.

    Magnitudes of x must not exceed 1, so that the inserted element determines the scale of its group.
    """
    group = GROUP_4BIT[signed]
    rows = torch.nn.functional.pad(x, (0, -len(x) % (group - 1))).view(-1, group - 1)
    return (torch.cat([torch.full((len(rows), 1), -1.0 if signed else 1.0), rows], 1) * scale).flatten()


def nibbles(codes: Tensor) -> Tensor:
    """Unpack 4-bit codes, two per byte, to a tensor with one code per element."""
    return torch.stack([codes & 15, codes >> 4], 1).flatten()


@both_maps
def test_map(capability: str, signed: bool) -> None:
    codes = torch.arange(256, dtype=torch.uint8).remainder(16).view(-1, 2)
    codes = (codes[:, 0] | codes[:, 1] << 4).contiguous()
    scale = torch.full((256 // GROUP_4BIT[signed],), 3.0)
    values = dequantize_state_4bit(codes, scale, signed=signed, numel=256).view(-1, 16)
    assert (values == map_4bit(signed) * 3).all()
    k = torch.arange(16.0)
    if signed:  # signed codes are in two's complement
        k = torch.where(k < 8, k, k - 16)
        formula = k.sign() * (33 ** (k.abs() / 8) - 1) / 32
        assert map_4bit(signed)[0] == 0 and map_4bit(signed)[8] == -1
    else:
        formula = 2 ** (-13 / 16 * k)
        assert map_4bit(signed)[0] == 1
    # The kernels' piecewise linear approximation of 2^x is up to 6.2 % above 2^x. For signed codes, 1/32 is
    # then subtracted from a value of at least 1.5/32, which increases the relative error.
    torch.testing.assert_close(map_4bit(signed), formula, rtol=0.15, atol=0)
    zeros = dequantize_state_4bit(torch.zeros_like(codes), torch.zeros_like(scale), signed=signed, numel=200)
    assert torch.equal(zeros, torch.zeros(200)) and not zeros.signbit().any()


@both_maps
@roundings
def test_encoding_is_exact_beside_every_boundary(capability: str, signed: bool, step: int | None) -> None:
    """Codes equal the reference at boundaries between codes, and up to four fp32 numbers to either side."""
    values = map_4bit(signed).sort().values
    x = torch.linspace(-1 if signed else 0, 1, 100_000)
    full = with_scales(x, signed, 1.0)
    codes = nibbles(quantize_state_4bit_reference(full, signed=signed)[0])[: len(full)]
    beside = [full[1:][codes[1:] != codes[:-1]], (values[1:] + values[:-1]) / 2, values]
    for direction in (-2.0, 2.0):
        near = torch.cat(beside[:3])
        for _ in range(4):
            near = near.nextafter(torch.tensor(direction))
            beside.append(near)
    x = torch.cat([*beside, torch.logspace(-44, 0, 5000), torch.rand(20000)])
    x = x[(x.abs() <= 1) if signed else (x >= 0) & (x <= 1)]
    # One of the scales is subnormal, and its reciprocal overflows.
    for scale in (1.0, 2.0**-140, 2.0**126, 1e-30, 0.7):
        full = with_scales(x, signed, scale)
        got = quantize_state_4bit(full, signed=signed, step=step)
        assert same(got, quantize_state_4bit_reference(full, signed=signed, step=step))


@both_maps
def test_codes_are_the_nearest(capability: str, signed: bool) -> None:
    """The value of a 4-bit code has the nearest logarithm.

    Signed codes are rounded with an offset of 0.075 steps towards zero.
    """
    x = torch.cat([torch.rand(20000), torch.logspace(-6, 0, 5000)])
    codes = nibbles(quantize_state_4bit(with_scales(x, signed, 1.0), signed=signed)[0])
    full = with_scales(x, signed, 1.0)
    place = full.double().abs() + (1 / 32 if signed else 0)
    exponent = place.log2().floor()
    place = exponent + place * 2**-exponent - 1  # a piecewise linear approximation of the logarithm
    place = (place + 5) / (161 / 256) if signed else -place / (13 / 16)
    k = torch.where(codes < 8, codes.int(), 16 - codes.int()) if signed else codes
    expected = (place - 0.075 if signed else place).clamp(0, 7 if signed else 15)
    inside = full > 0
    assert ((k[: len(full)] - expected)[inside].abs() <= 0.50001).all()


@both_maps
@roundings
def test_codes_of_random_values(capability: str, signed: bool, step: int | None) -> None:
    for size in SIZES:
        # Random numbers with magnitudes over about seven decades.
        x = torch.randn(size) * torch.randn(size).mul(4).exp()
        x = x if signed else x.square()
        x[: size // 4] = 0
        codes, scale = quantize_state_4bit(x, signed=signed, step=step)
        assert same((codes, scale), quantize_state_4bit_reference(x, signed=signed, step=step))
        back = dequantize_state_4bit(codes, scale, signed=signed, numel=size)
        assert torch.equal(back, dequantize_state_4bit_reference(codes, scale, signed=signed, numel=size))
        assert (back.sign() * x.sign() >= 0).all() and ((back == 0) | (x != 0) | (not signed)).all()
        if not signed:  # a dequantised value is zero only if its whole group is zero
            assert ((back > 0) | (scale.repeat_interleave(128)[:size] == 0)).all()
        # The magnitude of a scale is the largest magnitude in its group.
        padded = torch.nn.functional.pad(x, (0, -size % 256)).view(-1, GROUP_4BIT[signed])
        assert torch.equal(scale.abs(), padded.abs().amax(1)) and not scale[scale == 0].signbit().any()
        if not signed or step is None:  # quantising dequantised values again gives the same codes
            again, _ = quantize_state_4bit(back, signed=signed, step=step)
            assert torch.equal(again, codes)


@both_maps
def test_nothing_spreads_between_groups(capability: str, signed: bool) -> None:
    """NaN, infinity, zeros and tiny or huge magnitudes affect only the codes of their own group."""
    group, x = GROUP_4BIT[signed], torch.rand(512) + 0.5
    expected = quantize_state_4bit(x, signed=signed)
    for wrong in (
        torch.nan,
        -torch.nan,
        torch.inf,
        1e-42,
        0.0,
        3e38,
        *([-torch.inf, -1e-42, -0.0] if signed else []),
    ):
        for at in (0, 256 + group - 1):
            damaged = x.clone()
            damaged[at // group * group : at // group * group + group] *= 0 if abs(wrong) < 1 else 1
            damaged[at] = wrong
            codes, scale = quantize_state_4bit(damaged, signed=signed)
            assert same((codes, scale), quantize_state_4bit_reference(damaged, signed=signed))
            others = torch.arange(len(scale)) != at // group
            assert torch.equal(scale[others], expected[1][others])
            assert torch.equal(
                nibbles(codes).view(-1, group)[others], nibbles(expected[0]).view(-1, group)[others]
            )
            own = (
                dequantize_state_4bit(codes, scale, signed=signed, numel=512)
                .view(-1, group)[~others]
                .flatten()
            )
            if wrong != wrong:
                assert scale[~others].isnan().all() and own.isnan().all()
            elif abs(wrong) == torch.inf:
                assert scale[~others].isinf().all() and not own.isfinite().logical_and(own != 0).any()
            else:
                assert own[at % group] == wrong


def test_dither_keeps_the_mean() -> None:
    """The mean of dithered codes over many steps equals the position of an element between two codes."""
    x = torch.linspace(0.003, 1, 256)
    x[0] = x[128] = 1
    codes = torch.stack(
        [nibbles(quantize_state_4bit(x, signed=False, step=s)[0]) for s in range(500, 756)]
    ).double()
    bits = 127 - x.double().log2().floor()
    place = (bits - 127 + 1 - x.double() * 2 ** (bits - 127)) / (13 / 16)
    assert (codes.mean(0) - place).abs().max() < 0.02
    # Test elements just below a value of a code, like second moments that decay in a step with a zero
    # gradient.
    x = torch.full((256,), map_4bit(False)[3].item())
    x[0] = x[128] = 1
    x[1:128] *= 1 - 0.004
    codes = torch.stack([nibbles(quantize_state_4bit(x, signed=False, step=s)[0]) for s in range(400)])[
        :, 1:128
    ]
    fell = (codes == 4).sum(0)
    assert ((codes == 3) | (codes == 4)).all() and fell.min() >= 1 and fell.max() <= 5
    assert torch.equal(
        nibbles(quantize_state_4bit(x, signed=False)[0])[1:128], torch.full((127,), 3, dtype=torch.uint8)
    )


@both_maps
def test_parts_at_any_offset(signed: bool) -> None:
    """quantize_state_4bit gives the same codes for unaligned or strided tensors as for contiguous ones."""
    x = torch.rand(1500)
    codes, scale = quantize_state_4bit(x, signed=signed)
    values = dequantize_state_4bit(codes, scale, signed=signed, numel=1500)
    for offset in (1, 4):
        part = torch.cat([torch.zeros(offset), x])[offset:]
        assert same(quantize_state_4bit(part, signed=signed), (codes, scale))
        moved = torch.cat([codes.new_zeros(offset), codes])[offset:]
        assert torch.equal(dequantize_state_4bit(moved, scale, signed=signed, numel=1500), values)
    square = x.view(30, 50).t()
    assert same(
        quantize_state_4bit(square, signed=signed), quantize_state_4bit(square.contiguous(), signed=signed)
    )


def test_codec_opcheck() -> None:
    operators = torch.ops.shoestring
    torch.library.opcheck(
        operators.quantize_state_4bit.default, (torch.randn(3, 200),), {"signed": True, "step": 3}
    )
    codes = (torch.randint(256, (256,), dtype=torch.uint8), torch.rand(4))
    torch.library.opcheck(operators.dequantize_state_4bit.default, codes, {"signed": False, "numel": 300})


def test_codec_errors() -> None:
    with pytest.raises(RuntimeError, match="quantize_state_4bit: x: expected fp32, received BFloat16"):
        quantize_state_4bit(torch.zeros(3).bfloat16(), signed=True)
    codes, scale = quantize_state_4bit(torch.ones(300), signed=True)
    with pytest.raises(
        RuntimeError, match="codes: expected uint8 of shape \\(256\\) for 300 elements, received Int"
    ):
        dequantize_state_4bit(codes.int(), scale, signed=True, numel=300)
    with pytest.raises(
        RuntimeError, match="codes: expected uint8 of shape \\(384\\) for 513 elements, received Byte"
    ):
        dequantize_state_4bit(codes, scale, signed=True, numel=513)
    with pytest.raises(
        RuntimeError, match="scale: expected fp32 of shape \\(4\\) for 300 elements, received Float"
    ):
        dequantize_state_4bit(codes, scale, signed=False, numel=300)
    with pytest.raises(RuntimeError, match="numel: expected at least 0, received -1"):
        dequantize_state_4bit(codes, scale, signed=True, numel=-1)
