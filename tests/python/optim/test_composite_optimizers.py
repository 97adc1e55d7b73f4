"""Tests of the optimizer operators that call other operators for one parameter at a time, such as muon_."""

import math

import pytest
import torch
from torch import Tensor

from composite_rules import DTYPES, RULES, STATES, Run, product_error, randn, shapes, skip_ties
from optimizer_rules import STATE_BLOCK, Rule, blocks
from references.optim import join, split
from relative_error import relative_error

pytestmark = pytest.mark.device


@pytest.mark.sample(simt=36)
@RULES
@STATES
@DTYPES
def test_matches_the_reference(
    rule: Rule, capability: str, dtype: torch.dtype, state: str, backend: str
) -> None:
    skip_ties(rule, state, backend)
    start = randn(rule, dtype)
    ours, theirs = Run(rule, start, state), Run(rule, start, state, reference=True)
    for step in range(3):
        grads: list[Tensor | None] = randn(rule, dtype)
        if step == 1:
            grads[1] = None
        for run in (ours, theirs):
            run.step(grads, maximize=step == 2)
    assert torch.equal(ours.arenas[0], theirs.arenas[0])
    for p, q, s in zip(ours.params, theirs.params, start, strict=True):
        if p.numel() == 0:
            continue
        way = q.float() - s.float()
        # The allowed error is the error of the updates, plus one rounding of the weight for each of the three
        # steps.
        allowed = product_error(rule) + 3 * torch.finfo(dtype).eps * q.float().norm() / way.norm()
        if state == "bf16":  # one element of a moment may be rounded to the other side
            allowed += torch.finfo(torch.bfloat16).eps / q.numel() ** 0.5
        assert relative_error(p.float() - s.float(), way) < allowed
    # The moments differ from the reference in the last bit. In a few elements of a thousand, this changes the
    # code or the stochastic rounding by one step.
    for a, b in zip(
        rule.values(ours.sizes, ours.arenas), rule.values(ours.sizes, theirs.arenas), strict=True
    ):
        assert relative_error(a, b) < 1e-3
    for name, extra in ours.extras.items():
        for a, b in zip(extra, theirs.extras[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-9)


@RULES
@STATES
def test_a_remainder_is_an_fp32_weight(rule: Rule, capability: str, state: str) -> None:
    """bf16 weights with remainders get the same bits and state as fp32 weights that take the same steps.

    The gradients are fp32 in two of three steps, and bf16 in the other.
    """
    masters = Run(rule, randn(rule), state)
    remainder = torch.zeros(STATE_BLOCK * sum(map(blocks, masters.sizes)), dtype=torch.int16)
    weights, views, begin = [], [], 0
    for p in masters.params:
        weight, rest = split(p.flatten())
        views.append(remainder[begin : begin + p.numel()])
        views[-1].copy_(rest)
        weights.append(weight.view(p.shape))
        begin += STATE_BLOCK * blocks(p.numel())
    halves = Run(rule, weights, state)
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        grads = randn(rule, dtype)
        masters.step(grads)
        halves.step(grads, weight_remainder=remainder)
        for w, view, master in zip(halves.params, views, masters.params, strict=True):
            assert torch.equal(join(w.flatten(), view).view(w.shape), master)
    assert all(torch.equal(a, b) for a, b in zip(halves.arenas, masters.arenas, strict=True) if a is not None)


@RULES
def test_stochastic_rounding(rule: Rule, capability: str) -> None:
    """Stochastic rounding of updated weights picks one of the two nearest bf16 values, and is unbiased.

    A call with a single parameter rounds it to the same bits as a call with all parameters. The operator's
    argument `numbers` must then hold the index of the parameter.
    """
    start, grads = randn(rule, torch.bfloat16), randn(rule, torch.bfloat16)
    # Set eps1, since its default depends on the dtype of the weight.
    own = {"eps1": 1e-3} if rule.extra else {}
    options = dict(stochastic_rounding=True, seed=11, **own)
    together = Run(rule, start, options=options).step(grads)
    exact = Run(rule, [p.float() for p in start], options=own).step(grads)
    above = total = 0
    for p, q in zip(together.params, exact.params, strict=True):
        size = q.abs().bfloat16()
        spacing = torch.nextafter(size, torch.tensor(math.inf).bfloat16()).float() - size.float()
        assert ((p.float() - q).abs() <= spacing * 1.001).all()
        above += (p.float() > q).sum().item()
        total += (p.float() != q).sum().item()
    assert abs(above - total / 2) < 2.5 * math.sqrt(total)  # 5 sigma
    for i, p in enumerate(start):
        alone = Run(rule, [p], options=options | dict(numbers=[i])).step([grads[i]])
        # The operator computes norms and means of one parameter at a time, so they do not depend on the other
        # parameters.
        assert torch.equal(alone.params[0], together.params[i])


@RULES
@STATES
def test_numbers_in_tensors(rule: Rule, capability: str, state: str, backend: str) -> None:
    """Learning rate, clip factor and gradient scale in tensors give the same bits as Python numbers.

    The test uses powers of two, so that scaling does not round.
    """
    start, lr = randn(rule), 2.0**-4
    steps = [randn(rule) for _ in range(2)]

    def run(scale: float, **tensors: Tensor) -> Run:
        options = {"lr": 9.0 if "lr_tensor" in tensors else lr, **tensors}
        found = Run(rule, start, state, options=options)
        for grads in steps:
            found.step([g * scale for g in grads])
        return found

    plain = run(1)
    assert plain.same_as(run(1, lr_tensor=torch.tensor(lr)))
    assert plain.same_as(run(2.0**10, grad_scale=torch.tensor([2.0**10])))
    assert plain.same_as(run(8, clip_coef=torch.tensor(0.125), found_inf=torch.tensor(0.0)))
    both = dict(clip_coef=torch.tensor(0.5), grad_scale=torch.tensor(2.0), lr_tensor=torch.tensor([[lr]]))
    assert plain.same_as(run(4, **both))
    skip_ties(rule, state, backend)
    ours, theirs = Run(rule, start, state), Run(rule, start, state, reference=True)
    odd = dict(clip_coef=torch.tensor(0.3), grad_scale=torch.tensor(3.0), lr_tensor=torch.tensor(0.03))
    for run_ in (ours, theirs):
        run_.step(steps[0], **odd)
    for a, b in zip(
        rule.values(ours.sizes, ours.arenas), rule.values(ours.sizes, theirs.arenas), strict=True
    ):
        assert relative_error(a, b) < 1e-3
    for p, q, s in zip(ours.params, theirs.params, start, strict=True):
        # Both new parameters are rounded, with errors of at most half a unit in the last place each. So the
        # change of a parameter has a large relative error if it is tiny, such as the change of a mean.
        rounding = torch.finfo(p.dtype).eps * p.norm() / (q - s).norm().clamp_min(1e-6)
        assert relative_error(p - s, q - s) < product_error(rule) + 1e-5 + rounding


@RULES
@STATES
@pytest.mark.parametrize("found", [1.0, math.nan])
def test_found_inf_skips_everything(rule: Rule, capability: str, found: float, state: str) -> None:
    run = Run(rule, randn(rule), state).step(randn(rule))
    sums = torch.ones(STATE_BLOCK * sum(map(blocks, run.sizes)))
    before = [t.clone() for t in run.tensors()]
    bad = [torch.full(s, math.inf) for s in shapes(rule)]
    run.step(bad, found_inf=torch.tensor(found), accumulated=sums)
    assert all(torch.equal(a, b) for a, b in zip(run.tensors(), before, strict=True))
    assert (sums == 0).all()


@RULES
@pytest.mark.parametrize("sum_", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_accumulated_gradients(rule: Rule, capability: str, sum_: torch.dtype) -> None:
    start, grads = randn(rule, torch.bfloat16), randn(rule, torch.bfloat16)
    begins = [
        STATE_BLOCK * sum(blocks(math.prod(s)) for s in shapes(rule)[:i]) for i in range(len(grads) + 1)
    ]
    accumulated = torch.zeros(begins[-1], dtype=sum_)
    sums = []
    for g, b in zip(grads, begins, strict=False):
        part = accumulated[b : b + g.numel()].copy_(torch.randn(g.numel()))
        sums.append(g.float() + part.float().view(g.shape))
    ours = Run(rule, start).step(grads, accumulated=accumulated)
    assert ours.same_as(Run(rule, start).step(sums))
    assert (accumulated == 0).all()


@RULES
def test_strided_parameters_and_gradients(rule: Rule) -> None:
    start, grads = randn(rule), randn(rule)
    plain = Run(rule, start).step(grads)
    strided = Run(rule, start)
    strided.params = [p.mT.contiguous().mT if p.dim() > 1 else p for p in start]
    strided.step([torch.stack([g, g], -1)[..., 0] for g in grads])
    # Norms and means are summed in memory order, so results of strided tensors may differ in the last bits.
    for p, q in zip(plain.params, strided.params, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@RULES
def test_runs_agree_bitwise_and_versions_rise(rule: Rule) -> None:
    start, grads = randn(rule), randn(rule)
    runs = [Run(rule, start).step(grads).step(grads) for _ in range(2)]
    assert runs[0].same_as(runs[1])
    assert all(p._version >= 2 for p in runs[0].params)


@pytest.mark.sample(3)
@RULES
def test_opcheck_and_compile(rule: Rule) -> None:
    operator = getattr(torch.ops.shoestring, f"{rule.name}_").default
    start, grads = randn(rule), randn(rule)
    run = Run(rule, start)
    numbers = {"lr_tensor": torch.tensor(1e-3), "found_inf": torch.zeros(1)}
    arenas = run.arenas if rule.moments else [*run.arenas, None, None]
    torch.library.opcheck(operator, (run.params, grads, *arenas), run.extras | rule.hyper | numbers)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(
        params: list[Tensor], grads: list[Tensor], arenas: list[Tensor], extras: dict[str, list[Tensor]]
    ) -> None:
        rule.step(params, grads, *arenas, **extras, **rule.hyper)

    compiled, plain = Run(rule, start), Run(rule, start).step(grads)
    step(compiled.params, grads, compiled.arenas, compiled.extras)
    assert compiled.same_as(plain)


@RULES
def test_requires_no_grad(rule: Rule) -> None:
    run = Run(rule, randn(rule))
    run.params[0].requires_grad_()
    with pytest.raises(
        RuntimeError, match=f"{rule.name}_: params: a step on parameters that require gradients"
    ):
        run.step(randn(rule))
