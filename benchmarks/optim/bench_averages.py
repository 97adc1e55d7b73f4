"""Time an update of averaged weights: shoestring in both formats, torch's AveragedModel, and copies.

The rate counts the bytes that an exponential average in fp32 moves: each weight is read, and its average is read
and written. One row "limit" is a copy that moves as many bytes, another one the addition of the same tensors.
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from benchmarks.common import Candidates, Report, arguments, copy_probe, interleave
from shoestring.optim import Averages


def model_of(count: int, each: int, dtype: torch.dtype, device: str) -> nn.ParameterList:
    return nn.ParameterList([torch.randn(each, device=device).to(dtype) for _ in range(count)])


def begun(update: Callable[[], object]) -> Callable[[], object]:
    """Call the first update, which copies the weights, and return the function for the next ones."""
    update()
    return update


def torchs(model: nn.Module, **rule: object) -> Callable[[], object]:
    averaged = AveragedModel(model, **rule)  # type: ignore[arg-type]
    return begun(lambda: averaged.update_parameters(model))


def measure(options: argparse.Namespace, report: Report, count: int, each: int, dtype: torch.dtype) -> None:
    device = options.device
    model = model_of(count, each, dtype, device)
    moved = count * each * (dtype.itemsize + 8)
    candidates: Candidates = {
        "shoestring ema": begun(Averages(model).update),
        "shoestring ema, format bf16": begun(Averages(model, format="bf16").update),
        "shoestring swa": begun(Averages(model, "swa").update),
        f"torch, {str(dtype)[6:]}": torchs(model, avg_fn=get_ema_avg_fn()),
        f"torch foreach, {str(dtype)[6:]}": torchs(model, multi_avg_fn=get_ema_multi_avg_fn()),
        "limit: copy of the fp32 bytes": copy_probe(moved, device),
    }
    if dtype == torch.float32 and count == 1:
        weight, average = model[0].detach(), torch.zeros(each, device=device)
        candidates["limit: average.add_(weight)"] = lambda: average.add_(weight)
    title = f"{count} tensors of {each} weights, {str(dtype)[6:]}"
    report.table(title, interleave(candidates, options.repeats, device), moved / 1e9, "GB/s")


def main() -> None:
    options = arguments(__doc__.splitlines()[0], ("cpu", "cuda"))
    report = Report("averages", options)
    large = (1 if options.quick else 64) << 20
    if options.device == "cuda" and not options.quick:
        large = 1000 << 20
    for dtype in (torch.float32, torch.bfloat16):
        measure(options, report, 1, large, dtype)
        measure(options, report, 100 if options.quick else 300, 4096, dtype)
    report.finish()


if __name__ == "__main__":
    main()
