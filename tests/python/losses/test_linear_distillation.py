"""Test linear_distillation against fp64: results, gradients, unusual values, wrong arguments, memory."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import shoestring
from loss_cases import logits_of, targets
from operator_cases import Arguments, Operator, casts, normal, on_gpu, slack_of_products
from operator_tests import OperatorTests
from references.losses import distillation_reference, linear_distillation_reference

pytestmark = pytest.mark.device
DIVERGENCES: list[Arguments] = [
    {"divergence": "forward_kl"},
    {"divergence": "reverse_kl"},
    {"divergence": "jsd"},
    {"divergence": "jsd", "beta": 0.1},
]
# Numbers of features of student and teacher by numbers of classes.
WIDTHS = {2: (1, 2), 3: (5, 3), 257: (64, 48), 4099: (8, 24), 256: (32, 16), 64: (16, 8)}


def arguments(tokens: int, vocab: int) -> Arguments:
    width, of_teacher = WIDTHS.get(vocab, (6, 4))
    return {
        "hidden": normal(2, tokens, width),
        "weight": normal(vocab, width, scale=width**-0.5),
        "teacher_hidden": normal(2, tokens, of_teacher, gradient=False),
        "teacher_weight": normal(vocab, of_teacher, scale=of_teacher**-0.5, gradient=False),
        "bias": normal(vocab),
        "teacher_bias": normal(vocab, gradient=False),
        "target": targets(tokens, vocab),
    }


def reference(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    bias: Tensor,
    teacher_bias: Tensor,
    **options: Any,
) -> Tensor:
    """Compute the divergence from fp32 logits if the arguments have 16 bits."""
    # CUDA kernels round the gradient of the logits to 16 bits, as eager PyTorch in 16 bits does.
    student = logits_of(hidden, weight, bias, rounded=on_gpu())
    teacher = logits_of(teacher_hidden, teacher_weight, teacher_bias, rounded=False)
    return distillation_reference(student, teacher, **options)


@pytest.mark.sample(cpu=120, simt=14)
class TestLinearDistillation(OperatorTests):
    operator = Operator(
        "linear_distillation",
        reference,
        arguments,
        # The smallest size with a gradient; sizes below a SIMD register width; one class more than a multiple of every
        # SIMD register width; several chunks of tokens, and several partial sums of the CPU kernel.
        [(1, 2), (4, 3), (17, 257), (35, 4099)],
        [
            *(
                divergence | {"reduction": reduction, "temperature": temperature}
                for divergence in DIVERGENCES
                for reduction, temperature in (("mean", 1.0), ("sum", 1.5), ("none", 0.7))
            ),
            {"target": None},
        ],
        factor=1.5,
        traced=2,
        slack=slack_of_products,
        autocast=casts("hidden", "weight", "teacher_hidden", "teacher_weight", "bias", "teacher_bias"),
    )


def make(
    tokens: int, features: int, teacher_features: int, vocab: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return hidden, weight and bias of the student (as leaves), those of the teacher, and targets.

    About a fifth of the targets is -100, so these tokens are ignored.
    """

    def head(width: int) -> list[Tensor]:
        parts = torch.randn(tokens, width), torch.randn(vocab, width) / width**0.5, torch.randn(vocab)
        return [t.to(dtype) for t in parts]

    target = torch.randint(vocab, (tokens,))
    target[1:][torch.rand(tokens - 1) < 0.2] = -100
    return [t.requires_grad_() for t in head(features)], head(teacher_features), target


def ours(
    student: list[Tensor], teacher: list[Tensor], target: Tensor | None = None, **options: object
) -> Tensor:
    return shoestring.linear_distillation(
        *student[:2], *teacher[:2], student[2], teacher[2], target=target, **options
    )


def plain(
    student: list[Tensor], teacher: list[Tensor], target: Tensor | None = None, **options: object
) -> Tensor:
    return linear_distillation_reference(
        *student[:2], *teacher[:2], student[2], teacher[2], target=target, **options
    )


def gradients(loss: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    upstream = torch.linspace(0.5, 2, loss.numel(), dtype=torch.float64).view(loss.shape).to(loss.dtype)
    return torch.autograd.grad(loss, leaves, upstream)


def test_targets_all_ignored_and_no_tokens() -> None:
    student, teacher, target = make(6, 4, 3, 9)
    ignored = torch.full_like(target, -100)
    none = ([student[0][:0], *student[1:]], [teacher[0][:0], *teacher[1:]], target[:0])
    for s, t, i in ((student, teacher, ignored), none):
        loss = ours(s, t, i)
        assert loss.isnan()
        assert all((g == 0).all() for g in torch.autograd.grad(loss, student))
        assert ours(s, t, i, reduction="sum") == 0
        assert (ours(s, t, i, reduction="none") == 0).all()


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_token_shows_and_an_ignored_one_does_not(divergence: dict, bad: float) -> None:
    for part in (0, 1):  # part 0 is the student, part 1 the teacher
        student, teacher, target = make(6, 4, 3, 19)
        with torch.no_grad():
            (student, teacher)[part][0][2] = bad
        target[:] = 1
        loss = ours(student, teacher, target, reduction="none", **divergence)
        assert torch.equal(loss.isnan(), torch.arange(6) == 2)
        target[2] = -100
        loss = ours(student, teacher, target, **divergence)
        assert all(g.isfinite().all() for g in (loss, *torch.autograd.grad(loss, student)))
        assert (
            torch.autograd.grad(ours(student, teacher, target, **divergence), student[0])[0][2] == 0
        ).all()


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
def test_classes_that_both_biases_rule_out(divergence: dict) -> None:
    """Classes whose student and teacher logits are -inf, in whole registers, do not change the divergence."""
    student, teacher, target = make(3, 4, 5, 5000)
    kept = torch.cat([torch.arange(5), torch.arange(4990, 5000)])
    for head in (student, teacher):
        with torch.no_grad():
            head[2][5:4990] = -float("inf")
    loss = ours(student, teacher, target, **divergence)
    fewer = [[head[0], head[1][kept], head[2][kept]] for head in (student, teacher)]
    expected = plain(*fewer, target, **divergence)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(loss, student), gradients(expected, student))


def test_classes_that_one_side_alone_rules_out() -> None:
    student, teacher, _ = make(3, 4, 5, 40)
    teacher[2][:20] = -float("inf")
    for divergence in DIVERGENCES:
        loss = ours(student, teacher, **divergence)
        if divergence["divergence"] == "reverse_kl":
            assert loss == float("inf")
            continue
        exact = [[t.detach().double() for t in head] for head in (student, teacher)]
        share = exact[0][0] @ exact[0][1].T + exact[0][2], exact[1][0] @ exact[1][1].T + exact[1][2]
        p, q = (z.softmax(-1) for z in share)
        beta = divergence.get("beta", 0.5)
        m = p if divergence["divergence"] == "forward_kl" else beta * q + (1 - beta) * p
        expected = torch.special.xlogy(q, q / m).sum(-1)
        if divergence["divergence"] == "jsd":
            expected = beta * expected + (1 - beta) * torch.special.xlogy(p, p / m).sum(-1)
        torch.testing.assert_close(loss.double(), expected.mean(), rtol=1e-5, atol=0)
        assert all(g.isfinite().all() for g in torch.autograd.grad(loss, student))


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
def test_a_student_that_is_its_teacher(divergence: dict) -> None:
    """A student that equals its teacher has no loss and no gradient, even if the logits are huge."""
    student, _, _ = make(9, 4, 4, 1003)
    for scale in (1, 1e4):
        head = [student[0] * scale, *student[1:]]
        loss = ours(head, [t.detach() for t in head], reduction="none", **divergence)
        assert (loss.abs() < 1e-6).all()
        assert all((g.abs() < 1e-4).all() for g in torch.autograd.grad(loss.sum(), student))


def test_a_teacher_of_another_dtype_and_leading_dimensions() -> None:
    student, teacher, target = make(12, 4, 3, 50)
    narrow = [t.bfloat16() for t in teacher]
    folded = [student[0].view(3, 4, 4).transpose(0, 1), *student[1:]]
    of_teacher = [narrow[0].view(3, 4, 3).transpose(0, 1), *narrow[1:]]
    loss = ours(folded, of_teacher, target.view(3, 4).t(), reduction="none")
    assert loss.shape == (4, 3)
    expected = plain(student, [t.float() for t in narrow], target, reduction="none")
    torch.testing.assert_close(loss.t().reshape(-1), expected)
    upstream = torch.randn(12)
    torch.testing.assert_close(
        torch.autograd.grad(loss, student, upstream.view(3, 4).t()),
        torch.autograd.grad(expected, student, upstream),
    )


def test_bitwise_repeatable_and_retained() -> None:
    student, teacher, target = make(100, 16, 8, 1000)
    results = []
    for _ in range(2):
        loss = ours(student, teacher, target, divergence="jsd", workspace_mb=1)
        first = torch.autograd.grad(loss, student, retain_graph=True)
        kept = [g.clone() for g in first]
        twice = torch.autograd.grad(loss * 2, student)
        assert all(torch.equal(2 * a, b) for a, b in zip(kept, twice))
        assert all(torch.equal(a, b) for a, b in zip(kept, first))
        results.append((loss, *kept))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_the_teacher_has_no_gradient_and_none_is_made_without_need() -> None:
    student, teacher, _ = make(6, 4, 3, 9)
    teacher = [t.requires_grad_() for t in teacher]
    ours(student, teacher).backward()
    assert all(t.grad is None for t in teacher)
    assert not ours([t.detach() for t in student], teacher).requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(9, 5)}, r"weight: expected shape \(vocab, 4\)"),
        ({"weight": torch.zeros(9, 4, dtype=torch.float64)}, "weight: expected hidden's dtype"),
        (
            {"teacher_hidden": torch.zeros(5, 3)},
            "teacher_hidden: expected hidden's shape except for the last",
        ),
        ({"teacher_weight": torch.zeros(8, 3)}, r"teacher_weight: expected shape \(9, 3\)"),
        ({"teacher_weight": torch.zeros(9, 3).half()}, "teacher_weight: expected teacher_hidden's dtype"),
        ({"bias": torch.zeros(8)}, r"bias: expected shape \(9\)"),
        ({"teacher_bias": torch.zeros(8)}, r"teacher_bias: expected shape \(9\)"),
        ({"target": torch.zeros(5, dtype=torch.int64)}, "target: expected hidden's shape without its last"),
        ({"target": torch.zeros(6)}, "target: expected int64"),
        ({"divergence": "kl"}, "divergence: expected 'forward_kl', 'reverse_kl' or 'jsd', received 'kl'"),
        ({"divergence": "jsd", "beta": 1.0}, r"beta: expected a number in \(0, 1\), received 1"),
        ({"temperature": 0.0}, "temperature: expected a positive number, received 0"),
        ({"reduction": "batchmean"}, "reduction: expected 'mean', 'sum' or 'none', received 'batchmean'"),
        (
            {"workspace_mb": -1},
            "workspace_mb: expected a number of MiB, or 0 for the device.s default, received -1",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors_name_the_argument(change: dict, message: str) -> None:
    arguments = {"hidden": torch.zeros(6, 4), "weight": torch.zeros(9, 4)}
    arguments |= {"teacher_hidden": torch.zeros(6, 3), "teacher_weight": torch.zeros(9, 3), **change}
    device = arguments["hidden"].device
    arguments = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    with pytest.raises(RuntimeError, match=f"linear_distillation: {message}"):
        shoestring.linear_distillation(**arguments)


def test_memory_is_the_gradients_and_the_workspace(backend: str) -> None:
    """Beyond the inputs, linear_distillation needs memory for two gradients and the workspace.

    The gradients are grad_hidden and grad_weight. A few small buffers come on top.
    """
    if backend != "cpu":
        pytest.skip("the process's memory")
    tokens, features, vocab, workspace = 2048, 64, 32768, 32
    program = f"""
import resource, torch, shoestring
def run(tokens, vocab):
    hidden = torch.randn(tokens, {features}, requires_grad=True)
    weight = torch.randn(vocab, {features}, requires_grad=True)
    teacher = torch.randn(tokens, 32), torch.randn(vocab, 32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (shoestring.linear_distillation(hidden, weight, *teacher, workspace_mb={workspace}) * 2).backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
run(64, 1000)  # whatever the libraries allocate once
print(run({tokens}, {vocab}))
"""
    used = float(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    )
    gradients_mb = 4 * features * (tokens + vocab) / 2**20
    assert used < gradients_mb + workspace + 12, (used, gradients_mb)
    logits_mb = 4 * tokens * vocab / 2**20  # fp32 logits of the student
    assert used < logits_mb / 4
