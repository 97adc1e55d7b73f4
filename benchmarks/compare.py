"""Compare the speed of two builds of shoestring on the CPU, operator by operator.

Each build runs in a process of its own. The processes take turns, so that both meet the same state of the
machine. The table gives the median time of each build in milliseconds, and the median of the ratios of
neighbouring times (before / after; above 1 means that the second build is faster).

    python -m benchmarks.compare BEFORE AFTER [--rounds 15] [--only NAME ...]

BEFORE and AFTER are folders that contain the package ``shoestring``, such as ``python`` in two checkouts.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

Step = Callable[[], object]


def cases() -> dict[str, Callable[[], Step]]:
    """Return the cases by name. Each makes its tensors and returns a function that runs the operator once."""
    import torch

    import shoestring as s

    def learn(f: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Step:
        """Return a function that runs ``f`` and its backward."""
        leaves = [x.requires_grad_() for x in inputs]
        grad = torch.ones_like(f(*leaves))
        return lambda: torch.autograd.grad(f(*leaves), leaves, grad)

    def optimizer(kind: str, **options: Any) -> Step:
        params = [torch.nn.Parameter(torch.randn(1003, 1001)), torch.nn.Parameter(torch.randn(7, 333))]
        for p in params:
            p.grad = torch.randn_like(p)
        return getattr(s.optim, kind)(params, lr=1e-3, **options).step

    def rows(dtype: torch.dtype, features: int) -> torch.Tensor:
        return torch.randn(2048, features).to(dtype)

    def of_rows(f: Callable[[torch.Tensor], object], dtype: torch.dtype) -> Step:
        x = rows(dtype, 1003)
        return lambda: f(x)

    def rope(dtype: torch.dtype, dim: int) -> Step:
        angles = torch.rand(1, 512, dim)
        q, k = torch.randn(1, 16, 512, dim).to(dtype), torch.randn(1, 4, 512, dim).to(dtype)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return lambda: s.rope(q, k, cos, sin)

    def attention(dtype: torch.dtype, dim: int) -> Step:
        q, k, v = (torch.randn(1, 8, 500, dim).to(dtype) for _ in range(3))
        return learn(lambda *x: s.attention(*x, causal=True), q, k, v)

    def loss(dtype: torch.dtype, vocab: int) -> Step:
        target = torch.randint(vocab, (256,))
        return learn(lambda x: s.cross_entropy(x, target), torch.randn(256, vocab).to(dtype))

    def linear_loss(dtype: torch.dtype) -> Step:
        target = torch.randint(8003, (512,))
        hidden, weight = torch.randn(512, 256).to(dtype), torch.randn(8003, 256).to(dtype)
        return learn(lambda h, w: s.linear_cross_entropy(h, w, target), hidden, weight)

    def distillation(dtype: torch.dtype) -> Step:
        h, w, th, tw = (torch.randn(n, 128).to(dtype) for n in (256, 8003, 256, 8003))
        return learn(lambda h, w: s.linear_distillation(h, w, th, tw), h, w)

    def quantized(dtype: torch.dtype, quant_type: str) -> Step:
        weight = s.quantize_4bit(torch.randn(1024, 1024).to(dtype), quant_type)
        return learn(lambda x: s.quantized_linear(x, weight), torch.randn(300, 1024).to(dtype))

    def lora(dtype: torch.dtype) -> Step:
        x, w, a, b = (
            torch.randn(*shape).to(dtype) for shape in ((300, 1024), (1024, 1024), (13, 1024), (1024, 13))
        )
        return learn(lambda x, a, b: s.lora_linear(x, w, a, b), x, a, b)

    made: dict[str, Callable[[], Step]] = {}
    for state in ("fp32", "8bit", "4bit"):
        made[f"AdamW {state}"] = lambda state=state: optimizer("AdamW", state_format=state)
    for kind in ("Lion", "SGD", "LAMB", "AdEMAMix", "Adafactor", "CAME", "Muon", "ScheduleFreeAdamW"):
        made[kind] = lambda kind=kind: optimizer(kind)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for n in (1024, 1003):
            ones = torch.ones(n, dtype=dtype)
            made[f"rms_norm {name} {n}"] = lambda d=dtype, n=n, w=ones: learn(
                lambda x, w: s.rms_norm(x, w, eps=1e-6), rows(d, n), w.clone()
            )
            made[f"layer_norm {name} {n}"] = lambda d=dtype, n=n, w=ones: learn(
                lambda x, w: s.layer_norm(x, w, eps=1e-6), rows(d, n), w.clone()
            )
            made[f"swiglu {name} {n}"] = lambda d=dtype, n=n: learn(s.swiglu, rows(d, n), rows(d, n))
            made[f"geglu {name} {n}"] = lambda d=dtype, n=n: learn(s.geglu, rows(d, n), rows(d, n))
            made[f"cross_entropy {name} {8 * n}"] = lambda d=dtype, n=n: loss(d, 8 * n + n % 2)
        for n in (64, 52):
            made[f"rope {name} {n}"] = lambda d=dtype, n=n: rope(d, n)
            made[f"attention {name} {n}"] = lambda d=dtype, n=n: attention(d, n)
        made[f"linear_cross_entropy {name}"] = lambda d=dtype: linear_loss(d)
        made[f"linear_distillation {name}"] = lambda d=dtype: distillation(d)
        for kind in ("nf4", "int4"):
            made[f"quantized_linear {name} {kind}"] = lambda d=dtype, k=kind: quantized(d, k)
        made[f"quantize_4bit {name}"] = lambda d=dtype: of_rows(s.quantize_4bit, d)
        made[f"lora_linear {name}"] = lambda d=dtype: lora(d)
        made[f"seeded_dropout {name}"] = lambda d=dtype: of_rows(s.seeded_dropout, d)
    return made


def serve() -> None:
    """Read names of cases from stdin, and print the time of a run of each in milliseconds."""
    import torch

    torch.manual_seed(0)
    made, ready = cases(), {}
    print(*made, sep="\t", flush=True)
    for line in sys.stdin:
        name = line.rstrip("\n")
        if name not in ready:
            ready.clear()  # keeps the tensors of one case only
            step = made[name]()
            step()
            start = time.perf_counter()
            step()
            once = time.perf_counter() - start
            ready[name] = step, max(1, int(0.03 / once))
        step, repeats = ready[name]
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        print((time.perf_counter() - start) / repeats * 1e3, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the speed of two builds of shoestring on the CPU.")
    parser.add_argument("before", help="folder that contains the first package")
    parser.add_argument("after", help="folder that contains the second package")
    parser.add_argument("--rounds", type=int, default=15, help="times that each build runs each case")
    parser.add_argument("--only", nargs="+", default=[""], help="run cases whose names contain one of these")
    arguments = parser.parse_args()
    builds = []
    for package in (arguments.before, arguments.after):
        if not os.path.exists(os.path.join(package, "shoestring", "__init__.py")):
            parser.error(f"expected a folder that contains the package shoestring, got {package}")
    for package in (arguments.before, arguments.after):
        command = [sys.executable, "-c", "import sys; sys.path.pop(0); from compare import serve; serve()"]
        path = os.pathsep.join([os.path.abspath(package), os.path.dirname(os.path.abspath(__file__))])
        environment = os.environ | {"PYTHONPATH": path, "OMP_WAIT_POLICY": "passive"}
        builds.append(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
        )

    def answer(build: "subprocess.Popen[str]") -> str:
        assert build.stdout is not None
        line = build.stdout.readline()
        if not line:
            raise SystemExit("benchmarks.compare: a build ended early; it has printed why")
        return line

    def timed(build: "subprocess.Popen[str]", name: str) -> float:
        assert build.stdin is not None
        build.stdin.write(name + "\n")
        build.stdin.flush()
        return float(answer(build))

    names = [answer(build).rstrip("\n").split("\t") for build in builds][1]
    names = [name for name in names if any(part in name for part in arguments.only)]
    if not names:
        parser.error(f"--only: expected a part of a case's name, got {' '.join(arguments.only)}")
    print(f"{'case':36} {'before ms':>10} {'after ms':>10} {'ratio':>7}")
    ratios = []
    for name in names:
        times: list[list[float]] = [[], []]
        for i in range(arguments.rounds):
            # The build that runs first changes from round to round.
            for which in (0, 1) if i % 2 else (1, 0):
                times[which].append(timed(builds[which], name))
        ratio = statistics.median(a / b for a, b in zip(*times))
        ratios.append(ratio)
        before, after = (statistics.median(each) for each in times)
        print(f"{name:36} {before:10.3f} {after:10.3f} {ratio:7.3f}", flush=True)
    print(f"{'geometric mean':36} {'':10} {'':10} {statistics.geometric_mean(ratios):7.3f}")
    for build in builds:
        build.terminate()


if __name__ == "__main__":
    main()
