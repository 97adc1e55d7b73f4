"""Compare quantisation-aware training with quantisation after training, and time fake quantisation.

A byte-level Llama of 0.5 M parameters learns the source of Python's standard library in fp32. Training then goes
on in one run per row of the table, from the same weights with the same batches: in fp32, or with weights that are
fake-quantised to one format. The table shows the loss on other files of fp32 weights, of these weights quantised
after training, and of quantisation-aware training.

    python -m benchmarks.quantization.bench_qat              # times and losses, some minutes
    python -m benchmarks.quantization.bench_qat --only times # or losses
"""

import argparse
import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoestring
from benchmarks.common import Report, arguments, copy_probe, interleave, rotate
from shoestring.cli.demo_data import standard_library
from shoestring.training.config import Preset
from shoestring.training.run.models import build_preset

KINDS = ("nf4", "fp4", "int4", "int8")
COLUMNS = 4096
SHAPE = Preset(hidden=128, layers=3, heads=4, kv_heads=4, mlp=384)
TOKENS, BATCH = 128, 16
# Block sizes of the 4-bit formats in the table of losses. Larger blocks have larger errors.
BLOCKS = (64, 512)


# ---- times


def stored(x: Tensor, kind: str) -> Tensor:
    """Quantise and dequantise x by the operators for stored weights."""
    q = shoestring.quantize_int8(x) if kind == "int8" else shoestring.quantize_4bit(x, kind)
    return q.dequantize()


def per_channel(x: Tensor) -> Tensor:
    """Fake-quantise the rows of x to int8 by PyTorch's operator, as its quantisation-aware training does."""
    scale = x.abs().amax(1).float() / 127
    zero = torch.zeros(len(x), dtype=torch.int32, device=x.device)
    return torch.fake_quantize_per_channel_affine(x, scale, zero, 0, -127, 127)


def operator_times(report: Report, options: argparse.Namespace) -> None:
    device = options.device
    count = 1 << 16 if options.quick else 1 << 24
    for dtype in (torch.float32, torch.bfloat16):
        size = count * dtype.itemsize

        def timed(run: Callable[[Tensor], object], dtype: torch.dtype = dtype, size: int = size) -> Any:
            def make() -> Callable[[], object]:
                x = torch.randn(count // COLUMNS, COLUMNS, device=device).to(dtype)
                return lambda: run(x)

            return rotate(make, size, device)

        for kind in KINDS:
            runs = {
                "fake_quantize": timed(lambda x, kind=kind: shoestring.fake_quantize(x, kind)),
                "quantise, then dequantise": timed(lambda x, kind=kind: stored(x, kind)),
            }
            if kind == "int8" and dtype == torch.float32:
                runs["fake_quantize_per_channel_affine"] = timed(per_channel)
            if device == "cuda":
                runs["limit: copy of as many bytes"] = copy_probe(2 * size, device)
            else:
                runs["limit: copy into a new tensor"] = timed(Tensor.clone)
            name = f"fake_quantize to {kind}, {count / 2**20:.4g} Mi elements, {str(dtype)[6:]}"
            report.table(name, interleave(runs, options.repeats, device), 2 * size / 1e9, "GB/s")


def layer_times(report: Report, options: argparse.Namespace) -> None:
    """Time forward and backward of one layer: nn.Linear, and with fake-quantised weights."""
    width, tokens = (256, 64) if options.quick else (1024, 1024)
    linear = nn.Linear(width, 4 * width, device=options.device)
    x = torch.randn(tokens, width, device=options.device, requires_grad=True)

    def step(layer: nn.Module) -> Callable[[], object]:
        inputs = (x, *layer.parameters())
        return lambda: torch.autograd.grad(layer(x).sum(), inputs)

    runs = {"nn.Linear": step(linear)}
    for kind in KINDS:
        prepared = shoestring.prepare_quantized(nn.Sequential(copy.deepcopy(linear)), kind)
        runs[f"FakeQuantizedLinear, {kind}"] = step(prepared)
    title = f"forward and backward, {tokens} tokens, {width} to {4 * width} features, fp32"
    flops = 6 * tokens * width * 4 * width
    report.table(title, interleave(runs, options.repeats, options.device), flops / 1e9, "GFLOP/s")


# ---- losses


def read_bytes(holdout: int) -> tuple[Tensor, Tensor]:
    """Return the bytes of the standard library's files as training tokens and as held-out tokens."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stdlib.jsonl"
        standard_library(path)
        texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    held: list[str] = []
    while sum(map(len, held)) < holdout:
        held.append(texts.pop())
    return tuple(  # type: ignore[return-value]
        torch.frombuffer(bytearray("\n".join(part).encode()), dtype=torch.uint8) for part in (texts, held)
    )


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    tokens = tokens.long()
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def batch(data: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    begin = torch.randint(len(data) - TOKENS - 1, (BATCH,), generator=generator)
    return torch.stack([data[i : i + TOKENS + 1] for i in begin.tolist()])


def train(model: Any, data: Tensor, steps: int, first: int, lr: float) -> None:
    """Take ``steps`` steps, with a learning rate that falls to zero."""
    optimizer = shoestring.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1, (steps - step) / steps * 2, (step + 1) / 20)
        loss_of(model, batch(data, first + step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def held_out(model: Any, data: Tensor) -> float:
    """Return the mean loss, in nats per byte, on all held-out tokens."""
    blocks = data[: len(data) // (TOKENS + 1) * (TOKENS + 1)].view(-1, TOKENS + 1)
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model, part) * len(part) for part in blocks.split(64)]
    return sum(losses).item() / len(blocks)  # type: ignore[union-attr]


def losses(report: Report, options: argparse.Namespace) -> None:
    first, more = (4, 2) if options.quick else (options.steps, options.steps // 3)
    data, held = read_bytes(2_000 if options.quick else 60_000)
    torch.manual_seed(0)
    start = build_preset(SHAPE, 256, TOKENS, 0)
    train(start, data, first, 0, 3e-3)
    dense = copy.deepcopy(start)
    train(dense, data, more, first, 1e-3)
    reference = held_out(dense, held)
    print(f"\nheld-out loss, nats per byte; fp32 after {first} and {more} steps: {reference:.4f}")
    print(
        f"  {'format':16} {'after training':>15} {'aware':>9} {'lost, after':>12} {'lost, aware':>12} {'regained':>9}"
    )
    rows = []
    for kind, block in [(k, b) for k in KINDS[:3] for b in BLOCKS] + [("int8", None)]:
        after = shoestring.convert_quantized(
            shoestring.prepare_quantized(copy.deepcopy(dense), kind, block_size=block)
        )
        aware = shoestring.prepare_quantized(copy.deepcopy(start), kind, block_size=block)
        train(aware, data, more, first, 1e-3)
        found = [held_out(m, held) for m in (after, shoestring.convert_quantized(aware))]
        lost = [loss - reference for loss in found]
        name = kind if block is None else f"{kind}, block {block}"
        share = f"{1 - lost[1] / lost[0]:9.0%}" if lost[0] > 1e-3 else f"{'':9}"
        print(
            f"  {name:16} {found[0]:15.4f} {found[1]:9.4f} {lost[0]:12.4f} {lost[1]:12.4f} {share}",
            flush=True,
        )
        rows.append({"name": name, "after training": found[0], "aware": found[1]})
    report.data["losses"] = {"fp32": reference, "rows": rows}


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", choices=("times", "losses"))
        parser.add_argument("--steps", type=int, default=600, help="steps in fp32; a third as many follow")

    options = arguments(__doc__.splitlines()[0], devices=("cpu", "cuda"), more=more)
    report = Report("qat", options)
    if options.only != "losses":
        # With the allocator of the C library, page faults of the results would take longer than the kernels.
        shoestring.host_allocator(enable=options.device == "cpu")
        operator_times(report, options)
        layer_times(report, options)
    if options.only != "times" and options.device == "cpu":
        losses(report, options)
    report.finish()


if __name__ == "__main__":
    main()
