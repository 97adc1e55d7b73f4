"""State dicts of torch.optim and bitsandbytes, into the entries of ours and back."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoestring.ops import dequantize_8bit, quantize_8bit
from shoestring.ops.quantize_8bit import STATE_BLOCK

NESTED = "__bnb_optimizer_quant_state__"  # under which bitsandbytes hides its tensors from FSDP
OURS = ("state", "min_quantize_size", "maximize")  # options that the others need not have
# Options of the others that say how, not what, they compute, or mean nothing (amsgrad and L2 decay are refused).
THEIRS = ("foreach", "fused", "capturable", "differentiable", "amsgrad", "decoupled_weight_decay")
THEIRS += ("alpha", "t_alpha", "t_beta3", "eps")
MAP_TOLERANCE = 1e-6  # maps were computed in fp32 by either side: neighbours are 5e-7 of their scale apart at the least


@dataclass(frozen=True)
class Moment:
    """One of a rule's running means: its name in a state dict, and whether it may be negative."""

    name: str
    signed: bool


def blocks(param: Tensor) -> int:
    """The number of blocks that a parameter's state takes."""
    return -(-param.numel() // STATE_BLOCK)


def imported(
    optimizer: Optimizer,
    moments: tuple[Moment, ...],
    state_dict: dict[str, Any],
    quantized: Callable[[Tensor, dict[str, Any]], bool],
) -> dict[str, Any]:
    """A state dict without ``format_version`` as one of ours; what it cannot read is left to the checks of a load.

    Raises:
        ValueError: it is another rule's, or a tensor does not fit.
    """
    where = f"{type(optimizer).__name__}: load_state_dict"
    groups, entries = [], dict(state_dict["state"])
    for ours, theirs in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        lacking = sorted(optimizer.defaults.keys() - theirs.keys() - set(OURS))
        if lacking:
            raise ValueError(f"{where}: expected groups of the same rule, received one without {', '.join(lacking)}")
        if theirs.get("amsgrad"):
            raise ValueError(f"{where}: amsgrad: expected False, received True; its third moment is not supported")
        if theirs.get("decoupled_weight_decay") is False and theirs["weight_decay"] != 0:
            raise ValueError(
                f"{where}: weight_decay: expected a decoupled one, received {theirs['weight_decay']} as L2 penalty"
            )
        group = {name: value for name, value in theirs.items() if name in optimizer.defaults or name not in THEIRS}
        group |= {name: ours[name] for name in OURS if name not in theirs}
        groups.append(group)
        for key, param in zip(theirs["params"], ours["params"], strict=False):
            if entries.get(key):
                entries[key] = _entry(where, moments, entries[key], param, quantized(param, group))
    groups += state_dict["param_groups"][len(groups) :]  # too many, which the load itself refuses
    return {**state_dict, "state": entries, "param_groups": groups}


def _entry(
    where: str, moments: tuple[Moment, ...], entry: dict[str, Any], param: Tensor, quantized: bool
) -> dict[str, Any]:
    entry = {**entry, **entry.get(NESTED, {})}
    if "state1" in entry:
        names = [f"state{i + 1}" for i in range(len(moments))]
    elif not any(f"{moment.name}_scale" in entry for moment in moments):
        names = [moment.name for moment in moments]
    else:
        return entry  # ours
    if names == ["momentum_buffer"]:
        entry = {"step": 1, **entry}  # torch's SGD counts no steps; where there is a buffer, the first was taken
    known = {"step", NESTED, *names, *(f"{kind}{i + 1}" for kind in ("qmap", "absmax") for i in range(len(moments)))}
    if "step" not in entry or not known >= entry.keys() >= set(names):
        received = sorted(entry.keys() - {NESTED})
        raise ValueError(f"{where}: expected the entries {['step', *names]}, received {received}")

    result: dict[str, Any] = {"step": torch.as_tensor(entry["step"], dtype=torch.float32).reshape(())}
    codes: dict[str, tuple[Tensor, Tensor]] = {}
    for i, (moment, name) in enumerate(zip(moments, names, strict=True)):
        value, scale = entry[name], f"absmax{i + 1}"
        if not isinstance(value, Tensor) or value.shape != param.shape:
            shape, received = tuple(param.shape), tuple(value.shape) if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{where}: {name}: expected the parameter's shape, {shape}, received {received}")
        if value.is_floating_point():
            result[moment.name] = value.float()
            if quantized:
                codes[moment.name] = quantize_8bit(value.float(), signed=moment.signed)
            continue
        for part, size in ((f"qmap{i + 1}", 256), (scale, blocks(param))):
            if part not in entry or entry[part].shape != (size,):
                received = tuple(entry[part].shape) if part in entry else "none"
                raise ValueError(f"{where}: {part}: expected ({size},) (blocks of 256 elements), received {received}")
        codes[moment.name] = _standard(value, entry[f"qmap{i + 1}"].float(), entry[scale].float(), moment.signed)
    if "state1" in entry and codes.keys() == {"exp_avg", "exp_avg_sq"}:
        (m, _), (v, v_scale) = codes.values()
        # bitsandbytes rounds small second moments to zero. Beside a first moment that is not, the step would explode.
        zero = 127  # the code of zero in the signed map
        codes["exp_avg_sq"] = (torch.where((v == 0) & (m != zero), 1, v).to(torch.uint8), v_scale)
    for moment in moments:
        if moment.name not in codes:
            continue
        values, scales = codes[moment.name]
        if quantized:
            result[moment.name], result[f"{moment.name}_scale"] = values, scales
        else:
            result[moment.name] = dequantize_8bit(values, scales, signed=moment.signed)
    return result


def _standard(codes: Tensor, values: Tensor, scale: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes of the standard map: as they are, or those of their values where the map is another."""
    every = torch.arange(256, dtype=torch.uint8, device=values.device)
    standard = dequantize_8bit(every, torch.ones(1, device=values.device), signed=signed)
    if (values - standard).abs().max() <= MAP_TOLERANCE:
        return codes.contiguous(), scale.contiguous()
    scales = scale.repeat_interleave(STATE_BLOCK)[: codes.numel()].view(codes.shape)
    return quantize_8bit(values[codes.int()] * scales, signed=signed)


def exported(optimizer: Optimizer, moments: tuple[Moment, ...]) -> dict[str, Any]:
    """A state dict for torch's optimizer of the same rule: fp32 moments, without the options that it lacks."""
    state_dict = optimizer.state_dict()
    state = {}
    for key, entry in state_dict["state"].items():
        state[key] = {"step": entry["step"].cpu().clone()}
        for moment in moments:
            scale = entry.get(f"{moment.name}_scale")
            value = entry[moment.name]
            state[key][moment.name] = (
                value.clone() if scale is None else dequantize_8bit(value, scale, signed=moment.signed)
            )
    own = ("state", "min_quantize_size")
    groups = [{k: v for k, v in group.items() if k not in own} for group in state_dict["param_groups"]]
    return {"state": state, "param_groups": groups}
