"""Count the instructions of a call of operators on tiny tensors: with and without autograd, and optimizer steps.

The tensors are so small that the fixed cost of a call dominates: the Python function, PyTorch's dispatcher,
the checks, and what autograd saves. Valgrind's tool callgrind counts the instructions, on one thread. The
counts repeat to a fraction of a percent and do not depend on the load of the machine. ``--before FILE``
compares with the figures that an earlier run wrote with ``--json FILE``.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shoestring
from benchmarks.common import Report, arguments

CALLS = 20  # calls per count, after as many calls for warm-up


def make_operators() -> dict[str, tuple[Callable[[], Any], list[Tensor]]]:
    """Return, by name, a call of each operator and its differentiable inputs."""

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, requires_grad=True)

    x, weight, bias, logits = leaf(4, 16), leaf(16), leaf(16), leaf(4, 16)
    gate, head, target = leaf(4, 16), leaf(16, 16), torch.tensor([1, 2, 3, 4])
    q, k, v = leaf(1, 1, 4, 16), leaf(1, 1, 4, 16), leaf(1, 1, 4, 16)
    cos, sin, frozen = torch.randn(4, 8), torch.randn(4, 8), torch.randn(16, 16)
    lora_A, lora_B = leaf(2, 16), leaf(16, 2)
    return {
        "linear_cross_entropy": (lambda: shoestring.linear_cross_entropy(x, head, target), [x, head]),
        "cross_entropy": (lambda: shoestring.cross_entropy(logits, target), [logits]),
        "attention": (lambda: shoestring.attention(q, k, v, causal=True), [q, k, v]),
        "rms_norm": (lambda: shoestring.rms_norm(x, weight, eps=1e-6), [x, weight]),
        "layer_norm": (lambda: shoestring.layer_norm(x, weight, bias, eps=1e-5), [x, weight, bias]),
        "swiglu": (lambda: shoestring.swiglu(gate, x), [gate, x]),
        "rope": (lambda: shoestring.rope(q, k, cos, sin), [q, k]),
        "lora_linear": (lambda: shoestring.lora_linear(x, frozen, lora_A, lora_B, bias), [x, lora_A, lora_B, bias]),
    }  # fmt: skip


def make_steps() -> dict[str, Callable[[], object]]:
    """Return optimizer steps: elementwise and composite operators, and the step of a class."""

    def state(*names: str) -> dict[str, Any]:
        tensors: dict[str, Any] = {
            "params": [torch.ones(4, 4)],
            "grads": [torch.ones(4, 4)],
            "step": torch.zeros(1),
        }
        for name in names:
            tensors |= {name: torch.zeros(256), f"{name}_scale": None}
        return tensors

    ops = torch.ops.shoestring
    sgd, muon = state("momentum_buffer"), state("momentum_buffer")
    adamw, lamb = state("exp_avg", "exp_avg_sq"), state("exp_avg", "exp_avg_sq")
    adamw_options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    sgd_options = {"lr": 1e-3, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "nesterov": True}
    param = torch.ones(4, 4, requires_grad=True)
    param.grad = torch.ones(4, 4)
    optimizer = shoestring.optim.AdamW([param], state_format="fp32")
    return {
        "sgd_": lambda: ops.sgd_(**sgd, **sgd_options),
        "adamw_": lambda: ops.adamw_(**adamw, **adamw_options),
        "lamb_": lambda: ops.lamb_(**lamb, **adamw_options),
        "muon_": lambda: ops.muon_(**muon, lr=1e-3, momentum=0.9, weight_decay=0.1),
        "step of AdamW": optimizer.step,
    }


def make_calls() -> dict[str, tuple[Callable[[], object], bool]]:
    """Return the calls to count, and whether autograd records.

    Each differentiable operator is called without autograd, then with its backward. Optimizer steps follow.
    """
    calls: dict[str, tuple[Callable[[], object], bool]] = {}

    def with_backward(run: Callable[[], Any], inputs: list[Tensor]) -> Callable[[], object]:
        def outputs() -> tuple[Tensor, ...]:
            made = run()
            return made if isinstance(made, tuple) else (made,)

        upstream = tuple(torch.ones_like(out) for out in outputs())
        # The engine itself: torch.autograd.grad checks its arguments in Python first, which takes longer.
        backward = torch.autograd.Variable._execution_engine.run_backward
        wanted = tuple(inputs)
        return lambda: backward(outputs(), upstream, False, False, wanted, True, False)

    for name, (run, inputs) in make_operators().items():
        calls[f"{name}, without autograd"] = (run, False)
        calls[f"{name}, forward + backward"] = (with_backward(run, inputs), True)
    calls |= {name: (step, False) for name, step in make_steps().items()}
    return calls


def run_counted() -> None:
    """Run each call under callgrind, which writes one file of counts per call."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for call, recorded in make_calls().values():
        torch.set_grad_enabled(recorded)
        for _ in range(CALLS):
            call()
        torch._C._valgrind_toggle()
        for _ in range(CALLS):
            call()
        torch._C._valgrind_toggle_and_dump_stats()


def count_instructions(keep: Path | None) -> dict[str, int]:
    """Return the instructions of each call. callgrind's files stay in the folder `keep`, if it is given."""
    with tempfile.TemporaryDirectory() as folder:
        out = keep or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        command = ["valgrind", "--tool=callgrind", "--collect-atstart=no", "--quiet",
                   f"--callgrind-out-file={out / 'counts'}", sys.executable, "-m", "benchmarks.bench_call_cost",
                   "--child"]  # fmt: skip
        subprocess.run(command, check=True)
        counts = {}
        for number, name in enumerate(make_calls(), 1):
            total = re.search(r"^(?:totals|summary): (\d+)", (out / f"counts.{number}").read_text(), re.M)
            assert total is not None
            counts[name] = int(total[1]) // CALLS
    return counts


def compare(counts: dict[str, int], before: dict[str, int]) -> None:
    """Print the counts, and how they have changed."""
    print(f"{'instructions per call':38}" + (f"{'before':>10}" if before else "") + f"{'now':>10}")
    changes = []
    for name, count in counts.items():
        line = f"{name:38}"
        if name in before:
            changes.append(count / before[name] - 1)
            line += f"{before[name]:10}{count:10}{100 * changes[-1]:+8.1f} %"
        else:
            line += f"{count:10}"
        print(line)
    if changes:
        print(f"median {100 * statistics.median(changes):+.1f} %, largest {100 * max(changes):+.1f} %")


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--before", type=Path, help="JSON file of an earlier run to compare with")
        parser.add_argument("--keep", type=Path, help="folder in which the files of callgrind are kept")
        parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)

    options = arguments(__doc__ or "", more=more)
    if options.child:
        run_counted()
        return
    options.threads = 1
    report = Report("call_cost", options)
    if options.quick or shutil.which("valgrind") is None:
        for call, recorded in make_calls().values():
            with torch.set_grad_enabled(recorded):
                call()
        print("every call runs; valgrind, without --quick, counts the instructions")
        return
    counts = count_instructions(options.keep)
    before: dict[str, int] = {}
    if options.before:
        earlier = json.loads(options.before.read_text())["tables"][0]["rows"]
        before = {row["name"]: row["instructions"] for row in earlier}
    compare(counts, before)
    rows = [{"name": name, "instructions": count} for name, count in counts.items()]
    report.data["tables"].append({"title": "instructions per call", "rows": rows})
    report.finish()


if __name__ == "__main__":
    main()
