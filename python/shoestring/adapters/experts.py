"""Low-rank adapters on the stacked weights of a mixture of experts (PEFT's target_parameters)."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.adapters.adapted import AdaptedLayer, wide
from shoestring.adapters.low_rank import draw
from shoestring.adapters.options import LoraOptions
from shoestring.layers.seeded_dropout import seeded_dropout
from shoestring.quantization.quantized_tensor import QuantizedTensor

PRODUCTS = ("matmul", "__matmul__", "mm", "bmm")
GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
LINEAR = torch.ops.shoestring.grouped_linear


class LowRankSum:
    """A stack of matrices ``base + left @ right``, (..., p, q), that is kept as three tensors.

    With ``dropout``, a product of ``left @ right`` reads rows of which elements are dropped.

    A mixture of experts with adapters returns a LowRankSum when its forward reads the stacked weights. A
    product with a LowRankSum is computed as three products, without the dense sum. This holds for
    ``F.linear``, ``@``, ``matmul``, ``mm``, ``bmm``, ``grouped_mm`` and ``shoestring.grouped_linear``, also after
    indexing and transposing.
    Any other function receives the dense sum as a tensor.
    """

    def __init__(self, base: Tensor, left: Tensor, right: Tensor, dropout: float = 0.0) -> None:
        self.base, self.left, self.right, self.dropout = base, left, right, dropout

    def dense(self) -> Tensor:
        """Return ``base + left @ right`` as a tensor."""
        if self.dropout > 0:
            raise ValueError(
                "lora: dropout: expected experts that multiply rows by their stacks, received some that read a stack of shape "
                f"{tuple(self.base.shape)} otherwise; take dropout=0, or shoestring.register_experts()"
            )
        return self.base + self.left @ self.right

    def dropped(self, rows: Tensor) -> Tensor:
        return seeded_dropout(rows, self.dropout) if self.dropout > 0 else rows

    def __getitem__(self, index: Any) -> "LowRankSum | Tensor":
        if isinstance(index, (int, slice)) or (isinstance(index, Tensor) and index.dim() < 2):
            return LowRankSum(self.base[index], self.left[index], self.right[index], self.dropout)
        return self.dense()[index]

    def transpose(self, a: int, b: int) -> "LowRankSum | Tensor":
        if sorted(d % self.base.dim() for d in (a, b)) == [self.base.dim() - 2, self.base.dim() - 1]:
            return LowRankSum(
                self.base.transpose(a, b), self.right.transpose(a, b), self.left.transpose(a, b), self.dropout
            )
        return self.dense().transpose(a, b)

    def __matmul__(self, x: Tensor) -> Tensor:
        return torch.matmul(self, x)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "device", "ndim", "dim", "size", "data_ptr", "is_cuda", "layout"):
            return getattr(self.base, name)
        if name in ("mT", "T"):
            return self.transpose(-2, -1)
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        at = [index for index, value in enumerate(args) if isinstance(value, cls)]
        name = getattr(func, "__name__", "")
        if at == [1]:
            x, w, rest = args[0], args[1], args[2:]
            if func is F.linear:
                return func(x, w.base, *rest, **kwargs) + F.linear(F.linear(w.dropped(x), w.right), w.left)
            if func in (LINEAR, LINEAR.default):
                low = func(w.dropped(x), w.right, *rest, **{**kwargs, "bias": None})
                up = func(low, w.left, *rest, **{**kwargs, "bias": None, "rows": None})
                return func(x, w.base, *rest, **kwargs) + up
            if name in PRODUCTS or name in GROUPED:
                left, right = w._padded() if name in GROUPED else (w.left, w.right)
                low = func(w.dropped(x), left, *rest, **kwargs)
                return func(x, w.base, *rest, **kwargs) + func(low, right, *rest, **kwargs)
        if at == [0] and name in PRODUCTS:
            w, x = args[0], args[1]
            return func(w.base, x) + func(w.left, func(w.right, w.dropped(x)))

        def plain(value: Any) -> Any:
            return value.dense() if isinstance(value, cls) else value

        return func(*map(plain, args), **{key: plain(value) for key, value in kwargs.items()})

    def _padded(self) -> tuple[Tensor, Tensor]:
        """Return ``left`` and ``right`` with zeros appended, so that the rank is a multiple of 8.

        ``grouped_mm`` needs rows whose size is a multiple of 16 bytes.
        """
        more = -self.left.shape[-1] % 8
        return F.pad(self.left, (0, more)), F.pad(self.right, (0, 0, 0, more))


class LoraExperts(AdaptedLayer):
    """A module with LoRA adapters on some of its parameters.

    A parameter with adapters is (experts, out, in), (experts, in, out) if the module has ``is_transposed``,
    or (out, in). The layout of the adapter is PEFT's. For a parameter ``up``, ``lora_A_up.<name>`` is
    (experts * rank, in), and its row index is ``expert * rank + r``. ``lora_B_up.<name>`` is (out, rank *
    experts), and its column index is ``r * experts + expert``. The module's own forward runs unchanged; it
    reads a :class:`LowRankSum` in place of the parameter.
    """

    # names of the parameters with adapters, in the order in which the module holds them
    TARGETS: tuple[str, ...]

    @classmethod
    def shapes(cls, layer: nn.Module, options: LoraOptions) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for target in cls.TARGETS:
            experts, rows, columns = _sizes(layer, layer._parameters[target])  # type: ignore[arg-type]
            rank = parameter_options(options, target).rank
            shapes[f"lora_A_{target}"] = (experts * rank, columns)
            shapes[f"lora_B_{target}"] = (rows, rank * experts)
        return shapes

    def start(self, options: LoraOptions) -> dict[str, Tensor]:
        shapes = self.shapes(self, options)
        tensors: dict[str, Tensor] = {}
        for target in self.TARGETS:
            keys = f"lora_A_{target}", f"lora_B_{target}"
            target_options = parameter_options(options, target)
            drawn = draw(shapes[keys[0]], shapes[keys[1]], target_options, self.base_weight().dtype)
            tensors |= dict(zip(keys, (drawn["lora_A"], drawn["lora_B"]), strict=True))
        return tensors

    def base_weight(self) -> Tensor:
        return self._parameters[self.TARGETS[0]]  # type: ignore[return-value]

    def factors(self, target: str, names: Sequence[str], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return two matrices whose product, of the parameter's shape, the adapters ``names`` add to it."""
        parameter = self._parameters[target]
        assert parameter is not None
        lefts, rights = [], []
        for name in names:
            options = parameter_options(self.adapters[name], target)
            lora_A, lora_B = getattr(self, f"lora_A_{target}")[name], getattr(self, f"lora_B_{target}")[name]
            rank, scaled = options.rank, options.scaling * lora_B
            experts = lora_A.shape[0] // rank
            rights.append(lora_A.view(experts, rank, -1).to(dtype))
            lefts.append(scaled.view(-1, rank, experts).permute(2, 0, 1).to(dtype))
        left, right = torch.cat(lefts, 2), torch.cat(rights, 1)
        if parameter.dim() == 2:
            return left[0], right[0]
        if getattr(self, "is_transposed", False):
            return right.transpose(1, 2), left.transpose(1, 2)
        return left, right

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if name not in type(self).TARGETS or not (names := self.current()):
            return value
        return LowRankSum(value, *self.factors(name, names, value.dtype), self.dropout_of(names))

    def dropout_of(self, names: Sequence[str]) -> float:
        """Return the probability of dropout of the adapters ``names``, which must have one while they are trained."""
        found = {self.adapters[name].dropout for name in names} if self.training else {0.0}
        if len(found) > 1:
            raise ValueError(
                f"lora: dropout: expected one probability of the active adapters of experts, received {sorted(found)}"
            )
        return float(found.pop())

    def merged(self, names: Sequence[str]) -> dict[str, Tensor]:
        result = {}
        for target in self.TARGETS:
            stack: Any = self._parameters[target]
            exact = wide(stack.dtype)
            is_quantized = isinstance(stack, QuantizedTensor)
            dense = stack.dequantize(exact) if is_quantized else stack.detach().to(exact)
            result[target] = dense
            if names:
                left, right = self.factors(target, names, exact)
                add = torch.addmm if dense.dim() == 2 else torch.baddbmm
                result[target] = add(dense, left.detach(), right.detach())
        return result


def parameter_options(options: LoraOptions, target: str) -> LoraOptions:
    """Return the options of one parameter. Its rank and alpha are in the patterns, by the parameter's name."""
    rank = options.rank_pattern.get(target, options.rank)
    return replace(options, rank=rank, alpha=options.alpha_pattern.get(target, options.alpha))


def _sizes(layer: nn.Module, parameter: Tensor) -> tuple[int, int, int]:
    """Return the numbers of experts, output features and input features of a stacked expert weight."""
    if parameter.dim() == 2:
        return 1, *parameter.shape
    experts, rows, columns = parameter.shape
    return (experts, columns, rows) if getattr(layer, "is_transposed", False) else (experts, rows, columns)


@functools.cache
def experts_class(base_class: type[nn.Module], targets: tuple[str, ...]) -> type[LoraExperts]:
    """Create the class that a module of class ``base_class`` gets for adapters on ``targets``.

    PEFT wraps the module once for each parameter, and the keys in PEFT's files do not contain the name of the
    parameter. The wrapper for the module's last parameter is the outermost. The key of any other parameter
    contains ``base_layer.`` once for each wrapper outside the parameter's own wrapper.
    """
    parameters = {}
    for depth, target in enumerate(reversed(targets)):
        for letter in "AB":
            parameters[f"lora_{letter}_{target}"] = "base_layer." * depth + f"lora_{letter}.weight"
    body = {
        "TARGETS": targets,
        "PARAMETERS": parameters,
        "__doc__": LoraExperts.__doc__,
        "__module__": __name__,
    }
    return type(f"Lora{base_class.__name__}", (LoraExperts, base_class), body)
