"""Time a linear layer with LoRA, QLoRA or DoRA, forward and backward, in shoestring and in PEFT.

For 4-bit weights, PEFT uses layers of bitsandbytes. Further tables time NF4 quantisation and dequantisation,
SwiGLU and dropout, and quantised layers for one token.

The row "limit" is the frozen dense layer alone: its matrix products for forward and for the gradient of x. It
runs in fp32 on a CPU, and in the dtype of the inputs on a GPU. With --memory, the benchmark instead measures
the memory of training a whole model (qlora_memory.py).
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoestring
from benchmarks.adapters import qlora_memory
from benchmarks.common import Candidates, Report, arguments, interleave
from benchmarks.quantization.bench_quantize import weights


def peft_layer(linear: nn.Linear, rank: int, quantize: bool, dora: bool) -> nn.Module | None:
    """Return PEFT's layer over a dense or a bitsandbytes 4-bit layer, or None if a package is missing."""
    try:
        import peft
    except ImportError:
        return None
    if quantize:
        try:
            import bitsandbytes as bnb
        except ImportError:
            return None
        base = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type="nf4",
                                 compress_statistics=False, compute_dtype=linear.weight.dtype)  # fmt: skip
        base.weight = bnb.nn.Params4bit(linear.weight.detach().clone(), requires_grad=False, quant_type="nf4",
                                        compress_statistics=False).to(linear.weight.device)  # fmt: skip
        linear = base
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["0"], use_dora=dora)
    return peft.get_peft_model(nn.Sequential(linear), config)


def step(layer: nn.Module, x: Tensor, upstream: Tensor) -> Callable[[], None]:
    trained = [p for p in layer.parameters() if p.requires_grad]

    def run() -> None:
        torch.autograd.grad(layer(x), [x, *trained], upstream)

    return run


def clone(linear: nn.Linear) -> nn.Linear:
    twin = nn.Linear(linear.in_features, linear.out_features, bias=False, dtype=linear.weight.dtype)
    twin.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
    return twin


KINDS = {"LoRA": (None, False), "QLoRA": ("nf4", False), "DoRA": (None, True), "QDoRA": ("nf4", True)}


def ours(linear: nn.Linear, rank: int, quantize: str | None, dora: bool) -> nn.Module:
    model = nn.Sequential(clone(linear))
    return shoestring.lora.apply(
        model, rank=rank, alpha=2 * rank, target_modules=["0"], quantize=quantize, dora=dora
    )


def training(report: Report, options: argparse.Namespace) -> None:
    on_cpu = options.device == "cpu"
    shapes = (
        [(512, 2048, 2048, 16), (2048, 1024, 4096, 16)]
        if on_cpu
        else [(512, 4096, 14336, 16), (4096, 4096, 14336, 16)]
    )
    dtypes = (torch.float32, torch.bfloat16) if on_cpu else (torch.bfloat16,)
    for tokens, columns, rows, rank in [(64, 256, 256, 8)] if options.quick else shapes:
        for dtype in dtypes:
            linear = nn.Linear(columns, rows, bias=False).to(dtype).requires_grad_(False)
            x = torch.randn(tokens, columns).to(dtype).requires_grad_()
            upstream = torch.randn(tokens, rows).to(dtype)
            candidates: Candidates = {}
            for name, (quantize, dora) in KINDS.items():
                candidates[f"shoestring {name}"] = step(ours(linear, rank, quantize, dora), x, upstream)
                peer = peft_layer(clone(linear), rank, quantize is not None, dora)
                if peer is None:
                    print(f"PEFT or bitsandbytes is not installed: no peer for {name}")
                else:
                    candidates[f"PEFT {name}"] = step(peer, x, upstream)
            candidates[f"{'' if on_cpu else 'limit: '}frozen {str(dtype)[6:]} layer"] = step(
                clone(linear), x, upstream
            )
            if on_cpu:
                exact, wide = clone(linear).float(), x.detach().float().requires_grad_()
                candidates["limit: frozen fp32 layer"] = step(exact, wide, upstream.float())
            report.table(
                f"{tokens} tokens x {columns} -> {rows}, rank {rank}, {str(dtype)[6:]}, forward + backward",
                interleave(candidates, options.repeats, options.device),
                4 * tokens * columns * rows / 1e9,
                "GFLOP/s",
            )


def without_bf16_units(report: Report, options: argparse.Namespace) -> None:
    """Compare the times of bf16 and fp32 inputs with the AVX2 kernels, which use no bf16 instructions."""
    switch, now = torch.ops.shoestring._set_cpu_capability, torch.ops.shoestring._cpu_capability()
    if not switch("avx2"):
        return
    tokens, columns, rows, rank = (64, 256, 256, 8) if options.quick else (512, 2048, 2048, 16)
    candidates: Candidates = {}
    for dtype in (torch.bfloat16, torch.float32):
        linear = nn.Linear(columns, rows, bias=False).to(dtype)
        x, upstream = (
            torch.randn(tokens, columns).to(dtype).requires_grad_(),
            torch.randn(tokens, rows).to(dtype),
        )
        candidates[f"shoestring QLoRA, {str(dtype)[6:]}"] = step(
            ours(linear, rank, "nf4", False), x, upstream
        )
    report.table(
        f"AVX2 kernels, no bf16 units: {tokens} tokens x {columns} -> {rows}, rank {rank}, forward + backward",
        interleave(candidates, options.repeats, options.device),
        4 * tokens * columns * rows / 1e9,
        "GFLOP/s",
    )
    switch(now)


def around(report: Report, options: argparse.Namespace) -> None:
    """Time the operators that surround the matrix products: SwiGLU and dropout, forward and backward."""
    shape = (64, 256) if options.quick else (512, 5632) if options.device == "cpu" else (4096, 14336)
    dtypes = (torch.float32, torch.bfloat16) if options.device == "cpu" else (torch.bfloat16,)
    for dtype in dtypes:
        gate, up = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(2))
        upstream, seed = torch.randn(shape).to(dtype), torch.randint(1 << 62, (1,))

        def run(
            operator: Callable[[], Tensor], *inputs: Tensor, upstream: Tensor = upstream
        ) -> Callable[[], object]:
            return lambda: torch.autograd.grad(operator(), inputs, upstream)

        tables: dict[str, Candidates] = {
            "SwiGLU": {
                "shoestring swiglu": run(lambda gate=gate, up=up: shoestring.swiglu(gate, up), gate, up),
                "PyTorch": run(lambda gate=gate, up=up: F.silu(gate) * up, gate, up),
            },
            "dropout": {
                "shoestring seeded_dropout": run(
                    lambda up=up, seed=seed: shoestring.seeded_dropout(up, 0.1, seed=seed), up
                ),
                "PyTorch, with a mask": run(lambda up=up: F.dropout(up, 0.1), up),
            },
        }
        for name, candidates in tables.items():
            title = f"{name}, {shape[0]} x {shape[1]}, {str(dtype)[6:]}, forward + backward"
            times = interleave(candidates, options.repeats, options.device)
            report.table(title, times, shape[0] * shape[1] / 1e6, "M elements/s")


def one_token(report: Report, options: argparse.Namespace) -> None:
    """Time the forward pass of quantised layers for one token, as in generation."""
    columns = rows = 256 if options.quick else 4096
    for dtype in (torch.float32, torch.bfloat16) if options.device == "cpu" else (torch.bfloat16,):
        linear = nn.Linear(columns, rows, bias=False).to(dtype).requires_grad_(False)
        x = torch.randn(1, columns).to(dtype)
        layer = shoestring.nn.QuantizedLinear.from_linear(linear)
        candidates: Candidates = {"shoestring QuantizedLinear": lambda layer=layer, x=x: layer(x)}
        try:
            import bitsandbytes as bnb

            packed, state = bnb.functional.quantize_4bit(linear.weight.detach(), quant_type="nf4")
            candidates["bitsandbytes matmul_4bit"] = lambda x=x, p=packed, s=state: bnb.matmul_4bit(
                x, p, quant_state=s
            )
        except ImportError:
            print("bitsandbytes is not installed")
        candidates["dense layer"] = lambda linear=linear, x=x: linear(x)
        with torch.no_grad():
            times = interleave(candidates, options.repeats, options.device)
        report.table(
            f"one token, {columns} x {rows}, {str(dtype)[6:]}", times, columns * rows / 1e6, "M weights/s"
        )


def main() -> None:
    options = arguments(__doc__.splitlines()[0], devices=("cpu", "cuda"), more=qlora_memory.add_options)
    report = Report("qlora", options)
    if options.memory or options.memory_cpp is not None:
        report.data["memory"] = qlora_memory.memory(options)
        report.finish()
        return
    torch.set_default_device(options.device)
    training(report, options)
    if options.device == "cpu":
        without_bf16_units(report, options)
    around(report, options)
    one_token(report, options)
    weights(report, options, kinds=("NF4",))
    report.finish()


if __name__ == "__main__":
    main()
