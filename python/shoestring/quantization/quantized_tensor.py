"""QuantizedTensor, a tensor subclass that stores 4-bit or int8 codes and one scale per block."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from shoestring.quantization.nested_scales import GROUP, HEAD, NestedScales, groups_of

aten = torch.ops.aten


class QuantizedTensor(Tensor):
    """A quantised 4-bit or int8 tensor, with the shape and the dtype of the dense tensor that it stands for.

    ``shoestring.quantize_4bit`` and ``shoestring.quantize_int8`` create it.

    - 4 bits: the bytes are in the order of bitsandbytes. Blocks are ``block_size`` consecutive elements of
      the flattened tensor. The upper four bits of a byte hold the element with the even index. If
      ``block_size`` divides K, the rows of an (N, K) weight are whole blocks. The codes then have shape (N, K
      / 2) and the scales (N, K / block_size), and a slice of rows is a quantised tensor too. So are the matrices of
      a stack (N, ...) of K elements each. Otherwise codes and scales are flat.
    - int8: one code per element and one scale per row, so rows can always be sliced.

    FSDP2's ``fully_shard`` can therefore shard a quantised weight by rows. It all-gathers the codes instead of
    the dense weight. If the ranks do not divide the rows, the last ranks have fewer, and send rows of zeros as
    well. With ``nested``, the rows of each rank but the last one that has any must be whole groups of 256 blocks
    (for example 8 rows of 2048 elements in blocks of 64).

    A QuantizedTensor can be a frozen ``nn.Parameter``. It supports detach, clone, ``copy_`` (from a quantised
    or a dense tensor), ``to`` a device, slices and splits of rows, deep copies and pickling. ``to`` a dtype
    changes only the dtype of the dequantised tensor. Other operators raise an error; call :meth:`dequantize`
    first.

    Example:
        >>> q = shoestring.quantize_4bit(torch.randn(256, 1024, dtype=torch.bfloat16))
        >>> q
        QuantizedTensor(nf4, block_size=64, shape=(256, 1024), dtype=torch.bfloat16, device=cpu)
        >>> q.packed.nbytes, q.absmax.nbytes, q.nbytes_held()
        (131072, 16384, 147456)
        >>> q.dequantize().shape
        torch.Size([256, 1024])

    Attributes:
        packed: the codes. 4 bits: uint8, (N, K / 2) or (ceil(numel / 2)). int8: int8, the shape of the
            tensor, (..., K).
        absmax: the scales, (N, K / block_size) or (ceil(numel / block_size)), for int8 (...). fp32; with
            ``nested`` uint8 codes; for int4 int32, with a bf16 scale in the lower half and a bf16 offset in
            the upper half.
        nested: None, or the tables of double quantisation, fp32, (257 + ceil(blocks / 256)): the offset, the
            values of the 256 codes, and one scale for every 256 blocks.
        quant_type: "nf4", "fp4", "int4" or "int8".
        block_size: number of elements that share a scale; K for int8.
    """

    packed: Tensor
    absmax: Tensor
    nested: Tensor | None
    quant_type: str
    block_size: int
    # The rows of the tensor of which FSDP2 has made this one a part with fewer rows than others have, or None.
    _rows_of_all: int | None = None

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
        """Create a QuantizedTensor from codes and scales.

        Flat codes are viewed by rows if block_size divides the row length.
        """
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
        row = math.prod(shape[1:])
        if (
            quant_type != "int8"
            and len(shape) > 1
            and row % block_size == 0
            and row > 0
            and packed.dim() == 1
        ):
            packed = packed.view(shape[0], row // 2)
            absmax = absmax.view(shape[0], row // block_size)
        self.packed = packed
        self.absmax = absmax
        self.nested = nested
        self.quant_type = quant_type
        self.block_size = block_size

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the dequantised, dense tensor.

        Args:
            dtype: fp32, bf16 or fp16. None: the dtype of this tensor.
        """
        if self.quant_type == "int8":
            rows: Tensor = torch.ops.shoestring.dequantize_int8(
                self.packed, self.absmax, dtype=dtype or self.dtype
            )
            return rows.view(self.shape)
        result: Tensor = torch.ops.shoestring.dequantize_4bit(
            self.packed,
            self.absmax,
            self.nested,
            shape=self.shape,
            dtype=dtype or self.dtype,
            quant_type=self.quant_type,
            block_size=self.block_size,
        )
        return result

    def parts(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold the quantised data: packed, absmax and, unless it is None, nested."""
        return (self.packed, self.absmax) if self.nested is None else (self.packed, self.absmax, self.nested)

    def nbytes_held(self) -> int:
        """Return the bytes that codes, scales and tables of double quantisation take together."""
        return sum(part.nbytes for part in self.parts())

    def __repr__(self) -> str:  # type: ignore[override]
        kind = self.quant_type + (", double_quant" if self.nested is not None else "")
        return (
            f"QuantizedTensor({kind}, block_size={self.block_size}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.device})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, str, int]]:
        names = ["packed", "absmax"] + (["nested"] if self.nested is not None else [])
        return names, (self.dtype, self.quant_type, self.block_size)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        context: tuple[torch.dtype, str, int],
        shape: Sequence[int],
        stride: Sequence[int],
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

    def _like(
        self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> "QuantizedTensor":
        """Return a tensor of the same form whose codes and scales ``change`` has replaced."""
        nested = None if self.nested is None else change(self.nested)
        changed = self._of(change(self.packed), change(self.absmax), nested, self.shape, dtype)
        changed._rows_of_all = self._rows_of_all
        return changed

    @property
    def fsdp_pre_all_gather(self) -> Callable[..., tuple[tuple[Tensor, ...], Any]]:
        """The hook that FSDP2 calls on each rank's shard, for the tensors to all-gather and for metadata.

        Of shards with fewer rows than others, FSDP2 accepts tensors in the shape of the dense rows alone, which
        codes do not have. It does not check those of a hook that takes only the mesh.
        """
        return self._gather_rows if self._rows_of_all is None else self._gather_few_rows

    def _gather_rows(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: Sequence[int],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], Any]:
        if mesh.size() == 1:
            # FSDP2 copies the first of several tensors, and leaves out the others.
            return (self.packed,), (outer_size, self)
        return self._gathered_parts(outer_size)

    def _gathered_parts(self, outer_size: torch.Size) -> tuple[tuple[Tensor, ...], Any]:
        """Return the tensors that FSDP2 all-gathers, and the metadata to restore the weight from them."""
        if self.nested is None:
            return (self.packed, self.absmax), (outer_size, None)
        tables = NestedScales.of(self.nested)
        return (self.packed, self.absmax, tables.scales.contiguous()), (outer_size, tables)

    def _gather_few_rows(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Return the tensors to all-gather if ranks have different numbers of rows, padded to the largest."""
        assert self._rows_of_all is not None
        outer_size = torch.Size((self._rows_of_all, *self.shape[1:]))
        rows, most = self.shape[0], math.ceil(self._rows_of_all / mesh.size())
        padded = _new_zeros(self, (most, *self.shape[1:]))
        padded.packed[:rows], padded.absmax[:rows] = self.packed, self.absmax
        if padded.nested is not None and self.nested is not None:
            padded.nested[: self.nested.numel()] = self.nested
        return padded._gathered_parts(outer_size)

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: "QuantizedTensor | None" = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Build the unsharded tensor from the gathered tensors, without the rows of zeros.

        FSDP2 calls this hook after the all-gather. It may gather into the memory of ``out``, the tensor from an
        earlier call. Then only the nested scales are copied, since codes are already in place.
        """
        shape, tables = metadata
        if isinstance(tables, QuantizedTensor):  # the mesh has one process
            if out is not None:
                with torch.autograd._unsafe_preserve_version_counter(out.parts()):  # type: ignore[attr-defined]
                    for part, source in zip(out.parts()[1:], tables.parts()[1:], strict=True):
                        part.copy_(source)
                return None
            scales = [part.clone() for part in tables.parts()[1:]]
            whole = self._of(
                gathered[0], scales[0], scales[1] if len(scales) > 1 else None, shape, param_dtype
            )
            return whole, (gathered[0], *scales)
        packed, absmax = (part[: shape[0]] for part in gathered[:2])
        nested = None
        if tables is not None:
            nested = tables._replace(scales=gathered[2][: groups_of(absmax.numel())]).join()
        if out is not None:
            if nested is not None and out.nested is not None:
                # FSDP2 preserves the version counters of the tensors into which it gathers. Preserve the
                # version counter of the nested scales as well; otherwise autograd would reject the tensors
                # that forward saved for backward.
                with torch.autograd._unsafe_preserve_version_counter(out.nested):  # type: ignore[attr-defined]
                    out.nested.copy_(nested)
            return None
        whole = self._of(packed, absmax, nested, shape, param_dtype)
        return whole, (*gathered[:2], *(() if nested is None else (nested,)))

    def _of(
        self,
        packed: Tensor,
        absmax: Tensor,
        nested: Tensor | None,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
    ) -> "QuantizedTensor":
        """Return a QuantizedTensor of the given codes and scales, in the format of this tensor."""
        return QuantizedTensor(
            packed,
            absmax,
            nested,
            shape=shape,
            dtype=dtype or self.dtype,
            quant_type=self.quant_type,
            block_size=self.block_size,
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub has the signature of a disabled dispatch
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            return return_and_correct_aliasing(func, args, kwargs, args[0]._like(func))
        if func is aten.is_pinned.default:
            return all(func(part, *args[1:], **kwargs) for part in args[0].parts())
        if func in (aten.clone.default, aten.empty_like.default, aten._pin_memory.default):
            return args[0]._like(lambda part: func(part))
        if func is aten._to_copy.default:
            dtype = kwargs.get("dtype")
            if dtype is not None and not dtype.is_floating_point:
                raise TypeError(
                    f"QuantizedTensor: to: dtype: expected a floating-point dtype, received {dtype}"
                )
            where = {key: kwargs[key] for key in ("device", "non_blocking", "pin_memory") if key in kwargs}
            return args[0]._like(lambda part: func(part, **where), dtype)
        if func is aten.copy_.default:
            return _copy(*args[:2])
        if func in _SHARDING:
            return _SHARDING[func](*args, **kwargs)
        if func is aten._transformer_encoder_layer_fwd.default:  # the fast path of nn.TransformerEncoderLayer
            return func(*(a.dequantize() if isinstance(a, QuantizedTensor) else a for a in args), **kwargs)
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


def _slice(
    q: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedTensor:
    """Return a slice of the rows of q as a view.

    If the slice does not begin at row 0, ``nested`` is copied, since in each slice the offset and the table must
    precede the scales of the slice.
    """
    begin, stop, _ = slice(start, end).indices(q.shape[0])
    if (begin, stop) == (0, q.shape[0]) and step == 1:
        return q._of(q.packed, q.absmax, q.nested, q.shape)
    _check_rows(q, dim, step)
    nested = q.nested
    if nested is not None:
        blocks = q.absmax.shape[1]
        is_end = stop == q.shape[0] or q._rows_of_all is not None  # rows of zeros may follow
        if begin * blocks % GROUP or (stop * blocks % GROUP and not is_end):
            raise ValueError(
                f"QuantizedTensor: rows {begin} to {stop}: expected whole groups of {GROUP} blocks, with {blocks} blocks a row, "
                "of nested scales; quantise with double_quant=False"
            )
        end_of_scales = HEAD + groups_of(stop * blocks)
        if begin == 0:
            nested = nested[:end_of_scales]
        else:
            part = nested[HEAD + begin * blocks // GROUP : end_of_scales]
            nested = NestedScales.of(nested)._replace(scales=part).join()
    rows = q._of(q.packed[begin:stop], q.absmax[begin:stop], nested, (max(stop - begin, 0), *q.shape[1:]))
    rows._rows_of_all = q._rows_of_all
    return rows


def join_rows(slices: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Join consecutive slices of the rows of one tensor into a copy of this tensor.

    Raises:
        ValueError: the slices are not of one tensor.
    """
    first = slices[0]
    nested = first.nested
    for q in slices:
        is_same = q.__tensor_flatten__() == first.__tensor_flatten__()
        if is_same and nested is not None and q.nested is not None:
            is_same = torch.equal(q.nested[:HEAD], nested[:HEAD])  # the offset and the table
        if not is_same:
            raise ValueError(f"QuantizedTensor: expected slices of one tensor, received {first!r} and {q!r}")
    if nested is not None:
        scales = [q.nested[HEAD:] for q in slices if q.nested is not None]
        nested = NestedScales.of(nested)._replace(scales=torch.cat(scales)).join()
    packed, absmax = torch.cat([q.packed for q in slices]), torch.cat([q.absmax for q in slices])
    return first._of(packed, absmax, nested, (packed.shape[0], *first.shape[1:]))


def _check_rows(q: QuantizedTensor, dim: int, step: int = 1) -> None:
    is_flat = q.packed.shape[:1] != q.shape[:1] or q.absmax.shape[:1] != q.shape[:1]
    if dim % q.dim() or step != 1 or is_flat:
        form = "flat" if is_flat else "row-packed"
        raise ValueError(
            f"QuantizedTensor: slice: expected consecutive rows of a tensor whose rows are whole blocks, received dimension "
            f"{dim}, step {step}, {form} blocks of {q.block_size}, shape {tuple(q.shape)}"
        )


def _split(q: QuantizedTensor, size: int, dim: int = 0) -> list[QuantizedTensor]:
    _check_rows(q, dim)
    return [_slice(q, 0, begin, begin + size) for begin in range(0, q.shape[0], size)]


def _new_zeros(q: QuantizedTensor, size: Sequence[int], **options: Any) -> QuantizedTensor:
    """Return a QuantizedTensor like q with another number of rows, whose codes and scales are all 0.

    FSDP2 calls it for memory with as many rows as the first rank has, and takes a slice of the rows of this rank.
    """
    if tuple(size[1:]) != q.shape[1:] or any(
        options.get(key) is not None for key in ("dtype", "device", "layout")
    ):
        raise ValueError(
            f"QuantizedTensor: new_zeros: expected rows as those of {q!r}, received {tuple(size)}, {options}"
        )
    _check_rows(q, 0)
    packed, absmax = (part.new_zeros(size[0], *part.shape[1:]) for part in (q.packed, q.absmax))
    nested = None
    if q.nested is not None:  # a rank without rows needs the offset and the values, too
        nested = q.nested.new_zeros(HEAD + groups_of(absmax.numel()))
        nested[:HEAD] = q.nested[:HEAD]
    zeros = q._of(packed, absmax, nested, size)
    zeros._rows_of_all = q.shape[0] if q._rows_of_all is None else q._rows_of_all
    return zeros


def _new_empty(q: QuantizedTensor, size: Sequence[int], **_: Any) -> QuantizedTensor:
    """Return a QuantizedTensor like q without rows, for a rank that has none."""
    if list(size) != [0]:
        raise ValueError(f"QuantizedTensor: new_empty: expected [0], received {list(size)}")
    return _slice(q, 0, 0, 0)


def _view(q: QuantizedTensor, size: Sequence[int], *_: Any) -> QuantizedTensor:
    """Return q, viewed in its own shape or as a flat tensor. FSDP2 needs no other views."""
    if list(size) not in ([-1], [q.numel()], list(q.shape)):
        raise ValueError(f"QuantizedTensor: view: expected {list(q.shape)} or [-1], received {list(size)}")
    return q._of(q.packed, q.absmax, q.nested, q.shape if list(size) == list(q.shape) else (q.numel(),))


def _as_strided(
    q: QuantizedTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> QuantizedTensor:
    if tuple(size) != q.shape or tuple(stride) != q.stride() or storage_offset:
        raise ValueError(
            f"QuantizedTensor: as_strided: expected {tuple(q.shape)}, {q.stride()}, received {size}, {stride}"
        )
    return _view(q, size)


# Implementations of the operators that FSDP2's ``fully_shard`` calls on a QuantizedTensor.
_SHARDING: dict[Any, Callable[..., Any]] = {
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.new_zeros.default: _new_zeros,
    aten.new_empty.default: _new_empty,
    aten.view.default: _view,
    aten.as_strided.default: _as_strided,
}


def quantize_parts(x: Tensor, quant_type: str, block_size: int, double_quant: bool) -> QuantizedTensor:
    """Quantise x like ``quantize_4bit`` (or, for "int8", ``quantize_int8``), but without detaching x.

    Raises:
        ValueError: double_quant is True for "int4".
    """
    if quant_type == "int8":
        packed, absmax = torch.ops.shoestring.quantize_int8(x)
        return QuantizedTensor(
            packed, absmax, None, shape=x.shape, dtype=x.dtype, quant_type=quant_type, block_size=x.shape[-1]
        )
    if double_quant and quant_type == "int4":
        raise ValueError(
            "quantize_4bit: double_quant: expected False with quant_type 'int4', whose scales are bf16, received True"
        )
    packed, absmax = torch.ops.shoestring.quantize_4bit(x, quant_type=quant_type, block_size=block_size)
    absmax, second = torch.ops.shoestring.quantize_absmax(absmax) if double_quant else (absmax, None)
    return QuantizedTensor(
        packed, absmax, second, shape=x.shape, dtype=x.dtype, quant_type=quant_type, block_size=block_size
    )
