"""NF4: quantising and dequantising, ours and bitsandbytes', with memcpy of the dense tensor as the limit.

The limit reads as many dense bytes as quantising reads, and writes as many as dequantising writes.
"""

import torch
from common import Candidates, Report, arguments, interleave

import shoestring


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    report = Report("quantize_4bit", options)
    try:
        from bitsandbytes import functional as bnb
    except ImportError:
        bnb = None
        print("bitsandbytes is not installed")
    # A tensor that stays in cache, and one that does not.
    for count in (1 << 16,) if options.quick else (1 << 20, 1 << 25):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(count).to(dtype)
            copy = torch.empty_like(x)
            q = shoestring.quantize_4bit(x)
            nested = shoestring.quantize_4bit(x, nested=True)
            read: Candidates = {"shoestring": q.dequantize, "shoestring, nested": nested.dequantize}
            write: Candidates = {"shoestring": lambda x=x: shoestring.quantize_4bit(x)}
            if bnb is not None:
                packed, state = bnb.quantize_4bit(x, quant_type="nf4")
                twice, twice_state = bnb.quantize_4bit(x, quant_type="nf4", compress_statistics=True)
                read["bitsandbytes"] = lambda p=packed, s=state: bnb.dequantize_4bit(p, s)
                read["bitsandbytes, nested"] = lambda p=twice, s=twice_state: bnb.dequantize_4bit(p, s)
                write["bitsandbytes"] = lambda x=x: bnb.quantize_4bit(x, quant_type="nf4")
            # Both operators allocate what they return, so one limit does too; the other has its buffer.
            read["limit: copy into a new tensor"] = x.clone
            read["limit: copy into a given tensor"] = lambda x=x, copy=copy: copy.copy_(x)
            write["limit: copy into a given tensor"] = read["limit: copy into a given tensor"]
            name = f"{count >> 20} Mi elements, {str(dtype)[6:]}"
            report.table(f"dequantise, {name}", interleave(read, options.repeats), count / 1e6, "M elements/s")
            report.table(f"quantise, {name}", interleave(write, options.repeats), count / 1e6, "M elements/s")
    report.finish()


if __name__ == "__main__":
    main()
