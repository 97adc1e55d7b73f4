"""Choose which product computes the linear layers of a model: this package's, or PyTorch's BLAS library's.

A choice holds for a group of layers with the same input and for one dtype of the products. It is made when
the model is patched, either by a rule for the kind of CPU or by measurements, and does not change afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as global_hooks

from shoestring.gemm.linear import PRODUCTS, linear, linear_group

# Layers with fewer tokens, as in generation, are left to PyTorch.
LEAST_TOKENS = 32
# A measured product has at most this many floating-point operations, so that it takes milliseconds.
MOST_FLOP = 1e9
MOST_TOKENS = 2048
# Ours must take at most this share of eager's time for a group of layers to be changed.
GAIN = 0.98

# For each dtype of weights, the dtypes in which layers may multiply: that of the weights, and autocast's.
COMPUTES = {
    torch.float32: (torch.float32, torch.bfloat16),
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16,),
}

Shapes = tuple[tuple[int, int], ...]  # (out_features, in_features) of each layer of a group
Key = tuple[torch.dtype, torch.dtype, Shapes]  # dtype of the products, dtype of the weights, shapes
# For each measured group, the products that the library computes; None if eager PyTorch is faster.
_measured: dict[tuple[str, int, Key], tuple[str, ...] | None] = {}


@dataclass
class Products:
    """The choice for each group of layers of one model.

    Attributes:
        choose: returns the choice for one group, ``by_rule`` or ``by_measurement``.
        chosen: for each group, the products that the BLAS library computes; None leaves the group to PyTorch.
        seconds, bytes: the time that measurements took, and the most memory that their tensors had.
    """

    choose: Callable[[Key, Products], tuple[str, ...] | None]
    chosen: dict[Key, tuple[str, ...] | None] = field(default_factory=dict)
    seconds: float = 0.0
    bytes: int = 0

    @property
    def measures(self) -> bool:
        return self.choose is by_measurement

    def add(self, layers: Sequence[nn.Module]) -> bool:
        """Choose the products of a group of layers; return whether ours is chosen for any dtype."""
        weights: list[Tensor] = [layer.weight for layer in layers]  # type: ignore[misc]
        shapes = tuple((w.shape[0], w.shape[1]) for w in weights)
        dtype, found = weights[0].dtype, False
        if weights[0].device.type != "cpu" or any(w.dtype != dtype for w in weights):
            return False
        for compute in COMPUTES.get(dtype, ()):
            key = (compute, dtype, shapes)
            if key not in self.chosen:
                self.chosen[key] = self.choose(key, self)
            found = found or self.chosen[key] is not None
        return found

    def __str__(self) -> str:
        if not self.seconds:
            return ""
        return (
            f"linear layers: measured {len(self.chosen)} groups in {self.seconds:.1f} s, "
            f"with {self.bytes / 2**20:.0f} MiB of tensors"
        )

    def together(self, layers: Sequence[nn.Module], x: Tensor) -> list[Tensor] | None:
        """Return the outputs of layers that read x, by one operator; None if the layers must be called."""
        if not (all(is_plain(layer) for layer in layers) and type(x) in (Tensor, nn.Parameter)):
            return None
        weights: list[Tensor] = [layer.weight for layer in layers]  # type: ignore[misc]
        if x.device.type != "cpu" or x.numel() < LEAST_TOKENS * x.shape[-1]:
            return None
        if any(type(w) is not nn.Parameter or w.device != x.device for w in weights):
            return None
        if torch.is_autocast_enabled("cpu"):
            compute = torch.get_autocast_dtype("cpu")
        elif all(w.dtype == x.dtype for w in weights):
            compute = x.dtype
        else:
            return None
        key = (compute, weights[0].dtype, tuple((w.shape[0], w.shape[1]) for w in weights))
        library = self.chosen.get(key)
        if library is None:
            return None
        biases: list[Tensor | None] = [layer.bias for layer in layers]  # type: ignore[misc]
        if len(layers) == 1:
            return [linear(x, weights[0], biases[0], library=library)]
        return linear_group(x, weights, biases, library=library)


def is_plain(layer: nn.Module) -> bool:
    """Return whether a call of the layer does nothing but ``F.linear`` with its weight and bias."""
    return (
        type(layer) is nn.Linear
        and "forward" not in layer.__dict__
        and not (
            layer._forward_hooks
            or layer._forward_pre_hooks
            or layer._backward_hooks
            or layer._backward_pre_hooks
            or global_hooks._global_forward_hooks
            or global_hooks._global_forward_pre_hooks
            or global_hooks._global_backward_hooks
            or global_hooks._global_backward_pre_hooks
        )
    )


def by_rule(key: Key, products: Products) -> tuple[str, ...] | None:
    """Return the choice for this kind of CPU, which was made where whole training steps were measured.

    On CPUs with AMX, this package computes bf16 products. Other dtypes and CPUs are left to PyTorch: steps
    were measured no faster, or not at all.
    """
    amx = torch.ops.shoestring._cpu_capability() == "avx512" and torch.cpu._is_amx_tile_supported()
    return () if amx and key[0] == torch.bfloat16 else None


def by_measurement(key: Key, products: Products) -> tuple[str, ...] | None:
    """Return which products the library computes faster; None if eager PyTorch is faster over all."""
    place = (torch.ops.shoestring._cpu_capability(), torch.get_num_threads(), key)
    if place not in _measured:
        start = time.perf_counter()
        _measured[place] = _measure(key, products)
        products.seconds += time.perf_counter() - start
    return _measured[place]


def _measure(key: Key, products: Products) -> tuple[str, ...] | None:
    compute, dtype, shapes = key
    features = shapes[0][1]
    flop = 2.0 * features * sum(out for out, _ in shapes)
    tokens = int(min(MOST_TOKENS, max(4 * LEAST_TOKENS, MOST_FLOP / flop)))
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, features, generator=draw).to(dtype).requires_grad_()
    weights = [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes]
    upstream = [torch.randn(tokens, out, generator=draw).to(compute) for out, _ in shapes]
    kept = [x, *weights]
    # The gradients take as much as x and the weights. Operands rounded to 16 bits take half of that each.
    products.bytes = max(
        products.bytes,
        sum(3 * t.nbytes for t in kept) + sum(3 * t.nbytes for t in upstream),
    )

    def ours(library: tuple[str, ...]) -> None:
        outputs = linear_group(x, weights, [None] * len(weights), dtype=compute, library=library)
        torch.autograd.grad(outputs, kept, upstream)

    def eager() -> None:
        with torch.autocast("cpu", compute, enabled=compute != dtype):
            outputs = [F.linear(x, w) for w in weights]
        torch.autograd.grad(outputs, kept, upstream)

    # Each product is compared with the others as the library computes them, since a step is what counts.
    library = tuple(
        name
        for name in PRODUCTS
        if _faster(lambda: ours(PRODUCTS), lambda name=name: ours(tuple(p for p in PRODUCTS if p != name)))  # type: ignore[misc]
        <= 1
    )
    return library if _faster(lambda: ours(library), eager) <= GAIN else None


def _faster(first: Callable[[], None], second: Callable[[], None], repeats: int = 3) -> float:
    """Return the time of the first function over that of the second, each the least of several turns."""
    least = [float("inf"), float("inf")]
    with torch.enable_grad():
        for turn in range(repeats + 1):
            for i, function in enumerate((first, second)):
                start = time.perf_counter()
                function()
                if turn > 0:  # the first call prepares kernels
                    least[i] = min(least[i], time.perf_counter() - start)
    return least[0] / least[1]
