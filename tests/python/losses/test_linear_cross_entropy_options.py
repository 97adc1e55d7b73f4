"""Test the options of linear_cross_entropy, and the statistics that it returns beside the loss."""

from typing import Any

import pytest
import torch
from test_linear_cross_entropy import make
from torch import Tensor
from torch.nn import functional as F

import shoestring
from references.losses import cross_entropy_reference
from relative_error import relative_error
from rounding import assert_no_worse
from shoestring.losses.linear_cross_entropy import LinearCrossEntropyStats

pytestmark = pytest.mark.device

# The function resolved() replaces True by random class weights, token weights, targets and parts.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "none", "z_loss": 1e-3},
    {"z_loss": 0.5},  # the log-sum-exp is about log(vocab), so the z-loss terms matter
    {"logit_scale": -1.7, "softcap": 3.0},  # the negative logit scale reverses the order of the classes
    {"class_weights": True},
    {"class_weights": True, "label_smoothing": 0.3, "z_loss": 0.1, "logit_scale": 0.25},
    {"token_weights": True},
    {"token_weights": True, "class_weights": True, "reduction": "sum"},
    {"token_weights": True, "reduction": "none", "softcap": 2.0, "label_smoothing": 0.1},
    {"target2": True, "mix": 0.3, "label_smoothing": 0.1, "z_loss": 0.1},
    {"target2": True, "mix": True, "class_weights": True, "z_loss": 0.5},
    {"target2": True, "mix": True, "reduction": "none", "softcap": 2.0, "logit_scale": -1.7},
    {"shift": True, "token_weights": True},
    {"shift": True, "hard_fraction": 0.5, "target2": True, "mix": True},
    {"hard_fraction": 0.3},
    {"hard_fraction": 0.5, "token_weights": True, "reduction": "none"},
]
SHAPES = [
    # (2, 1, 2) has fewer classes than a SIMD register holds.
    (2, 1, 2),
    (34, 64, 257),  # one class more than a multiple of every SIMD register width
    # With 4099 classes, a workspace of 1 MiB needs several chunks, and the CPU kernel several partial sums.
    (70, 8, 4099),
]


def resolved(
    options: dict[str, Any], target: Tensor, vocab: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    found = dict(options)
    if options.get("class_weights"):
        found["class_weights"] = torch.rand(vocab, dtype=dtype)
        found["class_weights"][:: max(2, vocab // 5)] = 0
        # Tests give the last class to a token that counts, since a mean over weights of 0 is NaN.
        found["class_weights"][-1] = 3
    if options.get("token_weights"):
        found["token_weights"] = torch.rand(target.shape, dtype=dtype) * 2
        found["token_weights"].view(-1)[-1] = 0
    if options.get("target2"):
        found["target2"] = torch.randint(vocab, target.shape)
        found["target2"][torch.rand(target.shape) < 0.2] = -100
        found["target2"].view(-1)[:1] = target.view(-1)[:1]
    if options.get("mix") is True:
        found["mix"] = 0.1 + 0.9 * torch.rand(target.shape)
        found["mix"].view(-1)[2:3], found["mix"].view(-1)[3:4] = 0, 1
    return found


def stats_of(
    hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, **options: Any
) -> LinearCrossEntropyStats:
    return cross_entropy_reference(F.linear(hidden, weight, bias), target, **options)


def upstream_of(output: Tensor) -> Tensor:
    """Return an upstream gradient with a different value for each token, some negative and some positive."""
    return torch.linspace(-0.5, 2, output.numel(), dtype=torch.float64).view(output.shape).to(output.dtype)


@pytest.mark.sample(simt=16)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stats_and_their_gradients_are_no_worse_than_eager(
    capability: str, shape: tuple[int, int, int], options: dict[str, Any]
) -> None:
    hidden, weight, bias, target = make(*shape)
    target[:2] = torch.tensor([0, shape[2] - 1])
    options = resolved(options, target, shape[2])
    ours = shoestring.linear_cross_entropy_with_stats(hidden, weight, target, bias, workspace_mb=1, **options)
    alone = shoestring.linear_cross_entropy(hidden, weight, target, bias, workspace_mb=1, **options)
    assert isinstance(ours, LinearCrossEntropyStats) and torch.equal(ours.loss, alone)
    leaves = (hidden, weight, bias)
    exact_leaves = tuple(t.detach().double().requires_grad_() for t in leaves)
    exact = stats_of(*exact_leaves, target, **options)
    eager = stats_of(*leaves, target, **options)
    assert torch.equal(ours.argmax, eager.argmax)
    slack = 1e-6 if capability in ("cuda", "simt") else 3e-7
    for name in ("loss", "token_loss", "lse", "entropy"):

        def with_gradients(value: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return value, *torch.autograd.grad(value, inputs, upstream_of(value), retain_graph=True)

        sides = [
            with_gradients(getattr(stats, name), inputs)
            for stats, inputs in ((ours, leaves), (eager, leaves), (exact, exact_leaves))
        ]

        def exact_results() -> tuple[Tensor, ...]:
            stats = stats_of(*exact_leaves, target, **options)
            return with_gradients(getattr(stats, name), exact_leaves)

        names = (name, *(f"gradient of {name} in {leaf}" for leaf in ("hidden", "weight", "bias")))
        assert_no_worse(names, *sides, exact_results, 1.5, slack)


@pytest.mark.sample(simt=5)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck_of_all_statistics_together(options: dict[str, Any]) -> None:
    hidden, weight, bias, target = make(5, 3, 7, torch.float64)
    target[:2] = torch.tensor([0, 6])
    options = resolved(options, target, 7, torch.float64)

    def run(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return shoestring.linear_cross_entropy_with_stats(h, w, target, b, **options)[:4]

    assert torch.autograd.gradcheck(run, (hidden, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_with_everything(dtype: torch.dtype) -> None:
    hidden, weight, bias, target = make(40, 32, 1003, dtype)
    options = resolved(
        {"class_weights": True, "token_weights": True, "label_smoothing": 0.1, "z_loss": 0.1}, target, 1003
    )
    ours = shoestring.linear_cross_entropy(hidden, weight, target, bias, logit_scale=0.5, **options)
    exact_leaves = tuple(t.detach().double().requires_grad_() for t in (hidden, weight, bias))
    exact = stats_of(*exact_leaves, target, logit_scale=0.5, **options).loss
    assert relative_error(ours, exact) < 1e-6
    for a, b in zip(
        torch.autograd.grad(ours, (hidden, weight, bias)), torch.autograd.grad(exact, exact_leaves)
    ):
        # tolerance for one or two roundings to 16 bits
        assert relative_error(a, b) < (8e-3 if dtype == torch.bfloat16 else 1e-3)


def test_the_loss_alone_does_not_compute_logits_twice() -> None:
    """The gradients of the loss are the same bit for bit with and without statistics."""
    hidden, weight, bias, target = make(33, 16, 257)
    alone = shoestring.linear_cross_entropy(hidden, weight, target, bias)
    stats = shoestring.linear_cross_entropy_with_stats(hidden, weight, target, bias)
    for a, b in zip(*(torch.autograd.grad(x, (hidden, weight, bias)) for x in (alone, stats.loss))):
        assert torch.equal(a, b)


def test_token_weights_and_logit_scale_have_gradients() -> None:
    hidden, weight, bias, target = make(6, 4, 9, torch.float64)
    target[0] = 3
    weights = torch.rand(6, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    for reduction in ("mean", "sum", "none"):

        def run(w: Tensor, s: Tensor, h: Tensor) -> Tensor:
            options = dict(reduction=reduction, token_weights=w, logit_scale=s, softcap=2.0)
            return shoestring.linear_cross_entropy(h, weight, target, bias, **options)

        assert torch.autograd.gradcheck(run, (weights, scale, hidden))


def test_shift_is_the_slices() -> None:
    hidden, weight, bias = torch.randn(3, 8, 4, requires_grad=True), torch.randn(11, 4), torch.randn(11)
    target = torch.randint(11, (3, 8))
    target[1, 3:5] = -100
    shifted = shoestring.linear_cross_entropy(hidden, weight, target, bias, shift=True)
    sliced = shoestring.linear_cross_entropy(hidden[:, :-1], weight, target[:, 1:], bias)
    torch.testing.assert_close(shifted, sliced)
    torch.testing.assert_close(*(torch.autograd.grad(x, hidden)[0] for x in (shifted, sliced)))
    each = shoestring.linear_cross_entropy(hidden, weight, target, bias, shift=True, reduction="none")
    assert each.shape == target.shape and (each[:, -1] == 0).all()


def test_ignored_tokens_have_no_statistics_and_no_gradient() -> None:
    hidden, weight, bias, target = make(5, 4, 9, ignored=0)
    target[2] = -100
    with torch.no_grad():
        hidden[2] = float("nan")
    stats = shoestring.linear_cross_entropy_with_stats(
        hidden, weight, target, bias, reduction="none", z_loss=1.0
    )
    assert all(x[2] == 0 and x.isfinite().all() for x in stats[:4]) and stats.argmax[2] == -1
    total = sum(x.sum() for x in stats[:4])
    grads = torch.autograd.grad(total, (hidden, weight, bias))
    assert (grads[0][2] == 0).all() and all(g.isfinite().all() for g in grads)


def test_tokens_without_weight_are_a_mean_over_nothing() -> None:
    hidden, weight, bias, target = make(5, 4, 9, ignored=0)
    for options in ({"token_weights": torch.zeros(5)}, {"class_weights": torch.zeros(9)}):
        loss = shoestring.linear_cross_entropy(hidden, weight, target, bias, **options)
        assert loss.isnan()
        expected = stats_of(hidden, weight, bias, target, **options).loss
        assert expected.isnan()


def test_a_confident_row_s_entropy_is_zero_and_ruled_out_classes_do_not_show() -> None:
    hidden = torch.tensor([[300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -float("inf")])
    stats = shoestring.linear_cross_entropy_with_stats(hidden, weight, torch.tensor([0]), bias)
    assert stats.entropy == 0 and stats.lse == 300 and stats.argmax == 0
    assert all((g == 0).all() for g in torch.autograd.grad(stats.entropy.sum(), (hidden, weight)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class_weights": torch.ones(8)}, r"class_weights: expected a floating tensor of shape \[9\]"),
        ({"class_weights": torch.ones(9, dtype=torch.int64)}, "class_weights: expected a floating tensor"),
        ({"token_weights": torch.ones(5)}, r"token_weights: expected a floating tensor of shape \[6\]"),
        ({"z_loss": -1.0}, "z_loss: expected a number of at least 0, received -1"),
        ({"logit_scale": 0.0}, "logit_scale: expected a number that is not 0, received 0"),
        ({"logit_scale": float("nan")}, "logit_scale: expected a number that is not 0, received nan"),
        ({"logit_scale": torch.ones(2)}, r"logit_scale: expected a number or one element, received \(2,\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors_name_the_option(change: dict[str, Any], message: str) -> None:
    arguments = (torch.zeros(6, 4), torch.zeros(9, 4), torch.zeros(6, dtype=torch.int64))
    with pytest.raises((RuntimeError, ValueError), match=f"linear_cross_entropy: {message}"):
        shoestring.linear_cross_entropy_with_stats(*arguments, **change)


def test_opcheck_and_compile_with_everything() -> None:
    hidden, weight, bias, target = make(6, 4, 9)
    options = resolved(
        {"class_weights": True, "token_weights": True, "z_loss": 0.1, "label_smoothing": 0.1}, target, 9
    )
    target[0] = 8  # resolved() gives the last class a weight, so the mean does not divide by 0
    op = torch.ops.shoestring.linear_cross_entropy_with_stats.default
    torch.library.opcheck(op, (hidden, weight, target, bias), options)
    compiled = torch.compile(
        shoestring.linear_cross_entropy_with_stats, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for tokens in (6, 11):
        hidden, weight, bias, target = make(tokens, 4, 9)
        target[1] = 8  # the option shift leaves out the first target
        options = resolved({"class_weights": True, "token_weights": True, "z_loss": 0.1}, target, 9)
        results = [
            f(hidden, weight, target, bias, shift=True, **options)
            for f in (compiled, shoestring.linear_cross_entropy_with_stats)
        ]
        for a, b in zip(*results):
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(*(torch.autograd.grad(r.loss + r.lse.sum(), weight)[0] for r in results))
