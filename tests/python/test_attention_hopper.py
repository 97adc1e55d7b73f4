"""The forward kernel for Hopper GPUs: which calls it takes, and what tiles of many keys bring with them.

On a GPU that is no Hopper these run over the kernel that it has."""

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import EMULATOR, relative_error
from torch import Tensor

import shoestring
from shoestring.ops import attention_reference

attention = functools.partial(shoestring.attention, deterministic=True)  # our kernels
HOPPER_THREADS = 384


def make(queries: int, keys: int, dim: int = 64, dtype: torch.dtype = torch.bfloat16, heads: int = 2) -> list[Tensor]:
    return [torch.randn(1, h, n, dim).to(dtype) for h, n in ((heads, queries), (1, keys), (1, keys))]


def misaligned(t: Tensor) -> Tensor:
    """The same numbers, in rows that begin at odd multiples of 8 bytes."""
    wide = torch.zeros(*t.shape[:-1], t.size(-1) + 4, dtype=t.dtype)
    wide[..., 4:] = t
    return wide[..., 4:]


CALLS: dict[str, tuple[bool, Callable[[list[Tensor]], tuple[list[Tensor], dict[str, Any]]]]] = {
    "plain": (True, lambda x: (x, {})),
    "options": (True, lambda x: (x, {"causal": True, "window": (9, -1), "softcap": 3.0, "scale": 0.2})),
    "dim 40": (True, lambda x: ([t[..., :40] for t in x], {})),
    "transposed": (True, lambda x: ([t.transpose(1, 2).contiguous().transpose(1, 2) for t in x], {})),
    "fp32": (False, lambda x: ([t.float() for t in x], {})),
    "bias": (False, lambda x: (x, {"bias": torch.zeros(1, 1, 1, 30)})),
    "alibi": (False, lambda x: (x, {"alibi_slopes": torch.ones(2)})),
    "sinks": (False, lambda x: (x, {"sinks": torch.ones(2)})),
    "dropout": (False, lambda x: (x, {"dropout_p": 0.1, "seed": torch.tensor([1])})),
    "scale of 0": (False, lambda x: (x, {"scale": 0.0})),
    "wide": (True, lambda x: ([torch.cat([t, t, t], -1) for t in x], {})),
    "misaligned": (False, lambda x: ([x[0], misaligned(x[1]), x[2]], {})),
    "odd stride": (False, lambda x: ([t[..., :63].contiguous() for t in x], {})),
    "one key for all": (False, lambda x: ([x[0], x[1][:, :, :1].expand(-1, -1, 30, -1), x[2]], {})),
}


@pytest.mark.device
@pytest.mark.each_gpu
@pytest.mark.parametrize("name", CALLS)
def test_which_calls_it_takes(name: str, capability: str, backend: str) -> None:
    taken, change = CALLS[name]
    inputs, options = change(make(20, 30))
    out = attention(*inputs, **options)
    if backend == "simt":
        threads = ctypes.CDLL(str(EMULATOR)).simt_last_threads()
        assert (threads == HOPPER_THREADS) == (taken and capability == "sm_90a"), threads
    if "seed" not in options:
        exact = attention_reference(*(t.double() for t in inputs), **options).out
        assert relative_error(out, exact) < 5e-3


@pytest.mark.device
@pytest.mark.each_gpu
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("queries, keys", [(1, 1), (129, 300), (64, 127), (128, 257), (300, 70)])
def test_edges_of_tiles(queries: int, keys: int, dim: int, capability: str, backend: str) -> None:
    """Around 128 queries and keys, over more tiles than the ring has stages; twice the same bits."""
    if backend == "simt" and dim > 64 and queries * keys > (30000 if dim == 128 else 9000):
        pytest.skip("too many scores for the emulator")
    inputs = make(queries, keys, dim, torch.float16, heads=1)
    for options in ({}, {"causal": True}, {"window": (70, 3)}):
        out, lse = attention(*inputs, return_lse=True, **options)
        exact, exact_lse = attention_reference(*(t.double() for t in inputs), **options)
        assert relative_error(out, exact) < 6e-4
        seen = exact_lse > -math.inf
        assert torch.equal(seen, lse > -math.inf) and (out[~seen] == 0).all()
        if seen.any():
            assert (lse[seen] - exact_lse[seen]).abs().max() < 1e-5
        assert torch.equal(out, attention(*inputs, **options))


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
    """A tile reaches into the next packed sequence, whose values may be anything."""
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
def test_a_large_cap_and_scores_beyond_it(capability: str) -> None:
    q, k, v = make(30, 40)
    for softcap, factor in ((50.0, 30), (0.5, 1e4), (1e4, 1)):
        inputs = [q * factor, k, v]
        exact = attention_reference(*(t.double() for t in inputs), softcap=softcap).out
        assert relative_error(attention(*inputs, softcap=softcap), exact) < 5e-3
