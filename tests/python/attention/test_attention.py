"""Test attention with each option on each backend: errors are at most twice those of eager PyTorch."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from operator_cases import Arguments, Draw, Operator, casts, normal, uniform, wide_dtype
from operator_tests import OperatorTests
from references.attention import attention_reference
from relative_error import relative_error
from rounding import rounding_errors
from shoestring import attention
from thread_counts import assert_same_bits

pytestmark = [pytest.mark.device, pytest.mark.each_gpu]

# Pairs of the number of queries and the number of keys, mostly from FlashAttention's tests. They include one
# token, parts of a tile, more queries than keys and more keys than queries. With 34 queries and keys, the
# last panel of queries has two queries. Under the causal mask, the first of the two does not see the last
# key.
LENGTHS = [
    (1, 1),
    (5, 3),
    (34, 34),
    (64, 128),
    (128, 192),
    (113, 203),
    (239, 1),
    (799, 3),
    (108, 256),
    (384, 256),
    (640, 128),
    (1023, 1024),
    (1024, 1023),
]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "sliding": {"causal": True, "window_size": (29, -1)},
    "softcap": {"softcap": 3.0, "causal": True},
    "alibi": {"slopes": True, "causal": True},
    "sinks": {"sinks": True, "causal": True},
    "bias": {"causal": True},
}


def sequences(rows: int) -> tuple[int, int, int]:
    """Return the batch, and the numbers of queries and of keys. Many rows are sequences of 16 queries."""
    batch, queries = (2, rows) if rows <= 128 else (rows // 16, 16)
    return batch, queries, queries * 7 // 4


def arguments(rows: int, features: int) -> Arguments:
    """Return four heads of q and two of k and v. The values have fewer features."""
    batch, queries, keys = sequences(rows)
    return {
        "q": normal(batch, 4, queries, features),
        "k": normal(batch, 2, keys, features),
        "v": normal(batch, 2, keys, features - features // 4),
        "deterministic": True,  # the kernels of this package, not those of PyTorch
    }


def bias(letters: str) -> Callable[[int, int], Draw]:
    """Return a draw of a bias whose sizes are those of batch, heads, queries and keys, or 1."""

    def draw(rows: int, features: int) -> Draw:
        batch, queries, keys = sequences(rows)
        sizes = {"b": batch, "h": 4, "q": queries, "k": keys, "1": 1}
        return normal(*(sizes[letter] for letter in letters))

    return draw


def reference(deterministic: bool, **given: Any) -> tuple[Tensor, Tensor]:
    """Compute attention, and return the log-sum-exp of 16-bit scores in fp32."""
    out, lse = attention_reference(**given)
    return out, lse.to(wide_dtype(lse.dtype))


SLOPES = uniform(4, high=0.3, dtype=wide_dtype, gradient=False)
SINKS = normal(4, dtype=wide_dtype)


@pytest.mark.sample(simt=40)
class TestAttentionWithLse(OperatorTests):
    operator = Operator(
        "attention_with_lse",
        reference,
        arguments,
        # Fewer queries and keys than a SIMD vector holds; in the emulator, keys that fill one tile and a part of the
        # next.
        sizes=[(5, 6), (40, 32)],
        options=[
            {"causal": True, "softcap": 4.0, "alibi_slopes": SLOPES, "sinks": SINKS, "bias": bias("1hqk")}
            | {"window_size": lambda rows, features: [3 * rows // 4, -1]},
            {},
            {"causal": True},
            {"window_size": lambda rows, features: [rows // 2, rows // 8]},
            {"causal": True, "window_size": [29, -1]},
            {"softcap": 3.0, "causal": True},
            {"scale": 0.3},
            {"scale": -0.3, "causal": True},
            {"scale": 0.0, "causal": True},
            {"alibi_slopes": SLOPES, "causal": True},
            {
                "alibi_slopes": lambda rows, features: uniform(
                    sequences(rows)[0], 4, high=0.3, dtype=wide_dtype, gradient=False
                )
            },
            {"sinks": SINKS, "causal": True},
            {"bias": bias("bhqk"), "causal": True},
            {"bias": bias("1hqk")},
            {"bias": bias("b11k"), "window_size": [50, 50]},
            {"bias": bias("bhq1")},
            {"bias": bias("1111")},
        ],
        # Attention weights are rounded to the dtype of v, also by eager PyTorch.
        factor=2.0,
        computed=lambda dtype: dtype,
        autocast=casts("q", "k", "v"),
        function=lambda **given: attention(**given, return_lse=True),
        fp64_device="cpu",
        traced=2,
    )


def make(
    dtype: torch.dtype,
    queries: int,
    keys: int,
    dim: int,
    options: dict[str, Any],
    *,
    value_dim: int | None = None,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return random q, k and v in ``dtype``, and the keyword arguments of attention."""
    shapes = [
        (batch, heads, queries, dim),
        (batch, kv_heads, keys, dim),
        (batch, kv_heads, keys, value_dim or dim),
    ]
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    named = {k: v for k, v in options.items() if k not in ("slopes", "sinks")}
    if options.get("slopes"):
        named["alibi_slopes"] = torch.rand(heads) * 0.3
    if options.get("sinks"):
        named["sinks"] = torch.randn(heads)
    if dtype == torch.float64:
        named = {
            k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in named.items()
        }
    return inputs, named


def run(
    function: Any, inputs: list[Tensor], named: dict[str, Any], dtype: torch.dtype, upstream: list[Tensor]
) -> list[Tensor]:
    """Return out, lse, and the gradients of (upstream[0] * out).sum() + (upstream[1] * lse).sum()."""
    leaves = [t.detach().clone().to(dtype).requires_grad_() for t in inputs]
    others = {}
    for name, value in named.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.detach().clone()
            value = value.to(dtype) if dtype == torch.float64 or name == "bias" else value
            if name in ("bias", "sinks"):
                value.requires_grad_()
                leaves.append(value)
        others[name] = value
    # With deterministic=True, calls on a GPU use shoestring's own kernels, not PyTorch's.
    extra = {"return_lse": True, "deterministic": True} if function is attention else {}
    out, lse = function(*leaves[:3], **others, **extra)
    seen = torch.isfinite(lse.detach())
    loss = (out * upstream[0].to(out.dtype)).sum() + (lse[seen] * upstream[1].to(lse.dtype)[seen]).sum()
    loss.backward()
    return [out.detach(), lse.detach().masked_fill(~seen, 0), *(leaf.grad for leaf in leaves)]


def compare(dtype: torch.dtype, inputs: list[Tensor], named: dict[str, Any]) -> None:
    q, v = inputs[0], inputs[2]
    upstream = [torch.randn(*q.shape[:-1], v.size(-1)), torch.randn(q.shape[:-1])]
    if "cu_seqlens_q" in named:
        upstream[1] = upstream[1].t().contiguous()
    exact = run(attention_reference, inputs, named, torch.float64, upstream)
    eager = run(attention_reference, inputs, named, dtype, upstream)
    ours = run(attention, inputs, named, dtype, upstream)
    floor = {torch.float64: 1e-13, torch.float32: 5e-7, torch.bfloat16: 3e-3, torch.float16: 4e-4}[dtype]
    leaves = [
        name
        for name, value in named.items()
        if name == "sinks" or (name == "bias" and value.dtype != torch.bool)
    ]
    expected: list[float] = []
    for i, name in enumerate(["out", "lse", "q", "k", "v", *leaves]):
        a, b, c = exact[i], ours[i], eager[i]
        if a.numel() == 0:
            continue
        assert torch.isfinite(b).all(), name
        error, theirs, size = relative_error(b, a), relative_error(c, a), 1.0
        if name == "sinks":
            size = (a.double().norm() / sink_terms(exact[0], exact[1], named, upstream).norm()).item()
        bound = max(2 * theirs * size, floor)
        if error * size > bound:  # eager PyTorch may have been lucky
            expected = expected or rounding_errors(
                lambda: run(attention_reference, inputs, named, torch.float64, upstream), exact, dtype
            )
            bound = max(bound, expected[i] * size)
        assert error * size <= bound, f"{name}: {error:.2e}, eager {theirs:.2e}, bound {bound / size:.2e}"


def sink_terms(out: Tensor, lse: Tensor, named: dict[str, Any], upstream: list[Tensor]) -> Tensor:
    """Return for each head the sum of the magnitudes of the terms of the sink's gradient.

    The gradient of a head's sink is a sum over all queries. With d = sum(grad_out * out), the term of a query
    is exp(sink - lse) * (grad_lse - d). The terms may cancel, so the error of the gradient is measured
    relative to the sum of their magnitudes.
    """
    products = (upstream[0].double() * out.double()).sum(-1)
    if "cu_seqlens_q" in named:  # packed: out is (tokens, heads, features), lse is (heads, tokens)
        products = products.t()
    heads = lse.double().movedim(-2, 0).flatten(1)
    others = (upstream[1].double() - products).movedim(-2, 0).flatten(1)
    return ((named["sinks"].double()[:, None] - heads).exp() * others).abs().sum(1)


def dtypes(backend: str) -> list[torch.dtype]:
    return [torch.float32, torch.bfloat16, torch.float16] + ([torch.float64] if backend == "cpu" else [])


def and_fp64(dtype: torch.dtype, backend: str) -> list[torch.dtype]:
    """Return the dtypes of a test case: ``dtype``, and on the CPU also fp64 in the cases with fp32."""
    return [dtype, torch.float64] if dtype == torch.float32 and backend == "cpu" else [dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_mask_that_hides_all_keys_of_a_query(dtype: torch.dtype, capability: str, backend: str) -> None:
    for each in and_fp64(dtype, backend):
        queries, keys = (40, 70) if backend == "simt" else (70, 90)
        inputs, named = make(each, queries, keys, 32, {})
        named["bias"] = torch.rand(2, 1, queries, keys) > 0.4
        named["bias"][:, :, 0] = False
        compare(each, inputs, named)


@pytest.mark.parametrize("packed", [False, True])
def test_a_bias_that_all_keys_share(packed: bool, capability: str) -> None:
    """Without sinks, a bias that is equal for all keys of a query changes only the query's log-sum-exp.

    The gradient of the bias is therefore exactly the gradient of lse.
    """
    q, k, v, up = (torch.randn(1, 2, 9, 16) for _ in range(4))
    bias = torch.zeros(1, 2, 9, 1)
    options: dict[str, Any] = {"causal": True, "deterministic": True}
    if packed:
        q, k, v, up = (t[0].transpose(0, 1).contiguous() for t in (q, k, v, up))
        bias, options["cu_seqlens_q"] = bias[0], torch.tensor([0, 4, 9], dtype=torch.int32)
    q.select(0 if packed else 2, 5).select(0, 0)[..., 3] = float("nan")
    bias.select(-2, 2).fill_(float("-inf"))  # query 2 attends to no key
    bias.requires_grad_()
    out, lse = attention(q, k, v, bias=bias, return_lse=True, **options)
    (to_bias,) = torch.autograd.grad((out * up).sum() + 3 * lse.sum(), bias)
    expected = torch.full((2, 9), 3.0)
    expected[:, 2] = 0
    assert to_bias[..., 0].isnan().sum() in (1, 2) and to_bias[..., 5, 0].isnan().any()
    rest = [i for i in range(9) if i != 5]
    assert torch.equal(to_bias.view(2, 9)[:, rest], expected[:, rest])


@pytest.mark.sample(26)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_lengths(
    queries: int, keys: int, causal: bool, dtype: torch.dtype, capability: str, backend: str
) -> None:
    if backend == "simt" and queries * keys > 23000:
        pytest.skip("too many scores for the emulator")
    heads = 1 if queries * keys > 200000 else 2  # with two heads, attention_reference would take a second
    inputs, named = make(dtype, queries, keys, 64, {"causal": causal}, heads=heads, kv_heads=1, batch=1)
    compare(dtype, inputs, named)


# Pairs of head_dim and value_dim, from 3 to 256. Some are no multiple of the width of a vector register, and
# in some pairs the two differ.
@pytest.mark.sample(simt=14)
@pytest.mark.parametrize(
    ("dim", "value_dim"),
    [(32, 32), (40, 24), (64, 128), (80, 80), (96, 64), (128, 128), (192, 128), (256, 256), (3, 5)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dimensions(dtype: torch.dtype, dim: int, value_dim: int, capability: str) -> None:
    inputs, named = make(
        dtype, 50, 77, dim, {"causal": True}, value_dim=value_dim, heads=2, kv_heads=1, batch=1
    )
    compare(dtype, inputs, named)


@pytest.mark.sample(simt=16)
@pytest.mark.parametrize("option", ["plain", "causal", "sliding", "sinks", "alibi", "softcap", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_packed_sequences(dtype: torch.dtype, option: str, capability: str, backend: str) -> None:
    lengths_q, lengths_k = [7, 0, 64, 33, 1], [20, 3, 64, 12, 0]
    starts = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k)]
    size = {"dim": 24, "heads": 2, "kv_heads": 1} if backend == "simt" else {"dim": 48}
    for each in and_fp64(dtype, backend):
        (q, k, v), named = make(
            each, sum(lengths_q), sum(lengths_k), options=OPTIONS[option], batch=1, **size
        )
        packed = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
        if option == "bias":
            named["bias"] = torch.randn(q.size(1), sum(lengths_q), max(lengths_k), dtype=each)
        compare(each, packed, named | {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]})


def test_strides(capability: str, backend: str) -> None:
    """Attention of transposed views equals that of contiguous copies; the output has the strides of q."""
    base = torch.randn(2, 40, 4 + 2 + 2, 64)
    q, k, v = (t.transpose(1, 2) for t in base.split([4, 2, 2], dim=2))
    out = attention(q, k, v, causal=True)
    assert torch.equal(out, attention(*(t.contiguous() for t in (q, k, v)), causal=True))
    assert out.transpose(1, 2).is_contiguous()
    every_second = torch.randn(2, 4, 40, 128)[..., ::2]
    assert torch.equal(attention(every_second, k, v), attention(every_second.contiguous(), k, v))


@pytest.mark.sample(simt=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_a_function_of_the_seed(dtype: torch.dtype, capability: str, backend: str) -> None:
    queries, keys = (130, 300) if backend != "simt" else (40, 70)
    (q, k, _), _ = make(dtype, queries, keys, 32, {})
    v = torch.eye(keys, dtype=dtype)[:, :256].expand(2, 2, keys, -1) if keys <= 256 else None
    seed = torch.tensor([77])
    # With one-hot rows in v, the output is the matrix of attention weights, whose zeros show the dropped
    # weights. For more than 256 keys, two calls compute the columns of this matrix, because CUDA kernels
    # allow at most 256 features in v.
    if v is None:
        eye = torch.eye(keys, dtype=dtype)
        pieces = [
            attention(q, k, e.expand(2, 2, keys, -1), dropout_p=0.3, seed=seed)
            for e in (eye[:, :200], eye[:, 200:])
        ]
        dropped = torch.cat(pieces, -1)
    else:
        dropped = attention(q, k, v, dropout_p=0.3, seed=seed)
    keep = dropped != 0
    assert abs(keep.float().mean().item() - 0.7) < 0.01
    assert (
        abs(keep.float().mean((0, 1, 2)).std().item()) < 0.1 and abs(keep.float().mean(-1).std().item()) < 0.1
    )
    scale = keep.double() * (65536 / (65536 - round(0.3 * 65536)))
    inputs, _ = make(dtype, queries, keys, 32, {})
    inputs[0], inputs[1] = q, k
    upstream = [torch.randn(2, 4, queries, 32), torch.randn(2, 4, queries)]

    def with_mask(*tensors: Tensor, **options: Any) -> Any:
        return attention_reference(*tensors, keep=scale.to(tensors[0].dtype))

    exact = run(with_mask, inputs, {}, torch.float64, upstream)
    ours = run(attention, inputs, {"dropout_p": 0.3, "seed": seed}, dtype, upstream)
    for a, b in zip(exact, ours):
        assert a is not None and b is not None
        assert relative_error(b, a) < (1e-6 if dtype == torch.float32 else 1e-2)
    again = attention(q, k, inputs[2], dropout_p=0.3, seed=seed)
    assert torch.equal(again, ours[0])
    assert not torch.equal(again, attention(q, k, inputs[2], dropout_p=0.3, seed=seed + 1))


def test_repeatable_on_any_number_of_threads(capability: str, backend: str, seed: int) -> None:
    operator = TestAttentionWithLse.operator
    case = operator.case(*(40, 32) if backend == "simt" else (100, 64))
    given = case.given(seed)
    assert_same_bits(lambda: list(case.results(operator.call, given, seed).values()), (1, 2, 3))


def test_a_query_that_sees_nothing_gives_zeros(capability: str, backend: str) -> None:
    for dtype in dtypes(backend):
        inputs, _ = make(dtype, 9, 4, 32, {})
        q, k, v = (t.requires_grad_() for t in inputs)
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        assert (
            (out[:, :, :5] == 0).all()
            and (lse[:, :, :5] == -math.inf).all()
            and torch.isfinite(lse[:, :, 5:]).all()
        )
        out.sum().backward()
        assert q.grad is not None and (q.grad[:, :, :5] == 0).all() and torch.isfinite(q.grad).all()
        assert k.grad is not None and torch.isfinite(k.grad).all()


def test_large_and_unseen_scores(capability: str) -> None:
    """Very large scores do not overflow, and keys that a query does not see may hold any finite value."""
    q, k, v = torch.randn(1, 1, 20, 32) * 1e4, torch.randn(1, 1, 40, 32) * 1e4, torch.randn(1, 1, 40, 32)
    out = attention(q, k, v, causal=True)
    exact = attention_reference(q.double(), k.double(), v.double(), causal=True).out
    # fp32 numbers near 1e9 are 64 apart, so rounding of scores could change which key has the largest score.
    # With the inputs of this test it does not.
    assert relative_error(out, exact) < 1e-4
    bias = torch.full((1, 1, 20, 40), -math.inf)
    bias[..., 3] = 0
    # The kernels for CUDA split an fp32 value into two TF32 values, which together have 22 bits of precision.
    torch.testing.assert_close(
        attention(q, k, v, bias=bias), v[:, :, 3:4].expand(1, 1, 20, 32), rtol=5e-7, atol=0
    )


def test_nan_stays_where_it_is(capability: str) -> None:
    q, k, v = (torch.randn(1, 2, 70, 32) for _ in range(3))
    q[0, 0, 5] = math.nan
    out = attention(q, k, v, causal=True)
    assert (
        out[0, 0, 5].isnan().all() and torch.isfinite(out[0, 0, :5]).all() and torch.isfinite(out[0, 1]).all()
    )
    k[0, 1, 60] = math.inf
    out = attention(q, k, v, causal=True)
    assert torch.isfinite(out[0, 1, :60]).all() and not torch.isfinite(out[0, 1, 60:]).all()


def test_empty(capability: str) -> None:
    for shape in [(0, 2, 5, 32), (2, 2, 0, 32)]:
        q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
        out = attention(q, k, v)
        assert out.shape == shape
        out.sum().backward()
        assert q.grad is not None and q.grad.shape == shape
    q, k, v = torch.randn(2, 2, 5, 32, requires_grad=True), torch.randn(2, 2, 0, 32), torch.randn(2, 2, 0, 32)
    out = attention(q, k, v)
    assert (out == 0).all()
    out.sum().backward()
    assert q.grad is not None and (q.grad == 0).all()
