"""The training loop of the commands `train` and `finetune`, with shoestring's operators or plain PyTorch."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoestring.core.errors import InputError
from shoestring.data.batches import IGNORE, BatchOrder, Examples, Rows
from shoestring.training import memory, signals
from shoestring.training.checkpoint import checkpoints, save_checkpoint
from shoestring.training.config import LoopConfig
from shoestring.training.metrics import MetricsLog
from shoestring.training.models import Loss
from shoestring.training.schedule import learning_rate


class Progress(Protocol):
    """Interface of the display of finished steps and notes of a run; cli.console implements it."""

    def step(self, metrics: dict[str, Any], val_loss: float | None) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass
class Trainer:
    """The training loop of one run, with its model, data, optimizer and progress display."""

    config: LoopConfig
    model: Any  # a model of transformers or PEFT
    loss: Loss
    optimizer: torch.optim.Optimizer
    train: Rows
    val: Rows
    run: Path
    progress: Progress
    fingerprint: dict[str, Any]
    packed: bool = False  # whether a micro-batch is one row of concatenated examples, without padding
    # bytes that autograd saved for backward in the first micro-batch of this process
    saved_activations: int = 0
    # bytes of saved activations that the plan for --memory-budget predicts
    planned_activations: int | None = None
    val_loss: float | None = None  # last validation loss; None before the first validation
    best_val_loss: float | None = None
    saved: int | None = None  # step of the last checkpoint that this process saved
    # the long waits, such as "a step", that have been announced on the terminal
    told: set[str] = field(default_factory=set)

    def fit(self, start: int = 0) -> None:
        """Train from step ``start`` (counted from 0) to the last step of the configuration.

        Raises:
            InputError: the loss or the gradient norm is not finite.
            Interrupted: a signal arrived. The step during which it arrived has been completed and saved in a
                checkpoint.
        """
        config = self.config
        order = BatchOrder(len(self.train), config.batch_size, config.accumulate, config.seed)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.model.train()
        with MetricsLog(self.run / "metrics.jsonl", keep_through=start) as log, signals.deferred():
            if log.lost:
                self.progress.note(
                    f"metrics.jsonl is damaged: {log.lost} of the {start} steps so far are not in it"
                )
            for step in range(start, config.steps):
                began = time.perf_counter()
                lr = learning_rate(
                    step, lr=config.lr, steps=config.steps, warmup=config.warmup, schedule=config.schedule
                )
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
                loss, tokens = self._accumulate(step, order, first=step == start)
                norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip or math.inf).item()
                self._require_finite(step, loss, norm)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                seconds = time.perf_counter() - began
                row = {
                    "step": step + 1, "loss": loss, "lr": lr, "grad_norm": norm, "tokens": tokens, "seconds": seconds,
                    "tokens_per_second": tokens / seconds, "rss": memory.resident_bytes(), "peak": memory.peak_bytes(),
                }  # fmt: skip
                self._tell_wait("a step", seconds)
                self._after_step(step + 1, row, log)
                if signals.received():
                    self._save(step + 1, log)
                    break

    def _accumulate(self, step: int, order: BatchOrder, first: bool) -> tuple[float, int]:
        """Run forward and backward of all micro-batches of a step; return its loss and number of tokens.

        The loss is the mean over the labelled positions of all micro-batches.
        """
        drawn = order.step(step)
        batches = [self._batch(self.train, rows) for rows in drawn]
        labelled = sum(int((labels != IGNORE).sum()) for _, labels, _ in batches)
        total = 0.0
        for number, (inputs, labels, more) in enumerate(batches):
            saved = memory.SavedActivations(self.model)
            with saved if first and number == 0 else nullcontext(), self.autocast():
                loss = self.loss(inputs, labels, **more) / max(1, labelled)
            if first and number == 0:
                self.saved_activations = saved.bytes
            value = loss.item()
            if not math.isfinite(value):
                self._require_finite(step, value, 0.0)
            loss.backward()
            total += value
        return total, sum(self.train.count(rows) for rows in drawn)

    def _batch(self, data: Rows, rows: list[int]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return inputs, labels and further keyword arguments of the loss for the given rows of the data."""
        if self.packed and isinstance(data, Examples):
            return data.packed(rows)
        return (*data.rows(rows), {})

    def largest_batch(self) -> Tensor:
        """Return the loss of a micro-batch of the longest rows; no other micro-batch needs more memory."""
        rows = sorted(range(len(self.train)), key=lambda row: -self.train.count([row]))[
            : self.config.batch_size
        ]
        inputs, labels, more = self._batch(self.train, rows)
        with self.autocast():
            return self.loss(inputs, labels, **more) / max(1, int((labels != IGNORE).sum()))

    def autocast(self) -> AbstractContextManager[Any]:
        """Return an autocast context for bf16 matrix products on fp32 weights, or a null context for fp32."""
        return torch.autocast("cpu", torch.bfloat16) if self.config.dtype == "bf16" else nullcontext()

    def _require_finite(self, step: int, loss: float, norm: float) -> None:
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise InputError(
                    f"step {step + 1}: the {name} is {value}; training stopped before the weights changed; "
                    f"lower --lr ({self.config.lr:g}) or set --clip{self._kept()}"
                )

    def _kept(self) -> str:
        return f"; the last checkpoint in {self.run} is kept" if checkpoints(self.run) else ""

    def _tell_wait(self, what: str, seconds: float) -> None:
        """If ``what``, such as "a step", took long, print once that Ctrl-C waits for the end of such work."""
        if seconds > signals.LONG_WAIT and what not in self.told:
            self.told.add(what)
            self.progress.note(
                f"{what} takes {seconds:.0f} s: Ctrl-C and SIGTERM wait for its end, a second one exits at once"
            )

    def _after_step(self, step: int, row: dict[str, Any], log: MetricsLog) -> None:
        config, last = self.config, step == self.config.steps
        if len(self.val) and (step % config.eval_every == 0 or last):
            began = time.perf_counter()
            self.val_loss = row["val_loss"] = self.evaluate()
            self._tell_wait("an evaluation", time.perf_counter() - began)
            self.best_val_loss = min(
                self.val_loss, self.best_val_loss if self.best_val_loss is not None else math.inf
            )
        log.add(row)
        self.progress.step(row, self.val_loss)
        if step % config.checkpoint_every == 0 or last:
            self._save(step, log)

    def _save(self, step: int, log: MetricsLog) -> None:
        """Save a checkpoint unless this step already has one."""
        if self.saved == step:
            return
        log.sync()
        state = {
            "val_loss": self.val_loss,
            "best_val_loss": self.best_val_loss,
            "fingerprint": self.fingerprint,
        }
        save_checkpoint(self.run, step, self.model, self.optimizer, state)
        self.saved = step

    def evaluate(self) -> float:
        """Return the mean loss over the first ``eval_batches`` batches of the validation rows."""
        size = self.config.batch_size
        self.model.eval()
        total, labelled = 0.0, 0
        with torch.no_grad(), self.autocast():
            for first in range(0, min(len(self.val), size * self.config.eval_batches), size):
                inputs, labels, more = self._batch(
                    self.val, list(range(first, min(first + size, len(self.val))))
                )
                total += float(self.loss(inputs, labels, **more))
                labelled += int((labels != IGNORE).sum())
        self.model.train()
        value = total / max(1, labelled)
        if not math.isfinite(value):
            raise InputError(f"the validation loss is {value}; lower --lr ({self.config.lr:g}){self._kept()}")
        return value


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups with weight decay for matrices and without it for norms and biases."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, config: LoopConfig) -> torch.optim.Optimizer:
    """Build the AdamW optimizer of a run.

    It is PyTorch's fused AdamW for plain runs. Otherwise it is shoestring's AdamW, whose state is stored in
    ``config.offload``.
    """
    groups = parameter_groups(model, config.weight_decay)
    if config.plain:
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    from shoestring.optim import AdamW

    return AdamW(
        groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        state=config.optimizer_state,
        offload=None if config.offload == "none" else config.offload,
    )
