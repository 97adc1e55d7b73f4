"""Sum up where the time of a step goes, by groups of operators."""

from __future__ import annotations

import re
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

# A group takes the operators whose names match, unless an earlier group has taken them.
GROUPS = {
    "compiled kernels": r"^graph_|cpp_fused|CompiledFunction|Torch-Compiled|Inductor|^call$|## Call",
    "loss": r"cross_entropy|nll_loss|log_softmax|logsumexp",
    "attention": r"attention|rope|^aten::(bmm|baddbmm|_?softmax|_softmax_backward_data)$",
    "products": r"^aten::(mm|addmm|_?convolution|.*mkldnn_convolution.*|convolution_backward|.*onednn.*|linear)$"
    r"|addmm|linear|lora|mkl|gemm|matmul|packed|swiglu_mlp|4bit",
    "optimizer": r"adamw|adam|optimizer|foreach|step_",
    "norms, activations": r"norm|silu|gelu|glu|relu|tanh|rsqrt|pow|mean|sigmoid|pool|embedding|dropout",
    "copies, casts": r"copy|clone|_to_copy|^aten::(to|cat|contiguous|zero_|zeros|fill_|stack)$",
    "element by element": r"^aten::(add_?|sub_?|mul_?|div_?|neg|sum|exp|where|cos|sin|le|eq)$",
}


def group(name: str) -> str:
    return next((key for key, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE)), "rest")


def profile(step: Callable[[], object], steps: int) -> dict[str, Any]:
    """Run ``steps`` steps under the profiler and as many without it.

    Returns:
        Seconds per step of each group, the operators that take longest, and page faults with the system's
        time per step. The profiler sees the thread that calls an operator, so time in which PyTorch waits for
        its other threads belongs to the operator. "rest" is the wall time that no operator accounts for.
    """
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(steps):
        step()
    plain = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step()
        profiled = time.perf_counter() - start
    seconds: dict[str, float] = dict.fromkeys([*GROUPS, "rest"], 0.0)
    operators: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        spent = event.self_cpu_time_total * 1e-6 / steps
        if event.key.startswith("ProfilerStep"):
            continue
        seconds[group(event.key)] += spent
        operators[event.key] += spent
    seconds["rest"] += max(0.0, profiled / steps - sum(seconds.values()))
    top = sorted(operators.items(), key=lambda item: -item[1])[:12]
    return {
        "seconds": seconds,
        "operators": dict(top),
        "step": plain / steps,
        "profiled step": profiled / steps,
        "page faults": (after.ru_minflt - before.ru_minflt) / steps,
        "system seconds": (after.ru_stime - before.ru_stime) / steps,
    }
