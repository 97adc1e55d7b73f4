"""Time grouped_linear, the products of a mixture of experts, forward and with backward.

The row "grouped_mm of x[rows]" is the code of transformers with experts_implementation="grouped_mm". "loop" multiplies
the gathered rows of one expert after the other. The row "limit" is one product with as many operations by addmm_, for
which all rows have the same weight. With few rows an expert, reading the weights takes most of the time of forward, so
"limit: copy" copies a buffer as large as the weights.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import shoestring
from benchmarks.common import Candidates, Report, arguments, copy_probe, graphed, interleave

Product = Callable[[Tensor, Tensor], Tensor]  # of x and the weight


@dataclass(frozen=True)
class Shape:
    name: str
    tokens: int
    top_k: int
    experts: int
    features: int
    out: int
    skew: float = 0.0  # the share of slots that go to expert 0 in any case

    @property
    def slots(self) -> int:
        return self.tokens * self.top_k


# The gate and up projections, and one down projection, of models with experts; of some models a part of the experts.
SHAPES = [
    Shape("OLMoE, gate and up", 1024, 8, 64, 2048, 2048),
    Shape("Qwen3, gate and up", 1024, 8, 128, 2048, 1536),
    Shape("Mixtral, down, a quarter of its width", 1024, 2, 8, 3584, 4096),
    Shape("small, gate and up", 4096, 2, 16, 512, 1024),
    Shape("one expert has all rows", 1024, 1, 64, 2048, 2048, skew=1.0),
    Shape("half of the rows go to one expert", 1024, 8, 64, 2048, 2048, skew=0.5),
    Shape("8 rows an expert", 64, 8, 64, 2048, 2048),
    Shape("2 rows an expert", 16, 8, 64, 2048, 2048),
    Shape("1 row an expert", 8, 8, 64, 2048, 2048),
]
QUICK = [Shape("quick", 32, 2, 4, 64, 48), Shape("quick, 2 rows an expert", 4, 2, 4, 64, 48)]


def slots_of(shape: Shape, device: str) -> tuple[Tensor, Tensor]:
    """Return the offsets of the experts, and the rows of x by expert: equally many for each, beside the skew."""
    index = (torch.arange(shape.slots, device=device) % shape.experts).view(shape.tokens, shape.top_k)
    index = torch.where(torch.rand(index.shape, device=device) < shape.skew, 0, index)
    order, _, offsets = shoestring.moe_sort(index, shape.experts)
    return offsets, order // shape.top_k


def products_of(offsets: Tensor, rows: Tensor) -> dict[str, Product]:
    ends = offsets[1:].int()
    bounds = list(itertools.pairwise(offsets.tolist()))

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return shoestring.grouped_linear(x, weight, offsets, rows=rows)

    def grouped(x: Tensor, weight: Tensor) -> Tensor:
        return F.grouped_mm(x[rows], weight.mT, offs=ends)

    def loop(x: Tensor, weight: Tensor) -> Tensor:
        given = x[rows]
        return torch.cat([F.linear(given[a:b], weight[e]) for e, (a, b) in enumerate(bounds) if a < b])

    return {"shoestring": ours, "grouped_mm of x[rows]": grouped, "loop over experts": loop}


def dense(shape: Shape, dtype: torch.dtype, device: str, backward: bool) -> Callable[[], object]:
    """Return a call that multiplies as many rows by one weight, and with `backward` also for both gradients."""
    x, grad = (torch.randn(shape.slots, n, device=device).to(dtype) for n in (shape.features, shape.out))
    weight = torch.randn(shape.out, shape.features, device=device).to(dtype)
    terms = [(x, weight.t())] + ([(grad, weight), (grad.t(), x)] if backward else [])
    results = [torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=device) for a, b in terms]
    multiply = torch.ops.shoestring.addmm_
    return lambda: [multiply(out, a, b, beta=0) for out, (a, b) in zip(results, terms, strict=True)]


def candidates_of(shape: Shape, dtype: torch.dtype, device: str, backward: bool) -> Candidates:
    offsets, rows = slots_of(shape, device)
    x = torch.randn(shape.tokens, shape.features, device=device).to(dtype)
    weight = torch.randn(shape.experts, shape.out, shape.features, device=device).to(dtype)
    grad = torch.randn(shape.slots, shape.out, device=device).to(dtype)
    leaves = [t.requires_grad_(backward) for t in (x, weight)]

    def step(product: Product) -> object:
        y = product(*leaves)
        return torch.autograd.grad(y, leaves, grad) if backward else y

    products = products_of(offsets, rows)
    return {name: (lambda product=product: step(product)) for name, product in products.items()}


def more_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="the shapes whose name contains this text")


def main() -> None:
    options = arguments(__doc__.splitlines()[0], devices=("cpu", "cuda"), more=more_arguments)
    report = Report("grouped linear", options)
    shapes = [shape for shape in (QUICK if options.quick else SHAPES) if options.only in shape.name]
    device = options.device

    def table(title: str, runs: Candidates, work: float, unit: str) -> None:
        if device == "cuda":  # the loop reads the offsets on the host, before the capture
            runs = {name: graphed(run) for name, run in runs.items()}
        report.table(title, interleave(runs, options.repeats, device), work, unit)

    dtypes, passes = (torch.float32, torch.bfloat16), (False, True)
    for shape, dtype, backward in itertools.product(shapes, dtypes, passes):
        runs = candidates_of(shape, dtype, device, backward)
        what = "forward + backward" if backward else "forward"
        title = (
            f"{shape.name}: {shape.slots} rows, {shape.experts} x ({shape.features} -> {shape.out}), "
            f"{str(dtype)[6:]}, {what}"
        )
        if shape.slots <= 8 * shape.experts and not backward and shape.skew == 0:
            used = min(shape.slots, shape.experts)
            size = used * shape.out * shape.features * dtype.itemsize
            runs["limit: copy"] = copy_probe(size, device)
            table(title, runs, size / 1e9, "GB/s")
        else:
            runs["limit: addmm_"] = dense(shape, dtype, device, backward)
            work = 2e-9 * shape.slots * shape.features * shape.out * (3 if backward else 1)
            table(title, runs, work, "GFLOP/s")
    report.finish()


if __name__ == "__main__":
    main()
