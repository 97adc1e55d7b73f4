"""Compute several linear layers with the same input by one call of an operator."""

from collections.abc import Sequence

from torch import Tensor, nn

from shoestring.adapters import linear as adapted
from shoestring.adapters.lora_linear import LoraWeight, lora_linear, lora_linear_group
from shoestring.gemm.dense import dense_linear_group, is_plain
from shoestring.quantization.quantized_linear_module import QuantizedLinear


def weight_of(layer: nn.Module) -> tuple[LoraWeight, float] | None:
    """Return a frozen linear layer as a LoraWeight, and its dropout probability.

    Return None if the layer has a trained weight, hooks, a replaced forward or a compute_dtype. In these
    cases the operator would not compute what a call of the layer computes.
    """
    if (
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or "forward" in layer.__dict__
    ):
        return None
    if getattr(layer, "compute_dtype", None) is not None:
        return None
    if type(layer) is adapted.LoraLinear:
        return layer.lora_weight()
    if type(layer) not in (nn.Linear, QuantizedLinear) or layer.weight.requires_grad:
        return None
    return LoraWeight(layer.weight, bias=layer.bias), 0.0  # type: ignore[arg-type]  # the class is checked above


def together(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor] | None:
    """Return the outputs of all layers, computed by one call of the operator; None if that is impossible.

    Also return None if all layers are dense and have no adapter.
    """
    pairs = [weight_of(layer) for layer in layers]
    if any(pair is None for pair in pairs):
        return None
    weights = [pair[0] for pair in pairs if pair is not None]
    dropouts = {pair[1] for pair in pairs if pair is not None and pair[0].lora_A is not None}
    if len(dropouts) > 1 or all(
        w.lora_A is None and type(w.weight) in (Tensor, nn.Parameter) for w in weights
    ):
        return None
    return lora_linear_group(x, weights, dropout=dropouts.pop() if dropouts else 0.0)


def forward_together(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Return the outputs of the layers, computed by one call of an operator if possible, else one by one.

    Plain layers are computed by this package or by PyTorch, whichever is faster, as in C++.
    """
    outputs = together(layers, x)
    if outputs is None and all(is_plain(layer) and layer.weight.requires_grad for layer in layers):
        outputs = dense_linear_group(x, layers)
    return [project(x, layer) for layer in layers] if outputs is None else outputs


def project(x: Tensor, layer: nn.Module) -> Tensor:
    """Return the output of a layer. See ``forward_together`` for a plain one."""
    y: Tensor = dense_linear_group(x, [layer])[0] if is_plain(layer) else layer(x)
    return y


def adapted_swiglu(
    x: Tensor, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module
) -> Tensor | None:
    """Compute ``down_proj(silu(gate_proj(x)) * up_proj(x))`` without saving products for backward.

    Neither ``silu(gate_proj(x))`` nor the input of ``down_proj`` is saved. Return None if ``down_proj`` is
    not a frozen layer with a low-rank adapter.
    """
    # Without an adapter the operator would save no memory: a frozen down_proj does not save its input for
    # backward anyway, and a trained down_proj needs its input.
    down = weight_of(down_proj)
    if down is None or down[0].lora_A is None:
        return None
    gate, up = forward_together(x, [gate_proj, up_proj])
    w, dropout = down
    return lora_linear(
        up, w.weight, w.lora_A, w.lora_B, w.bias, scaling=w.scaling, gain=w.gain, gate=gate, dropout=dropout
    )
