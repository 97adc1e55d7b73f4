from typing import Any

import pytest
import torch
from torch import Tensor

import shoestring
from loss_cases import OPTIONS, logits_of, targets
from operator_cases import FLOATS, Arguments, Operator, casts, normal, product_dtype, slack_of_products
from operator_tests import OperatorTests
from references.losses import cross_entropy_reference, linear_cross_entropy_reference
from relative_error import relative_error
from shoestring.losses.cross_entropy import CrossEntropyStats

pytestmark = pytest.mark.device


def make(
    tokens: int, features: int, vocab: int, dtype: torch.dtype = torch.float32, ignored: float = 0.2
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the leaves hidden, weight and bias, and targets, of which the share ``ignored`` is -100."""
    hidden = torch.randn(tokens, features).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, features) / features**0.5).to(dtype).requires_grad_()
    bias = torch.randn(vocab).to(dtype).requires_grad_()
    target = torch.randint(vocab, (tokens,))
    target[torch.rand(tokens) < ignored] = -100
    return hidden, weight, bias, target


def gradients(loss: Tensor, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    upstream = torch.linspace(0.5, 2, loss.numel(), dtype=torch.float64).view(loss.shape).to(loss.dtype)
    return torch.autograd.grad(loss, leaves, upstream)


# Numbers of features by numbers of classes.
WIDTHS = {2: 1, 3: 5, 257: 64, 4099: 8, 1999: 16, 40001: 16, 256: 32, 64: 16}


def arguments(tokens: int, vocab: int) -> Arguments:
    width = WIDTHS.get(vocab, 6)
    return {
        "hidden": normal(2, tokens, width),
        "weight": normal(vocab, width, scale=width**-0.5),
        "target": targets(tokens, vocab),
        "bias": normal(vocab),
        "workspace_mb": 1,
    }


def reference(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor, **options: Any
) -> CrossEntropyStats:
    """Compute loss and statistics from fp32 logits if the arguments have 16 bits.

    GPUs and CPUs with bf16 units round the gradient of the logits to 16 bits, as eager PyTorch in 16 bits does.
    """
    rounded = product_dtype(hidden.dtype) == hidden.dtype
    return cross_entropy_reference(logits_of(hidden, weight, bias, rounded), target, **options)


SIZES = [
    (2, 2),
    (4, 3),  # all three sizes are below a SIMD register width
    (17, 257),  # one class more than a multiple of every SIMD register width
    # With 4099 classes, a workspace of 1 MiB needs several chunks, and the CPU kernel several partial sums.
    (35, 4099),
    # On a GPU, a workspace of 1 MiB gives chunks of 128, 128 and 4 tokens. Chunks are divided into waves,
    # whose logits one GEMM computes. In 16 bits, a wave has at most 32 tokens.
    (130, 1999),
    (2, 40001),  # three tiles of classes in the CUDA kernel; the last tile is not full
]


@pytest.mark.sample(24)
class TestLinearCrossEntropy(OperatorTests):
    operator = Operator(
        "linear_cross_entropy",
        lambda **given: reference(**given).loss,
        arguments,
        SIZES,
        OPTIONS,
        FLOATS[:3],
        factor=1.5,
        traced=2,
        slack=slack_of_products,
        autocast=casts("hidden", "weight", "bias"),
    )


def test_16_bit_weights_of_several_panels(backend: str) -> None:
    """The CPU product splits a weight with 2500 classes into several panels, and the last one is smaller."""
    hidden, weight, bias, target = make(9, 2048, 2500, torch.bfloat16)
    loss = shoestring.linear_cross_entropy(hidden, weight, target, bias)
    exact_leaves = tuple(t.detach().double().requires_grad_() for t in (hidden, weight, bias))
    exact = linear_cross_entropy_reference(*exact_leaves[:2], target, exact_leaves[2])
    # Tensor cores drop low bits of long sums, so the GPU has a larger tolerance.
    assert relative_error(loss, exact) < (1e-5 if backend == "cuda" else 1e-6)
    for ours, reference in zip(gradients(loss, (hidden, weight, bias)), gradients(exact, exact_leaves)):
        assert relative_error(ours, reference) < 4e-3  # tolerance for one or two roundings to bf16


def test_leading_dimensions_strides_and_one_needed_gradient() -> None:
    # hidden has shape (3, 12, 4) and is not contiguous
    hidden = torch.randn(4, 12, 3).transpose(0, 2).requires_grad_()
    weight = torch.randn(4, 50).t()  # shape (50, 4), not contiguous, needs no gradient
    target = torch.randint(50, (12, 3)).t()
    loss = shoestring.linear_cross_entropy(hidden, weight, target)
    expected = linear_cross_entropy_reference(hidden, weight, target)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], torch.autograd.grad(expected, hidden)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_gradients_are_scaled_by_the_upstream_gradient(dtype: torch.dtype) -> None:
    """Gradients from earlier backward passes do not change, although the last pass works in place.

    All passes use the same retained graph, with different upstream gradients.
    """
    # The weight has 333 * 7 = 2331 elements. Its gradient is scaled in several blocks, and the last SIMD
    # register is not full.
    hidden, weight, _, target = make(20, 7, 333, dtype)
    loss = shoestring.linear_cross_entropy(hidden, weight, target)
    once = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    kept = once.clone()
    factors = (-0.75, 1.0, 3.0)
    scaled = [
        torch.autograd.grad(loss, weight, torch.tensor(f, dtype=loss.dtype), retain_graph=f != 3)[0]
        for f in factors
    ]
    assert torch.equal(once, kept)
    for factor, result in zip(factors, scaled):
        torch.testing.assert_close(result, (kept.double() * factor).to(dtype), rtol=0, atol=0)


def test_no_gradient_is_made_without_need() -> None:
    hidden, weight, _, target = make(6, 4, 9)
    with torch.no_grad():
        assert not shoestring.linear_cross_entropy(hidden, weight, target).requires_grad


def test_compiles_without_gradients() -> None:
    """Inductor fails on operators that may change an argument and return one tensor, so it must not see one."""
    hidden, weight, _, target = make(6, 4, 9)
    compiled = torch.compile(shoestring.linear_cross_entropy, fullgraph=True)
    with torch.no_grad():
        expected = shoestring.linear_cross_entropy(hidden, weight, target)
        torch.testing.assert_close(compiled(hidden, weight, target), expected)
