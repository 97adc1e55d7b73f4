"""Time the blocks of a Llama with Mixture of Depths in every second block, forward and with backward.

The row "dense" has the same blocks without it, and the row "half" the half of them that compute all tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import shoestring
from benchmarks.common import Candidates, Report, arguments, interleave

CAPACITY = 0.125


@dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    tokens: int
    features: int
    hidden: int
    heads: int
    layers: int


SHAPES = [
    Shape("512 features", 2, 1024, 512, 1408, 8, 4),
    Shape("1024 features", 1, 2048, 1024, 2816, 16, 2),
]
QUICK = [Shape("quick", 2, 32, 64, 96, 4, 2)]


def blocks_of(shape: Shape) -> tuple[nn.ModuleList, LlamaRotaryEmbedding]:
    config = LlamaConfig(
        hidden_size=shape.features,
        intermediate_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
    )
    config._attn_implementation = shoestring.register_attention()
    blocks = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(shape.layers))
    return blocks, LlamaRotaryEmbedding(config)


def candidates_of(shape: Shape, dtype: torch.dtype, device: str, backward: bool) -> Candidates:
    dense, rotary = blocks_of(shape)
    dense = dense.to(device, dtype)
    x, grad = (
        torch.randn(shape.batch, shape.tokens, shape.features, device=device).to(dtype) for _ in range(2)
    )
    x.requires_grad_(backward)
    positions = torch.arange(shape.tokens, device=device).unsqueeze(0)
    tables = rotary.to(device)(x, positions)
    mixed = copy.deepcopy(dense)
    for i in range(1, shape.layers, 2):
        mixed[i] = shoestring.nn.MixtureOfDepths(mixed[i], shape.features, CAPACITY, choice="top_k")

    def step(blocks: nn.ModuleList | nn.Module) -> object:
        with torch.set_grad_enabled(backward):
            y, loss = x, torch.zeros((), device=device)
            for block in blocks:  # type: ignore[union-attr]
                y = block(y, position_ids=positions, position_embeddings=tables)
                if isinstance(block, shoestring.nn.MixtureOfDepths) and block.route is not None:
                    loss = loss + block.route.loss
        if not backward:
            return y
        parameters = [x, *blocks.parameters()]
        terms: list[Tensor] = [y, loss] if loss.requires_grad else [y]
        return torch.autograd.grad(terms, parameters, [grad, torch.ones_like(loss)][: len(terms)])

    runs: dict[str, Callable[[], object]] = {
        "every second block 12.5 %": lambda: step(mixed),
        "dense": lambda: step(dense),
        "half of the dense blocks": lambda: step(nn.ModuleList(dense[::2])),
    }
    return runs


def main() -> None:
    options = arguments(__doc__.splitlines()[0], devices=("cpu", "cuda"))
    report = Report("mixture of depths", options)
    for shape in QUICK if options.quick else SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for backward in (False, True):
                runs = candidates_of(shape, dtype, options.device, backward)
                what = "forward + backward" if backward else "forward"
                report.table(
                    f"{shape.name}, {shape.batch} x {shape.tokens} tokens, {shape.layers} blocks, {str(dtype)[6:]}, {what}",
                    interleave(runs, options.repeats, options.device),
                    shape.batch * shape.tokens,
                    "tokens/s",
                )
    report.finish()


if __name__ == "__main__":
    main()
