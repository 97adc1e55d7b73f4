"""Linear layers that read one input, as one operator where they are frozen, with adapters or quantised."""

from collections.abc import Sequence

from torch import Tensor, nn

from shoestring.adapters import linear as adapted
from shoestring.adapters.lora_linear import LoraWeight, lora_linear, lora_linear_group
from shoestring.quantization.quantized_linear_module import QuantizedLinear


def weight_of(layer: nn.Module) -> tuple[LoraWeight, float] | None:
    """A frozen layer as the operator takes it, and its dropout; None where calling it is more, or it is trained."""
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
    """The layers' outputs from one call; None where that cannot be."""
    found = [weight_of(layer) for layer in layers]
    if any(f is None for f in found):
        return None
    weights = [f[0] for f in found if f is not None]
    dropouts = {f[1] for f in found if f is not None and f[0].lora_A is not None}
    if len(dropouts) > 1 or all(
        w.lora_A is None and type(w.weight) in (Tensor, nn.Parameter) for w in weights
    ):
        return None
    return lora_linear_group(x, weights, dropout=dropouts.pop() if dropouts else 0.0)


def forward_together(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """The same; where it cannot be, one layer after the other."""
    return together(layers, x) or [layer(x) for layer in layers]


def adapted_swiglu(
    x: Tensor, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module
) -> Tensor | None:
    """``down_proj(silu(gate_proj(x)) * up_proj(x))`` that keeps neither silu nor the product for backward; None where
    ``down_proj`` has no adapter over a frozen weight."""
    down = weight_of(down_proj)
    if down is None or down[0].lora_A is None:  # it would keep the product for a gradient of its weight
        return None
    gate, up = forward_together(x, [gate_proj, up_proj])
    w, dropout = down
    return lora_linear(
        up, w.weight, w.lora_A, w.lora_B, w.bias, scaling=w.scaling, gain=w.gain, gate=gate, dropout=dropout
    )
