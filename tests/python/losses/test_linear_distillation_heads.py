"""Test linear_distillation with quantised weights of student and teacher, and with a LoRA adapter."""

from typing import Any

import pytest
import torch
from test_linear_cross_entropy_heads import adapter, as_double
from torch import Tensor

import shoestring
from references.losses import linear_cross_entropy_reference, linear_distillation_reference
from relative_error import relative_error

pytestmark = pytest.mark.device

# A workspace of 1 MiB holds the fp32 logits of student and teacher for 128 tokens, so 140 are two chunks.
TOKENS, FEATURES, WIDE, VOCAB = 140, 64, 96, 1003
# (quant_type of the student's weight, quant_type of the teacher's weight, options)
CASES: list[tuple[str | None, str | None, dict[str, Any]]] = [
    (None, None, {"temperature": 2.0}),
    ("nf4", None, {"divergence": "reverse_kl", "reduction": "none"}),
    (None, "int8", {"divergence": "reverse_kl", "reduction": "none"}),
    ("fp4", "nf4", {"divergence": "jsd", "beta": 0.3}),
    ("int8", "fp4", {}),
    ("int4", "int4", {}),
]


def heads(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return hidden, weight and bias of the student, those of the teacher, and targets, some of them -100."""

    def head(features: int) -> list[Tensor]:
        parts = (
            torch.randn(TOKENS, features),
            torch.randn(VOCAB, features) / features**0.5,
            torch.randn(VOCAB),
        )
        return [t.to(dtype) for t in parts]

    target = torch.randint(VOCAB, (TOKENS,))
    target[5:40] = -100
    return [t.requires_grad_() for t in head(FEATURES)], head(WIDE), target


def packed(weight: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
    """Return the weight, quantised to ``kind`` if it is not None, and the values that the operator sees."""
    if kind is None:
        return weight, weight
    if kind == "int8":
        codes = shoestring.quantize_int8(weight.detach())
    else:
        codes = shoestring.quantize_4bit(weight.detach(), kind, double_quant=kind == "nf4")
    return codes, codes.dequantize(weight.dtype)


@pytest.mark.sample(simt=5)
@pytest.mark.parametrize(("kind", "teacher_kind", "options"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_adapted_and_quantised_heads(
    dtype: torch.dtype, kind: str | None, teacher_kind: str | None, options: dict[str, Any]
) -> None:
    (hidden, weight, bias), (wide, teacher, teacher_bias), target = heads(dtype)
    lora = adapter(4)
    student_head, student_weight = packed(weight, kind)
    teacher_head, teacher_weight = packed(teacher, teacher_kind)
    dense = kind is None
    leaves = [hidden, bias, lora["lora_A"], lora["lora_B"]] + [weight] * dense
    ours = shoestring.linear_distillation(
        hidden,
        student_head,
        wide,
        teacher_head,
        bias,
        teacher_bias,
        target=target,
        workspace_mb=1,
        **lora,
        **options,
    )
    exact_leaves = as_double(leaves)
    h, b, lora_A, lora_B = exact_leaves[:4]
    exact = linear_distillation_reference(
        h, exact_leaves[4] if dense else student_weight.double(), wide.double(), teacher_weight.double(), b,
        teacher_bias.double(), target=target, lora_A=lora_A, lora_B=lora_B, scaling=0.5, **options,
    )  # fmt: skip
    # Results in 16 bits are rounded two or three times, each time by at most half a unit in the last place.
    # CUDA also rounds the low-rank product of hidden and lora_A.
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}[dtype]
    assert relative_error(ours, exact) < max(tolerance / 4, 2e-6)
    upstream = torch.linspace(0.5, 2, ours.numel(), dtype=torch.float64).view(ours.shape)
    mine = torch.autograd.grad(ours, leaves, upstream.to(ours.dtype))
    for name, a, reference in zip(
        ("hidden", "bias", "A", "B", "W"), mine, torch.autograd.grad(exact, exact_leaves, upstream)
    ):
        assert relative_error(a, reference) < tolerance, name


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_adapted_head_in_fp64(reduction: str) -> None:
    sizes = (5, 3), (7, 3), (2, 3), (7, 2), (5, 4), (7, 4)
    hidden, weight, lora_A, lora_B, wide, teacher = (torch.randn(s, dtype=torch.float64) for s in sizes)

    def run(h: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return shoestring.linear_distillation(
            h, w, wide, teacher, lora_A=a, lora_B=b, scaling=0.3, temperature=1.5, reduction=reduction
        )

    assert torch.autograd.gradcheck(run, [t.requires_grad_() for t in (hidden, weight, lora_A, lora_B)])


def test_a_model_is_taught_by_itself_without_its_adapter() -> None:
    """Student and teacher share a 4-bit head, and only the student has a LoRA adapter.

    The loss is zero while lora_B is zero. With another lora_B, the adapter gets gradients.
    """
    hidden = torch.randn(3, 4, FEATURES)
    head = shoestring.quantize_4bit(torch.randn(VOCAB, FEATURES) / 8, "nf4")
    lora = adapter(4)
    with torch.no_grad():
        lora["lora_B"].zero_()
    loss = shoestring.linear_distillation(hidden, head, hidden, head, **lora)
    assert loss.abs() < 1e-6
    with torch.no_grad():
        lora["lora_B"].normal_()
    shoestring.linear_distillation(hidden, head, hidden, head, **lora).backward()
    assert lora["lora_A"].grad.abs().sum() > 0
    assert lora["lora_B"].grad.abs().sum() > 0


def test_hinton_s_loss_in_two_calls() -> None:
    (hidden, weight, bias), (wide, teacher, teacher_bias), target = heads(torch.float32)
    alpha, temperature = 0.3, 2.0

    def loss(cross_entropy: Any, distillation: Any) -> Tensor:
        hard = cross_entropy(hidden, weight, target, bias)
        soft = distillation(
            hidden, weight, wide, teacher, bias, teacher_bias, target=target, temperature=temperature
        )
        return alpha * hard + (1 - alpha) * temperature**2 * soft

    ours = loss(shoestring.linear_cross_entropy, shoestring.linear_distillation)
    plain = loss(linear_cross_entropy_reference, linear_distillation_reference)
    torch.testing.assert_close(ours, plain)
    leaves = (hidden, weight, bias)
    torch.testing.assert_close(
        torch.autograd.grad(ours, leaves), torch.autograd.grad(plain, leaves), rtol=1e-4, atol=1e-7
    )


def test_opcheck_and_compile_of_a_quantised_head_with_an_adapter() -> None:
    head = shoestring.quantize_4bit(torch.randn(9, 32), "nf4", 32)
    low, up = torch.randn(6, 2, requires_grad=True), torch.randn(9, 2, requires_grad=True)
    parts = {"absmax": head.absmax, "block_size": 32, "teacher_absmax": head.absmax, "teacher_block_size": 32}
    hidden = torch.randn(6, 32, requires_grad=True)
    operator = torch.ops.shoestring.linear_distillation.default
    torch.library.opcheck(
        operator,
        (hidden, head.packed, torch.randn(6, 32), head.packed),
        {**parts, "lora_hidden": low, "lora_B": up},
    )
    lora_A = torch.randn(2, 32, requires_grad=True)

    def step(hidden: Tensor, wide: Tensor) -> Tensor:
        hidden = torch.tanh(hidden)
        return shoestring.linear_distillation(
            hidden, head, wide, head, lora_A=lora_A, lora_B=up, reduction="none"
        ).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (6, 11):
        inputs = torch.randn(tokens, 32, requires_grad=True), torch.randn(tokens, 32)
        results = [f(*inputs) for f in (step, compiled)]
        torch.testing.assert_close(*results)
        grads = [torch.autograd.grad(r, (inputs[0], lora_A, up)) for r in results]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_A": torch.ones(2, 4)}, "lora_A and lora_B: expected both or neither"),
        (
            {"lora_A": torch.ones(2, 5), "lora_B": torch.ones(9, 2)},
            r"lora_A: expected shape \(rank, 4\), received \(2, 5\)",
        ),
        (
            {"lora_A": torch.ones(2, 4), "lora_B": torch.ones(8, 2)},
            r"lora_B: expected shape \(9, 2\), rank as in lora_hidden",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors_of_adapters_name_the_argument(change: dict[str, Tensor], message: str) -> None:
    hidden = torch.zeros(6, 4)
    moved = {name: t.to(hidden.device) for name, t in change.items()}
    with pytest.raises((RuntimeError, ValueError), match=f"linear_distillation: {message}"):
        shoestring.linear_distillation(
            hidden, torch.zeros(9, 4), torch.zeros(6, 3), torch.zeros(9, 3), **moved
        )


def test_a_teacher_of_another_vocabulary_is_refused() -> None:
    head = shoestring.quantize_4bit(torch.randn(10, 64), "nf4")
    with pytest.raises(RuntimeError, match="linear_distillation: packed: expected 288 bytes"):
        shoestring.linear_distillation(torch.zeros(6, 4), torch.zeros(9, 4), torch.zeros(6, 64), head)
