"""Time loops over prefetched batches; the limit is a loop that reads each batch when the step needs it.

The first tables count what a batch costs beside the work of its source: the source returns views of tensors in
memory, and there are no steps. A row in microseconds per batch is the overhead, at most, since a step hides it.

The last table has steps that take as long as reading a batch. A loop without a reader ahead takes the sum of
both, and a perfect one takes half of that.

On a GPU, batches end there: through Prefetcher, and through a DataLoader with pin_memory=True and
to(non_blocking=True), in the stream of the steps.
"""

import itertools
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import Candidates, Report, arguments, interleave
from shoestring.data import Prefetcher

Batch = tuple[Tensor, Tensor]


class Batches(Dataset[Batch]):
    """Batches of token ids and labels (rows, length), int64, that lie in memory. Reading takes ``seconds``."""

    def __init__(self, count: int, rows: int, length: int, seconds: float = 0) -> None:
        self.tokens = torch.randint(50_000, (count + 1, rows, length))
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.tokens) - 1

    def __getitem__(self, number: int) -> Batch:
        if self.seconds > 0:  # a sleep of 0 s takes 60 microseconds
            time.sleep(self.seconds)
        return self.tokens[number], self.tokens[number + 1]


def run(batches: Iterable[Batch], device: str, step: float = 0) -> None:
    for x, y in batches:
        x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        if step > 0:
            time.sleep(step)
    if device == "cuda":
        torch.cuda.synchronize()


def loader(data: Batches, workers: int, device: str) -> Iterable[Batch]:
    """Return a loader that reads whole batches, so that it does not collate."""
    return DataLoader(data, batch_size=None, num_workers=workers, pin_memory=device == "cuda",
                      persistent_workers=workers > 0)  # fmt: skip


def candidates(data: Batches, device: str, step: float) -> Candidates:
    def prefetched() -> None:
        with Prefetcher(data.__getitem__, device, stop=len(data)) as batches:
            run(batches, device, step)

    def loop(make: Callable[[], Iterable[Batch]]) -> Callable[[], None]:
        return lambda: run(make(), device, step)

    loaders = {workers: loader(data, workers, device) for workers in (0, 1)}
    return {
        "shoestring Prefetcher": prefetched,
        "DataLoader": loop(lambda: loaders[0]),
        "DataLoader, 1 worker": loop(lambda: loaders[1]),
        "limit: no reading ahead" if step == 0 else "no reading ahead": loop(
            lambda: map(data.__getitem__, itertools.islice(itertools.count(), len(data)))
        ),
    }


def main() -> None:
    options = arguments(str(__doc__), ("cpu", "cuda"))
    report = Report("prefetcher", options)
    count = 50 if options.quick else 1000
    for rows, length in ((4, 64), (8, 1024)):
        times = interleave(candidates(Batches(count, rows, length), options.device, 0), options.repeats)
        for name, seconds in times.items():
            per_batch = sorted(seconds)[len(seconds) // 2] / count
            print(f"  {name:36} {per_batch * 1e6:9.1f} microseconds per batch")
        title = f"{count} batches of 2 x {rows} x {length} int64, no steps"
        report.table(title, times, count, "batches/s")
    seconds = 2e-3
    data = Batches(count // 5, 4, 64, seconds)
    times = interleave(candidates(data, options.device, seconds), options.repeats)
    report.table(f"Reading and steps of {seconds * 1e3:.0f} ms each", times, len(data), "batches/s")


if __name__ == "__main__":
    main()
