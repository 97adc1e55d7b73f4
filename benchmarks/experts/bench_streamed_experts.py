"""Measure layers of experts whose frozen weights are in a file, beside the same layers in memory.

"by expert" reads the experts that have tokens, as ``offload_weights`` does for ``nn.Experts``. "by block" reads all
experts of each block. Each call is a forward and a backward. "MiB read" is what a call reads from the file, and "MiB"
the most that its weights take in memory.

    python -m benchmarks.experts.bench_streamed_experts [--folder DIR]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable

import torch
from torch import Tensor, nn

import shoestring
from benchmarks.common import Report, arguments, interleave

MIB = 1 << 20


def own(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk that holds the files")


class Experts(shoestring.nn.Experts):
    """Experts that travel with their block."""

    _shoestring_reads_stacks = False  # see core/stacks.py


class Block(nn.Module):
    def __init__(self, kind: type[nn.Module], experts: int, features: int, hidden: int, top_k: int) -> None:
        super().__init__()
        self.router = shoestring.nn.Router(features, experts, top_k, dtype=torch.bfloat16)
        self.experts = kind(experts, features, hidden, dtype=torch.bfloat16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        route = self.router(x)
        y: Tensor = x + self.experts(x, route.index, route.weight)
        return y


def main() -> None:
    options = arguments(__doc__ or "", more=own)
    report = Report("streamed_experts", options)
    depth, experts, features, hidden, top_k = (3, 16, 128, 64, 2) if options.quick else (6, 64, 1024, 512, 4)
    models: dict[str, nn.Module] = {}
    handles = {}
    for name, kind in {
        "by expert": shoestring.nn.Experts,
        "by block": Experts,
        "in memory": shoestring.nn.Experts,
    }.items():
        torch.manual_seed(0)
        models[name] = nn.Sequential(*(Block(kind, experts, features, hidden, top_k) for _ in range(depth)))
        if name != "in memory":
            handles[name] = shoestring.offload_weights(
                models[name], f"nvme:{options.folder}", blocks=list(models[name])
            )
    most = dict.fromkeys(handles, 0)

    def watch(name: str) -> Callable[..., None]:
        def see(*_: object) -> None:
            most[name] = max(most[name], handles[name].statistics()["device"])

        return see

    for name in handles:
        for block in models[name]:  # type: ignore[attr-defined]
            block.experts.register_forward_hook(watch(name))

    def run(name: str, x: Tensor) -> Callable[[], object]:
        def call() -> None:
            models[name](x).sum().backward()

        return call

    for tokens in (1, 8, 64, 512):
        x = torch.randn(tokens, features, dtype=torch.bfloat16).requires_grad_()
        most = dict.fromkeys(handles, 0)
        before = {name: handle.statistics()["fetched"] for name, handle in handles.items()}
        times = interleave({name: run(name, x) for name in models}, options.repeats)
        calls = options.repeats + 1
        columns: dict[str, dict[str, float | None]] = {
            name: {
                "MiB read": (handle.statistics()["fetched"] - before[name]) / calls / MIB,
                "MiB": most[name] / MIB,
            }
            for name, handle in handles.items()
        }
        columns["in memory"] = {
            "MiB read": 0.0,
            "MiB": sum(p.nbytes for p in models["in memory"].parameters()) / MIB,
        }
        report.table(
            f"{depth} layers of {experts} experts, {features} to {hidden} features, top {top_k}, bf16: {tokens} tokens",
            times,
            tokens,
            "tokens/s",
            columns,
        )


if __name__ == "__main__":
    main()
