"""Test linear_cross_entropy with unusual values and wrong arguments, and the memory that it uses."""

import subprocess
import sys

import pytest
import torch
from test_linear_cross_entropy import gradients, make

import shoestring
from references.losses import linear_cross_entropy_reference
from relative_error import relative_error

pytestmark = pytest.mark.device


def test_targets_all_ignored_and_none_at_all() -> None:
    hidden, weight, bias, target = make(6, 4, 9)
    ignored = torch.full_like(target, -100)
    for h, t in ((hidden, ignored), (hidden[:0], target[:0])):
        loss = shoestring.linear_cross_entropy(h, weight, t, bias)
        assert loss.isnan()
        assert all((g == 0).all() for g in torch.autograd.grad(loss, (hidden, weight, bias)))
        assert shoestring.linear_cross_entropy(h, weight, t, bias, reduction="sum") == 0
        assert (shoestring.linear_cross_entropy(h, weight, t, bias, reduction="none") == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_token_shows_and_an_ignored_one_does_not(bad: float) -> None:
    hidden, weight, _, target = make(6, 4, 9, ignored=0)
    with torch.no_grad():
        hidden[2] = bad
    expected = linear_cross_entropy_reference(hidden, weight, target, reduction="none")
    loss = shoestring.linear_cross_entropy(hidden, weight, target, reduction="none")
    torch.testing.assert_close(loss, expected, equal_nan=True)
    target[2] = -100
    loss = shoestring.linear_cross_entropy(hidden, weight, target)
    assert all(g.isfinite().all() for g in (loss, *torch.autograd.grad(loss, (hidden, weight))))


def test_a_vocabulary_of_one_has_no_loss_and_no_gradient() -> None:
    hidden, weight, bias, target = make(3, 4, 1)
    target[:] = 0
    loss = shoestring.linear_cross_entropy(hidden, weight, target, bias, label_smoothing=0.1, softcap=2.0)
    assert loss.abs() < 1e-7
    assert all((g.abs() < 1e-7).all() for g in torch.autograd.grad(loss, (hidden, weight, bias)))


def test_huge_logits_do_not_overflow() -> None:
    hidden = torch.tensor([[1e4, -1e4]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    target = torch.tensor([1])
    loss = shoestring.linear_cross_entropy(hidden, weight, target)
    assert loss.item() == 2e4
    assert torch.equal(torch.autograd.grad(loss, hidden)[0], torch.tensor([[1.0, -1.0]]))


def test_classes_that_a_bias_rules_out() -> None:
    """Classes with a bias of -inf, which fill whole registers and tiles, do not change loss and gradients."""
    hidden, weight, bias, target = make(3, 4, 5000)
    with torch.no_grad():
        bias[5:4990] = -float("inf")
    target[:] = torch.tensor([0, 4, 4999])
    loss = shoestring.linear_cross_entropy(hidden, weight, target, bias)
    expected = linear_cross_entropy_reference(hidden, weight, target, bias)
    torch.testing.assert_close(loss, expected)
    for ours, reference in zip(gradients(loss, (hidden, weight)), gradients(expected, (hidden, weight))):
        torch.testing.assert_close(ours, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_likeliest_class_is_the_first_of_equals(dtype: torch.dtype) -> None:
    hidden, weight, bias = (torch.zeros(shape, dtype=dtype) for shape in ((1, 1), (3000, 1), (3000,)))
    target = torch.zeros(1, dtype=torch.int64)

    def argmax() -> int:
        return shoestring.linear_cross_entropy_with_stats(hidden, weight, target, bias).argmax.item()

    assert argmax() == 0
    # On a GPU, one thread reads classes 1037 and 1039, the next thread 1040, and another warp 2999.
    bias[[2999, 1040, 1039, 1037]] = 1
    assert argmax() == 1037


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fresh_memory_does_not_show(dtype: torch.dtype) -> None:
    """No result of linear_cross_entropy depends on uninitialised memory.

    In the emulator new memory always holds NaN. On a GPU, the allocator reuses the memory of a freed tensor
    of NaN.
    """
    poison = torch.full((1 << 24,), float("nan"))
    del poison
    hidden, weight, bias, target = make(70, 6, 1003, dtype)
    for reduction in ("mean", "none"):
        loss = shoestring.linear_cross_entropy(hidden, weight, target, bias, reduction=reduction)
        assert all(g.isfinite().all() for g in (loss, *gradients(loss, (hidden, weight, bias))))


def test_small_gradients_survive_fp16() -> None:
    """fp16 gradients of the weight are accurate for a mean over 300 tokens.

    For most classes, the gradients of the logits are 2e-6, where neighbouring fp16 numbers are 6e-8 apart.
    """
    hidden = (30 * torch.randn(300, 4)).half()
    weight = (torch.randn(2000, 4) / 1000).half().requires_grad_()
    target = torch.randint(4, (300,))
    gradient = torch.autograd.grad(shoestring.linear_cross_entropy(hidden, weight, target), weight)[0]
    exact_weight = weight.detach().double().requires_grad_()
    exact = torch.autograd.grad(
        linear_cross_entropy_reference(hidden.double(), exact_weight, target), exact_weight
    )[0]
    assert relative_error(gradient[4:], exact[4:]) < 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(9, 5)}, r"weight: expected shape \(vocab, 4\)"),
        ({"weight": torch.zeros(9, 4, dtype=torch.float64)}, "weight: expected hidden's dtype"),
        (
            {"target": torch.zeros(5, dtype=torch.int64)},
            r"target: expected hidden's shape .* \[6\], received \[5\]",
        ),
        ({"target": torch.zeros(6, dtype=torch.int32)}, "target: expected int64"),
        ({"bias": torch.zeros(8)}, r"bias: expected shape \(9\)"),
        ({"hidden": torch.zeros(6, 4, dtype=torch.int64)}, "hidden: expected fp32"),
        ({"reduction": "average"}, "reduction: expected 'mean', 'sum' or 'none', received 'average'"),
        ({"label_smoothing": 1.0}, "label_smoothing: expected a number"),
        ({"softcap": -1.0}, "softcap: expected 0"),
        (
            {"workspace_mb": -1},
            "workspace_mb: expected a number of MiB, or 0 for the device.s default, received -1",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors_name_the_argument(change: dict, message: str) -> None:
    arguments = {
        "hidden": torch.zeros(6, 4),
        "weight": torch.zeros(9, 4),
        "target": torch.zeros(6, dtype=torch.int64),
    }
    with pytest.raises((RuntimeError, IndexError), match=f"linear_cross_entropy: {message}"):
        shoestring.linear_cross_entropy(**{**arguments, **change})


OUT_OF_RANGE = """
import torch, shoestring
hidden, weight = torch.zeros(6, 4, device="cuda"), torch.zeros(9, 4, device="cuda")
shoestring.linear_cross_entropy(hidden, weight, torch.full((6,), {target}, device="cuda"))
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("target", [9, -1])
def test_a_target_out_of_range_is_refused(backend: str, target: int) -> None:
    # A failed device assertion makes the GPU unusable for its process, so this test needs a new process.
    if backend == "cuda":
        command = [sys.executable, "-c", OUT_OF_RANGE.format(target=target)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode != 0
        assert "linear_cross_entropy: target: expected classes in [0, vocab)" in result.stderr
        return
    targets = torch.tensor([1, -100, target, 1, 1, 1])
    found = rf"in \[0, 9\) or ignore_index, -100, received {target} at position 2"
    with pytest.raises(
        IndexError if backend == "cpu" else RuntimeError,
        match=f"linear_cross_entropy: target: expected classes {found if backend == 'cpu' else 'in .0, vocab'}",
    ):
        shoestring.linear_cross_entropy(torch.zeros(6, 4), torch.zeros(9, 4), targets)


def test_memory_is_the_gradients_and_the_workspace(backend: str) -> None:
    """Beyond the inputs, linear_cross_entropy needs memory for two gradients and the workspace.

    The gradients are grad_hidden and grad_weight. A few small buffers come on top.
    """
    if backend != "cpu":
        pytest.skip("the process's memory; test_linear_cross_entropy_cuda.py has the GPU's")
    tokens, features, vocab, workspace = 4096, 128, 32768, 32
    program = f"""
import resource, torch, shoestring
def run(tokens, vocab):
    hidden = torch.randn(tokens, {features}, requires_grad=True)
    weight = torch.randn(vocab, {features}, requires_grad=True)
    target = torch.randint(vocab, (tokens,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (shoestring.linear_cross_entropy(hidden, weight, target, workspace_mb={workspace}) * 2).backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
run(64, 1000)  # whatever the libraries allocate once
print(run({tokens}, {vocab}))
"""
    used = float(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    )
    gradients_mb = 4 * features * (tokens + vocab) / 2**20
    logits_mb = 4 * tokens * vocab / 2**20
    assert used < gradients_mb + workspace + 6, (used, gradients_mb)
    assert used < logits_mb / 4
