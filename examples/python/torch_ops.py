"""Call ``torch.ops.shoestring`` in a model under ``torch.compile``, as one graph.

    python examples/python/torch_ops.py --device auto --steps 100
    python examples/python/torch_ops.py --backend aot_eager    # traces, but generates no code

The operators need no Python wrapper: ``import shoestring`` registers them with their gradients, and
``torch.compile`` traces them by their implementations for the dispatch key Meta.
"""

from __future__ import annotations

import torch
from common import VOCAB, parser, sequences
from torch import Tensor, nn

import shoestring

ops = torch.ops.shoestring


class Model(nn.Module):
    """Predict the next token from the token before it, with a gated MLP."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.norm = nn.Parameter(torch.ones(width))
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of all tokens (rows, length) but the first of each row."""
        hidden = ops.rms_norm(self.embedding(tokens[:, :-1]), self.norm, eps=1e-6)
        hidden = self.down(ops.swiglu(self.gate(hidden), self.up(hidden)))
        loss: Tensor = ops.linear_cross_entropy(hidden, self.head.weight, tokens[:, 1:])
        return loss


def main(arguments: list[str] | None = None) -> list[float]:
    """Train the model, and return the printed losses."""
    parse = parser("Calls torch.ops.shoestring under torch.compile.", steps=100)
    parse.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    options = parse.parse_args(arguments)
    torch.manual_seed(0)
    model = Model().to(options.device)
    compiled = torch.compile(model, fullgraph=True, backend=options.backend)
    optimizer = shoestring.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(options.steps):
        loss = compiled(sequences(rows=16, length=33).to(options.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == options.steps - 1:  # reading a loss waits for the device
            losses.append(loss.item())
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
