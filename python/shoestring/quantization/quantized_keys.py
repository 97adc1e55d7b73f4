"""The tensors and names by which files and state dicts hold a quantised weight, which are those of bitsandbytes.

``nn.QuantizedLinear`` lists them for its ``weight``. A stack of matrices has its own name in place of ``weight``. In int8,
which bitsandbytes does not save for stacks, its scales are ``<name>.SCB`` and the format of its rows ``<name>.weight_format``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoestring.core.save_pretrained import watch
from shoestring.files.read_file import is_integer, is_number, parse_json, shown
from shoestring.quantization.nested_scales import GROUP, VALUES, NestedScales, groups_of
from shoestring.quantization.quantize_4bit import BLOCK_SIZES, TYPES, code_values
from shoestring.quantization.quantized_tensor import QuantizedTensor

LONGEST_STATE = 4096  # maximum size in bytes of the JSON in a quant_state; the usual size is about 250 bytes
STATE = ".quant_state."


def write_keys(q: QuantizedTensor, destination: dict[str, Any], key: str) -> None:
    """In the state dict ``destination``, put the tensors of q in place of the weight ``key``."""
    if q.quant_type == "int8":
        scales, order = int8_keys(key)
        destination[key] = q.packed.detach()
        destination[scales] = q.absmax.detach()
        destination[order] = torch.tensor(0, dtype=torch.uint8)
        return
    state: dict[str, Any] = {
        "quant_type": q.quant_type,
        "blocksize": q.block_size,
        "dtype": str(q.dtype).removeprefix("torch."),
        "shape": list(q.shape),
    }
    destination[key] = q.packed.detach().view(-1, 1)
    destination[key + ".absmax"] = q.absmax.detach().flatten()
    destination[key + ".quant_map"] = code_values(q.quant_type)
    if q.nested is not None:
        tables = NestedScales.of(q.nested.detach())
        destination[key + ".nested_absmax"] = tables.scales.clone()
        destination[key + ".nested_quant_map"] = tables.values.clone()
        offset = tables.offset.item()
        state |= {"nested_blocksize": GROUP, "nested_dtype": "float32", "nested_offset": offset}
    text = json.dumps(state).encode()
    destination[key + _state_name(q.quant_type)] = torch.tensor(list(text), dtype=torch.uint8)


def _state_name(quant_type: str) -> str:
    owner = "shoestring" if quant_type == "int4" else "bitsandbytes"
    return f"{STATE}{owner}__{quant_type}"


def int8_keys(key: str) -> tuple[str, str]:
    """Return the names of the scales and of the format of an int8 weight."""
    prefix = key.removesuffix("weight") if key == "weight" or key.endswith(".weight") else key + "."
    return prefix + "SCB", prefix + "weight_format"


def keys_of(names: Mapping[str, Any], key: str) -> list[str]:
    """Return those of some names under which the weight ``key`` is saved; none if it is dense."""
    scales, order = int8_keys(key)
    parts = [name for name in names if name.startswith(key + ".")]
    if scales in names:
        parts = [scales, *([order] if order in names else [])]
    return [key, *parts] if parts else []


def read_keys(
    state_dict: dict[str, Any], key: str, shape: tuple[int, ...] | None, dtype: torch.dtype, owner: str
) -> QuantizedTensor | None:
    """Build a quantised weight from its tensors in a state dict.

    These are removed from ``state_dict``, except ``key``.

    Args:
        state_dict: the tensors, by name.
        key: the name of the weight, such as "model.layers.0.mlp.up_proj.weight".
        shape: its expected shape; None: any.
        dtype: dtype that an int8 weight stands for. For a 4-bit weight, the state dict contains the dtype.
        owner: the class with the weight, which begins errors.

    Returns:
        The weight, or None if ``state_dict`` has none of bitsandbytes' names for it.

    Raises:
        ValueError: a tensor is missing, or does not fit.
    """
    watch()
    states = [
        name
        for name in state_dict
        if name.startswith((key + STATE + "bitsandbytes__", key + _state_name("int4")))
    ]
    try:
        if int8_keys(key)[0] in state_dict:
            return _int8_of(state_dict, key, shape, dtype, owner)
        return _4bit_of(state_dict, key, states[0], shape, owner) if states else None
    except KeyError as error:
        raise ValueError(f"{owner}: {key}: expected bitsandbytes' parts, but {error} is missing") from None


def _int8_of(
    state_dict: dict[str, Any], key: str, shape: tuple[int, ...] | None, dtype: torch.dtype, owner: str
) -> QuantizedTensor:
    """Take an int8 weight under bitsandbytes' keys out of a state dict."""
    scales_key, order_key = int8_keys(key)
    packed, absmax = state_dict[key], state_dict.pop(scales_key)
    order = state_dict.pop(order_key, 0)
    shape = tuple(packed.shape) if shape is None else shape
    order = order.tolist() if isinstance(order, Tensor) and order.numel() == 1 else order
    if order not in (0, [0]):
        raise ValueError(f"{owner}: {order_key}: expected 0 (rows in plain order), received {shown(order)}")
    if (
        packed.dtype != torch.int8
        or packed.shape != shape
        or absmax.shape != shape[:-1]
        or not absmax.is_floating_point()
    ):
        raise ValueError(
            f"{owner}: {key} and {scales_key}: expected int8 {shape} and {shape[:-1]}, received {packed.dtype} "
            f"{tuple(packed.shape)} and {tuple(absmax.shape)}"
        )
    return QuantizedTensor(
        packed, absmax.float(), None, shape=shape, dtype=dtype, quant_type="int8", block_size=shape[-1]
    )


def _state_of(text: Tensor, state_key: str, owner: str) -> dict[str, Any]:
    """Parse bitsandbytes' JSON description of a 4-bit weight, and check the type of every field.

    Raises:
        ValueError: the text is not a description of a 4-bit weight.
    """
    if text.dtype != torch.uint8 or text.numel() > LONGEST_STATE:
        raise ValueError(
            f"{owner}: {state_key}: expected at most {LONGEST_STATE} bytes of JSON, received {text.numel()} of {text.dtype}"
        )
    state = parse_json(
        bytes(text.flatten().tolist()),
        f"{owner}: {state_key}: expected bitsandbytes' JSON, received another",
    )
    if not isinstance(state, dict):
        raise ValueError(f"{owner}: {state_key}: expected a JSON object, received {shown(state)}")
    checks: dict[str, tuple[Callable[[Any], bool], str]] = {
        "quant_type": (lambda v: isinstance(v, str), "a name"),
        "blocksize": (is_integer, "an integer"),
        "shape": (lambda v: isinstance(v, list) and all(map(is_integer, v)), "a list of integers"),
        "dtype": (lambda v: v in ("float32", "bfloat16", "float16"), "float32, bfloat16 or float16"),
        "nested_offset": (is_number, "a finite number"),
    }
    for field, (fits, expected) in checks.items():
        if field == "nested_offset" and field not in state:
            continue
        if not fits(state[field]):
            raise ValueError(
                f"{owner}: {state_key}: {field}: expected {expected}, received {shown(state[field])}"
            )
    return state


def _4bit_of(
    state_dict: dict[str, Any], key: str, state_key: str, shape: tuple[int, ...] | None, owner: str
) -> QuantizedTensor:
    """Take a 4-bit weight under bitsandbytes' keys out of a state dict."""
    state = _state_of(state_dict.pop(state_key), state_key, owner)
    quant_type, block_size = state["quant_type"], state["blocksize"]
    if quant_type not in TYPES or block_size not in BLOCK_SIZES:
        raise ValueError(
            f"{owner}: {state_key}: expected {' or '.join(TYPES)} in blocks of {BLOCK_SIZES}, received "
            f"{shown(quant_type)} in blocks of {shown(block_size)}"
        )
    packed, absmax = state_dict[key].flatten().view(torch.uint8), state_dict.pop(key + ".absmax").flatten()
    values = state_dict.pop(key + ".quant_map").cpu()
    if values.dtype != torch.float32 or not torch.equal(values, code_values(quant_type)):
        raise ValueError(f"{owner}: {key}.quant_map: expected the {quant_type} values, received others")
    shape = tuple(state["shape"]) if shape is None else shape
    if tuple(state["shape"]) != shape:
        raise ValueError(f"{owner}: {key}: expected shape {shape}, received {tuple(state['shape'])}")
    count = math.prod(shape)
    blocks = -(-count // block_size)
    if packed.numel() < (count + 1) // 2 or absmax.numel() != blocks:
        raise ValueError(
            f"{owner}: {key}: expected {(count + 1) // 2} bytes and {blocks} scales, received {packed.numel()} and "
            f"{absmax.numel()}"
        )
    if quant_type == "int4" and (absmax.dtype != torch.int32 or "nested_offset" in state):
        raise ValueError(
            f"{owner}: {key}.absmax: expected int32 with int4, not nested scales, received {absmax.dtype}"
        )
    scale_dtype = torch.uint8 if "nested_offset" in state else torch.float32
    if quant_type != "int4" and absmax.dtype != scale_dtype:
        raise ValueError(f"{owner}: {key}.absmax: expected {scale_dtype}, received {absmax.dtype}")
    nested = None
    if "nested_offset" in state:
        if state["nested_blocksize"] != GROUP:
            received = state["nested_blocksize"]
            raise ValueError(f"{owner}: {key}: nested_blocksize: expected {GROUP}, received {received}")
        scales, map_ = state_dict.pop(key + ".nested_absmax"), state_dict.pop(key + ".nested_quant_map")
        dtypes = {scales.dtype, map_.dtype}
        if scales.shape != (groups_of(blocks),) or map_.shape != (VALUES,) or dtypes != {torch.float32}:
            raise ValueError(
                f"{owner}: {key}: nested_absmax and nested_quant_map: expected {groups_of(blocks)} and {VALUES} values, "
                f"received {tuple(scales.shape)} of {scales.dtype} and {tuple(map_.shape)} of {map_.dtype}"
            )
        offset = scales.new_tensor(state["nested_offset"])
        nested = NestedScales(offset, map_, scales).join()
    return QuantizedTensor(
        packed[: (count + 1) // 2],
        absmax,
        nested,
        shape=shape,
        dtype=getattr(torch, state["dtype"]),
        quant_type=quant_type,
        block_size=block_size,
    )
