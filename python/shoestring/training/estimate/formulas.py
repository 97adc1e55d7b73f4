"""Compute the memory of training by formulas; the model may be on the meta device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shoestring.checkpoint.blocks import listed_blocks
from shoestring.core.stacks import stacks_of


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
    mixtures = [sizes for block in listed_blocks(model).values() if (sizes := _mixture(block, shape))]
    has_experts = any(True for module in model.modules() for _ in stacks_of(module))
    if not (layers and hidden and mlp and heads) or (has_experts and (baseline or not mixtures)):
        return None
    head_dim = getattr(shape, "head_dim", None) or hidden // heads
    narrow = (getattr(shape, "num_key_value_heads", None) or heads) * head_dim
    keeps_product = any(p.requires_grad and p.shape == (hidden, mlp) for p in model.parameters())
    outside = [(12, hidden)] if baseline else [(6, hidden), (2, narrow)]
    dense = [*outside, (4 if baseline else 2 + keeps_product, mlp)]
    # the vectors that each of some blocks keep, and the number of these blocks
    kinds = [(dense, layers - len(mixtures))]
    kinds += [([*outside, *sizes], mixtures.count(sizes)) for sizes in dict.fromkeys(mixtures)]
    kinds = [(vectors, count) for vectors, count in kinds if count]
    block = tokens * size * max(_elements(vectors) for vectors, _ in kinds)
    if gradient_checkpointing:
        estimate = tokens * size * layers * hidden
        formula = f"{tokens} x {layers} x {hidden} x {size} B (block inputs)"
    else:
        estimate = tokens * size * sum(count * _elements(vectors) for vectors, count in kinds)
        sums = [f"{n} x ({' + '.join(f'{c}x{width}' for c, width in vectors)})" for vectors, n in kinds]
        text = sums[0] if len(sums) == 1 else f"({' + '.join(sums)})"
        formula = f"{tokens} x {text} x {size} B"
    # Adapters of experts are kept once more, in the order of the experts.
    copies = sum(
        p.numel()
        for module in model.modules()
        if any(stacks_of(module))
        for name, p in module.named_parameters()
        if "lora_" in name
    )
    if copies and not gradient_checkpointing:
        estimate, formula = (
            estimate + size * copies,
            formula + f" + {copies} x {size} B (adapters of experts)",
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


def _elements(vectors: Iterable[tuple[int, int]]) -> int:
    return sum(count * width for count, width in vectors)


def _mixture(block: nn.Module, shape: Any) -> tuple[tuple[int, int], ...]:
    """Return the vectors of a token that experts in place of an MLP keep, as (count, width); none for another block.

    The input of the gates is kept for each expert of the token, and gate and up of an MLP that all tokens share.
    """
    stacks = [
        stack for module in block.modules() for name, stack in stacks_of(module) if name == "gate_up_proj"
    ]
    top_k = getattr(shape, "num_experts_per_tok", None)
    if not stacks or top_k is None:
        return ()
    shared = [
        module
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and name.endswith("down_proj")
    ]
    experts = stacks[0].shape[0]
    gates = (top_k, stacks[0].numel() // (experts * shape.hidden_size))
    return (gates, (2, experts), *((2 + mlp.weight.requires_grad, mlp.in_features) for mlp in shared))


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total bytes of the elements of ``tensors``."""
    return sum(t.numel() * t.element_size() for t in tensors)
