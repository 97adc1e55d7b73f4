"""Callbacks: what happens after each step of a training loop, with state that is saved with the run."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoestring.files.atomic import atomic_file
from shoestring.optim.state_dicts import StateDicts


@dataclass
class Run:
    """The part of a training loop that a callback sees.

    Attributes:
        model: the model that is trained, or None.
        optimizers: its optimizers.
        step: the number of steps that have been taken.
        loss: the loss of the last step, on its device, or None.
        metrics: numbers that the loop has measured, by name.
        should_stop: a callback sets this to end the loop.

    Example:
        >>> shoestring.callbacks.Run(step=3).step
        3
    """

    model: nn.Module | None = None
    optimizers: list[Optimizer] = field(default_factory=list)
    step: int = 0
    loss: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    should_stop: bool = False


class Callback:
    """The base class of callbacks. A subclass overrides the methods that it needs.

    Example:
        >>> class Stop(shoestring.callbacks.Callback):
        ...     def on_step(self, run):
        ...         run.should_stop = run.step >= 10
        >>> run = shoestring.callbacks.Run(step=10)
        >>> Stop().on_step(run)
        >>> run.should_stop
        True
    """

    def on_start(self, run: Run) -> None:
        """Do something before the first step of a run, or of a resumed run."""

    def on_step(self, run: Run) -> None:
        """Do something after each step of the optimizers."""

    def on_metrics(self, run: Run) -> None:
        """Do something when the loop has put numbers into ``run.metrics``."""

    def on_end(self, run: Run) -> None:
        """Do something after the last step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is saved with the run: tensors, and values that JSON can hold."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of ``state_dict()``."""


class OnStep(Callback):
    """Call a function after each step, and save the state of the object that it belongs to.

    This makes a callback of a ``Scheduler``, of ``Averages``, of a ``GradientNoise`` or of any other object.

    Args:
        call: the function, without arguments, such as ``averages.update``.
        state_of: an object with ``state_dict`` and ``load_state_dict``; by default the object whose method ``call``
            is, if it has both.
        every: the number of steps from one call to the next.

    Raises:
        ValueError: ``every`` is below 1.

    Example:
        >>> model = torch.nn.Linear(8, 2)
        >>> averages = shoestring.optim.Averages(model)
        >>> callback = shoestring.callbacks.OnStep(averages.update)
        >>> callback.on_step(shoestring.callbacks.Run(step=1))
        >>> averages.updates
        1
    """

    def __init__(self, call: Callable[[], object], state_of: Any = None, *, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"OnStep: every: expected a number of at least 1, received {every}")
        owner = getattr(call, "__self__", None) if state_of is None else state_of
        has_state = hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")
        self._call, self._every, self._owner = call, every, owner if has_state else None

    @property
    def _is_split(self) -> bool:
        return getattr(self._owner, "_is_split", False)

    def on_step(self, run: Run) -> None:
        """Call the function if the step is a multiple of ``every``."""
        if run.step % self._every == 0:
            self._call()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the object."""
        return {} if self._owner is None else self._owner.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of the object."""
        if self._owner is not None:
            self._owner.load_state_dict(state_dict)


class Callbacks(Callback):
    """Several callbacks by name, called in their order. Their states are saved under their names.

    A loop of one's own calls ``on_start``, ``on_step``, ``on_metrics`` and ``on_end``, and saves the callbacks as a
    part of the run::

        callbacks = Callbacks(schedule=OnStep(scheduler.step), averages=OnStep(averages.update))
        run = Run(model, [optimizer])
        callbacks.on_start(run)
        for batch in data:
            run.loss = train_step(batch)
            run.step += 1
            callbacks.on_step(run)
            if run.should_stop:
                break
        callbacks.on_end(run)
        save_training("run.safetensors", model, optimizer, step=run.step, callbacks=callbacks)

    ``transformers_callback`` and ``lightning_callback`` adapt them to the loops of other libraries.

    Args:
        **callbacks: the callbacks by name.

    Raises:
        TypeError: one is not a callback.
        ValueError: a name has a dot, which separates it from the keys of its state.

    Example:
        >>> callbacks = shoestring.callbacks.Callbacks(log=shoestring.callbacks.OnStep(lambda: None))
        >>> callbacks.on_step(shoestring.callbacks.Run(step=1))
        >>> callbacks.state_dict()
        {}
    """

    def __init__(self, **callbacks: Callback) -> None:
        for name, callback in callbacks.items():
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"Callbacks: {name}: expected a Callback, received {type(callback).__name__}. OnStep makes one of a "
                    "function"
                )
            if "." in name:
                raise ValueError(f"Callbacks: {name}: expected a name without a dot")
        self._callbacks = callbacks

    @property
    def _is_split(self) -> bool:
        return any(getattr(callback, "_is_split", False) for callback in self._callbacks.values())

    def on_start(self, run: Run) -> None:
        """Call ``on_start`` of each callback."""
        for callback in self._callbacks.values():
            callback.on_start(run)

    def on_step(self, run: Run) -> None:
        """Call ``on_step`` of each callback."""
        for callback in self._callbacks.values():
            callback.on_step(run)

    def on_metrics(self, run: Run) -> None:
        """Call ``on_metrics`` of each callback."""
        for callback in self._callbacks.values():
            callback.on_metrics(run)

    def on_end(self, run: Run) -> None:
        """Call ``on_end`` of each callback."""
        for callback in self._callbacks.values():
            callback.on_end(run)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all callbacks, under ``"<name>.<key>"``."""
        return {
            f"{name}.{key}": value
            for name, callback in self._callbacks.items()
            for key, value in callback.state_dict().items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the states of all callbacks.

        Raises:
            ValueError: a state belongs to a callback that is not among them. Nothing has changed then.
        """
        states: dict[str, dict[str, Any]] = {name: {} for name in self._callbacks}
        for key, value in state_dict.items():
            name, _, rest = key.partition(".")
            if name not in states:
                raise ValueError(
                    f"Callbacks: {name}: expected one of {', '.join(states) or 'no callbacks'}, received a state for another"
                )
            states[name][rest] = value
        for name, callback in self._callbacks.items():
            callback.load_state_dict(states[name])


# ---- logging


class TensorBoard(Callback):
    """Write the metrics of a run, and every ``every`` steps the loss, for TensorBoard.

    The loss is written a step late, so that the host does not wait for the device.

    Args:
        folder: the folder of the event files.
        every: the number of steps from one loss to the next.

    Raises:
        ImportError: the package ``tensorboard`` is not installed.

    Example:
        >>> shoestring.callbacks.TensorBoard("runs/one")  # doctest: +SKIP
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int = 10) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoard: tensorboard: expected the package, received none: pip install tensorboard"
            ) from error
        self._writer = SummaryWriter(str(folder))
        self._losses = _LateLoss(every)

    def on_step(self, run: Run) -> None:
        """Write the loss of an earlier step, if there is one."""
        self._write(self._losses.next(run))

    def on_metrics(self, run: Run) -> None:
        """Write ``run.metrics``."""
        for name, value in run.metrics.items():
            self._writer.add_scalar(name, value, run.step)

    def on_end(self, run: Run) -> None:
        """Write what is left, and close the file."""
        self._write(self._losses.last())
        self._writer.close()

    def _write(self, loss: tuple[int, float] | None) -> None:
        if loss is not None:
            self._writer.add_scalar("loss", loss[1], loss[0])


class WandB(Callback):
    """Log the metrics of a run, and every ``every`` steps the loss, to Weights & Biases.

    The loss is logged a step late, so that the host does not wait for the device.

    Args:
        every: the number of steps from one loss to the next.
        **options: the arguments of ``wandb.init``, such as ``project``.

    Raises:
        ImportError: the package ``wandb`` is not installed.

    Example:
        >>> shoestring.callbacks.WandB(project="small", mode="offline")  # doctest: +SKIP
    """

    def __init__(self, *, every: int = 10, **options: Any) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ImportError(
                "WandB: wandb: expected the package, received none: pip install wandb"
            ) from error
        self._run = wandb.init(**options)
        self._losses = _LateLoss(every)

    def on_step(self, run: Run) -> None:
        """Log the loss of an earlier step, if there is one."""
        self._log(self._losses.next(run))

    def on_metrics(self, run: Run) -> None:
        """Log ``run.metrics``."""
        self._run.log(dict(run.metrics), step=run.step)

    def on_end(self, run: Run) -> None:
        """Log what is left, and finish the run."""
        self._log(self._losses.last())
        self._run.finish()

    def _log(self, loss: tuple[int, float] | None) -> None:
        if loss is not None:
            self._run.log({"loss": loss[1]}, step=loss[0])


class _LateLoss:
    """Keeps the loss of every so many steps until the next one, when the device has computed it."""

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"every: expected a number of at least 1, received {every}")
        self._every = every
        self._pending: tuple[int, Tensor] | None = None

    def next(self, run: Run) -> tuple[int, float] | None:
        """Return the pending step and loss, if any, and keep this step's loss if it is due."""
        loss = self.last()
        if run.loss is not None and run.step % self._every == 0:
            self._pending = run.step, run.loss.detach().clone()
        return loss

    def last(self) -> tuple[int, float] | None:
        """Return the pending step and loss, if any."""
        if self._pending is None:
            return None
        (step, loss), self._pending = self._pending, None
        return step, float(loss)


# ---- other libraries' loops

# The file with the callbacks' state in a checkpoint folder of Transformers' Trainer.
STATE_FILE = "shoestring_callbacks.pt"


def transformers_callback(callbacks: Callback | None = None) -> Any:
    """Return a callback for the Trainer of transformers, which calls ours.

    Their state is saved in each checkpoint folder, and restored when the Trainer resumes from it. A Trainer does not tell
    its callbacks which path ``train(resume_from_checkpoint=)`` was given. If the folder is not ``checkpoint-<step>`` in the
    Trainer's ``output_dir``, set ``resume_from_checkpoint`` of its arguments to it, too. A Trainer takes one such callback.

    An optimizer whose state processes have split (``shoestring.distributed.shard``) needs this callback, also
    without callbacks of ours. The Trainer reads the state on one rank alone. So this callback gathers it there
    before each checkpoint, by ``consolidate_state_dict``.

    Args:
        callbacks: the callback, such as a ``Callbacks``; None for none.

    Returns:
        A ``transformers.TrainerCallback``.

    Raises:
        ImportError: transformers is not installed.
        FileNotFoundError: raised by ``train``: it resumes, the callbacks have state, and there is no state of theirs in the
            folder.
        ValueError: raised by ``train``: the folder is of another run, or the Trainer has two such callbacks.

    Example:
        >>> from transformers import Trainer
        >>> callback = shoestring.callbacks.transformers_callback(shoestring.callbacks.Callbacks())
    """
    from transformers import TrainerCallback

    own_callbacks = Callbacks() if callbacks is None else callbacks

    class Adapter(TrainerCallback):
        def __init__(self) -> None:
            self.run = Run()

        def _update(self, state: Any, model: Any = None, optimizer: Any = None) -> None:
            self.run.step = state.global_step
            self.run.model = self.run.model if model is None else model
            inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps the optimizer
            self.run.optimizers = self.run.optimizers if inner is None else [inner]

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            self._update(state, kwargs.get("model"), kwargs.get("optimizer"))
            if vars(state).setdefault("_shoestring_adapter", self) is not self:
                raise ValueError(
                    "transformers_callback: callbacks: expected one transformers_callback for a Trainer, received two, "
                    "which would write one file. Join their callbacks: Callbacks(first=..., second=...)"
                )
            if state.global_step > 0:
                _restore(own_callbacks, _checkpoint_of(args, state), state)
            own_callbacks.on_start(self.run)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            self._update(state, kwargs.get("model"), kwargs.get("optimizer"))
            own_callbacks.on_step(self.run)
            control.should_training_stop |= self.run.should_stop
            self._consolidate(args, control)
            return control

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            self._update(state, kwargs.get("model"), kwargs.get("optimizer"))
            self._consolidate(args, control)

        def _consolidate(self, args: Any, control: Any) -> None:
            # With "best", the Trainer decides after the evaluation whether it saves.
            may_save = control.should_save or (args.save_strategy == "best" and control.should_evaluate)
            if not may_save or args.save_only_model:
                return
            for optimizer in self.run.optimizers:
                if isinstance(optimizer, StateDicts):
                    # With save_on_each_node, several ranks save.
                    optimizer.consolidate_state_dict(args.process_index if args.should_save else 0)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
            self._update(state)
            self.run.metrics = {k: v for k, v in (logs or {}).items() if isinstance(v, (int, float))}
            own_callbacks.on_metrics(self.run)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if folder.is_dir() and state.is_world_process_zero:
                with atomic_file(folder / STATE_FILE) as file:
                    torch.save(own_callbacks.state_dict(), file)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            own_callbacks.on_end(self.run)

    return Adapter()


def _checkpoint_of(args: Any, state: Any) -> Path:
    resumed = args.resume_from_checkpoint
    if isinstance(resumed, (str, os.PathLike)):
        return Path(resumed)
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _restore(callbacks: Callback, folder: Path, state: Any) -> None:
    """Give callbacks their state in the checkpoint folder of a Trainer, whose own state was loaded from there."""
    path = folder / STATE_FILE
    if not path.is_file():
        if not callbacks.state_dict():
            return
        raise FileNotFoundError(
            f"transformers_callback: {path}: expected the state of the callbacks, received no file. If the Trainer resumes "
            "from another folder, set its args.resume_from_checkpoint to that; if the callbacks are new in this run, write "
            "the file with torch.save(callbacks.state_dict(), path)"
        )
    saved = json.loads((folder / "trainer_state.json").read_text())
    # Compare the logs as text, in which NaN equals itself.
    theirs, ours = (
        json.dumps([fields.get(name) for name in ("global_step", "epoch", "log_history")])
        for fields in (saved, vars(state))
    )
    if theirs != ours:
        raise ValueError(
            f"transformers_callback: {folder}: expected the checkpoint from which the Trainer resumes, received one with "
            "another step or other logs. Set args.resume_from_checkpoint of the Trainer to the folder that train() is given"
        )
    callbacks.load_state_dict(torch.load(path, weights_only=True))


def lightning_callback(callbacks: Callback) -> Any:
    """Return a callback for the Trainer of Lightning, which calls ours.

    Their state is part of Lightning's checkpoints.

    Args:
        callbacks: the callback, such as a ``Callbacks``.

    Returns:
        A ``lightning.pytorch.Callback``.

    Raises:
        ImportError: lightning is not installed.

    Example:
        >>> callback = shoestring.callbacks.lightning_callback(shoestring.callbacks.Callbacks())
    """
    from lightning.pytorch import Callback as LightningCallback

    class Adapter(LightningCallback):
        def __init__(self) -> None:
            self.run = Run()

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.run = Run(pl_module, list(trainer.optimizers), trainer.global_step)
            callbacks.on_start(self.run)

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.global_step == self.run.step:
                return  # a micro-batch of an accumulated step
            self.run.step = trainer.global_step
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            self.run.loss = loss if isinstance(loss, Tensor) else None
            callbacks.on_step(self.run)
            trainer.should_stop |= self.run.should_stop

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.sanity_checking:
                return  # Lightning tries a validation before it starts
            self.run.metrics = {
                name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1
            }
            callbacks.on_metrics(self.run)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            callbacks.on_end(self.run)

        def state_dict(self) -> dict[str, Any]:
            return callbacks.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            callbacks.load_state_dict(state_dict)

    return Adapter()
