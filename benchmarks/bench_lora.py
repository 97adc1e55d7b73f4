"""A linear layer with LoRA or QLoRA, forward and backward: ours, PEFT (with bitsandbytes), and the frozen dense layer.

The limit is the frozen dense layer alone: its two products, forward and by x; in fp32 on a CPU, in the inputs' type on
a GPU.
"""

from collections.abc import Callable

import torch
from common import Candidates, Report, arguments, interleave
from torch import Tensor, nn

import shoestring


def peft_layer(linear: nn.Linear, rank: int, quantize: bool) -> nn.Module | None:
    """PEFT's layer over a dense or a bitsandbytes 4-bit base; None where a package is missing."""
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
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["0"])
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


def main() -> None:
    options = arguments(__doc__.splitlines()[0], devices=("cpu", "cuda"))
    on_cpu = options.device == "cpu"
    torch.set_default_device(options.device)
    report = Report("lora", options)
    shapes = [(512, 2048, 2048, 16), (2048, 1024, 4096, 16)] if on_cpu else [(512, 4096, 14336, 16), (4096, 4096, 14336, 16)]
    dtypes = (torch.float32, torch.bfloat16) if on_cpu else (torch.bfloat16,)
    for tokens, columns, rows, rank in [(64, 256, 256, 8)] if options.quick else shapes:
        for dtype in dtypes:
            linear = nn.Linear(columns, rows, bias=False).to(dtype).requires_grad_(False)
            x = torch.randn(tokens, columns).to(dtype).requires_grad_()
            upstream = torch.randn(tokens, rows).to(dtype)
            candidates: Candidates = {}
            for name, quantize in (("LoRA", None), ("QLoRA", "nf4")):
                model = nn.Sequential(clone(linear))
                shoestring.lora.apply(model, rank=rank, alpha=2 * rank, target_modules=["0"], quantize=quantize)
                candidates[f"shoestring {name}"] = step(model, x, upstream)
                peer = peft_layer(clone(linear), rank, quantize is not None)
                if peer is None:
                    print(f"PEFT or bitsandbytes is not installed: no peer for {name}")
                else:
                    candidates[f"PEFT {name}"] = step(peer, x, upstream)
            candidates[f"{'' if on_cpu else 'limit: '}frozen {str(dtype)[6:]} layer"] = step(clone(linear), x, upstream)
            if on_cpu:
                exact, wide = clone(linear).float(), x.detach().float().requires_grad_()
                candidates["limit: frozen fp32 layer"] = step(exact, wide, upstream.float())
            report.table(
                f"{tokens} tokens x {columns} -> {rows}, rank {rank}, {str(dtype)[6:]}, forward + backward",
                interleave(candidates, options.repeats, options.device),
                4 * tokens * columns * rows / 1e9,
                "GFLOP/s",
            )
    # One token, as in generation.
    columns = rows = 256 if options.quick else 4096
    for dtype in dtypes:
        linear = nn.Linear(columns, rows, bias=False).to(dtype).requires_grad_(False)
        x = torch.randn(1, columns).to(dtype)
        layer = shoestring.nn.QuantizedLinear.from_linear(linear)
        candidates = {"shoestring QuantizedLinear": lambda layer=layer, x=x: layer(x)}
        try:
            import bitsandbytes as bnb

            packed, state = bnb.functional.quantize_4bit(linear.weight.detach(), quant_type="nf4")
            candidates["bitsandbytes matmul_4bit"] = lambda x=x, p=packed, s=state: bnb.matmul_4bit(x, p, quant_state=s)
        except ImportError:
            print("bitsandbytes is not installed")
        candidates["dense layer"] = lambda linear=linear, x=x: linear(x)
        with torch.no_grad():
            times = interleave(candidates, options.repeats, options.device)
        report.table(f"one token, {columns} x {rows}, {str(dtype)[6:]}", times, columns * rows / 1e6, "M weights/s")
    report.finish()


if __name__ == "__main__":
    main()
