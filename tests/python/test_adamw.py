"""The AdamW operator."""

import math
from collections.abc import Sequence

import pytest
import torch
from conftest import relative_error
from torch import Tensor

from shoestring.ops import adamw_, adamw_reference, dequantize_8bit

pytestmark = pytest.mark.device

OPERATOR = torch.ops.shoestring.adamw_.default
HYPER = dict(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
# A register and a block, one less and one more; a block boundary far from the start; nothing.
SMALL_SIZES = [1, 7, 255, 256, 257, 4095, 4097, 0]
LARGE = 2**20 + 3  # several threads' worth
TENSORS = 1000  # of one CUDA launch
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
STATES = pytest.mark.parametrize("state", ["8bit", "fp32"])


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


@STATES
@DTYPES
def test_matches_the_reference(capability: str, dtype: torch.dtype, state: str) -> None:
    sizes = [*SMALL_SIZES, LARGE] if dtype == torch.float32 and capability != "simt" else SMALL_SIZES
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


def test_runs_and_threads_agree_bitwise(backend: str) -> None:
    def run(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        p, g, state = x.clone(), x.flip(0), arenas([x.numel()], "8bit")
        for _ in range(2):
            adamw_([p], [g], *state, **HYPER)
        return [p, *state]

    x = torch.randn(2 ** (14 if backend == "simt" else 18) + 77)
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


@STATES
@DTYPES
def test_views_at_any_offset(dtype: torch.dtype, state: str) -> None:
    """What lies at odd addresses, and cannot be read in vectors, is stepped to the same bits."""
    x, g = torch.randn(2, 1000).to(dtype)
    results = []
    for offset, grad_offset in ((0, 0), (1, 1), (0, 3), (5, 0)):
        param, grad = (torch.cat([t.new_zeros(o), t])[o:] for t, o in ((x, offset), (g, grad_offset)))
        arena = arenas([1000], state)
        for _ in range(2):
            adamw_([param], [grad], *arena, **HYPER)
        results.append([param, *arena])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True) if a is not None)


def test_state_at_an_odd_address(backend: str) -> None:
    """A CPU takes it; a GPU's kernel reads state in vectors, and says so."""
    param, grad, (step, m, m_scale, v, v_scale) = torch.zeros(300), torch.ones(300), arenas([300], "8bit")
    odd = torch.cat([m.new_zeros(1), v])[1:]
    if backend == "cpu":
        adamw_([param], [grad], step, m, m_scale, odd, v_scale, **HYPER)
        assert (param != 0).all()
        return
    with pytest.raises(RuntimeError, match="adamw_: exp_avg_sq: expected memory aligned to 16 bytes.*call .clone()"):
        adamw_([param], [grad], step, m, m_scale, odd, v_scale, **HYPER)
    assert (param == 0).all() and step.item() == 0


@pytest.mark.parametrize("count", [TENSORS, TENSORS + 1, 2 * TENSORS + 1])
def test_more_tensors_than_a_launch_holds(count: int) -> None:
    """The same as one tensor with a block for each; some are empty, have two blocks, or no gradient."""
    sizes = [(0, 1, 3, 300)[i % 4] if i % 50 == 0 else 1 + i % 5 for i in range(count)]
    absent = {7, 8, count - 2} | set(range(500, 600))
    total = sum(map(blocks, sizes)) * 256
    whole, whole_grad = torch.randn(2, total)
    params, grads, begin = [], [], 0
    for i, n in enumerate(sizes):
        block, block_grad = whole[begin : begin + n], whole_grad[begin : begin + n]
        params.append(block.clone())
        grads.append(None if i in absent else block_grad.clone())
        begin += 256 * blocks(n)
        whole[begin - 256 * blocks(n) + n : begin] = 0
        whole_grad[begin - 256 * blocks(n) + n : begin] = 0
    before = [p.clone() for p in params]
    together, alone = arenas(sizes, "8bit"), arenas([total], "8bit")
    adamw_(params, grads, *together, **HYPER)
    adamw_([whole], [whole_grad], *alone, **HYPER)
    assert together[0].tolist() == [0.0 if i in absent else 1.0 for i in range(count)]
    begin = 0
    for i, n in enumerate(sizes):
        codes = slice(begin, begin + n)
        assert torch.equal(params[i], before[i] if i in absent else whole[codes])
        for k in (1, 3):
            expected = torch.zeros_like(alone[k][codes]) if i in absent else alone[k][codes]
            assert torch.equal(together[k][codes], expected)
        begin += 256 * blocks(n)


@STATES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_in_tensors(capability: str, dtype: torch.dtype, state: str) -> None:
    """Powers of two, which round nothing: the same bits as with numbers, and with gradients scaled beforehand."""
    sizes, lr = [700, 3], 2.0**-7
    start = [torch.randn(n).to(dtype) for n in sizes]
    steps = [[torch.randn(n).to(dtype) for n in sizes] for _ in range(3)]

    def run(scale: float, **tensors: Tensor) -> list[Tensor]:
        params, arena = [p.clone() for p in start], arenas(sizes, state)
        options = HYPER | {"lr": 9.0 if "lr_tensor" in tensors else lr}
        for grads in steps:
            adamw_(params, [g * scale for g in grads], *arena, **options, **tensors)
        return [*params, *(t for t in arena if t is not None)]

    plain = run(1)
    for other in (
        run(1, lr_tensor=torch.tensor(lr)),
        run(2.0**10, grad_scale=torch.tensor([2.0**10])),
        run(8, clip_coef=torch.tensor(0.125), found_inf=torch.tensor(0.0)),
        run(4, clip_coef=torch.tensor(0.5), grad_scale=torch.tensor(2.0), lr_tensor=torch.tensor([[lr]])),
    ):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
    clipped = [p.clone() for p in start]
    ours, theirs = arenas(sizes, state), arenas(sizes, state)
    tensors = {"clip_coef": torch.tensor(0.3), "grad_scale": torch.tensor(3.0)}
    expected = [p.clone() for p in start]
    adamw_(clipped, steps[0], *ours, **HYPER, **tensors)
    adamw_reference(expected, steps[0], *theirs, **HYPER, **tensors)
    for a, b in zip(clipped, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    for a, b in zip(moments(sizes, ours), moments(sizes, theirs), strict=True):
        assert relative_error(a, b) < 1e-3


@STATES
def test_found_inf_skips_everything(capability: str, state: str) -> None:
    sizes = [700, 3]
    params, arena = [torch.randn(n) for n in sizes], arenas(sizes, state)
    params[0] = params[0].view(2, 350).t()  # is stepped in a copy
    grads = [torch.full_like(p, math.inf) for p in params]
    adamw_(params, [torch.ones_like(p) for p in params], *arena, **HYPER)
    before = [None if t is None else t.clone() for t in (*params, *arena)]
    for found in (1.0, math.nan):
        adamw_(params, grads, *arena, **HYPER, found_inf=torch.tensor(found))
    assert all(a is b or torch.equal(a, b) for a, b in zip((*params, *arena), before, strict=True))


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
        numbers = {"lr_tensor": torch.tensor(1e-3), "found_inf": torch.zeros(1)}
        torch.library.opcheck(OPERATOR, (params, grads, *arenas([300, 20], state)), HYPER | numbers)


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
    "lr_tensor: expected one fp32 number": lambda a: a.update(lr_tensor=torch.zeros(1).double()),
    "grad_scale: expected one fp32 number": lambda a: a.update(grad_scale=torch.ones(2)),
    "clip_coef: expected one fp32 number": lambda a: a.update(clip_coef=torch.ones(1).half()),
    "found_inf: expected one fp32 number": lambda a: a.update(found_inf=torch.ones(1, dtype=torch.bool)),
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
