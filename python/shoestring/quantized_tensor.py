"""A tensor whose elements are held as 4-bit or int8 codes and one scale a block."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten


class QuantizedTensor(Tensor):
    """A 4-bit or int8 tensor with the shape and the dtype of what it stands for; ``shoestring.quantize_4bit`` and
    ``shoestring.quantize_int8`` make it.

    4 bits: the bytes are always bitsandbytes' flat order, blocks of ``block_size`` along the flattened elements, the even
    element in a byte's upper four bits. Where a weight's rows are whole blocks (K divisible by ``block_size``) the same
    bytes are held as (N, K / 2) and the scales as (N, K / block_size), so that a slice of rows is itself a quantised
    tensor; otherwise both are flat. int8: a code an element and a scale a row, so that rows can always be sliced. That is
    what FSDP2 needs to shard by rows: its hooks (``fsdp_pre_all_gather``
    returns ``packed`` and ``absmax``, ``fsdp_post_all_gather`` puts a QuantizedTensor around what was gathered) attach
    here, and apply to the row-shaped form without ``nested``, whose groups of 256 blocks do not end with a row.

    It can be a frozen ``nn.Parameter``. detach, clone, copy_ (from a quantised or a dense tensor), ``to`` a device, a
    deep copy and pickling work; ``to`` a dtype changes what dequantising gives and leaves the codes alone. Other
    operators are refused: dequantise first.

    Attributes:
        packed: uint8, (N, K / 2) or (ceil(numel / 2)); int8 of the tensor's shape, (..., K).
        absmax: (N, K / block_size) or (ceil(numel / block_size)), (...) for int8; fp32, or uint8 codes where ``nested``
            is there.
        nested: None, or fp32 (257 + ceil(blocks / 256)): offset, 256 values by code, a scale for every 256 blocks.
        quant_type: "nf4", "fp4" or "int8".
        block_size: elements that share a scale; K for int8.
    """

    packed: Tensor
    absmax: Tensor
    nested: Tensor | None
    quant_type: str
    block_size: int

    @staticmethod
    def __new__(
        cls,
        packed: Tensor,
        absmax: Tensor,
        nested: Tensor | None,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        quant_type: str,
        block_size: int,
    ) -> "QuantizedTensor":
        """Puts the parts together; flat parts take the row-packed form where the shape allows it."""
        return torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=packed.device, requires_grad=False
        )

    def __init__(
        self,
        packed: Tensor,
        absmax: Tensor,
        nested: Tensor | None,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        quant_type: str,
        block_size: int,
    ) -> None:
        if quant_type != "int8" and len(shape) == 2 and shape[1] % block_size == 0 and shape[1] > 0 and packed.dim() == 1:
            packed = packed.view(shape[0], shape[1] // 2)
            absmax = absmax.view(shape[0], shape[1] // block_size)
        self.packed = packed
        self.absmax = absmax
        self.nested = nested
        self.quant_type = quant_type
        self.block_size = block_size

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense tensor, by default in the tensor's own dtype."""
        if self.quant_type == "int8":
            return torch.ops.shoestring.dequantize_int8(self.packed, self.absmax, dtype=dtype or self.dtype)
        return torch.ops.shoestring.dequantize_4bit(
            self.packed,
            self.absmax,
            self.nested,
            shape=self.shape,
            dtype=dtype or self.dtype,
            quant_type=self.quant_type,
            block_size=self.block_size,
        )

    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that hold the bytes: packed, absmax and, if there, nested."""
        return (self.packed, self.absmax) if self.nested is None else (self.packed, self.absmax, self.nested)

    def nbytes_held(self) -> int:
        """Bytes that the parts take."""
        return sum(part.nbytes for part in self.parts())

    def __repr__(self) -> str:  # type: ignore[override]
        kind = self.quant_type + (", nested" if self.nested is not None else "")
        return (
            f"QuantizedTensor({kind}, block_size={self.block_size}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.device})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, str, int]]:
        names = ["packed", "absmax"] + (["nested"] if self.nested is not None else [])
        return names, (self.dtype, self.quant_type, self.block_size)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[torch.dtype, str, int], shape: Sequence[int], stride: Sequence[int]
    ) -> "QuantizedTensor":
        dtype, quant_type, block_size = context
        return QuantizedTensor(
            inner["packed"],
            inner["absmax"],
            inner.get("nested"),
            shape=shape,
            dtype=dtype,
            quant_type=quant_type,
            block_size=block_size,
        )

    def _like(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> "QuantizedTensor":
        return QuantizedTensor(
            change(self.packed),
            change(self.absmax),
            None if self.nested is None else change(self.nested),
            shape=self.shape,
            dtype=dtype or self.dtype,
            quant_type=self.quant_type,
            block_size=self.block_size,
        )

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            return return_and_correct_aliasing(func, args, kwargs, args[0]._like(func))
        if func in (aten.clone.default, aten.empty_like.default):
            return args[0]._like(lambda part: func(part))
        if func is aten._to_copy.default:
            dtype = kwargs.get("dtype")
            if dtype is not None and not dtype.is_floating_point:
                raise TypeError(f"QuantizedTensor: to: dtype: expected a floating-point dtype, received {dtype}")
            where = {key: kwargs[key] for key in ("device", "non_blocking", "pin_memory") if key in kwargs}
            return args[0]._like(lambda part: func(part, **where), dtype)
        if func is aten.copy_.default:
            return _copy(*args[:2])
        raise NotImplementedError(
            f"QuantizedTensor: {func}: not defined on codes; dequantise first, with q.dequantize()"
        )


def _copy(to: Tensor, source: Tensor) -> Tensor:
    if not isinstance(to, QuantizedTensor):
        return to.copy_(source.dequantize())
    if to.shape != source.shape:
        raise ValueError(
            f"QuantizedTensor: copy_: expected shape {tuple(to.shape)}, received {tuple(source.shape)}"
        )
    if not isinstance(source, QuantizedTensor):
        source = quantize_parts(source, to.quant_type, to.block_size, to.nested is not None)
    same = (to.quant_type, to.block_size, to.nested is None)
    if same != (source.quant_type, source.block_size, source.nested is None):
        raise ValueError(f"QuantizedTensor: copy_: expected the form of {to!r}, received {source!r}")
    for part, new in zip(to.parts(), source.parts(), strict=True):
        part.copy_(new)
    return to


def quantize_parts(x: Tensor, quant_type: str, block_size: int, nested: bool) -> QuantizedTensor:
    """``shoestring.quantize_4bit`` or, with "int8", ``quantize_int8``, without their argument checks."""
    if quant_type == "int8":
        packed, absmax = torch.ops.shoestring.quantize_int8(x)
        return QuantizedTensor(
            packed, absmax, None, shape=x.shape, dtype=x.dtype, quant_type=quant_type, block_size=x.shape[-1]
        )
    packed, absmax = torch.ops.shoestring.quantize_4bit(x, quant_type=quant_type, block_size=block_size)
    second = None
    if nested:
        absmax, second = torch.ops.shoestring.quantize_absmax(absmax)
    return QuantizedTensor(
        packed, absmax, second, shape=x.shape, dtype=x.dtype, quant_type=quant_type, block_size=block_size
    )
