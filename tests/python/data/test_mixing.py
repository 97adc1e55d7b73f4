"""Test mixup and cutmix: values, distributions, repetition and errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shoestring
from shoestring.data import Mixed, cutmix, mixup

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
both = pytest.mark.parametrize("function", [mixup, cutmix])


def images(rows: int, height: int = 9, width: int = 7, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 3, height, width).to(dtype)


def others(x: Tensor, mixed: Mixed) -> Tensor:
    """Return the rows with which the rows were mixed; target must be arange(rows)."""
    return x[mixed.target2]


def bytes_of(mixed: Mixed) -> bytes:
    return b"".join(t.numpy().tobytes() for t in mixed)


def of_row(mix: Tensor, x: Tensor) -> Tensor:
    return mix if mix.dim() == 0 else mix.view(-1, *[1] * (x.dim() - 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_mixup_is_the_combination(rows: int, per_row: bool, dtype: torch.dtype) -> None:
    x, target = images(rows, dtype=dtype), torch.arange(rows)
    mixed = mixup(x, target, 0.8, seed=3, step=4, per_row=per_row)
    assert mixed.target is target and mixed.mix.shape == ((rows,) if per_row else ())
    assert mixed.mix.dtype == torch.float32 and mixed.inputs.dtype == dtype
    share = of_row(mixed.mix, x).double()
    expected = share * x.double() + (1 - share) * others(x, mixed).double()
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(mixed.inputs.double(), expected, rtol=rounding, atol=4 * rounding)


@both
def test_each_row_meets_another_row(function: Callable[..., Mixed]) -> None:
    x, target = images(5), torch.arange(5)
    shifts = set()
    for step in range(60):
        found = function(x, target, seed=1, step=step).target2
        shift = int(found[0])
        assert torch.equal(found, target.roll(-shift)) and shift != 0
        shifts.add(shift)
    assert shifts == {1, 2, 3, 4}
    assert function(x[:1], target[:1], seed=1, step=0).target2 == 0


@pytest.mark.parametrize("height", [1, 9, 32])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_cutmix_replaces_one_box_and_mix_is_its_exact_area(
    per_row: bool, height: int, dtype: torch.dtype
) -> None:
    rows, width = 6, 7
    x = torch.arange(rows).view(rows, 1, 1, 1).expand(rows, 2, height, width).to(dtype)
    target = torch.arange(rows)
    cut = 0
    for step in range(40):
        mixed = cutmix(x, target, seed=2, step=step, per_row=per_row)
        replaced = mixed.inputs != x
        assert torch.equal(mixed.inputs, torch.where(replaced, others(x, mixed), x))
        assert torch.equal(replaced[:, 0], replaced[:, 1])
        for r, one in enumerate(replaced[:, 0]):
            left = 1 - int(one.sum()) / (height * width)
            share = mixed.mix[r] if per_row else mixed.mix
            assert share == torch.tensor(left, dtype=torch.float32)
            assert torch.equal(one, one.any(1)[:, None] & one.any(0))  # a rectangle
            for side in (one.any(1), one.any(0)):
                at = side.nonzero()
                assert len(at) == 0 or int(at[-1] - at[0]) + 1 == len(at)
            cut += int(one.any())
        if not per_row:
            assert (replaced == replaced[0]).all()
    assert height == 1 or cut > 100  # most boxes are not empty


def test_boxes_have_the_sides_and_centres_of_the_paper() -> None:
    """Far from the edges, the box has the sides of the drawn part. Its centre is uniform over the pixels."""
    size, x = 101, torch.zeros(2, 1, 101, 101)
    x[1] = 1
    covered, height, width = torch.zeros(size, size), [], []
    for step in range(1500):
        box = cutmix(x, torch.arange(2), seed=5, step=step).inputs[0, 0]
        covered += box
        rows, columns = box.any(1).nonzero(), box.any(0).nonzero()
        if len(rows) and rows[0] > 0 and rows[-1] < size - 1 and columns[0] > 0 and columns[-1] < size - 1:
            height.append(len(rows))
            width.append(len(columns))
    assert height == width and len(set(height)) > 20
    # The middle is covered more often than a corner. By symmetry the corners are covered equally often.
    corners = covered[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert covered[50, 50] > 2 * corners.max() > 0
    assert corners.max() - corners.min() < 6 * corners.mean().sqrt()


def is_same_distribution(a: Tensor, b: Tensor) -> bool:
    """Return whether the two-sample test of Kolmogorov and Smirnov accepts, at a level of 1e-4."""
    points = torch.cat([a, b])
    of_a, of_b = (torch.searchsorted(t.sort().values, points, right=True) / len(t) for t in (a, b))
    return bool((of_a - of_b).abs().max() < 2.23 * (1 / len(a) + 1 / len(b)) ** 0.5)


@pytest.mark.parametrize("alpha", [0.05, 0.2, 1.0, 2.5, 40.0])
def test_parts_have_the_beta_distribution(alpha: float) -> None:
    """Kolmogorov-Smirnov, in both modes. Steps and rows are independent draws."""
    x, target = torch.zeros(4000, 1), torch.zeros(4000)
    parts = mixup(x, target, alpha, seed=11, step=0, per_row=True).mix
    steps = torch.stack([mixup(x[:2], target[:2], alpha, seed=11, step=s).mix for s in range(1500)])
    expected = torch.distributions.Beta(torch.tensor(alpha).double(), alpha).sample((200_000,)).float()
    assert is_same_distribution(parts, expected) and is_same_distribution(steps, expected)
    assert not is_same_distribution(parts, expected**1.3)
    assert torch.corrcoef(torch.stack([parts[:-1], parts[1:]]))[0, 1].abs() < 0.08


@both
def test_is_a_pure_function_of_seed_and_step(function: Callable[..., Mixed]) -> None:
    x, target = images(5), torch.arange(5)
    state = torch.get_rng_state()
    for per_row in (False, True):
        results = {
            (seed, step): bytes_of(function(x, target, seed=seed, step=step, per_row=per_row))
            for seed in (0, 1, -1, 2**62)
            for step in (0, 1, 2**40)
        }
        assert len(set(results.values())) == len(results)
        for (seed, step), expected in results.items():
            assert bytes_of(function(x, target, seed=seed, step=step, per_row=per_row)) == expected
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("function", "per_row", "mix", "total"),
    [
        (mixup, False, [0.9680737], 892.5),
        (mixup, True, [0.1429532, 0.9926808, 0.9512171, 0.9357721], 973.55225),
        (cutmix, False, [0.8], 892.5),
        (cutmix, True, [0.6, 11 / 15, 11 / 15, 0.6], 862.5),
    ],
)
def test_draws_the_numbers_of_the_test_in_cpp(
    function: Callable[..., Mixed], per_row: bool, mix: list[float], total: float
) -> None:
    """tests/cpp/data/test_mixing.cpp has the same inputs and results."""
    x, target = torch.arange(4 * 2 * 5 * 3, dtype=torch.float32).view(4, 2, 5, 3) / 8, torch.arange(4)
    mixed = function(x, target, seed=7, step=9, per_row=per_row)
    assert mixed.target2.tolist() == [1, 2, 3, 0]
    assert mixed.mix.view(-1).tolist() == pytest.approx(mix, rel=1e-6)
    assert mixed.inputs.sum().item() == pytest.approx(total, rel=1e-6)


@both
@pytest.mark.parametrize("per_row", [False, True])
def test_strided_input_and_gradients(function: Callable[..., Mixed], per_row: bool) -> None:
    leaf = torch.randn(4, 5, 6, 3, dtype=torch.float64, requires_grad=True)
    target = torch.randint(10, (4, 2))[:, 0]
    strided = function(leaf.permute(0, 3, 1, 2), target, seed=1, step=1, per_row=per_row)
    plain = function(leaf.permute(0, 3, 1, 2).contiguous(), target, seed=1, step=1, per_row=per_row)
    assert all(torch.equal(a, b) for a, b in zip(strided, plain))
    assert torch.autograd.gradcheck(
        lambda x: function(x, target, 0.8, seed=1, step=1, per_row=per_row).inputs, leaf
    )
    before = leaf.detach().clone()
    function(leaf, target, seed=1, step=1, per_row=per_row)
    assert torch.equal(leaf, before)


@pytest.mark.parametrize("per_row", [False, True])
def test_targets_of_any_shape(per_row: bool) -> None:
    x, target = torch.randn(4, 6), torch.randint(10, (4, 3))
    mixed = mixup(x, target, seed=0, step=0, per_row=per_row)
    assert mixed.target2.shape == (4, 3) and mixed.mix.shape == ((4, 3) if per_row else ())
    logits = torch.randn(4, 3, 10)
    loss = shoestring.cross_entropy(logits, mixed.target, target2=mixed.target2, mix=mixed.mix)
    each = [F.cross_entropy(logits.movedim(-1, 1), t, reduction="none") for t in mixed[1:3]]
    torch.testing.assert_close(loss, (mixed.mix * each[0] + (1 - mixed.mix) * each[1]).mean())
    empty = mixup(x[:0], target[:0], seed=0, step=0, per_row=per_row)
    assert empty.inputs.shape == (0, 6)


@both
def test_needs_no_values_of_the_device(function: Callable[..., Mixed]) -> None:
    x, target = torch.empty(4, 3, 8, 8, device="meta"), torch.empty(4, dtype=torch.long, device="meta")
    for per_row in (False, True):
        mixed = function(x, target, seed=0, step=0, per_row=per_row)
        assert all(t.is_meta for t in mixed) and mixed.inputs.shape == x.shape


IMAGES, LABELS = torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        (mixup, {"alpha": 0.0}, "mixup: alpha: expected a positive number, received 0"),
        (cutmix, {"alpha": float("nan")}, "cutmix: alpha: expected a positive number, received nan"),
        (mixup, {"step": -1}, "mixup: step: expected a number of at least 0, received -1"),
        (mixup, {"inputs": torch.zeros(())}, "mixup: inputs: expected shape .*, received a scalar"),
        (
            mixup,
            {"inputs": IMAGES.byte()},
            "mixup: inputs: expected fp32, .*received Byte; call inputs.float",
        ),
        (mixup, {"target": LABELS[:3]}, r"mixup: target: expected .* with 4 rows, received \[3\]"),
        (mixup, {"target": LABELS.to("meta")}, "mixup: target: expected the device of inputs, cpu, received"),
        (cutmix, {"inputs": torch.zeros(4, 8)}, r"cutmix: inputs: expected shape .*, received \[4, 8\]"),
        (cutmix, {"inputs": torch.zeros(4, 3, 0, 8)}, "cutmix: inputs: expected images with pixels"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_errors(function: Callable[..., Mixed], change: dict[str, Any], message: str) -> None:
    arguments = {"inputs": IMAGES, "target": LABELS, "seed": 0, "step": 0} | change
    with pytest.raises(ValueError, match=message):
        function(**arguments)
