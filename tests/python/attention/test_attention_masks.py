"""Test attention with biases so large that a log-sum-exp in fp32 keeps nothing of the sum of exponentials.

The right values are those of softmax in fp32, which subtracts the largest score of a row first.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from references.attention import attention_reference
from relative_error import relative_error
from shoestring import attention

pytestmark = [pytest.mark.device, pytest.mark.each_gpu]

QUERIES, KEYS = 40, 90
LARGE: dict[torch.dtype, list[float]] = {
    torch.float32: [-1e9, -1e4, 1e6, torch.finfo(torch.float32).min],
    torch.bfloat16: [-1e9, torch.finfo(torch.bfloat16).min],
    torch.float16: [-1e4, torch.finfo(torch.float16).min],
    torch.float64: [-1e9, torch.finfo(torch.float64).min],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sinks": True},
    "capped": {"softcap": 4.0, "causal": True},
    "dense": {"shape": (1, 2, QUERIES, KEYS)},
    "packed": {"packed": True},
}


def gradients(
    function: Any, leaves: list[Tensor], upstream: Tensor, named: dict[str, Any], dtype: torch.dtype
) -> list[Tensor]:
    """Return out and the gradients of the leaves that require one, computed in ``dtype``.

    The leaves are q, k, v, the bias and the sinks.
    """
    copies = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in leaves]
    named = dict(named, bias=copies[3])
    if len(copies) > 4:
        named["sinks"] = copies[4]
    out = function(*copies[:3], **named)
    out = out if isinstance(out, Tensor) else out.out
    wanted = [t for t in copies if t.requires_grad]
    return [out, *torch.autograd.grad((out * upstream.to(out.dtype)).sum(), wanted)]


@pytest.mark.sample(simt=6)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "large"),
    [(dtype, x) for dtype, all_of in LARGE.items() for x in all_of],
    ids=lambda x: f"{x:.0e}" if isinstance(x, float) else str(x)[6:],
)
def test_rows_masked_by_a_finite_bias(
    dtype: torch.dtype, large: float, option: str, capability: str, backend: str
) -> None:
    if dtype == torch.float64 and (backend == "simt" or capability != "plain"):
        pytest.skip("fp64 runs PyTorch's operators on the CPU")
    named = dict(OPTIONS[option])
    packed, sinks = named.pop("packed", False), named.pop("sinks", False)
    shape = named.pop("shape", (1, QUERIES, KEYS) if packed else (1, 1, QUERIES, KEYS))
    wide = dtype if dtype == torch.float64 else torch.float32
    bias = torch.randn(shape, dtype=wide)
    bias[..., :12, :] = large  # masked whole
    bias[..., 12:24, 50:] = large  # masked in part
    leaves = [torch.randn(1, h, n, 32) for h, n in ((2, QUERIES), (1, KEYS), (1, KEYS))]
    if packed:
        leaves = [t[0].transpose(0, 1) for t in leaves]
        named["cu_seqlens_q"] = torch.tensor([0, 5, QUERIES], dtype=torch.int32)
        named["cu_seqlens_k"] = torch.tensor([0, 60, KEYS], dtype=torch.int32)
    # A sink as large as the bias takes part in the probabilities of the masked rows.
    leaves += [bias] + ([torch.tensor([large, 0.5])] if sinks else [])
    # Without a gradient of the bias, other kernels run on CPUs with AMX.
    leaves = [t.to(dtype).requires_grad_(i != 3 or option != "plain") for i, t in enumerate(leaves)]
    upstream = torch.randn(leaves[0].shape)
    expected = gradients(attention_reference, leaves, upstream, named, wide)
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    # The sum of q k and the bias may be rounded the other way, unless the rounding leaves nothing of q k.
    apart = math.ulp(large) * 2.0**29  # distance of fp32 numbers near `large`
    if dtype == torch.float32 and apart < 1:
        tolerance += 0.05 * apart
    for ours, other in zip(gradients(attention, leaves, upstream, named, dtype), expected, strict=True):
        cancels = (
            10 if ours.dim() == 1 else 1
        )  # the gradient of a sink is a sum of both signs over the queries
        assert relative_error(ours.to(wide), other) < tolerance * cancels
