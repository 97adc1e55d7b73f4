"""Time linear cross-entropy, forward and backward: shoestring, plain PyTorch, and GEMMs as the limit.

The limit is the time of 6 * tokens * features * vocab floating-point operations. On the CPU it is measured
with the three matrix products (logits, grad_hidden and grad_weight) through torch.mm, in chunks of tokens
like the operator's. Another row runs the three products with shoestring.ops.addmm_. On a GPU, the limit
follows from the rate of an 8192 x 8192 x 8192 product in bf16.

Other implementations are timed if they are installed: F.linear_cross_entropy from PyTorch 2.13 on, Cut
Cross-Entropy (on the CPU its implementation for torch.compile), and Liger Kernel on a GPU.

``--only 1024`` times the shapes whose names begin with 1024, and ``--only "8192x768x50304 float32"`` one
shape and dtype. ``--only peaky`` prints only the table of a confident model. ``--ours`` leaves out PyTorch
and other packages. With SHOESTRING_CPU=avx2, where the kernels use no bf16 instructions, ``--ours`` compares
shoestring's bf16 with its fp32.
"""

import argparse
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import shoestring
from benchmarks.common import Candidates, Report, arguments, gemm_probe, interleave

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # called with (hidden, weight, target), returns the loss
# called with (self, mat1, mat2, beta), computes self = beta * self + mat1 @ mat2
Product = Callable[[Tensor, Tensor, Tensor, float], object]


def torch_product(out: Tensor, a: Tensor, b: Tensor, beta: float) -> None:
    out.addmm_(a, b, beta=beta)


def own_product(out: Tensor, a: Tensor, b: Tensor, beta: float) -> None:
    shoestring.ops.addmm_(out, a, b, beta=beta)


def limit(hidden: Tensor, weight: Tensor, chunk: int, product: Product) -> None:
    """Compute the products for logits, grad_hidden and grad_weight, chunk by chunk, and nothing else."""
    vocab, features = weight.shape
    logits = torch.empty(chunk, vocab)
    grad_weight = torch.zeros(vocab, features)
    for x in hidden.split(chunk):
        z = logits[: len(x)]
        product(z, x, weight.t(), 0)
        product(torch.empty_like(x), z, weight, 0)
        product(grad_weight, z.t(), x, 1)


def peers(device: str) -> dict[str, Loss]:
    """Return other installed implementations that run on `device`: functions that return the mean loss."""
    found: dict[str, Loss] = {}
    if hasattr(F, "linear_cross_entropy"):
        chunked = torch.nn.LinearCrossEntropyOptions()
        found["PyTorch, F.linear_cross_entropy"] = F.linear_cross_entropy
        found["the same, in chunks"] = lambda h, w, t: F.linear_cross_entropy(h, w, t, options=chunked)
    try:
        from cut_cross_entropy import linear_cross_entropy

        if device == "cuda":
            found["Cut Cross-Entropy"] = linear_cross_entropy
        else:  # on a CPU the torch.compile implementation is timed, because the Triton kernels need a GPU
            compiled = functools.partial(linear_cross_entropy, impl="torch_compile")
            found["Cut Cross-Entropy, torch_compile"] = compiled
    except ImportError:
        print("cut-cross-entropy is not installed")
    if device == "cuda":
        try:
            from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

            liger = LigerFusedLinearCrossEntropyLoss()
            found["Liger Kernel"] = lambda hidden, weight, target: liger(weight, hidden, target)
        except ImportError:
            print("liger-kernel is not installed")
    return found


def peak_mib(run: Callable[[], object]) -> float | None:
    """Return the peak memory of a call in MiB, including the gradients that it computes.

    Memory that was allocated before the call is not counted. Returns None if the call runs out of memory.
    """
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        run()
    except torch.cuda.OutOfMemoryError:
        return None
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def on_gpu(report: Report) -> None:
    """Time linear cross-entropy in bf16 on a GPU, forward and backward, and measure the peak memory."""
    options = report.options
    losses: dict[str, Loss] = {
        "shoestring": shoestring.linear_cross_entropy,
        "shoestring, workspace_mb=1024": lambda *a: shoestring.linear_cross_entropy(*a, workspace_mb=1024),
        "PyTorch, whole logits": lambda hidden, weight, target: F.cross_entropy(
            F.linear(hidden, weight), target
        ),
        **peers("cuda"),
    }
    # A Llama-like head of the size for which the operator is optimised, a head for which the operator
    # processes the tokens in several waves, and the head of Gemma 2 2B.
    shapes = [(8192, 4096, 131072), (16384, 4096, 128256), (8192, 2304, 256000)]
    side = 1024 if options.quick else 8192
    for tokens, features, vocab in [(256, 64, 5000)] if options.quick else shapes:
        hidden = torch.randn(tokens, features, device="cuda", dtype=torch.bfloat16).requires_grad_()
        weight = torch.empty(vocab, features, device="cuda", dtype=torch.bfloat16).normal_(std=features**-0.5)
        weight.requires_grad_()
        target = torch.randint(vocab, (tokens,), device="cuda")

        def step(loss: Loss) -> Callable[[], None]:
            def run() -> None:
                hidden.grad = weight.grad = None
                loss(hidden, weight, target).backward()

            return run

        candidates: Candidates = {}
        peaks: dict[str, float] = {}
        for name, loss in losses.items():
            run = step(loss)
            # Another package's loss may fail on this GPU or with this PyTorch; the remaining implementations
            # are still timed.
            try:
                peak_mib(run)  # a first call, because it allocates memory that is kept between calls
                peak = peak_mib(run)
            except Exception as error:
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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", default="", metavar="PREFIX", help="shapes, as in 1024x768x50304 float32, or peaky"
    )
    parser.add_argument("--ours", action="store_true", help="on the CPU: without PyTorch's and the peers'")


def main() -> None:
    options = arguments(__doc__.splitlines()[0], devices=("cpu", "cuda"), more=add_options)
    report = Report("linear_cross_entropy", options)
    if options.device == "cuda":
        on_gpu(report)
        return
    shapes = [(1024, 768, 50304), (8192, 768, 50304), (4096, 256, 16384), (2048, 2048, 151936)]
    others = {} if options.ours else peers("cpu")
    for tokens, features, vocab in [(256, 64, 5000)] if options.quick else shapes:
        # rough estimate of the seconds of one forward and backward pass, at 100 GFLOP/s
        seconds = 6 * tokens * features * vocab / 1e11
        repeats = options.repeats if seconds < 5 else min(options.repeats, 3 if seconds < 20 else 2)
        name = f"{tokens}x{features}x{vocab}"
        if f"{name} float32".startswith(options.only):
            dense(report, tokens, features, vocab, torch.float32, repeats, others)
        if (options.ours or tokens * vocab < 6e7) and f"{name} bfloat16".startswith(options.only):
            dense(report, tokens, features, vocab, torch.bfloat16, repeats, others)
    if "peaky".startswith(options.only):
        peaky(report, *((256, 64, 5000) if options.quick else (1024, 768, 50304)))
    report.finish()


def step(loss: Loss, *tensors: Tensor) -> Callable[[], None]:
    def run() -> None:
        for t in tensors[:2]:
            t.grad = None
        loss(*tensors).backward()

    return run


def dense(
    report: Report,
    tokens: int,
    features: int,
    vocab: int,
    dtype: torch.dtype,
    repeats: int,
    others: dict[str, Loss],
) -> None:
    ours = shoestring.linear_cross_entropy
    target = torch.randint(vocab, (tokens,))
    h, w = torch.randn(tokens, features), torch.randn(vocab, features) / features**0.5

    leaves = {of: [x.to(of, copy=True).requires_grad_() for x in (h, w)] for of in {dtype, torch.float32}}

    def run(loss: Loss, of: torch.dtype) -> Callable[[], None]:
        return step(loss, *leaves[of], target)

    candidates: Candidates = {"shoestring": run(ours, dtype)}
    if tokens * vocab < 6e7:
        mixed = {"target2": target.flip(0), "mix": 0.7}
        candidates["shoestring, two targets"] = run(lambda h, w, t: ours(h, w, t, **mixed), dtype)
        candidates["shoestring, two calls"] = run(
            lambda h, w, t: 0.7 * ours(h, w, t) + 0.3 * ours(h, w, t.flip(0)), dtype
        )
    if dtype != torch.float32:
        candidates["shoestring, float32"] = run(ours, torch.float32)
    if not report.options.ours:
        candidates["PyTorch, whole logits"] = run(lambda h, w, t: F.cross_entropy(F.linear(h, w), t), dtype)
        if dtype != torch.float32:
            candidates["PyTorch, loss in fp32"] = run(
                lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t), dtype
            )
        candidates |= {name: run(loss, dtype) for name, loss in others.items()}
    if dtype == torch.float32:
        chunk = max(16, min(tokens, 1024, (64 << 20) // (4 * vocab) // 16 * 16))
        candidates["limit: the three products"] = lambda: limit(h, w, chunk, torch_product)
        candidates["the same, of 1024 tokens at a time"] = lambda: limit(
            h, w, min(tokens, 1024), torch_product
        )
        candidates["the same, through shoestring's own"] = lambda: limit(h, w, chunk, own_product)
    title = f"{tokens} tokens x {features} features x {vocab} classes, {str(dtype)[6:]}, forward + backward"
    report.table(title, interleave(candidates, repeats), 6 * tokens * features * vocab / 1e9, "GFLOP/s")


def peaky(report: Report, tokens: int, features: int, vocab: int) -> None:
    """Time the loss of a confident model, with filter_eps and without.

    For each token, a few classes have nearly all the probability. All targets are among the first 5 % of the
    classes.
    """
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
