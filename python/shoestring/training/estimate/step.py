"""Estimate a training step's memory on device, host and disk, and the bytes moved between them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import nn

from shoestring.core.errors import InputError
from shoestring.optim import state_sizes
from shoestring.optim.offload import BUCKET_BYTES
from shoestring.optim.state_sizes import State
from shoestring.training import memory
from shoestring.training.estimate import formulas
from shoestring.training.estimate.config import EstimateConfig
from shoestring.training.estimate.weights import away_blocks, away_tables, offloaded_weights
from shoestring.training.optimizers import Own, build, described, trained

# csrc/offload splits optimizer state into chunks of about CHUNK_BYTES bytes; a larger parameter may form one
# chunk. At most SLOTS chunks are on the device at once.
CHUNK_BYTES, SLOTS = 8 << 20, 4
HOST_ALIGNMENT = 64  # alignment in bytes of each parameter's copy in host memory


@dataclass(frozen=True)
class Item:
    """One entry of the memory estimate, such as "weights"; ``bytes`` is None if there is no formula."""

    name: str
    bytes: int | None
    note: str


@dataclass
class Estimate:
    """The estimated memory and traffic of one training step.

    Args:
        parameters: number of elements of all parameters.
        trained: number of elements of the trained parameters.
        memory: dict from the location ("device", "host" or "disk") to its items.
        traffic: bytes per step by direction, such as "host to device".
    """

    parameters: int
    trained: int
    memory: dict[str, list[Item]] = field(default_factory=lambda: {"device": [], "host": [], "disk": []})
    traffic: dict[str, int] = field(default_factory=dict)

    def add(self, place: str, name: str, size: int | None, note: str) -> None:
        """Add an item to the memory of a location, unless its size is zero."""
        if size != 0:
            self.memory[place].append(Item(name, size, note))

    def move(self, direction: str, size: int) -> None:
        """Add bytes to the traffic of a step in one direction, such as "host to device"."""
        if size:
            self.traffic[direction] = self.traffic.get(direction, 0) + size

    def totals(self) -> dict[str, int]:
        """Return for each location (device, host, disk) the sum of all known sizes, in bytes."""
        return {place: sum(item.bytes or 0 for item in items) for place, items in self.memory.items()}


def optimizers_of(model: nn.Module, config: EstimateConfig) -> list[Own]:
    """Build the optimizers of a run. They allocate no state before their first step."""
    return [build(kind, groups, options, config) for kind, groups, options in described(model, config)]


def estimate(model: nn.Module, config: EstimateConfig) -> Estimate:
    """Estimate the memory and traffic of one training step of ``model``, which may be on the meta device.

    ``config.device`` is a type of devices, such as "cuda". On the "cpu", device memory is host memory, and a
    chunk of optimizer state may end inside a parameter.

    Raises:
        InputError: the memory budget is too small even if all blocks are recomputed, or --offload-weights needs
            blocks that the model does not have.
    """
    params = trained(model)
    found = Estimate(sum(p.numel() for p in model.parameters()), sum(p.numel() for p in params))
    on_host = config.place == "cpu"
    states = [state_sizes.optimizer_state(optimizer) for optimizer in optimizers_of(model, config)]
    leaves = config.weights_place is not None
    blocks, tables = (away_blocks(model, config), away_tables(model)) if leaves else ([], [])
    away = sum(block.weights for block in blocks) + sum(table.weights for table in tables)
    note = "parameters, scales and buffers" + ", of what stays" * (away > 0)
    found.add("device", "weights", memory.weight_bytes(model) - away, note)
    _gradients(found, params, config)
    add_state(found, config, states)
    if config.accumulate > 1 and config.step_in_backward:
        sums = sum(sum(arena.blocks) for state in states for arena in state.arenas) * 256 * 4
        found.add("host" if on_host else "device", "sums of gradients", sums, "fp32, over micro-batches")
    add_activations(found, model, config)
    if away:
        offloaded_weights(found, blocks, tables, config)
    return found


def _gradients(found: Estimate, trained: list[nn.Parameter], config: EstimateConfig) -> None:
    sizes = [formulas.tensor_bytes([p]) for p in trained]
    whole, largest = sum(sizes), max(sizes, default=0)
    on_host = config.place == "cpu"
    if not config.step_in_backward:
        found.add("device", "gradients", whole, "")
    elif on_host:
        found.add(
            "device",
            "gradients",
            min(whole, max(largest, BUCKET_BYTES)),
            "of a bucket, until it is on the host",
        )
    else:
        found.add(
            "device", "gradients", largest, "of the largest parameter: each is freed once it has been used"
        )
    if on_host:
        copies = sum(-(-size // HOST_ALIGNMENT) * HOST_ALIGNMENT for size in sizes)
        note = "page-locked" if config.device != "cpu" else "ordinary memory"
        found.add("host", "weights", copies, f"a copy of those that are trained, {note}")
        found.add("host", "gradients", copies, note)
        passes = config.accumulate if config.step_in_backward else 1
        found.move("device to host", whole * passes)
        found.move("host to device", whole)


def add_state(found: Estimate, config: EstimateConfig, states: list[State], own: str = "device") -> None:
    """Add the optimizer's state to the estimate; with ``--offload stream`` or ``nvme:DIR``, its buffers and traffic, too.

    Args:
        states: the state of each optimizer, or of the part that a process steps. State outside of arenas is not
            offloaded.
        own: the place of what is stepped, "device" or "host", where state is without ``--offload``.
    """
    if config.place in (None, "cpu"):
        own, note = (own, "") if config.place is None else ("host", "ordinary memory")
        for name, size in state_sizes.total(*(state.bytes() for state in states)).items():
            found.add(own, f"state: {name}", size, note)
        return
    discrete = own == "device" and config.device != "cpu"
    disk = config.place != "stream"
    place = "disk" if disk else "host"
    note = "a file without a name" if disk else "page-locked"
    kept: list[dict[str, int]] = []
    slots: list[int] = []
    for arena in (arena for state in states for arena in state.arenas):
        splits = arena.core.takes_parts() and not discrete
        edges = torch.ops.shoestring._chunk_edges(arena.per_block, arena.blocks, splits)
        largest = max(b - a for a, b in itertools.pairwise(edges))
        kept.append(arena.bytes(edges[-1]))
        slots.append(min(SLOTS, len(edges) - 1) * largest * arena.per_block)
    sizes = state_sizes.total(*kept)
    for name, size in sizes.items():
        found.add(place, f"state: {name}", size, note)
    for name, size in state_sizes.total(*(state.rest for state in states)).items():
        found.add("device", f"state: {name}", size, "")
    size = sum(slots) if config.step_in_backward else max(slots, default=0)
    note = f"{SLOTS} chunks of state of {CHUNK_BYTES >> 20} MiB or a parameter"
    if discrete:
        found.add("device", "slots", size, note)
    if disk or not discrete:
        found.add("host", "slots", size, note + (", page-locked" if discrete else ""))
    moved = sum(sizes.values())
    if disk:
        found.move("disk read", moved)
        found.move("disk written", moved)
    if discrete or not disk:
        found.move("host to device", moved)
        found.move("device to host", moved)


def add_activations(found: Estimate, model: nn.Module, config: EstimateConfig) -> None:
    """Add what a forward saves for backward, and the workspace of the loss."""

    def formula(gradient_checkpointing: bool) -> formulas.Activations | None:
        return formulas.activations(
            model, config.batch_size * config.seq_len, baseline=False, gradient_checkpointing=gradient_checkpointing,
            size=config.activation_bytes,
        )  # fmt: skip

    budget = memory.parse_budget(config.memory_budget)
    known, least = formula(config.activations == "recompute"), formula(True)
    if known is None or least is None:
        found.add("device", "activations", None, "not known for this architecture")
    elif budget is not None and budget < least.bytes + least.block:
        raise InputError(
            f"--memory-budget {budget}: expected at least {least.bytes + least.block} bytes, the inputs "
            "of all blocks and one block at a time; take a smaller --batch-size or --seq-len"
        )
    elif budget is not None and budget < known.bytes:
        found.add("device", "activations", budget, "the budget: some blocks are computed again")
    else:
        found.add("device", "activations", known.bytes, known.formula)
        if config.activations == "recompute":
            found.add(
                "device", "a block computed again", known.block, "what backward needs of one block at a time"
            )
    found.add("device", "loss workspace", config.workspace_mb << 20, "a chunk of logits")
