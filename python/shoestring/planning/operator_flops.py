"""Floating-point operations of the matrix products in an operator, from the shapes of its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

Arguments = dict[str, Any]


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the floating-point operations of a call of an operator; a multiplication and an addition count as two.

    Operators without matrix products have none: their time is that of their bytes.
    """
    name = func._schema.name
    if name in FLOPS:
        return FLOPS[name](_arguments(func, args, kwargs), out)
    count = flop_registry.get(func._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return the arguments of a call by their names, with the default values."""
    schema = func._schema.arguments
    values = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return values | dict(zip((argument.name for argument in schema), args)) | kwargs


def _rows(x: Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1)


@functools.cache
def _pairs(queries: int, keys: int, causal: bool, before: int = -1, behind: int = -1) -> int:
    """Return the number of pairs of a query and a key that attention computes.

    As in the operator, the last query is aligned with the last key, and -1 is no limit of the window.
    """
    behind = 0 if causal else behind
    if before < 0 and behind < 0:
        return queries * keys
    count = 0
    for query in range(queries):
        own = query + keys - queries
        first = 0 if before < 0 else max(0, own - before)
        last = keys - 1 if behind < 0 else min(keys - 1, own + behind)
        count += max(0, last - first + 1)
    return count


def _attention(of: Arguments, products: int) -> int:
    """Count products of (queries, head size) by (keys, head size), as far as the mask leaves pairs of them."""
    q: Tensor = of["q"]
    k: Tensor = of["k"]
    v: Tensor = of["v"]
    # The lengths of packed sequences are not known here. Their tokens count as one sequence, which is the most.
    tokens = -2 if of["cu_seqlens_q"] is None else -3
    window = of["window_size"]
    pairs = _pairs(
        q.shape[tokens], k.shape[tokens], of["causal"], *([window] * 2 if isinstance(window, int) else window)
    )
    heads = q.numel() // max(q.shape[-1] * q.shape[tokens], 1)
    return heads * pairs * products * (q.shape[-1] + v.shape[-1])


def _flash(of: Arguments, products: int) -> int:
    q: Tensor = of["query"]
    k: Tensor = of["key"]
    pairs = _pairs(q.shape[-2], k.shape[-2], of["is_causal"])
    return q.shape[0] * q.shape[1] * pairs * products * 2 * q.shape[-1]


def _linear_group_backward(of: Arguments, out: list[Tensor]) -> int:
    through_x, *of_weights = map(int, of["output_mask"])
    return sum(
        2 * _rows(grad) * weight.numel() * (through_x + of_weight)
        for grad, weight, of_weight in zip(of["grad_outputs"], of["weights"], of_weights)
        if grad is not None
    )


def _head(of: Arguments, out: Any) -> int:
    """Count the products of a linear layer with cross-entropy: logits and the gradients that it computes with them."""
    hidden: Tensor = of["hidden"]
    lora: Tensor | None = of["lora_hidden"]
    tokens, features = _rows(hidden), hidden.shape[-1]
    classes = _classes(of["weight"], of["absmax"], features)
    rank = lora.shape[-1] if lora is not None else 0
    # Without gradients, an operator without this argument computes the logits alone.
    grad_hidden, grad_weight, _, grad_lora, grad_lora_B = map(int, of.get("output_mask", [False] * 5))
    dense = 1 + grad_hidden + max(grad_weight, int(of.get("weight_grad") is not None))
    return 2 * tokens * classes * (features * dense + rank * (1 + grad_lora + grad_lora_B))


def _classes(weight: Tensor, absmax: Tensor | None, features: int) -> int:
    if absmax is None:
        return weight.shape[0]
    # A weight in 4 bits has two elements in a byte, one in int8 has its own shape.
    return 2 * weight.numel() // features if weight.dtype == torch.uint8 else weight.numel() // features


def _distillation(of: Arguments, out: Any) -> int:
    teacher: Tensor = of["teacher_hidden"]
    classes = _classes(of["teacher_weight"], of["teacher_absmax"], teacher.shape[-1])
    return _head(of, out) + 2 * _rows(teacher) * teacher.shape[-1] * classes


def _lora_layers(of: Arguments) -> list[tuple[int, int]]:
    """Return (elements of the weight, elements of lora_A and lora_B) of each layer of a group."""
    found, features = [], of["x"].shape[-1]
    for i in range(0, len(of["layers"]), 8):
        weight, absmax, _, _, lora_A, lora_B = of["layers"][i : i + 6]
        adapter = 0 if lora_A is None else lora_A.numel() + lora_B.numel()
        found.append((features * _classes(weight, absmax, features), adapter))
    return found


def _lora_forward(of: Arguments, out: Any) -> int:
    return sum(2 * _rows(of["x"]) * (weight + adapter) for weight, adapter in _lora_layers(of))


def _lora_backward(of: Arguments, out: Any) -> int:
    """Count the gradient of x through the weight and the adapter, and the gradients of the adapter."""
    through = int(of["output_mask"][0])
    return sum(
        2 * _rows(of["x"]) * (through * weight + (through + 1) * adapter)
        for weight, adapter in _lora_layers(of)
    )


def _expert_sizes(of: Arguments, features: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the elements of the two matrices of an expert, and those of A and B of each."""
    gate_up: Tensor = of["gate_up"]
    if of["gate_up_absmax"] is not None:
        hidden = of["hidden_features"]
    else:
        hidden = gate_up.shape[2 if of["transposed"] else 1] // 2
    adapters = []
    for name in ("gate_up", "down"):
        a, b = of[f"{name}_a"], of[f"{name}_b"]
        adapters.append((0, 0) if a is None else (a[0].numel(), b[0].numel()))
    return 3 * hidden * features, adapters


def _experts(of: Arguments, out: Any) -> int:
    weights, adapters = _expert_sizes(of, of["x"].shape[-1])
    return int(2 * of["index"].numel() * (weights + sum(map(sum, adapters))))


def _experts_backward(of: Arguments, out: Any) -> int:
    """Count the gradients through both matrices, and those of the matrices and adapters that are trained.

    The product of A with its input is computed again. The gradient of the gates' input needs that through down.
    """
    weights, ((up_a, up_b), (down_a, down_b)) = _expert_sizes(of, of["grad"].shape[-1])
    x, weight, up, down, up_bias, _, *of_adapters = map(int, of["output_mask"])
    through = max(x, weight, up, up_bias, *of_adapters[:2])
    dense = weights // 3 * (2 * (x + up) + through + down)
    adapters = 2 * (up_a + up_b + down_a + down_b) + x * up_a + through * down_a
    return int(2 * of["order"].numel() * (dense + adapters))


def _grouped_linear(of: Arguments, out: Any) -> int:
    slots = (of["x"] if of["rows"] is None else of["rows"]).shape[0]
    return int(2 * slots * of["weight"][0].numel())


def _grouped_linear_backward(of: Arguments, out: Any) -> int:
    return int(2 * of["grad_out"].shape[0] * of["weight"][0].numel() * sum(map(bool, of["output_mask"][:2])))


# The operators of this package that multiply matrices, and one of PyTorch that torch.utils.flop_counter lacks.
FLOPS: dict[str, Callable[[Arguments, Any], int]] = {
    "shoestring::linear": lambda of, out: 2 * _rows(of["x"]) * of["weight"].numel(),
    "shoestring::_gelu_linear": lambda of, out: 2 * _rows(of["x"]) * of["weight"].numel(),
    "shoestring::linear_group": lambda of, out: 2 * _rows(of["x"]) * sum(w.numel() for w in of["weights"]),
    "shoestring::_dense_linear_group": lambda of, out: (
        2 * _rows(of["x"]) * sum(w.numel() for w in of["weights"])
    ),
    "shoestring::_linear_group_backward": _linear_group_backward,
    "shoestring::addmm_": lambda of, out: 2 * of["mat1"].numel() * of["mat2"].shape[-1],
    "shoestring::quantized_linear": lambda of, out: 2 * of["x"].numel() * of["out_features"],
    "shoestring::_quantized_linear_backward": lambda of, out: (
        2 * of["grad_output"].numel() * of["in_features"]
    ),
    "shoestring::_lora_linear_group_forward": _lora_forward,
    "shoestring::_lora_linear_group_backward": _lora_backward,
    "shoestring::lora_linear_group": _lora_forward,
    "shoestring::moe_experts": _experts,
    "shoestring::_moe_experts": _experts,
    "shoestring::_moe_experts_backward": _experts_backward,
    "shoestring::grouped_linear": _grouped_linear,
    "shoestring::_grouped_linear_backward": _grouped_linear_backward,
    "shoestring::attention": lambda of, out: _attention(of, 2),
    "shoestring::attention_with_lse": lambda of, out: _attention(of, 2),
    "shoestring::_attention_forward": lambda of, out: _attention(of, 2),
    # Backward computes the scores again: five products in place of two.
    "shoestring::_attention_backward": lambda of, out: _attention(of, 5),
    "shoestring::_linear_cross_entropy_rows": _head,
    "shoestring::_linear_cross_entropy_shard": _head,
    "shoestring::linear_cross_entropy": _head,
    "shoestring::linear_cross_entropy_with_stats": _head,
    "shoestring::_linear_distillation_rows": _distillation,
    "shoestring::linear_distillation": _distillation,
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda of, out: _flash(of, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda of, out: _flash(of, 5),
}
