"""What a training step is going to hold on the device, on the host and on a disk, and what moves between them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shoestring.core.errors import InputError
from shoestring.optim import CAME, LAMB, SGD, Adafactor, AdamW, AdEMAMix, Lion, Muon, ScheduleFreeAdamW
from shoestring.optim.base import LowMemoryOptimizer
from shoestring.optim.host import BUCKET_BYTES
from shoestring.training import formulas, memory
from shoestring.training.formulas import State, StateArena

OPTIMIZERS: dict[str, type[LowMemoryOptimizer]] = {
    "adamw": AdamW,
    "lion": Lion,
    "sgd": SGD,
    "ademamix": AdEMAMix,
    "schedule-free-adamw": ScheduleFreeAdamW,
    "lamb": LAMB,
    "adafactor": Adafactor,
    "came": CAME,
    "muon": Muon,  # of matrices of hidden layers; AdamW of the others
}

# How csrc/offload divides state: chunks of so many bytes at least, which begin at multiples of so many blocks; and how
# many of them are on the device.
CHUNK_BYTES, CHUNK_EDGE, SLOTS = 8 << 20, 1024, 4
HOST_ALIGNMENT = 64  # bytes, of each parameter's copy in host memory


@dataclass(frozen=True)
class Options:
    """What decides it beside the model, whose parameters that require gradients are trained.

    device: "cuda", or "cpu", where "device" is ordinary memory, too, and chunks may end within a parameter.
    """

    optimizer: str = "adamw"
    state: str = "8bit"
    weights: str = "plain"
    offload: str | None = None
    device: str = "cuda"
    batch_size: int = 1
    seq_len: int = 2048
    activation_bytes: int = 2  # of an element
    accumulate: int = 1
    step_in_backward: bool = False
    gradient_checkpointing: bool = False
    memory_budget: int | None = None  # bytes of activations
    workspace_mb: int = 64


@dataclass(frozen=True)
class Item:
    """Something that takes memory; bytes is None where there is no formula."""

    name: str
    bytes: int | None
    note: str


@dataclass
class Estimate:
    """memory: items by "device", "host" and "disk". traffic: bytes of a step, by what moves where."""

    parameters: int
    trained: int
    memory: dict[str, list[Item]] = field(default_factory=lambda: {"device": [], "host": [], "disk": []})
    traffic: dict[str, int] = field(default_factory=dict)

    def add(self, place: str, name: str, size: int | None, note: str) -> None:
        """Adds an item, if it takes anything."""
        if size != 0:
            self.memory[place].append(Item(name, size, note))

    def totals(self) -> dict[str, int]:
        """Bytes by place, of what has a formula."""
        return {place: sum(item.bytes or 0 for item in items) for place, items in self.memory.items()}


def make_optimizers(model: nn.Module, options: Options) -> list[LowMemoryOptimizer]:
    """Those that step the model's trained parameters; nothing is allocated but on the parameters' device."""
    own: dict[str, Any] = {"state": options.state, "weights": options.weights}
    trained = formulas.trained(model)
    if options.optimizer != "muon":
        return [OPTIMIZERS[options.optimizer](trained, **own)]
    ends = [module.weight for module in _embeddings(model)]
    matrices = [p for p in trained if p.ndim == 2 and not any(p is end for end in ends)]
    others = [p for p in trained if not any(p is matrix for matrix in matrices)]
    both = [(Muon, matrices), (AdamW, others)]
    return [kind(params, **own) for kind, params in both if params]


def _embeddings(model: Any) -> list[Any]:
    found = [
        getattr(model, name, lambda: None)() for name in ("get_input_embeddings", "get_output_embeddings")
    ]
    return [module for module in found if module is not None]


def chunk_edges(blocks: list[int], per_block: int, splits: bool) -> list[int]:
    """Where the chunks of offloaded state begin and end, in blocks of 256 elements (csrc/offload/state.cpp).

    blocks: of each parameter. per_block: bytes. splits: whether a chunk may end within a parameter.
    """

    def up(n: int) -> int:
        return -(-n // CHUNK_EDGE) * CHUNK_EDGE

    most = up(max(CHUNK_BYTES // max(per_block, 1), 1))
    edges, total = [0], 0
    for count in blocks:
        if not splits and count > 0 and edges[-1] < total and edges[-1] + most < total + count:
            total = up(total)
            edges.append(total)
        total += count
        while splits and edges[-1] + most < total:
            edges.append(edges[-1] + most)
    total = max(up(total), CHUNK_EDGE)
    return [*edges, total] if total > edges[-1] else edges


def estimate(model: nn.Module, options: Options) -> Estimate:
    """Of a model, which may lie on the meta device.

    Raises:
        InputError: a memory budget that no plan can keep.
    """
    trained = formulas.trained(model)
    found = Estimate(_elements(model), sum(p.numel() for p in trained))
    on_host = options.offload == "cpu"
    states = [formulas.optimizer_state(optimizer) for optimizer in make_optimizers(model, options)]
    arenas = [arena for state in states for arena in state.arenas]
    found.add("device", "weights", memory.weight_bytes(model), "parameters, scales and buffers")
    _gradients(found, arenas, options)
    if options.offload is None or on_host:
        for name, size in formulas.total(*(state.bytes() for state in states)).items():
            found.add(
                "host" if on_host else "device", f"state: {name}", size, "ordinary memory" if on_host else ""
            )
    else:
        _offloaded(found, states, arenas, options)
    if options.accumulate > 1:
        sums = sum(sum(arena.blocks) for arena in arenas) * 256 * 4
        found.add("host" if on_host else "device", "sums of gradients", sums, "fp32, over micro-batches")
    _activations(found, model, options)
    return found


def _elements(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _gradients(found: Estimate, arenas: list[StateArena], options: Options) -> None:
    whole = sum(sum(arena.weights) for arena in arenas)
    largest = max((size for arena in arenas for size in arena.weights), default=0)
    on_host = options.offload == "cpu"
    if not options.step_in_backward:
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
        copies = sum(
            -(-size // HOST_ALIGNMENT) * HOST_ALIGNMENT for arena in arenas for size in arena.weights
        )
        note = "page-locked" if options.device == "cuda" else "ordinary memory"
        found.add("host", "weights", copies, f"a copy of those that are trained, {note}")
        found.add("host", "gradients", copies, note)
        found.traffic = {"device to host": whole * options.accumulate, "host to device": whole}


def _offloaded(found: Estimate, states: list[State], arenas: list[StateArena], options: Options) -> None:
    """State that is streamed: where it lies, and the chunks of it that are on their way."""
    disk, cuda = options.offload != "stream", options.device == "cuda"
    place = "disk" if disk else "host"
    note = "a file without a name" if disk else "page-locked"
    kept: list[dict[str, int]] = []
    slots: list[int] = []
    for arena in arenas:
        edges = chunk_edges(arena.blocks, arena.per_block, arena.splits and not cuda)
        largest = max(b - a for a, b in itertools.pairwise(edges))
        kept.append(arena.bytes(edges[-1]))
        slots.append(min(SLOTS, len(edges) - 1) * largest * arena.per_block)
    sizes = formulas.total(*kept)
    for name, size in sizes.items():
        found.add(place, f"state: {name}", size, note)
    for name, size in formulas.total(*(state.rest for state in states)).items():
        found.add("device", f"state: {name}", size, "")
    size = sum(slots) if options.step_in_backward else max(slots, default=0)
    note = f"{SLOTS} chunks of state of {CHUNK_BYTES >> 20} MiB or a parameter"
    if cuda:
        found.add("device", "slots", size, note)
    if disk or not cuda:
        found.add("host", "slots", size, note + (", page-locked" if cuda else ""))
    moved = sum(sizes.values())
    if disk:
        found.traffic = {"disk read": moved, "disk written": moved}
    if cuda or not disk:
        found.traffic |= {"host to device": moved, "device to host": moved}


def _activations(found: Estimate, model: nn.Module, options: Options) -> None:
    def formula(gradient_checkpointing: bool) -> formulas.Activations | None:
        return formulas.activations(
            model, options.batch_size * options.seq_len, plain=False, gradient_checkpointing=gradient_checkpointing,
            size=options.activation_bytes,
        )  # fmt: skip

    known, least = formula(options.gradient_checkpointing), formula(True)
    if known is None or least is None:
        found.add("device", "activations", None, "not known for this architecture")
    elif options.memory_budget is not None and options.memory_budget < least.bytes + least.block:
        raise InputError(
            f"--memory-budget {options.memory_budget}: expected at least {least.bytes + least.block} bytes, the inputs "
            "of all blocks and one block at a time; take a smaller --batch-size or --seq-len"
        )
    elif options.memory_budget is not None and options.memory_budget < known.bytes:
        found.add(
            "device", "activations", options.memory_budget, "the budget: some blocks are computed again"
        )
    else:
        found.add("device", "activations", known.bytes, known.formula)
        if options.gradient_checkpointing:
            found.add(
                "device", "a block computed again", known.block, "what backward needs of one block at a time"
            )
    found.add("device", "loss workspace", options.workspace_mb << 20, "a chunk of logits")
