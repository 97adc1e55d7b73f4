"""NF4: quantising and dequantising, ours and bitsandbytes', with a copy as the limit.

On a GPU the copy moves as many bytes as the operator: its time over ours is the share of the copy bandwidth. On a CPU,
where a write costs more than a read, it reads as many dense bytes as quantising and writes as many as dequantising.
"""

from collections.abc import Callable
from types import ModuleType

import torch
from common import Candidates, Report, arguments, copy_probe, interleave, rotate

import shoestring

Maker = Callable[[torch.Tensor], Callable[[], object]]


def readers(bnb: ModuleType | None) -> dict[str, Maker]:
    """What dequantises the tensor that they are given, quantised."""

    def theirs(x: torch.Tensor, nested: bool) -> Callable[[], object]:
        packed, state = bnb.quantize_4bit(x, quant_type="nf4", compress_statistics=nested)
        return lambda: bnb.dequantize_4bit(packed, state)

    found: dict[str, Maker] = {
        "shoestring": lambda x: shoestring.quantize_4bit(x).dequantize,
        "shoestring, nested": lambda x: shoestring.quantize_4bit(x, nested=True).dequantize,
    }
    if bnb is not None:
        found |= {"bitsandbytes": lambda x: theirs(x, False), "bitsandbytes, nested": lambda x: theirs(x, True)}
    return found


def writers(bnb: ModuleType | None) -> dict[str, Maker]:
    """What quantises the tensor that they are given."""
    found: dict[str, Maker] = {"shoestring": lambda x: lambda: shoestring.quantize_4bit(x)}
    if bnb is not None:
        found["bitsandbytes"] = lambda x: lambda: bnb.quantize_4bit(x, quant_type="nf4")
    return found


def main() -> None:
    options = arguments(__doc__.splitlines()[0], devices=("cpu", "cuda"))
    device = options.device
    report = Report("quantize_4bit", options)
    try:
        from bitsandbytes import functional as bnb
    except ImportError:
        bnb = None
        print("bitsandbytes is not installed")
    if options.quick:
        counts = (1 << 16,) if device == "cpu" else (1 << 22,)
    elif device == "cuda":
        counts = (4096 * 4096, 4096 * 14336)  # weights of an 8 B model
    else:
        counts = (1 << 20, 1 << 25)  # one that stays in cache, and one that does not
    for count in counts:
        for dtype in (torch.float32, torch.bfloat16):
            dense, held = count * dtype.itemsize, count // 2 + count // 64 * 4

            def timed(makers: dict[str, Maker], size: int, limits: Candidates) -> dict[str, list[float]]:
                def random(make: Maker) -> Callable[[], object]:
                    return make(torch.randn(count, device=device).to(dtype))

                ours = {name: rotate(lambda make=make: random(make), size, device) for name, make in makers.items()}
                return interleave(ours | limits, options.repeats, device)

            if device == "cuda":
                read = write = {"limit: copy of as many bytes": copy_probe(dense + held, device)}
                work, unit = (dense + held) / 1e9, "GB/s"
            else:
                x = torch.randn(count).to(dtype)
                write = {"limit: copy into a given tensor": lambda x=x, to=torch.empty_like(x): to.copy_(x)}
                # Both operators allocate what they return, so one limit does too; the other has its buffer.
                read = {"limit: copy into a new tensor": x.clone} | write
                work, unit = count / 1e6, "M elements/s"
            name = f"{count / 2**20:.4g} Mi elements, {str(dtype)[6:]}"
            report.table(f"dequantise, {name}", timed(readers(bnb), held, read), work, unit)
            report.table(f"quantise, {name}", timed(writers(bnb), dense, write), work, unit)
    report.finish()


if __name__ == "__main__":
    main()
