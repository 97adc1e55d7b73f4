"""Attention cases of emulator_cases.py, which compares the emulator with the GPU.

They call only shoestring's own attention kernels, because the emulator has no cuBLAS or cuDNN.
"""

import torch
from torch import Tensor

import shoestring


def attention(device: str) -> dict[str, tuple[Tensor, float]]:
    """Compute attention with whole and partial tiles, with all options at once, and with packed sequences.

    Returns:
        (tensor, tolerance) by name; emulator_cases.py explains the unit of the tolerance.
    """

    def uniform(*shape: int, seed: int) -> Tensor:
        return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1).to(device)

    found: dict[str, tuple[Tensor, float]] = {}
    everything = {
        "bias": uniform(1, 2, 70, 90, seed=4),
        "sinks": uniform(2, seed=5),
        "alibi_slopes": uniform(2, seed=6).abs(),
        "softcap": 5.0,
        "dropout_p": 0.2,
        "seed": torch.tensor([3], device=device),
    }
    starts = torch.tensor([0, 5, 5, 70], dtype=torch.int32, device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for name, dim, options in (
            ("plain", 64, {}),
            ("causal", 128, {"causal": True}),
            ("window", 96, {"window_size": (9, 3)}),
            ("capped", 64, {"softcap": 4.0, "causal": True}),
            ("everything", 40, everything),
            ("packed", 64, {"cu_seqlens_q": starts, "causal": True}),
        ):
            leaves = [
                uniform(1, h, n, dim, seed=s).to(dtype) for s, h, n in ((1, 2, 70), (2, 1, 90), (3, 1, 90))
            ]
            if name == "packed":
                leaves = [t[0, :, :70].transpose(0, 1).contiguous() for t in leaves]
            leaves = [t.requires_grad_() for t in leaves]
            out, lse = shoestring.attention(*leaves, **options, deterministic=True, return_lse=True)
            gradients = torch.autograd.grad(
                (out.float() * uniform(*out.shape, seed=7)).sum() + lse.sum(), leaves
            )
            # The exponentials and the order of sums differ between the emulator and the GPU in the last bits.
            # A probability may then be rounded to the neighbouring value.
            for part, t in zip(
                ("out", "lse", "q", "k", "v"), (out.detach(), lse.detach(), *gradients), strict=True
            ):
                allowed = 64.0 if dtype == torch.float32 or part == "lse" else 4.0
                found[f"{name} {str(dtype)[6:]} {part}"] = (t, allowed)
    return found
