"""Time cross-entropy of logits, forward and backward: shoestring, plain PyTorch, and a copy as the limit.

The rate counts one read of the logits and one write of their gradient. The row "limit" is ``copy_`` of the
logits to another tensor, on a CPU with the number of threads that the losses use. No model is timed: the
logits come from an autograd function that does no work in forward or backward.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

import shoestring
from benchmarks.common import Candidates, Report, arguments, copy_probe, interleave, rotate

Loss = Callable[[Tensor, Tensor], Tensor]


class Logits(torch.autograd.Function):
    """Stands in for a model: returns `buffer` as its logits, and ignores the gradient of the logits."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, buffer: Tensor) -> Tensor:
        # detach(), because autograd would forbid the loss to change a view of `buffer` in place
        return buffer.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[None, None]:  # type: ignore[override]
        return None, None


def peers() -> dict[str, Loss]:
    """Return the losses of other installed libraries, as functions from (logits, target) to the mean loss."""
    try:
        from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss

        return {"Liger Kernel, in place": LigerCrossEntropyLoss()}
    except ImportError:
        return {}


def two_calls(logits: Tensor, target: Tensor) -> Tensor:
    """Return the loss of two targets as users mix it who have only losses of one target."""
    loss = shoestring.cross_entropy
    return 0.7 * loss(logits, target) + 0.3 * loss(logits, target.flip(0))


def step(loss: Loss, logits: Tensor, target: Tensor) -> Callable[[], None]:
    x = torch.zeros((), device=logits.device, requires_grad=True)
    return lambda: loss(Logits.apply(x, logits), target).backward()


def main() -> None:
    options = arguments(__doc__.splitlines()[0], devices=("cpu", "cuda"))
    report = Report("cross_entropy", options)
    losses: dict[str, Loss] = {
        "shoestring, in place": lambda z, t: shoestring.cross_entropy(z, t, inplace=True),
        "shoestring, logits kept": shoestring.cross_entropy,
        "shoestring, two targets": lambda z, t: shoestring.cross_entropy(z, t, target2=t.flip(0), mix=0.7),
        "shoestring, two calls": two_calls,
        "PyTorch": F.cross_entropy,
        "PyTorch, fp32 copy": lambda z, t: F.cross_entropy(z.float(), t),
    }
    if options.device == "cuda":
        losses |= peers()
    shapes = (
        [(1024, 50304), (4096, 32000)]
        if options.device == "cpu"
        else [(8192, 50304), (8192, 131072), (4096, 50257)]
    )
    for tokens, vocab in [(64, 5000)] if options.quick else shapes:
        for dtype in (torch.float32, torch.bfloat16):
            size = tokens * vocab * dtype.itemsize

            def candidate(
                loss: Loss, tokens: int = tokens, vocab: int = vocab, dtype: torch.dtype = dtype
            ) -> Callable:
                # A loss that works in place replaces the logits in the buffer by their gradient. The next
                # call takes the gradient for logits, which does not change its time.
                logits = torch.randn(tokens, vocab, device=options.device).to(dtype)
                return step(loss, logits, torch.randint(vocab, (tokens,), device=options.device))

            candidates: Candidates = {
                name: rotate(lambda loss=loss: candidate(loss), size, options.device)
                for name, loss in losses.items()
                if dtype != torch.float32 or "fp32" not in name
            }
            candidates["limit: a copy"] = copy_probe(2 * size, options.device)
            times = interleave(candidates, options.repeats, options.device)
            title = f"{tokens} tokens x {vocab} classes, {str(dtype)[6:]}, forward + backward"
            report.table(title, times, 2 * size / 1e9, "GB/s")
    report.finish()


if __name__ == "__main__":
    main()
