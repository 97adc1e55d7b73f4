"""Check and time swiglu_classic.so and swiglu_stable.so, which run.sh compiles; argument: their folder.

Prints the time of a call with 64 elements, where overhead is all there is: with tensors of the inference mode,
without a gradient, and with forward and backward. The order of the variants is random in each of the rounds,
and the result is the median of the rounds.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

ROUNDS, CALLS = 41, 500


def add_gradient() -> None:
    """Register a gradient in Python: the stable ABI has no autograd functions."""

    def setup(
        ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor
    ) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        s = torch.sigmoid(gate)
        silu = gate * s
        return grad * up * (s + silu * (1 - s)), grad * silu

    torch.library.register_autograd("trial_stable::swiglu", backward, setup_context=setup)


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def check(op: Callable[[Tensor, Tensor], Tensor]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        gate, up = torch.randn(3, 1000, dtype=dtype), torch.randn(3, 1000, dtype=dtype)
        expected = torch.nn.functional.silu(gate.float()) * up.float()
        torch.testing.assert_close(op(gate, up).float(), expected, rtol=0.01, atol=1e-3)
    gate, up = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    ours = torch.autograd.grad(op(gate, up).sum(), (gate, up))
    theirs = torch.autograd.grad((torch.nn.functional.silu(gate) * up).sum(), (gate, up))
    torch.testing.assert_close(ours, theirs)
    compiled = torch.compile(op, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(gate, up), op(gate, up))


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ops: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    for name in ("classic", "stable"):
        try:
            torch.ops.load_library(folder / f"swiglu_{name}.so")
        except OSError as error:
            print(f"{name}: does not load in PyTorch {torch.__version__}: {error.__cause__ or error}")
            continue
        ops[name] = getattr(torch.ops, f"trial_{name}").swiglu
        if name == "stable":
            add_gradient()
        check(ops[name])
        print(f"{name}: loads in PyTorch {torch.__version__}, and its results and gradients are right")
    gate, up = torch.randn(64), torch.randn(64)
    trained = [tensor.clone().requires_grad_() for tensor in (gate, up)]
    with torch.inference_mode():
        inferred = [tensor.clone() for tensor in (gate, up)]  # a call with these runs no code of autograd
    grad = torch.ones(64)
    calls: dict[str, Callable[[], object]] = {}
    for name, op in ops.items():
        calls[f"{name}, inference mode"] = lambda op=op: op(*inferred)
        calls[f"{name}, no gradient"] = lambda op=op: op(gate, up)
        calls[f"{name}, forward and backward"] = lambda op=op: torch.autograd.grad(
            op(*trained), trained, grad
        )
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name in random.sample(sorted(calls), len(calls)):
            times[name].append(timed(calls[name]))
    for name, values in times.items():
        print(f"{name}: {statistics.median(values):.1f} us a call")


if __name__ == "__main__":
    main()
