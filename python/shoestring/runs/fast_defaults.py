"""Switches of PyTorch that make a training step faster, each kept only if it does so here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from shoestring.core.device import is_cuda, synchronize

CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
SWITCHES = ("tf32", "bf16_products", "channels_last", "cudnn_benchmark")


@dataclass(frozen=True)
class MeasuredSwitch:
    """A switch that ``fast_defaults`` has tried.

    Attributes:
        name: the switch.
        kept: whether it is on now.
        before: median seconds of a step without the switch, or None if it does not apply.
        after: median seconds of a step with the switch, or None if it does not apply.
        reason: why the switch does not apply, or an empty text.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> fast = shoestring.fast_defaults(lambda: None, model, switches=["channels_last"])
        >>> fast.report[0].kept, fast.report[0].reason
        (False, 'the model has no convolutions of two or three dimensions')
    """

    name: str
    kept: bool
    before: float | None = None
    after: float | None = None
    reason: str = ""


class FastDefaults:
    """The switches that ``fast_defaults`` has kept. As a context manager, it undoes them at the end of the block.

    Attributes:
        report: the result of each switch, in the order in which they were tried.

    Example:
        >>> fast = shoestring.fast_defaults(lambda: None, torch.nn.Linear(4, 2), switches=["channels_last"])
        >>> print(fast)
        channels_last: does not apply: the model has no convolutions of two or three dimensions
        >>> fast.undo()
    """

    def __init__(self) -> None:
        self.report: list[MeasuredSwitch] = []
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Restore everything that the switches have changed. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> FastDefaults:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = []
        for switch in self.report:
            if switch.before is None or switch.after is None:
                lines.append(f"{switch.name}: does not apply: {switch.reason}")
            else:
                times = f"{switch.before * 1e3:.3g} ms without, {switch.after * 1e3:.3g} ms with"
                lines.append(f"{switch.name}: {times}: {'kept' if switch.kept else 'not kept'}")
        return "\n".join(lines)


def fast_defaults(
    step: Callable[[], object],
    model: nn.Module,
    *,
    switches: Sequence[str] = SWITCHES,
    repeats: int = 5,
    gain: float = 0.02,
) -> FastDefaults:
    """Try switches of PyTorch one after the other, and keep each one that makes a step faster.

    ========================= ======================================================== ======================
    switch                    what it changes                                          applies to
    ========================= ======================================================== ======================
    ``"tf32"``                fp32 products round their factors to 10 bits of mantissa CUDA, from sm_80 on
    ``"bf16_products"``       fp32 products round their factors to bf16 (oneDNN)       CPUs with bf16 products
    ``"channels_last"``       memory format of the weights of convolutions             models with convolutions
    ``"cudnn_benchmark"``     cuDNN measures its algorithms for each shape             CUDA, convolutions
    ========================= ======================================================== ======================

    The step runs ``repeats`` times without and with each switch, twice in turn, after a step to warm up. A switch is
    kept if the median is lower by the share ``gain``. The precision of products and cuDNN's choice are settings of
    the process, and the memory format is one of the model's weights.

    Args:
        step: a training step of typical shapes. It runs many times, so call this function before the training, or
            leave the optimizer out of the step.
        model: the model, whose device decides which switches apply. Create optimizers that have state afterwards.
        switches: names of the switches to try.
        repeats: number of steps of each measurement.
        gain: least share of the time that a switch must save.

    Returns:
        The report, and ``undo()``. Print it to see the times. In a ``with`` statement, the switches last until the
        end of the block.

    Raises:
        ValueError: a switch is not known, or an option is out of range.

    Example:
        >>> model = torch.nn.Conv2d(3, 8, 3)
        >>> x = torch.randn(2, 3, 16, 16)
        >>> with shoestring.fast_defaults(lambda: model(x).sum().backward(), model) as fast:
        ...     kept = [switch.name for switch in fast.report if switch.kept]
        >>> model.weight.is_contiguous()
        True
    """
    for name in switches:
        if name not in SWITCHES:
            raise ValueError(f"fast_defaults: switches: expected names of {SWITCHES}, received {name!r}")
    if repeats < 1:
        raise ValueError(f"fast_defaults: repeats: expected a number of at least 1, received {repeats}")
    if not 0 <= gain < 1:
        raise ValueError(f"fast_defaults: gain: expected a number in [0, 1), received {gain}")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    fast = FastDefaults()
    try:
        for name in SWITCHES:
            if name in switches:
                _try(fast, name, step, model, device, repeats, gain)
    except BaseException:
        fast.undo()
        raise
    return fast


def _try(
    fast: FastDefaults,
    name: str,
    step: Callable[[], object],
    model: nn.Module,
    device: torch.device,
    repeats: int,
    gain: float,
) -> None:
    """Time steps with and without a switch, and turn it on if it is faster by at least ``gain``."""
    reason = _reason_against(name, model, device)
    if reason:
        fast.report.append(MeasuredSwitch(name, False, reason=reason))
        return
    before, after = [], []
    for _ in range(2):
        before += _seconds(step, device, repeats)
        undo = _switch_on(name, model)
        try:
            after += _seconds(step, device, repeats)
        finally:
            undo()
    is_faster = statistics.median(after) < (1 - gain) * statistics.median(before)
    if is_faster:
        fast._undo.append(_switch_on(name, model))
    fast.report.append(MeasuredSwitch(name, is_faster, statistics.median(before), statistics.median(after)))


def _seconds(step: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    step()
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times


def _reason_against(name: str, model: nn.Module, device: torch.device) -> str:
    """Return why a switch does not apply, or an empty text."""
    on_cuda = is_cuda(device)
    has_convolutions = any(isinstance(module, CONVOLUTIONS) for module in model.modules())
    if name in ("tf32", "bf16_products"):
        try:
            is_set = torch.get_float32_matmul_precision() != "highest"
        except RuntimeError:
            return "the precision of fp32 products is set for each backend"
        if is_set:
            return f'float32_matmul_precision is "{torch.get_float32_matmul_precision()}" already'
    if name == "tf32":
        if not on_cuda:
            return f"the model is on {device.type}"
        return "" if torch.cuda.get_device_capability(device) >= (8, 0) else "the GPU has no TF32"
    if name == "bf16_products":
        if device.type != "cpu":
            return f"the model is on {device.type}"
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return "" if has_bf16 else "the CPU has no bf16 products"
    if not has_convolutions:
        return "the model has no convolutions of two or three dimensions"
    if name == "cudnn_benchmark":
        if not on_cuda:
            return f"the model is on {device.type}"
        return "it is on already" if torch.backends.cudnn.benchmark else ""
    return "" if _other_formats(model) else "the weights of convolutions have this format already"


def _other_formats(model: nn.Module) -> list[tuple[nn.Parameter, torch.memory_format]]:
    """Return the weights of convolutions that are not in the channels-last format, with that format."""
    weights = []
    for module in model.modules():
        if isinstance(module, CONVOLUTIONS):
            weight: Any = module.weight
            last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
            if not weight.is_contiguous(memory_format=last):
                weights.append((weight, last))
    return weights


def _switch_on(name: str, model: nn.Module) -> Callable[[], None]:
    """Turn a switch on, and return the function that restores what was before."""
    if name in ("tf32", "bf16_products"):
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if name == "tf32" else "medium")
        return lambda: torch.set_float32_matmul_precision(precision)
    if name == "cudnn_benchmark":
        torch.backends.cudnn.benchmark = True
        return lambda: setattr(torch.backends.cudnn, "benchmark", False)
    changed = _other_formats(model)
    strides = [(weight, weight.stride()) for weight, _ in changed]
    for weight, last in changed:
        weight.data = weight.data.contiguous(memory_format=last)
        _match_gradient(weight)

    def undo() -> None:
        for weight, stride in strides:
            plain = torch.empty_strided(weight.shape, stride, dtype=weight.dtype, device=weight.device)
            weight.data = plain.copy_(weight.data)
            _match_gradient(weight)

    return undo


def _match_gradient(weight: nn.Parameter) -> None:
    """Give a gradient the strides of its weight, as backward does."""
    if weight.grad is not None and weight.grad.stride() != weight.stride():
        weight.grad = torch.empty_like(weight).copy_(weight.grad)
