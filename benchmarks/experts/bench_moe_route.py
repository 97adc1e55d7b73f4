"""Time the routing of mixtures of experts, and the order of tokens by expert.

The row "eager" of moe_route is the code of transformers: softmax, top-k, and its load-balancing loss. That of
moe_sort is a stable argsort with the counts. The row "limit" copies as many bytes as must be read and written.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import shoestring
from benchmarks.common import Candidates, Report, arguments, copy_probe, graphed, interleave


def eager_route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the weights and the load-balancing loss, as models of transformers compute them."""
    experts = logits.shape[-1]
    weight, index = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), top_k, dim=-1)
    weight = (weight / weight.sum(-1, keepdim=True)).to(logits.dtype)
    shares = torch.softmax(logits, -1)
    kind = torch.float32 if logits.device.type == "cpu" else torch.int32
    counts = torch.histc(index.reshape(-1).to(kind), bins=experts, min=0, max=experts)
    balance = (counts / len(logits) * shares.float().sum(0) / len(logits)).sum() * experts
    return weight, balance


def eager_sort(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    flat = index.flatten()
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return order, inverse, torch.bincount(flat, minlength=experts).cumsum(0)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], devices=("cpu", "cuda"))
    report = Report("experts", options)
    device = options.device
    shapes = [(64, 8, 2)] if options.quick else [(4096, 64, 8), (4096, 128, 8), (4096, 256, 8), (512, 8, 2)]

    def table(title: str, candidates: Candidates, size: int) -> None:
        candidates["limit: the same bytes"] = copy_probe(size, device)
        if device == "cuda":
            candidates = {name: graphed(run) for name, run in candidates.items()}
        report.table(title, interleave(candidates, options.repeats, device), size / 1e9, "GB/s")

    for tokens, experts, top_k in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            logits = torch.randn(tokens, experts, device=device).to(dtype).requires_grad_()
            grad = torch.randn(tokens, top_k, device=device).to(dtype)

            def ours(backward: bool, logits: Tensor = logits, k: int = top_k, grad: Tensor = grad) -> object:
                route = shoestring.moe_route(logits, k, renormalize=True)
                results = (route.weight, route.balance)
                ones = (grad, torch.ones_like(route.balance))
                return torch.autograd.grad(results, logits, ones) if backward else route

            def eager(backward: bool, logits: Tensor = logits, k: int = top_k, grad: Tensor = grad) -> object:
                results = eager_route(logits, k)
                ones = (grad, torch.ones_like(results[1]))
                return torch.autograd.grad(results, logits, ones) if backward else results

            for backward in (False, True):
                size = logits.numel() * dtype.itemsize * (3 if backward else 1) + grad.numel() * 8
                what = "forward + backward" if backward else "forward"
                runs: Candidates = {
                    "shoestring": lambda run=ours, backward=backward: run(backward),
                    "eager": lambda run=eager, backward=backward: run(backward),
                }
                table(f"moe_route, {tokens} x {experts}, top {top_k}, {str(dtype)[6:]}, {what}", runs, size)
        index = shoestring.moe_route(torch.randn(tokens, experts, device=device), top_k).index
        sorts: dict[str, Callable[[], object]] = {
            "shoestring": lambda index=index, experts=experts: shoestring.moe_sort(index, experts),
        }
        if device == "cpu":  # bincount waits for the GPU, which a graph does not allow
            sorts["eager"] = lambda index=index, experts=experts: eager_sort(index, experts)
        table(f"moe_sort, {tokens} x {top_k}, {experts} experts", sorts, index.numel() * 32)
    report.finish()


if __name__ == "__main__":
    main()
