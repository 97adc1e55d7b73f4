"""Test the options target2 and mix of cross_entropy and linear_cross_entropy.

The lists of options in test_cross_entropy.py and test_linear_cross_entropy_options.py have both, too.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shoestring
from references.losses import linear_cross_entropy_reference
from relative_error import relative_error

pytestmark = pytest.mark.device
VOCAB = 37
Loss = Callable[..., Tensor]


def logits_loss(leaf: Tensor, target: Tensor, **options: Any) -> Tensor:
    return shoestring.cross_entropy(leaf, target, **options)


def linear_loss(leaf: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Return the loss of a linear layer whose logits are ``leaf``."""
    return shoestring.linear_cross_entropy(
        leaf, torch.eye(leaf.shape[-1], dtype=leaf.dtype), target, **options
    )


def in_place_loss(leaf: Tensor, target: Tensor, **options: Any) -> Tensor:
    return shoestring.cross_entropy(leaf * 1, target, inplace=True, **options)


LOSSES = [logits_loss, linear_loss, in_place_loss]
every_loss = pytest.mark.parametrize("loss", LOSSES)


def make(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (*shape, VOCAB) as a leaf, and two targets."""
    leaf = (3 * torch.randn(*shape, VOCAB)).to(dtype).requires_grad_()
    return leaf, torch.randint(VOCAB, shape), torch.randint(VOCAB, shape)


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    upstream = torch.linspace(0.5, 2, loss.numel(), dtype=torch.float64).view(loss.shape).to(loss.dtype)
    return torch.autograd.grad(loss, leaf, upstream)[0]


def probabilities(target: Tensor, target2: Tensor, mix: float | Tensor) -> Tensor:
    first, second = (F.one_hot(t, VOCAB).double() for t in (target, target2))
    mix = torch.as_tensor(mix).double().reshape(-1, 1) if isinstance(mix, Tensor) else mix
    return mix * first + (1 - mix) * second


@every_loss
def test_16_bit_class_weights_are_not_rounded_again(loss: Loss) -> None:
    """The weight of a token with two targets is a sum, which bf16 would round by up to 0.4 %."""
    leaf, target, target2 = make(3)
    narrow = torch.rand(VOCAB).bfloat16()
    ours, same = (
        loss(leaf, target, target2=target2, mix=0.3, class_weights=weights)
        for weights in (narrow, narrow.double())
    )
    assert torch.equal(ours, same)


@every_loss
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mix", [0.3, "per token"])
def test_equals_pytorch_with_probabilities(
    capability: str, loss: Loss, reduction: str, weighted: bool, mix: Any
) -> None:
    leaf, target, target2 = make(29)
    target2[3] = target[3]
    if mix == "per token":
        mix = torch.rand(29)
        mix[0], mix[1] = 0, 1
    weights = torch.rand(VOCAB, dtype=torch.float64) if weighted else None
    options = {"reduction": reduction, "label_smoothing": 0.1}
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 2e-6)):
        of_dtype = leaf.detach().to(dtype).requires_grad_()
        ours = loss(of_dtype, target, target2=target2, mix=mix, class_weights=weights, **options)
        exact = F.cross_entropy(leaf, probabilities(target, target2, mix), weights, **options)
        if weighted and reduction == "mean":  # PyTorch divides by the number of rows, whatever their weights
            counted = (probabilities(target, target2, mix) * weights).sum()
            exact = exact * 29 / counted
        assert relative_error(ours, exact) < tolerance
        assert relative_error(gradient(ours, of_dtype), gradient(exact, leaf)) < 2 * tolerance


@every_loss
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_is_the_sum_of_two_calls(loss: Loss, reduction: str) -> None:
    leaf, target, target2 = make(3, 5)
    options = {"reduction": reduction, "softcap": 3.0, "z_loss": 0.1, "logit_scale": 0.7}
    ours = loss(leaf, target, target2=target2, mix=0.3, **options)
    calls = 0.3 * loss(leaf, target, **options) + 0.7 * loss(leaf, target2, **options)
    torch.testing.assert_close(ours, calls)
    torch.testing.assert_close(gradient(ours, leaf), gradient(calls, leaf))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "none", "z_loss": 0.1},
    {"softcap": 3.0, "label_smoothing": 0.2},
    {"class_weights": True, "z_loss": 0.1},
    {"token_weights": True, "class_weights": True, "label_smoothing": 0.1},
    {"hard_fraction": 0.4},
]


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_target_that_has_the_whole_row_gives_the_bits_of_one_target(
    capability: str, loss: Loss, options: dict[str, Any], dtype: torch.dtype
) -> None:
    leaf, target, target2 = make(31, dtype=dtype)
    target[2] = target2[4] = -100
    given = dict(options)
    if "class_weights" in options:
        given["class_weights"] = torch.rand(VOCAB)
    if "token_weights" in options:
        given["token_weights"] = torch.rand(31)

    def both(*targets: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        result = loss(leaf, *targets, **more, **given)
        return result, gradient(result, leaf)

    one = both(target)
    for mixed in (
        both(target, target2=target2, mix=1),
        both(target, target2=target2, mix=torch.ones(31)),
        both(target2, target2=target, mix=0.0),
        both(target, target2=target, mix=0.3),
    ):
        assert all(torch.equal(a, b) for a, b in zip(mixed, one))


@every_loss
def test_an_ignored_target_adds_nothing_and_counts_by_its_part(loss: Loss) -> None:
    leaf, target, target2 = make(5)
    target[0] = target2[1] = target[2] = target2[2] = target[3] = -100
    mix = torch.tensor([0.25, 0.25, 0.5, 1.0, 0.5])
    with torch.no_grad():
        leaf[2:4] = float("nan")  # rows that do not count at all
    parts = torch.tensor([[0, 0.25, 0, 0, 0.5], [0.75, 0, 0, 0, 0.5]], dtype=torch.float64)
    each = [
        F.cross_entropy(leaf, t, ignore_index=-100, reduction="none").where(part > 0, 0) * part
        for t, part in zip((target, target2), parts)
    ]
    expected = (each[0] + each[1]).sum() / parts.sum()
    ours = loss(leaf, target, target2=target2, mix=mix)
    torch.testing.assert_close(ours, expected)
    found = gradient(ours, leaf)
    assert torch.equal(found[2:4], torch.zeros(2, VOCAB, dtype=torch.float64))
    kept = torch.tensor([0, 1, 4])
    torch.testing.assert_close(found[kept], gradient(expected, leaf)[kept])
    nothing = loss(leaf, target.fill_(-100), target2=target2.fill_(-100), mix=mix)
    assert nothing.isnan()


@every_loss
def test_a_class_without_a_part_may_have_probability_zero(loss: Loss) -> None:
    leaf, target, target2 = make(3, dtype=torch.float32)
    target[:], target2[:] = 1, 2
    with torch.no_grad():
        leaf[:, 2] = -float("inf")
    if loss is linear_loss:  # the product with the identity would add 0 * inf
        return
    ours = loss(leaf, target, target2=target2, mix=1.0)
    assert ours.isfinite() and gradient(ours, leaf).isfinite().all()
    assert loss(leaf, target, target2=target2, mix=0.5).isinf()


def test_statistics_with_two_targets() -> None:
    leaf, target, target2 = make(4, 6, dtype=torch.float32)
    target[0, 0] = target2[0, 1] = -100
    plain = shoestring.cross_entropy_with_stats(leaf, target.clamp_min(0))
    target2[1] = plain.argmax[1]
    stats = shoestring.cross_entropy_with_stats(leaf, target, target2=target2, mix=0.4, reduction="none")
    for name in ("lse", "entropy", "argmax"):
        assert torch.equal(getattr(stats, name), getattr(plain, name))
    assert torch.equal(stats.loss, stats.token_loss)
    assert stats.correct == (stats.argmax == target).sum()
    second = shoestring.cross_entropy(leaf, target2, reduction="none")
    torch.testing.assert_close(stats.token_loss[0, 0], 0.6 * second[0, 0])


@pytest.mark.parametrize("mix", [torch.tensor([0.3]), torch.tensor(0.3), torch.full((1,), 0.3).expand(6)])
def test_shapes_and_strides_of_mix_and_target2(mix: Tensor) -> None:
    leaf, target, _ = make(6, dtype=torch.float32)
    wide = torch.randint(VOCAB, (6, 3))
    expected = shoestring.cross_entropy(leaf, target, target2=wide[:, 1].contiguous(), mix=0.3)
    ours = shoestring.cross_entropy(leaf, target, target2=wide[:, 1], mix=mix)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    empty = shoestring.cross_entropy(
        leaf[:0], target[:0], target2=target[:0], mix=mix[:0] if mix.dim() else mix
    )
    assert empty.isnan()


def test_dim_and_one_token() -> None:
    images = torch.randn(2, VOCAB, 3, 4, requires_grad=True)
    target, target2 = torch.randint(VOCAB, (2, 3, 4)), torch.randint(VOCAB, (2, 3, 4))
    mix = torch.rand(2, 3, 4)
    ours = shoestring.cross_entropy(images, target, dim=1, target2=target2, mix=mix)
    each = [F.cross_entropy(images, t, reduction="none") for t in (target, target2)]
    torch.testing.assert_close(ours, (mix * each[0] + (1 - mix) * each[1]).mean())
    leaf, first, second = make(1, dtype=torch.float32)
    one = linear_loss(leaf[0], first[0], target2=second[0], mix=0.3)
    torch.testing.assert_close(one, linear_loss(leaf, first, target2=second, mix=torch.tensor([0.3])))


def test_filter_weight_grad_and_lora_with_two_targets() -> None:
    hidden, weight = torch.randn(50, 16), torch.randn(VOCAB, 16)
    lora_A, lora_B = torch.randn(4, 16), torch.randn(VOCAB, 4)
    target, target2 = torch.randint(VOCAB, (50,)), torch.randint(VOCAB, (50,))
    options: dict[str, Any] = {"target2": target2, "mix": torch.rand(50), "lora_A": lora_A, "lora_B": lora_B}
    leaves = [t.requires_grad_() for t in (hidden, weight, lora_A, lora_B)]
    expected = torch.autograd.grad(linear_cross_entropy_reference(hidden, weight, target, **options), leaves)
    filtered = shoestring.linear_cross_entropy(hidden, weight, target, filter_eps=1e-7, **options)
    for ours, exact in zip(torch.autograd.grad(filtered, leaves), expected):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-6)
    buffer = torch.zeros_like(weight)
    loss = shoestring.linear_cross_entropy(
        hidden, weight, target, weight_grad=buffer, upstream_grad=1.0, **options
    )
    loss.backward()
    torch.testing.assert_close(buffer, expected[1], rtol=1e-4, atol=1e-6)


def test_the_filter_keeps_the_second_target() -> None:
    """A class whose only large gradient is that of a second target is not left out."""
    hidden = torch.zeros(40, 4, requires_grad=True)
    weight = torch.randn(4000, 4, requires_grad=True)
    bias = torch.zeros(4000)
    bias[:100] = 30  # all other classes have no probability
    target, target2 = torch.zeros(40, dtype=torch.long), torch.full((40,), 3999)
    target2[::2] = 2000
    gradients = [
        torch.autograd.grad(
            shoestring.linear_cross_entropy(
                hidden, weight, target, bias, target2=target2, mix=0.5, filter_eps=eps
            ),
            hidden,
        )[0]
        for eps in (0.0, 2.0**-12)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


@every_loss
def test_gradcheck(loss: Loss) -> None:
    leaf, target, target2 = make(2, 3)
    target2[0, 0], target[1, 1] = -100, target2[1, 1]
    mix, weights = torch.rand(2, 3), torch.rand(2, 3, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, w: Tensor) -> Tensor:
        options = {"label_smoothing": 0.1, "softcap": 4.0, "z_loss": 0.1, "token_weights": w}
        return loss(x, target, target2=target2, mix=mix, **options)

    assert torch.autograd.gradcheck(run, (leaf, weights))


@pytest.mark.sample(simt=1)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck(reduction: str) -> None:
    leaf, target, target2 = make(6, dtype=torch.float32)
    options = {"reduction": reduction, "target2": target2, "mix": torch.rand(6)}
    operators, weight = torch.ops.shoestring, torch.randn(VOCAB, VOCAB, requires_grad=True)
    torch.library.opcheck(operators.cross_entropy_with_stats.default, (leaf, target), options)
    torch.library.opcheck(operators.linear_cross_entropy_with_stats.default, (leaf, weight, target), options)
    torch.library.opcheck(operators.cross_entropy_.default, (leaf.detach(), target), options)


def test_compiles_whole_with_dynamic_shapes() -> None:
    def step(leaf: Tensor, target: Tensor, target2: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"target2": target2, "class_weights": torch.ones(VOCAB), "z_loss": 0.1}
        head = torch.eye(VOCAB)
        return (
            shoestring.cross_entropy(leaf * 2, target, mix=0.3, **options),
            shoestring.linear_cross_entropy(leaf, head, target, mix=mix, **options),
        )

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (6, 11):
        leaf, target, target2 = make(tokens, dtype=torch.float32)
        arguments = (leaf, target, target2, torch.rand(tokens))
        ours, expected = compiled(*arguments), step(*arguments)
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(gradient(sum(ours), leaf), gradient(sum(expected), leaf))


def test_under_autocast() -> None:
    leaf, target, target2 = make(8, dtype=torch.float32)
    mix = torch.rand(8)
    with torch.autocast(leaf.device.type, dtype=torch.bfloat16):
        ours = [loss(leaf, target, target2=target2, mix=mix) for loss in LOSSES]
    exact = F.cross_entropy(leaf.double(), probabilities(target, target2, mix))
    for loss in ours:
        assert loss.dtype == torch.float32
        assert relative_error(loss, exact) < 1e-2


@every_loss
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mix": None}, "mix: expected the part of target, in .0, 1., with target2, received None"),
        ({"target2": None}, "target2: expected a tensor with mix, received None; leave mix out, or pass it"),
        ({"mix": 1.5}, r"mix: expected numbers in \[0, 1\], received 1.5 at position 0"),
        ({"mix": float("nan")}, r"mix: expected numbers in \[0, 1\], received nan"),
        ({"mix": torch.tensor([0, 1, -0.5, 0])}, "received -0.5 at position 2"),
        ({"mix": torch.zeros(3)}, r"mix: expected one number, or numbers in the shape of target, \[4\]"),
        ({"mix": torch.zeros(4, dtype=torch.bfloat16)}, "mix: expected fp32 or fp64, received BFloat16"),
        (
            {"mix": torch.zeros(4, requires_grad=True)},
            "mix: expected a tensor that does not require a gradient",
        ),
        (
            {"target2": torch.zeros(3, dtype=torch.long)},
            r"target2: expected int64 in the shape of target, \[4\]",
        ),
        ({"target2": torch.zeros(4, dtype=torch.int32)}, "target2: expected int64 .*, received Int"),
    ],
    ids=str,
)
def test_errors(loss: Loss, change: dict[str, Any], message: str) -> None:
    leaf, target, target2 = make(4, dtype=torch.float32)
    options = {"target2": target2, "mix": 0.5} | change
    with pytest.raises(RuntimeError, match=f"cross_entropy: .*{message}"):
        loss(leaf, target, **options)


@every_loss
@pytest.mark.parametrize("class_number", [VOCAB, -1])
def test_a_second_target_out_of_range(loss: Loss, class_number: int, backend: str) -> None:
    if backend == "cuda":
        pytest.skip("a failed device assertion makes the GPU unusable for this process")
    leaf, target, target2 = make(4, dtype=torch.float32)
    target2[2] = class_number
    for mix in (0.5, 1.0):
        with pytest.raises(
            IndexError if backend == "cpu" else RuntimeError, match="target2: expected classes in .0, "
        ):
            loss(leaf, target, target2=target2, mix=mix)
