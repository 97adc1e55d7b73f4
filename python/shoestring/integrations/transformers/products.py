"""Choose which product computes the linear layers of a model: this package's, or PyTorch's BLAS library's.

A choice holds for a group of layers with the same input and for one dtype of the products. It is made when
the model is patched, by the kind of CPU and by measurements, and does not change afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.gemm.dense import is_plain
from shoestring.gemm.linear import PRODUCTS, library_sum, linear, linear_group

# Layers with fewer tokens, as in generation, are left to PyTorch.
LEAST_TOKENS = 32
# A product is measured with as many tokens as give this number of floating-point operations, within bounds.
# Products of fewer tokens would measure how fast weights are read.
FLOP = 8e8
TOKENS = (256, 2048)
# The two products run in turns until this time is over, and for at least two turns.
SECONDS = 0.02
MOST_TURNS = 6
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
# The products of a group that the library computes; None if eager PyTorch computes the group.
Choice = tuple[str, ...] | None
# The choices of ``by_measurement``, by capability, threads and group.
_measured: dict[tuple[str, int, Key], Choice] = {}


@dataclass
class Products:
    """The choice for each group of layers of one model.

    Attributes:
        choose: returns the choice for one group and its weights, ``by_default`` or ``by_measurement``.
        chosen: the choice for the dtype of the products and the shapes of a group. The dtype of the weights
            may change later: mixed precision of FSDP2 rounds them.
        measured: number of measured groups, each in one dtype of the products.
        seconds, bytes: the time that measurements took, and the most memory that their tensors had.
    """

    choose: Callable[[Key, Sequence[Tensor], Products], Choice]
    chosen: dict[tuple[torch.dtype, Shapes], Choice] = field(default_factory=dict)
    measured: int = 0
    seconds: float = 0.0
    bytes: int = 0

    @property
    def measures(self) -> bool:
        return self.choose is by_measurement

    def add(self, layers: Sequence[nn.Module]) -> bool:
        """Choose the products of a group of layers; return whether ours is chosen for any dtype."""
        weights: list[Tensor] = [layer.weight for layer in layers]  # type: ignore[misc]
        shapes = tuple((w.shape[0], w.shape[1]) for w in weights)
        dtype, is_chosen = weights[0].dtype, False
        if weights[0].device.type != "cpu" or any(w.dtype != dtype for w in weights):
            return False
        for compute in COMPUTES.get(dtype, ()):
            key = (compute, shapes)
            if key not in self.chosen:
                self.chosen[key] = self.choose((compute, dtype, shapes), weights, self)
            is_chosen = is_chosen or self.chosen[key] is not None
        return is_chosen

    def count_bytes(self, key: Key) -> None:
        """Count the tensors with which a group is measured.

        They are x, the outputs and their gradients, the weights and the gradients of x and of the weights. If
        the products round their operands, they also are the rounded x, weights and gradients.
        """
        compute, dtype, shapes = key
        tokens, features = _tokens(key), shapes[0][1]
        outputs = sum(out for out, _ in shapes)
        elements = (tokens + outputs) * features
        rounded = elements * dtype.itemsize * (2 if compute != dtype else 1)
        upstream = 2 * tokens * outputs * compute.itemsize
        self.bytes = max(self.bytes, tokens * features * dtype.itemsize + upstream + rounded)

    def __str__(self) -> str:
        if not self.measured:
            return ""
        return (
            f"linear layers: measured {self.measured} groups in {self.seconds:.1f} s, "
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
        library = self.chosen.get((compute, tuple((w.shape[0], w.shape[1]) for w in weights)))
        if library is None:
            return None
        biases: list[Tensor | None] = [layer.bias for layer in layers]  # type: ignore[misc]
        if len(layers) == 1:
            return [linear(x, weights[0], biases[0], library=library)]
        return linear_group(x, weights, biases, library=library)


def by_default(key: Key, weights: Sequence[Tensor], products: Products) -> Choice:
    """Return the choice for this CPU: PyTorch, unless our products are known or measured to be faster.

    The C++ functions ``dense_linear`` and ``dense_linear_group`` choose by the same rule:

    - With AMX, this package computes bf16 products: whole training steps were measured faster. PyTorch
      computes the others. Nothing is measured, so all machines of this kind choose alike.
    - With AVX2 or AVX-512, a measurement decides, between all products by this package and all by PyTorch.
    - Other CPUs, products in fp16 and small layers are left to PyTorch.
    """
    is_ours, seconds = _choice(key)
    if seconds > 0:
        products.measured += 1
        products.seconds += seconds
        products.count_bytes(key)
    return () if is_ours else None


def _choice(key: Key) -> tuple[bool, float]:
    """Return whether the rule chooses ours, and the seconds that a measurement took."""
    compute, dtype, shapes = key
    choice: tuple[bool, float] = torch.ops.shoestring._linear_choice(
        compute, dtype, shapes[0][1], [out for out, _ in shapes]
    )
    return choice


def by_measurement(key: Key, weights: Sequence[Tensor], products: Products) -> Choice:
    """Return which products the library computes faster; None if eager PyTorch is faster over all.

    A group is measured once in a process.
    """
    cache_key = (torch.ops.shoestring._cpu_capability(), torch.get_num_threads(), key)
    if cache_key not in _measured:
        start = time.perf_counter()
        library = _faster_by_library(key, weights)
        _measured[cache_key] = library if _whole(key, weights, library) <= GAIN else None
        products.measured += 1
        products.seconds += time.perf_counter() - start
        products.count_bytes(key)
    return _measured[cache_key]


def _tokens(key: Key) -> int:
    """Return the number of tokens with which the products of a group are measured."""
    _, _, shapes = key
    flop = 2.0 * sum(out * features for out, features in shapes)
    return int(min(TOKENS[1], max(TOKENS[0], FLOP / flop)))


def _data(key: Key) -> tuple[Tensor, list[Tensor]]:
    """Return random input of a group of layers, and a gradient of each output."""
    compute, dtype, shapes = key
    features, tokens = shapes[0][1], _tokens(key)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, features, generator=draw).to(dtype)
    return x, [torch.randn(tokens, out, generator=draw).to(compute) for out, _ in shapes]


def _faster_by_library(key: Key, weights: Sequence[Tensor]) -> tuple[str, ...]:
    """Return the products of a group that the library computes faster, each measured by itself."""
    compute, dtype, shapes = key
    x, upstream = _data(key)
    rounded, count = x.to(compute), len(shapes)
    backward = torch.ops.shoestring._linear_group_backward

    def run(product: str, library: int) -> None:
        if product == "forward":
            torch.ops.shoestring.linear_group(rounded, weights, [], dtype=compute, library=library)
        elif product == "grad_x":
            backward(upstream, None, weights, compute, dtype, library, [True] + [False] * count)
        else:
            backward(upstream, rounded, weights, compute, dtype, library, [False] + [True] * count)

    def ratio(product: str) -> float:
        by_library = library_sum("patch", (product,))
        return _ratio(lambda: run(product, by_library), lambda: run(product, 0))

    with torch.no_grad():
        return tuple(product for product in PRODUCTS if ratio(product) <= 1)


def _whole(key: Key, weights: Sequence[Tensor], library: tuple[str, ...]) -> float:
    """Return the time of a group by this package over the time by eager PyTorch, forward and backward."""
    compute, dtype, _ = key
    x, upstream = _data(key)
    inputs = [x.requires_grad_(), *(w.detach().requires_grad_() for w in weights)]

    def this_package() -> None:
        outputs = linear_group(x, inputs[1:], dtype=compute, library=library)
        torch.autograd.grad(outputs, inputs, upstream)

    def eager() -> None:
        with torch.autocast("cpu", compute, enabled=compute != dtype):
            outputs = [F.linear(x, w) for w in inputs[1:]]
        torch.autograd.grad(outputs, inputs, upstream)

    with torch.autocast("cpu", enabled=False), torch.enable_grad():
        return _ratio(this_package, eager)


def _ratio(first: Callable[[], None], second: Callable[[], None]) -> float:
    """Return the time of the first function over that of the second, each the least of several turns."""
    least = [float("inf"), float("inf")]
    start = time.perf_counter()
    for turn in range(MOST_TURNS):  # the first turn also prepares kernels
        if turn >= 2 and time.perf_counter() - start > SECONDS:
            break
        for i, function in enumerate((first, second)):
            before = time.perf_counter()
            function()
            least[i] = min(least[i], time.perf_counter() - before)
    return least[0] / least[1]
