"""Linear cross-entropy, forward and backward: ours, plain PyTorch, and the matrix products alone as the limit.

The limit is 6 * tokens * features * vocab flops at the rate of the same three products (logits, grad_hidden and
grad_weight) through torch.mm, at the operator's own chunk of tokens.
"""

import torch
from common import Report, arguments, interleave
from torch.nn import functional as F

import shoestring


def limit(hidden: torch.Tensor, weight: torch.Tensor, chunk: int) -> None:
    """The three products, chunk by chunk, and nothing else."""
    vocab, features = weight.shape
    logits = torch.empty(chunk, vocab)
    grad_weight = torch.zeros(vocab, features)
    for x in hidden.split(chunk):
        z = logits[: len(x)]
        torch.mm(x, weight.t(), out=z)
        torch.mm(z, weight)
        grad_weight.addmm_(z.t(), x)


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    report = Report("linear_cross_entropy", options)
    shapes = [(256, 64, 5000)] if options.quick else [(1024, 768, 50304), (4096, 256, 16384), (512, 2048, 151936)]
    for tokens, features, vocab in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            if dtype == torch.bfloat16 and tokens * vocab > 6e7:
                continue
            hidden = torch.randn(tokens, features).to(dtype).requires_grad_()
            weight = (torch.randn(vocab, features) / features**0.5).to(dtype).requires_grad_()
            target = torch.randint(vocab, (tokens,))

            def ours() -> None:
                hidden.grad = weight.grad = None
                shoestring.linear_cross_entropy(hidden, weight, target).backward()

            def plain() -> None:
                hidden.grad = weight.grad = None
                F.cross_entropy(F.linear(hidden, weight), target).backward()

            candidates = {"shoestring": ours, "PyTorch, whole logits": plain}
            if dtype != torch.float32:

                def wide() -> None:
                    hidden.grad = weight.grad = None
                    F.cross_entropy(F.linear(hidden, weight).float(), target).backward()

                candidates["PyTorch, loss in fp32"] = wide
            if hasattr(F, "linear_cross_entropy"):

                def chunked() -> None:
                    hidden.grad = weight.grad = None
                    F.linear_cross_entropy(hidden, weight, target).backward()

                candidates["PyTorch, F.linear_cross_entropy"] = chunked
            if dtype == torch.float32:
                chunk = max(16, min(tokens, 1024, (64 << 20) // (4 * vocab) // 16 * 16))
                h, w = hidden.detach(), weight.detach()
                candidates["limit: the three products"] = lambda: limit(h, w, chunk)
            report.table(
                f"{tokens} tokens x {features} features x {vocab} classes, {str(dtype)[6:]}, forward + backward",
                interleave(candidates, options.repeats),
                6 * tokens * features * vocab / 1e9,
                "GFLOP/s",
            )
    report.finish()


if __name__ == "__main__":
    main()
