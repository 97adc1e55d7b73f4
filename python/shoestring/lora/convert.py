"""Adapters onto a model, and into its weights."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoestring.lora.layer import LoraLinear, attach, merge_layer, unmerge_layer
from shoestring.lora.targets import all_linear, find_targets
from shoestring.nn.quantized_linear import QuantizedLinear, quantize_weight
from shoestring.ops.quantize_4bit import BLOCK_SIZES, CODES


def apply(
    model: nn.Module,
    *,
    rank: int = 16,
    alpha: float = 32,
    target_modules: str | Sequence[str] = "all-linear",
    quantize: str | None = None,
    nested: bool = False,
    block_size: int | None = None,
    init: str = "default",
    rslora: bool = False,
    dropout: float = 0.0,
) -> nn.Module:
    """Freezes a model and gives its linear layers trainable low-rank adapters, in place.

    Args:
        model: any module. Of a transformers model "all-linear" leaves out the output head, tied or not.
        rank: rows of lora_A and columns of lora_B.
        alpha: the low-rank product is multiplied by alpha / rank.
        target_modules: "all-linear"; a list of names, or of what names end with after a dot; or a regular expression
            for the whole name (PEFT's rules).
        quantize: None, or "nf4", "fp4" or "int8": every linear layer but the output head, with an adapter or without,
            gets a weight of 4 bits (QLoRA, arXiv 2305.14314) or int8, one layer after the other.
        nested: 8-bit scales for the 4-bit weights (double quantisation). Not with "int8".
        block_size: 4-bit weights that share a scale: a power of two from 32 to 4096; None is 64. Not with "int8", whose
            rows have a scale each.
        init: of lora_A: "default" (kaiming uniform, a = sqrt 5) or "gaussian" (standard deviation 1 / rank); lora_B is
            zero. The numbers drawn, and their order, are PEFT's: one torch seed gives both the same start.
        rslora: alpha / sqrt(rank) instead (arXiv 2312.03732).
        dropout: probability of dropping an element of what lora_A reads, in training.

    Returns:
        The model. Adapters are fp32 (fp64 where the weight is), whatever the base.

    Raises:
        ValueError: an option outside its range, targets that match nothing or are not linear layers, or a model that
            has adapters already.
    """
    _check(rank, alpha, quantize, init, dropout)
    targets = find_targets(model, target_modules)
    taken = next((name for name, module in model.named_modules() if isinstance(module, LoraLinear)), None)
    if taken is not None:
        raise ValueError(f"lora.apply: model: expected one without adapters, but {taken} has one; merge it first")
    if quantize is not None:
        _check_quantizable(model, quantize, block_size, nested)
    dtypes = {name: layer.weight.dtype for name, layer in targets.items() if type(layer) is nn.Linear}
    model.requires_grad_(False)
    if quantize is not None:
        for layer in all_linear(model).values():
            if type(layer) is nn.Linear:
                quantize_weight(layer, quantize, block_size, nested)
                layer.__class__ = QuantizedLinear
                layer.compute_dtype = None  # type: ignore[assignment]
    for name, layer in targets.items():
        lora_A = _draw(layer, rank, init, dtypes.get(name) if quantize is None else None)
        lora_B = torch.zeros(layer.out_features, rank, dtype=lora_A.dtype, device=lora_A.device)
        attach(layer, lora_A, lora_B, alpha=alpha, rslora=rslora, dropout=dropout)
    return model


def _check(rank: int, alpha: float, quantize: str | None, init: str, dropout: float) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"lora.apply: rank: expected an integer of at least 1, received {rank!r}")
    if not math.isfinite(alpha):
        raise ValueError(f"lora.apply: alpha: expected a finite number, received {alpha!r}")
    if quantize is not None and quantize not in (*CODES, "int8"):
        raise ValueError(f"lora.apply: quantize: expected None, 'nf4', 'fp4' or 'int8', received {quantize!r}")
    if init not in ("default", "gaussian"):
        raise ValueError(f"lora.apply: init: expected 'default' or 'gaussian', received {init!r}")
    if not 0 <= dropout < 1:
        raise ValueError(f"lora.apply: dropout: expected a probability in [0, 1), received {dropout!r}")


def _check_quantizable(model: nn.Module, quantize: str, block_size: int | None, nested: bool) -> None:
    if quantize == "int8" and (block_size is not None or nested):
        raise ValueError(
            "lora.apply: block_size and nested: expected None and False with quantize 'int8', whose rows have one fp32 "
            f"scale each, received {block_size!r} and {nested!r}"
        )
    if block_size is not None and block_size not in BLOCK_SIZES:
        raise ValueError(f"lora.apply: block_size: expected one of {BLOCK_SIZES}, received {block_size!r}")
    for name, layer in all_linear(model).items():
        if layer.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"lora.apply: quantize: expected fp32, bf16 or fp16 weights, received {layer.weight.dtype} in {name}"
            )


def _draw(layer: nn.Linear, rank: int, init: str, base_dtype: torch.dtype | None) -> Tensor:
    """lora_A, drawn on the CPU. PEFT builds two linear layers, which draw for themselves, before it initialises."""
    wide = torch.float64 if base_dtype == torch.float64 else torch.float32
    lora_A = torch.empty(rank, layer.in_features)
    nn.init.kaiming_uniform_(lora_A, a=math.sqrt(5))
    nn.init.kaiming_uniform_(torch.empty(layer.out_features, rank), a=math.sqrt(5))
    if init == "gaussian":
        nn.init.normal_(lora_A, std=1 / rank)
    else:
        nn.init.kaiming_uniform_(lora_A, a=math.sqrt(5))
    # PEFT takes the adapter through a dense base's dtype before it widens it.
    return lora_A.to(base_dtype or wide).to(wide).to(layer.weight.device)


def merge(model: nn.Module, *, reversible: bool = True) -> nn.Module:
    """Adds every adapter to its weight, in place; the layers become plain ``nn.Linear``.

    A quantised weight is dequantised, so the merged weight has the base's 16- or 32-bit dtype and one rounding of error.

    Args:
        model: a model with adapters.
        reversible: keep the former weights, for :func:`unmerge`; False frees them.

    Raises:
        ValueError: no layer has an adapter.
    """
    layers = [m for m in model.modules() if isinstance(m, LoraLinear)]
    if not layers:
        raise ValueError("lora.merge: model: expected one with adapters, received one without; call lora.apply first")
    for layer in layers:
        merge_layer(layer, reversible)
    return model


def unmerge(model: nn.Module) -> nn.Module:
    """Undoes :func:`merge`: every weight has exactly its former bytes, and its adapter again.

    Raises:
        ValueError: no layer keeps its former weight.
    """
    layers = [m for m in model.modules() if "unmerged" in m.__dict__]
    if not layers:
        raise ValueError(
            "lora.unmerge: model: expected one merged with reversible=True, received one without former weights"
        )
    for layer in layers:
        unmerge_layer(layer)
    return model
