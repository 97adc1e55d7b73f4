"""Measure what the planner has to know of a model and of this machine."""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.checkpoint.blocks import listed_blocks
from shoestring.checkpoint.costs import ModelCosts, measure_model
from shoestring.checkpoint.measure import GradientsAside, gradients_aside, no_collection
from shoestring.checkpoint.offload import offload_activations
from shoestring.checkpoint.planner import PlanBlock
from shoestring.checkpoint.tiled_layers import tiled_rows
from shoestring.checkpoint.weights import OWNER, OffloadedWeights, bytes_here
from shoestring.core.device import forked_rng, is_asynchronous
from shoestring.core.errors import InputError
from shoestring.core.process_memory import resident_bytes, return_freed
from shoestring.optim import LAMB, SGD, AdamW, AdEMAMix, Lion
from shoestring.optim.base import LowMemoryOptimizer
from shoestring.optim.state_sizes import optimizer_state, total
from shoestring.planning.machine import Link, Machine
from shoestring.planning.measure import (
    ELEMENTS,
    Probe,
    copy_rate,
    known_machine,
    machine_identity,
    measure_copies,
    optimizer_step,
    rates_of,
    run_probes,
)
from shoestring.planning.methods import FULL, Method, Weights, with_method
from shoestring.planning.predicted_pass import PassSeconds, predict_pass
from shoestring.planning.shortened import structure, with_few_blocks

Json = dict[str, Any]
Entry = tuple[
    int, list[PlanBlock], list[PlanBlock]
]  # the rows of a pass, and MeasuredPass::freed and kept of C++
Example = Callable[[int], Tensor]
MakeOptimizer = Callable[..., LowMemoryOptimizer]

OPTIMIZERS: dict[str, type[LowMemoryOptimizer]] = {
    "adamw": AdamW, "lion": Lion, "sgd": SGD, "lamb": LAMB, "ademamix": AdEMAMix,
}  # fmt: skip
# State formats, with the freedom that each needs. 8-bit state is the default of the optimizers.
STATES = {"8bit": "exact", "fp32": "exact", "bf16": "rounding", "4bit": "rounding"}
FREEDOMS = ("exact", "rounding", "method")  # each allows what those before it do
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
WEIGHTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # the precisions that autocast computes
# With offload to a disk, 4 chunks of state of at least 8 MiB are in memory.
SLOT_BYTES = 4 * (8 << 20)
# Bytes that a process on a CPU needs beside its steps: for batches that are read ahead, validation, files of
# checkpoints, and the rounding of its allocator to huge pages of 2 MiB.
BESIDE_STEPS = 16 << 20
LARGEST = 2**52  # bytes in a plan
LONGEST_PASS = 1.0  # seconds; passes of more rows are computed from those that were measured
# The same in floating-point operations, for a plan for a machine that is not here, which must not depend on the speed
# of this machine. CPUs take 0.1 to 5 s for them.
LARGEST_PASS = 2 * 10**10


@dataclass(frozen=True)
class Budgets:
    """Limits in bytes; None for no limit. ``folder`` is where files of offloaded state may lie."""

    device_memory: int | None
    host_memory: int | None
    disk: int | None
    folder: str | None


def digest(model: nn.Module) -> str:
    """Return a text that is the same for models with equal names, shapes, dtypes and trained parameters."""
    lines = [
        f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}"
        for name, p in (*model.named_parameters(), *model.named_buffers())
    ]
    return f"{type(model).__name__}-{hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:16]}"


def measure_situation(
    model: nn.Module,
    example: Example,
    batch_size: int,
    budgets: Budgets,
    optimizer: str,
    options: Mapping[str, Any],
    given: Mapping[str, str],
    machine: Machine | None = None,
    wanted: Sequence[Method] = (FULL,),
) -> tuple[Json, list[Json]]:
    """Measure a model's passes in each precision and of each method, and the optimizer's steps.

    Args:
        options: options of the optimizer.
        given: choices that are given. They need no freedom, and the others of their kind are not measured.
        machine: if given, bytes are measured here, and times are those of the machine.
        wanted: the methods. One that needs freedom is left out if the model does not go with it.

    Returns:
        A situation for the C++ planner, and a reason for each choice that is left out, for example since the machine
        has no rate for it.

    Raises:
        ValueError: the blocks or the example do not fit.
    """
    modules = listed_blocks(model)
    if not modules:
        raise InputError(
            "plan_training: blocks: found no list of modules of one class; expected a model with two or more blocks in an "
            f"nn.ModuleList or nn.Sequential, received {type(model).__name__}"
        )
    params = [p for p in model.parameters() if p.requires_grad]
    if not params:
        raise InputError("plan_training: model: expected parameters that require gradients, received none")
    device = params[0].device
    kind = OPTIMIZERS.get(optimizer)
    if kind is None:
        raise InputError(
            f"plan_training: optimizer: expected {' | '.join(OPTIMIZERS)}, received {str(optimizer)[:40]}"
        )
    forms: list[Json] = []
    refused: list[Json] = []
    link = _link(device, machine, refused)
    asked = _Asked(
        model,
        modules,
        params,
        example,
        batch_size,
        budgets,
        functools.partial(kind, **options),
        given,
        machine,
        link,
    )
    here = machine is None or machine.device == device.type
    with no_collection():
        for method in wanted:
            try:
                forms += _forms(asked, method, refused)
            except (RuntimeError, TypeError, ValueError) as error:
                if method.adapters == "none":
                    raise
                # The model has no layers for adapters, or does not run with them.
                reason = str(error).partition("\n")[0]
                if method.freedom == "exact":
                    raise InputError(f"plan_training: fixed: {method.lever}: {reason}") from None
                text = f"{getattr(method, method.lever)} is left out: {reason}"
                refused.append({"lever": method.lever, "text": text})
    if not forms:
        missing = "; ".join(reason["text"] for reason in refused)
        raise InputError(
            f"plan_training: hardware: expected rates of a precision and of an optimizer's step, but {missing}"
        )
    gc.collect()
    situation = {
        "model": digest(model),
        "machine": ", ".join(machine_identity(device).values()) if machine is None else machine.name,
        "blocks": list(modules),
        "workspaces": [],
        "batch_size": batch_size,
        "device_memory": budgets.device_memory,
        "host_memory": budgets.host_memory,
        "disk": budgets.disk,
        "host_is_device": (device.type if machine is None else machine.device) == "cpu",
        "reserve_bytes": _reserve(model, device) if here else 0,
        **asdict(link or Link(0.0, 0.0, 0.0)),
        "prefetch": 1,
        "forms": forms,
    }
    return situation, [reason for i, reason in enumerate(refused) if reason not in refused[:i]]


@dataclass(frozen=True)
class _Asked:
    """The training that is planned: the arguments of measure_situation, with the blocks and the trained parameters."""

    model: nn.Module
    blocks: Mapping[str, nn.Module]
    params: list[nn.Parameter]
    example: Example
    batch_size: int
    budgets: Budgets
    make: MakeOptimizer
    given: Mapping[str, str]
    machine: Machine | None
    link: Link | None

    @property
    def device(self) -> torch.device:
        return self.params[0].device


def _forms(asked: _Asked, method: Method, refused: list[Json]) -> list[Json]:
    """Measure a method in each precision, with its optimizers; none if the machine lacks a rate, as `refused` then says."""
    # Adapters change the structure of the blocks that have them.
    structures = {block: structure(block) for block in asked.blocks.values()}
    whole, place, dtype = Weights.of(asked.model), _place(asked.model), asked.params[0].dtype
    forms = []
    for precision, context, freedom in _precisions(asked.params, asked.device, asked.given):
        if asked.machine is not None and asked.machine.gemm_flops.get(precision, 0.0) is None:
            refused.append(_refusal(asked.machine, "precision", precision, f"gemm_flops.{precision}"))
            continue
        measure = functools.partial(_measure_method, asked, method, structures, whole, context)
        passes, weights, kinds = with_few_blocks(asked.model, asked.blocks, measure)
        forms.append(
            {
                "precision": precision,
                "weights": WEIGHTS[dtype],
                "adapters": method.adapters,
                "quantize": method.quantize,
                "freedom": max(freedom, method.freedom, key=FREEDOMS.index),
                "gradient_bytes": sum(p.numel() * p.element_size() for p in weights.trained),
                "load_bytes": weights.freed if method.quantize != "none" else 0,
                "saving_bytes": 0,
                "kinds": kinds,
                "passes": passes,
                "places": [place | {"device_bytes": weights.bytes}],
            }
        )
    if forms:
        ways = list(_optimizer_ways(asked, weights.trained, refused))
        for form in forms:
            form["optimizers"] = ways
        forms = forms if ways else []
    return forms


def _measure_method(
    asked: _Asked,
    method: Method,
    structures: Mapping[nn.Module, Any],
    whole: Weights,
    context: Callable[[], AbstractContextManager[Any]],
    run: list[nn.Module],
) -> tuple[list[Json], Weights, list[int]]:
    """Measure passes of some of the model's blocks with a method.

    Args:
        structures: the blocks of the model with their structures, without adapters.
        whole: the weights of the model, without adapters.
        context: returns the context of a forward in the precision.
        run: the blocks that run.

    Returns:
        The passes for the C++ planner, the weights of the whole model with the method, and the kinds of its blocks.
    """
    model = asked.model
    with (
        nullcontext() if method.adapters == "none" else with_method(model, method),
        gradients_aside(model) as aside,
    ):
        passes = _passes(asked, run, context, aside)
        if method.adapters != "none":
            like = {structures[block]: block for block in run}
            whole = Weights.of(model, [like[key] for block, key in structures.items() if block not in run])
        return _entries(passes), whole, [0, *(2 + kind for kind in _kinds(passes[0].costs, structures)), 1]


def _refusal(machine: Machine, lever: str, value: str, rate: str) -> Json:
    """Return the reason for which a choice is not planned for."""
    why = machine.not_measured.get(rate, "it was not measured")
    return {"lever": lever, "text": f"{value} is left out: {machine.name} has no rate {rate}, since {why}"}


def _link(device: torch.device, machine: Machine | None, refused: list[Json]) -> Link | None:
    """Return the speed of copies of activations to the host; None on a CPU, whose memory is that of the host."""
    if (device.type if machine is None else machine.device) == "cpu":
        return None
    if machine is None:
        known = known_machine(device)
        return measure_copies(device, None) if known is None or known.link is None else known.link
    if machine.link is None:
        refused.append(_refusal(machine, "activations", "offload", "link"))
    return machine.link


def _reserve(model: nn.Module, device: torch.device) -> int:
    """Return the memory in use beside the weights: of the process on a CPU, else of the allocator.

    Training uses freed memory again that the C library holds, so this memory is returned to the system before.
    """
    return_freed()
    weights = bytes_here(model)
    if is_asynchronous(device):
        torch.accelerator.empty_cache()
        used = torch.accelerator.memory_reserved(device)
    else:
        used = resident_bytes() + BESIDE_STEPS
    return max(0, used - weights)


def autocast(precision: str, device_type: str) -> AbstractContextManager[Any]:
    """Return the context of a forward with products in this precision.

    The cache of autocast is off, since it would hold a 16-bit copy of each weight until the end of forward.
    """
    if precision not in AUTOCAST:
        return nullcontext()
    return torch.autocast(device_type, AUTOCAST[precision], cache_enabled=False)


def _precisions(
    params: list[nn.Parameter], device: torch.device, given: Mapping[str, str]
) -> Iterator[tuple[str, Callable[[], AbstractContextManager[Any]], str]]:
    """Yield the precisions to plan for, each with a context of its forward and the freedom that it needs."""
    chosen = given.get("precision")
    if chosen in PRECISIONS:
        yield chosen, lambda: autocast(chosen, device.type), "exact"
        return
    if any(p.dtype != torch.float32 for p in params):
        # The weights decide, so nothing is left to choose.
        yield "as the weights", nullcontext, "exact"
        return
    for precision, freedom in (("fp32", "exact"), ("bf16", "rounding")):
        yield precision, lambda precision=precision: autocast(precision, device.type), freedom  # type: ignore[misc]


@dataclass
class Pass:
    """Costs of a step with so many rows, and its times on another machine."""

    rows: int
    costs: ModelCosts
    seconds: PassSeconds | None


def _passes(
    asked: _Asked,
    blocks: list[nn.Module],
    context: Callable[[], AbstractContextManager[Any]],
    aside: GradientsAside,
) -> list[Pass]:
    """Measure passes of one row, and of as many rows as are quick and fit into the budget.

    With a machine, the rows are the same wherever the passes run.
    """
    model, machine, device, batch_size = asked.model, asked.machine, asked.device, asked.batch_size
    room = _room(asked)
    offload = None if asked.link is None else offload_activations(device=device, exclude=model)

    def measured(rows: int, runs: int) -> Pass:
        def step() -> Tensor:
            with context():
                return asked.example(rows)

        try:
            costs = measure_model(
                "plan_training", model, blocks, step, device, offload, runs=runs, aside=aside, room=room
            )
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise InputError(
                "plan_training: model: expected blocks that run in forward alone, received some that backward runs again; "
                "switch off the model's own activation checkpointing"
            ) from None
        seconds = None if machine is None else predict_pass(model, costs, step, machine, device)
        costs.step.calls.clear()
        return Pass(rows, costs, seconds)

    began = time.perf_counter()
    first = measured(1, 2)
    passes = [first]
    took = time.perf_counter() - began
    if first.seconds is None:
        seconds = sum(block.forward_seconds + block.backward_seconds for block in first.costs.row())
        longest = LONGEST_PASS / max(seconds, took / 8)
    else:
        longest = LARGEST_PASS / max(1, first.seconds.flops)
    most = 1
    while most * 2 <= min(batch_size, longest):
        most *= 2
    plain = sum(block.choices[0].bytes for block in first.costs.row())
    while room is not None and most > 1 and most * plain > room:
        most //= 2
    if most > 1 or batch_size > 1:
        passes.append(measured(max(2, most), 3))
        if all(
            small.choices[0].bytes == large.choices[0].bytes
            for small, large in zip(first.costs.row(), passes[1].costs.row(), strict=True)
        ):
            raise InputError(
                "plan_training: example: expected the loss of as many rows as its argument says, received one whose "
                f"activations for 1 and {passes[1].rows} rows have the same size"
            )
    return passes


def _room(asked: _Asked) -> int | None:
    """Return the bytes that the activations of a measured pass may take, or None for no limit."""
    device, device_memory, machine = asked.device, asked.budgets.device_memory, asked.machine
    if device_memory is None or not (machine is None or machine.device == device.type):
        return None
    used = resident_bytes() if not is_asynchronous(device) else torch.accelerator.memory_allocated(device)
    gradients = sum(p.numel() * p.element_size() for p in asked.params)
    return max(0, int(0.7 * (device_memory - used - gradients)))


def _entries(passes: list[Pass]) -> list[Json]:
    """Return passes as the C++ planner reads them."""
    entries = []
    names: list[list[str]] = []
    for one in passes:
        gradients = _gradients_of_kinds(one.costs)
        if one.seconds is None:
            freed, kept = one.costs.in_whole_steps().planned(gradients)
        else:
            freed, kept = (one.seconds.replaced(one.costs, found) for found in one.costs.planned(gradients))
        entries.append((one.rows, freed, kept))
        names.append([choice.name for block in freed for choice in block.choices])
    if any(each != names[0] for each in names):
        entries = _common(entries)
    return [
        {"rows": rows, "freed": [asdict(block) for block in freed], "kept": [asdict(block) for block in kept]}
        for rows, freed, kept in _rising(entries)
    ]


def _place(model: nn.Module) -> Json:
    """Return where the weights of a model are, which the plan does not change."""
    place, keep, host, seconds = "none", 0, 0, 0.0
    if hasattr(model, OWNER):
        handle = OffloadedWeights.of(model)
        # Forward reads the weights, and backward reads them again. They lie on the disk already, so that its free
        # space does not have them.
        place, keep, host = handle.place, min(handle.keep, LARGEST), handle.statistics()["host"]
        seconds = 2 * handle.read_seconds()
    return {
        "place": place, "keep": keep, "tiles": tiled_rows(model), "device_bytes": bytes_here(model), "host_bytes": host,
        "disk_bytes": 0, "seconds": seconds,
    }  # fmt: skip


def _kinds(costs: ModelCosts, structures: Mapping[nn.Module, Any]) -> list[int]:
    """Return the kind of each block, by its place in ``costs.kinds``; a block that did not run is like one that did."""
    measured: dict[Any, list[int]] = {}
    for module, kind in zip(costs.step.modules, costs.step.kinds, strict=True):
        measured.setdefault(structures[module], []).append(costs.kinds.index(kind))
    # The kinds of blocks of one structure in the order of their calls; the last one is that of all others.
    left = {key: iter(kinds) for key, kinds in measured.items()}
    return [next(left[key], measured[key][-1]) for key in structures.values()]


def _gradients_of_kinds(costs: ModelCosts) -> dict[Any, int]:
    """Return the bytes of the gradients of a block, by its kind."""
    found: dict[Any, int] = {}
    for module, kind in zip(costs.step.modules, costs.step.kinds, strict=True):
        found[kind] = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    return found


def _common(
    entries: list[Entry],
) -> list[Entry]:
    """Leave out the treatments that only some passes have, since a treatment that gains nothing is dropped."""
    shared = [
        set.intersection(*({choice.name for choice in freed[k].choices} for _, freed, _ in entries))
        for k in range(len(entries[0][1]))
    ]

    def only(blocks: list[PlanBlock]) -> list[PlanBlock]:
        return [
            replace(block, choices=[c for c in block.choices if c.name in shared[k]])
            for k, block in enumerate(blocks)
        ]

    return [(rows, only(freed), only(kept)) for rows, freed, kept in entries]


def _rising(entries: list[Entry]) -> list[Entry]:
    """Lower times of passes that a pass of more rows does not reach.

    Times of other micro-batches are computed from those of two passes. A pass that was delayed would make them fall.
    """

    def lowered(blocks: list[PlanBlock], larger: list[PlanBlock]) -> list[PlanBlock]:
        return [
            replace(
                one,
                forward_seconds=min(one.forward_seconds, other.forward_seconds),
                backward_seconds=min(one.backward_seconds, other.backward_seconds),
            )
            for one, other in zip(blocks, larger, strict=True)
        ]

    *smaller, (rows, freed, kept) = entries
    return [
        *((few, lowered(one, freed), lowered(other, kept)) for few, one, other in smaller),
        (rows, freed, kept),
    ]


def _optimizer_ways(asked: _Asked, params: list[nn.Parameter], refused: list[Json]) -> Iterator[Json]:
    """Yield the ways to store and run the optimizer, with their bytes and times; add those without a rate to `refused`."""
    make, budgets, given, machine = asked.make, asked.budgets, asked.given, asked.machine
    chosen = given.get("optimizer_state")
    elements = sum(p.numel() for p in params)
    shapes = [nn.Parameter(torch.empty_like(p, device="meta")) for p in params]
    # A micro-batch after the first reads its gradients, and reads and writes the sums, which are fp32 with steps in backward.
    gradients = sum(p.nbytes for p in params)
    moved_by_sums = {False: 3 * gradients, True: gradients + 8 * elements}
    rate = copy_rate(params[0].device, machine)
    places: list[tuple[str, str | None]] = [("none", None)]
    if budgets.folder is not None:
        places.append((f"nvme:{budgets.folder}", f"nvme:{budgets.folder}"))
    for state, freedom in STATES.items():
        if chosen in STATES:
            if state != chosen:
                continue
            freedom = "exact"
        found = optimizer_state(make(shapes, state_format=state))
        arenas = sum(total(*(arena.bytes() for arena in found.arenas)).values())
        rest = sum(found.rest.values())
        for name, place in places:
            away = place is not None
            if machine is None:
                seconds = _step_seconds(make, params, state, place) * elements
            else:
                found_seconds = _seconds_on(machine, params, state, budgets.folder if away else None, arenas)
                if isinstance(found_seconds, dict):
                    refused.append(found_seconds)
                    continue
                seconds = found_seconds
            for in_backward in (False, True):
                yield {
                    "state": state,
                    "step_in_backward": in_backward,
                    "offload": name,
                    "freedom": "rounding"
                    if in_backward and given.get("step_in_backward") != "true"
                    else freedom,
                    "device_bytes": rest if away else arenas + rest,
                    "host_bytes": min(arenas, SLOT_BYTES) if away else 0,
                    "disk_bytes": arenas if away else 0,
                    "step_bytes": 0,
                    "gradient_bytes": 0,  # the passes that free gradients were measured with each of them
                    "sum_bytes": 4 * elements if in_backward else 0,
                    "seconds": 0.0 if in_backward else seconds,
                    "backward_seconds": seconds if in_backward else 0.0,
                    "sum_seconds": moved_by_sums[in_backward] / rate,
                }


def _step_seconds(make: MakeOptimizer, params: list[nn.Parameter], state: str, place: str | None) -> float:
    """Return the seconds of an optimizer step for each element, measured on some elements here."""
    device, dtype = params[0].device, params[0].dtype
    elements = min(ELEMENTS, sum(p.numel() for p in params))
    is_adamw = getattr(make, "func", make) is AdamW
    machine = known_machine(device) if is_adamw and place is None and elements == ELEMENTS else None
    known = None if machine is None else machine.optimizer_seconds["nearest"][state]
    if known is not None and dtype == torch.float32:
        return known
    options = {"state_format": state, "offload": place}
    probe = Probe("step", lambda: optimizer_step(make, device, dtype, elements, **options), elements)
    with forked_rng():
        run_probes([probe], device, float("inf"), time.perf_counter)
    return 1 / rates_of([probe])["step"]


def _seconds_on(
    machine: Machine, params: list[nn.Parameter], state: str, folder: str | None, moved: int
) -> float | Json:
    """Return the seconds of a step of AdamW on a machine, or the reason for which they are not known.

    Args:
        machine: the rates.
        params: the trained parameters.
        state: the format of the state.
        folder: where the state lies, or None for the memory of the device.
        moved: bytes of the state, which a step reads and writes.
    """
    rounding = "nearest" if params[0].dtype == torch.float32 else "stochastic"
    rate = machine.optimizer_seconds[rounding][state]
    if rate is None:
        return _refusal(machine, "optimizer_state", state, f"optimizer_seconds.{rounding}.{state}")
    seconds = rate * sum(p.numel() for p in params)
    if folder is None:
        return seconds
    link = machine.disks.get(os.path.realpath(folder)) or machine.disks.get(folder)
    if link is None:
        return _refusal(machine, "offload", f"nvme:{folder}", f"disks[{folder!r}]")
    return max(seconds, moved / link.in_bytes_per_second, moved / link.out_bytes_per_second)


def free_disk(folder: str) -> int:
    """Return the bytes that are free on the disk of a folder in which files can be made; leave no file there."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            status = os.statvfs(folder)
    except OSError as error:
        raise InputError(
            f"plan_training: disk: {folder}: {error.strerror}; name an existing folder in which files can be made"
        ) from None
    return status.f_bavail * status.f_frsize
