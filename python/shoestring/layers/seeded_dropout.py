"""Dropout whose mask nobody keeps."""

import torch
from torch import Tensor


def draw_seed(like: Tensor) -> Tensor:
    """One int64 on like's device, from that device's generator: recomputing a checkpoint draws the same one again."""
    return torch.randint(torch.iinfo(torch.int64).max, (1,), device=like.device)


def seeded_dropout(x: Tensor, p: float = 0.5, *, seed: Tensor | None = None) -> Tensor:
    """``F.dropout`` without a mask in memory: it is a function of the seed and an element's place, made again in backward.

    Args:
        x: any shape; fp32, fp64, bf16 or fp16.
        p: probability that an element becomes 0, rounded to a multiple of 2^-16; the others are divided by 1 - p.
        seed: one int64 on x's device; None draws one, from the device's generator.

    Returns:
        x's shape and dtype; the same for the same seed on every device. Differentiable.

    Raises:
        RuntimeError: p outside [0, 1), or a seed of another dtype or device.

    The numbers are Philox 4x32 (Salmon et al., SC 2011), with 7 rounds.
    """
    result: Tensor = torch.ops.shoestring.seeded_dropout(x, draw_seed(x) if seed is None else seed, p)
    return result


def seeded_dropout_reference(x: Tensor, seed: Tensor, p: float = 0.5) -> Tensor:
    """The same with a mask from plain integer arithmetic."""
    counters = torch.arange((x.numel() + 7) // 8, dtype=torch.int64)
    low, number = 0xFFFFFFFF, int(seed)
    words = [counters & low, counters >> 32, torch.zeros_like(counters), torch.zeros_like(counters)]
    key = [number & low, number >> 32 & low]
    for _ in range(7):
        # 64-bit products wrap around in int64; what is above them is masked.
        a, b = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [b >> 32 & low ^ words[1] ^ key[0], b & low, a >> 32 & low ^ words[3] ^ key[1], a & low]
        key = [key[0] + 0x9E3779B9 & low, key[1] + 0xBB67AE85 & low]
    drawn = torch.stack([half for w in words for half in (w & 0xFFFF, w >> 16)], dim=1).flatten()[: x.numel()]
    threshold = min(round(p * 65536), 65535)
    kept = (drawn >= threshold).to(x.device).view(x.shape)
    return torch.where(kept, x * (65536 / (65536 - threshold)), 0).to(x.dtype)
