"""Time the codecs of compressed gradients beside the memory bandwidth.

The limit of compression is `error.add_(gradient)` and `codes.zero_()`, which read and write the same memory. The limit of
decompression is `out.fill_(1)` and `codes.sum()`: it writes most of its bytes, and memory is slower to write than to
copy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.common import Report, arguments, copy_probe, interleave, rotate
from shoestring.ops import compress_gradient_, compressed_gradient_bytes, decompress_mean_
from tests.references.quantization import compress_gradient_reference, decompress_mean_reference

BITS = (8, 4, 1)
Call = Callable[[], object]


def compress_calls(bits: int, numel: int, dtype: torch.dtype, device: str, plain: bool) -> dict[str, Call]:
    def tensors() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(numel, device=device), torch.randn(numel, device=device).to(dtype)

    def ours() -> Call:
        error, gradient = tensors()
        codes = torch.empty(compressed_gradient_bytes(numel, bits=bits), dtype=torch.uint8, device=device)
        return lambda: compress_gradient_(error, gradient, codes, bits=bits)

    def limit() -> Call:
        error, gradient = tensors()
        codes = torch.empty(compressed_gradient_bytes(numel, bits=bits), dtype=torch.uint8, device=device)
        return lambda: (error.add_(gradient), codes.zero_())

    def reference() -> Call:
        error, gradient = tensors()
        return lambda: compress_gradient_reference(error, gradient, bits=bits)

    size = numel * (8 + dtype.itemsize) + compressed_gradient_bytes(numel, bits=bits)
    makers = {"shoestring": ours}
    if plain:  # for bf16, PyTorch's addition to fp32 is far slower than the memory
        makers |= {"limit: add_ and zero_": limit, "PyTorch operators": reference}
    else:
        makers["limit: copy of as many bytes"] = lambda: copy_probe(size, device)
    return {name: rotate(make, size, device) for name, make in makers.items()}


def decompress_calls(bits: int, numel: int, ranks: int, device: str, plain: bool) -> dict[str, Call]:
    bytes_of_rank = compressed_gradient_bytes(numel, bits=bits)
    size = 4 * numel + ranks * bytes_of_rank

    def codes() -> torch.Tensor:
        rows = torch.empty(ranks, bytes_of_rank, dtype=torch.uint8, device=device)
        for row in rows:
            error, gradient = torch.zeros(numel, device=device), torch.randn(numel, device=device)
            compress_gradient_(error, gradient, row, bits=bits)
        return rows

    def ours() -> Call:
        rows, out = codes(), torch.empty(numel, device=device)
        return lambda: decompress_mean_(out, rows, bits=bits)

    def reference() -> Call:
        rows = codes()
        return lambda: decompress_mean_reference(rows, numel=numel, bits=bits)

    def limit() -> Call:
        rows, out = codes().view(-1), torch.empty(numel, device=device)
        words = rows[: rows.numel() // 8 * 8].view(torch.int64)
        return lambda: (out.fill_(1), words.sum())

    found = {
        "shoestring": rotate(ours, size, device),
        "limit: fill_ and sum": rotate(limit, size, device),
    }
    if plain:
        found["PyTorch operators"] = rotate(reference, size, device)
    return found


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    report = Report("compress", options)
    device = options.device
    # Beyond the caches: a bucket of DistributedDataParallel has 25 MiB, and all buckets come in turn.
    numel = 1 << 18 if options.quick else 1 << 25
    for bits in BITS:
        for dtype in (torch.float32, torch.bfloat16):
            calls = compress_calls(bits, numel, dtype, device, plain=dtype == torch.float32)
            work = numel * (8 + dtype.itemsize) + compressed_gradient_bytes(numel, bits=bits)
            name = "bf16" if dtype == torch.bfloat16 else "fp32"
            report.table(
                f"compress_gradient_, {bits} bits, {numel} elements, {name}",
                interleave(calls, options.repeats, device),
                work / 1e9,
                "GB/s",
            )
        for ranks in (1, 4):
            calls = decompress_calls(bits, numel, ranks, device, plain=ranks == 1)
            report.table(
                f"decompress_mean_, {bits} bits, {numel} elements, {ranks} ranks, fp32",
                interleave(calls, options.repeats, device),
                (4 * numel + ranks * compressed_gradient_bytes(numel, bits=bits)) / 1e9,
                "GB/s",
            )
    report.finish()


if __name__ == "__main__":
    main()
