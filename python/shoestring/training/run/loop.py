"""The training loop of the commands `train` and `finetune`, with shoestring's operators or plain PyTorch."""

from __future__ import annotations

import bisect
import itertools
import math
import os
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils import _pytree

from shoestring.checkpoint.weights import OffloadedWeights
from shoestring.core.errors import InputError
from shoestring.data.batches import BatchOrder, Empty, Examples, Rows, in_host_memory, labelled
from shoestring.data.packing import PackedOrder
from shoestring.data.prefetcher import Prefetcher
from shoestring.distributed.parallelize import ParallelReport
from shoestring.optim import ScheduleFreeAdamW
from shoestring.runs.find_batch_size import is_out_of_memory
from shoestring.training import memory
from shoestring.training.config import LoopConfig
from shoestring.training.optimizers import trained
from shoestring.training.report.metrics import MetricsLog
from shoestring.training.run import device, signals
from shoestring.training.run.checkpoint import checkpoints, save_checkpoint
from shoestring.training.run.folder import Run, next_budget
from shoestring.training.run.models import Loss
from shoestring.training.run.processes import whole
from shoestring.training.run.readings import Readings

LOG_EVERY = 10  # steps between reads from a device other than the CPU

# Inputs, labels, and further keyword arguments of the loss.
Batch = tuple[Tensor, Tensor, dict[str, Any]]


class StepData(NamedTuple):
    """The data of a training step."""

    batches: list[Batch]  # the micro-batches
    labelled: int  # number of labels that count in the loss
    tokens: int  # number of input tokens, without padding


class Progress(Protocol):
    """Interface of the display of finished steps and notes of a run; cli.console implements it."""

    def step(self, metrics: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass
class Trainer:
    """The training loop of one run, with its model, data, optimizers and progress display."""

    run: Run[LoopConfig]
    model: Any  # a model of transformers or PEFT
    loss: Loss
    train: Rows
    val: Rows
    progress: Progress
    # "none"; "batch" if a micro-batch is one row of the --batch-size examples, without padding; "fill" if it
    # is a row of as many examples as fit into --batch-size x --seq-len tokens
    pack: str = "none"
    # together they step all trained parameters
    optimizers: list[torch.optim.Optimizer] = field(init=False, default_factory=list)
    # context of each forward, which offloads activations for --activations offload
    offload: AbstractContextManager[Any] = field(init=False, default_factory=nullcontext)
    # the weights that --offload-weights moves
    offloaded: OffloadedWeights | None = field(init=False, default=None)
    parallel: ParallelReport | None = field(init=False, default=None)  # what --parallel has done
    # bytes that autograd saved for backward in the first micro-batch of this process
    saved_activations: int = field(init=False, default=0)
    # bytes of saved activations that the plan for --memory-budget predicts
    planned_activations: int | None = field(init=False, default=None)
    # last validation loss; None before the first validation
    val_loss: float | None = field(init=False, default=None)
    best_val_loss: float | None = field(init=False, default=None)
    saved: int | None = field(init=False, default=None)  # step of the last checkpoint that this process saved
    # the long waits, such as "a step", that have been announced on the terminal
    told: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.follow(self.run)

    def follow(self, run: Run[LoopConfig]) -> None:
        """Take the options of this run."""
        self.run = run
        # It scales the loss for fp16, so that small gradients do not become zero; otherwise it does nothing.
        self.scaler = GradScaler(run.device.type, enabled=run.config.precision == "fp16")

    def fit(self, start: int = 0) -> None:
        """Train from step ``start`` (counted from 0) to the last step of the configuration.

        The model then has the weights that ``evaluate`` has used, which are those to save, in evaluation mode.

        Raises:
            InputError: the loss or the gradient norm is not finite.
            Interrupted: a signal arrived. The step during which it arrived has been completed and saved in a
                checkpoint.
        """
        config = self.run.config
        schedule = config.learning_rates()
        parameters = trained(self.model)
        readings = Readings(
            self.run.device,
            config.log_every or (1 if self.run.device.type == "cpu" else LOG_EVERY),
            config.accumulate // self.run.processes.count,
            not self.scaler.is_enabled(),
            self.run.processes.total,
        )
        # The first process alone keeps the metrics.
        metrics = self.run.folder / "metrics.jsonl" if self.run.processes.is_first else Path(os.devnull)
        self._set_mode(training=True)
        with (
            MetricsLog(metrics, keep_through=start) as log,
            signals.deferred(),
            device.float32_products(config.precision == "tf32"),
            self._feed(start) as feed,
        ):
            if log.lost:
                self.progress.note(
                    f"metrics.jsonl is damaged: {log.lost} of the {start} steps so far are not in it"
                )
            readings.restart_clock()
            for step in range(start, config.steps):
                lr = schedule(step)
                for optimizer in self.optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = lr
                waited = feed.seconds_waited
                data: StepData = next(feed)
                row = {"step": step + 1, "lr": lr, "tokens": data.tokens}
                row["data_seconds"] = feed.seconds_waited - waited
                failure = self._gradients(step, data, readings, first=step == start)
                if failure is not None:
                    self._stop_without_memory(step, failure, readings, log)
                self._step(parameters, readings)
                row |= memory.usage(self.run.device)
                if readings.is_full_after_next:
                    row |= memory.utilization(self.run.device)
                readings.end_step(row)
                due = self._is_due(step + 1)
                if readings.is_full or due:
                    rows = readings.end_interval(wait=due)
                    self._after_interval(rows, log)
                    if due:
                        self._after_step(step + 1, rows[-1], log)
                    readings.restart_clock()
                if self.run.processes.any(signals.received() is not None):
                    self._after_interval(readings.end_interval(wait=True), log)
                    self._save(step + 1, log)
                    break
        self._set_mode(training=False)  # before the processes give up their parts of the weights

    def order(self) -> BatchOrder | PackedOrder:
        """Return the order in which training draws rows."""
        config = self.run.config
        if self.pack != "fill":
            return BatchOrder(len(self.train), config.batch_size, config.accumulate, config.seed)
        lengths = [max(1, self.train.count([row])) for row in range(len(self.train))]
        return PackedOrder(lengths, config.batch_size * config.seq_len, config.accumulate, config.seed)

    def _feed(self, start: int) -> Prefetcher:
        """Return an iterator over the data of the steps from ``start`` on, on the device, read one step ahead."""
        order = self.order()

        def read(step: int, empty: Empty) -> StepData:
            drawn = order.step(step)
            rank, count = self.run.processes.rank, self.run.processes.count
            batches = [self.batch(self.train, rows, empty) for rows in drawn[rank::count]]
            counted = sum(labelled(labels) for _, labels, _ in batches)
            for number, rows in enumerate(drawn):
                if number % count != rank:  # rows of another process
                    counted += labelled(self.batch(self.train, rows, in_host_memory)[1])
            return StepData(batches, counted, sum(self.train.count(rows) for rows in drawn))

        return Prefetcher(read, self.run.device, start=start, stop=self.run.config.steps, fills_buffers=True)

    def _gradients(self, step: int, data: StepData, readings: Readings, first: bool) -> str | None:
        """Run all micro-batches of a step; return a description of the error if memory runs out, else None."""
        try:
            self._accumulate(step, data, readings, first)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return str(error).partition("\n")[0] or "out of memory"
        return None

    def _stop_without_memory(self, step: int, failure: str, readings: Readings, log: MetricsLog) -> None:
        """Save the last complete step, and raise InputError that says how to go on; the activations are freed by now."""
        readings.drop_step()
        config = self.run.config
        reason = f"step {step + 1}: out of memory ({failure})"
        if config.step_in_backward or self.run.processes.count > 1:
            # Weights have been stepped, or other processes wait for this one.
            raise InputError(
                f"{reason}; take a smaller --batch-size or --device-memory{self.checkpoint_note()}"
            )
        for parameter in trained(self.model):
            parameter.grad = None
        self._after_interval(readings.end_interval(wait=True), log)
        if step == 0:
            raise InputError(f"{reason}; give a smaller --device-memory, with which the step is planned")
        self._save(step, log)
        raise InputError(
            f"{reason}; step {step} is saved, and --resume --replan goes on from there within a smaller --device-memory"
            f"{self._smaller_plan()}"
        )

    def _smaller_plan(self) -> str:
        """Say which memory the next plan needs, and at which speed, if the run has a plan and there is a smaller one."""
        plan = self.run.plan
        if plan is None:
            return ""
        smaller = [point for point in plan.frontier if point["peak_bytes"] <= next_budget(plan)]
        if not smaller:
            return ""
        next_one = smaller[-1]
        speed = plan.seconds / next_one["seconds"]
        return f": the next plan needs {next_one['peak_bytes'] / 2**30:.2f} GiB, at {speed:.0%} of the speed"

    def _accumulate(self, step: int, data: StepData, readings: Readings, first: bool) -> None:
        """Run forward and backward of all micro-batches of a step.

        The loss is the mean over the labelled positions of all micro-batches, plus the mean over the micro-batches of
        the terms that are no sums over tokens, such as the loss of a router.
        """
        count = self.run.config.accumulate
        items = max(1, data.labelled) / count
        for number, (inputs, labels, more) in enumerate(data.batches):
            saved = memory.SavedActivations(self.model) if first and number == 0 else None
            with self._sums(number + 1 < len(data.batches)):
                with saved or nullcontext(), self.autocast(), self.offload:
                    loss = self.loss(inputs, labels, items=items, **more) / count
                if saved is not None:
                    self.saved_activations = saved.bytes
                readings.add_loss(loss)
                if self.optimizer_clips:
                    self._require_finite(step + 1, {"loss": loss.item()})
                # The gradients are averaged over the processes, and the loss is their sum.
                self.scaler.scale(loss * self.run.processes.count).backward()

    @property
    def optimizer_clips(self) -> bool:
        """Whether the optimizer alone knows the norm of all gradients, and clips within its step."""
        splits = self.parallel is not None and self.parallel.strategy == "zero2"
        return self.run.config.step_in_backward or splits

    def _sums(self, adds: bool) -> AbstractContextManager[Any]:
        """Return a context in which an optimizer that steps in backward adds up gradients instead."""
        if adds and self.parallel is not None and not self.run.config.step_in_backward:
            return self.parallel.no_sync()
        if not adds or not self.run.config.step_in_backward:
            return nullcontext()
        context: AbstractContextManager[Any] = self.optimizers[0].accumulate()  # type: ignore[attr-defined]
        return context

    def _step(self, parameters: list[nn.Parameter], readings: Readings) -> None:
        """Clip the gradients and step. The optimizers skip the step if ``readings.bad`` is set.

        The host does not wait for the device, except with ``--step-in-backward``, where a loss that is not
        finite must not reach backward.
        """
        if self.optimizer_clips:
            [clipping_optimizer] = self.optimizers
            clipping_optimizer.step()
            norm = clipping_optimizer.grad_norm  # type: ignore[attr-defined]
            readings.add_norm(norm)
        else:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            norm = whole(torch.nn.utils.clip_grad_norm_(parameters, self.run.config.clip or math.inf))
            readings.add_norm(norm)
            for optimizer in self.optimizers:
                if self.scaler.is_enabled():
                    for found_inf in self.scaler._found_inf_per_device(optimizer).values():
                        found_inf += readings.bad
                elif getattr(optimizer, "_step_supports_amp_scaling", False):
                    optimizer.found_inf = readings.bad  # type: ignore[attr-defined]
                elif readings.bad.item():
                    continue  # the optimizer cannot skip a step by itself, so the host has to wait
                self.scaler.step(optimizer)
            self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def batch(self, data: Rows, rows: list[int], empty: Empty = in_host_memory) -> Batch:
        """Return the micro-batch of these rows of the data, on the host."""
        if self.pack != "none" and isinstance(data, Examples):
            return data.packed(rows, empty)
        return (*data.rows(rows, empty), {})

    def longest_rows(self) -> list[int]:
        """Return a micro-batch of the longest rows, the longest first; no other micro-batch needs more memory."""
        rows = sorted(range(len(self.train)), key=lambda row: -self.train.count([row]))
        if self.pack == "fill":
            most = self.run.config.batch_size * self.run.config.seq_len
            tokens = itertools.accumulate(max(1, self.train.count([row])) for row in rows)
            return rows[: bisect.bisect_right(list(tokens), most)]
        return rows[: self.run.config.batch_size]

    def largest_batch(self) -> Tensor:
        """Return the loss of a micro-batch of the longest rows."""
        batch = self.batch(self.train, self.longest_rows())
        inputs, labels, more = _pytree.tree_map_only(Tensor, lambda t: t.to(self.run.device), batch)
        with self.autocast():
            return self.loss(inputs, labels, items=max(1, labelled(batch[1])), **more)

    def autocast(self) -> AbstractContextManager[Any]:
        return device.autocast(self.run.config.autocast, self.run.device)

    def _require_finite(self, step: int, row: dict[str, float]) -> None:
        names = {"loss": "loss", "grad_norm": "gradient norm"}
        if self.scaler.is_enabled():
            del names["grad_norm"]
        for key, name in names.items():
            if key in row and not math.isfinite(row[key]):
                changed = self.optimizer_clips and key == "grad_norm"
                raise InputError(
                    f"step {step}: the {name} is {row[key]}; training stopped "
                    f"{'after' if changed else 'before'} the weights changed; "
                    f"lower --lr ({self.run.config.lr:g}) or set --clip{self.checkpoint_note()}"
                )

    def checkpoint_note(self) -> str:
        """Return the end of an error message, which names the last checkpoint if there is one."""
        return f"; the last checkpoint in {self.run.folder} is kept" if checkpoints(self.run.folder) else ""

    def _tell_wait(self, what: str, seconds: float) -> None:
        """If ``what``, such as "a step", took long, print once that Ctrl-C waits for the end of such work."""
        if seconds > signals.LONG_WAIT and what not in self.told:
            self.told.add(what)
            self.progress.note(
                f"{what} takes {seconds:.0f} s: Ctrl-C and SIGTERM wait for its end, a second one exits at once"
            )

    def _is_due(self, step: int) -> bool:
        """Return whether an evaluation or a checkpoint follows this step."""
        config = self.run.config
        evaluates = len(self.val) > 0 and step % config.eval_every == 0
        return evaluates or step % config.checkpoint_every == 0 or step == config.steps

    def _after_interval(self, rows: list[dict[str, Any]], log: MetricsLog) -> None:
        """Check the rows that were read, and log those whose steps end without an evaluation or checkpoint."""
        for row in rows:
            self._require_finite(row["step"], row)
            if not self._is_due(row["step"]):
                log.add(row)
                self.progress.step(row)
        if rows:
            self._tell_wait("a step", rows[-1]["seconds"])

    def _after_step(self, step: int, row: dict[str, Any], log: MetricsLog) -> None:
        """Evaluate, log the row of this step, and save a checkpoint."""
        config, last = self.run.config, step == self.run.config.steps
        if len(self.val) and (step % config.eval_every == 0 or last):
            began = time.perf_counter()
            self.val_loss = row["val_loss"] = self.evaluate()
            row["val_seconds"] = time.perf_counter() - began
            self._tell_wait("an evaluation", row["val_seconds"])
            self.best_val_loss = min(
                self.val_loss, self.best_val_loss if self.best_val_loss is not None else math.inf
            )
        log.add(row)
        self.progress.step(row)
        if step % config.checkpoint_every == 0 or last:
            self._save(step, log)

    def _save(self, step: int, log: MetricsLog) -> None:
        """Save a checkpoint unless this step already has one."""
        if self.saved == step:
            return
        if self.run.processes.is_first:
            log.sync()
        state = {
            "val_loss": self.val_loss,
            "best_val_loss": self.best_val_loss,
            "fingerprint": self.run.fingerprint,
        }
        save_checkpoint(
            self.run.folder, step, self.model, self.optimizers, state, scaler=self.scaler, device=self.run.device,
            away=self.run.config.trained_leave, writes=self.run.processes.is_first,
        )  # fmt: skip
        self.saved = step

    def evaluate(self) -> float:
        """Return the mean loss over the first ``eval_batches`` batches of the validation rows.

        It is the loss of training: terms that are no sums over tokens are averaged with the batches' numbers of labels.
        """
        size = self.run.config.batch_size
        batches = min(math.ceil(len(self.val) / size), self.run.config.eval_batches)

        def read(number: int, empty: Empty) -> tuple[Batch, int]:
            first = number * size
            batch = self.batch(self.val, list(range(first, min(first + size, len(self.val)))), empty)
            return batch, labelled(batch[1])

        self._set_mode(training=False)
        total, count = 0.0, 0
        losses: list[Tensor] = []
        with (
            torch.no_grad(),
            self.autocast(),
            Prefetcher(read, self.run.device, stop=batches, fills_buffers=True) as feed,
        ):
            for (inputs, labels, more), counted in feed:
                losses.append(self.loss(inputs, labels, items=max(1, counted), **more).float() * counted)
                count += counted
        self._set_mode(training=True)
        for loss in torch.stack(losses).tolist():
            total += loss
        value = total / max(1, count)
        if not math.isfinite(value):
            raise InputError(
                f"the validation loss is {value}; lower --lr ({self.run.config.lr:g}){self.checkpoint_note()}"
            )
        return value

    def _set_mode(self, training: bool) -> None:
        """Set the mode of the model, and of optimizers whose weights for evaluation differ."""
        self.model.train(training)
        for optimizer in self.optimizers:
            if isinstance(optimizer, ScheduleFreeAdamW):
                optimizer.train() if training else optimizer.eval()
