"""Test the attention kernels for Hopper GPUs: which calls use them, and results near edges of their tiles.

On any other GPU, the tests run the kernels for that GPU.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shoestring
from build_folder import EMULATOR
from references.attention import attention_reference
from relative_error import relative_error

# Deterministic calls never use PyTorch's operators, only shoestring's own kernels.
attention = functools.partial(shoestring.attention, deterministic=True)
HOPPER_THREADS = 384


def make(
    queries: int, keys: int, dim: int = 64, dtype: torch.dtype = torch.bfloat16, heads: int = 2
) -> list[Tensor]:
    return [torch.randn(1, h, n, dim).to(dtype) for h, n in ((heads, queries), (1, keys), (1, keys))]


def gradients(
    function: Callable[..., Any], inputs: list[Tensor], upstream: Tensor, **options: Any
) -> list[Tensor]:
    """Return the gradients of sum(upstream * out) + sum(finite lse) for q, k and v.

    The gradients have the dtype of upstream.
    """
    leaves = [t.detach().to(upstream.dtype).requires_grad_() for t in inputs]
    extra = {} if function is attention_reference else {"return_lse": True}
    out, lse = function(*leaves, **options, **extra)
    seen = torch.isfinite(lse)
    return list(torch.autograd.grad([out, lse[seen].sum()], leaves, [upstream, None]))


def last_threads() -> int:
    return int(ctypes.CDLL(str(EMULATOR)).simt_last_threads())


def misaligned(t: Tensor) -> Tensor:
    """Return a copy of t whose rows start at odd multiples of 8 bytes."""
    wide = torch.zeros(*t.shape[:-1], t.size(-1) + 4, dtype=t.dtype)
    wide[..., 4:] = t
    return wide[..., 4:]


CALLS: dict[str, tuple[bool, Callable[[list[Tensor]], tuple[list[Tensor], dict[str, Any]]]]] = {
    "plain": (True, lambda x: (x, {})),
    "options": (True, lambda x: (x, {"causal": True, "window_size": (9, -1), "softcap": 3.0, "scale": 0.2})),
    "dim 40": (True, lambda x: ([t[..., :40] for t in x], {})),
    "transposed": (True, lambda x: ([t.transpose(1, 2).contiguous().transpose(1, 2) for t in x], {})),
    "fp32": (False, lambda x: ([t.float() for t in x], {})),
    "bias": (False, lambda x: (x, {"bias": torch.zeros(1, 1, 1, 30)})),
    "alibi": (False, lambda x: (x, {"alibi_slopes": torch.ones(2)})),
    "sinks": (True, lambda x: (x, {"sinks": torch.ones(2)})),
    "dropout": (False, lambda x: (x, {"dropout_p": 0.1, "seed": torch.tensor([1])})),
    "scale of 0": (False, lambda x: (x, {"scale": 0.0})),
    "wide": (True, lambda x: ([torch.cat([t, t, t], -1) for t in x], {})),
    "misaligned": (False, lambda x: ([x[0], misaligned(x[1]), x[2]], {})),
    "odd stride": (False, lambda x: ([t[..., :63].contiguous() for t in x], {})),
    "one key for all": (False, lambda x: ([x[0], x[1][:, :, :1].expand(-1, -1, 30, -1), x[2]], {})),
}


@pytest.mark.device
@pytest.mark.each_gpu("all")
@pytest.mark.parametrize("name", CALLS)
def test_which_calls_it_takes(name: str, capability: str, backend: str) -> None:
    taken, change = CALLS[name]
    inputs, options = change(make(20, 30))
    if capability == "sm_75":
        with pytest.raises(RuntimeError, match=r"expected a GPU of compute capability 8\.0 or more"):
            attention(*inputs, **options)
        return
    out = attention(*inputs, **options)
    if backend == "simt":
        assert (last_threads() == HOPPER_THREADS) == (taken and capability == "sm_90a"), last_threads()
    if "seed" not in options:
        exact = attention_reference(*(t.double() for t in inputs), **options).out
        assert relative_error(out, exact) < 5e-3


@pytest.mark.device
@pytest.mark.each_gpu
@pytest.mark.sample(simt=45)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (70, 3)}], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (129, 300), (64, 127), (128, 257), (300, 70)])
def test_edges_of_tiles(
    queries: int, keys: int, dim: int, options: dict[str, Any], capability: str, backend: str
) -> None:
    """Results are right and repeatable near the tile size of 128, and with more tiles than buffers."""
    if backend == "simt" and dim > 64 and queries * keys > (30000 if dim == 128 else 9000):
        pytest.skip("too many scores for the emulator")
    inputs = make(queries, keys, dim, torch.float16, heads=1)
    out, lse = attention(*inputs, return_lse=True, **options)
    exact, exact_lse = attention_reference(*(t.double() for t in inputs), **options)
    assert relative_error(out, exact) < 6e-4
    seen = exact_lse > -math.inf
    assert torch.equal(seen, lse > -math.inf) and (out[~seen] == 0).all()
    if seen.any():
        assert (lse[seen] - exact_lse[seen]).abs().max() < 1e-5
    assert torch.equal(out, attention(*inputs, **options))


@pytest.mark.device
@pytest.mark.each_gpu("all")
@pytest.mark.parametrize("name", [n for n in CALLS if n not in ("dropout", "fp32")])
def test_which_calls_backward_takes(name: str, capability: str, backend: str) -> None:
    if capability == "sm_75":
        pytest.skip("forward is refused")
    taken, change = CALLS[name]
    inputs, options = change(make(20, 30))
    upstream = torch.randn(1, 2, 20, inputs[2].size(-1)).to(torch.bfloat16)
    found = gradients(attention, inputs, upstream, **options)
    if backend == "simt":
        assert (last_threads() == HOPPER_THREADS) == (taken and capability == "sm_90a"), last_threads()
    exact = gradients(attention_reference, inputs, upstream.double(), **options)
    for name, a, b in zip("qkv", found, exact):
        assert relative_error(a, b) < 8e-3, name


@pytest.mark.device
@pytest.mark.each_gpu
def test_an_upstream_gradient_that_no_copy_takes(capability: str, backend: str) -> None:
    """If rows of the upstream gradient start at odd multiples of 8 bytes, the kernels for sm_80 run."""
    inputs, upstream = make(20, 30), misaligned(torch.randn(1, 2, 20, 64).to(torch.bfloat16))
    found = gradients(attention, inputs, upstream)
    if backend == "simt":
        assert last_threads() != HOPPER_THREADS
    for a, b in zip(found, gradients(attention_reference, inputs, upstream.double())):
        assert relative_error(a, b) < 8e-3


@pytest.mark.device
@pytest.mark.each_gpu
@pytest.mark.sample(simt=45)
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 5.0}, {"window_size": (70, 3)}], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (129, 300), (64, 97), (300, 70), (97, 129)])
def test_gradients_at_edges_of_tiles(
    queries: int, keys: int, dim: int, options: dict[str, Any], capability: str, backend: str
) -> None:
    """Gradients are right and repeatable near the edges of tiles, and with more tiles than buffers for them.

    A thread block keeps 128 rows of keys or queries. It loads tiles of 48 to 96 rows of the other tensor, one
    after another, into a ring of buffers. Two heads share the keys, so tiles of queries of the second head
    follow tiles of the first head in the ring.
    """
    most = {64: 40000, 128: 22000}.get(dim, 7000) if capability == "sm_90a" else 13000 if dim == 64 else 5000
    if backend == "simt" and queries * keys > most:
        pytest.skip("too many scores for the emulator")
    heads = 2 if queries * keys < 13000 or backend != "simt" else 1
    inputs, upstream = (
        make(queries, keys, dim, torch.float16, heads),
        torch.randn(1, heads, queries, dim).half(),
    )
    found = gradients(attention, inputs, upstream, **options)
    exact = gradients(attention_reference, inputs, upstream.double(), **options)
    for name, a, b in zip("qkv", found, exact):
        # With one key, the exact gradients of q and k are zero, so the results are rounding errors.
        scale = max(b.abs().max().item(), 1e-3)
        assert (a.double() - b).abs().max().item() < 2e-3 * scale + (1e-3 if keys == 1 else 0), name
    for a, b in zip(found, gradients(attention, inputs, upstream, **options)):
        assert torch.equal(a, b)


@pytest.mark.device
@pytest.mark.each_gpu
@pytest.mark.sample(simt=4)
@pytest.mark.parametrize("window", [(65, 0), (0, 65)])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_last_row_that_passes_is_alone_in_its_tile(
    dim: int, window: tuple[int, int], capability: str
) -> None:
    """Gradients are right if the last tile holds a single row that weighs as much as all other rows.

    The 128 rows of a thread block attend to 193 rows. This is one row more than full tiles of 96, 64 or 48
    rows hold (192).
    """
    inputs, upstream = make(194, 194, dim, heads=1), torch.randn(1, 1, 194, dim).to(torch.bfloat16)
    query, key = (192, 127) if window[0] else (127, 192)
    inputs[0][:, :, query] = inputs[1][:, :, key] * 4 / math.sqrt(dim)
    exact = gradients(attention_reference, inputs, upstream.double(), window_size=window)
    for name, a, b in zip("qkv", gradients(attention, inputs, upstream, window_size=window), exact):
        assert relative_error(a, b) < 8e-3, name
        assert (a.double() - b).abs().max() < 2e-2 * b.abs().max(), name


@pytest.mark.device
@pytest.mark.each_gpu
@pytest.mark.sample(simt=10)
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv"])
@pytest.mark.parametrize("dim", [64, 192])
def test_gradients_of_some(wanted: str, dim: int, capability: str) -> None:
    """Gradients are right if only some of q, k and v require a gradient.

    With more than 128 features, the gradients of k and v come from two separate kernel launches.
    """
    inputs = make(40, 50, dim)
    leaves = {n: t.requires_grad_(n in wanted) for n, t in zip("qkv", inputs)}
    upstream = torch.randn(1, 2, 40, dim).to(torch.bfloat16)
    found = torch.autograd.grad(attention(*inputs, causal=True), [leaves[n] for n in wanted], upstream)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    attention_reference(*exact, causal=True).out.backward(upstream.double())
    for name, a in zip(wanted, found):
        b = exact["qkv".index(name)].grad
        assert b is not None and relative_error(a, b) < 8e-3, name


@pytest.mark.device
@pytest.mark.each_gpu
def test_many_queries_pass_through_the_ring(capability: str) -> None:
    inputs, upstream = make(700, 5, 64, heads=1), torch.randn(1, 1, 700, 64).to(torch.bfloat16)
    exact = gradients(attention_reference, inputs, upstream.double())
    for a, b in zip(gradients(attention, inputs, upstream), exact):
        assert relative_error(a, b) < 8e-3


@pytest.mark.device
@pytest.mark.each_gpu
def test_many_keys_pass_through_the_ring(capability: str) -> None:
    inputs = make(5, 1300, 64, heads=1)
    exact = attention_reference(*(t.double() for t in inputs)).out
    assert relative_error(attention(*inputs), exact) < 5e-3


@pytest.mark.device
@pytest.mark.each_gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_what_another_sequence_holds_does_not_matter(dim: int, capability: str) -> None:
    """Infinite or NaN values of the next packed sequence in a tile do not change a sequence's output."""
    lengths = [40, 130, 7]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = (torch.randn(sum(lengths), 1, dim).to(torch.bfloat16) for _ in range(3))
    before = attention(q, k, v, cu_seqlens_q=starts)
    for start, wrong in ((40, math.inf), (170, math.nan)):
        v[start:], k[start:] = wrong, wrong
    out = attention(q, k, v, cu_seqlens_q=starts)
    assert torch.equal(out[:40], before[:40]) and not torch.isfinite(out[40:]).any()


@pytest.mark.device
@pytest.mark.each_gpu
@pytest.mark.sample(simt=3)
@pytest.mark.parametrize("dim", [64, 192])
@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_what_another_sequence_holds_does_not_matter_to_gradients(
    wrong: float, dim: int, capability: str
) -> None:
    """Infinite or NaN inputs and gradients of the next packed sequence do not change other gradients."""
    lengths = [40, 130, 7] if dim == 64 else [40, 30]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = (
        torch.randn(sum(lengths), heads, dim).to(torch.bfloat16).requires_grad_() for heads in (2, 1, 1)
    )
    upstream = torch.randn_like(q)
    before = torch.autograd.grad(attention(q, k, v, cu_seqlens_q=starts), [q, k, v], upstream)
    with torch.no_grad():
        for t in (q, k, v, upstream):
            t[40:] = wrong
    after = torch.autograd.grad(attention(q, k, v, cu_seqlens_q=starts), [q, k, v], upstream)
    for a, b in zip(after, before):
        assert torch.equal(a[:40], b[:40]) and not torch.isfinite(a[40:]).any()


@pytest.mark.device
@pytest.mark.each_gpu
def test_gradients_of_scores_of_a_milliard(capability: str) -> None:
    """Gradients are finite for scores near 1e9, whose rounding errors overflow 2**x.

    The largest score of a query keeps the probability 1.
    """
    q, k, v = make(20, 40)
    inputs, upstream = [q * 1e4, k * 1e4, v], torch.randn(1, 2, 20, 64).to(torch.bfloat16)
    exact = gradients(attention_reference, inputs, upstream.double())
    found = gradients(attention, inputs, upstream)
    assert all(torch.isfinite(t).all() for t in found) and relative_error(found[2], exact[2]) < 5e-3


@pytest.mark.device
@pytest.mark.each_gpu
def test_a_large_cap_and_scores_beyond_it(capability: str) -> None:
    q, k, v = make(30, 40)
    # The third case below needs scores that are all beyond the cap.
    while ((q * 1e4).double() @ k.double().mT).abs().min() / 8 < 8:
        q, k, v = make(30, 40)
    for softcap, factor in ((50.0, 30), (1e4, 1), (0.5, 1e4)):
        inputs = [q * factor, k, v]
        exact = attention_reference(*(t.double() for t in inputs), softcap=softcap).out
        assert relative_error(attention(*inputs, softcap=softcap), exact) < 5e-3
        upstream = torch.randn(1, 2, 30, 64).to(torch.bfloat16)
        expected = gradients(attention_reference, inputs, upstream.double(), softcap=softcap)
        for name, a, b in zip("qkv", gradients(attention, inputs, upstream, softcap=softcap), expected):
            assert torch.isfinite(a).all()
            # With the softcap 0.5, the exact gradients of q and k are below 1e-30, because tanh is flat there. The
            # derivative of the cap is then wrong by at most 2^-21, since the reciprocal in it is approximate. A
            # gradient of a score is at most twice the largest product of upstream and v, a probability is at
            # most 1, and the default scale is 1 / 8.
            of_scores = 2 * (upstream.double() @ v.double().mT).abs().max()
            others = inputs[1] if name == "q" else inputs[0]
            flat = 2**-21 * of_scores / 8 * others.double().abs().sum((0, 1, 2)).max()
            assert relative_error(a, b) < 1e-2 or (
                softcap == 0.5 and name != "v" and a.abs().max() <= flat
            ), (name, softcap)
