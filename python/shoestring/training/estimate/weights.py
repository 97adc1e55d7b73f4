"""Estimate the memory and traffic of weights that --offload-weights moves."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from shoestring.checkpoint import weights
from shoestring.checkpoint.blocks import find_blocks
from shoestring.core.errors import InputError
from shoestring.core.storages import storages
from shoestring.training.estimate.config import EstimateConfig
from shoestring.training.memory import kept_bytes

if TYPE_CHECKING:
    from shoestring.training.estimate.step import Estimate

# csrc/offload/weight_store.cpp begins each storage of a block at a multiple of ALIGNMENT bytes, and the frozen
# ones and the next block at a multiple of PAGE bytes.
ALIGNMENT, PAGE = 512, 4096
# Bytes of the packed operands of a product on the CPU, and of the panels of an output layer.
PACKED, PANELS = 10 << 20, 48 << 20
IN_FLIGHT = "weights in flight"


@dataclass(frozen=True)
class AwayBlock:
    """A block whose weights leave the device.

    Args:
        size: bytes of its weights where they lie, with padding.
        trained: bytes of the trained ones among them, which go back in each backward.
        weights: bytes of its weights on the device without offloading.
    """

    size: int
    trained: int
    weights: int


@dataclass(frozen=True)
class AwayTable:
    """A frozen embedding or output layer, whose weight leaves the device.

    Args:
        weights: bytes of the weight.
        classes: number of its rows.
        is_head: whether the loss reads it; otherwise only an embedding reads rows of it.
    """

    weights: int
    classes: int
    is_head: bool

    @property
    def size(self) -> int:
        """Bytes of the weight in the file, with padding."""
        return _up(self.weights, PAGE)


def away_tables(model: nn.Module) -> list[AwayTable]:
    """Return the tables of a model: the weights of frozen embeddings and of the output layer, once each."""
    found: dict[int, AwayTable] = {}
    for module in weights.find_tables(model, None, find_blocks(model, None, "")).values():
        weight: Any = module.weight
        key = weight.untyped_storage()._cdata
        is_head = isinstance(module, nn.Linear) or (key in found and found[key].is_head)
        found[key] = AwayTable(weight.numel() * weight.element_size(), len(weight), is_head)
    return list(found.values())


def away_blocks(model: nn.Module, config: EstimateConfig) -> list[AwayBlock]:
    """Return the blocks whose weights leave, in order.

    Raises:
        InputError: the model has no list of blocks.
    """
    try:
        blocks = find_blocks(model, None, "")
    except ValueError:
        raise InputError(
            f"--offload-weights {config.offload_weights}: expected a model with a list of blocks, received a "
            f"{type(model).__name__} without one"
        ) from None
    owners = weights.owners_of_storages(model, blocks)
    keep, found = kept_bytes(config.keep), []
    for name, block in blocks.items():
        tensors = [*block.parameters(), *block.buffers()]
        trained = storages(t for t in tensors if t.requires_grad)
        frozen = storages(t for t in tensors if not t.requires_grad)
        groups = [
            [size for key, size in group.items() if size >= weights.LEAST and owners[key] == {name}]
            for group in (trained if config.trained_leave else {}, frozen)
        ]
        padded = [_up(sum(_up(size, ALIGNMENT) for size in group), PAGE) for group in groups]
        if sum(padded) <= keep:
            keep -= sum(padded)
        else:
            found.append(AwayBlock(sum(padded), padded[0], sum(map(sum, groups))))
    return found


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def passes(config: EstimateConfig, classes: int) -> int:
    """Return how often the loss of a micro-batch reads the output layer: for logits and for gradients of chunks.

    The sizes of chunks are those of csrc/losses/linear_cross_entropy_cpu.cpp and logit_waves.cpp.
    """
    tokens, row = config.batch_size * config.seq_len, 4 * classes
    workspace = config.workspace_mb << 20
    if config.device == "cpu":
        fit = max(1, (workspace - min(PACKED, workspace // 2)) // row)
        chunk = min(fit // 16 * 16 if fit > 16 else fit, 1024)
        return 2 * -(-tokens // chunk)
    if config.autocast is None:
        return 2 * -(-tokens // max(1, workspace // row))
    wave = max(1, workspace // 4 // row)
    return -(-tokens // wave) + -(-tokens // max(wave, (workspace - wave * row) // (row // 2)))


def offloaded_weights(
    found: Estimate, blocks: list[AwayBlock], tables: list[AwayTable], config: EstimateConfig
) -> None:
    """Add the weights that leave to the estimate: where they lie, those in flight, and the traffic.

    With n blocks away, forward and backward read all of them but two each. Backward begins with the last two
    blocks of forward, which are still there, and forward with the first two of backward. An embedding reads
    at most one row for each token.
    """
    disk, discrete = config.weights_place != "cpu", config.device != "cpu"
    sizes = [block.size for block in blocks]
    count = 3 if config.trained_leave else 2
    in_flight = sum(heapq.nlargest(count, sizes))
    note = f"of {min(count, len(sizes))} blocks at a time"
    found.add("device", IN_FLIGHT, in_flight, note)
    panels = max((min(PANELS, table.weights) for table in tables if table.is_head), default=0)
    found.add("device", "panels of the output layer", panels, "that arrive, are in use, and leave")
    if disk:
        found.add("disk", "weights", sum(sizes), "of blocks that leave, in a file without a name")
        found.add("disk", "embedding and output layer", sum(table.size for table in tables), "in that file")
        if discrete:
            found.add("host", IN_FLIGHT, in_flight, f"{note}, page-locked")
    else:
        found.add("host", "weights", sum(sizes), "of blocks that leave, page-locked")
        found.add("host", "embedding and output layer", sum(table.size for table in tables), "page-locked")
    rows = config.batch_size * config.seq_len * sum(table.weights // table.classes for table in tables[:1])
    heads = sum(passes(config, table.classes) * table.weights for table in tables if table.is_head)
    read = config.accumulate * (sum(sizes[2:]) + sum(sizes[:-2]) + heads + rows)
    written = config.accumulate * sum(block.trained for block in blocks)
    if disk:
        found.move("disk read", read)
        found.move("disk written", written)
    if discrete:
        found.move("host to device", read)
        found.move("device to host", written)
