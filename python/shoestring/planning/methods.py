"""Give a model the adapters of another method, for good or while it is measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shoestring.adapters.apply import apply
from shoestring.checkpoint.weights import OWNER, bytes_here
from shoestring.core.device import forked_rng
from shoestring.quantization.quantized_tensor import QuantizedTensor

RANK = 16  # of the adapters; their other options are the defaults of lora.apply


@dataclass(frozen=True)
class Method:
    """A method says what a step trains: all weights, or adapters of frozen weights.

    ``adapters`` and ``quantize`` are the choices of a plan, and ``freedom`` is what they need.
    """

    adapters: str = "none"
    quantize: str = "none"
    freedom: str = "exact"

    @property
    def lever(self) -> str:
        """The choice that names the method: quantised weights are frozen, so that they imply adapters."""
        return "adapters" if self.quantize == "none" else "quantize"


FULL = Method()


def methods(model: nn.Module, freedom: str, given: Mapping[str, str]) -> list[Method]:
    """Return the methods that a plan may choose among: those that are given, or that the freedom allows.

    Other methods than that of the model are for models that train all of their weights.
    """
    if hasattr(model, OWNER) or not all(p.requires_grad for p in model.parameters()):
        return [FULL]
    found = []
    for adapters, quantize in (("none", "none"), ("lora", "none"), ("lora", "nf4")):
        values = {"adapters": adapters, "quantize": quantize}
        if any(given.get(name, value) != value for name, value in values.items()):
            continue
        method = Method(adapters, quantize, "exact" if adapters == "none" else "method")
        if method.lever in given:
            method = replace(method, freedom="exact")
        if method.freedom == "exact" or freedom == "method":
            found.append(method)
    return found or [FULL]


def apply_method(model: nn.Module, adapters: str, quantize: str) -> None:
    """Freeze a model, quantise its linear layers if wanted, and add adapters, in place.

    Raises:
        ValueError: the model has no layer for adapters, or its layers cannot be quantised.
    """
    if adapters != "none":
        apply(model, rank=RANK, quantize=None if quantize == "none" else quantize)


@contextmanager
def with_method(model: nn.Module, method: Method) -> Iterator[None]:
    """Let a model have the adapters of a method inside the ``with`` block.

    Modules, parameters and random state are as before at its end. The dense weights stay in memory.
    """
    before = [(module, type(module), _attributes(module)) for module in model.modules()]
    trained = [(p, p.requires_grad) for p in model.parameters()]
    try:
        with forked_rng():
            apply_method(model, method.adapters, method.quantize)
        yield
    finally:
        for module, kind, attributes in before:
            module.__class__ = kind
            module.__dict__.clear()
            for name, (value, content) in attributes.items():
                if content is not None:
                    value.clear()
                    value.update(content)
                module.__dict__[name] = value
        for p, requires_grad in trained:
            p.requires_grad_(requires_grad)


# The dicts and sets in which a module holds parameters, buffers, modules and hooks.
CONTAINERS = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the attributes of a module, each with a copy of its content if it is one of CONTAINERS."""
    return {
        name: (value, value.copy() if name in CONTAINERS and isinstance(value, (dict, set)) else None)
        for name, value in vars(module).items()
    }


@dataclass(frozen=True)
class Weights:
    """Figures of the weights of a whole model.

    ``trained``: parameters of the number and the shapes of those that are trained. ``bytes``: of weights and buffers.
    ``freed``: bytes that the weights lose when they are quantised.
    """

    trained: list[nn.Parameter]
    bytes: int
    freed: int

    @classmethod
    def of(cls, model: nn.Module, others: Sequence[nn.Module] = ()) -> Weights:
        """Return the figures of a model and of ``others``, which stand for blocks that it lacks now."""
        modules = (model, *others)
        return cls(
            [p for module in modules for p in module.parameters() if p.requires_grad],
            sum(map(bytes_here, modules)),
            sum(map(freed_bytes, modules)),
        )


def freed_bytes(model: nn.Module) -> int:
    """Return how many more bytes the quantised weights of a model had when they were dense."""
    return sum(
        p.numel() * p.element_size() - p.nbytes_held()
        for p in model.parameters()
        if isinstance(p, QuantizedTensor)
    )
