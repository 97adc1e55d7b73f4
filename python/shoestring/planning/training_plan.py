"""Plan a whole training step: the fastest way within budgets of memory."""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from shoestring.checkpoint.costs import OFFLOADED, apply_treatments
from shoestring.checkpoint.model import parse_bytes
from shoestring.checkpoint.offload import offload_activations
from shoestring.checkpoint.weights import bytes_here
from shoestring.core.device import synchronize
from shoestring.core.errors import InputError
from shoestring.core.module_argument import check_module
from shoestring.optim import AdamW
from shoestring.planning import candidates, situation
from shoestring.planning.machine import Machine, hardware_profile
from shoestring.planning.methods import FULL, Method, apply_method, freed_bytes, methods
from shoestring.planning.processes import PLANNED, check_processes, check_strategy, plan_ranks
from shoestring.planning.situation import Budgets, Example, Json
from shoestring.planning.tiles import check_tiles_of, tile_reasons
from shoestring.planning.trial import Measured, NotFiniteError, run_trial, run_trials

Freedom = Literal["exact", "rounding", "method"]
FASTER = 1.02  # a plan is taken instead of a plainer one only if it is faster by this factor


@dataclass(frozen=True)
class PlanCheck:
    """A check compares what a plan predicts with what a batch needed.

    Attributes:
        predicted_bytes: device memory at the peak, as predicted, without what the process holds beside the training.
        measured_bytes: the same as measured: weights, and all that was allocated during the batch.
        process_bytes: the high-water mark of the process's resident memory on a CPU, else of the memory that PyTorch's
            allocator reserved; 0 if the system does not tell it.
        predicted_seconds: time of a batch with its optimizer step, as predicted.
        measured_seconds: the same as measured.

    Example:
        >>> shoestring.PlanCheck(100, 104, 0, 1.0, 1.1).measured_bytes
        104
    """

    predicted_bytes: int
    measured_bytes: int
    process_bytes: int
    predicted_seconds: float
    measured_seconds: float


@dataclass
class AppliedPlan:
    """The changes that a plan has made to a model; ``undo`` takes them back, except adapters and quantised weights.

    Example:
        >>> applied = shoestring.AppliedPlan()  # as TrainingPlan.apply returns it
        >>> applied.undo()
    """

    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Leave the blocks of the model as they were before the plan. A second call does nothing."""
        while self._undo:
            self._undo.pop()()


class TrainingPlan:
    """The fastest way to train a model within budgets of memory; ``plan_training`` returns it.

    Attributes are those of the JSON that C++ reads and writes, too: ``micro_batch``, ``accumulate``, ``precision``,
    ``tiles`` (of layers, by name, as :func:`plan_tiles` returns them), ``peak_bytes``, ``seconds``, ``reasons`` and so
    on.

    Example:
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
        >>> def example(rows):
        ...     return model(torch.randn(rows, 16)).square().mean()
        >>> plan = shoestring.plan_training(torch.nn.Sequential(model), example=example, batch_size=4)
        >>> plan.micro_batch * plan.accumulate
        4
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content: Json = json.loads(torch.ops.shoestring._check_plan(json.dumps(content)))

    def __getattr__(self, name: str) -> Any:
        content = self.__dict__.get("_content", {})
        if name in content:
            return content[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the plan's JSON, from which ``TrainingPlan`` makes an equal plan."""
        return dict(self._content)

    @property
    def optimizer(self) -> dict[str, Any]:
        """Options of the optimizer, which are ``state_format``, ``step_in_backward`` and ``offload``."""
        content = self._content
        return {
            "state_format": content["optimizer_state"],
            "step_in_backward": content["step_in_backward"],
            "offload": None if content["offload"] == "none" else content["offload"],
        }

    @property
    def peak(self) -> int:
        """The predicted peak of device memory, in bytes of the kind of ``device_memory``."""
        size: int = self._content["peak_bytes"]
        return size

    def autocast(self, device_type: str = "cpu") -> AbstractContextManager[Any]:
        """Return the context of each forward, which computes products in the plan's precision."""
        precision = self._content["precision"]
        return situation.autocast("fp32" if precision == "as the weights" else precision, device_type)

    def apply(self, model: nn.Module) -> AppliedPlan:
        """Give the blocks of a model the treatments of the plan; return a handle that undoes it.

        A plan with ``adapters`` also freezes the model and adds them, as :func:`shoestring.lora.apply` does with
        ``rank=16`` and ``quantize``, before an optimizer is made. The handle leaves them, since they are what is trained.

        If blocks offload activations, buffers in host memory are allocated in the first step, and reused. Layers in
        tiles have to be there already, since :func:`tile_layers` comes before :func:`offload_weights`.

        Raises:
            ValueError: the plan is of another model, a layer is not tiled as planned, or blocks have checkpoints
                already.
        """
        check_module("TrainingPlan: apply", model)
        check_tiles_of(model, self._content["tiles"])  # names of parameters are those of tiles
        found = situation.digest(model)
        if found != self._content["model"]:
            raise InputError(
                f"TrainingPlan: apply: model: expected the planned one ({self._content['model']}), received {found}; plan "
                "anew for this model"
            )
        blocks = self._content["checkpoints"]
        moves = any(one["treatment"] in OFFLOADED for one in blocks)
        # A block that keeps its activations waits for copies of earlier blocks.
        planned = [one for one in blocks if moves or one["treatment"] != "keep"]
        try:
            modules = [model.get_submodule(one["block"]) for one in planned]
        except AttributeError as error:
            raise InputError(f"TrainingPlan: apply: model: expected the planned blocks: {error}") from None
        device = next(model.parameters()).device

        def treated() -> AppliedPlan:
            undo = apply_treatments(
                modules,
                [one["treatment"] for one in planned],
                [one["pending_bytes"] for one in planned],
                [one["link_bytes"] for one in planned],
                offload_activations(device=device, exclude=model) if moves else None,
            )
            return AppliedPlan([functools.partial(_free_copies, device), *undo] if moves else undo)

        applied = treated()  # raises before adapters are added, which nothing takes back
        if self._content["adapters"] != "none":
            applied.undo()
            apply_method(model, self._content["adapters"], self._content["quantize"])
            applied = treated()
        return applied

    def check(
        self, model: nn.Module, example: Example, optimizer: type[torch.optim.Optimizer] | None = None
    ) -> PlanCheck:
        """Train two batches of a model to which the plan was applied, and compare the second one with the plan.

        The optimizer has a learning rate of 0, so weights do not change; gradients, buffers and random state are
        restored.

        Args:
            model: the model, to which the plan was applied.
            example: returns the loss of so many rows, as for ``plan_training``.
            optimizer: the class of the optimizer; by default AdamW.

        Raises:
            ValueError: the loss or a gradient is not finite.
        """
        weights = bytes_here(model)
        trial = run_trial(self, model, example, optimizer or AdamW)
        loading, *others = (phase["bytes"] for phase in self._content["phases"])
        # While a plan loads the weights that it quantises, they are dense.
        dense = weights + (freed_bytes(model) if self._content["quantize"] != "none" else 0)
        return PlanCheck(
            max(others) - (loading - dense),
            trial.device_bytes,
            trial.process_bytes,
            self._content["seconds"],
            trial.seconds,
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, which C++ reads, too."""
        torch.ops.shoestring._save_plan(json.dumps(self._content), str(path))

    @classmethod
    def load(cls, path: str | Path) -> TrainingPlan:
        """Read a plan that Python or C++ has saved.

        Raises:
            ValueError: the file is no plan of this version; the message names the field that is wrong.
        """
        return cls(json.loads(torch.ops.shoestring._load_plan(str(path))))

    def __str__(self) -> str:
        content = self._content
        rows = f"{content['accumulate']} x {content['micro_batch']} rows"
        if content["parallel"] != "none":
            rows += f" in each process, {content['parallel']}"
        return "\n".join(
            [
                f"{rows}, {content['precision']}, {content['optimizer_state']} state: {content['seconds']:.3g} s for a batch, "
                f"peak {content['peak_bytes'] / 2**30:.2f} GiB",
                *(reason["text"] for reason in content["reasons"]),
            ]
        )

    def __repr__(self) -> str:
        return f"<TrainingPlan of {self._content['model']}: {str(self).splitlines()[0]}>"


def _free_copies(device: torch.device) -> None:
    """Free the host memory of copies of activations. The classes of blocks hold it, which the collector alone frees."""
    synchronize(device)
    gc.collect()


def plan_training(
    model: nn.Module,
    *,
    example: Example,
    batch_size: int,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    disk: str | None = None,
    freedom: Freedom = "exact",
    optimizer: str = "adamw",
    optimizer_options: Mapping[str, Any] | None = None,
    fixed: Mapping[str, str | int | bool] | None = None,
    measure: bool = True,
    hardware: str | Machine = "this",
    processes: int = 1,
    link: str | None = None,
) -> TrainingPlan:
    """Return the fastest way to train a model whose memory is within all budgets.

    The function measures passes of the model and steps of the optimizer for some seconds. Then it chooses the
    micro-batch, the precision, what each block does with its activations, and the format and the place of the
    optimizer's state. The search is exhaustive over all of these, and exact over the treatments of blocks. More memory
    never gives a slower plan. Weights, gradients, buffers and random state are as before.

    On a GPU, blocks may also offload their activations to host memory, or recompute and offload their input. The speed
    of these copies is measured. Plans with such blocks are a selection, and ``least_seconds`` bounds what others take.

    Args:
        model: the model, with the parameters to train requiring gradients.
        example: returns the loss, a scalar, of as many rows as its argument says. The rows should be as long as the
            longest of the data.
        batch_size: the rows of a batch. The plan divides it into equal micro-batches, and never changes it.
        device_memory: limit in bytes, or for example "6GiB". On a CPU it limits the resident memory of the whole
            process, and on a GPU the memory that PyTorch's allocator reserves.
        host_memory: limit of host memory for optimizer state and copies of activations, if device and host are not one
            memory. The buffers of these copies may take up to 16 MiB more.
        disk: a folder in which optimizer state may lie, with an optional limit: "DIR" or "DIR=200GiB".
        freedom: what the plan may change. "exact" changes nothing but the order of sums, and stores state in 8 bits
            as the optimizers do by default. "rounding" also allows products in bf16, other state formats and steps
            within backward, which do not know the norm of all gradients. "method" also allows LoRA, with adapters of
            rank 16, and QLoRA, on weights in nf4, for a model that trains all of its weights. These train something
            else, and only time and memory are compared. With less freedom, they are measured only if no plan fits,
            and the message says whether one of them does.
        optimizer: the optimizer: "adamw", "lion", "sgd", "lamb" or "ademamix".
        optimizer_options: further options of the optimizer, such as ``{"weight_rounding": "stochastic"}``.
        fixed: choices that are given, such as ``{"micro_batch": 8, "precision": "fp32"}``; the rest is planned around
            them, and they need no freedom. The names are those of ``TrainingPlan``. The precisions "tf32" and "fp16"
            are planned for only if they are given. Several processes also have ``parallel``, one of the strategies below.
        measure: whether to run the fastest plan, the next best and the plainest for some batches, for about 5 s in all,
            and to take the one that is the fastest; the plainest unless another one is faster by 2 %. Plans whose
            predicted memory is above a budget are never run, nor are plans with adapters, which the model does not have
            yet.
        hardware: "this" machine; or one that is not here, as a profile's name, such as "nvidia-h200", or as a
            ``Machine``. Bytes are measured here, and times are computed from the machine's rates, as those of AdamW for
            each optimizer: expect an error of 30 %. The machine's memory is then the limit of device memory by default,
            nothing else counts as in use on a GPU, and no plan is run. Choices for which the machine has no rate are
            left out, and ``reasons`` says so.
        processes: the number of processes that share the training with ``shoestring.parallelize``. The plan is that of
            each of them: it has an equal part of the batch, and the budgets are its own. The strategy, ``parallel``, is
            the first of "ddp", "zero1", "zero2" and "zero3" that fits and whose step takes at most a tenth longer than
            the fastest one. What is sent takes as long as formulas say; the other reasons have the times of what a
            process computes, and the first one says what a process sends. Steps within backward and other methods take no
            part, and no plan is run. "zero3" takes no part if it cannot split the weights, and offloads no activations.
        link: for several processes, what connects them, such as "10Gbit,50us". ``distributed.measure_link`` measures it.

    Returns:
        The plan. If it was measured, ``seconds`` is the measured time of a batch, and the last of ``reasons`` has the
        times of the others.

    Raises:
        ValueError: an argument does not fit, or no plan fits; the message says the least budgets with which one does.

    Example:
        >>> blocks = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), blocks)
        >>> def example(rows):
        ...     return model(torch.randn(rows, 8)).square().mean()
        >>> plan = shoestring.plan_training(model, example=example, batch_size=8)
        >>> plan.micro_batch * plan.accumulate
        8
        >>> shoestring.plan_training(model, example=example, batch_size=8, hardware="nvidia-h200").machine
        'NVIDIA H200'
    """
    check_module("plan_training", model)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(
            f"plan_training: batch_size: expected a number of rows of at least 1, received {batch_size!r}"
        )
    connection = check_processes(model, batch_size, processes, link)
    if freedom not in ("exact", "rounding", "method"):
        raise InputError(f"plan_training: freedom: expected exact | rounding | method, received {freedom!r}")
    if isinstance(hardware, Machine):
        machine: Machine | None = hardware
    else:
        machine = None if hardware == "this" else hardware_profile(hardware)
    folder, size = disk_budget(disk, machine is None)
    limit = _bytes("device_memory", device_memory)
    if limit is None and machine is not None:
        limit = machine.memory_bytes
    budgets = Budgets(limit, _bytes("host_memory", host_memory), size, folder)
    given = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in (fixed or {}).items()
    }
    options = optimizer_options or {}
    if connection is None:
        check_strategy(given.pop("parallel", None), ("none",))
    else:
        check_strategy(given.get("parallel"), PLANNED)

    def measured(wanted: list[Method]) -> tuple[Json, list[Json]]:
        return situation.measure_situation(
            model, example, batch_size // processes, budgets, optimizer, options, given, machine, wanted
        )

    if connection is not None:
        found, refused = measured([FULL])
        make = functools.partial(situation.OPTIMIZERS[optimizer], **options)
        content = plan_ranks(model, found, freedom, given, make, processes, connection)
        return TrainingPlan(
            content | {"reasons": [*content["reasons"], *tile_reasons(model, limit), *refused]}
        )
    found, refused = measured(methods(model, freedom, given))
    try:
        best = candidates.search(found, freedom, given)
    except candidates.NoPlanError as error:
        freer = [method for method in methods(model, "method", given) if method.freedom == "method"]
        if freedom == "method" or "a plan fits" in str(error) or not freer:
            raise
        with suppress(InputError):
            found["forms"] += measured(freer)[0]["forms"]
        # This raises again, and says whether a plan of another method fits.
        best = candidates.search(found, freedom, given)
    if measure and machine is None:
        kind = functools.partial(situation.OPTIMIZERS[optimizer], **options)
        best = _measured(found, freedom, given, best, model, example, kind)
    refused = [*tile_reasons(model, limit), *refused]
    reasons = best["reasons"]  # the last one is about the whole plan
    return TrainingPlan(best | {"reasons": [*reasons[:-1], *refused, *reasons[-1:]]})


def _measured(
    found: Json,
    freedom: Freedom,
    given: Mapping[str, str],
    best: Json,
    model: nn.Module,
    example: Example,
    kind: situation.MakeOptimizer,
) -> Json:
    """Run the fastest plan, the next best and the plainest in turn; return the one that is the fastest.

    If the process needs more memory than its budget with each of them, the difference counts as memory beside the
    training, and the search begins anew, once. Plans of another method are not run.
    """
    budget = found["device_memory"]
    for again in (True, False):
        if best["adapters"] != "none":
            return _with_reason(best, "not measured: the model has no adapters before the plan is applied")
        second, plain = candidates.others(found, freedom, {**given, "adapters": "none"}, best)
        ranked = {"plain": plain, "the predicted best": best, "the next best": second}
        names = [name for name, one in ranked.items() if one is not None]
        plans = [TrainingPlan(one) for one in ranked.values() if one is not None]
        hindrance = "it would take too long"
        try:
            measured = run_trials(plans, model, example, kind)
        except NotFiniteError as error:
            measured, hindrance = [], str(error).partition("example: ")[2]
        if not measured:
            chosen = _fastest([Measured(one) for one in plans])
            return _with_reason(_as_found(chosen, best, given, "predicted"), f"not measured: {hindrance}")
        within = [one for one in measured if budget is None or one.process_bytes <= budget]
        excess = min(one.process_bytes - one.plan.peak_bytes for one in measured)
        if within or not again or excess <= 0:
            break
        # An allocator may hold more than the tensors need.
        larger = found | {"reserve_bytes": found["reserve_bytes"] + excess}
        try:
            best = candidates.search(larger, freedom, given)
        except ValueError:
            break
        found = larger
    chosen = _fastest(within) if within else min(measured, key=lambda one: one.process_bytes)
    text = "; ".join(
        f"{name} {one.seconds:.3g} s" + ("" if one in within else f" and {one.process_bytes} bytes")
        for name, one in zip(names, measured)  # fewer of them may have run
        if one is not chosen
    )
    said = f"measured: {chosen.seconds:.3g} s{'; ' if text else ''}{text}"
    if chosen not in within:
        said += f"; the process has needed {chosen.process_bytes} bytes, more than the budget"
    return _with_reason(_as_found(chosen, best, given, "measured"), said)


def _fastest(measured: Sequence[Measured]) -> Measured:
    """Return the plan that is the fastest; an earlier one unless a later one is faster by more than the noise."""
    best = measured[0]
    for one in measured[1:]:
        if one.seconds * FASTER < best.seconds:
            best = one
    return best


def _as_found(chosen: Measured, best: Json, given: Mapping[str, str], how: str) -> Json:
    """Return the content of a plan with its time, and with the alternatives of the predicted best plan.

    ``how`` says how its time was found: "measured" or "predicted".
    """
    content = chosen.plan._content
    reasons = content["reasons"]
    if content != best:
        # The search had choices given, or a smaller budget, so what it says of other plans does not hold.
        reasons = [
            reason
            if reason["lever"] in given
            else reason | {"text": f"{reason['text'].partition(': ')[0]}: as {how}"}
            for reason in reasons
            if reason["lever"]
        ]
    least = min(best["least_seconds"], chosen.seconds)
    same = {name: best[name] for name in ("alternatives", "frontier", "freedom")}
    return content | same | {"seconds": chosen.seconds, "least_seconds": least, "reasons": reasons}


def _with_reason(content: Json, text: str) -> Json:
    """Return the content of a plan with one reason more."""
    return content | {"reasons": [*content["reasons"], {"lever": "", "text": text}]}


def _bytes(name: str, budget: int | str | None) -> int | None:
    try:
        return None if budget is None else parse_bytes(budget)
    except ValueError as error:
        raise InputError(f"plan_training: {name}: {error}") from None


def disk_budget(disk: str | None, here: bool) -> tuple[str | None, int | None]:
    """Return the folder and the limit in bytes of "DIR" or "DIR=200GiB"; a limit of 0 without a folder.

    A folder of this machine has to exist, and its free bytes are the most.
    """
    if disk is None:
        return None, 0
    folder, equals, limit = disk.rpartition("=") if "=" in disk else (disk, "", "")
    try:
        size = parse_bytes(limit) if equals else None
        if not folder:
            raise ValueError
    except ValueError:
        raise InputError(
            "plan_training: disk: expected DIR or DIR=LIMIT, such as /fast=200GiB, where a DIR with = in its name needs "
            f"a LIMIT; received {disk!r}"
        ) from None
    if not here:
        return folder, size
    free = situation.free_disk(folder)
    size = free if size is None else size
    if size > free:
        raise InputError(
            f"plan_training: disk: expected at most the {free} bytes that are free in {folder}, received {size}"
        )
    return folder, size
