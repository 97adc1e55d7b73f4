"""Optimizers that are more than a rule: calls of other operators, a parameter at a time."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from conftest import relative_error
from optimizer_rules import ADAFACTOR, ADAFACTOR_MEAN, LAMB, MUON, STATE_BLOCK, Rule, blocks
from torch import Tensor

from shoestring.ops.optimizer import join, split

pytestmark = pytest.mark.device

MATRICES = [(20, 13), (7, 40), (1, 300), (5, 1), (0, 4), (33, 33)]
ANY = [(20, 13), (300,), (3, 4, 50), (), (0, 4), (1, 1), (2, 2, 3, 3)]
SHAPES = {"muon": MATRICES, "lamb": ANY, "adafactor": ANY}
RULES = pytest.mark.parametrize(
    "rule", [MUON, LAMB, ADAFACTOR, ADAFACTOR_MEAN], ids=lambda r: r.name + "_mean" * (r is ADAFACTOR_MEAN)
)
STATES = pytest.mark.parametrize("state", ["8bit", "4bit", "bf16", "fp32"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# Of the weights' way. fp32 products: Newton-Schulz multiplies small singular values, and what was rounded, by up to
# 3.44^5 = 500. bf16 products keep 8 bits of everything.
PRODUCTS = {torch.float32: 1e-4, torch.bfloat16: 4e-2}


def shapes(rule: Rule) -> list[tuple[int, ...]]:
    return SHAPES[rule.name]


def randn(rule: Rule, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(s).to(dtype) for s in shapes(rule)]


@dataclass
class Run:
    """Parameters and their state, stepped by the operator or by its reference."""

    rule: Rule
    params: list[Tensor]
    state: str = "8bit"
    reference: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.params = [p.clone() for p in self.params]
        self.sizes = [p.numel() for p in self.params]
        self.arenas = self.rule.arenas(self.sizes, self.state)
        self.extras = self.rule.extras([p.shape for p in self.params])

    def step(self, grads: list[Tensor | None], **options: Any) -> "Run":
        step = self.rule.reference if self.reference else self.rule.step
        step(self.params, grads, *self.arenas, **self.extras, **self.rule.hyper | self.options | options)
        return self

    def tensors(self) -> list[Tensor]:
        extras = [t for some in self.extras.values() for t in some]
        return [t for t in (*self.params, *self.arenas, *extras) if t is not None]

    def same_as(self, other: "Run") -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.tensors(), other.tensors(), strict=True))


def product_error(rule: Rule) -> float:
    """Of the products that muon_ takes here; the others have sums, rounded in another order."""
    if rule is not MUON:
        return 1e-5
    x = torch.randn(64, 64)
    run = Run(MUON, [x], "fp32").step([x])
    exact = Run(MUON, [x], "fp32", reference=True).step([x])
    coarse = relative_error(run.params[0] - x, exact.params[0] - x) > 1e-3
    return PRODUCTS[torch.bfloat16 if coarse else torch.float32]


@RULES
@STATES
@DTYPES
def test_matches_the_reference(rule: Rule, capability: str, dtype: torch.dtype, state: str) -> None:
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
        # The error of three updates; a weight that is rounded to another neighbour each time.
        allowed = product_error(rule) + 3 * torch.finfo(dtype).eps * q.float().norm() / way.norm()
        assert relative_error(p.float() - s.float(), way) < allowed
    # Codes near a boundary and bits drawn for another last bit differ by a step, in a few elements of a thousand.
    for a, b in zip(rule.values(ours.sizes, ours.arenas), rule.values(ours.sizes, theirs.arenas), strict=True):
        assert relative_error(a, b) < 1e-3
    for name, extra in ours.extras.items():
        for a, b in zip(extra, theirs.extras[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-9)


@RULES
@STATES
def test_a_remainder_is_an_fp32_weight(rule: Rule, capability: str, state: str) -> None:
    """Bit for bit, state included, on gradients of both dtypes."""
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
    """To one of the two neighbours, in the mean right, and as alone with the number given."""
    start, grads = randn(rule, torch.bfloat16), randn(rule, torch.bfloat16)
    own = {"eps1": 1e-3} if rule.extra else {}  # which otherwise follows from the dtype
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
        # fp32 statistics of reductions are the same: one tensor at a time in any case.
        assert torch.equal(alone.params[0], together.params[i])


@RULES
@STATES
def test_numbers_in_tensors(rule: Rule, capability: str, state: str) -> None:
    """Powers of two, which round nothing: the same bits as with numbers, and with gradients scaled beforehand."""
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
    ours, theirs = Run(rule, start, state), Run(rule, start, state, reference=True)
    odd = dict(clip_coef=torch.tensor(0.3), grad_scale=torch.tensor(3.0), lr_tensor=torch.tensor(0.03))
    for run_ in (ours, theirs):
        run_.step(steps[0], **odd)
    for a, b in zip(rule.values(ours.sizes, ours.arenas), rule.values(ours.sizes, theirs.arenas), strict=True):
        assert relative_error(a, b) < 1e-3
    for p, q, s in zip(ours.params, theirs.params, start, strict=True):
        assert relative_error(p - s, q - s) < product_error(rule) + 1e-5


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
    begins = [STATE_BLOCK * sum(blocks(math.prod(s)) for s in shapes(rule)[:i]) for i in range(len(grads) + 1)]
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
    for p, q in zip(plain.params, strided.params, strict=True):  # sums run in memory's order
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@RULES
def test_runs_agree_bitwise_and_versions_rise(rule: Rule) -> None:
    start, grads = randn(rule), randn(rule)
    runs = [Run(rule, start).step(grads).step(grads) for _ in range(2)]
    assert runs[0].same_as(runs[1])
    assert all(p._version >= 2 for p in runs[0].params)


@RULES
def test_opcheck_and_compile(rule: Rule) -> None:
    operator = getattr(torch.ops.shoestring, f"{rule.name}_").default
    start, grads = randn(rule), randn(rule)
    run = Run(rule, start)
    numbers = {"lr_tensor": torch.tensor(1e-3), "found_inf": torch.zeros(1)}
    arenas = run.arenas if rule.moments else [*run.arenas, None, None]
    torch.library.opcheck(operator, (run.params, grads, *arenas), run.extras | rule.hyper | numbers)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(params: list[Tensor], grads: list[Tensor], arenas: list[Tensor], extras: dict[str, list[Tensor]]) -> None:
        rule.step(params, grads, *arenas, **extras, **rule.hyper)

    compiled, plain = Run(rule, start), Run(rule, start).step(grads)
    step(compiled.params, grads, compiled.arenas, compiled.extras)
    assert compiled.same_as(plain)


@RULES
def test_requires_no_grad(rule: Rule) -> None:
    run = Run(rule, randn(rule))
    run.params[0].requires_grad_()
    with pytest.raises(RuntimeError, match=f"{rule.name}_: params: a step on parameters that require gradients"):
        run.step(randn(rule))


BAD = [
    (MUON, "momentum: expected a number in", dict(momentum=1.0)),
    (MUON, "eps: expected", dict(eps=-1.0)),
    (MUON, "lr: expected", dict(lr=math.nan)),
    (MUON, "weight_decay: expected", dict(weight_decay=-1.0)),
    (MUON, "ns_coefficients: expected 3 numbers, received 2", dict(ns_coefficients=[1.0, 2.0])),
    (MUON, "ns_steps: expected a number from 1 to 99, received 0", dict(ns_steps=0)),
    (MUON, "adjust_lr_fn: expected original or match_rms_adamw, received 'x'", dict(adjust_lr_fn="x")),
    (LAMB, "beta2: expected", dict(beta2=1.0)),
    (LAMB, "eps: expected", dict(eps=-1.0)),
    (ADAFACTOR, "beta2_decay: expected a number of at most 0", dict(beta2_decay=0.8)),
    (ADAFACTOR, "eps1: expected None or", dict(eps1=-1.0)),
    (ADAFACTOR, "eps2: expected", dict(eps2=-1.0)),
    (ADAFACTOR, "d: expected a number of at least 1", dict(d=0.5)),
    (ADAFACTOR, "exp_avg: expected a tensor where beta1 is above 0, .* beta1 0.5 and None", dict(beta1=0.5)),
    (ADAFACTOR_MEAN, "exp_avg: expected a tensor where .* beta1 0 and a tensor", dict(beta1=0.0)),
    (ADAFACTOR, "row_var: expected one tensor for each of 7", dict(row_var=[])),
    (ADAFACTOR, r"col_var\[0\]: expected an fp32 tensor of shape \[1, 13\]", dict(col_var=[torch.zeros(13)] * 7)),
    (MUON, "momentum_buffer: expected a contiguous Byte", dict(momentum_buffer=torch.zeros(3))),
]


@pytest.mark.parametrize(("rule", "message", "changes"), BAD, ids=lambda x: getattr(x, "name", None))
def test_a_bad_argument(rule: Rule, message: str, changes: dict[str, Any]) -> None:
    run = Run(rule, randn(rule))
    before = [t.clone() for t in run.tensors()]
    state = dict(zip(rule.arena_names(), run.arenas, strict=True))
    arguments = {"params": run.params, "grads": randn(rule), **state, **run.extras, **rule.hyper, **changes}
    with pytest.raises(RuntimeError, match=f"{rule.name}_: {message}"):
        rule.step(**arguments)
    assert all(torch.equal(a, b) for a, b in zip(run.tensors(), before, strict=True))


@pytest.mark.parametrize("shape", [(300,), (3, 4, 5), ()])
def test_muon_takes_matrices(shape: tuple[int, ...]) -> None:
    run = Run(MUON, [torch.ones(2, 3), torch.ones(shape)])
    with pytest.raises(RuntimeError, match=r"muon_: params\[1\]: expected a matrix, received shape .*; use adamw_"):
        run.step([torch.ones(2, 3), torch.ones(shape)])
    assert (run.params[0] == 1).all() and run.arenas[0][0] == 0


def test_lamb_moves_by_a_share_of_the_norm(capability: str) -> None:
    """lr times the weights' norm, whatever the gradient's size; by lr times the update where they are zero."""
    start = [torch.randn(20, 30), torch.zeros(10)]
    run = Run(LAMB, start, options=dict(weight_decay=0.0, lr=0.01)).step([1e3 * torch.randn(20, 30), torch.ones(10)])
    torch.testing.assert_close((run.params[0] - start[0]).norm(), 0.01 * start[0].norm(), rtol=1e-4, atol=0)
    torch.testing.assert_close(run.params[1], torch.full((10,), -0.01), rtol=1e-4, atol=0)


@pytest.mark.parametrize("options", [{}, dict(eps1=1e-3, eps2=0.5, d=1.5, beta2_decay=-0.5, lr=10.0, weight_decay=0.0)])
def test_adafactor_is_torchs(capability: str, options: dict[str, float]) -> None:
    options = ADAFACTOR.hyper | options
    start = [p for p in randn(ADAFACTOR) if p.numel() > 0]
    first = Run(ADAFACTOR, start, options=options)
    theirs = [p.clone() for p in start]
    eps = (options.get("eps1"), options.get("eps2", 1e-3))
    rest = {k: v for k, v in options.items() if k not in ("eps1", "eps2")}
    optimizer = torch.optim.Adafactor(theirs, eps=eps, **rest)
    for step in range(4):
        grads = [torch.randn_like(p) * 10.0**-step for p in start]
        grads[0][3] = 0
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g
        optimizer.step()
        first.step(grads)
    for i, (p, q) in enumerate(zip(first.params, theirs, strict=True)):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
        for name, values in optimizer.state[q].items():
            if name != "step":
                torch.testing.assert_close(first.extras[name][i], values, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_is_torchs(capability: str, adjust: str, nesterov: bool) -> None:
    """Both against fp64: theirs multiplies in bf16."""
    options = dict(lr=0.1, momentum=0.8, weight_decay=0.2, nesterov=nesterov, adjust_lr_fn=adjust, ns_steps=4)
    start = [torch.randn(s) for s in [(40, 30), (16, 50)]]
    theirs = [p.clone() for p in start]
    optimizer = torch.optim.Muon(theirs, **options)
    ours, exact = (Run(MUON, start, "fp32", reference=r, options=options) for r in (False, True))
    for _ in range(3):
        grads = [torch.randn_like(p) for p in start]
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g
        optimizer.step()
        ours.step(grads)
        exact.step(grads)
    for p, t, e, s in zip(ours.params, theirs, exact.params, start, strict=True):
        error, error_of_theirs = relative_error(p - s, e - s), relative_error(t - s, e - s)
        assert error < 1.2 * error_of_theirs  # in bf16 both, they differ by chance
        assert error_of_theirs < 4e-2
    buffers = torch.cat([optimizer.state[p]["momentum_buffer"].flatten() for p in theirs])
    torch.testing.assert_close(MUON.values(ours.sizes, ours.arenas)[0], buffers, rtol=1e-5, atol=1e-6)
