"""Memory that training is going to take, by formula: of models that need not exist (the meta device is enough)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shoestring.optim.arena import Kind, Part, blocks, parts
from shoestring.optim.base import LowMemoryOptimizer


@dataclass(frozen=True)
class Activations:
    """What autograd keeps from the forward pass to the backward pass, and its formula in words."""

    bytes: int
    formula: str
    block: int  # bytes of one decoder block, computed as without gradient checkpointing


def activations(
    model: Any, tokens: int, *, plain: bool, gradient_checkpointing: bool, size: int = 4
) -> Activations | None:
    """Estimate of what autograd keeps of so many tokens, of `size` bytes an element; None for an unknown architecture.

    A Llama block keeps about 12 hidden and 4 MLP vectors; patched, the inputs and outputs of both norms, query,
    attention's output, key, value, gate, up and, where ``down_proj`` itself is trained, their product.
    """
    shape = getattr(model, "config", None)
    layers, hidden = getattr(shape, "num_hidden_layers", None), getattr(shape, "hidden_size", None)
    mlp = getattr(shape, "intermediate_size", None)
    heads = getattr(shape, "num_attention_heads", None)
    experts = getattr(shape, "num_local_experts", None) or getattr(shape, "num_experts", None)
    if not (layers and hidden and mlp and heads) or experts:
        return None
    head_dim = getattr(shape, "head_dim", None) or hidden // heads
    narrow = (getattr(shape, "num_key_value_heads", None) or heads) * head_dim
    keeps_product = any(p.requires_grad and p.shape == (hidden, mlp) for p in model.parameters())
    vectors = [(12, hidden), (4, mlp)] if plain else [(6, hidden), (2, narrow), (2 + keeps_product, mlp)]
    block = tokens * size * sum(count * width for count, width in vectors)
    if gradient_checkpointing:
        estimate = tokens * size * layers * hidden
        formula = f"{tokens} x {layers} x {hidden} x {size} B (block inputs)"
    else:
        estimate = layers * block
        formula = (
            f"{tokens} x {layers} x ({' + '.join(f'{count}x{width}' for count, width in vectors)}) x {size} B"
        )
    head = model.get_output_embeddings().weight
    vocab = head.shape[0]
    if plain:
        estimate, formula = estimate + 4 * tokens * vocab, formula + f" + {tokens} x {vocab} x 4 B"
    else:  # the last norm's input, and the loss's gradients
        rows = 2 * tokens + (vocab if head.requires_grad else 0)
        estimate, formula = estimate + size * rows * hidden, formula + f" + {rows} x {hidden} x {size} B"
    return Activations(estimate, formula, block)


@dataclass(frozen=True)
class StateArena:
    """The state of an optimizer's parameters of one kind, which lie and are stepped together."""

    parts: list[Part]
    blocks: list[int]  # of 256 elements, of each parameter
    weights: list[int]  # bytes of each parameter
    splits: bool  # the operator steps parts of parameters

    @property
    def per_block(self) -> int:
        """Bytes."""
        return sum(part.per_block * part.dtype.itemsize for part in self.parts)

    def bytes(self, total: int | None = None) -> dict[str, int]:
        """Of each part, where `total` blocks are kept (just those of the parameters, if not given)."""
        count = sum(self.blocks) if total is None else total
        return {part.name: count * part.per_block * part.dtype.itemsize for part in self.parts}


@dataclass(frozen=True)
class State:
    """What an optimizer keeps between steps, once every trained parameter has had a gradient."""

    arenas: list[StateArena]
    rest: dict[str, int]  # bytes beside arenas: each tensor's step, and fp32 tensors of the rule's own

    def bytes(self) -> dict[str, int]:
        """By part."""
        return total(*(arena.bytes() for arena in self.arenas), self.rest)


def optimizer_state(optimizer: LowMemoryOptimizer) -> State:
    """The state of a low-memory optimizer, made or not."""
    arenas: list[StateArena] = []
    rest: list[dict[str, int]] = []
    for group in optimizer.param_groups:
        members: dict[Kind, list[Tensor]] = {}
        for p in group["params"]:
            if p.requires_grad:
                members.setdefault(optimizer._kind(p, group), []).append(p)
                rest.append({"step": 4})
                rest += [{name: 4 * math.prod(shape)} for name, shape in optimizer._extra(p, group).items()]
        for kind, params in members.items():
            found = parts(optimizer._moments, kind.state, kind.remainder)
            sizes = [blocks(p.numel()) for p in params]
            arenas.append(StateArena(found, sizes, [tensor_bytes([p]) for p in params], optimizer._splits))
    return State(arenas, total(*rest))


def total(*several: dict[str, int]) -> dict[str, int]:
    """Sums by name, without those that are zero."""
    found: dict[str, int] = {}
    for each in several:
        for name, size in each.items():
            found[name] = found.get(name, 0) + size
    return {name: size for name, size in found.items() if size}


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of their elements."""
    return sum(t.numel() * t.element_size() for t in tensors)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that have gradients."""
    return [p for p in model.parameters() if p.requires_grad]
