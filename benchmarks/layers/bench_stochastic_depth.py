"""Time training steps with stochastic depth: whole rows or whole branches are left out, together with their work.

The stacks are a transformer's blocks (tokens of 16 rows) and a residual network's (images). Every branch has the same
probability. The rows "mask" keep the work and multiply the result by a mask, as most implementations do.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.common import Candidates, Report, arguments, interleave
from shoestring import stochastic_depth

P = 0.4


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.heads = nn.Linear(width, width), width // 64

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )


def transformer(width: int, blocks: int) -> nn.ModuleList:
    return nn.ModuleList(branch for _ in range(blocks) for branch in (Attention(width), mlp(width)))


def half_of_residual(width: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False)]


def residual(width: int, blocks: int) -> nn.ModuleList:
    return nn.ModuleList(
        nn.Sequential(*half_of_residual(width), *half_of_residual(width)) for _ in range(blocks)
    )


def masked(branch: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    keep = torch.empty([len(x)] + [1] * (x.dim() - 1), device=x.device).bernoulli_(1 - P).div_(1 - P)
    return x + keep * branch(x)


def step_of(branches: nn.ModuleList, x: Tensor, mode: str) -> Callable[[], None]:
    """Return a training step. Each call draws anew; a call runs 5 steps, because branches come and go."""
    optimizer = torch.optim.SGD(branches.parameters(), lr=1e-6)
    count = 0

    def step() -> None:
        nonlocal count
        y = x
        for layer, branch in enumerate(branches):
            if mode in ("row", "batch"):
                y = stochastic_depth(branch, y, P, mode, step=count, layer=layer)  # type: ignore[arg-type]
            else:
                y = masked(branch, y) if mode == "mask" else y + branch(y)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        count += 1

    def run() -> None:
        for _ in range(5):
            step()

    return run


def measure(
    options: argparse.Namespace, report: Report, title: str, branches: nn.ModuleList, x: Tensor
) -> None:
    branches.to(options.device)
    x = x.to(options.device)
    candidates: Candidates = {
        "shoestring row": step_of(branches, x, "row"),
        "shoestring batch": step_of(branches, x, "batch"),
        "mask": step_of(branches, x, "mask"),
        "without": step_of(branches, x, "none"),
    }
    times = interleave(candidates, options.repeats, options.device)
    report.table(f"{title}, p = {P}", times, 5.0, "steps/s")
    for name in ("shoestring row", "shoestring batch", "mask"):
        ratio = statistics.median(a / b for a, b in zip(times[name], times["without"], strict=True))
        print(f"{name}: {ratio:.3f} of the step without")


def main() -> None:
    options = arguments(__doc__.splitlines()[0], ("cpu", "cuda"))
    report = Report("stochastic_depth", options)
    torch.manual_seed(0)
    quick = options.quick
    width, blocks, tokens = (64, 2, 32) if quick else (256, 6, 128)
    measure(options, report, "transformer", transformer(width, blocks), torch.randn(16, tokens, width))
    width, blocks, side = (16, 2, 8) if quick else (64, 8, 28)
    measure(options, report, "residual network", residual(width, blocks), torch.randn(16, width, side, side))
    report.finish()


if __name__ == "__main__":
    main()
