"""Record the matrix products of a training step, and time them alone: the sum is the ceiling of a step.

A convolution counts as a product, and so do the products inside of attention. Causal attention needs half of
its scores, so each of its products counts as half a product.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
Operand = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
# The kind of product, its operands, and arguments that are not tensors.
Product = tuple[str, tuple[Operand, ...], str]


def _operand(x: Tensor) -> Operand:
    return x.dtype, tuple(x.shape), tuple(x.stride())


class Recorder(TorchDispatchMode):
    """Counts the products that run while the mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[Product, float] = defaultdict(float)
        self.others: dict[Product, list[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in (aten.mm, aten.bmm):
            self._count("mm" if packet is aten.mm else "bmm", args[:2])
        elif packet in (aten.addmm, aten.baddbmm):
            self._count("mm" if packet is aten.addmm else "bmm", args[1:3])
        elif packet is aten.convolution:
            self._count("convolution", args[:2], list(args[3:]))
        elif packet is aten.convolution_backward:
            self._count("convolution_backward", args[:3], [*args[4:-1], [*args[-1][:2], False]])
        elif packet is aten._scaled_dot_product_flash_attention_for_cpu:
            causal = args[4] if len(args) > 4 else (kwargs or {}).get("is_causal", False)
            self._attention(*args[:3], causal, backward=False)
        elif packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
            self._attention(*args[1:4], args[7], backward=True)
        return result

    def _count(self, kind: str, operands: Any, others: list[Any] | None = None, times: float = 1) -> None:
        product: Product = (kind, tuple(map(_operand, operands)), repr(others or []))
        self.counts[product] += times
        self.others[product] = others or []

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, backward: bool) -> None:
        """Count scores and output of forward; of backward, the gradients of scores, v, q and k."""
        heads = math.prod(q.shape[:2])
        kinds = {
            "scores": ((q.shape[2], q.shape[3]), (k.shape[2], q.shape[3]), True),
            "output": ((q.shape[2], k.shape[2]), (k.shape[2], v.shape[3]), False),
        }
        for left, right, transposed in kinds.values():
            a = torch.empty(heads, *left, dtype=q.dtype, device="meta")
            b = torch.empty(heads, *right, dtype=q.dtype, device="meta")
            b = b.transpose(1, 2) if transposed else b
            self._count("bmm", (a, b), times=(2 if backward else 1) * (0.5 if causal else 1))

    def flops(self) -> float:
        return sum(count * _flops(product, self.others[product]) for product, count in self.counts.items())


def _flops(product: Product, others: list[Any]) -> float:
    kind, operands, _ = product
    shapes = [shape for _, shape, _ in operands]
    if kind in ("mm", "bmm"):
        return 2.0 * math.prod(shapes[0]) * shapes[1][-1]
    if kind == "convolution_backward":
        grad, _, weight = shapes
        # Two products: the gradients of the input and of the weight. The first layer's input has none.
        return sum(others[-1]) * 2.0 * grad[0] * math.prod(grad[2:]) * math.prod(weight)
    images, _, *size = shapes[0]
    stride, padding, dilation = others[:3]
    weight = shapes[1]
    area = math.prod(
        (n + 2 * p - d * (w - 1) - 1) // s + 1
        for n, p, d, w, s in zip(size, padding, dilation, weight[2:], stride)
    )
    return 2.0 * images * area * math.prod(weight)


def _tensor(operand: Operand) -> Tensor:
    dtype, shape, stride = operand
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride))
    return torch.randn(extent).to(dtype).as_strided(shape, stride)


def _ways(product: Product, others: list[Any]) -> dict[str, Callable[[], object]]:
    """Return the implementations of a product that are timed."""
    kind, operands, _ = product
    tensors = [_tensor(operand) for operand in operands]
    if kind == "bmm":
        return {"torch.bmm": lambda: torch.bmm(*tensors)}
    if kind == "mm":
        a, b = tensors
        out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
        return {
            "torch.mm": lambda: torch.mm(a, b, out=out),
            "addmm_": lambda: torch.ops.shoestring.addmm_(out, a, b, beta=0.0),
        }
    packed = [x.contiguous(memory_format=torch.channels_last) for x in tensors]
    if kind == "convolution":
        return {
            "contiguous": lambda: aten.convolution(*tensors, None, *others),
            "channels-last": lambda: aten.convolution(*packed, None, *others),
        }
    return {
        "contiguous": lambda: aten.convolution_backward(*tensors, None, *others),
        "channels-last": lambda: aten.convolution_backward(*packed, None, *others),
    }


class Ceiling:
    """The products of a step, each with the faster of its implementations."""

    def __init__(self, recorder: Recorder) -> None:
        self.flops = recorder.flops()
        self.count = sum(recorder.counts.values())
        self.chosen: dict[str, float] = defaultdict(float)
        self.rows: list[dict[str, Any]] = []
        self.runs: list[tuple[float, Callable[[], object], int]] = []
        for product, count in recorder.counts.items():
            ways = _ways(product, recorder.others[product])
            seconds = {}
            for name, run in ways.items():
                run()
                once = _seconds(run, 1)
                repeats = max(1, min(100, int(2e-3 / once)))
                seconds[name] = min(_seconds(run, repeats) for _ in range(3))
            best = min(seconds, key=lambda name: seconds[name])
            self.chosen[best] += count
            self.runs.append((count, ways[best], max(1, min(100, int(2e-3 / seconds[best])))))
            self.rows.append(
                {
                    "name": f"{product[0]} {' x '.join(str(list(shape)) for _, shape, _ in product[1])}",
                    "dtype": str(product[1][0][0])[6:],
                    "count": count,
                    "GFLOP/s": {
                        name: _flops(product, recorder.others[product]) / s / 1e9
                        for name, s in seconds.items()
                    },
                    "seconds": count * seconds[best],
                }
            )

    def seconds(self) -> float:
        """Return the seconds of all products of a step, from a new measurement."""
        with torch.no_grad():
            return sum(count * _seconds(run, repeats) for count, run, repeats in self.runs)


def _seconds(run: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats
