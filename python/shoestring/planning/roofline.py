"""Compute the time of each module of a model on a machine that need not be here."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shoestring.core.device import forked_rng
from shoestring.core.module_argument import check_module
from shoestring.planning.machine import DTYPES, Machine
from shoestring.planning.operator_flops import flops_of

# Operators that read as many elements as they return, not all elements of their arguments.
GATHERS = {
    "aten::embedding",
    "aten::gather",
    "aten::index",
    "aten::index_select",
    "aten::nll_loss_forward",
    "shoestring::embedding",
}
# Operators that touch no memory. Views are not in this list: their schemas say that they are views.
FREE = {
    "aten::_unsafe_view",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}


@dataclass
class ModuleTime:
    """Predicted time and work of a module with all modules inside it, in one forward and backward.

    Attributes:
        forward_seconds: time of the forward pass.
        backward_seconds: time of the backward pass, with all that it recomputes.
        forward_flops: floating-point operations of matrix products in the forward pass.
        backward_flops: those in the backward pass.
        forward_bytes: bytes that operators read and write in the forward pass.
        backward_bytes: those in the backward pass.

    Example:
        >>> from shoestring.planning.roofline import roofline
        >>> machine = shoestring.hardware_profile("nvidia-h200")
        >>> times = roofline(torch.nn.Linear(64, 32, device="meta"), [torch.ones(8, 64)], machine, "bf16")
        >>> times[""].forward_flops == 2 * 8 * 64 * 32
        True
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_flops: int = 0
    backward_flops: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0

    def add(self, is_backward: bool, seconds: float, flops: int, bytes: int) -> None:
        """Add the work of an operator."""
        if is_backward:
            self.backward_seconds += seconds
            self.backward_flops += flops
            self.backward_bytes += bytes
        else:
            self.forward_seconds += seconds
            self.forward_flops += flops
            self.forward_bytes += bytes


def roofline(
    model: nn.Module,
    example: Tensor | Mapping[str, Any] | Sequence[Any],
    machine: Machine,
    precision: str = "fp32",
) -> dict[str, ModuleTime]:
    """Predict the time of forward and backward of each module of a model, without running it.

    Each operator takes the longer of two times: its floating-point operations over the rate of matrix products, and
    its bytes over the bandwidth of a copy. The model runs on the meta device, so it may be larger than any memory,
    and its values do not change. Launch times, caches and the shapes of products are not part of the prediction:
    expect an error of about 30 % on models whose products dominate.

    Args:
        model: the model, on any device.
        example: the arguments of one training step: a mapping, a sequence or one tensor. The loss is the ``.loss``
            of the output, or the sum of its first tensor.
        machine: the rates.
        precision: how fp32 tensors are multiplied: "fp32", "tf32", or "bf16" and "fp16" as under autocast. Products
            of bf16 and fp16 tensors have the rate of their own dtype. Bytes are those of the tensors as they are.

    Returns:
        The time of each module by its name, with all modules inside it; "" is the whole model. Modules that were not
        called have zeros.

    Raises:
        ValueError: the machine has no rate that the model needs, or an argument is out of range.

    Example:
        >>> from shoestring.planning.roofline import roofline
        >>> model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.ReLU()).to("meta")
        >>> machine = shoestring.hardware_profile("nvidia-h200")
        >>> times = roofline(model, torch.ones(8192, 4096), machine, "bf16")
        >>> f"{times['0'].forward_seconds * 1e6:.0f} us"
        '355 us'
    """
    check_module("roofline", model)
    if precision not in DTYPES:
        raise ValueError(f"roofline: precision: expected one of {DTYPES}, received {precision!r}")
    tensors = {name: _on_meta(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    args, kwargs = tree_map_only(Tensor, _on_meta, _arguments(example))
    work = Work(model, machine, precision)
    # Checkpoints run modules in backward again, so the tensors stay in their places until its end.
    with (
        forked_rng(),
        _reparametrize_module(model, tensors, tie_weights=True),
        torch.enable_grad(),
        work.attributed(),
        work,
        _FusedAttention(),
    ):
        loss = _loss(model(*args, **kwargs))
        if loss.requires_grad:
            work.is_backward = True
            loss.backward()
    return work.times


def _on_meta(x: Tensor) -> Tensor:
    return x.detach().to("meta").requires_grad_(x.requires_grad)


def _arguments(example: Tensor | Mapping[str, Any] | Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Tensor):
        return (example,), {}
    return ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    found = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
    if found is None:
        raise ValueError("roofline: model: expected an output with a tensor, received one without")
    return found.sum()


class _FusedAttention(TorchFunctionMode):
    """Call the operator of fused attention, which PyTorch does not choose for tensors on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            return _fused_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        key, value = (
            x.unsqueeze(2).expand(-1, -1, query.shape[1] // x.shape[1], -1, -1).flatten(1, 2)
            for x in (key, value)
        )
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result: Tensor = operator(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return result


class Work(TorchDispatchMode):
    """Adds the time of each operator to the modules in whose forward or backward it runs."""

    def __init__(self, model: nn.Module, machine: Machine, precision: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {module: name for name, module in model.named_modules()}
        self.times = {name: ModuleTime() for name in self.names.values()}
        self.machine, self.precision = machine, precision
        self.is_backward = False
        self.stack: list[
            tuple[str, ...]
        ] = []  # the names of the modules that run, outermost first, at each depth
        # Autograd numbers its nodes in the order of the forward. From the number starts[i] on, nodes belong to the
        # modules owners[i].
        self.starts: list[int] = [0]
        self.owners: list[tuple[str, ...]] = [()]

    @contextmanager
    def attributed(self) -> Iterator[None]:
        """Follow the calls of modules inside the ``with`` block. The modules themselves get no hooks."""
        with (
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        ):
            yield

    def _entered(self, module: nn.Module, _: Any) -> None:
        name = self.names.get(module)
        self.stack.append(self._current() if name is None else (*self._current(), name))
        self._note()

    def _left(self, *_: Any) -> None:
        self.stack.pop()
        self._note()

    def _note(self) -> None:
        self.starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self.owners.append(self._current())

    def _current(self) -> tuple[str, ...]:
        """Return the modules to which an operator belongs that runs now."""
        if self.stack:
            return self.stack[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ()
        return self.owners[bisect.bisect_right(self.starts, node._sequence_nr()) - 1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        flops = flops_of(func, args, kwargs, out)
        bytes = _bytes(func, args, kwargs, out)
        if flops or bytes:
            seconds = max(self._product_seconds(flops, args), self._copy_seconds(bytes))
            for name in {"", *self._current()}:
                self.times[name].add(self.is_backward, seconds, flops, bytes)
        return out

    def _product_seconds(self, flops: int, args: Any) -> float:
        if flops == 0:
            return 0.0
        dtype = next(x.dtype for x in tree_leaves(args) if isinstance(x, Tensor) and x.is_floating_point())
        own = {torch.float32: self.precision, torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
        if own is None:
            raise ValueError(f"roofline: model: expected products in fp32, bf16 or fp16, received {dtype}")
        rate = self.machine.gemm_flops[own]
        if rate is None:
            self._refuse(f"gemm_flops.{own}")
        return flops / rate

    def _copy_seconds(self, bytes: int) -> float:
        rate = self.machine.copy_bytes_per_second
        if rate is None:
            self._refuse("copy_bytes_per_second")
        return bytes / rate

    def _refuse(self, name: str) -> NoReturn:
        raise ValueError(
            f"roofline: machine: expected a rate {name} of {self.machine.name}, received None: "
            f"{self.machine.not_measured[name]}"
        )


def _bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that an operator reads and writes in the memory of the device."""
    schema = func._schema
    aliases = [value.alias_info for value in schema.returns]
    if schema.name in FREE or any(alias is not None and not alias.is_write for alias in aliases):
        return 0
    written = sum(map(_size, tree_leaves(out)))
    if schema.name in GATHERS:
        return 2 * written
    return written + sum(map(_size, tree_leaves((args, kwargs))))


def _size(value: object) -> int:
    """Return the bytes of a tensor's elements; those that an expanded tensor repeats count once."""
    if not isinstance(value, Tensor):
        return 0
    count = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if stride != 0 or size == 0:
            count *= size
    return count * value.element_size()
