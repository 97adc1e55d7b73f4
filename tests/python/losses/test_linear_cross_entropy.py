import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shoestring
from references.losses import cross_entropy_reference, linear_cross_entropy_reference
from relative_error import relative_error
from rounding import assert_no_worse

pytestmark = pytest.mark.device
OPERATOR = torch.ops.shoestring.linear_cross_entropy.default


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


OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},  # without a reduction, backward computes the logits again
    {"label_smoothing": 0.1},
    {"softcap": 2.0},  # the logits reach +-4, so a softcap of 2 matters
    {"softcap": 2.0, "label_smoothing": 0.3, "reduction": "none"},
]
SHAPES = [
    # (1, 1, 2) is the smallest shape that has a gradient: with one class, its probability is always 1.
    (1, 1, 2),
    (7, 5, 3),  # all three sizes are below a SIMD register width
    (33, 64, 257),  # one class more than a multiple of every SIMD register width
    # With 4099 classes, a workspace of 1 MiB needs several chunks, and the CPU kernel several partial sums.
    (70, 8, 4099),
    # On a GPU, a workspace of 1 MiB gives chunks of 128, 128 and 4 tokens. Chunks are divided into waves,
    # whose logits one GEMM computes. In 16 bits, a wave has at most 32 tokens.
    (260, 16, 1999),
    (3, 64, 40001),  # three tiles of classes in the CUDA kernel; the last tile is not full
]


@pytest.mark.sample(24)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_worse_than_eager(
    capability: str, shape: tuple[int, int, int], options: dict, dtype: torch.dtype
) -> None:
    """The errors of loss and gradients are at most slightly above those of eager PyTorch with fp32 logits."""
    hidden, weight, bias, target = make(*shape, dtype)
    target[0] = 0
    loss = shoestring.linear_cross_entropy(hidden, weight, target, bias, workspace_mb=1, **options)
    ours = (loss, *gradients(loss, (hidden, weight, bias)))

    exact_leaves = tuple(t.detach().double().requires_grad_() for t in (hidden, weight, bias))

    def exact_results() -> tuple[Tensor, ...]:
        exact = linear_cross_entropy_reference(*exact_leaves[:2], target, exact_leaves[2], **options)
        return exact, *gradients(exact, exact_leaves)

    exacts = exact_results()
    eager_leaves = tuple(t.detach().float().requires_grad_() for t in (hidden, weight, bias))
    logits = F.linear(*eager_leaves)
    on_gpu = capability in ("cuda", "simt")
    if on_gpu or (dtype == torch.bfloat16 and capability in ("avx512", "amx")):
        # GPUs and CPUs with bf16 units round the gradient of the logits to 16 bits. Eager PyTorch in 16
        # bits does so as well, so the reference gets a hook that rounds.
        logits.register_hook(lambda gradient: gradient.to(dtype).float())
    eager = cross_entropy_reference(logits, target, **options).loss
    eagers = (eager, *(g.to(dtype) for g in gradients(eager, eager_leaves)))

    assert loss.dtype == torch.float32
    assert [t.shape for t in ours] == [t.shape for t in exacts]
    # Tensor cores drop low bits of sums that fp32 units keep, so GPUs have a larger tolerance.
    slack = 1e-6 if on_gpu else 2e-7
    assert_no_worse(("loss", "hidden", "weight", "bias"), ours, eagers, exacts, exact_results, 1.5, slack)


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


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck(options: dict) -> None:
    hidden, weight, bias, target = make(5, 3, 7, torch.float64)
    target[0] = 0
    assert torch.autograd.gradcheck(
        lambda h, w, b: shoestring.linear_cross_entropy(h, w, target, b, **options), (hidden, weight, bias)
    )


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}], ids=str)
def test_opcheck(options: dict) -> None:
    hidden, weight, bias, target = make(6, 4, 9)
    torch.library.opcheck(OPERATOR, (hidden, weight, target, bias), options)
    torch.library.opcheck(OPERATOR, (hidden.detach(), weight, target), options)


def test_compiles_whole_with_dynamic_shapes() -> None:
    def step(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return shoestring.linear_cross_entropy(torch.tanh(hidden), weight, target) * 3

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (6, 11):
        hidden, weight, _, target = make(tokens, 4, 9)
        expected = step(hidden, weight, target)
        result = compiled(hidden, weight, target)
        torch.testing.assert_close(result, expected)
        for a, b in zip(
            torch.autograd.grad(result, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight))
        ):
            torch.testing.assert_close(a, b)


def test_leading_dimensions_strides_and_one_needed_gradient() -> None:
    # hidden has shape (3, 12, 4) and is not contiguous
    hidden = torch.randn(4, 12, 3).transpose(0, 2).requires_grad_()
    weight = torch.randn(4, 50).t()  # shape (50, 4), not contiguous, needs no gradient
    target = torch.randint(50, (12, 3)).t()
    loss = shoestring.linear_cross_entropy(hidden, weight, target)
    expected = linear_cross_entropy_reference(hidden, weight, target)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], torch.autograd.grad(expected, hidden)[0])


def test_bitwise_repeatable_and_thread_count_does_not_matter_to_rows() -> None:
    hidden, weight, bias, target = make(200, 16, 1000)
    results = []
    for _ in range(2):
        loss = shoestring.linear_cross_entropy(hidden, weight, target, bias)
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight, bias))))
    assert all(torch.equal(a, b) for a, b in zip(*results))


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


def test_double_backward_is_refused() -> None:
    hidden, weight, _, target = make(6, 4, 9)
    loss = shoestring.linear_cross_entropy(hidden, weight, target)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy: the backward pass is not differentiable"):
        gradient.sum().backward()


def test_autocast_takes_the_linear_layer_s_dtype() -> None:
    hidden, weight, _, target = make(6, 4, 9)
    with torch.autocast(hidden.device.type, dtype=torch.bfloat16):
        loss = shoestring.linear_cross_entropy(hidden, weight, target)
    loss.backward()
    expected = linear_cross_entropy_reference(hidden.bfloat16().float(), weight.bfloat16().float(), target)
    torch.testing.assert_close(loss, expected)
    assert weight.grad is not None and weight.grad.dtype == torch.float32


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
