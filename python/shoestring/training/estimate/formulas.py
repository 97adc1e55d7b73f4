"""Compute the memory of training by formulas; the model may be on the meta device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoestring.optim.base import LowMemoryOptimizer
from shoestring.optim.low_rank import LowRankOptimizer
from shoestring.optim.state_layout import Kind, Part, blocks


@dataclass(frozen=True)
class Activations:
    """The memory that autograd saves between forward and backward, and its formula as text."""

    bytes: int
    formula: str
    block: int  # bytes that one decoder block saves without gradient checkpointing


def activations(
    model: Any, tokens: int, *, baseline: bool, gradient_checkpointing: bool, size: int = 4
) -> Activations | None:
    """Estimate the memory that autograd saves for the backward pass.

    Per token, a Llama block in plain PyTorch saves about 12 vectors of the hidden size and 4 of the MLP size.
    A block patched by ``shoestring.patch`` saves the inputs and outputs of both norms, query, key, value,
    attention output, gate and up. The patched block also saves the product of gate and up if the weight of
    ``down_proj`` is trained.

    Args:
        model: a Hugging Face causal language model.
        tokens: number of tokens of a micro-batch.
        baseline: whether the model runs without shoestring's operators.
        gradient_checkpointing: whether only the inputs of the blocks are saved.
        size: bytes per element of the saved tensors.

    Returns:
        The estimate, or None for an unknown architecture.
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
    vectors = [(12, hidden), (4, mlp)] if baseline else [(6, hidden), (2, narrow), (2 + keeps_product, mlp)]
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
    if baseline:
        estimate, formula = estimate + 4 * tokens * vocab, formula + f" + {tokens} x {vocab} x 4 B"
    else:
        # number of saved rows of the hidden size: input of the last norm, gradient of the hidden states, and,
        # if the head is trained, its gradient
        rows = 2 * tokens + (vocab if head.requires_grad else 0)
        estimate, formula = estimate + size * rows * hidden, formula + f" + {rows} x {hidden} x {size} B"
    return Activations(estimate, formula, block)


@dataclass(frozen=True)
class StateArena:
    """Sizes of one arena: the buffer that holds the optimizer state of parameters with equal state format."""

    parts: list[Part]
    blocks: list[int]  # number of blocks of 256 elements, for each parameter
    core: Any  # the OptimizerCore that steps the parameters
    params: list[Tensor]
    extras: list[int]  # bytes of each parameter's state outside of the arena, without the step count

    @property
    def per_block(self) -> int:
        """Bytes of optimizer state per block of 256 elements."""
        return sum(part.per_block * part.dtype.itemsize for part in self.parts)

    def bytes(self, total: int | None = None) -> dict[str, int]:
        """Return the bytes of each part of the state of `total` blocks (None: all blocks of the arena)."""
        count = sum(self.blocks) if total is None else total
        return {part.name: count * part.per_block * part.dtype.itemsize for part in self.parts}


@dataclass(frozen=True)
class State:
    """Sizes of the state that an optimizer keeps once every trained parameter has had a gradient."""

    arenas: list[StateArena]
    # name -> bytes of state outside the arenas: step counts, and fp32 tensors of the update rule
    rest: dict[str, int]

    def bytes(self) -> dict[str, int]:
        """Return a dict from the name of each part of the state to its bytes."""
        return total(*(arena.bytes() for arena in self.arenas), self.rest)


def optimizer_state(
    optimizer: LowMemoryOptimizer | LowRankOptimizer, numel: Callable[[Tensor], int] = Tensor.numel
) -> State:
    """Return the sizes of the state that an optimizer will hold; the state need not be allocated yet.

    ``numel`` returns the number of a parameter's elements that this process steps.
    """
    if isinstance(optimizer, LowRankOptimizer):
        return _low_rank_state(optimizer, numel)
    arenas: list[StateArena] = []
    rest: list[dict[str, int]] = []
    for group in optimizer.param_groups:
        members: dict[Kind, list[Tensor]] = {}
        for p in group["params"]:
            if p.requires_grad:
                members.setdefault(optimizer._kind(p, group), []).append(p)
                rest.append({"step": 4})
                rest.append(_extras(optimizer, p, numel))
        for params in members.values():
            found = optimizer._parts(params[0], group)
            sizes = [blocks(numel(p)) for p in params]
            extras = [sum(_extras(optimizer, p, numel).values()) for p in params]
            arenas.append(StateArena(found, sizes, optimizer._core, params, extras))
    return State(arenas, total(*rest))


def _extras(optimizer: LowMemoryOptimizer, param: Tensor, numel: Callable[[Tensor], int]) -> dict[str, int]:
    """Return the bytes of a parameter's state outside of the arenas, of which processes split some tensors."""
    split = optimizer._elementwise(param)
    shapes = optimizer._extra(param).items()
    return {name: 4 * (numel(param) if name in split else math.prod(shape)) for name, shape in shapes}


def _low_rank_state(optimizer: LowRankOptimizer, numel: Callable[[Tensor], int]) -> State:
    """Return the sizes of the projections, and of the base optimizer's state.

    Each process has those of whole matrices.
    """
    base = optimizer._virtual.base
    assert isinstance(base, LowMemoryOptimizer)
    kept = optimizer._method.kept
    own = [{kept: like.nbytes} for each in optimizer._virtual.projected for _, like in each]
    virtual = set(optimizer._virtual.of.values())
    state = optimizer_state(base, lambda p: p.numel() if p in virtual else numel(p))
    return State(state.arenas, total(state.rest, *own))


def total(*several: dict[str, int]) -> dict[str, int]:
    """Add up dicts from names to sizes; leave out names whose sum is zero."""
    found: dict[str, int] = {}
    for each in several:
        for name, size in each.items():
            found[name] = found.get(name, 0) + size
    return {name: size for name, size in found.items() if size}


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total bytes of the elements of ``tensors``."""
    return sum(t.numel() * t.element_size() for t in tensors)
