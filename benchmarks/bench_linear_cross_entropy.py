"""Linear cross-entropy, forward and backward: ours, plain PyTorch, and the matrix products alone as the limit.

The limit is 6 * tokens * features * vocab flops at the rate of the same three products (logits, grad_hidden and
grad_weight) through torch.mm, at the operator's own chunk of tokens; on a GPU, at that of an 8192^3 product of bf16.
"""

from collections.abc import Callable

import torch
from common import Candidates, Report, arguments, gemm_probe, interleave
from torch import Tensor
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


def peers() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Those that are installed: (hidden, weight, target) to the mean loss."""
    found: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
    if hasattr(F, "linear_cross_entropy"):
        found["PyTorch, F.linear_cross_entropy"] = F.linear_cross_entropy
    try:
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        found["Liger Kernel"] = lambda hidden, weight, target: liger(weight, hidden, target)
    except ImportError:
        print("liger-kernel is not installed")
    try:
        from cut_cross_entropy import linear_cross_entropy

        found["Cut Cross-Entropy"] = linear_cross_entropy
    except ImportError:
        print("cut-cross-entropy is not installed")
    return found


def peak_mib(run: Callable[[], object]) -> float | None:
    """What a call takes beyond what is there before it, its gradients included; None where it does not fit."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        run()
    except torch.cuda.OutOfMemoryError:
        return None
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def on_gpu(report: Report) -> None:
    """bf16, forward and backward, with peak memory."""
    options = report.options
    losses: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "shoestring": shoestring.linear_cross_entropy,
        "shoestring, workspace_mb=1024": lambda *a: shoestring.linear_cross_entropy(*a, workspace_mb=1024),
        "PyTorch, whole logits": lambda hidden, weight, target: F.cross_entropy(F.linear(hidden, weight), target),
        **peers(),
    }
    # A LLaMA-like head at the size of the project's goal, one of several waves, and Gemma 2 2B's.
    shapes = [(8192, 4096, 131072), (16384, 4096, 128256), (8192, 2304, 256000)]
    side = 1024 if options.quick else 8192
    for tokens, features, vocab in [(256, 64, 5000)] if options.quick else shapes:
        hidden = torch.randn(tokens, features, device="cuda", dtype=torch.bfloat16).requires_grad_()
        weight = torch.empty(vocab, features, device="cuda", dtype=torch.bfloat16).normal_(std=features**-0.5)
        weight.requires_grad_()
        target = torch.randint(vocab, (tokens,), device="cuda")

        def step(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], None]:
            def run() -> None:
                hidden.grad = weight.grad = None
                loss(hidden, weight, target).backward()

            return run

        candidates: Candidates = {}
        peaks: dict[str, float] = {}
        for name, loss in losses.items():
            run = step(loss)
            try:
                peak_mib(run)  # what is allocated once and kept
                peak = peak_mib(run)
            except Exception as error:  # a peer's, on this GPU or with this PyTorch: the others are still of interest
                print(f"{name}: left out: {type(error).__name__}: {error}")
                continue
            if peak is None:
                print(f"{name}: left out: does not fit this GPU's memory")
                continue
            candidates[name], peaks[name] = run, peak
        candidates["limit: its products"] = gemm_probe(side, side, side, torch.bfloat16, "cuda")
        times = interleave(candidates, options.repeats, "cuda")
        flops = 6 * tokens * features * vocab
        times["limit: its products"] = [t * flops / (2 * side**3) for t in times["limit: its products"]]
        title = f"{tokens} tokens x {features} features x {vocab} classes, bfloat16, forward + backward"
        report.table(title, times, flops / 1e12, "TFLOP/s")
        for name, peak in peaks.items():
            print(f"  {name:36} {peak:9.0f} MiB")
        report.data["tables"][-1]["peak_mib"] = peaks
        hidden.grad = weight.grad = None
    report.finish()


def main() -> None:
    options = arguments(__doc__.splitlines()[0], devices=("cpu", "cuda"))
    report = Report("linear_cross_entropy", options)
    if options.device == "cuda":
        return on_gpu(report)
    shapes = [(1024, 768, 50304), (8192, 768, 50304), (4096, 256, 16384), (2048, 2048, 151936)]
    for tokens, features, vocab in [(256, 64, 5000)] if options.quick else shapes:
        seconds = 6 * tokens * features * vocab / 1e11  # or so, for each
        repeats = options.repeats if seconds < 5 else min(options.repeats, 3 if seconds < 20 else 2)
        dense(report, tokens, features, vocab, torch.float32, repeats)
        if tokens * vocab < 6e7:
            dense(report, tokens, features, vocab, torch.bfloat16, repeats)
    peaky(report, *((256, 64, 5000) if options.quick else (1024, 768, 50304)))
    report.finish()


def step(loss: Callable[[Tensor, Tensor, Tensor], Tensor], *tensors: Tensor) -> Callable[[], None]:
    def run() -> None:
        for t in tensors[:2]:
            t.grad = None
        loss(*tensors).backward()

    return run


def dense(report: Report, tokens: int, features: int, vocab: int, dtype: torch.dtype, repeats: int) -> None:
    hidden = torch.randn(tokens, features).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, features) / features**0.5).to(dtype).requires_grad_()
    target = torch.randint(vocab, (tokens,))
    losses: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "shoestring": shoestring.linear_cross_entropy,
        "PyTorch, whole logits": lambda h, w, t: F.cross_entropy(F.linear(h, w), t),
    }
    if dtype != torch.float32:
        losses["PyTorch, loss in fp32"] = lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t)
    if hasattr(F, "linear_cross_entropy"):
        losses["PyTorch, F.linear_cross_entropy"] = F.linear_cross_entropy
    candidates: Candidates = {name: step(loss, hidden, weight, target) for name, loss in losses.items()}
    if dtype == torch.float32:
        chunk = max(16, min(tokens, 1024, (64 << 20) // (4 * vocab) // 16 * 16))
        h, w = hidden.detach(), weight.detach()
        candidates["limit: the three products"] = lambda: limit(h, w, chunk)
        candidates["the same, of 1024 tokens at a time"] = lambda: limit(h, w, min(tokens, 1024))
    title = f"{tokens} tokens x {features} features x {vocab} classes, {str(dtype)[6:]}, forward + backward"
    report.table(title, interleave(candidates, repeats), 6 * tokens * features * vocab / 1e9, "GFLOP/s")


def peaky(report: Report, tokens: int, features: int, vocab: int) -> None:
    """A confident model: nearly all probability on few classes of each token, and targets of a small part of them."""
    weight = torch.randn(vocab, features) / features**0.5
    target = torch.randint(vocab // 20, (tokens,))
    hidden = (25 * weight[target]).requires_grad_()
    weight.requires_grad_()
    eps = 2.0**-12
    candidates = {
        f"shoestring, filter_eps {eps:.1e}": step(
            lambda h, w, t: shoestring.linear_cross_entropy(h, w, t, filter_eps=eps), hidden, weight, target
        ),
        "shoestring": step(shoestring.linear_cross_entropy, hidden, weight, target),
    }
    title = f"{tokens} tokens x {features} features x {vocab} classes, float32, peaky, forward + backward"
    times = interleave(candidates, report.options.repeats)
    report.table(title, times, 6 * tokens * features * vocab / 1e9, "GFLOP/s, as if dense")


if __name__ == "__main__":
    main()
