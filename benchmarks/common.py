"""Time implementations of an operation ("candidates") alternately; compare them by medians of time ratios.

Alternating makes the ratios robust against a machine whose speed drifts. On a GPU the times come from CUDA
events. ``rotate`` changes the buffers between calls, so that no candidate finds its inputs in the L2 cache.
The limits are measured with random data (``copy_probe``, ``gemm_probe``), because a GPU computes faster with
zeros than with the values of a network.
"""

import argparse
import itertools
import json
import math
import platform
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

Candidates = dict[str, Callable[[], object]]
# Seconds that each timed implementation runs per round on a GPU. Gaps between launches and the resolution of
# CUDA events are negligible compared to this time.
ROUND = 5e-3


def arguments(
    description: str,
    devices: tuple[str, ...] = ("cpu",),
    more: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> argparse.Namespace:
    """Parse the options that every benchmark has, and set the number of threads.

    Exits with status 2 if the requested device is missing.

    Args:
        description: text of --help.
        devices: devices that the benchmark supports; it creates its tensors on ``options.device``.
        more: adds the benchmark's own options to the parser.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=devices, default="cpu")
    parser.add_argument(
        "--repeats", type=int, help="rounds in which each candidate is timed once; 5, and 20 on a GPU"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs")
    more(parser)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, f"{parser.prog}: --device cuda: PyTorch {torch.__version__} sees no GPU here\n")
    if options.repeats is None:
        options.repeats = 20 if options.device == "cuda" else 5
    torch.set_num_threads(options.threads)
    return options


def interleave(candidates: Candidates, repeats: int, device: str = "cpu") -> dict[str, list[float]]:
    """Return the seconds of each candidate (implementation to time) in each round, after a warm-up round.

    On the CPU, each round runs the candidates in another random order. So the data that a candidate leaves in
    the caches does not always help, or hurt, the same other candidate.

    On "cuda", a round measures seconds per call, averaged over consecutive calls that together take ROUND
    seconds. The host queues calls without waiting, so a call costs its launch time or its device time,
    whichever is longer. With ``graphed`` it costs the device time only.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    if device == "cuda":
        calls = {name: _calls(run) for name, run in candidates.items()}
        for _ in range(repeats):
            for name, run in candidates.items():
                times[name].append(_event_seconds(run, calls[name]))
        return times
    order = random.Random(0)
    for round_ in range(repeats + 1):
        for name in order.sample(list(candidates), len(candidates)):
            start = time.perf_counter()
            candidates[name]()
            if round_:
                times[name].append(time.perf_counter() - start)
    return times


def _event_seconds(run: Callable[[], object], calls: int) -> float:
    """Return the seconds per call of `run` on the current stream, measured between two CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / calls


def _calls(run: Callable[[], object]) -> int:
    """Warm up lazy loading, the allocator and clocks; return how many calls of `run` take ROUND seconds."""
    for _ in range(3):
        run()
    return max(1, min(1000, math.ceil(ROUND / max(_event_seconds(run, 3), 1e-9))))


def graphed(run: Callable[[], object]) -> Callable[[], object]:
    """Capture `run` in a CUDA graph, so that a call costs its device time without the launch time.

    The result keeps `run` alive, since the graph reads and writes the tensors that `run` refers to.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # graph capture requires a warm-up on a side stream
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(captured: Callable[[], object] = run) -> None:
        graph.replay()

    return replay


def rotate(make: Callable[[], Callable[[], object]], size: int, device: str) -> Callable[[], object]:
    """Return a call to time that uses several sets of buffers in turn.

    `make` builds such a call with its own inputs of `size` bytes. On a GPU, the inputs of all sets together
    fill four times the L2 cache. The results of the last calls, one for each set, are kept, so that results
    use different memory, too. On a CPU there is one set; CPU benchmarks choose their sizes with the caches in
    mind.
    """
    sets = math.ceil(4 * l2_bytes() / size) if device == "cuda" else 1
    if sets == 1:
        return make()
    turns = itertools.cycle([make() for _ in range(sets)])
    kept: deque[object] = deque(maxlen=sets)
    # After this warm-up, the caching allocator holds enough memory for the results of all sets of inputs.
    for _ in range(2 * sets):
        kept.append(next(turns)())
    return lambda: kept.append(next(turns)())


def l2_bytes() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


def copy_probe(size: int, device: str) -> Callable[[], object]:
    """Return a call to time that copies a buffer; `size` is the number of bytes read plus the bytes written.

    The rate of this call is the copy bandwidth.
    """

    def make() -> Callable[[], object]:
        source = torch.randint(256, (size // 2,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return rotate(make, size, device)


def gemm_probe(m: int, n: int, k: int, dtype: torch.dtype, device: str) -> Callable[[], object]:
    """Return a call to time that does one matrix product of 2 * m * n * k floating-point operations.

    The product multiplies (m, k) by the transpose of (n, k), as a linear layer does.
    """
    a, b = (torch.randn(rows, k, device=device).to(dtype) for rows in (m, n))
    out = torch.empty(m, n, dtype=dtype, device=device)
    return lambda: torch.mm(a, b.t(), out=out)


def copy_bandwidth(device: str) -> float:
    """Return the bandwidth in bytes/s (read plus written) of a copy between buffers larger than any cache."""
    size = min(4 << 30, torch.cuda.mem_get_info()[0] // 4) if device == "cuda" else 256 << 20
    return size / statistics.median(interleave({"copy": copy_probe(size, device)}, 10, device)["copy"])


def gemm_rate(dtype: torch.dtype, device: str) -> float:
    """Return the floating-point operations per second of a large square matrix product."""
    n = 8192 if device == "cuda" else 1024
    return (
        2 * n**3 / statistics.median(interleave({"mm": gemm_probe(n, n, n, dtype, device)}, 10, device)["mm"])
    )


def file_name(device: str) -> str:
    """Return the name of the device in a form for file names, such as "nvidia-h200"."""
    name = torch.cuda.get_device_name() if device == "cuda" else cpu_model()
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


class Report:
    """Prints the tables of a benchmark, and keeps their figures for the JSON file."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.options = options
        if options.device == "cuda":
            machine = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
        else:
            capability = torch.ops.shoestring._cpu_capability()
            machine = f"{cpu_model()}, {options.threads} threads, {capability} kernels"
        self.data = {
            "benchmark": name,
            "machine": machine,
            "torch": torch.__version__,
            "tables": [],
        }
        print(f"{name}: {self.data['machine']}, PyTorch {torch.__version__}")

    def table(
        self,
        title: str,
        times: dict[str, list[float]],
        work: float,
        unit: str,
        columns: dict[str, dict[str, float | None]] | None = None,
    ) -> None:
        """Print one table, and keep its figures for the JSON file.

        Args:
            title: heading of the table.
            times: seconds of each candidate in each round; the first candidate is shoestring.
            work: amount of work per call; work / seconds is the rate in `unit`.
            unit: unit of the rate.
            columns: further figures of each candidate, by their headings.

        The printed ratio of a candidate is the median over all rounds of its time divided by the first
        candidate's time.
        """
        ours = next(iter(times.values()))
        columns = columns or {}
        headings = "".join(f" {name:>14}" for name in next(iter(columns.values()), {}))
        print(f"\n{title}\n  {'':36} {'ms':>9} {unit:>12} {'times ours':>11}{headings}")
        rows = []
        for name, seconds in times.items():
            ratio = statistics.median(t / o for t, o in zip(seconds, ours))
            median = statistics.median(seconds)
            others = columns.get(name, {})
            rows.append({"name": name, "seconds": median, "rate": work / median, "ratio": ratio, **others})
            more = "".join(" " * 15 if x is None else f" {x:14.2f}" for x in others.values())
            print(f"  {name:36} {median * 1e3:9.2f} {work / median:12.2f} {ratio:11.2f}{more}")
        self.data["tables"].append({"title": title, "unit": unit, "rows": rows})
        # write the JSON file after every table, so that a later failure does not lose the figures
        self.finish()

    def finish(self) -> None:
        if self.options.json:
            self.options.json.parent.mkdir(parents=True, exist_ok=True)
            self.options.json.write_text(json.dumps(self.data, indent=1) + "\n")
