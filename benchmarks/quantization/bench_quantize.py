"""Time quantising and dequantising NF4, int4 and int8: shoestring, bitsandbytes, plain PyTorch, and a copy.

The copy is the limit. On a GPU, the copy moves as many bytes as the operator. So its time divided by the
operator's time is the fraction of the copy bandwidth that the operator reaches. On a CPU, a write costs more
than a read. There the copy reads as many bytes as quantising reads, and writes as many as dequantising
writes.
"""

import argparse
from collections.abc import Callable, Sequence
from types import ModuleType

import torch

import shoestring
from benchmarks.common import Candidates, Report, arguments, copy_probe, interleave, rotate
from tests.references.quantization import (
    dequantize_4bit_reference,
    dequantize_int8_reference,
    quantize_int8_reference,
)

Maker = Callable[[torch.Tensor], Callable[[], object]]
COLUMNS = 4096


def nf4_readers(bnb: ModuleType | None) -> dict[str, Maker]:
    """Return {label: function}. Each quantises a tensor to NF4, and returns a call that dequantises it."""

    def theirs(x: torch.Tensor, nested: bool) -> Callable[[], object]:
        packed, state = bnb.quantize_4bit(x, quant_type="nf4", compress_statistics=nested)
        return lambda: bnb.dequantize_4bit(packed, state)

    def given(x: torch.Tensor) -> Callable[[], object]:
        q, out = shoestring.quantize_4bit(x), torch.empty_like(x)
        return lambda: torch.ops.shoestring.dequantize_(out, q.packed, q.absmax)

    def kernel(x: torch.Tensor) -> Callable[[], object]:
        packed, state = bnb.quantize_4bit(x, quant_type="nf4")
        run = torch.ops.bitsandbytes.dequantize_4bit
        return lambda: run(packed, state.absmax, 64, "nf4", x.shape, x.dtype)

    found: dict[str, Maker] = {
        "shoestring into a given tensor": given,
        "shoestring": lambda x: shoestring.quantize_4bit(x).dequantize,
        "shoestring, nested": lambda x: shoestring.quantize_4bit(x, double_quant=True).dequantize,
    }
    if bnb is not None:  # bitsandbytes is timed twice: its operator alone, and with the Python code around it
        found |= {"bitsandbytes' operator": kernel}
        found |= {
            "bitsandbytes": lambda x: theirs(x, False),
            "bitsandbytes, nested": lambda x: theirs(x, True),
        }
    return found


def nf4_writers(bnb: ModuleType | None) -> dict[str, Maker]:
    """Return {label: function}. Each takes a tensor, and returns a call that quantises it to NF4."""
    found: dict[str, Maker] = {"shoestring": lambda x: lambda: shoestring.quantize_4bit(x)}
    if bnb is not None:
        found["bitsandbytes"] = lambda x: lambda: bnb.quantize_4bit(x, quant_type="nf4")
    return found


def int4_readers(_: ModuleType | None) -> dict[str, Maker]:
    """Return {label: function}. Each quantises a tensor to int4, and returns a call that dequantises it.

    bitsandbytes has no int4. Its NF4, which has as many bits, takes the place of int4.
    """

    def plain(x: torch.Tensor) -> Callable[[], object]:
        q = shoestring.quantize_4bit(x, "int4")
        return lambda: dequantize_4bit_reference(
            q.packed, q.absmax, shape=x.shape, dtype=x.dtype, quant_type="int4"
        )

    return {
        "shoestring": lambda x: shoestring.quantize_4bit(x, "int4").dequantize,
        "shoestring, NF4": lambda x: shoestring.quantize_4bit(x).dequantize,
        "plain PyTorch": plain,
    }


def int4_writers(_: ModuleType | None) -> dict[str, Maker]:
    return {
        "shoestring": lambda x: lambda: shoestring.quantize_4bit(x, "int4"),
        "shoestring, NF4": lambda x: lambda: shoestring.quantize_4bit(x),
    }


def int8_readers(bnb: ModuleType | None) -> dict[str, Maker]:
    def plain(x: torch.Tensor) -> Callable[[], object]:
        codes, scales = torch.ops.shoestring.quantize_int8(x)
        return lambda: dequantize_int8_reference(codes, scales, dtype=x.dtype)

    def theirs(x: torch.Tensor) -> Callable[[], object]:
        codes, scales = torch.ops.shoestring.quantize_int8(x)
        return lambda: bnb.int8_vectorwise_dequant(codes, scales).to(x.dtype)

    def unscaled(x: torch.Tensor) -> Callable[[], object]:
        codes, _ = torch.ops.shoestring.quantize_int8(x)
        return lambda: codes.to(x.dtype)

    found: dict[str, Maker] = {
        "shoestring": lambda x: shoestring.quantize_int8(x).dequantize,
        "plain PyTorch": plain,
    }
    # converting the codes to floats without scaling them moves as many bytes as dequantising
    found["limit: the codes converted, unscaled"] = unscaled
    if bnb is not None:
        found["bitsandbytes"] = theirs
    return found


def int8_writers(bnb: ModuleType | None) -> dict[str, Maker]:
    found: dict[str, Maker] = {
        "shoestring": lambda x: lambda: shoestring.quantize_int8(x),
        "plain PyTorch": lambda x: lambda: quantize_int8_reference(x),
    }
    if bnb is None:
        return found

    def theirs(x: torch.Tensor) -> Callable[[], object]:
        y = x.half() if x.is_cuda else x  # on a GPU, bitsandbytes quantises fp16 only
        return lambda: bnb.int8_vectorwise_quant(y)

    return found | {"bitsandbytes": theirs}


def weights(
    report: Report, options: argparse.Namespace, kinds: Sequence[str] = ("NF4", "int4", "int8")
) -> None:
    """Print the tables for each kind of quantised weight: dequantising and quantising."""
    device = options.device
    try:
        from bitsandbytes import functional as bnb
    except ImportError:
        bnb = None
        print("bitsandbytes is not installed")
    if options.quick:
        counts = (1 << 16,) if device == "cpu" else (1 << 22,)
    elif device == "cuda":
        counts = (4096 * 4096, 4096 * 14336)  # sizes of weights in a model of 8 B parameters
    else:
        counts = (1 << 20, 1 << 25)  # on a CPU, one tensor fits into the cache and the other one does not
    found = {
        "NF4": (nf4_readers(bnb), nf4_writers(bnb), lambda count: count // 2 + count // 64 * 4),
        "int4": (int4_readers(bnb), int4_writers(bnb), lambda count: count // 2 + count // 64 * 4),
        "int8": (int8_readers(bnb), int8_writers(bnb), lambda count: count + count // COLUMNS * 4),
    }
    for count, dtype, kind in (
        (c, d, k) for c in counts for d in (torch.float32, torch.bfloat16) for k in kinds
    ):
        readers, writers, size = found[kind]
        dense, held = count * dtype.itemsize, size(count)

        def timed(makers: dict[str, Maker], size: int, limits: Candidates) -> dict[str, list[float]]:
            def random(make: Maker) -> Callable[[], object]:
                return make(torch.randn(count // COLUMNS, COLUMNS, device=device).to(dtype))

            ours = {
                name: rotate(lambda make=make: random(make), size, device) for name, make in makers.items()
            }
            return interleave(ours | limits, options.repeats, device)

        if device == "cuda":
            read = write = {"limit: copy of as many bytes": copy_probe(dense + held, device)}
            work, unit = (dense + held) / 1e9, "GB/s"
        else:
            x = torch.randn(count).to(dtype)
            to = torch.empty_like(x)
            write = {"limit: copy into a given tensor": lambda x=x, to=to: to.copy_(x)}
            # Quantising and dequantising allocate their results, and so does the first of the two copies. The
            # second copies into an existing tensor.
            read = {"limit: copy into a new tensor": x.clone} | write
            work, unit = count / 1e6, "M elements/s"
        name = f"{kind}, {count / 2**20:.4g} Mi elements, {str(dtype)[6:]}"
        report.table(f"dequantise {name}", timed(readers, held, read), work, unit)
        report.table(f"quantise {name}", timed(writers, dense, write), work, unit)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], devices=("cpu", "cuda"))
    report = Report("quantize", options)
    weights(report, options)
    report.finish()


if __name__ == "__main__":
    main()
