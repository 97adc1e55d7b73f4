"""Time a training loop with and without a Monitor, and the parts of a Monitor.

A step is forward, backward and optimizer of a small network on the CPU, about 2 ms on one core. A Monitor costs the
calls of its loop in each step, and the samples of its thread, which do not depend on the step. Both are measured
alone as well, in processor time: the difference between two loops is smaller than their noise on a busy machine.
"""

import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

import shoestring
from benchmarks.common import Report, arguments, interleave


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[torch.Tensor]) -> None:
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def thread_seconds(thread: int) -> float:
    """Return the processor time of a thread of this process."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def threads() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def main() -> None:
    options = arguments(str(__doc__))
    report = Report("monitor", options)
    count = 50 if options.quick else 500
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [torch.randn(64, 256)] * count

    def monitored(interval: float) -> None:
        with shoestring.Monitor(interval) as monitor:
            train(model, optimizer, monitor.watch(batches))

    times = interleave(
        {
            "shoestring Monitor, every 0.5 s": lambda: monitored(0.5),
            "shoestring Monitor, every 0.1 s": lambda: monitored(0.1),
            "limit: no monitor": lambda: train(model, optimizer, batches),
        },
        options.repeats,
    )
    report.table(f"{count} training steps", times, count, "steps/s")

    calls = 100 if options.quick else 100_000
    monitor = shoestring.Monitor(10)
    before = time.thread_time()
    for _ in monitor.watch(range(calls)):
        pass
    each = (time.thread_time() - before) / calls
    monitor.stop()
    print(f"  the loop's calls take {each * 1e6:.2f} microseconds of processor time per step")
    for interval in (0.1, 0.5, 1.0):
        known = threads()
        monitor = shoestring.Monitor(interval)
        (thread,) = threads() - known
        start, used = time.monotonic(), thread_seconds(thread)
        time.sleep(1 if options.quick else 10)
        share = (thread_seconds(thread) - used) / (time.monotonic() - start)
        monitor.stop()
        print(f"  the thread takes {share:.3%} of one core with a sample every {interval} s")


if __name__ == "__main__":
    main()
