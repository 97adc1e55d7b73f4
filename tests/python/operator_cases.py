"""The table of cases: the calls with which the tests of all operators run an operator.

The test of an operator declares an :class:`Operator`: its arguments for a number of rows and features, its reference
in plain PyTorch, and the source of its tolerance. ``operators()`` returns the operators of all tests.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from build_folder import EMULATOR

CAPABILITIES = ("plain", "avx2", "avx512", "amx")
Arguments = dict[str, Any]  # by the names of the schema: draws of tensors, and other values
Values = Callable[[tuple[int, ...], torch.Generator], Tensor]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# (rows, features) of an operator without rows: no element, less than one SIMD vector, several vectors and a
# remainder, and enough elements for two threads.
ELEMENTWISE = ((1, 0), (1, 3), (7, 11), (3, 11000))


def slack_of_gelu(elements: int, dtype: torch.dtype) -> float:
    """Over few elements the error of eager PyTorch may happen to be almost 0, so allow errors of two roundings."""
    return 1e-7 if elements > 100 else 2 * torch.finfo(torch.float32).eps


def on_gpu() -> bool:
    """Return whether CUDA kernels run the operators, on a GPU or in the emulator."""
    emulated = os.path.realpath(EMULATOR) in torch.ops.loaded_libraries
    return emulated or torch.get_default_device().type == "cuda"


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the operands of products: GPUs and CPUs with bf16 units multiply in 16 bits."""
    units = dtype == torch.bfloat16 and torch.ops.shoestring._cpu_capability() in ("avx512", "amx")
    return dtype if units or on_gpu() else wide_dtype(dtype)


def slack_of_products(elements: int, dtype: torch.dtype) -> float:
    """Allow more on GPUs: tensor cores drop low bits of sums that fp32 units keep."""
    return 1e-6 if on_gpu() else 2e-7


@dataclass(frozen=True)
class Draw:
    """A tensor argument that a seed determines.

    Args:
        shape: shape of the tensor.
        values: returns the values on the CPU, fp32 or integers, from the shape and a generator.
        dtype: dtype of the tensor, or a function of the dtype of the case; None is the dtype of the case for floats, and
            that of the values for integers.
        gradient: whether the operator has a gradient of this argument.
    """

    shape: tuple[int, ...]
    values: Values
    dtype: torch.dtype | Callable[[torch.dtype], torch.dtype] | None = None
    gradient: bool = True

    def tensor(self, seed: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        # A GPU must get the values of the CPU, and tests may have set another default device.
        values = self.values(self.shape, torch.Generator().manual_seed(zlib.crc32(seed.encode())))
        own = dtype if values.is_floating_point() else values.dtype
        return values.to(device, self.dtype(dtype) if callable(self.dtype) else self.dtype or own)


def normal(*shape: int, scale: float = 1.0, mean: float = 0.0, **more: Any) -> Draw:
    """Draw normal values with the standard deviation ``scale``."""
    return Draw(shape, lambda s, g: torch.randn(s, generator=g, device="cpu") * scale + mean, **more)


def uniform(*shape: int, low: float = 0.0, high: float = 1.0, **more: Any) -> Draw:
    """Draw uniform values in [low, high)."""
    return Draw(shape, lambda s, g: torch.rand(s, generator=g, device="cpu") * (high - low) + low, **more)


def casts(*names: str) -> Callable[[Arguments], Arguments]:
    """Return a function that casts arguments to bf16."""
    return lambda given: given | {name: given[name].bfloat16() for name in names}


def label(part: tuple[int, int] | torch.dtype | Arguments) -> str:
    """Return the name of a size, a dtype or options in the name of a case."""
    if isinstance(part, dict):
        words = (
            name
            if callable(value) or isinstance(value, Draw)
            else f"{name}={str(value).removeprefix('torch.')}"
            for name, value in part.items()
        )
        return " ".join(words) or "plain"
    return f"{part[0]}x{part[1]}" if isinstance(part, tuple) else str(part).removeprefix("torch.")


def integers(*shape: int, low: int = 0, high: int) -> Draw:
    """Draw uniform int64 values in [low, high)."""
    return Draw(shape, lambda s, g: torch.randint(low, high, s, generator=g, device="cpu"))


@dataclass(frozen=True)
class Operator:
    """An operator of ``torch.ops.shoestring``, and how it is tested.

    A result passes if its error against the reference in fp64 is at most ``factor`` times the error of the reference
    in the dtype of the case, plus ``slack``, or if random roundings to the dtype ``computed`` explain it
    (``rounding.py``). The slack of 2e-7 is that of three roundings to fp32, each of at most 6e-8: the reference may
    round exactly by luck.

    Args:
        name: name of the operator.
        reference: the operator in plain PyTorch, with the arguments of the schema.
        arguments: returns the arguments for a number of rows and features.
        sizes: (rows, features) of the cases.
        options: further arguments; each case exists once with each of them. A function returns the argument for a
            number of rows and features.
        traced: number of options, from the first, with which opcheck and torch.compile trace the operator; None is all.
        dtypes: dtypes of the cases.
        factor, slack: bound of the error, see above. The slack may depend on rows * features and
            the dtype.
        computed: returns the dtype of random roundings for the dtype of a case.
        twice_differentiable: whether the gradient is differentiable.
        autocast: returns the arguments that give the results of the operator under autocast in bf16. None: autocast
            changes no bit.
        schema: returns the arguments of the schema for those of the cases, if they differ: cases have no lists.
        function: the Python function, with the arguments of the cases. None is that of ``shoestring.ops``, with the
            arguments of the schema.
        fp64_device: device of fp64 tensors; None is that of other tensors.
    """

    name: str
    reference: Callable[..., Any]
    arguments: Callable[[int, int], Arguments]
    sizes: Sequence[tuple[int, int]]
    options: Sequence[Arguments] = ({},)
    dtypes: Sequence[torch.dtype] = FLOATS
    factor: float = 1.1
    slack: float | Callable[[int, torch.dtype], float] = 2e-7
    computed: Callable[[torch.dtype], torch.dtype] = wide_dtype
    twice_differentiable: bool = False
    autocast: Callable[[Arguments], Arguments] | None = None
    schema: Callable[..., Arguments] = dict
    function: Callable[..., Any] | None = None
    fp64_device: str | None = None
    traced: int | None = None

    def call(self, **given: Any) -> Any:
        return getattr(torch.ops.shoestring, self.name)(**self.schema(**given))

    def case(
        self, rows: int, features: int, dtype: torch.dtype = torch.float32, options: Arguments | None = None
    ) -> Case:
        """Return the case of a size, with the first options unless others are given.

        In a case of fp64, a dtype among the options is fp64 too.
        """
        options = self.options[0] if options is None else options
        arguments = self.arguments(rows, features)
        for name, value in options.items():
            value = value(rows, features) if callable(value) else value
            arguments[name] = dtype if dtype == torch.float64 and isinstance(value, torch.dtype) else value
        return Case(self, arguments, dtype, (rows, features), options)

    @property
    def cases(self) -> list[Case]:
        return [
            self.case(*size, dtype, options)
            for options in self.options
            for dtype in self.dtypes
            for size in self.sizes
        ]


@dataclass(frozen=True)
class Case:
    """A call of an operator: its arguments, in one dtype."""

    operator: Operator
    arguments: Arguments
    dtype: torch.dtype
    size: tuple[int, int]
    options: Arguments

    @property
    def name(self) -> str:
        return " ".join(map(label, (self.size, self.dtype, self.options)))

    @property
    def narrow(self) -> torch.dtype:
        """The narrowest dtype of a result. The reference in fp64 gets upstream gradients of this dtype, too."""
        others = (value for value in self.arguments.values() if isinstance(value, torch.dtype))
        return min((self.dtype, *others), key=lambda dtype: dtype.itemsize)

    @property
    def slack(self) -> float:
        """Return the error that the case allows beyond ``factor`` times that of eager PyTorch."""
        slack, elements = self.operator.slack, math.prod(self.size)
        slack = slack(elements, self.narrow) if callable(slack) else slack
        if self.dtype == torch.float64:  # the exact result has errors of fp64 itself
            slack = 1e-12
        # In a small case, the last rounding of eager PyTorch may be exact by luck.
        return slack + torch.finfo(self.narrow).eps / 2 if elements < 100 else slack

    def given(self, seed: int, device: torch.device | str | None = None) -> Arguments:
        """Return the arguments with their tensors, on ``device`` or the default device. Leaves require gradients.

        All dtypes and options of a size have the same numbers, up to the rounding to the dtype.
        """
        own = self.operator.fp64_device if self.dtype == torch.float64 else None
        device = device or own or torch.get_default_device()
        found = dict(self.arguments)
        for name, draw in found.items():
            if isinstance(draw, Draw):
                tensor = draw.tensor(f"{seed} {self.size} {name}", self.dtype, device)
                found[name] = tensor.requires_grad_(draw.gradient and tensor.is_floating_point())
        return found

    def run(
        self, function: Callable[..., Any], given: Arguments, dtype: torch.dtype | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the results of a function, computed in ``dtype`` if that is given, and its leaves by their names."""
        given = {name: _leaf(value, dtype) for name, value in given.items()}
        made = function(**given)
        leaves = {name: t for name, t in given.items() if isinstance(t, Tensor) and t.requires_grad}
        return [made] if isinstance(made, Tensor) else list(made), leaves

    def upstream(self, results: Sequence[Tensor], seed: int) -> dict[int, Tensor]:
        """Return the upstream gradient of each result that requires a gradient, by the position of the result."""
        # Losses multiply the gradients that forward has rounded by the upstream gradient. By 0.5 this is exact.
        return {
            i: normal(*t.shape).tensor(f"{seed} {self.size} {i}", self.narrow, t.device).to(t.dtype)
            if t.dim() > 0
            else torch.full_like(t, 0.5)
            for i, t in enumerate(results)
            if t.requires_grad
        }

    def results(
        self, function: Callable[..., Any], given: Arguments, seed: int, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Return the results of a function and the gradients of its leaves, computed in ``dtype`` if that is given."""
        results, leaves = self.run(function, given, dtype)
        found = {f"result {i}": t.detach() for i, t in enumerate(results)}
        if leaves:
            upstream = self.upstream(results, seed)
            roots = [results[i] for i in upstream]
            gradients = torch.autograd.grad(roots, list(leaves.values()), list(upstream.values()))
            found |= {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}
        return found

    def exact(self, given: Arguments, seed: int) -> dict[str, Tensor]:
        """Return the results and gradients of the reference in fp64."""
        return self.results(self.operator.reference, given, seed, torch.float64)


def _leaf(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a tensor as a new leaf, and floats and dtypes as ``dtype`` if that is given."""
    if isinstance(value, Tensor):
        wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return value.detach().to(wanted).requires_grad_(value.requires_grad)
    return dtype if dtype is not None and isinstance(value, torch.dtype) else value


@functools.cache
def operators() -> dict[str, Operator]:
    """Return the operators that the tests declare, by name."""
    from operator_tests import OperatorTests

    for path in sorted(Path(__file__).parent.glob("*/test_*.py")):
        if "(OperatorTests)" in path.read_text():
            sys.path.append(str(path.parent))
            importlib.import_module(path.stem)
    return {tests.operator.name: tests.operator for tests in OperatorTests.__subclasses__()}
