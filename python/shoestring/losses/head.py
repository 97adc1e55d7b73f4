"""Helpers of the losses that compute the logits of an output head themselves.

The helpers convert the weight and the adapter of the head to operator arguments.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from shoestring.quantization.quantized_tensor import QuantizedTensor


def weight_arguments(weight: Tensor, prefix: str = "") -> dict[str, Any]:
    """Return the operator arguments that describe a dense or quantised weight.

    Their names begin with ``prefix``.
    """
    if not isinstance(weight, QuantizedTensor):
        return {f"{prefix}weight": weight}
    parts: dict[str, Any] = {"weight": weight.packed, "absmax": weight.absmax, "nested": weight.nested}
    parts |= {"quant_type": weight.quant_type, "block_size": weight.block_size}
    return {prefix + name: part for name, part in parts.items()}


def lora_arguments(
    where: str, hidden: Tensor, lora_A: Tensor | None, lora_B: Tensor | None, scaling: float
) -> dict[str, Tensor]:
    """Return the two factors of LoRA's contribution to the logits: lora_hidden (..., rank) and
    lora_B (vocab, rank).

    Without lora_A and lora_B, return an empty dict.

    Raises:
        ValueError: only one of lora_A and lora_B is given, or lora_A does not fit hidden.
    """
    if (lora_A is None) != (lora_B is None):
        raise ValueError(f"{where}: lora_A and lora_B: expected both or neither")
    if lora_A is None or lora_B is None:
        return {}
    if lora_A.shape[-1] != hidden.shape[-1]:
        raise ValueError(
            f"{where}: lora_A: expected shape (rank, {hidden.shape[-1]}), received {tuple(lora_A.shape)}"
        )
    return {"lora_hidden": scaling * F.linear(hidden.to(lora_A.dtype), lora_A), "lora_B": lora_B}
