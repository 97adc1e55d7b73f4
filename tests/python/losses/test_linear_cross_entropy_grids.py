"""Test the shapes, values and options that Cut Cross-Entropy and Liger Kernel test, with tighter tolerances.

The table shows the allowed errors. Cut Cross-Entropy allows for each element the error of a 16-bit matrix
product of the same inputs, plus the value in the table. Liger Kernel allows an absolute plus a relative error
of each element. Our tolerance is for the relative L2 error of a whole tensor against fp64.

                  Cut Cross-Entropy         Liger Kernel: mean   sum           ours
  loss fp32       1e-5                      1e-5 + 5e-4          1e-3 + 5e-2   2e-7: one rounding is 6e-8
  loss fp16       1e-3                                                         2e-7: logits and sums are fp32
  loss bf16       1e-2                      5e-3 + 5e-2          5 + 50        2e-7
  gradients fp32  5e-4 (values of 4e-3)     1e-5 + 5e-4          1e-3 + 5e-2   2e-6: fp32 logits of up to 60
  gradients fp16  1e-3                                                         3e-4: one rounding is 2.1e-4
  gradients bf16  1e-2                      5e-3 + 5e-2          5 + 50        2.5e-3: one rounding is 1.7e-3

On some hardware, the matrix products of backward read the gradient of the logits in 16 bits. There our
tolerance for gradients is 1e-3 in fp16 and 8e-3 in bf16, because sums of the rounded values cancel.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shoestring
from relative_error import relative_error

Case = tuple[Tensor, Tensor, Tensor | None, Tensor]  # (hidden, weight, bias, target)
LOSS = 2e-7
GRADIENTS = {torch.float32: 2e-6, torch.float16: 3e-4, torch.bfloat16: 2.5e-3}
TWICE_ROUNDED = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# The largest allowed ratio of our error to that of eager PyTorch. Errors are root mean squares over all cases
# of a shape, because one case is too noisy.
BAR = 1.05
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def plain(
    leaves: list[Tensor], target: Tensor, gradient_dtype: torch.dtype, options: dict[str, Any]
) -> Tensor:
    """Compute the loss with eager PyTorch, in the dtype of the leaves.

    In backward, the gradient of the logits is rounded to gradient_dtype before the matrix products.
    """
    logits = F.linear(*leaves)
    wide = logits.dtype
    logits.register_hook(lambda gradient: gradient.to(gradient_dtype).to(wide))
    ignore_index, cap = options.get("ignore_index", -100), options.get("softcap", 0.0)
    if options.get("shift"):
        logits, target = logits[:, :-1], target[:, 1:]
    if cap:
        logits = cap * torch.tanh(logits / cap)
    logits, target = logits.flatten(0, -2), target.flatten()
    classes, smoothing = options.get("class_weights"), options.get("label_smoothing", 0.0)
    if classes is not None:
        classes = classes.to(wide)
    each = F.cross_entropy(
        logits, target, classes, ignore_index=ignore_index, reduction="none", label_smoothing=smoothing
    )
    counted = target != ignore_index
    z_terms = options.get("z_loss", 0.0) * logits.logsumexp(-1).square() * counted
    if options["reduction"] != "mean":
        each = each + z_terms
        return each if options["reduction"] == "none" else each.sum()
    count = counted.sum() if classes is None else classes[target[counted]].sum()
    return each.sum() / count + z_terms.sum() / counted.sum()


def with_gradients(loss: Tensor, leaves: list[Tensor], upstream: Tensor | None) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream)]


class Errors:
    """Collect, for each test case, the errors of shoestring and of eager PyTorch against fp64."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.of: dict[str, list[tuple[float, float]]] = {}

    def add(self, case: Case, options: dict[str, Any]) -> None:
        hidden, weight, bias, target = case
        dtype = hidden.dtype
        narrow = self.backend in ("cuda", "simt") or (
            self.backend in ("avx512", "amx") and dtype == torch.bfloat16
        )
        leaves = [t.requires_grad_() for t in (hidden, weight, bias) if t is not None]
        loss = shoestring.linear_cross_entropy(hidden, weight, target, bias, **options)
        upstream = torch.rand(loss.shape) + 0.5 if options["reduction"] == "none" else None
        again = shoestring.linear_cross_entropy(hidden, weight, target, bias, **options)
        ours = with_gradients(loss, leaves, upstream)
        assert all(torch.equal(a, b) for a, b in zip(ours, with_gradients(again, leaves, upstream))), options

        if upstream is not None and options.get("shift"):
            assert (ours[0][:, -1] == 0).all()
            ours[0], upstream = ours[0][:, :-1], upstream[:, :-1]

        def results(wide: torch.dtype, gradient_dtype: torch.dtype) -> list[Tensor]:
            copies = [t.detach().to(wide).requires_grad_() for t in leaves]
            factor = None if upstream is None else upstream.flatten().to(wide)
            return with_gradients(plain(copies, target, gradient_dtype, options), copies, factor)

        exact = results(torch.float64, torch.float64)
        eager = results(torch.float32, dtype if narrow else torch.float32)
        eager[1:] = [gradient.to(dtype) for gradient in eager[1:]]
        bound = (TWICE_ROUNDED if narrow else GRADIENTS)[dtype]
        for name, a, b, reference in zip(("loss", "hidden", "weight", "bias"), ours, eager, exact):
            mine = relative_error(a.flatten(), reference.flatten())
            assert mine <= (LOSS if name == "loss" else bound) * (5 if self.backend == "cuda" else 1), (
                name,
                options,
            )
            self.of.setdefault(name, []).append((mine, relative_error(b.flatten(), reference.flatten())))

    def assert_bar(self) -> None:
        """Assert that our errors on the CPU are at most 1.05 times (BAR) those of eager PyTorch.

        Errors on a GPU are only printed: tensor cores drop low bits of sums that fp32 units keep.
        """
        for name, pairs in self.of.items():
            ours, eager = (math.sqrt(sum(e * e for e in side) / len(pairs)) for side in zip(*pairs))
            print(f"{name}: {ours:.2e}, eager {eager:.2e}, ratio {ours / eager:.3f}")
            assert self.backend in ("cuda", "simt") or ours <= BAR * eager, (name, ours, eager)


def combinations(**choices: list[Any]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values))


def cut_cross_entropy_case(
    tokens: int, vocab: int, features: int, dtype: torch.dtype, bias: bool, ignored: bool
) -> Case:
    """Return a test case of four sequences, in which some tokens have one very likely class.

    The weights of such a class equal the features of its token, so its logit is large. With ``ignored``, a
    fifth of the targets is -100.
    """
    hidden = (torch.randn(tokens, features) / features**0.5).to(dtype)
    weight = torch.randn(vocab, features).to(dtype)
    peaks = min(tokens, vocab) // 2
    weight[:peaks] = hidden[:peaks]
    target = torch.randint(vocab, (tokens,))
    if ignored:
        target[torch.randperm(tokens)[: tokens // 5]] = -100
    offsets = (0.02 * torch.randn(vocab)).to(dtype) if bias else None
    return hidden.view(4, -1, features), weight, offsets, target.view(4, -1)


@pytest.fixture
def own_backend(backend: str) -> str:
    """Return the name of the backend; for the CPU, return the CPU capability that is selected by default."""
    return torch.ops.shoestring._cpu_capability() if backend == "cpu" else backend


# Two of the three shapes (tokens, vocab, features) that Cut Cross-Entropy tests. The sizes of one shape are
# powers of two, those of the other are no multiples of a tile.
@pytest.mark.parametrize("shape", [(256, 512, 128), (252, 507, 123)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cut_cross_entropy_grid(own_backend: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    errors = Errors(own_backend)
    switches = [False, True]
    # One shape is tested in fp32 with and without a bias, and with and without ignored targets. All other
    # cases have a bias and ignored targets.
    whole = shape[0] == 252 and dtype == torch.float32
    also = list(itertools.product(switches, switches)) if whole else [(True, True)]
    # Cut Cross-Entropy tests z_loss with the factor 1.
    grid = dict(reduction=["none", "mean", "sum"], shift=switches, softcap=[0.0, 20.0], z_loss=[0.0, 1.0])
    for options in combinations(**grid):
        for bias, ignored in also:
            errors.add(cut_cross_entropy_case(*shape, dtype, bias, ignored), options)
    errors.assert_bar()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cut_cross_entropy_log_sum_exp(dtype: torch.dtype) -> None:
    """The log-sum-exp of linear_cross_entropy_with_stats has the tolerance LOSS, like the loss.

    Cut Cross-Entropy allows 1e-5 plus the error of 16-bit logits.
    """
    for softcap, bias in itertools.product([0.0, 20.0], [False, True]):
        hidden, weight, offsets, target = cut_cross_entropy_case(256, 507, 123, dtype, bias, False)
        stats = shoestring.linear_cross_entropy_with_stats(hidden, weight, target, offsets, softcap=softcap)
        logits = F.linear(hidden.double(), weight.double(), None if offsets is None else offsets.double())
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        assert relative_error(stats.lse, logits.logsumexp(-1)) < LOSS


@pytest.mark.device
def test_cut_cross_entropy_parts(backend: str) -> None:
    """The gradients of some inputs do not depend on whether other inputs need gradients, bit for bit."""
    shape = (16, 40, 24) if backend == "simt" else (256, 512, 128)
    case = cut_cross_entropy_case(*shape, torch.bfloat16, True, False)
    hidden, weight, bias, target = case
    leaves = [t.requires_grad_() for t in (hidden, weight, bias) if t is not None]
    whole = torch.autograd.grad(shoestring.linear_cross_entropy(hidden, weight, target, bias), leaves)
    for wanted in [(0, 2), (1,), (2,)]:
        some = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(leaves)]
        shoestring.linear_cross_entropy(some[0], some[1], target, some[2]).backward()
        for i, t in enumerate(some):
            assert torch.equal(t.grad, whole[i]) if i in wanted else t.grad is None


# All options of Liger Kernel's tests at once. ignore_index is the index of a class.
EVERYTHING = {
    "class_weights": True,
    "label_smoothing": 0.1,
    "ignore_index": 42,
    "z_loss": 1e-4,
    "softcap": 30.0,
}


def liger_case(
    tokens: int, features: int, vocab: int, dtype: torch.dtype, bias: bool, ignore_index: int
) -> Case:
    """Return a test case with random weights in [0, 1). At most half of the targets are ignored.

    The logits are large, and in the gradient of hidden, large terms cancel.
    """
    hidden = torch.randn(tokens, features).to(dtype)
    weight = torch.rand(vocab, features).to(dtype)
    target = torch.randint(vocab, (tokens,))
    target[torch.randperm(tokens)[: int(torch.randint(1, tokens // 2, (1,)))]] = ignore_index
    return hidden, weight, torch.rand(vocab).to(dtype) if bias else None, target


def run_liger_grid(
    errors: Errors, shape: tuple[int, int, int], dtype: torch.dtype, biases: list[bool]
) -> None:
    for extra in ({}, EVERYTHING):
        for reduction, bias in itertools.product(["mean", "sum"], biases):
            options = {"reduction": reduction, **extra}
            if extra:
                options["class_weights"] = torch.rand(shape[2])
            errors.add(liger_case(*shape, dtype, bias, options.get("ignore_index", -100)), options)


@pytest.mark.device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_liger_grid(own_backend: str, backend: str, dtype: torch.dtype) -> None:
    errors = Errors(own_backend)
    # several random draws, because the error of few and small cases is noisy
    for _ in range(8 if backend == "cpu" else 1):
        run_liger_grid(errors, (47 if backend == "simt" else 4 * 47, 31, 123), dtype, [False, True])
    errors.assert_bar()


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)  # fp32 and bf16, the dtypes of Liger Kernel's tests
def test_liger_grid_at_size(own_backend: str, dtype: torch.dtype) -> None:
    errors = Errors(own_backend)
    run_liger_grid(errors, (8 * 128, 1024, 4096), dtype, [True])
    errors.assert_bar()


# The shapes (tokens, features, vocab) with which Liger Kernel tests its functional form and its Hopper
# kernels.
@pytest.mark.device
@pytest.mark.parametrize("shape", [(4, 8, 8), (63, 41, 41), (128, 256, 512), (256, 512, 768)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_liger_other_shapes(
    own_backend: str, backend: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    if backend == "simt" and shape[0] > 100:
        pytest.skip("the emulator has the smaller ones")
    tokens, features, vocab = shape
    errors = Errors(own_backend)
    options = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0, "class_weights": torch.rand(vocab)}
    # Small cases are repeated with new random numbers, because the error of a single one is too noisy. In the
    # emulator, errors are not compared with those of eager PyTorch.
    repeats = range(1 if tokens > 100 or backend == "simt" else 4)
    for reduction, bias, extra, _ in itertools.product(
        ["mean", "sum"], [False, True], [{}, options], repeats
    ):
        hidden, weight = (
            torch.randn(tokens, features).to(dtype),
            (0.05 * torch.randn(vocab, features)).to(dtype),
        )
        target = torch.randint(vocab, (tokens,))
        target[::17] = -100
        case = (hidden, weight, torch.randn(vocab).to(dtype) if bias else None, target)
        errors.add(case, {"reduction": reduction, **extra})
    if tokens > 4:  # with only four tokens, errors are too noisy to compare
        errors.assert_bar()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bar_holds_over_several_chunks(own_backend: str, dtype: torch.dtype) -> None:
    """If tokens are processed in chunks, our errors are at most 1.05 times (BAR) those of eager PyTorch."""
    errors = Errors(own_backend)
    for reduction, bias in itertools.product(["mean", "none"], [False, True]):
        errors.add(liger_case(640, 64, 5000, dtype, bias, -100), {"reduction": reduction, "workspace_mb": 1})
    errors.assert_bar()
