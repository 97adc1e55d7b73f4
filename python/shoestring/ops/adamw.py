"""AdamW over flat arenas of state, and the 8-bit codes that the state may be kept in."""

from collections.abc import Sequence

import torch
from torch import Tensor

STATE_BLOCK = 256  # elements that share a scale; each parameter's state begins at a multiple of it


def quantize_8bit(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Block-wise 8-bit codes of x: nearest in a dynamic map to ``x / scale``, scale being a block's largest magnitude.

    The codes are those of bitsandbytes (block size 256), but that a positive number never becomes zero in the unsigned
    map: a second moment of zero would make its update infinite.

    Args:
        x: any shape, fp32; not negative for ``signed=False``.
        signed: the map for first moments; otherwise that for second moments.

    Returns:
        codes (x's shape, uint8) and scale (ceil(elements / 256), fp32; blocks run over the elements in their order).

    Raises:
        RuntimeError: x is not fp32.

    The map is that of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861).
    """
    return torch.ops.shoestring.quantize_8bit(x, signed=signed)


def dequantize_8bit(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """The fp32 values of ``quantize_8bit``'s codes (any shape, uint8) and scale: within 1e-6 of bitsandbytes'.

    Raises:
        RuntimeError: a dtype or shape that does not fit.
    """
    return torch.ops.shoestring.dequantize_8bit(codes, scale, signed=signed)


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor | None,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    clip_coef: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One step of AdamW, in place, on every parameter that has a gradient, in one pass over all of them.

    The state of all parameters lies in flat arenas, in the order of ``params``, each beginning at a multiple of 256
    elements. ``shoestring.optim.AdamW`` manages them. The update uses the new moments before they are quantised. A NaN
    or infinite gradient spoils its weight as in PyTorch, and with 8-bit state its block of 256, but no other.

    Args:
        params: fp32, bf16 or fp16, any shapes and sizes; arithmetic is fp32, rounding to nearest.
        grads: one for each parameter, its shape and dtype, or None: the parameter and its step stay as they are.
        step: (parameters), fp32: steps taken; incremented.
        exp_avg, exp_avg_sq: (elements of the arena): uint8 codes, or fp32.
        exp_avg_scale, exp_avg_sq_scale: (elements of the arena / 256), fp32; None for fp32 state.
        lr, beta1, beta2, eps, weight_decay: as in ``torch.optim.AdamW``; decay comes before the update.
        maximize: ascend instead.
        lr_tensor: in place of lr; its sign is not checked. This and what follows are one fp32 element each, on the
            parameters' device: a GPU reads them itself, so the host does not wait, and a CUDA graph replays the step.
        grad_scale: gradients are divided by it.
        clip_coef: gradients are multiplied by it.
        found_inf: where it is not zero, nothing changes.

    Raises:
        RuntimeError: a shape, dtype, device or option that does not fit; nothing has changed then.

    With 8-bit state on a GPU an update takes its root and its reciprocal from hardware instructions, which are wrong by
    a unit or two in the last place, and eps is at least 1.1e-19.
    """
    torch.ops.shoestring.adamw_(
        params,
        grads,
        step,
        exp_avg,
        exp_avg_scale,
        exp_avg_sq,
        exp_avg_sq_scale,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        maximize=maximize,
        lr_tensor=lr_tensor,
        grad_scale=grad_scale,
        clip_coef=clip_coef,
        found_inf=found_inf,
    )


def dynamic_map(signed: bool) -> Tensor:
    """The 256 values of the codes, ascending, fp32: per decade equally spaced means, and zero, and 1.0."""
    values = [0.0, 1.0]
    for decade in range(7):
        bins = 2**decade if signed else 2 ** (decade + 1)
        scale = 1 / 10 ** (6 - decade)
        slope = torch.tensor(scale * 0.9 / bins).double().item()  # constants are fp32, as in the kernels
        offset = torch.tensor(scale * (0.1 + 0.45 / bins) - slope * bins).double().item()
        magnitudes = [offset + slope * (bins + j) for j in range(bins)]
        values += magnitudes + ([-m for m in magnitudes] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float64).float()


def quantize_8bit_reference(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch, by searching the map."""
    values = dynamic_map(signed)
    middles = (values[1:] + values[:-1]) / 2
    blocks = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % STATE_BLOCK)).view(-1, STATE_BLOCK)
    scale = blocks.abs().amax(1)
    # A power of two keeps the reciprocal of a tiny scale finite, and changes no code.
    tiny = torch.where(scale < 2.0**-100, 2.0**100, 1.0)
    inverse = torch.where(scale > 0, 1 / (scale * tiny), 0)
    scaled = blocks * tiny[:, None] * inverse[:, None]
    codes = torch.searchsorted(middles, scaled)
    if signed:  # of two equally near codes the one nearer to zero
        codes = torch.where(scaled < 0, torch.searchsorted(middles, scaled, right=True), codes)
    else:
        codes = torch.where(blocks == 0, 0, codes.clamp(min=1))
    return codes.to(torch.uint8).flatten()[: x.numel()].view(x.shape), scale


def dequantize_8bit_reference(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """The same in plain PyTorch, by looking the codes up."""
    values = dynamic_map(signed)[codes.int()].flatten()
    return (values * scale.repeat_interleave(STATE_BLOCK)[: codes.numel()]).view(codes.shape)


def adamw_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor | None,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    clip_coef: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """``adamw_`` in plain PyTorch, a tensor at a time."""
    if found_inf is not None and found_inf.item() != 0:
        return
    lr = lr if lr_tensor is None else lr_tensor.item()
    factor = 1.0 if clip_coef is None else clip_coef.item()
    factor = factor if grad_scale is None else factor / grad_scale.item()
    begin = 0
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        where = slice(begin, begin + param.numel())
        blocks = slice(begin // STATE_BLOCK, -(-where.stop // STATE_BLOCK))
        begin = blocks.stop * STATE_BLOCK
        if grad is None:
            continue
        if exp_avg_scale is None or exp_avg_sq_scale is None:
            m, v = exp_avg[where], exp_avg_sq[where]
        else:
            m = dequantize_8bit_reference(exp_avg[where], exp_avg_scale[blocks], signed=True)
            v = dequantize_8bit_reference(exp_avg_sq[where], exp_avg_sq_scale[blocks], signed=False)

        step[i] += 1
        g = (-grad if maximize else grad).float().flatten() * factor
        m = m + (g - m) * (1 - beta1)
        v = v * beta2 + g * g * (1 - beta2)
        bias1, bias2 = 1 - beta1 ** step[i].item(), 1 - beta2 ** step[i].item()
        p = param.float().flatten() * (1 - lr * weight_decay)
        p = p - lr / bias1 * (m / (v.sqrt() / bias2**0.5 + eps))
        param.copy_(p.view(param.shape))

        if exp_avg_scale is None or exp_avg_sq_scale is None:
            exp_avg[where], exp_avg_sq[where] = m, v
        else:
            exp_avg[where], exp_avg_scale[blocks] = quantize_8bit_reference(m, signed=True)
            exp_avg_sq[where], exp_avg_sq_scale[blocks] = quantize_8bit_reference(v, signed=False)
