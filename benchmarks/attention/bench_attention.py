"""Time attention, forward and backward: shoestring, PyTorch's backends, and a matrix product as the limit.

Each of PyTorch's backends has a row. The row "limit" is one matrix product with as many floating-point
operations as attention needs, without masking: the forward pass has two matrix products of the size of the
scores, and the backward pass has five.

A further table compares packed batches with a batch that is padded to its longest sequence. The sequence
lengths are those of the functions in Python's standard library. The last table shows which fraction of its
batches shoestring's packer fills with tokens.
"""

import argparse
import ast
import sysconfig
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import shoestring
from benchmarks.common import Candidates, Report, arguments, gemm_probe, interleave

BACKENDS = {
    "cpu": [SDPBackend.FLASH_ATTENTION],
    "cuda": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
}
# shapes of q, k and v: (batch, heads, tokens, head_dim)
SHAPES = {
    "cpu": [(1, 8, 1024, 64), (1, 8, 1024, 128), (1, 4, 4096, 64), (1, 2, 4096, 128), (1, 1, 4096, 128)],
    # Batch size times tokens is 16,384, and heads times head_dim is 2,048, as in FlashAttention's published
    # tables.
    "cuda": [(16384 >> n, 2048 // dim, 1 << n, dim) for dim in (64, 128) for n in range(9, 15)]
    + [(2, 8, 8192, 256)],
}


def sdpa(backend: SDPBackend | None, **options: object) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, **options)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return call


def own_kernels(**options: object) -> dict[str, Callable[..., Tensor]]:
    """Return, by name, calls of attention that run shoestring's own kernels, not those of PyTorch.

    On Hopper there is a second call, with ALiBi slopes of zero, which selects the sm_80 kernels.
    """
    calls = {"shoestring, own": lambda q, k, v: shoestring.attention(q, k, v, deterministic=True, **options)}
    if torch.cuda.get_device_capability()[0] == 9:
        calls["shoestring, mma.sync"] = lambda q, k, v: shoestring.attention(
            q, k, v, alibi_slopes=torch.zeros(q.size(1), device=q.device), **options
        )
    return calls


def verdict(report: Report) -> None:
    """Print, for all tables so far, the time of PyTorch's best backend relative to shoestring's own kernels.

    csrc/attention/attention_library.cpp chooses between PyTorch's and shoestring's kernels according to these
    ratios.
    """
    for direction in ("forward", "backward"):
        ratios: dict[str, list[float]] = {}
        for table in report.data["tables"]:
            seconds = {row["name"]: row["seconds"] for row in table["rows"]}
            if not table["title"].endswith(direction) or "shoestring, own" not in seconds:
                continue
            others = [t for name, t in seconds.items() if name.startswith("PyTorch")]
            if others:
                ratios.setdefault("of all", []).append(min(others) / seconds["shoestring, own"])
                ratios.setdefault(table["title"].split(", ")[2], []).append(
                    min(others) / seconds["shoestring, own"]
                )
        for shapes, found in ratios.items():
            print(
                f"{direction}, {shapes}: PyTorch's best takes {geometric_mean(found):.2f} times our kernels' time, "
                f"{min(found):.2f} to {max(found):.2f}"
            )


def backward(call: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = call(*leaves)
    upstream = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, upstream, retain_graph=True)


def works(run: Callable[[], object]) -> bool:
    try:
        run()
    except RuntimeError:
        return False
    return True


def dense(report: Report, options: argparse.Namespace) -> None:
    shapes = [(1, 2, 128, 32)] if options.quick else SHAPES[options.device]
    for dtype in (torch.float32, torch.bfloat16) if options.device == "cpu" else (torch.bfloat16,):
        for batch, heads, tokens, dim in shapes:
            for causal in (True, False):
                inputs = [
                    torch.randn(batch, heads, tokens, dim, device=options.device).to(dtype) for _ in range(3)
                ]
                calls = {"shoestring": lambda q, k, v, c=causal: shoestring.attention(q, k, v, causal=c)}
                if options.device == "cuda":
                    calls |= own_kernels(causal=causal)
                for backend in BACKENDS[options.device]:
                    calls[f"PyTorch, {backend.name.split('_')[0].lower()}"] = sdpa(backend, is_causal=causal)
                if heads * tokens <= 8192 and options.device == "cpu":
                    calls["PyTorch, math"] = sdpa(SDPBackend.MATH, is_causal=causal)
                rows = batch * heads * tokens // (2 if causal else 1)
                for name, products in (("forward", 2), ("backward", 5)):
                    candidates: Candidates = {}
                    for label, call in calls.items():
                        if not works(lambda c=call: c(*inputs)):
                            continue
                        run = (lambda c=call: c(*inputs)) if name == "forward" else backward(call, inputs)
                        if works(run):
                            candidates[label] = run
                    candidates["limit: its products"] = gemm_probe(
                        rows, tokens, products * dim, dtype, options.device
                    )
                    times = interleave(candidates, options.repeats, options.device)
                    kind = f"{'causal' if causal else 'full'}, {str(dtype)[6:]}, {name}"
                    title = f"{batch} x {heads} heads, {tokens} tokens, d {dim}, {kind}"
                    report.table(title, times, 2 * products * rows * tokens * dim / 1e9, "GFLOP/s")


def function_lengths(count: int) -> list[int]:
    """Return the lengths, in words, of ``count`` functions of Python's standard library.

    The functions are evenly spaced in the list of all functions. Lengths are clipped to at least 8 and at
    most 1,024.
    """
    lengths: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(errors="ignore")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                lengths.append(min(1024, max(8, len((ast.get_source_segment(source, node) or "").split()))))
    return lengths[:: len(lengths) // count][:count]


def packed(report: Report, options: argparse.Namespace) -> None:
    lengths = function_lengths(8 if options.quick else 32)
    heads, dim, longest = 8, 64, max(lengths)
    starts = torch.tensor([0, *lengths], device=options.device).cumsum(0).int()
    for dtype in (torch.float32, torch.bfloat16):
        flat = [torch.randn(sum(lengths), heads, dim, device=options.device).to(dtype) for _ in range(3)]
        padded = [
            torch.zeros(len(lengths), heads, longest, dim, device=options.device, dtype=dtype)
            for _ in range(3)
        ]
        for source, target in zip(flat, padded):
            for i, (begin, n) in enumerate(zip(starts.tolist(), lengths)):
                target[i, :, :n] = source[begin : begin + n].transpose(0, 1)
        seen = (
            torch.arange(longest, device=options.device)
            < torch.tensor(lengths, device=options.device)[:, None]
        )
        mask = (
            seen[:, None, None, :]
            & torch.ones(longest, longest, device=options.device, dtype=torch.bool).tril()
        )

        def run(call: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], object]:
            leaves = [t.detach().requires_grad_() for t in inputs]
            upstream = torch.randn_like(call(*leaves).detach())
            return lambda: torch.autograd.grad(call(*leaves), leaves, upstream)

        candidates: Candidates = {
            "shoestring, packed": run(
                lambda q, k, v: shoestring.attention(q, k, v, causal=True, cu_seqlens_q=starts), flat
            ),
            "shoestring, padded": run(lambda q, k, v: shoestring.attention(q, k, v, causal=True), padded),
            "PyTorch, padded, no mask": run(sdpa(None, is_causal=True), padded),
            "PyTorch, padded, mask": run(sdpa(None, attn_mask=mask), padded),
        }
        flops = 14 * heads * dim * sum(n * n for n in lengths) / 2
        times = interleave(candidates, options.repeats, options.device)
        title = (
            f"{len(lengths)} sequences of {sum(lengths) / len(lengths):.0f} tokens, the longest {longest}, {heads} heads, d {dim}, "
            f"causal, {str(dtype)[6:]}, forward + backward"
        )
        report.table(title, times, flops / 1e9, "GFLOP/s")


def first_fit(sizes: list[int], capacity: int) -> list[int]:
    """Pack sequences by the rule of pack_sequences (first-fit decreasing), in plain Python."""
    room: list[int] = []
    bins = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        place = next((b for b, left in enumerate(room) if left >= sizes[i]), len(room))
        if place == len(room):
            room.append(capacity)
        room[place] -= sizes[i]
        bins[i] = place
    return bins


def packing(report: Report, options: argparse.Namespace) -> None:
    sizes, capacity = function_lengths(500 if options.quick else 5000), 2048
    lengths = torch.tensor(sizes)
    bins = int(torch.ops.shoestring.pack_sequences(lengths, capacity).max()) + 1
    in_order, left = 1, capacity
    for n in sizes:  # for comparison, pack the sequences without sorting them by length
        in_order, left = (in_order + 1, capacity - n) if n > left else (in_order, left - n)
    candidates: Candidates = {
        "shoestring": lambda: torch.ops.shoestring.pack_sequences(lengths, capacity),
        "the same in Python": lambda: first_fit(sizes, capacity),
    }
    title = (
        f"{len(sizes)} sequences packed into {capacity} tokens each: {sum(sizes) / bins / capacity:.1%} full, in order of "
        f"arrival {sum(sizes) / in_order / capacity:.1%}"
    )
    report.table(title, interleave(candidates, options.repeats, "cpu"), len(sizes) / 1e6, "M/s")


def main() -> None:
    options = arguments(__doc__.splitlines()[0], devices=("cpu", "cuda"))
    report = Report("attention", options)
    dense(report, options)
    verdict(report)
    packed(report, options)
    packing(report, options)
    report.finish()


if __name__ == "__main__":
    main()
