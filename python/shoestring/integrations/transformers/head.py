"""Find the weights of a model's output layer, for the arguments of ``linear_cross_entropy``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoestring.adapters.linear import LoraLinear
from shoestring.adapters.low_rank import concatenated
from shoestring.adapters.trained_copy import TrainedCopy
from shoestring.core.presence import BRINGS_WEIGHTS
from shoestring.quantization.quantized_linear_module import QuantizedLinear

# The arguments from which a loss computes the logits of an output head: hidden states, weight, bias, and
# keyword arguments for the LoRA adapter.
Weights = tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]


def weights(head: nn.Module, hidden: Tensor) -> Weights:
    """Return hidden, weight, bias and LoRA options, from which a loss can compute ``head(hidden)``.

    ``hidden`` is converted to the dtype in which the head computes.

    Raises:
        TypeError: the head is not a linear layer with or without LoRA, or has hooks, which a loss without
            logits would skip.
    """
    # A loss brings offloaded weights itself, so it may skip the two hooks of offload_weights.
    allowed = 1 if BRINGS_WEIGHTS in head.__dict__ else 0
    if "forward" in head.__dict__ or max(len(head._forward_hooks), len(head._forward_pre_hooks)) > allowed:
        raise refused("hooks or a replaced forward", "remove them")
    if isinstance(head, TrainedCopy):
        return weights(head.in_use(), hidden)
    base: Any
    if _is_peft(head):
        base, lora = _peft(head)
    elif isinstance(head, LoraLinear):
        base, lora = head, _adapters(head)
    else:
        base, lora = head, {}
    if type(base) not in (nn.Linear, QuantizedLinear, LoraLinear):
        raise refused(type(base).__name__, "expected nn.Linear, QuantizedLinear, or either with LoRA")
    weight, bias = base.weight, base.bias
    if hasattr(weight, "device_mesh"):
        raise refused("a sharded weight (DTensor)", "shard the model with the head in the root group")
    return hidden.to(getattr(base, "compute_dtype", None) or hidden.dtype), weight, bias, lora


def _adapters(head: LoraLinear) -> dict[str, Any]:
    """Return the active LoRA adapters of the head, combined into one, as keyword arguments of the loss."""
    names = head.current()
    options = [head.adapters[name] for name in names]
    if any(o.dropout > 0 for o in options) and head.training:
        raise refused(f"dropout {max(o.dropout for o in options)} on its adapter", "set its dropout to 0")
    if head.rows is not None or any(o.dora or o.lora_bias for o in options):
        raise refused("DoRA, a bias on its adapter or adapters by row", "expected plain LoRA adapters")
    lora_A, lora_B, scaling = concatenated(head.parts(names))
    return {} if lora_A is None else {"lora_A": lora_A, "lora_B": lora_B, "scaling": scaling}


def _is_peft(head: nn.Module) -> bool:
    return any(kind.__module__ == "peft.tuners.lora.layer" for kind in type(head).__mro__)


def _peft(head: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return the linear layer inside a PEFT LoRA layer, and its active adapter as arguments of the loss.

    PEFT classes are recognised by name, so that PEFT need not be installed.
    """
    if type(head).__name__ != "Linear":
        raise refused(f"PEFT's {type(head).__name__}", "expected peft.tuners.lora.layer.Linear")
    active = [name for name in head.active_adapters if name in head.lora_A]
    if head.disable_adapters or head.merged or not active:
        if head.disable_adapters and head.merged:
            raise refused("a merged adapter that is disabled", "unmerge it")
        return head.base_layer, {}
    name = active[0]
    dropout = getattr(head.lora_dropout[name], "p", 0.0)
    if (
        len(active) > 1
        or name in head.lora_variant
        or head.lora_bias.get(name)
        or (dropout and head.training)
    ):
        raise refused(
            "more than one adapter, a variant of LoRA, a bias or dropout on it", "expected one plain adapter"
        )
    lora = {
        "lora_A": head.lora_A[name].weight,
        "lora_B": head.lora_B[name].weight,
        "scaling": head.scaling[name],
    }
    return head.base_layer, lora


def refused(what: str, instead: str) -> TypeError:
    """Return the exception for an output layer with a property that the loss would ignore."""
    return TypeError(f"shoestring.patch: the model's output layer: {what}; {instead}, or call report.undo()")


def has_meta(model: nn.Module) -> bool:
    """Return whether any parameter of the model is on the meta device."""
    return any(p.device == torch.device("meta") for p in model.parameters())
