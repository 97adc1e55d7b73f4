"""Time the products of linear layers beside eager PyTorch's, and layers with a quantised weight and LoRA.

The shapes are those of the steps of `benchmarks/bench_step.py`. Each layer has the product of forward, x Wᵀ,
and those of backward: grad W, the gradient of x, and gradᵀ x, the gradient of the weight. With --layers, forward
and backward of trainable layers are timed as `patch` computes them by default: by linear_group, or as eager PyTorch
does where the rule leaves a layer to PyTorch. With --lora, forward and backward of lora_linear on an NF4 weight are timed beside the products of the dense weight alone, which
bound them.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.nn import functional as F

import shoestring
from benchmarks.common import Candidates, Report, arguments, interleave
from shoestring.ops import LoraWeight, addmm_, linear_group, lora_linear_group

# (tokens, in_features, out_features) of the linear layers of a 28.6 M Llama and a 1 B Llama
SHAPES = [
    (2048, 512, 512),
    (2048, 512, 1408),
    (2048, 1408, 512),
    (512, 2048, 512),
    (512, 2048, 2048),
    (512, 2048, 8192),
    (512, 8192, 2048),
]
QUICK = [(64, 128, 96)]
# (tokens, in_features, out_features of the layers that read the same input) of a 28.6 M Llama, a ViT and a BERT
DENSE_GROUPS = [
    (2048, 512, (512, 512, 512)),
    (2048, 512, (1408, 1408)),
    (3152, 384, (384, 384, 384)),
    (3152, 384, (384,)),
    (3152, 384, (1536,)),
    (3152, 1536, (384,)),
    (2048, 512, (2048,)),
    (2048, 2048, (512,)),
]
# (tokens, in_features, out_features of the layers that read the same input) of a 1 B Llama
GROUPS = [
    (512, 2048, (2048, 512, 512)),
    (512, 2048, (2048,)),
    (512, 2048, (8192, 8192)),
    (512, 8192, (2048,)),
]
QUICK_GROUPS = [(64, 128, (96, 32))]


def more_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lora", action="store_true", help="time lora_linear instead of products")
    parser.add_argument("--layers", action="store_true", help="time trainable layers instead of products")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"],
                        help="dtypes of the products")  # fmt: skip


def products(x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    return {"x Wᵀ": (x, weight.t()), "grad W": (grad, weight), "gradᵀ x": (grad.t(), x)}


def candidates_of(a: Tensor, b: Tensor) -> Candidates:
    ours, theirs = (torch.empty(a.shape[0], b.shape[1], dtype=a.dtype) for _ in range(2))
    return {
        "shoestring addmm_": lambda: addmm_(ours, a, b, beta=0),
        "torch.mm": lambda: torch.mm(a, b, out=theirs),
    }


def bench_products(report: Report, options: argparse.Namespace) -> None:
    for dtype in (getattr(torch, name) for name in options.dtypes):
        for tokens, columns, rows in QUICK if options.quick else SHAPES:
            x, weight = torch.randn(tokens, columns).to(dtype), torch.randn(rows, columns).to(dtype)
            grad = torch.randn(tokens, rows).to(dtype)
            for name, (a, b) in products(x, weight, grad).items():
                times = interleave(candidates_of(a, b), options.repeats)
                title = f"{name}, {tokens} x {columns} -> {rows}, {str(dtype).removeprefix('torch.')}"
                report.table(title, times, 2e-9 * tokens * columns * rows, "GFLOP/s")


def bench_layers(report: Report, options: argparse.Namespace) -> None:
    groups = [(tokens, columns, (rows,)) for tokens, columns, rows in SHAPES] + DENSE_GROUPS
    kinds = [
        (w, c) for c in options.dtypes for w in ("float32", "bfloat16") if (w, c) != ("bfloat16", "float32")
    ]
    for weights, compute in kinds:
        dtype, product = getattr(torch, weights), getattr(torch, compute)
        for tokens, columns, sizes in QUICK_GROUPS if options.quick else groups:
            own, _ = torch.ops.shoestring._linear_choice(product, dtype, columns, list(sizes))
            leaves = [
                torch.randn(size, columns, dtype=dtype, requires_grad=True) for size in (tokens, *sizes)
            ]
            grads = [torch.randn(tokens, size, dtype=product) for size in sizes]

            def eager(
                leaves: list[Tensor] = leaves, grads: list[Tensor] = grads, product: torch.dtype = product
            ) -> object:
                with torch.autocast("cpu", product, enabled=product != leaves[0].dtype):
                    outputs = [F.linear(leaves[0], w) for w in leaves[1:]]
                return torch.autograd.grad(outputs, leaves, grads)

            def ours(
                leaves: list[Tensor] = leaves, grads: list[Tensor] = grads, product: torch.dtype = product
            ) -> object:
                outputs = linear_group(leaves[0], leaves[1:], dtype=product)
                return torch.autograd.grad(outputs, leaves, grads)

            names = {"by the rule: " + ("linear_group" if own else "PyTorch"): ours if own else eager}
            times = interleave({**names, "eager PyTorch": eager}, options.repeats)
            title = f"{tokens} x {columns} -> {' + '.join(map(str, sizes))}, weights {weights}, products {compute}"
            report.table(title, times, 6e-9 * tokens * columns * sum(sizes), "GFLOP/s")


def bench_lora(report: Report, options: argparse.Namespace) -> None:
    rank = 16
    for tokens, columns, sizes in QUICK_GROUPS if options.quick else GROUPS:
        x = torch.randn(tokens, columns).bfloat16().requires_grad_()
        dense = [(torch.randn(rows, columns) / columns**0.5).bfloat16() for rows in sizes]
        layers = [
            LoraWeight(
                shoestring.quantize_4bit(weight),
                lora_A=torch.randn(rank, columns).requires_grad_(),
                lora_B=torch.randn(weight.shape[0], rank).requires_grad_(),
            )
            for weight in dense
        ]
        adapters = [t for layer in layers for t in (layer.lora_A, layer.lora_B) if t is not None]
        outputs = lora_linear_group(x, layers)
        grads = [torch.randn_like(y) for y in outputs]

        def forward(x: Tensor = x, layers: list[LoraWeight] = layers) -> object:
            with torch.no_grad():
                return lora_linear_group(x, layers)

        def backward(
            outputs: list[Tensor] = outputs,
            inputs: tuple[Tensor, ...] = (x, *adapters),
            grads: list[Tensor] = grads,
        ) -> object:
            return torch.autograd.grad(outputs, inputs, grads, retain_graph=True)

        def dense_forward(x: Tensor = x, dense: list[Tensor] = dense) -> object:
            with torch.no_grad():
                return [x @ weight.t() for weight in dense]

        def dense_backward(grads: list[Tensor] = grads, dense: list[Tensor] = dense) -> object:
            return [grad @ weight for grad, weight in zip(grads, dense, strict=True)]

        work = 2e-9 * tokens * columns * sum(sizes)
        title = f"{tokens} x {columns} -> {' + '.join(map(str, sizes))}, NF4, rank {rank}, bf16"
        pairs = {"forward": (forward, dense_forward), "backward": (backward, dense_backward)}
        for name, (ours, limit) in pairs.items():
            times = interleave(
                {f"lora_linear, {name}": ours, "its dense products alone": limit}, options.repeats
            )
            report.table(f"{name}, {title}", times, work, "GFLOP/s")


def main() -> None:
    options = arguments(__doc__ or "", more=more_arguments)
    report = Report("linear", options)
    bench = bench_lora if options.lora else bench_layers if options.layers else bench_products
    bench(report, options)
    report.finish()


if __name__ == "__main__":
    main()
