"""Decide which layers leave in tiles, since whole ones do not fit, and check that a model has those of its plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shoestring.checkpoint import weights
from shoestring.checkpoint.blocks import listed_blocks
from shoestring.checkpoint.model import parse_bytes
from shoestring.checkpoint.tiled_layers import (
    check_layer,
    check_tiles,
    rows_of_tiles,
    tiled_rows,
    tiles_of_rows,
)
from shoestring.core.errors import InputError
from shoestring.core.module_argument import check_module
from shoestring.core.storages import parts, storages

# Padding of the frozen and of the trained weights that leave together, at most (csrc/offload/weight_store.cpp).
PADDING = 2 * 4096
# Share of a weight's bytes below which its scales may stay on the device.
SMALL = 0.05
Json = dict[str, Any]


def plan_tiles(model: nn.Module, room: int | str, *, trained: bool = False) -> dict[str, int]:
    """Return the layers that have to leave in tiles, so that the weights on their way fit into ``room``.

    :func:`offload_weights` has two blocks on the device at a time, or three if trained weights leave. A block fits if
    so many of its size take at most ``room``. If it does not, the modules within it come and go by themselves, and
    those layers that do not fit either leave in tiles, which are as large as the room allows. If only the block is too
    large, its largest layer is tiled, which splits the block. Layers outside of blocks are tiled if they do not fit;
    the others stay, and so do tables.

    Call it before the weights leave, and give the result to :func:`tile_layers`, which ``offload_weights`` follows. A
    plan of :func:`plan_training` then has it as ``tiles``.

    Args:
        model: the model, which may be on the meta device.
        room: bytes of device memory for the weights on their way, such as "1GiB": the budget without everything that
            stays.
        trained: whether trained weights leave, too, as with ``optimizer`` of ``offload_weights``.

    Returns:
        The most rows of a tile for each layer, by name; nothing if all fit.

    Raises:
        ValueError: ``room`` is no size, weights that cannot be split do not fit, or layers are in tiles already.

    Example:
        >>> blocks = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
        >>> model = torch.nn.ModuleDict({"blocks": blocks, "head": torch.nn.Linear(256, 8192)}).requires_grad_(False)
        >>> shoestring.plan_tiles(model, "20MiB")
        {}
        >>> tiles = shoestring.plan_tiles(model, "4MiB")
        >>> tiles, shoestring.tile_layers(model, tiles).names
        ({'head': 1639}, ['head'])
    """
    check_module("plan_tiles", model)
    try:
        size = parse_bytes(room)
    except ValueError as error:
        raise InputError(f"plan_tiles: room: {error}") from None
    for name in tiled_rows(model):
        raise InputError(
            f"plan_tiles: model: expected whole layers, received {name} in tiles; call undo() of tile_layers first"
        )
    tiles: dict[str, int] = {}
    splitter = _Splitter(model, size, trained)
    blocks = listed_blocks(model)
    for name, block in blocks.items():
        tiles |= splitter.tiles(name, block)
    inside = {module for block in blocks.values() for module in block.modules()}
    inside |= set(weights.find_tables(model, None, blocks).values())
    for name, module in model.named_modules():
        if module not in inside and splitter.can_split(name, module):
            tiles |= splitter.tiles(name, module)
    return tiles


class _Splitter:
    """Finds tiles for modules of a model. So many modules that come and go are on the device at a time."""

    def __init__(self, model: nn.Module, room: int, trained: bool) -> None:
        self.model, self.room, self.trained = model, room, trained
        self.count = 3 if trained else 2

    def leaving(self, module: nn.Module) -> int:
        """Return the bytes of the weights of a module that may leave."""
        tensors = [
            t for t in (*module.parameters(), *module.buffers()) if self.trained or not t.requires_grad
        ]
        return sum(size for size in storages(tensors).values() if size >= weights.LEAST)

    def fits(self, module: nn.Module) -> bool:
        size = self.leaving(module)
        return size == 0 or self.count * (size + PADDING) <= self.room

    def can_split(self, name: str, module: nn.Module) -> bool:
        try:
            check_layer(self.model, name, module)
        except InputError:
            return False
        return self.leaving(module) > 0 and bool(_large_parts(module))

    def tiles(self, name: str, module: nn.Module) -> dict[str, int]:
        """Return tiles with which a module fits, as offload_weights divides it."""
        if self.fits(module):
            return {}
        if self.can_split(name, module):
            return {name: self.rows(name, module)}
        found: dict[str, int] = {}
        for child, part in module.named_children():
            found |= self.tiles(f"{name}.{child}", part)
        if found:
            return found
        layers = [(n, m) for n, m in module.named_modules(prefix=name) if self.can_split(n, m)]
        if not layers:
            raise self.too_small(name, self.leaving(module))
        largest, layer = max(layers, key=lambda pair: self.leaving(pair[1]))
        return {largest: self.rows(largest, layer)}

    def rows(self, name: str, layer: nn.Module) -> int:
        """Return the rows of the largest tile of a layer that fits."""
        weight: Any = layer.weight
        leave, total = _large_parts(layer), weight.shape[0]
        row = -(-sum(leave) // total)
        # Parts of a tile with fewer than LEAST bytes stay on the device, which is allowed for some scales alone.
        least = max(-(-weights.LEAST * total // size) for size in leave if size >= SMALL * sum(leave))
        rows = min(total, (self.room // self.count - PADDING) // row)
        if rows >= least:
            tiles = tiles_of_rows(layer, rows)
            sizes = rows_of_tiles(layer, tiles)
            if min(sizes) >= least:
                check_tiles(name, layer, tiles)
                return max(sizes)
        raise self.too_small(name, 2 * least * row)

    def too_small(self, name: str, size: int) -> InputError:
        return InputError(
            f"plan_tiles: room: expected at least {self.count * (size + PADDING)} bytes, for {self.count} times the weights "
            f"of {name} or its smallest tiles, received {self.room}"
        )


def _large_parts(layer: nn.Module) -> list[int]:
    """Return the bytes of each part of a layer's weights that may leave."""
    return [part.nbytes for part in parts(layer.parameters()) if part.nbytes >= weights.LEAST]


def check_tiles_of(model: nn.Module, planned: Mapping[str, int]) -> None:
    """Raise InputError, which names the layer, unless the layers of a model are tiled as planned."""
    found, modules = tiled_rows(model), dict(model.named_modules())

    def said(name: str, rows: int | None) -> str:
        whole = "a whole layer" if name in modules else "no such layer"
        return whole if rows is None else f"tiles of {rows} rows"

    for name in sorted(planned.keys() | found.keys()):
        if planned.get(name) != found.get(name):
            expected = f"tiles of {planned[name]} rows" if name in planned else "a whole layer"
            raise InputError(
                f"TrainingPlan: apply: model: {name}: expected {expected}, as planned, received "
                f"{said(name, found.get(name))}; call tile_layers(model, plan.tiles) before offload_weights"
            )


def tile_reasons(model: nn.Module, budget: int | None) -> list[Json]:
    """Return why layers of a model are in tiles, for a plan: one reason for layers of blocks that are alike."""
    rows = tiled_rows(model)
    whole = {name: sum(p.nbytes for p in parts(model.get_submodule(name).parameters())) for name in rows}
    limit = "" if budget is None else f", of a budget of {_mebibytes(budget)}"
    return [
        {"lever": "tiles", "text": f"{line}: {'' if count == 1 else 'each '}takes {_mebibytes(size)} whole{limit}"}
        for line, size, count in _alike(rows, whole)
    ]  # fmt: skip


def tile_lines(tiles: Mapping[str, int]) -> list[str]:
    """Return a line for the layers in tiles that are alike."""
    return [line for line, _, _ in _alike(tiles, dict.fromkeys(tiles, 0))]


def _alike(rows: Mapping[str, int], sizes: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    """Yield layers whose names differ in numbers alone: what is said of them, their bytes, and their number."""
    groups: dict[tuple[str, int, int], list[str]] = {}
    for name in rows:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        groups.setdefault((pattern, rows[name], sizes[name]), []).append(name)
    for (pattern, most, size), names in groups.items():
        yield f"{names[0] if len(names) == 1 else pattern} in tiles of {most} rows", size, len(names)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
