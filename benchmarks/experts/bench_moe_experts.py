"""Time moe_experts, the MLPs of a mixture of experts, forward and with backward.

The rows "grouped_mm" and "eager" are the experts of transformers with these implementations, on the weights of
shoestring. The row "limit" is one product of all rows with as many operations by addmm_, which has neither gates nor sums.

The tables "frozen" compare frozen stacks in bf16 with frozen stacks in NF4 that have LoRA of rank 16, forward and backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import shoestring
from benchmarks.common import Candidates, Report, arguments, graphed, interleave


@dataclass(frozen=True)
class Shape:
    name: str
    tokens: int
    features: int
    hidden: int
    experts: int
    top_k: int


SHAPES = [
    Shape("64 rows an expert", 512, 512, 256, 32, 4),
    Shape("OLMoE, 16 of 64 experts", 1024, 2048, 1024, 16, 2),
    Shape("Qwen3, 16 of 128 experts", 1024, 2048, 768, 16, 2),
    Shape("256 experts", 1024, 512, 128, 256, 8),
    Shape("4 rows an expert", 32, 1024, 512, 64, 8),
]
FROZEN = [
    Shape("frozen, 64 rows an expert", 512, 512, 256, 32, 4),
    Shape("frozen, 256 rows an expert", 2048, 512, 256, 32, 4),
    Shape("frozen, Qwen3, 16 of 128 experts", 512, 2048, 768, 16, 2),
    Shape("frozen, Qwen3, 16 of 128 experts, long", 2048, 2048, 768, 16, 2),
]
RANK = 16
QUICK = [Shape("quick", 32, 64, 24, 4, 2)]


def theirs(shape: Shape, implementation: str, dtype: torch.dtype, device: str) -> nn.Module:
    """Return the experts of Qwen3 with an implementation of transformers."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=shape.features,
        moe_intermediate_size=shape.hidden,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = implementation
    return Qwen3MoeExperts(config).to(device, dtype)


def candidates_of(shape: Shape, dtype: torch.dtype, device: str, backward: bool) -> Candidates:
    index = torch.rand(shape.tokens, shape.experts, device=device).topk(shape.top_k).indices
    x, weight, grad = (
        torch.randn(shape.tokens, n, device=device).to(dtype).requires_grad_(backward and i < 2)
        for i, n in enumerate((shape.features, shape.top_k, shape.features))
    )
    modules = {name: theirs(shape, name, dtype, device) for name in ("grouped_mm", "eager")}
    gate_up, down = modules["grouped_mm"].parameters()
    with torch.no_grad():
        for stack in (gate_up, down):
            stack.normal_(std=stack.shape[-1] ** -0.5)
    modules["eager"].gate_up_proj, modules["eager"].down_proj = gate_up, down
    leaves = (x, weight, gate_up, down)

    def step(function: Callable[..., Tensor]) -> object:
        if not backward:
            with torch.no_grad():
                return function(x, index, weight)
        return torch.autograd.grad(function(x, index, weight), leaves, grad)

    def ours(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return shoestring.moe_experts(x, index, weight, gate_up, down)

    functions: dict[str, Callable[..., Tensor]] = {"shoestring": ours, **modules}
    return {name: (lambda function=function: step(function)) for name, function in functions.items()}


def dense(shape: Shape, dtype: torch.dtype, device: str, backward: bool) -> Callable[[], object]:
    """Return a call that multiplies as many rows by one weight of each kind, with `backward` also for the gradients."""
    slots, both = shape.tokens * shape.top_k, 2 * shape.hidden
    x, h, a = (torch.randn(slots, n, device=device).to(dtype) for n in (shape.features, both, shape.hidden))
    first, second = (
        torch.randn(m, n, device=device).to(dtype)
        for m, n in ((both, shape.features), (shape.features, shape.hidden))
    )
    terms = [(x, first.t()), (a, second.t())]
    if backward:
        terms += [(x, second), (x.t(), a), (h, first), (h.t(), x)]
    results = [torch.empty(m.shape[0], n.shape[1], dtype=dtype, device=device) for m, n in terms]
    multiply = torch.ops.shoestring.addmm_
    return lambda: [multiply(out, m, n, beta=0) for out, (m, n) in zip(results, terms, strict=True)]


def frozen_of(shape: Shape, device: str) -> Candidates:
    """Return steps of frozen stacks with gradients of x, of the weights of experts and of LoRA."""
    # Each expert has as many rows.
    first = torch.arange(shape.tokens, device=device).unsqueeze(1) * shape.top_k
    index = (first + torch.arange(shape.top_k, device=device)) % shape.experts
    x, weight, grad = (
        torch.randn(shape.tokens, n, device=device).bfloat16().requires_grad_(i < 2)
        for i, n in enumerate((shape.features, shape.top_k, shape.features))
    )
    e, d, n = shape.experts, shape.features, shape.hidden
    gate_up, down = (
        torch.randn(*size, device=device).bfloat16() / size[-1] ** 0.5 for size in ((e, 2 * n, d), (e, d, n))
    )
    codes = [shoestring.quantize_4bit(t) for t in (gate_up, down)]
    lora = shoestring.ExpertLora(
        *(
            (torch.randn(*size, device=device) / size[-1] ** 0.5).requires_grad_()
            for size in ((e, RANK, d), (e, 2 * n, RANK), (e, RANK, n), (e, d, RANK))
        )
    )

    def step(stacks: Sequence[Tensor], lora: shoestring.ExpertLora | None) -> object:
        y = shoestring.moe_experts(x, index, weight, *stacks, lora=lora)
        return torch.autograd.grad(y, [x, weight, *(lora[:4] if lora else ())], grad)

    return {
        "bf16": lambda: step([gate_up, down], None),
        "bf16, LoRA": lambda: step([gate_up, down], lora),
        "NF4": lambda: step(codes, None),
        "NF4, LoRA": lambda: step(codes, lora),
    }


def more_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="the shapes whose name contains this text")


def main() -> None:
    options = arguments(__doc__.splitlines()[0], devices=("cpu", "cuda"), more=more_arguments)
    report = Report("moe experts", options)
    device = options.device
    for shape in QUICK if options.quick else SHAPES:
        if options.only not in shape.name:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            for backward in (False, True):
                runs = candidates_of(shape, dtype, device, backward)
                runs["limit: addmm_"] = dense(shape, dtype, device, backward)
                if device == "cuda":  # a loop over experts waits for the GPU, which a graph does not allow
                    runs = {name: graphed(run) for name, run in runs.items() if name != "eager"}
                slots = shape.tokens * shape.top_k
                operations = (18 if backward else 6) * slots * shape.features * shape.hidden
                size = f"{slots} rows, {shape.experts} x ({shape.features} -> {shape.hidden})"
                what = "forward + backward" if backward else "forward"
                report.table(
                    f"{shape.name}, {size}, {str(dtype)[6:]}, {what}",
                    interleave(runs, options.repeats, device),
                    operations / 1e9,
                    "GFLOP/s",
                )
    for shape in QUICK if options.quick else FROZEN:
        if options.only not in shape.name:
            continue
        runs = frozen_of(shape, device)
        if device == "cuda":
            runs = {name: graphed(run) for name, run in runs.items()}
        slots = shape.tokens * shape.top_k
        report.table(
            f"{shape.name}, {slots} rows, {shape.experts} x ({shape.features} -> {shape.hidden})",
            interleave(runs, options.repeats, device),
            12 * slots * shape.features * shape.hidden / 1e9,
            "GFLOP/s",
        )
    report.finish()


if __name__ == "__main__":
    main()
