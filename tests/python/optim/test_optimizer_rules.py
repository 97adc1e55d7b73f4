"""Tests of the elementwise optimizer operators, such as adamw_, which share one implementation."""

import math

import pytest
import torch
from torch import Tensor

from optimizer_rules import ADAMW, ADEMAMIX, APPLY, EMA, LION, NESTEROV, SCHEDULE_FREE, SGD, Rule, blocks
from relative_error import relative_error

pytestmark = pytest.mark.device

# Element counts: less than a SIMD register, counts around one block of 256 and around 16 blocks, and none.
SMALL_SIZES = [1, 7, 255, 256, 257, 4095, 4097, 0]
LARGE = 2**18 + 3  # number of elements that makes the operator use several threads
TENSORS = 768  # number of tensors that one CUDA launch can step
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
EACH = [ADAMW, LION, SGD, ADEMAMIX, SCHEDULE_FREE, APPLY, EMA]
RULES = pytest.mark.parametrize("rule", [*EACH, NESTEROV], ids=lambda r: r.name)
ONE_EACH = pytest.mark.parametrize("rule", EACH, ids=lambda r: r.name)
STATES = pytest.mark.parametrize("state", ["8bit", "4bit", "bf16", "fp32"])


@pytest.mark.sample(60)
@RULES
@STATES
@DTYPES
def test_matches_the_reference(rule: Rule, capability: str, dtype: torch.dtype, state: str) -> None:
    sizes = [*SMALL_SIZES, LARGE] if dtype == torch.float32 and capability != "simt" else SMALL_SIZES
    params = [torch.randn(n).to(dtype) for n in sizes]
    expected = [p.clone() for p in params]
    ours, theirs = rule.arenas(sizes, state), rule.arenas(sizes, state)
    for step in range(3):
        grads = [torch.randn(n).to(dtype) if step != 1 or n != 255 else None for n in sizes]
        maximize = step == 2
        rule.step(params, grads, *ours, **rule.hyper, maximize=maximize)
        rule.reference(expected, grads, *theirs, **rule.hyper, maximize=maximize)
    assert torch.equal(ours[0], theirs[0])
    # The reference rounds in another order than the operator. For a few elements in a hundred thousand, a
    # moment then falls on the other side of the boundary between two codes. Squares of bf16 gradients often
    # lie exactly on a boundary between 8-bit codes. The rates are the largest means over 20 seeds, rounded up.
    rate = 2e-4 if (dtype, state) == (torch.bfloat16, "8bit") else 3e-5
    tolerance = 2 * torch.finfo(dtype).eps
    results = [(torch.cat(params), torch.cat(expected), tolerance)]
    values = zip(rule.moments, rule.values(sizes, ours), rule.values(sizes, theirs), strict=True)
    # Moments in bf16 are rounded stochastically, so they may differ from the reference by one bf16 spacing.
    for name, a, b in values:
        is_bf16 = state == "bf16" or (name in rule.long and state != "fp32")
        results.append((a, b, torch.finfo(torch.bfloat16).eps if is_bf16 else 1e-5))
    for result, reference, rtol in results:
        differ = ~torch.isclose(result, reference, rtol=rtol, atol=1e-6 * reference.abs().max().item())
        mean = rate * result.numel()
        # A Poisson variable exceeds this limit with a probability of about 1e-6.
        assert differ.sum() <= mean + 5 * math.sqrt(mean) + 2
        assert relative_error(result, reference) < max(1e-3, tolerance)


@ONE_EACH
def test_many_tensors_are_one_at_a_time(rule: Rule, capability: str) -> None:
    sizes = [3, 256, 1000, 70000, 12]
    params = [torch.randn(n) for n in sizes]
    grads = [torch.randn(n) for n in sizes]
    alone = [p.clone() for p in params]
    together = rule.arenas(sizes, "8bit")
    rule.step(params, grads, *together, **rule.hyper)
    for p, q, g, n in zip(params, alone, grads, sizes, strict=True):
        rule.step([q], [g], *rule.arenas([n], "8bit"), **rule.hyper)
        assert torch.equal(p, q)


@ONE_EACH
def test_runs_and_threads_agree_bitwise(rule: Rule, backend: str) -> None:
    def run(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        p, g, state = x.clone(), x.flip(0), rule.arenas([x.numel()], "8bit")
        for _ in range(2):
            rule.step([p], [g], *state, **rule.hyper)
        return [p, *state]

    x = torch.randn(2 ** (14 if backend == "simt" else 18) + 77)
    before = torch.get_num_threads()
    try:
        for a, b in zip(run(1), run(3), strict=True):
            assert torch.equal(a, b)
    finally:
        torch.set_num_threads(before)


@ONE_EACH
def test_strided_parameters_and_gradients(rule: Rule) -> None:
    """Optimizer state is in the logical order of a parameter's elements, for parameters of any strides."""
    weight = torch.randn(16, 8, 3, 3)
    grad = torch.randn(16, 8, 3, 3)
    plain, last = weight.clone(), weight.clone(memory_format=torch.channels_last)
    part = torch.zeros(16, 8, 3, 6)[..., ::2].copy_(weight)
    states = [rule.arenas([weight.numel()], "8bit") for _ in range(3)]
    rule.step([plain], [grad], *states[0], **rule.hyper)
    rule.step([last], [grad.clone(memory_format=torch.channels_last)], *states[1], **rule.hyper)
    rule.step([part], [grad], *states[2], **rule.hyper)
    assert torch.equal(plain, last) and torch.equal(plain, part)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*states, strict=True))


@ONE_EACH
@STATES
@DTYPES
def test_views_at_any_offset(rule: Rule, dtype: torch.dtype, state: str) -> None:
    """A step gives the same bits for unaligned parameters and gradients as for aligned ones."""
    x, g = torch.randn(2, 1000).to(dtype)
    results = []
    for offset, grad_offset in ((0, 0), (1, 1), (0, 3), (5, 0)):
        param, grad = (torch.cat([t.new_zeros(o), t])[o:] for t, o in ((x, offset), (g, grad_offset)))
        arena = rule.arenas([1000], state)
        for _ in range(2):
            rule.step([param], [grad], *arena, **rule.hyper)
        results.append([param, *arena])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True) if a is not None)


@pytest.mark.parametrize("rule", [ADAMW, LION, SGD], ids=lambda r: r.name)
def test_state_at_an_odd_address(rule: Rule, backend: str) -> None:
    """The CPU steps with state at unaligned addresses.

    CUDA operators refuse such state, since their kernels read it in vectors.
    """
    param, grad, state = torch.zeros(300), torch.ones(300), rule.arenas([300], "8bit")
    state[-2] = torch.cat([state[-2].new_zeros(1), state[-2]])[1:]
    if backend == "cpu":
        rule.step([param], [grad], *state, **rule.hyper)
        assert (param != 0).all()
        return
    name = [*rule.moments][-1]
    with pytest.raises(
        RuntimeError, match=f"{rule.name}_: {name}: expected memory aligned to 16 bytes.*call .clone()"
    ):
        rule.step([param], [grad], *state, **rule.hyper)
    assert (param == 0).all() and state[0].item() == 0


@pytest.mark.sample(5)
@ONE_EACH
@pytest.mark.parametrize("count", [TENSORS, TENSORS + 1, 2 * TENSORS + 1])
def test_more_tensors_than_a_launch_holds(rule: Rule, count: int) -> None:
    """A step on more tensors than one CUDA launch can hold equals a step on one tensor with the same blocks.

    Some of the tensors are empty, have two 256-element blocks, or have no gradient.
    """
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
    together, alone = rule.arenas(sizes, "8bit"), rule.arenas([total], "8bit")
    rule.step(params, grads, *together, **rule.hyper)
    rule.step([whole], [whole_grad], *alone, **rule.hyper)
    assert together[0].tolist() == [0.0 if i in absent else 1.0 for i in range(count)]
    used, stepped = torch.zeros(2, total, dtype=torch.bool)
    begin = 0
    for i, n in enumerate(sizes):
        codes = slice(begin, begin + n)
        used[codes], stepped[codes] = True, i not in absent
        assert torch.equal(params[i], before[i] if i in absent else whole[codes])
        begin += 256 * blocks(n)
    for name, ours, theirs in zip(rule.arena_names(), together, alone, strict=True):
        if name not in rule.moments:
            continue
        # The random bits of bf16 moments depend on the index of the parameter in the call.
        rtol = torch.finfo(torch.bfloat16).eps if name in rule.long else 0
        expected = torch.where(stepped, theirs, torch.zeros_like(theirs))
        torch.testing.assert_close(ours[used], expected[used], rtol=rtol, atol=0)


@RULES
@STATES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_in_tensors(rule: Rule, capability: str, dtype: torch.dtype, state: str) -> None:
    """Learning rate, clip factor and gradient scale in tensors give the same bits as Python numbers.

    The test uses powers of two, so that scaling does not round.
    """
    sizes, lr = [700, 3], 2.0**-7
    start = [torch.randn(n).to(dtype) for n in sizes]
    steps = [[torch.randn(n).to(dtype) for n in sizes] for _ in range(3)]

    def run(scale: float, **tensors: Tensor) -> list[Tensor]:
        params, arena = [p.clone() for p in start], rule.arenas(sizes, state)
        options = rule.hyper | {"lr": 9.0 if "lr_tensor" in tensors else lr}
        for grads in steps:
            rule.step(params, [g * scale for g in grads], *arena, **options, **tensors)
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
    ours, theirs = rule.arenas(sizes, state), rule.arenas(sizes, state)
    tensors = {"clip_coef": torch.tensor(0.3), "grad_scale": torch.tensor(3.0)}
    expected = [p.clone() for p in start]
    rule.step(clipped, steps[0], *ours, **rule.hyper, **tensors)
    rule.reference(expected, steps[0], *theirs, **rule.hyper, **tensors)
    for a, b in zip(clipped, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    # The reference multiplies by the clip factor in another order, so a moment may fall on the other side of the
    # boundary between two codes. Many bf16 gradients are equal, and quotients of two of them often are such a
    # boundary, so up to 2 % of the moments may be one code apart. The codes that are farthest apart differ by
    # 0.9 / 64 of the largest moment of a block in 8 bits, by at most a quarter of it in 4 bits, and by 2^-8 of it
    # in bf16.
    code = {"8bit": 0.9 / 64, "4bit": 0.25, "bf16": 2**-8}.get(state, 0)
    for a, b in zip(rule.values(sizes, ours), rule.values(sizes, theirs), strict=True):
        other = (a - b).abs() > 1e-3 * b.abs().max()
        assert other.sum() <= (0.02 * a.numel() if code else 0)
        assert relative_error(a[~other], b[~other]) < 1e-3
        assert (a - b).abs().max() <= (code + 1e-3) * b.abs().max()


@ONE_EACH
@STATES
def test_found_inf_skips_everything(rule: Rule, capability: str, state: str) -> None:
    sizes = [700, 3]
    params, arena = [torch.randn(n) for n in sizes], rule.arenas(sizes, state)
    # This parameter is not contiguous, so the operator steps a contiguous copy of it.
    params[0] = params[0].view(2, 350).t()
    grads = [torch.full_like(p, math.inf) for p in params]
    rule.step(params, [torch.ones_like(p) for p in params], *arena, **rule.hyper)
    before = [None if t is None else t.clone() for t in (*params, *arena)]
    for found in (1.0, math.nan):
        rule.step(params, grads, *arena, **rule.hyper, found_inf=torch.tensor(found))
    assert all(a is b or torch.equal(a, b) for a, b in zip((*params, *arena), before, strict=True))


@RULES
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_gradient_stays_in_its_block(rule: Rule, capability: str, bad: float) -> None:
    p = torch.randn(1000)
    clean, g = p.clone(), torch.randn(1000)
    bad_grad = g.clone()
    bad_grad[300] = bad  # Element 300 is in the second of four 256-element blocks.
    a, b = rule.arenas([1000], "8bit"), rule.arenas([1000], "8bit")
    for _ in range(2):
        rule.step([p], [bad_grad], *a, **rule.hyper)
        rule.step([clean], [g], *b, **rule.hyper)
    others = torch.cat([torch.arange(256), torch.arange(512, 1000)])
    assert torch.equal(p[others], clean[others]) and p[others].isfinite().all()
    assert not p[300].isfinite()
    for ours, theirs in zip(rule.values([1000], a), rule.values([1000], b), strict=True):
        assert torch.equal(ours[others], theirs[others])


@pytest.mark.sample(10)
@ONE_EACH
@STATES
def test_opcheck(rule: Rule, state: str) -> None:
    name = f"_{rule.name}_" if rule.name in ("apply", "ema") else f"{rule.name}_"  # internal operators
    operator = getattr(torch.ops.shoestring, name).default
    params = [torch.randn(300), torch.randn(4, 5)]
    grads = [torch.randn(300), None]
    numbers = {"lr_tensor": torch.tensor(1e-3), "found_inf": torch.zeros(1)}
    torch.library.opcheck(operator, (params, grads, *rule.arenas([300, 20], state)), rule.hyper | numbers)


@ONE_EACH
def test_compiles_whole_and_bumps_versions(rule: Rule) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(p: Tensor, g: Tensor, *state: Tensor) -> None:
        rule.step([p], [g], *state, **rule.hyper)

    p, g = torch.randn(300), torch.randn(300)
    q, a, b = p.clone(), rule.arenas([300], "8bit"), rule.arenas([300], "8bit")
    version = q._version
    step(p, g, *a)
    rule.step([q], [g], *b, **rule.hyper)
    assert torch.equal(p, q) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert q._version > version


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_sgd_is_torchs(capability: str, nesterov: bool, maximize: bool) -> None:
    """sgd_ with fp32 state agrees with torch.optim.SGD, also if a parameter gets its first gradient late.

    In the first step of each parameter, the momentum buffer is set to the gradient.
    """
    options = dict(
        lr=0.1, momentum=0.9, dampening=0.0 if nesterov else 0.3, weight_decay=0.05, nesterov=nesterov
    )
    ours = [torch.randn(300), torch.randn(5, 7)]
    theirs = [p.clone() for p in ours]
    state = SGD.arenas([300, 35], "fp32")
    optimizer = torch.optim.SGD(theirs, **options, maximize=maximize)
    for step in range(4):
        grads = [torch.randn(300), torch.randn(5, 7) if step > 0 else None]
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g
        optimizer.step()
        SGD.step(ours, grads, *state, **options, maximize=maximize)
    assert state[0].tolist() == [4, 3]
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    buffers = torch.cat([optimizer.state[p]["momentum_buffer"].flatten() for p in theirs])
    torch.testing.assert_close(SGD.values([300, 35], state)[0], buffers, rtol=1e-5, atol=1e-6)


@STATES
def test_lion_by_hand(capability: str, state: str) -> None:
    """lion_ gives hand-computed results.

    It moves weights by exactly lr, and keeps a weight whose gradient is zero.
    """
    p, g = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([2.0, -1e-20, 0.0])
    arena = LION.arenas([3], state)
    options = dict(lr=0.25, beta1=0.5, beta2=0.75, weight_decay=0.0)
    LION.step([p], [g], *arena, **options)
    assert p.tolist() == [0.75, 1.25, 1.0]
    assert LION.values([3], arena)[0][0] == 0.5
    # Lion's update has the sign of beta1 m + (1 - beta1) g = 0.5 * 0.5 - 0.5 * 0.25 > 0, so p[0] decreases
    # again.
    LION.step([p], [torch.tensor([-0.25, 0.0, 0.0])], *arena, **options)
    assert p[0] == 0.5 and p[2] == 1.0


@pytest.mark.parametrize("warm_up", [{}, dict(t_alpha=3, t_beta3=5)], ids=["constant", "warm up"])
def test_ademamix_is_bitsandbytes(warm_up: dict[str, int]) -> None:
    """ademamix_ agrees with the reference class of bitsandbytes during and after the warm-up.

    The class of bitsandbytes is correct for a single parameter only.
    """
    ademamix = pytest.importorskip("bitsandbytes.optim.ademamix")
    options = dict(lr=0.1, eps=1e-8, weight_decay=0.1, alpha=4.0, **warm_up)
    ours, state = [torch.randn(300)], ADEMAMIX.arenas([300], "fp32")
    theirs = [p.clone() for p in ours]
    optimizer = ademamix._ReferenceAdEMAMix(theirs, betas=(0.8, 0.9, 0.97), **options)
    for _ in range(7):
        grads = [torch.randn_like(p) for p in ours]
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g
        optimizer.step()
        ADEMAMIX.step(
            ours,
            grads,
            *state,
            **ADEMAMIX.hyper
            | {"t_alpha": None, "t_beta3": None}
            | options
            | dict(beta1=0.8, beta2=0.9, beta3=0.97),
        )
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
    slow = torch.cat([optimizer.state[q]["m1_m2"][1].flatten() for q in theirs])
    torch.testing.assert_close(ADEMAMIX.values([300], state)[1], slow, rtol=1e-5, atol=1e-6)
