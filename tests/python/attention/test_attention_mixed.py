"""Compare attention with random combinations of options to the same call in fp64."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from relative_error import relative_error
from shoestring import attention

pytestmark = [pytest.mark.device, pytest.mark.each_gpu]

# Tolerances of relative errors by dtype of the inputs. The tolerances of 16-bit dtypes are about two units in
# the last place, for sums of a few dozen rounded terms.
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def draw(seed: int) -> tuple[torch.dtype, dict[str, Tensor], dict[str, Any], list[str]]:
    """Return a random dtype, inputs, options, and the names of the inputs that require gradients."""
    chance = random.Random(seed)
    dtype, packed = chance.choice(list(TOLERANCES)), chance.random() < 0.5
    kv_heads = chance.choice([1, 2])
    heads, dim = kv_heads * chance.choice([1, 2]), chance.choice([5, 16, 32, 40])
    value_dim = chance.choice([dim, 24])
    options: dict[str, Any] = {}
    if packed:
        sequences = chance.choice([3, 3, 35])  # 35 sequences are more than the 32 lanes of a warp
        lengths = [
            [chance.choice([0, 1, 7, n] if sequences == 3 else [0, 1, 3]) for _ in range(sequences)]
            for n in (70, 65)
        ]
        lengths[0][0], lengths[1][0] = 5, 3
        for name, counts in zip(["cu_seqlens_q", "cu_seqlens_k"], lengths):
            options[name] = torch.tensor([0, *counts]).cumsum(0).int()
        queries, keys, longest = sum(lengths[0]), sum(lengths[1]), max(lengths[1])
        shapes = [(queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, value_dim)]
        bias, slopes = (heads, queries, longest + 2), (heads,)
    else:
        batch, queries, keys = chance.choice([1, 2]), chance.choice([1, 17, 70]), chance.choice([1, 40, 100])
        shapes = [
            (batch, heads, queries, dim),
            (batch, kv_heads, keys, dim),
            (batch, kv_heads, keys, value_dim),
        ]
        bias, slopes = (batch, heads, queries, keys), chance.choice([(heads,), (batch, heads)])
    inputs = {name: torch.randn(shape) for name, shape in zip("qkv", shapes)}
    if chance.random() < 0.7:
        shape = [chance.choice([1, size]) for size in bias]
        inputs["bias"] = torch.randn(shape)
        if chance.random() < 0.3:  # the bias has stride 0 along keys, but its gradient is a full tensor
            inputs["bias"] = inputs["bias"][..., :1].expand(shape)
    if chance.random() < 0.5:
        inputs["sinks"] = torch.randn(heads)
    inputs = {name: t.to(dtype) for name, t in inputs.items()}
    for name, value in [
        ("causal", True),
        ("softcap", 2.0),
        ("window_size", (chance.choice([-1, 0, 9, 30]), chance.choice([-1, 0, 9]))),
        ("scale", chance.choice([-0.3, 0.0, 0.5])),
        ("alibi_slopes", torch.rand(slopes) * 0.3),
    ]:
        if chance.random() < 0.4:
            options[name] = value
    if chance.random() < 0.5:
        options |= {"dropout_p": 0.3, "seed": torch.tensor([chance.randrange(1 << 62)])}
    return dtype, inputs, options, [name for name in inputs if chance.random() < 0.8] or ["q"]


def moved_by_rounding(
    dtype: torch.dtype, inputs: dict[str, Tensor], options: dict[str, Any], out: Tensor, upstream: Tensor
) -> dict[str, float]:
    """Return estimates of the norms of rounding errors in the gradients of q and k.

    ``out`` is rounded, and so are the probabilities from which it is computed. The gradient of a score with
    the probability p is p * (dot(v, upstream) - dot(out, upstream)). If a query sees almost only one key, the
    two terms cancel, but their rounding errors of half a unit in the last place do not. Let d be the rounding
    error of the second term for a query. The error changes the gradient of q by scale * d * (mean of the
    keys, weighted by p). It changes the gradient of k by scale * d * p * q.
    """
    plain = {name: value for name, value in options.items() if name not in ("dropout_p", "seed")}
    plain |= {name: inputs[name] for name in ("bias", "sinks") if name in inputs}
    keys = inputs["k"].detach().requires_grad_()
    mean = attention(inputs["q"], inputs["k"], keys, **plain)
    # If the elements of upstream * out have independent rounding errors, their norm times eps estimates the
    # error of their sum.
    change = torch.finfo(dtype).eps * (upstream * out).norm(dim=-1, keepdim=True)
    by_keys = torch.autograd.grad(mean, keys, change * inputs["q"].abs())[0]
    scale = abs(options.get("scale", inputs["q"].size(-1) ** -0.5))
    return {"q": scale * (change * mean).norm().item(), "k": scale * by_keys.norm().item()}


def sink_terms(sinks: Tensor, out: Tensor, lse: Tensor, upstream: list[Tensor]) -> Tensor:
    """Return for each head the sum of the absolute values of the terms of the sink's gradient, (heads)."""
    # The sum over features has the shape (batch, heads, queries), or (queries, heads) for packed sequences.
    by_out = (upstream[0].double() * out).abs().sum(-1)
    by_out = by_out if out.dim() == 4 else by_out.t()
    terms = torch.exp(sinks[:, None] - lse) * (by_out + upstream[1].abs())
    return terms.transpose(0, -2).flatten(1).sum(1)


def run(
    inputs: dict[str, Tensor], options: dict[str, Any], wanted: list[str], upstream: list[Tensor]
) -> list[Tensor]:
    leaves = {name: t.detach().requires_grad_(name in wanted) for name, t in inputs.items()}
    out, lse = attention(**leaves, **options, return_lse=True)
    seen = torch.isfinite(lse.detach())
    loss = (out * upstream[0].to(out)).sum() + (lse * upstream[1].to(lse))[seen].sum()
    gradients = torch.autograd.grad(loss, [leaves[name] for name in wanted])
    return [out.detach(), lse.detach().masked_fill(~seen, 0), *gradients]


@pytest.mark.sample(simt=14)
@pytest.mark.parametrize("case", range(24))
def test_options_together(case: int, seed: int, capability: str) -> None:
    dtype, inputs, options, wanted = draw(seed * 1000 + case)
    q, v = inputs["q"], inputs["v"]
    rows = q.shape[:-1] if q.dim() == 4 else (q.size(1), q.size(0))
    upstream = [torch.randn(*q.shape[:-1], v.size(-1)).to(dtype), torch.randn(rows)]
    ours = run(inputs, options, wanted, upstream)
    # The reference call runs in fp64, which attention supports only on the CPU.
    there = {name: t.cpu() if isinstance(t, Tensor) else t for name, t in options.items()}
    wide = {name: t.cpu().double() for name, t in inputs.items()}
    exact = run(wide, there, wanted, [t.cpu() for t in upstream])
    moved = moved_by_rounding(dtype, wide, there, exact[0], upstream[0].cpu().double())
    for name, a, b in zip(["out", "lse", *wanted], ours, exact):
        error = relative_error(a.cpu(), b)
        # The gradient of a bias sums the gradients of many scores. These cancel, so the error of the sum
        # comes mainly from the rounding of out, and its tolerance is larger.
        bound = TOLERANCES[dtype] * (10 if name == "bias" else 1) + moved.get(name, 0) / max(
            b.norm().item(), 1e-6
        )
        # The gradient of a sink is a sum of rounded terms for each head. The terms may cancel by chance, so
        # the error of the gradient is measured relative to the terms.
        if name == "sinks":
            terms = sink_terms(inputs["sinks"].cpu().double(), *exact[:2], [t.cpu() for t in upstream])
            bound *= (terms.norm() / b.norm()).item()
        assert error <= bound, f"{name}: {error:.2e}, {dtype}, {options}"


def test_offsets_that_do_not_fit_end_the_launch(backend: str) -> None:
    """Wrong offsets of packed sequences raise an error before a kernel reads outside of the tensors.

    On a GPU, an assertion in the kernel ends the process instead, so this test is skipped.
    """
    if backend == "cuda":
        pytest.skip("an assertion on the GPU ends the process")
    q, k, v = (torch.randn(5, 2, 8) for _ in range(3))
    right = torch.tensor([0, 5], dtype=torch.int32)
    for wrong in ([0, 6], [1, 5], [0, 4], [0, 5, 3, 5]):
        starts = torch.tensor(wrong, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="expected offsets that rise from 0 to the"):
            attention(q, k, v, cu_seqlens_q=starts)
    with pytest.raises(RuntimeError, match="expected offsets that rise from 0 to the"):
        attention(q, k, v, cu_seqlens_q=right, cu_seqlens_k=torch.tensor([0, 6], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="bias: expected at least"):
        attention(q, k, v, cu_seqlens_q=right, bias=torch.randn(2, 5, 3))
