"""Compute the memory of training by formulas; the model may be on the meta device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


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


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total bytes of the elements of ``tensors``."""
    return sum(t.numel() * t.element_size() for t in tensors)
