"""The AdamW operator and its 8-bit codes, on every CPU capability."""

import math
from collections.abc import Sequence

import pytest
import torch
from conftest import relative_error
from torch import Tensor

from shoestring.ops import (
    adamw_,
    adamw_reference,
    dequantize_8bit,
    dequantize_8bit_reference,
    quantize_8bit,
    quantize_8bit_reference,
)
from shoestring.ops.adamw import dynamic_map

pytestmark = pytest.mark.device

OPERATOR = torch.ops.shoestring.adamw_.default
HYPER = dict(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
# A register and a block, one less and one more; a block boundary far from the start; several threads' worth; nothing.
SMALL_SIZES = [1, 7, 255, 256, 257, 4095, 4097, 0]
SIZES = [*SMALL_SIZES, 2**20 + 3]
both_maps = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def blocks(size: int) -> int:
    return -(-size // 256)


def arenas(sizes: Sequence[int], state: str) -> list[Tensor | None]:
    """step, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale of parameters that have not been stepped."""
    total = sum(map(blocks, sizes))
    if state == "fp32":
        return [torch.zeros(len(sizes)), torch.zeros(total * 256), None, torch.zeros(total * 256), None]
    codes, scale = torch.zeros(total * 256, dtype=torch.uint8), torch.zeros(total)
    return [torch.zeros(len(sizes)), codes, scale, codes.clone(), scale.clone()]


def moments(sizes: Sequence[int], arena: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """exp_avg and exp_avg_sq of all parameters, without the padding between them."""
    _, m, m_scale, v, v_scale = arena
    if m_scale is not None:
        m, v = dequantize_8bit(m, m_scale, signed=True), dequantize_8bit(v, v_scale, signed=False)
    begins = [256 * sum(map(blocks, sizes[:i])) for i in range(len(sizes))]
    kept = torch.cat([torch.arange(b, b + n) for b, n in zip(begins, sizes, strict=True)])
    return m[kept], v[kept]


@both_maps
def test_codes_stand_for_bitsandbytes_values(capability: str, signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    codes = torch.arange(256, dtype=torch.uint8)
    values = dequantize_8bit(codes, torch.ones(1), signed=signed)
    assert torch.equal(values, dynamic_map(signed))
    # bitsandbytes makes its map with torch.linspace, whose last bits are noise.
    theirs = functional.create_dynamic_map(signed)
    torch.testing.assert_close(values, theirs, rtol=1e-6, atol=0)
    zero = 127 if signed else 0
    assert values[zero] == 0 and values[255] == 1


@both_maps
def test_encoding_is_exact_beside_every_boundary(capability: str, signed: bool) -> None:
    """The middle of each two neighbours, and up to four fp32 numbers to either side, against a search of the map."""
    values = dynamic_map(signed)
    beside = [(values[1:] + values[:-1]) / 2]
    for direction in (-2.0, 2.0):
        x = beside[0]
        for _ in range(4):
            x = x.nextafter(torch.tensor(direction))
            beside.append(x)
    x = torch.cat([*beside, values, torch.logspace(-44, 0, 5000), torch.rand(20000)])
    x = x[(x.abs() <= 1) if signed else (x >= 0) & (x <= 1)]
    for scale in (1.0, 2.0**-140, 2.0**100):  # a subnormal scale's reciprocal would overflow
        full = torch.nn.functional.pad(x, (0, -len(x) % 255)).view(-1, 255)
        full = (torch.cat([torch.ones(len(full), 1), full], 1) * scale).flatten()  # a one in each block is its scale
        codes, scales = quantize_8bit(full, signed=signed)
        expected, expected_scales = quantize_8bit_reference(full, signed=signed)
        assert torch.equal(codes, expected) and torch.equal(scales, expected_scales)


@both_maps
def test_codes_of_random_values(capability: str, signed: bool) -> None:
    for size in [*SMALL_SIZES, 2**16 + 3]:
        x = torch.randn(size) * torch.randn(size).mul(4).exp()  # seven decades
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
    values = functional.create_dynamic_map()
    theirs, state = functional.quantize_blockwise(x, code=values, blocksize=256)
    codes, scale = quantize_8bit(x, signed=True)
    assert torch.equal(scale, state.absmax)
    # Its CPU path rounds approximately: where the codes differ, ours is not the worse one.
    scaled = x / scale.repeat_interleave(256)
    distance, their_distance = ((scaled - values[c.int()]).abs() for c in (codes, theirs))
    assert (codes != theirs).double().mean() < 5e-3 and (distance <= their_distance + 1e-7).all()


@pytest.mark.parametrize("state", ["8bit", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_matches_the_reference(capability: str, dtype: torch.dtype, state: str) -> None:
    sizes = SIZES if dtype == torch.float32 else SMALL_SIZES
    params = [torch.randn(n).to(dtype) for n in sizes]
    expected = [p.clone() for p in params]
    ours, theirs = arenas(sizes, state), arenas(sizes, state)
    for step in range(3):
        grads = [torch.randn(n).to(dtype) if step != 1 or n != 255 else None for n in sizes]
        maximize = step == 2
        adamw_(params, grads, *ours, **HYPER, maximize=maximize)
        adamw_reference(expected, grads, *theirs, **HYPER, maximize=maximize)
    assert torch.equal(ours[0], theirs[0])
    # Sums are rounded in another order, and where that puts a moment on the other side of a boundary a code differs by
    # one: for a few elements in a hundred thousand.
    tolerance = 2 * torch.finfo(dtype).eps
    results = [(torch.cat(params), torch.cat(expected), tolerance)]
    results += [(a, b, 1e-5) for a, b in zip(moments(sizes, ours), moments(sizes, theirs), strict=True)]
    for result, reference, rtol in results:
        differ = ~torch.isclose(result, reference, rtol=rtol, atol=1e-6 * reference.abs().max().item())
        assert differ.sum() <= 3 + 1e-4 * result.numel()
        assert relative_error(result, reference) < max(1e-3, tolerance)


def test_many_tensors_are_one_at_a_time(capability: str) -> None:
    sizes = [3, 256, 1000, 70000, 12]
    params = [torch.randn(n) for n in sizes]
    grads = [torch.randn(n) for n in sizes]
    alone = [p.clone() for p in params]
    together = arenas(sizes, "8bit")
    adamw_(params, grads, *together, **HYPER)
    for p, q, g, n in zip(params, alone, grads, sizes, strict=True):
        adamw_([q], [g], *arenas([n], "8bit"), **HYPER)
        assert torch.equal(p, q)


def test_runs_and_threads_agree_bitwise() -> None:
    def run(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        p, g, state = x.clone(), x.flip(0), arenas([x.numel()], "8bit")
        for _ in range(2):
            adamw_([p], [g], *state, **HYPER)
        return [p, *state]

    x = torch.randn(2**18 + 77)
    before = torch.get_num_threads()
    try:
        for a, b in zip(run(1), run(3), strict=True):
            assert torch.equal(a, b)
    finally:
        torch.set_num_threads(before)


def test_strided_parameters_and_gradients() -> None:
    """State follows the elements' logical order, whatever the strides."""
    weight = torch.randn(16, 8, 3, 3)
    grad = torch.randn(16, 8, 3, 3)
    plain, last = weight.clone(), weight.clone(memory_format=torch.channels_last)
    part = torch.zeros(16, 8, 3, 6)[..., ::2].copy_(weight)
    states = [arenas([weight.numel()], "8bit") for _ in range(3)]
    adamw_([plain], [grad], *states[0], **HYPER)
    adamw_([last], [grad.clone(memory_format=torch.channels_last)], *states[1], **HYPER)
    adamw_([part], [grad], *states[2], **HYPER)
    assert torch.equal(plain, last) and torch.equal(plain, part)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*states, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_gradient_stays_in_its_block(capability: str, bad: float) -> None:
    p = torch.randn(1000)
    clean, g = p.clone(), torch.randn(1000)
    bad_grad = g.clone()
    bad_grad[300] = bad  # in the second of four blocks
    a, b = arenas([1000], "8bit"), arenas([1000], "8bit")
    for _ in range(2):
        adamw_([p], [bad_grad], *a, **HYPER)
        adamw_([clean], [g], *b, **HYPER)
    others = torch.cat([torch.arange(256), torch.arange(512, 1000)])
    assert torch.equal(p[others], clean[others]) and p[others].isfinite().all()
    assert not p[300].isfinite()
    for ours, theirs in zip(moments([1000], a), moments([1000], b), strict=True):
        assert torch.equal(ours[others], theirs[others])


def test_opcheck() -> None:
    params = [torch.randn(300), torch.randn(4, 5)]
    grads = [torch.randn(300), None]
    for state in ("8bit", "fp32"):
        torch.library.opcheck(OPERATOR, (params, grads, *arenas([300, 20], state)), HYPER)
    torch.library.opcheck(torch.ops.shoestring.quantize_8bit.default, (torch.randn(3, 200),), {"signed": True})
    codes = (torch.randint(256, (300,), dtype=torch.uint8), torch.rand(2))
    torch.library.opcheck(torch.ops.shoestring.dequantize_8bit.default, codes, {"signed": False})


def test_compiles_whole_and_bumps_versions() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(p: Tensor, g: Tensor, *state: Tensor) -> None:
        adamw_([p], [g], *state, **HYPER)

    p, g = torch.randn(300), torch.randn(300)
    q, a, b = p.clone(), arenas([300], "8bit"), arenas([300], "8bit")
    version = q._version
    step(p, g, *a)
    adamw_([q], [g], *b, **HYPER)
    assert torch.equal(p, q) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert q._version > version


BAD = {
    "grads: expected one": lambda a: a["grads"].pop(),
    "grads\\[1\\]: expected the parameter's shape": lambda a: a["grads"].__setitem__(1, torch.zeros(21)),
    "grads\\[1\\]: expected the parameter's dtype": lambda a: a["grads"].__setitem__(1, torch.zeros(20).bfloat16()),
    "grads\\[1\\]: expected a dense": lambda a: a["grads"].__setitem__(1, torch.zeros(20).to_sparse()),
    "params\\[1\\]: expected fp32, bf16 or fp16": lambda a: a["params"].__setitem__(1, torch.zeros(20).double()),
    "params\\[1\\]: expected a tensor of its own": lambda a: a["params"].__setitem__(1, torch.zeros(1).expand(20)),
    "step: expected a contiguous Float tensor of shape \\(2\\)": lambda a: a.update(step=torch.zeros(3)),
    "exp_avg: expected a contiguous Byte": lambda a: a.update(exp_avg=torch.zeros(768)),
    "exp_avg_sq: expected .* shape \\(768\\)": lambda a: a.update(exp_avg_sq=a["exp_avg_sq"][:512]),
    "exp_avg_sq_scale: expected": lambda a: a.update(exp_avg_sq_scale=torch.zeros(4)),
    "exp_avg_scale and exp_avg_sq_scale: expected both .* or neither": lambda a: a.update(exp_avg_scale=None),
    "lr: expected": lambda a: a.update(lr=-1.0),
    "beta2: expected": lambda a: a.update(beta2=1.0),
    "eps: expected": lambda a: a.update(eps=math.nan),
    "weight_decay: expected": lambda a: a.update(weight_decay=-0.1),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_argument_changes_nothing(message: str) -> None:
    params = [torch.ones(300), torch.ones(20)]
    names = ("step", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
    state = dict(zip(names, arenas([300, 20], "8bit"), strict=True))
    arguments = {"params": list(params), "grads": [torch.ones(300), torch.ones(20)], **state, **HYPER}
    BAD[message](arguments)
    with pytest.raises(RuntimeError, match=f"adamw_: {message}"):
        adamw_(**arguments)
    assert all((p == 1).all() for p in params) and all((t == 0).all() for t in state.values())


def test_codec_errors() -> None:
    with pytest.raises(RuntimeError, match="quantize_8bit: x: expected fp32, received BFloat16"):
        quantize_8bit(torch.zeros(3).bfloat16(), signed=True)
    with pytest.raises(RuntimeError, match="dequantize_8bit: codes: expected uint8"):
        dequantize_8bit(torch.zeros(3), torch.zeros(1), signed=True)
    with pytest.raises(RuntimeError, match="dequantize_8bit: scale: expected fp32 of shape \\(1\\)"):
        dequantize_8bit(torch.zeros(3, dtype=torch.uint8), torch.zeros(2), signed=True)
