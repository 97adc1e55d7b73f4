"""linear_cross_entropy of bf16 tensors at sizes for which a CPU with AMX never stores the logits.

Other CPUs compute the same cases by other kernels.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shoestring
from references.losses import cross_entropy_reference, linear_cross_entropy_reference
from relative_error import relative_error
from rounding import assert_no_worse
from thread_counts import assert_same_bits

SHAPES = [
    (64, 32, 32),  # the smallest size
    (97, 33, 131),  # no size is a multiple of a tile
    (600, 100, 4099),  # several segments, and a second piece of tokens; with 1 MiB also a second chunk
    (1201, 257, 545),
    (70, 1000, 700),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "logit_scale": 0.5},
    {"reduction": "none", "logit_scale": -1.5},
    {"z_loss": 1e-2},
]
NAMES = ("hidden", "weight", "bias")


def make(tokens: int, features: int, vocab: int) -> tuple[list[Tensor], Tensor]:
    """Return the leaves hidden, weight and bias in bf16, and targets, of which the last ten are ignored."""
    hidden = torch.randn(tokens, features).bfloat16()
    weight = (torch.randn(vocab, features) / features**0.5).bfloat16()
    bias = torch.randn(vocab).bfloat16()
    target = torch.randint(vocab, (tokens + 10,))
    target[0], target[1], target[-10:] = 0, vocab - 1, -100
    hidden = torch.cat([hidden, hidden[:10]])
    return [t.requires_grad_() for t in (hidden, weight, bias)], target


def gradients(loss: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    upstream = torch.linspace(0.5, 2, loss.numel(), dtype=torch.float64).view(loss.shape).to(loss.dtype)
    return torch.autograd.grad(loss, leaves, upstream)


@pytest.mark.sample(12)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_worse_than_eager(
    capability: str, shape: tuple[int, int, int], options: dict[str, Any], biased: bool
) -> None:
    leaves, target = make(*shape)
    leaves = leaves[: 3 if biased else 2]
    loss = shoestring.linear_cross_entropy(
        leaves[0], leaves[1], target, *leaves[2:], workspace_mb=1, **options
    )
    ours = (loss, *gradients(loss, leaves))

    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]

    def exact_results() -> tuple[Tensor, ...]:
        exact = linear_cross_entropy_reference(*exact_leaves[:2], target, *exact_leaves[2:], **options)
        return exact, *gradients(exact, exact_leaves)

    eager_leaves = [t.detach().float().requires_grad_() for t in leaves]
    logits = F.linear(*eager_leaves)
    logits.register_hook(lambda gradient: gradient.bfloat16().float())
    eager = cross_entropy_reference(logits, target, **options).loss
    eagers = (eager, *(g.bfloat16() for g in gradients(eager, eager_leaves)))
    names = ("loss", *NAMES[: len(leaves)])
    assert_no_worse(names, ours, eagers, exact_results(), exact_results, 1.5, 2e-7)
    assert all(g.dtype == torch.bfloat16 for g in ours[1:])


@pytest.mark.parametrize("frozen", NAMES)
def test_gradients_that_are_not_needed_change_nothing(frozen: str) -> None:
    leaves, target = make(130, 64, 700)
    everything = torch.autograd.grad(shoestring.linear_cross_entropy(*leaves[:2], target, leaves[2]), leaves)
    kept = [i for i, name in enumerate(NAMES) if name != frozen]
    leaves[NAMES.index(frozen)].requires_grad_(False)
    loss = shoestring.linear_cross_entropy(*leaves[:2], target, leaves[2])
    for i, g in zip(kept, torch.autograd.grad(loss, [leaves[i] for i in kept])):
        assert torch.equal(g, everything[i])


def test_the_number_of_threads_does_not_matter() -> None:
    leaves, target = make(700, 96, 3000)

    def run() -> list[Tensor]:
        loss = shoestring.linear_cross_entropy(*leaves[:2], target, leaves[2], workspace_mb=1)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    assert_same_bits(run, (1, 2, 3, 7, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"reduction": "none"}], ids=str)
def test_autocast_rounds_an_fp32_weight_but_not_its_gradient(
    capability: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Loss and gradient of hidden are those of the rounded weight; the gradient of the weight is fp32."""
    (hidden, weight, _), target = make(200, 64, 900)
    hidden = hidden.detach().to(dtype).requires_grad_()
    wide = (weight.detach().float() * (1 + 2.0**-12 * torch.rand(weight.shape))).requires_grad_()
    narrow = wide.detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        loss = shoestring.linear_cross_entropy(hidden, wide, target, **options)
    ours = torch.autograd.grad(loss.sum(), [hidden, wide])
    expected = shoestring.linear_cross_entropy(hidden, narrow, target, **options)
    theirs = torch.autograd.grad(expected.sum(), [hidden, narrow])
    assert torch.equal(loss, expected) and torch.equal(ours[0], theirs[0])
    assert ours[1].dtype == torch.float32 and torch.equal(ours[1].to(dtype), theirs[1])
    assert not torch.equal(ours[1], theirs[1].float())


def test_autocast_with_an_fp32_weight_compiles_whole() -> None:
    (hidden, weight, _), target = make(100, 64, 300)
    wide = weight.detach().float().requires_grad_()

    def run(hidden: Tensor, wide: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return shoestring.linear_cross_entropy(hidden, wide, target)

    loss, expected = torch.compile(run, fullgraph=True)(hidden, wide, target), run(hidden, wide, target)
    assert torch.equal(loss, expected)
    ours, theirs = (torch.autograd.grad(x, (hidden, wide)) for x in (loss, expected))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs))


def test_a_buffer_gets_the_gradient_of_an_fp32_weight() -> None:
    (hidden, weight, _), target = make(200, 64, 900)
    wide = weight.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = shoestring.linear_cross_entropy(hidden, wide, target)
        (expected,) = torch.autograd.grad(plain, wide)
        buffer = torch.full_like(wide, 0.25)
        shoestring.linear_cross_entropy(hidden, wide, target, weight_grad=buffer, upstream_grad=1.0)
    torch.testing.assert_close(buffer - 0.25, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_token_shows_and_an_ignored_one_does_not(bad: float) -> None:
    (hidden, weight, _), target = make(100, 64, 300)
    with torch.no_grad():
        hidden[2] = bad
    expected = linear_cross_entropy_reference(hidden.float(), weight.float(), target, reduction="none")
    loss = shoestring.linear_cross_entropy(hidden, weight, target, reduction="none")
    torch.testing.assert_close(loss, expected, equal_nan=True)
    (grad,) = torch.autograd.grad(loss.sum(), hidden, retain_graph=True)
    assert grad[2].isnan().all() and grad[3:].isfinite().all()
    target[2] = -100
    loss = shoestring.linear_cross_entropy(hidden, weight, target)
    assert all(g.isfinite().all() for g in (loss, *torch.autograd.grad(loss, (hidden, weight))))


def test_classes_that_a_bias_rules_out_and_huge_logits() -> None:
    """Classes with a bias of -inf fill whole tiles; other logits exceed the range of exp()."""
    (hidden, weight, bias), target = make(100, 64, 2000)
    with torch.no_grad():
        bias[:1500] = -float("inf")
        hidden *= 100
    target[:-10] = torch.randint(1500, 2000, (100,))
    leaves = [hidden, weight]
    loss = shoestring.linear_cross_entropy(hidden, weight, target, bias)
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    exact = linear_cross_entropy_reference(*exact_leaves, target, bias.double())
    assert relative_error(loss, exact) < 1e-6
    for ours, reference in zip(gradients(loss, leaves), gradients(exact, exact_leaves)):
        assert relative_error(ours, reference) < 1e-2


def test_strided_tensors() -> None:
    (hidden, weight, _), target = make(100, 64, 300)
    wide = torch.cat([weight.detach(), weight.detach()], 1)[:, :64].requires_grad_()
    turned = weight.detach().t().contiguous().t().requires_grad_()
    rows = torch.stack([hidden.detach(), hidden.detach()], 1)[:, 0].requires_grad_()
    expected = shoestring.linear_cross_entropy(hidden, weight, target)
    theirs = torch.autograd.grad(expected, (hidden, weight))
    for h, w in ((rows, wide), (hidden, turned)):
        loss = shoestring.linear_cross_entropy(h, w, target)
        torch.testing.assert_close(loss, expected)
        for a, b in zip(torch.autograd.grad(loss, (h, w)), theirs):
            assert relative_error(a, b.double()) < 4e-3


def test_logits_are_never_in_memory(capability: str) -> None:
    """On a CPU with AMX, the loss of 16,384 classes needs less memory than the logits of 300 tokens."""
    if capability != "amx":
        pytest.skip("other CPUs keep the logits of a chunk")
    hidden, weight = torch.randn(2048, 64).bfloat16(), torch.randn(16384, 64).bfloat16()
    target = torch.randint(16384, (2048,))
    with torch.profiler.profile(profile_memory=True) as profile:
        shoestring.linear_cross_entropy(hidden, weight, target)
    peak = sum(e.self_cpu_memory_usage for e in profile.key_averages() if e.self_cpu_memory_usage > 0)
    assert peak < 4 * 300 * 16384
