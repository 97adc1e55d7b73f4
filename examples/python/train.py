"""Train a small language model with a plain PyTorch loop. Two marked lines use shoestring.

    python examples/python/train.py --device auto --steps 100

The data are sequences that count upwards, so the script needs no files.
"""

from __future__ import annotations

import torch
from common import VOCAB, parser, sequences
from torch import Tensor, nn

import shoestring


class Model(nn.Module):
    """A causal transformer. It returns hidden states; the loss applies the output layer ``head``."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(VOCAB, width)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden: Tensor = self.layers(self.embedding(tokens), mask=mask, is_causal=True)
        return hidden


def main(arguments: list[str] | None = None) -> list[float]:
    """Train the model, and return the printed losses."""
    options = parser("Trains a small language model with a plain PyTorch loop.", steps=100).parse_args(
        arguments
    )
    torch.manual_seed(0)
    model = Model().to(options.device)
    # Changed: 8-bit state. Before: torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = shoestring.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(options.steps):
        tokens = sequences(rows=16, length=33).to(options.device)
        hidden, target = model(tokens[:, :-1]), tokens[:, 1:]
        # Changed: no logits in memory. Before: F.cross_entropy(model.head(hidden).flatten(0, 1), target.flatten())
        loss = shoestring.linear_cross_entropy(hidden, model.head.weight, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == options.steps - 1:  # reading a loss waits for the device
            losses.append(loss.item())
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
