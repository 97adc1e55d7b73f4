"""Models that tests of several processes split."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import shoestring


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model with blocks, of which two shards are whole state blocks of 256 elements."""
    torch.manual_seed(7)
    blocks = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2)))
    return nn.Sequential(
        nn.Linear(256, 256, bias=False), nn.Tanh(), blocks, nn.Linear(256, 8, bias=False)
    ).to(dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def blocks(kind: dict[str, Any], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return two blocks with adapters of rank 4; ``kind`` says how their weights are quantised."""
    torch.manual_seed(5)
    return shoestring.lora.apply(nn.Sequential(Block(), Block()).to(dtype), rank=4, **kind)


def adapted(quantize: str | None) -> nn.Module:
    """Return a model of blocks in bf16, or in few bits, with adapters in fp32."""
    if quantize is None:
        return nn.Sequential(blocks({}, torch.bfloat16))
    return nn.Sequential(blocks({"quantize": quantize}))
