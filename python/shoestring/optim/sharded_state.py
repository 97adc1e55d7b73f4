"""State dicts of DTensor parameters. Their tensors are DTensors, so any number of processes can load them.

Quantised state has one scale per block of consecutive elements of a shard. If a parameter is split in another
way, the blocks are different. A state dict therefore repeats scales until each row of dimension 0 has a scale
of its own. One scale then covers ``gcd(row, block)`` elements; no scale is repeated if a row is a multiple of
the block. If another dimension is split as well, each element has its own scale, and 4-bit codes of odd rows
take a byte each. If the state is loaded with the same split, it is the same bit for bit. With another split,
elements of a new block may have different scales; they are quantised again. Saving dequantises nothing.
"""

from functools import partial
from math import gcd, prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoestring.core.dtensors import is_dtensor
from shoestring.files.safetensors_file import Gathered
from shoestring.optim.convert import stored
from shoestring.optim.sharded import as_dtensor, local, piece_of
from shoestring.optim.state_layout import STATES, Moment, Part
from shoestring.quantization.quantize_8bit import STATE_BLOCK, dequantize_8bit, quantize_8bit
from shoestring.quantization.quantize_state_4bit import GROUP_4BIT, map_4bit, quantize_state_4bit

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from shoestring.optim.state_dicts import StateDicts


def save_dtensors(optimizer: "StateDicts", state_dict: dict[str, Any]) -> None:
    """In a state dict, replace the state tensors of DTensor parameters by DTensors.

    The DTensors are views of the state tensors, unless scales have to be repeated.
    """
    for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for param, key in zip(group["params"], packed["params"], strict=True):
            if is_dtensor(param) and state_dict["state"].get(key):
                entry = state_dict["state"][key]
                elementwise = optimizer._elementwise(param)
                state_dict["state"][key] = _saved(entry, param, optimizer._parts(param, group), elementwise)


def owned_entries(optimizer: "StateDicts", state_dict: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    """Return the state in a state dict, reduced to this process's shards where parameters are DTensors.

    Raises:
        ValueError: the shape of a state tensor does not fit its parameter.
    """
    where = f"{type(optimizer).__name__}: load_state_dict"
    entries = dict(state_dict["state"])
    for ours, theirs in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        group = {**ours, **theirs}
        # Skip an invalid option here; _check_options raises an error for it later.
        if group["state_format"] not in STATES:
            continue
        moments = optimizer._moments(group)
        for param, key in zip(ours["params"], theirs["params"], strict=False):
            parts = optimizer._parts(param, group)
            if entries.get(key) and _needs_owning(entries[key], param, parts):
                state = optimizer._kind(param, group).state
                elementwise = optimizer._elementwise(param)
                entries[key] = _owned(where, entries[key], param, parts, moments, state, elementwise)
    return entries


def gathered(value: "DTensor") -> Gathered:
    """Return an entry of a file for a DTensor, which processes gather when they write the entry."""
    return Gathered(torch.empty(value.shape, dtype=value.dtype, device="meta"), value.full_tensor)


def gathered_entries(
    optimizer: "StateDicts", param: "DTensor", group: dict[str, Any]
) -> dict[str, Tensor | Gathered]:
    """Return a DTensor's state as one process would have it; each tensor is gathered when it is written."""
    parts, elementwise = optimizer._parts(param, group), optimizer._elementwise(param)
    entry: dict[str, Any] = dict(optimizer.state[param])
    saved, state = _saved(entry, param, parts, elementwise), optimizer._kind(param, group).state
    like = torch.empty(param.shape, dtype=param.dtype, device="meta")
    are_blocks = state not in ("8bit", "4bit") or _row(param) % STATE_BLOCK == 0
    where = type(optimizer).__name__

    def whole(name: str, shape: tuple[int, ...]) -> Tensor:
        if are_blocks:
            alone: Tensor = saved[name].full_tensor()
            return alone.reshape(shape)
        again = _owned(where, saved, like, parts, optimizer._moments(group), state, elementwise)
        result: Tensor = again[name]
        return result.reshape(shape)

    entries: dict[str, Tensor | Gathered] = dict(entry)
    shapes = {part.name: (part.dtype, part.shape(like)) for part in parts}
    shapes |= {name: (torch.float32, tuple(param.shape)) for name in elementwise}
    for name, (dtype, shape) in shapes.items():
        empty = torch.empty(shape, dtype=dtype, device="meta")
        entries[name] = Gathered(empty, partial(whole, name, shape))
    return entries


def _saved(
    entry: dict[str, Any], param: "DTensor", parts: list[Part], elementwise: set[str]
) -> dict[str, Any]:
    """Return the state of a DTensor with DTensors in place of this process's shards."""
    shard, result = local(param), dict(entry)
    for part in parts:
        rows = _rows(entry[part.name], part, tuple(shard.shape), _row(param))
        result[part.name] = as_dtensor(rows, param, _shape(part, param))
    for name in elementwise:  # state tensors that are not moments, such as Adafactor's variance
        result[name] = as_dtensor(entry[name], param, tuple(param.shape))
    return result


def _needs_owning(entry: dict[str, Any], param: Tensor, parts: list[Part]) -> bool:
    """Return whether a parameter's loaded state must be converted.

    Return True if the parameter is a DTensor, or if the state was saved for a DTensor.
    """
    if is_dtensor(param) or any(is_dtensor(value) for value in entry.values()):
        return True
    rows = [p for p in parts if not p.shaped and _shape(p, param) != (p.size(param),)]
    fits = (isinstance(entry.get(p.name), Tensor) and entry[p.name].shape == _shape(p, param) for p in rows)
    return bool(rows) and all(fits)


def _owned(
    where: str,
    entry: dict[str, Any],
    param: Tensor,
    parts: list[Part],
    moments: tuple[Moment, ...],
    state: str,
    elementwise: set[str],
) -> dict[str, Any]:
    """Reduce the loaded state of one parameter to the part of this process, in the optimizer's layout."""
    result = dict(entry)
    for name, value in entry.items():
        part = next((part for part in parts if part.name == name), None)
        if part is not None and isinstance(value, Tensor):
            # Floating-point moments, as torch.optim saves them, are quantised at the end of this function.
            whole = value.is_floating_point() and f"{name}_scale" not in entry and value.shape == param.shape
            result[name] = _owned_part(where, value, param, part, whole)
        elif name in elementwise and isinstance(value, Tensor) and value.shape == param.shape:
            result[name] = _local(value, param)
        elif is_dtensor(value):
            result[name] = value.full_tensor()
    for moment in moments:
        scale, value = f"{moment.name}_scale", result.get(moment.name)
        if isinstance(value, Tensor) and value.is_floating_point() and scale not in result:
            result |= stored(moment, value.float(), state)
        elif scale in result and state in ("8bit", "4bit"):
            size = local(param).numel()
            result[moment.name], result[scale] = _blocks(
                moment, state, result[moment.name], result[scale], size
            )
    return result


def _row(param: Tensor) -> int:
    """Return the number of elements in a row of a parameter, the unit that sharding does not split.

    A row is one index of dimension 0, or one element if the parameter is split along another dimension.
    """
    placements = param.placements if is_dtensor(param) else ()
    if param.ndim == 0 or any(getattr(placement, "dim", 0) != 0 for placement in placements):
        return 1
    return prod(param.shape[1:])


def _each(part: Part) -> int:
    """Return the number of parameter elements that one element of a state tensor (such as a scale) covers."""
    return 1 if part.shaped else STATE_BLOCK // part.per_block


def _shape(part: Part, param: Tensor) -> tuple[int, ...]:
    """Return the global shape, over all shards, of a state tensor in a state dict."""
    row = _row(param)
    return tuple(param.shape) if part.shaped or row == 1 else (param.shape[0], row // gcd(row, _each(part)))


def _rows(flat: Tensor, part: Part, shape: tuple[int, ...], row: int) -> Tensor:
    """Arrange a flat state tensor by the rows of its parameter or shard, which has shape ``shape``."""
    if part.shaped:
        return flat
    each = _each(part)
    common = gcd(row, each)
    if common < each:
        flat = _unpacked(flat) if flat.dtype == torch.uint8 else flat.repeat_interleave(each // common)
    items = flat[: prod(shape) // common]
    return items.view(shape if row == 1 else (shape[0], row // common))


def _unpacked(codes: Tensor) -> Tensor:
    """Unpack 4-bit codes, two per byte, to one code per byte."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten()


def _local(value: Tensor, param: Tensor) -> Tensor:
    if is_dtensor(param):
        return piece_of(value, param)
    return value.full_tensor() if is_dtensor(value) else value


def _owned_part(where: str, value: Tensor, param: Tensor, part: Part, whole: bool) -> Tensor:
    """Return the part of a saved state that this process owns; raise ValueError if its shape does not fit."""
    shape, flat = _shape(part, param), (part.size(param),)
    if whole or value.shape == shape:
        return _local(value, param)
    if value.shape == flat:  # the state was saved by a program without DTensors
        value = value.full_tensor() if is_dtensor(value) else value
        return (
            piece_of(_rows(value, part, tuple(param.shape), _row(param)), param)
            if is_dtensor(param)
            else value
        )
    raise ValueError(f"{where}: {part.name}: expected {shape} or {flat}, received {tuple(value.shape)}")


def _blocks(moment: Moment, state: str, codes: Tensor, scale: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Convert codes and scales from a state dict to the layout in which the optimizer stores them.

    In the state dict, a scale may cover a whole block or fewer elements.
    """
    group = STATE_BLOCK if state == "8bit" else GROUP_4BIT[moment.signed]
    count = -(-size // STATE_BLOCK)
    scales, code_bytes = count * STATE_BLOCK // group, size if state == "8bit" else count * STATE_BLOCK // 2
    if size == 0 or (scale.shape == (scales,) and codes.numel() == code_bytes):
        return codes if state == "8bit" else codes.flatten(), scale.flatten()
    each = size // scale.numel()
    single = codes.flatten() if codes.numel() == size else _unpacked(codes.flatten())
    grid = scale.flatten()
    groups = -(-size // group)
    grid = torch.cat([grid, grid[-1:].expand(groups * group // each - grid.numel())]).view(
        groups, group // each
    )
    same, group_scales = (grid == grid[:, :1]).all(1), grid[:, 0].contiguous()
    if not same.all():
        again, scale = _quantised(
            _value_of(single, moment, state) * scale.flatten().repeat_interleave(each), moment, state
        )
        single = torch.where(same.repeat_interleave(group)[:size], single, again)
        group_scales = torch.where(same, group_scales, scale[:groups])
    if state == "8bit":
        return single.view(codes.shape), group_scales
    zero = 0 if moment.signed else 15  # the code of the value 0 pads the last block
    single = torch.nn.functional.pad(single, (0, count * STATE_BLOCK - size), value=zero)
    return single[::2] | single[1::2] << 4, torch.nn.functional.pad(group_scales, (0, scales - groups))


def _value_of(codes: Tensor, moment: Moment, state: str) -> Tensor:
    """Return the fp32 values of quantised codes (one code per byte) for a scale of one."""
    if state == "8bit":
        ones = torch.ones(-(-codes.numel() // STATE_BLOCK), device=codes.device)
        return dequantize_8bit(codes, ones, signed=moment.signed)
    return map_4bit(moment.signed).to(codes.device)[codes.int()]


def _quantised(values: Tensor, moment: Moment, state: str) -> tuple[Tensor, Tensor]:
    """Quantise fp32 values. Return codes, one per byte, and scales."""
    if state == "8bit":
        return quantize_8bit(values, signed=moment.signed)
    codes, scale = quantize_state_4bit(values, signed=moment.signed)
    return _unpacked(codes)[: values.numel()], scale
