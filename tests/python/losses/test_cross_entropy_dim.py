"""Test the option dim of cross_entropy, and the number of correct predictions in the statistics."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_cross_entropy_inplace import place_of_gradient
from torch import Tensor
from torch.nn import functional as F

import shoestring
from references.losses import cross_entropy_reference
from relative_error import relative_error

pytestmark = pytest.mark.device

# Shapes of logits, and the dimension of the classes.
SHAPES = [((3, 19, 5), 1), ((2, 33, 3, 4), 1), ((7, 6, 5), 0), ((7, 6, 5), -3), ((2, 3, 17), 2), ((9,), 0),
          ((1, 1, 4), 1), ((2, 5, 0), 1)]  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "none", "softcap": 3.0},
    {"reduction": "sum", "shift": True},
    {"class_weights": True, "label_smoothing": 0.2, "z_loss": 1e-2},
    {"token_weights": True, "hard_fraction": 0.5},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def make(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return logits as a leaf, and targets of which some are -100."""
    rest = list(shape)
    classes = rest.pop(dim)
    target = torch.randint(classes, rest)
    if rest:
        target[torch.rand(rest) < 0.2] = -100
    return (3 * torch.randn(shape)).to(dtype).requires_grad_(), target


def chosen(options: dict[str, Any], target: Tensor, classes: int) -> dict[str, Any]:
    tensors = {"class_weights": torch.rand(classes) + 0.1, "token_weights": torch.rand(target.shape) + 0.1}
    return {name: tensors.get(name, value) for name, value in options.items()}


@pytest.mark.sample(simt=20)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
def test_classes_in_any_dimension(
    shape: tuple[int, ...], dim: int, options: dict[str, Any], inplace: bool
) -> None:
    """Loss, statistics and gradient are bitwise those of logits whose classes are last."""
    if options.get("shift") and len(shape) == 1:
        pytest.skip("a single token has no next one")
    for dtype in DTYPES:
        leaf, target = make(shape, dim, dtype)
        given = chosen(options, target, shape[dim])
        last = leaf.detach().movedim(dim, -1).contiguous().requires_grad_()
        logits = leaf * 1
        before = logits.detach().clone()
        ours = shoestring.cross_entropy_with_stats(logits, target, dim=dim, inplace=inplace, **given)
        theirs = shoestring.cross_entropy_with_stats(last * 1, target, inplace=inplace, **given)
        copied = dim % len(shape) != len(shape) - 1 and shape[dim] > 1
        for a, b in zip(ours, theirs):
            assert torch.equal(a.nan_to_num(), b.nan_to_num()) and a.dtype == b.dtype
        assert torch.equal(
            shoestring.cross_entropy(leaf.detach(), target, dim=dim, **given).nan_to_num(),
            ours.loss.nan_to_num(),
        )
        ours.loss.sum().backward()
        theirs.loss.sum().backward()
        assert leaf.grad is not None and last.grad is not None and leaf.grad.shape == leaf.shape
        assert torch.equal(leaf.grad.movedim(dim, -1).nan_to_num(), last.grad.nan_to_num())
        assert not copied or torch.equal(logits.detach(), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_as_in_pytorch(dtype: torch.dtype) -> None:
    for shape in ((3, 19, 5), (2, 33, 3, 4), (9,), (4, 6)):
        dim = min(1, len(shape) - 1)
        leaf, target = make(shape, dim, dtype)
        exact_leaf = leaf.detach().double().requires_grad_()
        for reduction in ("mean", "sum", "none"):
            loss = shoestring.cross_entropy(leaf, target, dim=dim, reduction=reduction, label_smoothing=0.1)
            exact = F.cross_entropy(exact_leaf, target, reduction=reduction, label_smoothing=0.1)
            assert loss.shape == exact.shape and relative_error(loss, exact) < 1e-6
            ours, theirs = (
                torch.autograd.grad(x.sum(), y)[0] for x, y in ((loss, leaf), (exact, exact_leaf))
            )
            assert relative_error(ours, theirs) < 1e-6


def test_gradcheck() -> None:
    leaf, target = make((2, 5, 3), 1, torch.float64)
    for inplace in (False, True):
        assert torch.autograd.gradcheck(
            lambda x, i=inplace: shoestring.cross_entropy(x * 1, target, dim=1, inplace=i), leaf
        )
    assert torch.autograd.gradcheck(
        lambda x: shoestring.cross_entropy_with_stats(x, target, dim=1, reduction="none")[:4], leaf
    )


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_where_the_gradient_is(reduction: str, inplace: bool) -> None:
    """The gradient overwrites the copy of the logits, and contiguous classes are not copied."""
    leaf, target = make((2, 16, 3, 4), 1, torch.float32)
    exact_leaf = leaf.detach().double().requires_grad_()
    exact = cross_entropy_reference(exact_leaf, target, dim=1, reduction=reduction).loss
    (expected,) = torch.autograd.grad(exact.sum(), exact_leaf)

    def step(logits: Tensor) -> tuple[bool, bool]:
        """Return whether the gradient is in the memory of the logits, and whether they are unchanged."""
        seen, before = place_of_gradient(logits), logits.detach().clone()
        loss = shoestring.cross_entropy(logits, target, dim=1, inplace=inplace, reduction=reduction)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        assert relative_error(gradient, expected) < 1e-6
        return seen == [logits.data_ptr()], torch.equal(logits.detach(), before)

    assert step(leaf * 1) == (False, True)
    last = leaf.contiguous(memory_format=torch.channels_last) * 1
    assert step(last) == (inplace, not inplace)


def copies_of_logits(run: Callable[[], object], size: int) -> int:
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        run()
    return sum(event.cpu_memory_usage >= size for event in profile.events() if event.name == "aten::empty")


def test_logits_are_copied_once(backend: str) -> None:
    if backend != "cpu":
        pytest.skip("the profiler counts the memory of CPU tensors")
    leaf, target = make((4, 64, 1000), 1, torch.float32)
    logits = leaf * 1

    def step(**options: Any) -> None:
        shoestring.cross_entropy(logits, target, dim=1, **options).sum().backward(retain_graph=False)

    size = logits.numel() * 4
    # Only the copy is allocated: it becomes the gradient. The gradient of the leaf is no result of aten::empty.
    for options in ({}, {"reduction": "none"}, {"hard_fraction": 0.5}):
        leaf.grad = None
        logits = leaf * 1
        assert copies_of_logits(lambda o=options: step(**o), size) == 1


def test_compiles_and_opcheck() -> None:
    def step(leaf: Tensor, target: Tensor) -> Tensor:
        return shoestring.cross_entropy(leaf * 2, target, dim=1, inplace=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (6, 11):
        leaf, target = make((2, 9, tokens), 1, torch.float32)
        torch.testing.assert_close(compiled(leaf, target), step(leaf, target))
        ours, theirs = (torch.autograd.grad(f(leaf, target), leaf)[0] for f in (compiled, step))
        torch.testing.assert_close(ours, theirs)
    op = torch.ops.shoestring.cross_entropy_with_stats.default
    torch.library.opcheck(op, (leaf, target), {"dim": 1})
    meta = shoestring.cross_entropy_with_stats(leaf.to("meta"), target.to("meta"), dim=1)
    for a, b in zip(meta, shoestring.cross_entropy_with_stats(leaf, target, dim=1)):
        assert a.shape == b.shape and a.dtype == b.dtype


def test_refusals() -> None:
    logits, target = torch.randn(2, 9, 4), torch.zeros(2, 4, dtype=torch.int64)
    for dim in (3, -4):
        with pytest.raises(RuntimeError, match="dim: expected a dimension of the logits, -3 to 2, received"):
            shoestring.cross_entropy(logits, target, dim=dim)
    with pytest.raises(RuntimeError, match="target: expected logits' shape without dimension 1"):
        shoestring.cross_entropy(logits, target[:, :3], dim=1)


# ---- the number of correct predictions ---------------------------------------------------------------------


def with_ties(tokens: int, classes: int, dtype: torch.dtype) -> Tensor:
    """Return logits of few distinct values, which are exact in every dtype, so that many rows have ties."""
    return torch.randint(-3, 4, (tokens, classes)).to(dtype)


@pytest.mark.sample(simt=12)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [1, 2, 33, 1031])
def test_correct_counts_as_argmax_in_fp64(classes: int, dtype: torch.dtype, capability: str) -> None:
    logits = with_ties(50, classes, dtype)
    exact = logits.double().argmax(-1)
    target = torch.where(torch.rand(50) < 0.5, exact, torch.randint(classes, (50,)))
    target[::7] = -100
    counted = target != -100
    expected = int((exact == target)[counted].sum())
    for leaf in (logits, logits.clone().requires_grad_()):
        stats = shoestring.cross_entropy_with_stats(leaf, target)
        assert torch.equal(stats.argmax, exact.where(counted, torch.tensor(-1)))
        assert stats.correct.dtype == torch.int64 and stats.correct.shape == () and stats.correct == expected
    none = shoestring.cross_entropy_with_stats(logits, torch.full_like(target, -100))
    assert none.correct == 0
    # ignored tokens have the argmax -1, which is no correct prediction
    ignored = shoestring.cross_entropy_with_stats(logits, target.masked_fill(~counted, -1), ignore_index=-1)
    assert ignored.correct == expected


@pytest.mark.sample(simt=6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"workspace_mb": 1}, {"hard_fraction": 0.5}], ids=str)
def test_correct_of_a_linear_layer(dtype: torch.dtype, options: dict[str, Any], capability: str) -> None:
    """Products of small integers are exact in every dtype, so every path finds the argmax of fp64."""
    tokens, classes = (40, 1100) if options else (40, 70)
    hidden, weight = with_ties(tokens, 16, dtype), with_ties(classes, 16, dtype)
    exact = hidden.double() @ weight.double().T
    target = torch.where(torch.rand(tokens) < 0.5, exact.argmax(-1), torch.randint(classes, (tokens,)))
    target[::5] = -100
    for leaves in (False, True):
        inputs = [t.clone().requires_grad_(leaves) for t in (hidden, weight)]
        stats = shoestring.linear_cross_entropy_with_stats(*inputs, target, **options)
        kept = stats.argmax >= 0
        assert torch.equal(stats.argmax[kept], exact.argmax(-1)[kept])
        assert stats.correct == (exact.argmax(-1) == target)[kept].sum()
        if "hard_fraction" not in options:
            assert torch.equal(kept, target != -100)
        if leaves:
            stats.loss.backward()
            assert inputs[0].grad is not None
