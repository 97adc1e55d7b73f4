"""A linear layer whose frozen weight is held in 4 bits, and bitsandbytes' keys for it."""

import json
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.ops.linear_4bit import linear_4bit
from shoestring.ops.quantize_4bit import code_values, quantize_4bit
from shoestring.quantized_tensor import QuantizedTensor


class Linear4bit(nn.Linear):
    """``nn.Linear`` over a frozen 4-bit weight (QLoRA, arXiv 2305.14314); the bias stays as it is.

    A new layer is initialised as ``nn.Linear`` is and then quantised. ``state_dict`` has bitsandbytes' keys (``weight``
    uint8 [n / 2, 1], ``weight.absmax``, ``weight.quant_map``, ``weight.quant_state.bitsandbytes__nf4`` and those of
    nested scales), and both these and a dense ``weight`` load.

    Args:
        in_features, out_features, bias, device, dtype: as for ``nn.Linear``.
        quant_type: "nf4" or "fp4".
        block_size: elements that share a scale: a power of two from 32 to 4096.
        nested: 8-bit scales (double quantisation).
        compute_dtype: dtype that the input is converted to; the output comes back in the input's. None: the input's.
            On a CPU without bf16 units products are fp32 in any case.
    """

    weight: QuantizedTensor  # type: ignore[assignment]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        quant_type: str = "nf4",
        block_size: int = 64,
        nested: bool = False,
        compute_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.compute_dtype = compute_dtype
        quantize_weight(self, quant_type, block_size, nested)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        quant_type: str = "nf4",
        block_size: int = 64,
        nested: bool = False,
        compute_dtype: torch.dtype | None = None,
    ) -> "Linear4bit":
        """A layer with ``linear``'s weight quantised and its bias shared."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.compute_dtype = compute_dtype
        layer.register_parameter("bias", linear.bias)
        layer.weight = frozen(quantize_4bit(linear.weight, quant_type, block_size, nested))
        return layer.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        if self.compute_dtype is None:
            return linear_4bit(x, self.weight, self.bias)
        return linear_4bit(x.to(self.compute_dtype), self.weight, self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        w = self.weight
        return f"{super().extra_repr()}, {w.quant_type}, block_size={w.block_size}, nested={w.nested is not None}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_quantized(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        load_quantized(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def frozen(q: QuantizedTensor) -> nn.Parameter:
    """q as a parameter that is not trained."""
    return nn.Parameter(q, requires_grad=False)


def quantize_weight(linear: nn.Linear, quant_type: str, block_size: int, nested: bool) -> None:
    """Replaces a linear layer's dense weight by its 4-bit form."""
    linear.weight = frozen(quantize_4bit(linear.weight, quant_type, block_size, nested))  # type: ignore[assignment]


def save_quantized(module: nn.Linear, destination: dict[str, Any], prefix: str) -> None:
    """Writes bitsandbytes' keys in place of the ``weight`` that nn.Module put into ``destination``."""
    q = module.weight
    if not isinstance(q, QuantizedTensor):
        return
    state: dict[str, Any] = {
        "quant_type": q.quant_type,
        "blocksize": q.block_size,
        "dtype": str(q.dtype).removeprefix("torch."),
        "shape": list(q.shape),
    }
    key = prefix + "weight"
    destination[key] = q.packed.detach().view(-1, 1)
    destination[key + ".absmax"] = q.absmax.detach().flatten()
    destination[key + ".quant_map"] = code_values(q.quant_type)
    if q.nested is not None:
        destination[key + ".nested_absmax"] = q.nested[257:].detach().clone()
        destination[key + ".nested_quant_map"] = q.nested[1:257].detach().clone()
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": q.nested[0].item()}
    text = json.dumps(state).encode()
    destination[f"{key}.quant_state.bitsandbytes__{q.quant_type}"] = torch.tensor(list(text), dtype=torch.uint8)


def load_quantized(module: nn.Linear, state_dict: dict[str, Any], prefix: str) -> None:
    """Takes bitsandbytes' keys out of ``state_dict`` and puts a QuantizedTensor, under ``weight``, in their place.

    Raises:
        ValueError: parts that are missing or do not fit the layer.
    """
    key = prefix + "weight"
    found = [name for name in state_dict if name.startswith(key + ".quant_state.bitsandbytes__")]
    if not found:
        return
    state = json.loads(bytes(state_dict.pop(found[0]).tolist()))
    packed, absmax = state_dict[key], state_dict.pop(key + ".absmax")
    values = state_dict.pop(key + ".quant_map")
    if not torch.equal(values.cpu(), code_values(state["quant_type"])):
        raise ValueError(f"Linear4bit: {key}.quant_map: expected the {state['quant_type']} values, received others")
    if tuple(state["shape"]) != (module.out_features, module.in_features):
        expected = (module.out_features, module.in_features)
        raise ValueError(f"Linear4bit: {key}: expected shape {expected}, received {tuple(state['shape'])}")
    nested = None
    if "nested_offset" in state:
        if state["nested_blocksize"] != 256:
            raise ValueError(f"Linear4bit: {key}: nested_blocksize: expected 256, received {state['nested_blocksize']}")
        scales, map_ = state_dict.pop(key + ".nested_absmax"), state_dict.pop(key + ".nested_quant_map")
        nested = torch.cat([scales.new_tensor([state["nested_offset"]]), map_.float(), scales.float()])
    q = QuantizedTensor(
        packed.view(torch.uint8).flatten(),
        absmax.flatten(),
        nested,
        shape=state["shape"],
        dtype=getattr(torch, state["dtype"]),
        quant_type=state["quant_type"],
        block_size=state["blocksize"],
    )
    # Copied into the layer's own parts where they have this form, else the parameter takes the loaded one.
    own = module.weight
    same = isinstance(own, QuantizedTensor) and own.__tensor_flatten__() == q.__tensor_flatten__()
    if not same:
        module.weight = frozen(q.to(own.device))  # type: ignore[assignment]
    state_dict[key] = q
