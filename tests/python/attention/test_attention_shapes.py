"""Attention takes the shapes of scaled_dot_product_attention: any number of dimensions, sizes that broadcast."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from references.attention import attention_reference
from relative_error import relative_error
from shoestring import attention

# Shapes of q, k and v in front of (tokens, features). Grouped queries are last: two key-value heads.
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "plain": [(2, 4), (2, 4), (2, 4)],
    "tokens": [(), (), ()],
    "heads": [(4,), (4,), (4,)],
    "two_batches": [(2, 3, 4), (2, 3, 4), (2, 3, 4)],
    "three_batches": [(2, 1, 3, 2), (2, 1, 3, 2), (2, 1, 3, 2)],
    "batch_of_one": [(3, 4), (1, 4), (1, 4)],
    "batch_of_v": [(3, 4), (3, 4), (1, 4)],
    "batch_of_q": [(1, 4), (3, 4), (3, 4)],
    "one_head": [(2, 4), (2, 1), (2, 1)],
    "one_head_of_v": [(2, 4), (2, 4), (2, 1)],
    "one_head_of_q": [(2, 1), (2, 4), (2, 4)],
    "fewer_dimensions": [(3, 4), (4,), (3, 4)],
    "no_heads_in_k": [(3, 4), (), (4,)],
    "mixed": [(2, 1, 4), (1, 3, 4), (3, 1)],
    "empty": [(0, 4), (0, 4), (1, 4)],
    "empty_of_two": [(2, 0, 4), (2, 0, 4), (2, 0, 4)],
    "grouped": [(4,), (2,), (2,)],
    "grouped_batches": [(2, 3, 4), (2, 3, 2), (1, 3, 2)],
}

# Shapes of masks for shapes in front of q's tokens, in the order of the scores; "b" and "h" are the sizes of
# the scores.
MASKS = ["qk", "q1", "k", "hqk", "1qk", "h1k", "bhqk", "b11k"]


def make(kind: str, dtype: torch.dtype) -> list[Tensor]:
    lengths = [(11, 8), (17, 8), (17, 6)]
    return [torch.randn(*front, *inner).to(dtype) for front, inner in zip(SHAPES[kind], lengths)]


def scores_shape(tensors: list[Tensor]) -> list[int]:
    """Return the shape of the scores that the tensors broadcast to."""
    q, k, _ = tensors
    heads = max(t.size(-3) if t.dim() > 2 else 1 for t in tensors)  # with grouped queries those of q
    fronts = [[*t.shape[:-3], heads] if t.dim() > 2 else [] for t in tensors]
    return [*torch.broadcast_shapes(*fronts), q.size(-2), k.size(-2)]


def results(function: Any, tensors: list[Tensor], dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """Return the output and the gradients of all floating-point tensors, with the upstream gradient cos(i)."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    bias = options.get("attn_mask", options.get("bias"))
    if bias is not None and bias.is_floating_point():
        leaves.append(bias.detach().to(dtype).requires_grad_())
        options["attn_mask" if "attn_mask" in options else "bias"] = leaves[-1]
    out = function(*leaves[:3], **options)
    out.backward(torch.arange(out.numel()).cos().view(out.shape).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def torch_attention(*tensors: Tensor, **options: Any) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return scaled_dot_product_attention(*tensors, **options)


def assert_like_torch(tensors: list[Tensor], dtype: torch.dtype, mask: Tensor | None = None) -> None:
    grouped = tensors[0].dim() > 2 and tensors[1].dim() > 2 and 1 < tensors[1].size(-3) < tensors[0].size(-3)
    exact = results(torch_attention, tensors, torch.float64, attn_mask=mask, enable_gqa=grouped)
    ours = results(attention, tensors, dtype, bias=mask, deterministic=True)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1.5e-2}[dtype]
    assert len(ours) == len(exact)
    for a, b in zip(exact, ours):
        assert a.shape == b.shape and b.dtype == dtype
        assert a.numel() == 0 or relative_error(b, a) <= tolerance


@pytest.mark.device
@pytest.mark.each_gpu
@pytest.mark.sample(simt=8)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_shapes(kind: str, dtype: torch.dtype, backend: str) -> None:
    if dtype == torch.float64 and backend != "cpu":
        pytest.skip("fp64 is for CPU tensors")
    assert_like_torch(make(kind, dtype), dtype)


@pytest.mark.device
@pytest.mark.each_gpu
@pytest.mark.sample(simt=8)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["plain", "tokens", "heads", "two_batches", "batch_of_one", "empty"])
@pytest.mark.parametrize("bool_mask", [False, True])
def test_masks(bool_mask: bool, kind: str, mask: str, backend: str) -> None:
    tensors = make(kind, torch.float32)
    shape = scores_shape(tensors)
    of = dict(zip("kqh", shape[::-1])) | {"1": 1}
    sizes = (
        [*shape[:-3], *(of.get(c, 1) for c in mask[1:])] if mask[0] == "b" else [of.get(c, 1) for c in mask]
    )
    if len(sizes) > len(shape):
        pytest.skip("SDPA takes no mask of more dimensions than q has")
    given = torch.randn(sizes)
    if bool_mask:
        given = given > -0.7
        given[..., 0] = True  # SDPA gives NaN for a query without keys, and attention gives 0
    assert_like_torch(tensors, torch.float32, given)


def test_a_mask_of_two_dimensions_is_not_copied() -> None:
    """A view of a mask is read in place: the mask of 4,096 tokens has 64 MiB, and the call needs 1 MiB."""
    q = torch.randn(2, 1, 4096, 4)
    mask = torch.zeros(4096, 4096)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        attention(q, q, q, bias=mask)
    assert sum(max(event.cpu_memory_usage, 0) for event in profile.events()) < 16 << 20


@pytest.mark.device
@pytest.mark.each_gpu
@pytest.mark.parametrize("batches", [(2,), (2, 3)], ids=str)
def test_strides_are_read_without_a_copy(batches: tuple[int, ...], backend: str) -> None:
    """Transposed and expanded tensors give the results of contiguous ones, and the gradients are summed."""
    base = torch.randn(*batches, 10, 4, 16)
    q = base.transpose(-2, -3)
    k, v = (torch.randn(10, 4, 16).transpose(0, 1).expand(*batches, 4, 10, 16) for _ in range(2))
    out = attention(q, k, v, causal=True)
    assert torch.equal(out, attention(*(t.contiguous() for t in (q, k, v)), causal=True))
    assert out.transpose(-2, -3).is_contiguous()  # in the order of q
    one = [t[(0,) * len(batches)].detach().clone().requires_grad_() for t in (k, v)]
    attention(q, *one, causal=True).sum().backward()
    whole = [t.contiguous().requires_grad_() for t in (k, v)]
    attention(q, *whole, causal=True).sum().backward()
    for a, b in zip(one, whole):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad.sum(tuple(range(len(batches)))))


def test_an_expanded_q_gives_a_contiguous_output() -> None:
    q, k = torch.randn(1, 4, 5, 8), torch.randn(3, 4, 5, 8)
    assert attention(q, k, k).is_contiguous()
    assert attention(q.expand(3, 4, 5, 8), k, k).is_contiguous()


@pytest.mark.device
@pytest.mark.each_gpu
@pytest.mark.parametrize("kind", ["tokens", "heads", "two_batches", "mixed"])
def test_the_other_options(kind: str, backend: str) -> None:
    """Sinks, slopes, windows and lse have the shapes of the call, as in the reference."""
    tensors = make(kind, torch.float32)
    *lead, _, _ = scores_shape(tensors)
    options: dict[str, Any] = {"causal": True, "window_size": (9, -1), "softcap": 3.0}
    if lead:
        options |= {"sinks": torch.randn(lead[-1]), "alibi_slopes": torch.rand(lead)}
    ours = attention(*tensors, **options, return_lse=True)
    wide = {k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()}
    exact = attention_reference(*(t.double() for t in tensors), **wide)
    for a, b in zip(exact, ours):
        torch.testing.assert_close(b, a.float(), rtol=1e-5, atol=1e-6)
    if len(lead) == 3:  # slopes that broadcast to the batch, and dropout of the merged batch
        slopes = options["alibi_slopes"][:, :1]
        some = attention(*tensors, alibi_slopes=slopes)
        assert torch.equal(some, attention(*tensors, alibi_slopes=slopes.expand(lead)))
        seed = torch.tensor([3])
        flat = [t.expand(*lead[:2], *t.shape[-3:]).flatten(0, 1) for t in tensors]
        dropped = attention(*tensors, dropout_p=0.3, seed=seed)
        assert torch.equal(dropped.flatten(0, 1), attention(*flat, dropout_p=0.3, seed=seed))


@pytest.mark.device
@pytest.mark.each_gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_packed_sequences_with_slopes_of_their_own(dtype: torch.dtype, capability: str, backend: str) -> None:
    if dtype == torch.float64 and backend != "cpu":
        pytest.skip("fp64 is for CPU tensors")
    starts = torch.tensor([0, 7, 7, 40, 41], dtype=torch.int32)
    wide = [torch.randn(41, heads, 16, dtype=torch.float64) for heads in (4, 2, 2)]
    slopes, bias = torch.rand(4, 4), torch.randn(41, 33, dtype=torch.float64)  # (queries, longest sequence)
    up = torch.randn(41, 4, 16, dtype=torch.float64)

    def run(function: Any, to: torch.dtype, given: Tensor) -> list[Tensor]:
        leaves = [t.to(to).requires_grad_() for t in (*wide, given)]
        q, k, v, added = leaves
        found = function(q, k, v, cu_seqlens_q=starts, alibi_slopes=slopes.to(to), bias=added, causal=True)
        out = found if isinstance(found, Tensor) else found.out
        return [out.detach(), *torch.autograd.grad((out * up.to(to)).sum(), leaves)]

    ours = run(attention, dtype, bias)
    exact = run(attention_reference, torch.float64, bias[None])
    assert ours[-1].shape == bias.shape
    for a, b in zip(exact, ours):
        bound = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 3e-2}[dtype]
        assert relative_error(b.reshape(a.shape), a) <= bound


@pytest.mark.parametrize("kind", ["tokens", "heads", "mixed", "grouped_batches", "batch_of_one"])
def test_gradcheck(kind: str) -> None:
    front = [t[:3] for t in SHAPES[kind]]
    inner = [(3, 4), (5, 4), (5, 2)]
    tensors = [torch.randn(*a, *b, dtype=torch.float64, requires_grad=True) for a, b in zip(front, inner)]
    bias = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, k, v, b: attention(q, k, v, bias=b, causal=True, return_lse=True), (*tensors, bias)
    )


@pytest.mark.parametrize("kind", ["heads", "mixed"])
def test_compiles_and_has_meta_shapes(kind: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out, lse = attention(q, k, v, bias=mask, return_lse=True)
        return out.sum() + lse.sum()

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for keys in (17, 19):
        tensors = make(kind, torch.float32)
        tensors[1:] = [torch.randn(*t.shape[:-2], keys, t.size(-1)) for t in tensors[1:]]
        inputs = [t.requires_grad_() for t in (*tensors, torch.randn(11, keys))]
        expected = torch.autograd.grad(call(*inputs), inputs)
        for a, b in zip(expected, torch.autograd.grad(compiled(*inputs), inputs)):
            assert torch.equal(a, b)
    options = {"causal": True}
    torch.library.opcheck(torch.ops.shoestring.attention_with_lse.default, inputs[:4], options)
    for gradients in (False, True):
        with torch.inference_mode(not gradients):
            given = [t.detach().clone().requires_grad_(gradients) for t in inputs]
            real = attention(*given[:3], bias=given[3], return_lse=True)
            meta = attention(*(t.to("meta") for t in given[:3]), bias=given[3].to("meta"), return_lse=True)
        for a, b in zip(real, meta):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def refused(message: str, *tensors: Tensor, **options: Any) -> None:
    with pytest.raises(RuntimeError, match=message):
        attention(*tensors, **options)


def test_refusals() -> None:
    q = torch.randn(2, 3, 4, 5, 8)
    refused(r"q: expected \(..., heads, tokens, features\)", torch.randn(8), q, q)
    refused(r"k: expected sizes in front of the tokens that broadcast", q, q[:, :2], q)
    refused(r"v: expected sizes in front of the tokens that broadcast", q, q, q[:, :2])
    refused(r"v: expected sizes in front of the tokens that broadcast", q, q, q[:, :, :3])
    refused("bias: expected at most 3 dimensions", q[0, 0], q[0, 0], q[0, 0], bias=torch.zeros(1, 4, 5, 5))
    refused("bias: expected sizes that broadcast to the scores", q, q, q, bias=torch.zeros(3, 3, 4, 5, 5))
    refused(r"bias: expected \(batch, heads, queries, keys\)", q, q, q, bias=torch.zeros(4, 5))
    refused(
        r"alibi_slopes: expected \(heads\), or \(batch, heads\)", q, q, q, alibi_slopes=torch.zeros(3, 3, 4)
    )
    refused(
        r"alibi_slopes: expected \(heads\), or", q[0, 0], q[0, 0], q[0, 0], alibi_slopes=torch.zeros(1, 4)
    )
    starts = torch.tensor([0, 2, 4], dtype=torch.int32)
    packed = q[0, 0]
    refused(r"alibi_slopes: expected \(heads\) or \(sequences, heads\)", packed, packed, packed,
            cu_seqlens_q=starts, alibi_slopes=torch.zeros(3, 5))  # fmt: skip
