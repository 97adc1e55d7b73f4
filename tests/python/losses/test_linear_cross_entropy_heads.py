"""Test linear_cross_entropy with LoRA adapters, quantised weights, and gradients added to a buffer."""

from typing import Any

import pytest
import torch
from test_linear_cross_entropy import make
from torch import Tensor

import shoestring
from references.losses import linear_cross_entropy_reference
from relative_error import relative_error

pytestmark = pytest.mark.device

# A workspace of 1 MiB holds the fp32 logits of 256 tokens, so 264 tokens are two chunks.
TOKENS, FEATURES, VOCAB = 264, 64, 1003


def adapter(rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    lora_A = (torch.randn(rank, FEATURES) / FEATURES**0.5).to(dtype).requires_grad_()
    lora_B = torch.randn(VOCAB, rank).to(dtype).requires_grad_()
    return {"lora_A": lora_A, "lora_B": lora_B, "scaling": 0.5}


def quantized(weight: Tensor, quant_type: str, nested: bool = False) -> shoestring.QuantizedTensor:
    if quant_type == "int8":
        return shoestring.quantize_int8(weight)
    return shoestring.quantize_4bit(weight, quant_type, double_quant=nested)


def as_double(leaves: list[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_(t.requires_grad) for t in leaves]


@pytest.mark.sample(simt=12)
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "none", "softcap": 3.0}, {"logit_scale": 0.5}], ids=str
)
@pytest.mark.parametrize("quant_type", [None, "nf4", "fp4", "int4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_adapted_and_quantised_heads(
    dtype: torch.dtype, quant_type: str | None, options: dict[str, Any]
) -> None:
    hidden, weight, bias, target = make(TOKENS, FEATURES, VOCAB, dtype)
    lora = adapter(4)
    head: Tensor = weight
    if quant_type is not None:
        head = quantized(weight.detach(), quant_type, nested=quant_type == "nf4")
        weight = head.dequantize(dtype)
    leaves = [hidden, bias, lora["lora_A"], lora["lora_B"]] + [weight] * (quant_type is None)
    ours = shoestring.linear_cross_entropy(hidden, head, target, bias, workspace_mb=1, **lora, **options)
    exact_leaves = as_double(leaves)
    h, b, lora_A, lora_B = exact_leaves[:4]
    w = exact_leaves[4] if quant_type is None else weight.double()
    exact = linear_cross_entropy_reference(
        h, w, target, b, lora_A=lora_A, lora_B=lora_B, scaling=0.5, **options
    )
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


def test_an_adapted_head_in_fp64() -> None:
    hidden, weight, bias, target = make(5, 3, 7, torch.float64)
    target[0] = 0
    lora_A, lora_B = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3), (7, 2)))

    def run(h: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return shoestring.linear_cross_entropy(
            h, w, target, bias, lora_A=a, lora_B=b, scaling=0.3, softcap=2.0
        )

    assert torch.autograd.gradcheck(run, (hidden, weight, lora_A, lora_B))


@pytest.mark.sample(simt=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("upstream_grad", [None, 0.25])
def test_the_weight_s_gradient_is_added_to_a_buffer(dtype: torch.dtype, upstream_grad: float | None) -> None:
    """Two micro-batches add their weight gradients to one buffer, with or without a factor of 0.25."""
    # random values that are as small as the gradients added to them
    buffer = torch.randn(VOCAB, FEATURES) / 1000
    before = buffer.clone()
    exact = before.double()
    weight = (torch.randn(VOCAB, FEATURES) / FEATURES**0.5).to(dtype).requires_grad_()
    for _ in range(2):
        hidden, _, bias, target = make(TOKENS, FEATURES, VOCAB, dtype)
        options = dict(workspace_mb=1, label_smoothing=0.1, softcap=3.0)
        loss = shoestring.linear_cross_entropy(
            hidden, weight, target, bias, weight_grad=buffer, upstream_grad=upstream_grad, **options
        )
        (loss * 0.25).backward()
        leaves = as_double([hidden, weight, bias])
        reference = linear_cross_entropy_reference(leaves[0], leaves[1], target, leaves[2], **options) * 0.25
        grads = torch.autograd.grad(reference, leaves)
        exact += grads[1]
        tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
        for a, b in ((hidden.grad, grads[0]), (bias.grad, grads[2])):
            assert a is not None and relative_error(a, b) < tolerance
    assert weight.grad is None
    assert relative_error(buffer - before, exact - before.double()) < {torch.float32: 1e-5}.get(dtype, 8e-3)


def test_a_buffer_is_a_tied_embedding_s_gradient() -> None:
    """For a tied weight, the operator adds the head's gradient to .grad; autograd adds the embedding's."""
    table = torch.randn(VOCAB, FEATURES, requires_grad=True)
    tokens = torch.randint(VOCAB, (20,))
    hidden = torch.nn.functional.embedding(tokens, table).tanh()
    plain = torch.autograd.grad(
        shoestring.linear_cross_entropy(hidden, table, tokens), table, retain_graph=True
    )[0]
    table.grad = torch.zeros_like(table)
    shoestring.linear_cross_entropy(hidden, table, tokens, weight_grad=table.grad).backward()
    torch.testing.assert_close(table.grad, plain, rtol=1e-5, atol=1e-7)


def test_a_buffer_alone_is_added_to_once_and_never_without_gradients() -> None:
    hidden, weight, bias, target = (t.detach() for t in make(6, 4, 9, ignored=0))
    buffer = torch.zeros(9, 4)
    with torch.no_grad():
        shoestring.linear_cross_entropy(hidden, weight, target, bias, weight_grad=buffer, upstream_grad=1.0)
    assert (buffer == 0).all()
    with pytest.raises(RuntimeError, match="weight_grad: expected an input that requires a gradient"):
        shoestring.linear_cross_entropy(hidden, weight, target, bias, weight_grad=buffer)
    shoestring.linear_cross_entropy(hidden, weight, target, bias, weight_grad=buffer, upstream_grad=2.0)
    leaf = weight.clone().requires_grad_()
    expected = torch.autograd.grad(linear_cross_entropy_reference(hidden, leaf, target, bias), leaf)[0]
    torch.testing.assert_close(buffer, 2 * expected)
    stats = shoestring.linear_cross_entropy_with_stats(
        hidden.requires_grad_(), weight, target, bias, weight_grad=buffer, upstream_grad=1.0
    )
    with pytest.raises(RuntimeError, match="upstream_grad: expected an upstream gradient of the loss alone"):
        stats.lse.sum().backward()


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
        ({"weight_grad": torch.ones(9, 5)}, r"weight_grad: expected Float of weight's shape, \[9, 4\]"),
        ({"weight_grad": torch.ones(9, 4).bfloat16()}, "weight_grad: expected Float"),
        (
            {"upstream_grad": 1.0},
            "upstream_grad: expected None, or a finite number that is not 0 together with weight_grad",
        ),
        (
            {"weight_grad": torch.ones(9, 4), "upstream_grad": 1.0, "reduction": "none"},
            "upstream_grad: expected None with",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors_name_the_option(change: dict[str, Any], message: str) -> None:
    arguments = (torch.zeros(6, 4, requires_grad=True), torch.zeros(9, 4), torch.zeros(6, dtype=torch.int64))
    with pytest.raises((RuntimeError, ValueError), match=f"linear_cross_entropy: {message}"):
        shoestring.linear_cross_entropy(*arguments, **change)


@pytest.mark.parametrize("quant_type", ["nf4", "int8"])
def test_a_quantised_head_of_odd_size_and_no_gradient(quant_type: str) -> None:
    # The weight has 165 codes of 4 bits in nf4, so the last byte holds only one.
    hidden, weight, _, target = make(7, 5, 33)
    head = quantized(weight.detach(), quant_type)
    loss = shoestring.linear_cross_entropy(hidden, head, target.clamp_min(0))
    expected = linear_cross_entropy_reference(hidden, head.dequantize(), target.clamp_min(0))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, hidden)[0] for x in (loss, expected)))


def peaky(tokens: int, features: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return hidden, weight, bias and target of a model that gives each token a few probable classes."""
    weight = torch.randn(vocab, features) / features**0.5
    target = torch.randint(vocab // 20, (tokens,))
    hidden = 12 * weight[target] + torch.randn(tokens, features) / 10
    leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight, torch.zeros(vocab))]
    return *leaves, target


@pytest.mark.sample(simt=3)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_filtering_errs_by_no_more_than_it_says(dtype: torch.dtype, reduction: str, lora: bool) -> None:
    hidden, weight, bias, target = peaky(TOKENS, FEATURES, VOCAB, dtype)
    adapters = adapter(4) if lora else {}
    if lora:
        with torch.no_grad():
            adapters["lora_B"] /= 100
    leaves = [hidden, weight, bias] + [adapters[k] for k in ("lora_A", "lora_B") if lora]
    eps = 2.0**-8

    def run(filter_eps: float) -> tuple[Tensor, ...]:
        loss = shoestring.linear_cross_entropy(
            hidden,
            weight,
            target,
            bias,
            reduction=reduction,
            filter_eps=filter_eps,
            workspace_mb=1,
            **adapters,
        )
        return loss.detach(), *torch.autograd.grad(loss, leaves, torch.full_like(loss, 3.0))

    exact, ours = run(0.0), run(eps)
    # Without filter, other kernels may compute the logits of bf16 tensors. A loss is the difference of two
    # numbers of the size of a logit, each of which then has other roundings.
    largest = (hidden.detach().double() @ weight.detach().double().t() + bias.detach()).abs().max().item()
    atol = 2.0**-21 * largest if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(exact[0], ours[0], rtol=0, atol=atol)
    # the weight gradients of most classes are zero, because filter_eps skips the classes of low probability
    assert (ours[2] == 0).all(1).sum() > VOCAB / 2
    # The filter (filter_eps) changes each element of the logits' gradient by less than eps times the upstream
    # gradient. The upstream gradient is 3, or 3 / TOKENS for a mean.
    share = eps * 3 / (TOKENS if reduction == "mean" else 1)
    bounds = share * weight.abs().sum(0), share * hidden.abs().sum(0), share * TOKENS
    for a, b, bound in zip(exact[1:], ours[1:], bounds):
        # Gradients with and without filter are each rounded to dtype, by half a unit in the last place. The
        # order of their sums differs.
        rounding = a.abs() * torch.finfo(dtype).eps * (dtype != torch.float32)
        assert ((a - b).abs() <= bound + rounding + 1e-6).all()
    for a, b in zip(exact[1:], ours[1:]):
        assert not torch.equal(a, b)


def test_a_filtered_gradient_is_added_to_a_buffer() -> None:
    """With filter_eps, chunks of tokens add gradients to one buffer, also for a class in several chunks."""
    hidden, weight, bias, target = peaky(TOKENS, FEATURES, VOCAB, torch.float32)
    buffer = torch.ones(VOCAB, FEATURES)
    for options in ({}, {"weight_grad": buffer, "upstream_grad": 1.0}):
        shoestring.linear_cross_entropy(
            hidden, weight, target, bias, filter_eps=2.0**-8, workspace_mb=1, **options
        ).backward()
    assert weight.grad is not None
    torch.testing.assert_close(buffer - 1, weight.grad, rtol=0, atol=1e-6)
    assert (buffer == 1).all(1).sum() > VOCAB / 2


def test_dense_data_is_not_filtered() -> None:
    hidden, weight, bias, target = make(TOKENS, FEATURES, 64)
    results = []
    for filter_eps in (0.0, 2.0**-16):
        options = {"filter_eps": filter_eps} if filter_eps else {}
        loss = shoestring.linear_cross_entropy(hidden, weight, target, bias, **options)
        results.append(torch.autograd.grad(loss, (hidden, weight, bias)))
    assert all(torch.equal(a, b) for a, b in zip(*results))
