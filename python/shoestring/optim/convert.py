"""Conversion of state dicts: from torch.optim and bitsandbytes to this package, and to torch.optim."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoestring.core.dtensors import is_dtensor
from shoestring.optim.sharded import as_dtensor, local
from shoestring.optim.state_layout import Moment, blocks
from shoestring.quantization.quantize_8bit import STATE_BLOCK, dequantize_8bit, quantize_8bit
from shoestring.quantization.quantize_state_4bit import dequantize_state_4bit, quantize_state_4bit

if TYPE_CHECKING:
    from shoestring.optim.state_dicts import StateDicts

# The key under which bitsandbytes' state dicts hide quantised tensors from FSDP.
NESTED = "__bnb_optimizer_quant_state__"
# Options that the state dicts of torch.optim and bitsandbytes may lack. Of these, beta1 is an option of
# Adafactor only.
OURS = ("state_format", "min_quantize_size", "weight_rounding", "seed", "maximize", "beta1")
# Options in state dicts of torch.optim and bitsandbytes that are ignored if this package's optimizer lacks
# them. They select an implementation, or have no effect on the update rule. imported() raises an error for
# amsgrad and for L2 decay.
THEIRS: tuple[str, ...] = (
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "amsgrad",
    "decoupled_weight_decay",
)
THEIRS += ("alpha", "t_alpha", "t_beta3", "eps")
# Tolerance when bitsandbytes' quantisation map is compared with ours: both packages compute their maps in
# fp32, with different rounding errors. Neighbouring values of a map are at least 5e-7 of the scale apart.
MAP_TOLERANCE = 1e-6


def imported(optimizer: "StateDicts", state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert an optimizer's state dict without ``format_version`` to this package's format.

    State dicts of ``torch.optim`` and of bitsandbytes have no ``format_version``. This package's own state
    dicts lose it in ``torch.distributed.checkpoint``, which stores only the state and the groups. Entries
    that this function cannot read stay as they are; ``load_state_dict`` then raises for them.

    Raises:
        ValueError: the state dict belongs to an optimizer with another update rule, or a tensor has a wrong
            shape.
    """
    where = f"{type(optimizer).__name__}: load_state_dict"
    groups, entries = [], dict(state_dict["state"])
    for ours, theirs in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        lacking = sorted(optimizer.defaults.keys() - theirs.keys() - set(OURS))
        if lacking:
            raise ValueError(
                f"{where}: expected groups of the same rule, received one without {', '.join(lacking)}"
            )
        if theirs.get("amsgrad"):
            raise ValueError(
                f"{where}: amsgrad: expected False, received True; its third moment is not supported"
            )
        if theirs.get("decoupled_weight_decay") is False and theirs["weight_decay"] != 0:
            raise ValueError(
                f"{where}: weight_decay: expected decoupled weight decay, received {theirs['weight_decay']} "
                "as L2 penalty"
            )
        group = {
            name: value for name, value in theirs.items() if name in optimizer.defaults or name not in THEIRS
        }
        group |= {name: ours[name] for name in OURS if name in ours and name not in theirs}
        groups.append(group)
        moments = optimizer._moments(group)
        for key, param in zip(theirs["params"], ours["params"], strict=False):
            if entries.get(key):
                state = optimizer._kind(param, group).state
                entries[key] = _entry(where, moments, entries[key], param, state, optimizer._extra(param))
                if group["weight_rounding"] == "remainder" and param.dtype == torch.bfloat16:
                    entries[key].setdefault("weight_remainder", torch.zeros_like(param, dtype=torch.int16))
    # Keep surplus parameter groups of the state dict. load_state_dict raises an error for them.
    groups += state_dict["param_groups"][len(groups) :]
    return {**state_dict, "state": entries, "param_groups": groups}


def _entry(
    where: str,
    moments: tuple[Moment, ...],
    entry: dict[str, Any],
    param: Tensor,
    state: str,
    beside: dict[str, tuple[int, ...]],
) -> dict[str, Any]:
    """Convert the state of one parameter from torch.optim or bitsandbytes to this package's format."""
    entry = {**entry, **entry.get(NESTED, {})}
    if "state1" in entry:
        names = [f"state{i + 1}" for i in range(len(moments))]
    elif not any(f"{moment.name}_scale" in entry for moment in moments):
        names = [moment.name for moment in moments]
    else:
        return entry  # the parameter's state already has this package's format
    if names == ["momentum_buffer"]:
        # torch.optim.SGD counts no steps. A momentum buffer exists only after a first step, so the count
        # becomes 1.
        entry = {"step": 1, **entry}
    known = {"step", "weight_remainder", NESTED, *beside, *names}
    known |= {f"{kind}{i + 1}" for kind in ("qmap", "absmax") for i in range(len(moments))}
    if "step" not in entry or not known >= entry.keys() >= set(names):
        received: object = sorted(entry.keys() - {NESTED})
        raise ValueError(f"{where}: expected the entries {['step', *names]}, received {received}")

    result: dict[str, Any] = {name: entry[name] for name in ("weight_remainder",) if name in entry}
    for name, shape in beside.items():
        if name in entry:
            result[name] = entry[name].float()
        elif 0 in shape:  # other packages do not save empty tensors, so create the empty tensor
            result[name] = torch.zeros(shape, device=local(param).device)
    result |= {"step": torch.as_tensor(entry["step"], dtype=torch.float32).reshape(())}
    codes: dict[str, tuple[Tensor, Tensor]] = {}
    for i, (moment, name) in enumerate(zip(moments, names, strict=True)):
        value, scale = entry[name], f"absmax{i + 1}"
        if not isinstance(value, Tensor) or value.shape != param.shape:
            shape, received = (
                tuple(param.shape),
                tuple(value.shape) if isinstance(value, Tensor) else repr(value),
            )
            raise ValueError(f"{where}: {name}: expected the parameter's shape, {shape}, received {received}")
        # Keep the DTensor as it is: owned_entries() later takes this process's shard and quantises the shard.
        if is_dtensor(value):
            result[moment.name] = value
            continue
        if value.is_floating_point():
            result |= stored(moment, value.float(), state)
            continue
        for part, size in ((f"qmap{i + 1}", 256), (scale, blocks(param.numel()))):
            if part not in entry or entry[part].shape != (size,):
                received = tuple(entry[part].shape) if part in entry else "none"
                raise ValueError(
                    f"{where}: {part}: expected ({size},) (blocks of 256 elements), received {received}"
                )
        codes[moment.name] = _standard(
            value, entry[f"qmap{i + 1}"].float(), entry[scale].float(), moment.signed
        )
    if "state1" in entry and codes.keys() == {"exp_avg", "exp_avg_sq"}:
        (m, _), (v, v_scale) = codes.values()
        # bitsandbytes rounds small second moments to zero. If the first moment is not zero, the update would
        # explode, so such second moments get the smallest code above zero.
        zero = 127  # the code of the value 0 in the quantisation map of signed values
        codes["exp_avg_sq"] = (torch.where((v == 0) & (m != zero), 1, v).to(torch.uint8), v_scale)
    for moment in moments:
        if moment.name in codes:
            values, scales = codes[moment.name]
            if moment.stored_as(state) == "8bit":
                result[moment.name], result[f"{moment.name}_scale"] = values, scales
            else:
                result |= stored(moment, dequantize_8bit(values, scales, signed=moment.signed), state)
    return result


def stored(moment: Moment, value: Tensor, state: str) -> dict[str, Tensor]:
    """Convert an optimizer moment from fp32 to the format ``state``.

    Return its tensors: the values, or codes and scale.
    """
    state = moment.stored_as(state)
    if state in ("fp32", "bf16"):
        return {moment.name: value.to(torch.float32 if state == "fp32" else torch.bfloat16)}
    codes, scale = (quantize_8bit if state == "8bit" else quantize_state_4bit)(value, signed=moment.signed)
    return {moment.name: codes, f"{moment.name}_scale": scale}


def _plain(moment: Moment, entry: dict[str, Tensor], param: Tensor) -> Tensor:
    """Return one moment from the optimizer state ``entry`` of a parameter, dequantised to fp32."""
    value, scale = entry[moment.name], entry.get(f"{moment.name}_scale")
    if scale is None:
        return value.to(torch.float32, copy=True)
    if value.shape == param.shape and scale.numel() == blocks(param.numel()):
        return dequantize_8bit(value, scale, signed=moment.signed)
    return dequantize_state_4bit(value, scale, signed=moment.signed, numel=param.numel()).view(param.shape)


def _standard(codes: Tensor, values: Tensor, scale: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Convert 8-bit codes of the quantisation map ``values`` to codes of this package's quantisation map.

    If the two maps are equal, the codes are returned unchanged. Otherwise the values are quantised again.
    """
    every = torch.arange(256, dtype=torch.uint8, device=values.device)
    standard = dequantize_8bit(every, torch.ones(1, device=values.device), signed=signed)
    if (values - standard).abs().max() <= MAP_TOLERANCE:
        return codes.contiguous(), scale.contiguous()
    scales = scale.repeat_interleave(STATE_BLOCK)[: codes.numel()].view(codes.shape)
    return quantize_8bit(values[codes.int()] * scales, signed=signed)


def exported(optimizer: "StateDicts") -> dict[str, Any]:
    """Return a state dict for the optimizer of ``torch.optim`` with the same update rule.

    The moments are fp32. Options that only this package has are left out.
    """
    state_dict = optimizer.state_dict()
    params = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    state = {}
    for key in state_dict["state"]:
        param, group = params[key]
        entry, moments = optimizer.state[param], optimizer._moments(group)
        state[key] = {m.name: _plain(m, entry, local(param)) for m in moments}
        if is_dtensor(param):
            state[key] = {
                name: as_dtensor(value, param, tuple(param.shape)) for name, value in state[key].items()
            }
        state[key]["step"] = entry["step"].cpu().clone()
    omitted = ("state_format", "min_quantize_size", "weight_rounding", "seed")
    groups = [{k: v for k, v in group.items() if k not in omitted} for group in state_dict["param_groups"]]
    return {"state": state, "param_groups": groups}
