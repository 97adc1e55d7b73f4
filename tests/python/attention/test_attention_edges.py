"""Test dropout, packed sequences and single gradients of attention, its memory and its error messages."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from shoestring import attention


def small(*, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = [(2, 4, 5, 6), (2, 2, 7, 6), (2, 2, 7, 3), (1, 4, 5, 7), (4,)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def test_gradcheck_of_dropout() -> None:
    seed = torch.tensor([5])
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, dropout_p=0.4, seed=seed), small()[:3])


def test_opcheck_without_lse() -> None:
    op = torch.ops.shoestring.attention.default
    torch.library.opcheck(op, small(dtype=torch.float32), {"causal": True, "window_size": [3, -1]})
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = [torch.randn(5, 2, 6, requires_grad=True) for _ in range(3)]
    torch.library.opcheck(op, packed, {"cu_seqlens_q": starts})


@pytest.mark.device
@pytest.mark.each_gpu
def test_only_some_gradients(capability: str) -> None:
    inputs = small(dtype=torch.float32)
    named = dict(zip(["q", "k", "v", "bias", "sinks"], inputs))
    full = torch.autograd.grad(attention(**named).sum(), inputs)
    for i, name in enumerate(named):
        alone = {other: t if other == name else t.detach() for other, t in named.items()}
        (grad,) = torch.autograd.grad(attention(**alone).sum(), alone[name])
        assert torch.equal(grad, full[i])


MEMORY = """
import resource, torch
from shoestring import attention
torch.set_num_threads(2)
def run(tokens):
    q, k, v = (torch.randn(1, 1, tokens, 32, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 1, 1, tokens, requires_grad=True)
    out = attention(q, k, v, causal=True, bias=bias, softcap=5.0, dropout_p=0.1, seed=torch.tensor([1]))
    out.sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = run(256)
print(run(8192) - before)
"""


def test_memory_is_linear_in_tokens() -> None:
    """The memory of attention grows linearly with the number of tokens.

    For 8,192 tokens the scores alone would take 256 MiB. Attention needs ten tensors of 1 MiB, 8 MiB
    for partial gradients of q, and buffers.
    """
    result = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 40


def refused(message: str, *tensors: Tensor, **options: Any) -> None:
    with pytest.raises(RuntimeError, match=message):
        attention(*tensors, **options)


def test_refusals() -> None:
    q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
    refused(r"q: expected \(..., heads, tokens, features\)", q[0, 0, 0], k, v)
    refused("k: expected fp32, fp64, bf16 or fp16, and q's dtype", q, k.double(), v)
    refused("k: expected q's 8 features", q, k[..., :4], v)
    refused("v: expected k's tokens and heads", q, k, v[:, :, :3])
    refused("a number of heads that divides q's, 4, received 3", q, k[:, :3], v[:, :3])
    refused("k: expected sizes in front of the tokens that broadcast", q, torch.randn(3, 4, 5, 8), v)
    refused("window_size: expected", q, k, v, window_size=(-2, 0))
    refused("window_size: expected two numbers", q, k, v, window_size=(3,))
    refused("softcap: expected", q, k, v, softcap=-1.0)
    refused(r"bias: expected \(batch, heads, queries, keys\)", q, k, v, bias=torch.randn(5, 4))
    refused("bias: expected fp32", q, k, v, bias=torch.randn(1, 1, 5, 5, dtype=torch.float64))
    refused("bias: expected a floating-point tensor", q, k, v, bias=torch.ones(1, 1, 5, 5, dtype=torch.int64))
    refused(r"sinks: expected \(heads\)", q, k, v, sinks=torch.randn(3))
    refused("alibi_slopes: expected", q, k, v, alibi_slopes=torch.randn(3))
    refused(
        "alibi_slopes: expected a tensor without requires_grad",
        q,
        k,
        v,
        alibi_slopes=torch.randn(4, requires_grad=True),
    )
    refused("dropout: expected a probability", q, k, v, dropout_p=1.0, seed=torch.tensor([1]))
    refused("seed: expected a seed with dropout", q, k, v, dropout_p=0.1)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    refused("cu_seqlens_k: expected cu_seqlens_q", q, k, v, cu_seqlens_k=starts)
    refused("with cu_seqlens_q", q, k, v, cu_seqlens_q=starts)
    flat = [t[0].transpose(0, 1) for t in (q, k, v)]
    refused("cu_seqlens_q: expected the", *flat, cu_seqlens_q=starts.long())
    refused(
        "as many sequences",
        *flat,
        cu_seqlens_q=starts,
        cu_seqlens_k=torch.tensor([0, 2, 5], dtype=torch.int32),
    )
    for wrong in ([0, 6], [1, 5], [0, 4], [0, 5, 3, 5]):
        refused(
            "cu_seqlens_q: expected offsets that rise from 0 to",
            *flat,
            cu_seqlens_q=torch.tensor(wrong, dtype=torch.int32),
        )
    refused("bias: expected at least 5 keys", *flat, cu_seqlens_q=starts, bias=torch.randn(4, 5, 3))
