"""Stacks of experts as codes: which modules can have them, how they are made, and how they are saved and loaded."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.core.save_pretrained import watch
from shoestring.core.stacks import refusal_of_codes, stacks_of
from shoestring.quantization.quantized_keys import read_keys, write_keys
from shoestring.quantization.quantized_tensor import QuantizedTensor, quantize_parts

HOLDS_CODES = "_shoestring_holds_codes"


class ExpertCount(NamedTuple):
    """The number of experts whose stacks are codes, and of the others. A layer with 128 experts counts as 128.

    Example:
        >>> moe = torch.nn.Sequential(shoestring.nn.MoE(64, 64, experts=4, top_k=2))
        >>> moe = shoestring.lora.apply(moe, target_parameters=["down_proj"], target_modules=[], quantize="nf4")
        >>> shoestring.count_experts(moe)
        ExpertCount(quantized=4, dense=0)
    """

    quantized: int
    dense: int


def count_experts(model: nn.Module) -> ExpertCount:
    """Count the experts of a model by whether all of their stacked weights are quantised.

    Args:
        model: any module. Each module in it that holds weights of three dimensions counts as stacked experts.

    Returns:
        The number of experts with quantised and with dense weights.

    Example:
        >>> shoestring.count_experts(shoestring.nn.Experts(8, 16, 24))
        ExpertCount(quantized=0, dense=8)
    """
    quantized = dense = 0
    for module in model.modules():
        stacks = [stack for _, stack in stacks_of(module)]
        if stacks:
            is_quantized = all(isinstance(stack, QuantizedTensor) for stack in stacks)
            quantized += stacks[0].shape[0] * is_quantized
            dense += stacks[0].shape[0] * (not is_quantized)
    return ExpertCount(quantized, dense)


class Stack(NamedTuple):
    """A stacked weight: the module that holds it, and its name there."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        return self.module._parameters[self.name]  # type: ignore[return-value]


def dense_stacks(model: nn.Module) -> dict[str, Stack]:
    """Return the stacked weights of a model that are not quantised, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: Stack(module, name)
        for prefix, module in model.named_modules()
        for name, stack in stacks_of(module)
        if not isinstance(stack, QuantizedTensor)
    }


def split_by_refusal(
    stacks: Mapping[str, Stack], quant_type: str, block_size: int | None
) -> tuple[dict[str, Stack], dict[str, str]]:
    """Return the stacks that may become codes, and for the names of the others why they stay dense.

    All stacks of a module become codes, or none.
    """
    size = 1 if quant_type == "int8" else block_size or 64
    reasons: dict[nn.Module, str] = {}
    for module, name in stacks.values():
        matrix = math.prod(Stack(module, name).tensor.shape[1:])
        reason = refusal_of_codes(module)
        if reason is None and (matrix % size or not matrix):
            reason = f"the {matrix} elements of a matrix are not a number of whole blocks of {size}"
        if reason is not None:
            reasons.setdefault(module, reason)
    allowed = {name: stack for name, stack in stacks.items() if stack.module not in reasons}
    return allowed, {name: reasons[stack.module] for name, stack in stacks.items() if name not in allowed}


def warn_of_dense(caller: str, reasons: Mapping[str, str]) -> None:
    """Warn that stacked weights stay dense, which is most of the memory of a mixture of experts."""
    if reasons:
        name, reason = next(iter(reasons.items()))
        warnings.warn(
            f"{caller}: {len(reasons)} stacked weight(s) stay dense, the first is {name}: {reason}",
            stacklevel=3,
        )


def quantize_slabs(
    slabs: Iterable[Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    quant_type: str,
    block_size: int | None,
    double_quant: bool,
) -> QuantizedTensor:
    """Quantise a stack from its matrices, of which one at a time is in memory.

    The codes are those of the whole stack.

    Args:
        slabs: the matrices in their order, each of shape ``(1, *shape[1:])``, as one tensor or several.
        shape: shape of the stack.
        dtype: the dtype from which it is quantised, and which the codes stand for.
        device: the device of the codes.
        quant_type, block_size, double_quant: as for :class:`QuantizedLinear`. A matrix has whole blocks.
    """
    watch()
    size = shape[-1] if quant_type == "int8" else block_size or 64
    packed = absmax = torch.empty(0)
    at = 0
    for slab in slabs:
        q = quantize_parts(slab.to(device, dtype), quant_type, size, double_quant=False)
        if at == 0:
            packed, absmax = (part.new_empty(shape[0], *part.shape[1:]) for part in q.parts())
        packed[at : at + slab.shape[0]], absmax[at : at + slab.shape[0]] = q.parts()
        at += slab.shape[0]
    if at != shape[0]:
        raise RuntimeError(f"quantize_slabs: expected {shape[0]} matrices, received {at}")
    nested = None
    if double_quant:
        codes, nested = torch.ops.shoestring.quantize_absmax(absmax.flatten())
        absmax = codes.view(absmax.shape)
    return QuantizedTensor(
        packed, absmax, nested, shape=shape, dtype=dtype, quant_type=quant_type, block_size=size
    )


def slabs_of(stack: Tensor) -> Iterator[Tensor]:
    """Yield the matrices of a dense stack."""
    return (stack.detach()[e : e + 1] for e in range(stack.shape[0]))


def hold_codes(stack: Stack, codes: QuantizedTensor) -> None:
    """Put codes in place of a stacked weight. Its module saves and loads them under the names of bitsandbytes."""
    module = stack.module
    module._parameters[stack.name] = nn.Parameter(codes, requires_grad=False)
    if HOLDS_CODES not in module.__dict__:
        # The hooks are functions that know no module, so a copy of the module may have the same ones.
        module._register_state_dict_hook(_save)
        module._register_load_state_dict_pre_hook(_load)
        module.__dict__[HOLDS_CODES] = True


def _save(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, parameter in module._parameters.items():
        if isinstance(parameter, QuantizedTensor) and prefix + name in state:
            write_keys(parameter, state, prefix + name)


def _load(state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Build codes from the tensors of files. ``nn.Module`` then copies them into the parameter, which checks the form."""
    names = {name.removeprefix(prefix).partition(".")[0] for name in state if name.startswith(prefix)}
    for name in sorted(names):
        key = prefix + name
        if key not in state:
            continue
        codes = read_keys(state, key, None, torch.float32, "Experts")
        if codes is not None:
            state[key] = codes
        elif metadata.get("assign_to_params_buffers", False) and state[key].dim() == 3:
            raise ValueError(
                f"Experts: {key}: expected codes with load_state_dict(assign=True), received a dense weight. "
                "Leave out assign=True to quantise it"
            )
