import math
from typing import Any

import pytest
import torch
from torch import Tensor

import shoestring
from operator_cases import Arguments, Operator, normal, uniform
from operator_tests import OperatorTests
from references.layers import rope_reference
from relative_error import relative_error

pytestmark = pytest.mark.device

# Shapes (batch, query heads, key heads, tokens, head_dim, rotary_dim; None rotates the whole head). They
# cover an empty batch, odd sizes, whole SIMD vectors, partial rotation, and a head wider than a warp.
SHAPES = [
    (0, 2, 1, 3, 8, None),
    (1, 1, 1, 1, 2, None),
    (2, 3, 1, 5, 10, 6),
    (2, 4, 2, 7, 64, None),
    (1, 2, 2, 5, 128, 32),
    (1, 1, 1, 3, 544, 528),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def arguments(tokens: int, head_dim: int) -> Arguments:
    """Return two heads of q and one of k with weights of norms; an odd head is rotated but for its last element."""
    width = head_dim // 2
    return {
        "q": normal(1, 2, tokens, head_dim),
        "k": normal(1, 1, tokens, head_dim),
        "cos": uniform(tokens, width, low=-1.0, gradient=False),
        "sin": uniform(tokens, width, low=-1.0, gradient=False),
        "rotary_dim": 2 * width,
        "q_weight": uniform(head_dim, low=0.5, high=1.5),
        "k_weight": uniform(head_dim, low=0.5, high=1.5),
    }


class TestRope(OperatorTests):
    operator = Operator(
        "rope",
        rope_reference,
        arguments,
        sizes=[(3, 10), (7, 64)],
        options=[
            {"interleaved": interleaved} | norms
            for interleaved in (False, True)
            for norms in ({}, {"q_weight": None, "k_weight": None})
        ],
    )


def tables(tokens: int, width: int, interleaved: bool = False, twice: bool = True) -> tuple[Tensor, Tensor]:
    """Return fp32 tables of the cosines and sines of rotary angles, in the layout of transformers."""
    angles = torch.arange(tokens)[:, None] * torch.logspace(0, -2, max(1, width // 2))[: width // 2]
    if twice:
        angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def heads(batch: int, count: int, tokens: int, head_dim: int) -> Tensor:
    """Return ``count`` random heads, (batch, count, tokens, head_dim), as a transposed view."""
    return torch.randn(batch, tokens, count, head_dim).transpose(1, 2)


def results(
    function: Any,
    leaves: list[Tensor],
    others: list[Tensor],
    grads: list[Tensor],
    compute: torch.dtype | None,
    **options: Any,
) -> list[Tensor]:
    leaves = [t.detach().to(compute or t.dtype).requires_grad_() for t in leaves]
    if len(leaves) == 4:
        options = options | {"q_weight": leaves[2], "k_weight": leaves[3]}
    new = function(*leaves[:2], *(t.to(compute or t.dtype) for t in others), **options)
    return [*new, *torch.autograd.grad(new, leaves, [g.to(compute or g.dtype) for g in grads])]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_worse_than_eager(capability: str, dtype: torch.dtype, interleaved: bool, normed: bool) -> None:
    for batch, q_heads, k_heads, tokens, head_dim, rotary_dim in SHAPES:
        leaves = [heads(batch, n, tokens, head_dim).to(dtype) for n in (q_heads, k_heads)]
        grads = [torch.randn_like(t) for t in leaves]
        if normed:
            leaves += [torch.rand(head_dim).add(0.5).to(dtype) for _ in range(2)]
        turned = head_dim if rotary_dim is None else rotary_dim
        for twice in (True, False):
            angles = [t.to(dtype) for t in tables(tokens, turned, interleaved, twice)]
            options = {"rotary_dim": rotary_dim, "interleaved": interleaved}
            ours, eager = (
                results(f, leaves, angles, grads, None, **options) for f in (shoestring.rope, rope_reference)
            )
            exact = results(rope_reference, leaves, angles, grads, torch.float64, **options)
            for a, b, c in zip(ours, exact, eager, strict=True):
                assert a.dtype == dtype and a.shape == c.shape
                if a.numel():
                    few = (
                        8e-7 if head_dim == 2 else 2e-7
                    )  # The gradient of a norm over a head of two elements suffers from cancellation.
                    assert relative_error(a, b) <= 1.1 * relative_error(c, b) + few


def test_positions_batches_and_packed_tokens(capability: str) -> None:
    q, k = heads(2, 3, 5, 16), heads(2, 1, 5, 16)
    cos, sin = tables(20, 16)
    ids = torch.randint(20, (2, 5))
    expected = rope_reference(q, k, cos[ids], sin[ids])
    for function in (shoestring.rope, rope_reference):
        for given in ((cos[ids], sin[ids], None), (cos, sin, ids)):
            for a, b in zip(function(q, k, *given[:2], position_ids=given[2]), expected, strict=True):
                torch.testing.assert_close(a, b)
        for a, b in zip(
            function(q, k, cos, sin, position_ids=ids[0]),
            function(q, k, cos[ids[:1]], sin[ids[:1]]),
            strict=True,
        ):
            torch.testing.assert_close(a, b)
        one = function(q, k, cos, sin, position_ids=ids[:1])[0]
        torch.testing.assert_close(one, function(q, k, cos, sin, position_ids=ids[0])[0])
        packed = function(q[0].transpose(0, 1), k[0].transpose(0, 1), cos, sin, position_ids=ids[0])
        torch.testing.assert_close(packed[0].transpose(0, 1), expected[0][0])
        torch.testing.assert_close(packed[1].transpose(0, 1), expected[1][0])
    reshaped = shoestring.rope(q, k, cos.bfloat16().t().contiguous().t(), sin.bfloat16(), position_ids=ids)
    torch.testing.assert_close(
        reshaped[0], rope_reference(q, k, cos.bfloat16(), sin.bfloat16(), position_ids=ids)[0]
    )


def test_strides_are_kept_and_nothing_is_copied(capability: str) -> None:
    fused = torch.randn(2, 5, 4 + 2 + 2, 16)
    cos, sin = tables(5, 16)
    q, k = fused[:, :, :4].transpose(1, 2), fused[:, :, 4:6].transpose(1, 2)
    before = fused.clone()
    new_q, new_k = shoestring.rope(q, k, cos, sin)
    expected = rope_reference(q, k, cos, sin)
    torch.testing.assert_close((new_q, new_k), expected)
    assert (
        new_q.transpose(1, 2).is_contiguous()
        and new_k.transpose(1, 2).is_contiguous()
        and torch.equal(fused, before)
    )
    plain = [t.contiguous().requires_grad_() for t in (q, k)]
    turned = shoestring.rope(*plain, cos, sin)
    assert turned[0].is_contiguous()
    torch.testing.assert_close(turned, expected)
    across = torch.randn(2, 4, 16, 5).transpose(2, 3)  # `across` has heads whose elements are not contiguous
    torch.testing.assert_close(
        shoestring.rope(across, across, cos, sin)[0], rope_reference(across, across, cos, sin)[0]
    )
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        shoestring.rope(*plain, cos, sin)
    assert sum(s.numel() for s in saved) == cos.numel() + sin.numel()


def test_positions_out_of_range(backend: str) -> None:
    q, k = heads(1, 2, 3, 8), heads(1, 1, 3, 8)
    cos, sin = tables(4, 8)
    for wrong in (-1, 4):
        ids = torch.tensor([0, wrong, 3])
        if backend == "cpu":
            with pytest.raises(
                IndexError, match="rope: position_ids: expected rows of cos, 0 to 3, received"
            ):
                shoestring.rope(q, k, cos, sin, position_ids=ids)
        else:
            new, _ = shoestring.rope(q, k, cos, sin, position_ids=ids)
            assert new[:, :, 1].isnan().all() and not new[:, :, [0, 2]].isnan().any()


def test_weights_of_other_dtypes_and_offsets(capability: str) -> None:
    leaves = [heads(2, 3, 7, 64).bfloat16(), heads(2, 1, 7, 64).bfloat16(), torch.rand(64), torch.rand(64)]
    grads, angles = [torch.randn_like(t) for t in leaves[:2]], tables(7, 64)
    ours = results(shoestring.rope, leaves, angles, grads, None, eps=1e-3, offset=1.0)
    exact = results(rope_reference, leaves, angles, grads, torch.float64, eps=1e-3, offset=1.0)
    assert [t.dtype for t in ours[4:]] == [torch.float32] * 2
    for a, b in zip(ours[:4], exact[:4], strict=True):
        assert relative_error(a, b) <= torch.finfo(a.dtype).eps
    # The gradient of an element of a weight is a sum over all heads and tokens. Its terms have random signs, so
    # the k-th partial sum is about sqrt(k) times as large as a term. The roundings of n partial sums add up to
    # sqrt(1 + ... + n) terms, which is sqrt(n / 2) times the sum. Each term itself has about 8 independent
    # roundings, whose errors add up to 3.
    for a, b, leaf in zip(ours[4:], exact[4:], leaves[:2], strict=True):
        terms = leaf.numel() // leaf.size(-1)
        assert relative_error(a, b) <= (math.sqrt(terms / 2) + 3) * torch.finfo(a.dtype).eps / 2
    frozen = shoestring.rope(
        leaves[0].requires_grad_(),
        leaves[1],
        *angles,
        q_weight=leaves[2],
        k_weight=leaves[3],
        offset=1.0,
        eps=1e-3,
    )
    assert torch.equal(torch.autograd.grad(frozen[0], leaves[0], grads[0])[0], ours[2])


def test_errors() -> None:
    q, k = heads(2, 3, 5, 8), heads(2, 1, 5, 8)
    cos, sin = tables(5, 8)
    for message, arguments, options in (
        (r"rope: q: expected \(batch, heads, tokens, head_dim\)", (q[0, 0], k, cos, sin), {}),
        (r"rope: k: expected q's shape \(except the number of heads\)", (q, k[:, :, :4], cos, sin), {}),
        (r"rope: cos, sin: expected one shape", (q, k, cos, sin[:3]), {}),
        (
            r"rope: cos: expected \(tokens, width\) with width 8 or 4 for rotary_dim 8 and 5 tokens, received \[4, 8\]",
            (q, k, cos[:4], sin[:4]),
            {},
        ),
        (
            r"rope: cos: expected \(positions, width\)",
            (q, k, cos[None], sin[None]),
            {"position_ids": torch.arange(5)},
        ),
        (
            r"rope: rotary_dim: expected an even number of at most 8, head_dim, received 3",
            (q, k, cos, sin),
            {"rotary_dim": 3},
        ),
        (
            r"rope: position_ids: expected \(5\) or \(1 or batch, 5\) int64",
            (q, k, cos, sin),
            {"position_ids": torch.arange(4)},
        ),
        (
            r"rope: q_weight, k_weight: expected both or neither, received q_weight alone",
            (q, k, cos, sin),
            {"q_weight": torch.ones(8)},
        ),
        (
            r"rope: k_weight: expected \(8\)",
            (q, k, cos, sin),
            {"q_weight": torch.ones(8), "k_weight": torch.ones(4)},
        ),
        (r"rope: cos, sin: expected tables without gradients", (q, k, cos.clone().requires_grad_(), sin), {}),
    ):
        with pytest.raises(RuntimeError, match=message):
            shoestring.rope(*arguments, **options)
