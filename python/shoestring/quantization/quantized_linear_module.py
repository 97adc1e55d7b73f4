"""A linear layer with a frozen 4-bit or int8 weight, and its state_dict in bitsandbytes' format."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shoestring.core.save_pretrained import watch
from shoestring.quantization.quantize_4bit import BLOCK_SIZES, TYPES, quantize_4bit
from shoestring.quantization.quantize_int8 import quantize_int8
from shoestring.quantization.quantized_keys import read_keys, write_keys
from shoestring.quantization.quantized_linear import quantized_linear
from shoestring.quantization.quantized_tensor import QuantizedTensor


class KeyedLinear(nn.Linear):
    """``nn.Linear`` that saves and loads a quantised weight with bitsandbytes' keys in its ``state_dict``."""

    _must_run: ClassVar[bool] = True  # set_fast_paths turns off fused paths that skip forward

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if isinstance(self.weight, QuantizedTensor):
            write_keys(self.weight, destination, prefix + "weight")

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        watch()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        _load_codes(self, state_dict, prefix)
        has_codes = isinstance(self.weight, QuantizedTensor)
        is_assigned = (
            local_metadata.get("assign_to_params_buffers", False) and prefix + "weight" in state_dict
        )
        if has_codes and is_assigned and not isinstance(state_dict[prefix + "weight"], QuantizedTensor):
            raise ValueError(
                f"QuantizedLinear: {prefix}weight: expected codes with load_state_dict(assign=True), received a dense weight. "
                "Leave out assign=True to quantise it"
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class QuantizedLinear(KeyedLinear):
    """``nn.Linear`` with a frozen 4-bit (QLoRA, arXiv 2305.14314) or int8 weight; the bias is not quantised.

    A new layer is initialised like ``nn.Linear`` and then quantised. Its ``state_dict`` has bitsandbytes'
    keys. The layer loads a ``state_dict`` with bitsandbytes' keys or with a dense ``weight``.

    - nf4 and fp4: ``weight`` (uint8 [n / 2, 1]), ``weight.absmax``, ``weight.quant_map``,
      ``weight.quant_state.bitsandbytes__nf4`` (or ``__fp4``), and with nested scales ``weight.nested_absmax``
      and ``weight.nested_quant_map``.
    - int8: ``weight`` (int8), ``SCB`` and ``weight_format`` (0).
    - int4, which bitsandbytes does not have: the keys of nf4, but ``weight.absmax`` is int32 and the state is
      ``weight.quant_state.shoestring__int4``.

    Args:
        in_features, out_features, bias, device, dtype: as for ``nn.Linear``.
        quant_type: "nf4", "fp4", "int4" or "int8".
        block_size: number of elements that share a scale, for 4-bit types: a power of two from 32 to 4096;
            None is 64. An int8 weight has one scale per row.
        double_quant: for "nf4" and "fp4": quantise the scales to 8 bits (double quantisation).
        compute_dtype: dtype to which the input is converted; the output is converted back to the dtype of the
            input. None: the dtype of the input. A CPU without bf16 matrix units multiplies in fp32 in any
            case.

    Raises:
        ValueError: block_size is given for "int8", or double_quant is True for "int8" or "int4".

    Example:
        >>> layer = shoestring.nn.QuantizedLinear.from_linear(torch.nn.Linear(256, 64), quant_type="int8")
        >>> layer
        QuantizedLinear(in_features=256, out_features=64, bias=True, int8, block_size=256, double_quant=False)
        >>> layer(torch.randn(4, 256)).shape
        torch.Size([4, 64])
    """

    weight: QuantizedTensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        quant_type: str = "nf4",
        block_size: int | None = None,
        double_quant: bool = False,
        compute_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.compute_dtype = compute_dtype
        quantize_weight(self, quant_type, block_size, double_quant)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        quant_type: str = "nf4",
        block_size: int | None = None,
        double_quant: bool = False,
        compute_dtype: torch.dtype | None = None,
    ) -> "QuantizedLinear":
        """Return a QuantizedLinear with the quantised weight of ``linear`` and the same bias parameter.

        quant_type, block_size, double_quant and compute_dtype are as for the constructor.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.compute_dtype = compute_dtype
        layer.register_parameter("bias", linear.bias)
        layer.weight = frozen(_quantized(linear.weight, quant_type, block_size, double_quant))  # type: ignore[assignment]
        return layer.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        if self.compute_dtype is None:
            return quantized_linear(x, self.weight, self.bias)
        return quantized_linear(x.to(self.compute_dtype), self.weight, self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        w = self.weight
        return f"{super().extra_repr()}, {w.quant_type}, block_size={w.block_size}, double_quant={w.nested is not None}"


def frozen(weight: Tensor) -> nn.Parameter:
    """Return ``weight``, a dense or quantised tensor, as a parameter that does not require a gradient."""
    return nn.Parameter(weight, requires_grad=False)


def _quantized(
    weight: Tensor, quant_type: str, block_size: int | None, double_quant: bool
) -> QuantizedTensor:
    watch()
    if quant_type != "int8":
        return quantize_4bit(weight, quant_type, 64 if block_size is None else block_size, double_quant)
    check_form("QuantizedLinear", quant_type, block_size, double_quant)
    return quantize_int8(weight)


def check_form(
    caller: str,
    quant_type: str,
    block_size: int | None,
    double_quant: bool,
    argument: str = "quant_type",
    before: str = "",
) -> None:
    """Raise ValueError unless the options of a quantised weight fit together.

    Args:
        caller: the function that the user called, which begins the error message.
        quant_type, block_size, double_quant: as for :class:`QuantizedLinear`.
        argument: name of the user's argument that holds ``quant_type``.
        before: what the argument may be besides the types, such as "None, ".
    """
    if quant_type not in (*TYPES, "int8"):
        raise ValueError(
            f"{caller}: {argument}: expected {before}'nf4', 'fp4', 'int4' or 'int8', received {quant_type!r}"
        )
    if quant_type == "int4" and double_quant:
        raise ValueError(
            f"{caller}: double_quant: expected False with {argument} 'int4', whose scales are bf16, received True"
        )
    if quant_type == "int8" and (block_size is not None or double_quant):
        raise ValueError(
            f"{caller}: block_size and double_quant: expected None and False with {argument} 'int8', whose rows have one fp32 "
            f"scale each, received {block_size!r} and {double_quant!r}"
        )
    if block_size is not None and block_size not in BLOCK_SIZES:
        raise ValueError(f"{caller}: block_size: expected one of {BLOCK_SIZES}, received {block_size!r}")


def check_dtype(caller: str, argument: str, dtype: torch.dtype, where: str = "") -> None:
    """Raise ValueError unless weights of this dtype can be quantised."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{caller}: {argument}: expected fp32, bf16 or fp16{where and ' weights'}, received {dtype}{where}"
        )


def quantize_weight(linear: nn.Linear, quant_type: str, block_size: int | None, double_quant: bool) -> None:
    """Replace the dense weight of a linear layer by its quantised form."""
    linear.weight = frozen(_quantized(linear.weight, quant_type, block_size, double_quant))


def _load_codes(module: nn.Linear, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace the tensors under bitsandbytes' keys in ``state_dict`` by one QuantizedTensor, ``weight``.

    Raises:
        ValueError: a key is missing, or a tensor does not fit the layer.
    """
    weight = module.weight
    shape = (module.out_features, module.in_features)
    q = read_keys(state_dict, prefix + "weight", shape, weight.dtype, "QuantizedLinear")
    if q is None:
        return
    # If the loaded weight q has the same format as the layer's weight, nn.Module copies q into it. Otherwise
    # q becomes the layer's parameter.
    if not (isinstance(weight, QuantizedTensor) and weight.__tensor_flatten__() == q.__tensor_flatten__()):
        module.weight = frozen(q.to(weight.device))
    state_dict[prefix + "weight"] = q
