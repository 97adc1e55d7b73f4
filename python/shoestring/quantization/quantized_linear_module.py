"""A linear layer with a frozen 4-bit or int8 weight, and its state_dict in bitsandbytes' format."""

import json
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shoestring.core.save_pretrained import watch
from shoestring.files.read_file import is_integer, is_number, parse_json, shown
from shoestring.quantization.nested_scales import GROUP, VALUES, NestedScales, groups_of
from shoestring.quantization.quantize_4bit import BLOCK_SIZES, TYPES, code_values, quantize_4bit
from shoestring.quantization.quantize_int8 import quantize_int8
from shoestring.quantization.quantized_linear import quantized_linear
from shoestring.quantization.quantized_tensor import QuantizedTensor

LONGEST_STATE = 4096  # maximum size in bytes of the JSON in a quant_state; the usual size is about 250 bytes


class KeyedLinear(nn.Linear):
    """``nn.Linear`` that saves and loads a quantised weight with bitsandbytes' keys in its ``state_dict``."""

    _must_run: ClassVar[bool] = True  # set_fast_paths turns off fused paths that skip forward

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_quantized(self, destination, prefix)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        watch()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        load_quantized(self, state_dict, prefix)
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


def save_quantized(module: nn.Linear, destination: dict[str, Any], prefix: str) -> None:
    """In the state dict ``destination``, replace the quantised weight by tensors under bitsandbytes' keys."""
    q = module.weight
    if not isinstance(q, QuantizedTensor):
        return
    if q.quant_type == "int8":
        destination[prefix + "weight"] = q.packed.detach()
        destination[prefix + "SCB"] = q.absmax.detach()
        destination[prefix + "weight_format"] = torch.tensor(0, dtype=torch.uint8)
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
        tables = NestedScales.of(q.nested.detach())
        destination[key + ".nested_absmax"] = tables.scales.clone()
        destination[key + ".nested_quant_map"] = tables.values.clone()
        offset = tables.offset.item()
        state |= {"nested_blocksize": GROUP, "nested_dtype": "float32", "nested_offset": offset}
    text = json.dumps(state).encode()
    destination[key + _state_name(q.quant_type)] = torch.tensor(list(text), dtype=torch.uint8)


def _state_name(quant_type: str) -> str:
    owner = "shoestring" if quant_type == "int4" else "bitsandbytes"
    return f".quant_state.{owner}__{quant_type}"


def load_quantized(module: nn.Linear, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace the tensors under bitsandbytes' keys in ``state_dict`` by one QuantizedTensor, ``weight``.

    Raises:
        ValueError: a key is missing, or a tensor does not fit the layer.
    """
    weight = module.weight
    q = read_quantized(state_dict, prefix, (module.out_features, module.in_features), weight.dtype)
    if q is None:
        return
    # If the loaded weight q has the same format as the layer's weight, nn.Module copies q into it. Otherwise
    # q becomes the layer's parameter.
    if not (isinstance(weight, QuantizedTensor) and weight.__tensor_flatten__() == q.__tensor_flatten__()):
        module.weight = frozen(q.to(weight.device))
    state_dict[prefix + "weight"] = q


def read_quantized(
    state_dict: dict[str, Any], prefix: str, shape: tuple[int, int], dtype: torch.dtype
) -> QuantizedTensor | None:
    """Build a layer's quantised weight from the tensors under bitsandbytes' keys in a state dict.

    The layer's keys of bitsandbytes are removed from ``state_dict``, except ``weight``.

    Args:
        state_dict: the tensors, by key.
        prefix: the part of the layer's keys before ``weight``, such as "model.layers.0.".
        shape: the expected shape: (out_features, in_features).
        dtype: dtype that an int8 weight stands for. For a 4-bit weight, the state dict contains the dtype.

    Returns:
        The weight, or None if ``state_dict`` has none of bitsandbytes' keys for this layer.

    Raises:
        ValueError: a key is missing, or a tensor does not fit.
    """
    watch()
    key = prefix + "weight"
    names = [
        name
        for name in state_dict
        if name.startswith((key + ".quant_state.bitsandbytes__", key + _state_name("int4")))
    ]
    try:
        if prefix + "SCB" in state_dict:
            return _int8_of(state_dict, prefix, shape, dtype)
        return _4bit_of(state_dict, key, names[0], shape) if names else None
    except KeyError as error:
        raise ValueError(
            f"QuantizedLinear: {key}: expected bitsandbytes' parts, but {error} is missing"
        ) from None


def _int8_of(
    state_dict: dict[str, Any], prefix: str, shape: tuple[int, int], dtype: torch.dtype
) -> QuantizedTensor:
    """Take an int8 weight under bitsandbytes' keys out of a state dict."""
    packed, absmax = state_dict[prefix + "weight"], state_dict.pop(prefix + "SCB")
    order = state_dict.pop(prefix + "weight_format", 0)
    order = order.tolist() if isinstance(order, Tensor) and order.numel() == 1 else order
    if order not in (0, [0]):
        raise ValueError(
            f"QuantizedLinear: {prefix}weight_format: expected 0 (rows in plain order), received "
            f"{shown(order)}"
        )
    if (
        packed.dtype != torch.int8
        or packed.shape != shape
        or absmax.shape != shape[:1]
        or not absmax.is_floating_point()
    ):
        raise ValueError(
            f"QuantizedLinear: {prefix}weight and SCB: expected int8 {shape} and {shape[:1]}, received {packed.dtype} "
            f"{tuple(packed.shape)} and {tuple(absmax.shape)}"
        )
    return QuantizedTensor(
        packed, absmax.float(), None, shape=shape, dtype=dtype, quant_type="int8", block_size=shape[1]
    )


def _state_of(text: Tensor, state_key: str) -> dict[str, Any]:
    """Parse bitsandbytes' JSON description of a 4-bit weight, and check the type of every field.

    Raises:
        ValueError: the text is not a description of a 4-bit weight.
    """
    if text.dtype != torch.uint8 or text.numel() > LONGEST_STATE:
        raise ValueError(
            f"QuantizedLinear: {state_key}: expected at most {LONGEST_STATE} bytes of JSON, received {text.numel()} of {text.dtype}"
        )
    state = parse_json(
        bytes(text.flatten().tolist()),
        f"QuantizedLinear: {state_key}: expected bitsandbytes' JSON, received another",
    )
    if not isinstance(state, dict):
        raise ValueError(f"QuantizedLinear: {state_key}: expected a JSON object, received {shown(state)}")
    checks: dict[str, tuple[Callable[[Any], bool], str]] = {
        "quant_type": (lambda v: isinstance(v, str), "a name"),
        "blocksize": (is_integer, "an integer"),
        "shape": (lambda v: isinstance(v, list) and all(map(is_integer, v)), "a list of integers"),
        "dtype": (lambda v: v in ("float32", "bfloat16", "float16"), "float32, bfloat16 or float16"),
        "nested_offset": (is_number, "a finite number"),
    }
    for field, (fits, expected) in checks.items():
        if field == "nested_offset" and field not in state:
            continue
        if not fits(state[field]):
            raise ValueError(
                f"QuantizedLinear: {state_key}: {field}: expected {expected}, received {shown(state[field])}"
            )
    return state


def _4bit_of(state_dict: dict[str, Any], key: str, state_key: str, shape: tuple[int, int]) -> QuantizedTensor:
    """Take a 4-bit weight under bitsandbytes' keys out of a state dict."""
    state = _state_of(state_dict.pop(state_key), state_key)
    quant_type, block_size = state["quant_type"], state["blocksize"]
    if quant_type not in TYPES or block_size not in BLOCK_SIZES:
        raise ValueError(
            f"QuantizedLinear: {state_key}: expected {' or '.join(TYPES)} in blocks of {BLOCK_SIZES}, received "
            f"{shown(quant_type)} in blocks of {shown(block_size)}"
        )
    packed, absmax = state_dict[key].flatten().view(torch.uint8), state_dict.pop(key + ".absmax").flatten()
    values = state_dict.pop(key + ".quant_map").cpu()
    if values.dtype != torch.float32 or not torch.equal(values, code_values(quant_type)):
        raise ValueError(
            f"QuantizedLinear: {key}.quant_map: expected the {quant_type} values, received others"
        )
    if tuple(state["shape"]) != shape:
        raise ValueError(f"QuantizedLinear: {key}: expected shape {shape}, received {tuple(state['shape'])}")
    count = shape[0] * shape[1]
    blocks = -(-count // block_size)
    if packed.numel() < (count + 1) // 2 or absmax.numel() != blocks:
        raise ValueError(
            f"QuantizedLinear: {key}: expected {(count + 1) // 2} bytes and {blocks} scales, received {packed.numel()} and "
            f"{absmax.numel()}"
        )
    if quant_type == "int4" and (absmax.dtype != torch.int32 or "nested_offset" in state):
        raise ValueError(
            f"QuantizedLinear: {key}.absmax: expected int32 with int4, not nested scales, received {absmax.dtype}"
        )
    scale_dtype = torch.uint8 if "nested_offset" in state else torch.float32
    if quant_type != "int4" and absmax.dtype != scale_dtype:
        raise ValueError(f"QuantizedLinear: {key}.absmax: expected {scale_dtype}, received {absmax.dtype}")
    nested = None
    if "nested_offset" in state:
        if state["nested_blocksize"] != GROUP:
            received = state["nested_blocksize"]
            raise ValueError(
                f"QuantizedLinear: {key}: nested_blocksize: expected {GROUP}, received {received}"
            )
        scales, map_ = state_dict.pop(key + ".nested_absmax"), state_dict.pop(key + ".nested_quant_map")
        dtypes = {scales.dtype, map_.dtype}
        if scales.shape != (groups_of(blocks),) or map_.shape != (VALUES,) or dtypes != {torch.float32}:
            raise ValueError(
                f"QuantizedLinear: {key}: nested_absmax and nested_quant_map: expected {groups_of(blocks)} and {VALUES} values, "
                f"received {tuple(scales.shape)} of {scales.dtype} and {tuple(map_.shape)} of {map_.dtype}"
            )
        offset = scales.new_tensor(state["nested_offset"])
        nested = NestedScales(offset, map_, scales).join()
    return QuantizedTensor(
        packed[: (count + 1) // 2],
        absmax,
        nested,
        shape=shape,
        dtype=getattr(torch, state["dtype"]),
        quant_type=quant_type,
        block_size=block_size,
    )
