"""Train a ResNet to read the glyphs of unseen fonts: plain PyTorch, and the same with parts of shoestring.

    python examples/python/glyphs/glyph_classifier.py

Each run has the same network, batches, steps and learning rates. A run is plain PyTorch, or uses one part of
shoestring, or all parts. The accuracy is measured on font families that no run has seen.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from glyph_data import CHARACTERS, Glyphs, Parser, add_to_json
from torch import Tensor, nn
from torch.nn import functional as F

import shoestring
from shoestring.data import Mixed, cutmix, mixup
from shoestring.optim import SAM, Averages, schedules, update_batch_norm


@dataclass(frozen=True)
class Run:
    """The parts of shoestring that a run uses, and its size."""

    optimizer: bool = (
        False  # shoestring.optim.AdamW with 8-bit state and its one_cycle, in place of PyTorch's
    )
    fast: bool = False  # fast_defaults: on a CPU, channels-last weights if they are faster
    mix: str = ""  # "mixup" or "cutmix"
    sam_interval: int = 0
    lawa: bool = False
    depth: float = 0.0  # stochastic depth: the probability that the last block is left out
    epochs: int = 4
    batch_size: int = 64
    lr: float = 4e-3


RUNS = {
    "plain": Run(),
    "optimizer": Run(optimizer=True),
    "fast_defaults": Run(fast=True),
    "mixup": Run(mix="mixup"),
    "cutmix": Run(mix="cutmix"),
    "sam": Run(sam_interval=10),
    "lawa": Run(lawa=True),
    "stochastic_depth": Run(depth=0.2),
    "all": Run(optimizer=True, fast=True, mix="mixup", sam_interval=10, lawa=True, depth=0.2),
}

QUICK_STEPS = 50


class Block(nn.Module):
    """The branch of a residual block: norm, activation and convolution, twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(2) for layer in _norm_relu_conv(width, width, 1)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the branch, in the shape of x."""
        y: Tensor = self.layers(x)
        return y


def _norm_relu_conv(width: int, out: int, stride: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, out, 3, stride, 1, bias=False)]


class ResNet(nn.Module):
    """A residual network of three stages with 16 x 16, 8 x 8 and 4 x 4 pixels.

    Args:
        width: number of channels of the first stage. Each further stage has twice as many.
        blocks: number of residual blocks per stage.
        depth: probability that training leaves out the last block. It grows linearly over the blocks.
    """

    def __init__(self, width: int = 16, blocks: int = 2, depth: float = 0.0) -> None:
        super().__init__()
        self.depth, self.step = depth, 0
        self.stem = nn.Conv2d(1, width, 5, 2, 2, bias=False)
        self.down, self.blocks = nn.ModuleList(), nn.ModuleList()
        for stage in range(3):
            channels = width * 2**stage
            self.down.append(nn.Sequential(*_norm_relu_conv(max(width, channels // 2), channels, 2)))
            self.blocks.extend(Block(channels) for _ in range(blocks))
        self.head = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classes = nn.Linear(channels, len(CHARACTERS))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images (rows, 1, 64, 64)."""
        x, per_stage = self.stem(images), len(self.blocks) // 3
        for i, block in enumerate(self.blocks):
            if i % per_stage == 0:
                x = self.down[i // per_stage](x)
            if self.depth == 0:
                x = x + block(x)
            else:
                p = shoestring.stochastic_depth_rate(i, len(self.blocks), self.depth)
                x = shoestring.stochastic_depth(
                    block, x, p, mode="batch", step=self.step, layer=i, training=self.training
                )
        logits: Tensor = self.classes(self.head(x))
        return logits


def scaled(images: Tensor) -> Tensor:
    """Convert uint8 images to fp32 between -1 and 1."""
    return images.float() / 127.5 - 1


@torch.no_grad()
def accuracy(model: nn.Module, glyphs: Glyphs) -> float:
    """Return the share of glyphs that the model reads correctly."""
    model.eval()
    found = torch.cat([model(scaled(images)).argmax(1) for images in glyphs.images.split(256)])
    model.train()
    return (found == glyphs.labels).double().mean().item()


def _optimizer(model: nn.Module, run: Run, steps: int) -> tuple[Any, Any]:
    """Return the optimizer and the one-cycle schedule of its learning rate."""
    base: Any = shoestring.optim.AdamW if run.optimizer else torch.optim.AdamW
    options: dict[str, Any] = {"lr": run.lr, "weight_decay": 0.05}
    if run.sam_interval:
        optimizer: Any = SAM(model.parameters(), base, rho=0.05, interval=run.sam_interval, **options)
    else:
        optimizer = base(model.parameters(), **options)
    if run.optimizer:
        return optimizer, schedules.Scheduler(optimizer, lr=schedules.one_cycle(steps))
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, run.lr, steps, cycle_momentum=False)


def _batch(glyphs: Glyphs, rows: Tensor, run: Run, seed: int, step: int) -> Mixed:
    """Return a batch, moved by up to two pixels and mixed as the run asks."""
    moves = torch.randint(-2, 3, (2,), generator=torch.Generator().manual_seed(step)).tolist()
    images, labels = scaled(glyphs.images[rows]).roll(moves, (2, 3)), glyphs.labels[rows]
    if run.mix == "mixup":
        return mixup(images, labels, alpha=0.2, seed=seed, step=step)
    if run.mix == "cutmix" and step % 2:  # every other batch stays whole
        return cutmix(images, labels, alpha=1.0, seed=seed, step=step)
    return Mixed(images, labels, labels, torch.tensor(1.0))


def _loss(model: nn.Module, batch: Mixed, run: Run) -> Tensor:
    logits = model(batch.inputs)
    if run.mix:
        return shoestring.cross_entropy(logits, batch.target, target2=batch.target2, mix=batch.mix)
    return F.cross_entropy(logits, batch.target)


class Training:
    """The training of one network: network, optimizer, schedule, averages and the order of the batches.

    Args:
        glyphs: the training glyphs.
        run: the parts of shoestring to use.
        seed: seed of the weights, of the order of the batches and of mixing.
        steps: number of steps of the schedule. None takes the epochs of the run.
    """

    def __init__(self, glyphs: Glyphs, run: Run, seed: int, steps: int | None = None) -> None:
        torch.manual_seed(seed)
        self.glyphs, self.run, self.seed, self.model = glyphs, run, seed, ResNet(depth=run.depth)
        self.steps_per_epoch = len(glyphs.labels) // run.batch_size
        self.steps = steps or run.epochs * self.steps_per_epoch
        if run.fast:
            self._fast_defaults()
        self.optimizer, self.schedule = _optimizer(self.model, run, self.steps)
        every = max(1, self.steps // 40)  # the average of five snapshots covers an eighth of the training
        self.averages = Averages(self.model, "lawa", every=every, last=5) if run.lawa else None
        self._order = torch.Generator().manual_seed(seed)
        self._rows = torch.empty(0, dtype=torch.int64)

    def _fast_defaults(self) -> None:
        """Keep channels-last weights if a step is faster, and undo what the trial steps do to the batch norms.

        The other switches are settings of the process, and other runs would train with them.
        """
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        trial = replace(self.run, mix="")
        batch = _batch(self.glyphs, torch.arange(self.run.batch_size), trial, self.seed, 0)
        shoestring.fast_defaults(
            lambda: _loss(self.model, batch, trial).backward(),
            self.model,
            switches=["channels_last"],
            repeats=3,
        )
        self.model.load_state_dict(before)
        self.model.zero_grad()

    def step(self) -> None:
        """Take one step."""
        size = self.run.batch_size
        if len(self._rows) < size:
            self._rows = torch.randperm(len(self.glyphs.labels), generator=self._order)
        batch = _batch(self.glyphs, self._rows[:size], self.run, self.seed, self.model.step)
        self._rows = self._rows[size:]
        _loss(self.model, batch, self.run).backward()
        if self.run.sam_interval and self.optimizer.first_step(zero_grad=True):
            _loss(self.model, batch, self.run).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        if self.averages is not None:
            self.averages.update()
        self.model.step += 1

    def accuracies(self, held_out: Glyphs) -> list[float]:
        """Return the accuracy of the weights and, with LAWA, that of the averages."""
        found = [accuracy(self.model, held_out)]
        if self.averages is not None:
            with self.averages.swap():  # afterwards the statistics are also those from before
                # The statistics are those of all blocks. A block that is left out would have none.
                depth, self.model.depth = self.model.depth, 0.0
                update_batch_norm(_some_batches(self.glyphs), self.model)
                self.model.depth = depth
                found.append(accuracy(self.model, held_out))
        return found


def _some_batches(glyphs: Glyphs) -> list[Tensor]:
    rows = torch.randperm(len(glyphs.labels), generator=torch.Generator().manual_seed(0))
    return [scaled(glyphs.images[part]) for part in rows[:1024].split(128)]


def train(glyphs: Glyphs, run: Run, seed: int = 0, steps: int | None = None) -> ResNet:
    """Train a network to the end, without evaluations."""
    training = Training(glyphs, run, seed, steps)
    for _ in range(training.steps):
        training.step()
    return training.model


def accuracy_curve(
    glyphs: Glyphs, held_out: Glyphs, run: Run, seed: int, steps: int | None
) -> list[list[float]]:
    """Train once; return ``accuracies`` after each quarter of the steps."""
    training, found = Training(glyphs, run, seed, steps), []
    for step in range(1, training.steps + 1):
        training.step()
        if step * 4 // training.steps > (step - 1) * 4 // training.steps:
            found.append(training.accuracies(held_out))
    return found


def step_times(glyphs: Glyphs, names: list[str], rounds: int = 5, steps: int = 20) -> dict[str, float]:
    """Return the milliseconds of a step of each run.

    The runs take turns, and the median of the rounds counts, so that other programs disturb all runs alike.
    """
    trainings = {name: Training(glyphs, RUNS[name], 0, 1 + rounds * steps) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for training in trainings.values():
        training.step()
    for _ in range(rounds):
        for name, training in trainings.items():
            began = time.perf_counter()
            for _ in range(steps):
                training.step()
            times[name].append((time.perf_counter() - began) / steps * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train the runs or time their steps, print a line for each, and return the figures."""
    parser = Parser("Trains a ResNet to read the glyphs of unseen fonts.")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--times", action="store_true", help="measure only how long a step takes")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    glyphs, held_out = parser.glyphs(options)
    print(
        f"{len(glyphs.labels)} glyphs of {len(glyphs.families)} families to train on, "
        f"{len(held_out.labels)} of {len(held_out.families)} other families to read",
        flush=True,
    )
    results: dict[str, Any] = {
        "glyphs": [len(glyphs.labels), len(held_out.labels)],
        "families": [len(glyphs.families), len(held_out.families)],
    }
    if options.times:
        times = step_times(glyphs, options.runs, *((1, 2) if options.quick else ()))
        results["times"] = {
            "threads": options.threads,
            "load_average": os.getloadavg()[0],
            "step_milliseconds": times,
        }
        for name, milliseconds in times.items():
            print(f"{name:17} {milliseconds:.1f} ms per step")
    else:
        results["accuracy"] = {}
        for name in options.runs:
            run = replace(RUNS[name], batch_size=32) if options.quick else RUNS[name]
            steps = QUICK_STEPS if options.quick else None
            curve = accuracy_curve(glyphs, held_out, run, options.seed, steps)
            results["accuracy"][name] = {str(options.seed): curve}
            print(f"{name:17} accuracy {curve[-1][-1]:.4f}", flush=True)
            if options.json is not None:  # keeps the runs so far if a later one is interrupted
                add_to_json(options.json, "classifier", results)
    if options.json is not None:
        add_to_json(options.json, "classifier", results)
    return results


if __name__ == "__main__":
    main()
