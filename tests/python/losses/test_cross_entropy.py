"""Test cross_entropy: values, options, shapes and strides, with gradients in a new tensor and in place."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shoestring
from loss_cases import OPTIONS, targets
from operator_cases import FLOATS, Arguments, Operator, label, normal
from operator_tests import OperatorTests
from references.losses import cross_entropy_reference
from relative_error import relative_error
from shoestring.losses.cross_entropy import CrossEntropyStats

pytestmark = pytest.mark.device
OPERATORS = torch.ops.shoestring


def make(*shape: int, dtype: torch.dtype = torch.float32, ignored: float = 0.2) -> tuple[Tensor, Tensor]:
    """Return logits (..., vocab) as a leaf, and targets (...), of which the share ``ignored`` is -100."""
    leaf = (3 * torch.randn(shape)).to(dtype).requires_grad_()
    target = torch.randint(shape[-1], shape[:-1])
    target[torch.rand(shape[:-1]) < ignored] = -100
    return leaf, target


def not_a_leaf(leaf: Tensor) -> Tensor:
    """Return a copy of a leaf, because autograd does not allow operators to change a leaf in place."""
    return leaf.clone()


def gradient(outputs: Tensor | list[Tensor], leaf: Tensor) -> Tensor:
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    upstream = [torch.linspace(-0.5, 2, x.numel(), dtype=x.dtype).view(x.shape) for x in outputs]
    return torch.autograd.grad(outputs, leaf, upstream)[0]


def arguments(tokens: int, classes: int) -> Arguments:
    return {"logits": normal(2, tokens, classes, scale=1.5), "target": targets(tokens, classes)}


def reference(logits: Tensor, target: Tensor, **options: Any) -> CrossEntropyStats:
    """Compute the loss and the statistics in fp32 if the logits have 16 bits."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return cross_entropy_reference(logits.to(wide), target, **options)


# Fewer classes than a SIMD register holds; rows that are not aligned to SIMD vectors; one class more than a multiple
# of every SIMD register width; several partial sums of the CPU kernel, and several tiles of a GPU block.
SIZES = [(2, 2), (5, 19), (3, 257), (2, 4099)]


@pytest.mark.sample(cpu=150, simt=20)
class TestCrossEntropy(OperatorTests):
    operator = Operator(
        "cross_entropy",
        lambda **given: reference(**given).loss,
        arguments,
        SIZES,
        OPTIONS,
        factor=1.5,
        traced=1,
    )


@pytest.mark.slow
@pytest.mark.sample(simt=20)
class TestCrossEntropyWithStats(OperatorTests):
    operator = Operator(
        "cross_entropy_with_stats", reference, arguments, [(6, 1031)], OPTIONS, factor=1.5, traced=2
    )


@pytest.mark.sample(cpu=150, simt=50)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=label)
@pytest.mark.parametrize("options", OPTIONS, ids=label)
@pytest.mark.parametrize("size", SIZES, ids=label)
def test_gradients_in_the_memory_of_the_logits(
    capability: str, size: tuple[int, int], options: Arguments, dtype: torch.dtype, inplace: bool, seed: int
) -> None:
    """Backward may write over logits that nothing else needs, and ``inplace`` overwrites all logits."""
    operator = TestCrossEntropy.operator
    case = operator.case(*size, dtype, options)
    given = case.given(seed)

    def overwrite(logits: Tensor, **others: Any) -> Tensor:
        return shoestring.cross_entropy(not_a_leaf(logits), inplace=inplace, **others)

    ours, expected = (case.results(f, given, seed) for f in (overwrite, operator.call))
    assert torch.equal(ours["result 0"], expected["result 0"])
    # In place, backward rounds a gradient a second time, when it multiplies by the upstream gradient.
    again = torch.finfo(dtype).eps if inplace else 0
    assert relative_error(*(x["gradient of logits"] for x in (ours, expected))) <= again


def shifted(target: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the target that each token predicts."""
    return F.pad(target[..., 1:], (0, 1), value=-100) if options.get("shift") else target


@pytest.mark.parametrize("options", OPTIONS, ids=label)
def test_statistics_in_place(capability: str, options: Arguments, seed: int) -> None:
    given = TestCrossEntropyWithStats.operator.case(6, 1031, options=options).given(seed)
    logits = given.pop("logits")
    stats = shoestring.cross_entropy_with_stats(logits, **given)
    replaced = shoestring.cross_entropy_with_stats(not_a_leaf(logits), inplace=True, **given)
    assert all(torch.equal(a, b) for a, b in zip(stats, replaced, strict=True))
    scalar = options.get("reduction") != "none"
    assert [t.requires_grad for t in replaced] == [True, *[not scalar] * 3, False, False]
    assert stats.correct == ((stats.argmax == shifted(given["target"], options)) & (stats.argmax >= 0)).sum()


@pytest.mark.sample(simt=6)
@pytest.mark.parametrize("options", OPTIONS, ids=label)
def test_gradcheck_in_place(options: Arguments, seed: int) -> None:
    given = TestCrossEntropy.operator.case(3, 7, torch.float64, options).given(seed)
    assert torch.autograd.gradcheck(
        lambda x: shoestring.cross_entropy(not_a_leaf(x), inplace=True, **given), given.pop("logits")
    )


def test_weights_of_tokens_and_a_tensor_scale_are_differentiable() -> None:
    leaf, target = make(2, 3, 7, dtype=torch.float64)
    weights = torch.rand(2, 3, dtype=torch.float64).requires_grad_()
    scale = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    for reduction in ("mean", "none"):
        assert torch.autograd.gradcheck(
            lambda x, w, s: shoestring.cross_entropy(
                x, target, token_weights=w, logit_scale=s, reduction=reduction
            ),
            (leaf, weights, scale),
        )


@pytest.mark.sample(simt=1)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck_in_place(reduction: str) -> None:
    leaf, target = make(6, 9)
    # The tracing tests of opcheck do not accept a leaf with requires_grad as an argument that the operator
    # mutates.
    for operator in (OPERATORS.cross_entropy_, OPERATORS.cross_entropy_with_stats_):
        torch.library.opcheck(operator.default, (leaf.detach(), target), {"reduction": reduction})
    one = torch.ones(())
    torch.library.opcheck(OPERATORS._cross_entropy_rows_.default, (leaf.detach(), target), {"grad_loss": one})
    for stats in (False, True):
        arguments = {"grad_loss": one, "stats": stats, "gradient": True}
        torch.library.opcheck(OPERATORS._cross_entropy_rows.default, (leaf.detach(), target), arguments)


def test_in_place_compiles_whole_with_dynamic_shapes() -> None:
    def step(leaf: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.tanh(leaf)
        loss = shoestring.cross_entropy(logits[:, :-1], target[:, 1:], inplace=True) * 3
        return loss, shoestring.cross_entropy(leaf * 2, target, inplace=True, reduction="none").sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (6, 11):
        leaf, target = make(2, tokens, 9)
        for result, plain in zip(compiled(leaf, target), step(leaf.clone(), target)):
            torch.testing.assert_close(result, plain)
        results = [
            cross_entropy_reference(leaf.tanh()[:, :-1], target[:, 1:]).loss * 3,
            cross_entropy_reference(leaf * 2, target, reduction="none").loss.sum(),
        ]
        torch.testing.assert_close(gradient(list(compiled(leaf, target)), leaf), gradient(results, leaf))


def strided(leaf: Tensor) -> dict[str, Tensor]:
    """Return views (..., classes) of a tensor of logits (3, 5, 40), by name.

    In all views but the last two, the classes are contiguous and the tokens have at most two strides.
    """
    return {
        "tokens of each sequence": leaf[:, :-1],
        "classes of a padded vocabulary": leaf[..., :37],
        "both": leaf[:, 1:, 3:30],
        "sequences side by side": leaf.transpose(0, 1),
        "one sequence": leaf[1],
        "one token": leaf[1, 2],
        "classes far apart": leaf.transpose(1, 2),
        "three strides": leaf[:, :4].view(3, 2, 2, 40)[:, :, :1].expand(3, 2, 2, 40),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("view", strided(torch.empty(3, 5, 40)))
def test_strided_logits(view: str, inplace: bool, dtype: torch.dtype, backend: str) -> None:
    """cross_entropy gives the same results for strided logits as for contiguous copies of them.

    On a GPU they differ by the order of the sums. A gradient that is written in place does not change elements outside the view.
    """
    leaf, _ = make(3, 5, 40, dtype=dtype)
    whole = not_a_leaf(leaf)
    logits = strided(whole)[view]
    target = torch.randint(logits.shape[-1], logits.shape[:-1])
    target.view(-1)[0] = target.view(-1)[0] if target.dim() == 0 else -100
    loss = shoestring.cross_entropy(logits, target, inplace=inplace)
    expected_leaf = leaf.detach().clone().requires_grad_()
    expected = shoestring.cross_entropy(strided(expected_leaf)[view].contiguous(), target)
    if backend != "cpu":
        # The kernel adds the exponentials of a row in the order in which its vectors of 16 bytes hold them,
        # which depends on where the row begins. At most log2(40) + 2 roundings of the sum and one of its
        # logarithm change a row's loss.
        torch.testing.assert_close(loss, expected, rtol=9 * torch.finfo(loss.dtype).eps, atol=0)
    else:
        assert torch.equal(loss, expected)
    expected_gradient = torch.autograd.grad(expected, expected_leaf)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], expected_gradient)
    touched = torch.zeros(3, 5, 40, dtype=torch.bool)
    strided(touched)[view].logical_not_() if "three" not in view else None
    if not inplace or view in ("classes far apart", "three strides"):
        touched[:] = False
    assert torch.equal(whole.detach()[~touched], leaf.detach()[~touched])
    assert not touched.any() or not torch.equal(whole.detach()[touched], leaf.detach()[touched])


def test_under_autocast_the_loss_is_fp32_and_logits_stay_as_they_are() -> None:
    leaf, target = make(6, 9, dtype=torch.bfloat16)
    with torch.autocast(leaf.device.type, dtype=torch.bfloat16):
        loss = shoestring.cross_entropy(leaf, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, cross_entropy_reference(leaf.float(), target).loss)
    assert torch.autograd.grad(loss, leaf)[0].dtype == torch.bfloat16


def test_in_place_is_bitwise_repeatable() -> None:
    leaf, target = make(50, 1003)
    results = []
    for _ in range(2):
        loss = shoestring.cross_entropy(not_a_leaf(leaf), target, inplace=True)
        results.append((loss, torch.autograd.grad(loss, leaf)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("linear", [False, True])
def test_the_mean_of_z_terms_is_over_tokens_whatever_the_class_weights(linear: bool, weighted: bool) -> None:
    """The mean of the z-loss terms is over tokens, not over class weights, as in Liger Kernel.

    All class weights are 0.05, so a mean over class weights would be 20 times as large.
    """
    leaf, target = make(2, 5, 19, dtype=torch.float64)
    target[0, 1] = -100
    counted = target != -100
    weights = torch.full((19,), 0.05, dtype=torch.float64)
    each = torch.where(counted, torch.rand(target.shape, dtype=torch.float64) if weighted else 1.0, 0.0)
    lse = leaf.logsumexp(-1)
    entropies = 0.05 * (lse - leaf.gather(-1, target.clamp_min(0)[..., None])[..., 0])
    z_terms = 0.3 * lse.square()
    mean = (entropies * each).sum() / (0.05 * each).sum() + (z_terms * each).sum() / each.sum()
    token_loss = torch.where(counted, entropies + z_terms, 0)
    by_mean, by_tokens = (
        torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0] for x in (mean, token_loss)
    )
    options: dict[str, Any] = {"class_weights": weights, "z_loss": 0.3}
    if weighted:
        options["token_weights"] = each
    name = ("linear_" if linear else "") + "cross_entropy"
    head = (torch.eye(19, dtype=torch.float64),) if linear else ()
    loss = getattr(shoestring, name)(leaf, *head, target, **options)
    torch.testing.assert_close(loss, mean)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], by_mean)
    # The loss of each token includes its class weight and its z-loss term.
    stats = getattr(shoestring, name + "_with_stats")(leaf, *head, target, **options)
    torch.testing.assert_close(stats.loss, mean)
    torch.testing.assert_close(stats.token_loss, token_loss)
    gradients = torch.autograd.grad(stats.loss + stats.token_loss.sum(), leaf)[0]
    torch.testing.assert_close(gradients, by_mean + by_tokens)


def test_class_weights_of_zero_make_the_mean_nan_but_not_the_losses_of_tokens() -> None:
    leaf, target = make(1, 4, 7, ignored=0)  # the loss of an ignored token would be 0
    options: dict[str, Any] = {"class_weights": torch.zeros(7), "z_loss": 0.3}
    ours = shoestring.cross_entropy_with_stats(leaf, target, **options)
    assert ours.loss.isnan() and cross_entropy_reference(leaf, target, **options).loss.isnan()
    torch.testing.assert_close(ours.token_loss, 0.3 * leaf.logsumexp(-1).square())


@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("linear", [False, True])
def test_token_weights_have_gradients_beside_class_weights_and_z_terms(linear: bool, stats: bool) -> None:
    """Both divisors of the mean, for entropies and z-loss terms, depend on the token weights.

    So the gradients of the token weights depend on both divisors.
    """
    leaf, target = make(2, 3, 5, dtype=torch.float64)
    head = (torch.randn(4, 5, dtype=torch.float64, requires_grad=True),) if linear else ()
    target = target % 4 if linear else target
    options: dict[str, Any] = {
        "class_weights": torch.rand(4 if linear else 5, dtype=torch.float64) + 0.1,
        "z_loss": 0.3,
    }
    function = getattr(
        shoestring, ("linear_" if linear else "") + "cross_entropy" + ("_with_stats" if stats else "")
    )

    def run(x: Tensor, weights: Tensor, *head: Tensor) -> Any:
        result = function(x, *head, target, token_weights=weights, **options)
        return result[:4] if stats else result

    weights = (torch.rand(target.shape, dtype=torch.float64) + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(run, (leaf, weights, *head))
