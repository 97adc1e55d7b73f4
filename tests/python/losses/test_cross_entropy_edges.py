"""cross_entropy gives PyTorch's results for unusual values, and raises errors for wrong arguments."""

import subprocess
import sys

import pytest
import torch
from test_cross_entropy import gradient, make, not_a_leaf
from torch import Tensor
from torch.nn import functional as F

import shoestring

pytestmark = [pytest.mark.device, pytest.mark.parametrize("inplace", [False, True])]


def ours_and_pytorch_s(leaf: Tensor, target: Tensor, inplace: bool, **options: float | str) -> None:
    """Assert that shoestring's loss and gradient equal those of PyTorch, including NaN and infinity."""
    loss = shoestring.cross_entropy(not_a_leaf(leaf), target, inplace=inplace, **options)
    expected = F.cross_entropy(leaf, target, **options)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    torch.testing.assert_close(gradient(loss, leaf), gradient(expected, leaf), equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_targets_all_ignored_and_none_at_all(inplace: bool, reduction: str) -> None:
    leaf, target = make(6, 9)
    for x, t in ((leaf, torch.full_like(target, -100)), (leaf[:0], target[:0])):
        loss = shoestring.cross_entropy(not_a_leaf(x), t, inplace=inplace, reduction=reduction)
        assert loss.isnan() if reduction == "mean" else (loss == 0).all()
        assert (gradient(loss, leaf) == 0).all()
        stats = shoestring.cross_entropy_with_stats(x, t, reduction=reduction)
        assert (stats.argmax == -1).all() and (stats.lse == 0).all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_logit_shows_and_an_ignored_token_s_does_not(inplace: bool, bad: float, reduction: str) -> None:
    leaf, target = make(6, 21, ignored=0)
    with torch.no_grad():
        leaf[2, 5] = bad
    ours_and_pytorch_s(leaf, target, inplace, reduction=reduction)
    target[2] = 5
    ours_and_pytorch_s(leaf, target, inplace, reduction=reduction)
    target[2] = -100
    loss = shoestring.cross_entropy(not_a_leaf(leaf), target, inplace=inplace)
    assert loss.isfinite() and gradient(loss, leaf).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_classes_that_are_masked(inplace: bool, dtype: torch.dtype) -> None:
    """Classes with a logit of -inf, which fill whole registers and tiles, do not change the loss.

    If all logits of a token are -inf, its loss is NaN.
    """
    leaf, target = make(3, 5001, dtype=dtype, ignored=0)
    with torch.no_grad():
        leaf[:, 5:4990] = -float("inf")
    target[:] = torch.tensor([0, 4, 4999])
    loss = shoestring.cross_entropy(not_a_leaf(leaf), target, inplace=inplace)
    wide = leaf.detach().float().requires_grad_()
    expected = F.cross_entropy(wide, target)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, leaf), gradient(expected, wide).to(dtype))
    with torch.no_grad():
        leaf[1] = -float("inf")
    assert shoestring.cross_entropy(not_a_leaf(leaf), target, inplace=inplace).isnan()


def test_one_token_and_one_class(inplace: bool) -> None:
    for shape in ((1, 1), (1, 17), (4, 1), (1,), (7,)):
        leaf, target = make(*shape, ignored=0)
        ours_and_pytorch_s(leaf, target, inplace)
        ours_and_pytorch_s(leaf, target, inplace, label_smoothing=0.1, reduction="sum")


def test_huge_logits_do_not_overflow(inplace: bool) -> None:
    leaf = torch.tensor([[1e4, -1e4]], requires_grad=True)
    loss = shoestring.cross_entropy(not_a_leaf(leaf), torch.tensor([1]), inplace=inplace)
    assert loss.item() == 2e4
    assert torch.equal(torch.autograd.grad(loss, leaf)[0], torch.tensor([[1.0, -1.0]]))


@pytest.mark.sample(simt=2)
@pytest.mark.parametrize("upstream", [1.0, 65536.0])
def test_small_gradients_survive_fp16(inplace: bool, upstream: float) -> None:
    """fp16 gradients of a mean over 300 tokens are accurate, with and without a loss scale of 65536.

    Without a loss scale, most elements are 2e-6, where neighbouring fp16 numbers are 6e-8 apart.
    """
    vocab = 2000
    leaf = torch.zeros(300, vocab, dtype=torch.float16)
    leaf[:, 0] = 0 if upstream == 1 else 7
    leaf.requires_grad_()
    loss = shoestring.cross_entropy(not_a_leaf(leaf), torch.zeros(300, dtype=torch.int64), inplace=inplace)
    found = torch.autograd.grad(loss, leaf, torch.tensor(upstream))[0]
    exact = leaf.detach()[0].double().softmax(0)[1] * upstream / 300
    torch.testing.assert_close(found[:, 1:], exact.half().expand(300, vocab - 1), rtol=2e-3, atol=3e-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"target": torch.zeros(5, dtype=torch.int64)},
            r"target: expected logits's shape .* \[6\], received \[5\]",
        ),
        ({"target": torch.zeros(6, dtype=torch.int32)}, "target: expected int64"),
        ({"logits": torch.zeros(6, 9, dtype=torch.int64)}, "logits: expected fp32"),
        ({"logits": torch.zeros(())}, r"logits: expected shape \(..., vocab\), received a scalar"),
        ({"reduction": "average"}, "reduction: expected 'mean', 'sum' or 'none', received 'average'"),
        ({"label_smoothing": 1.0}, "label_smoothing: expected a number"),
        ({"softcap": -1.0}, "softcap: expected 0"),
        ({"logit_scale": 0.0}, "logit_scale: expected a number that is not 0"),
        ({"z_loss": -1.0}, "z_loss: expected a number of at least 0"),
        ({"hard_fraction": 0.0}, "hard_fraction: expected a number in"),
        ({"class_weights": torch.ones(8)}, r"class_weights: expected a floating tensor of shape \[9\]"),
        ({"token_weights": torch.ones(5)}, r"token_weights: expected a floating tensor of shape \[6\]"),
        ({"logit_scale": torch.ones(2)}, "logit_scale: expected a number or one element"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors_name_the_argument(change: dict, message: str, inplace: bool) -> None:
    arguments = {"logits": torch.zeros(6, 9), "target": torch.zeros(6, dtype=torch.int64), "inplace": inplace}
    arguments = {
        name: t.to(torch.get_default_device()) if isinstance(t, Tensor) else t
        for name, t in {**arguments, **change}.items()
    }
    with pytest.raises((RuntimeError, ValueError), match=f"cross_entropy: {message}"):
        shoestring.cross_entropy(**arguments)


OUT_OF_RANGE = """
import torch, shoestring
logits = torch.zeros(6, 9, device="cuda", requires_grad=True) * 1
shoestring.cross_entropy(logits, torch.full((6,), {target}, device="cuda"), inplace={inplace})
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("target", [9, -1])
def test_a_target_out_of_range_is_refused(backend: str, target: int, inplace: bool) -> None:
    """A target out of range is an error. On the CPU, it is raised before the logits are overwritten."""
    # A failed device assertion makes the GPU unusable for its process, so this test needs a new process.
    if backend == "cuda":
        command = [sys.executable, "-c", OUT_OF_RANGE.format(target=target, inplace=inplace)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode != 0
        assert "cross_entropy: target: expected classes in [0, vocab)" in result.stderr
        return
    targets = torch.tensor([1, -100, target, 1, 1, 1])
    found = rf"in \[0, 9\) or ignore_index, -100, received {target} at position 2"
    logits = torch.zeros(6, 9, requires_grad=True) * 1
    with pytest.raises(
        IndexError if backend == "cpu" else RuntimeError,
        match=f"cross_entropy: target: expected classes {found if backend == 'cpu' else 'in .0, vocab'}",
    ):
        shoestring.cross_entropy(logits, targets, inplace=inplace)
    assert backend != "cpu" or (logits == 0).all()
