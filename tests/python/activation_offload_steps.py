"""Helpers for the tests of offload_activations: a small model, its gradients, offload of small tensors."""

import contextlib

import torch
from torch import Tensor, nn

from shoestring.checkpoint import offload_activations


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
            nn.LayerNorm(width),
        )
        self.register_buffer("gain", torch.rand(width))
        # Saturated tanh units would have gradients that depend on the last bits of their saved outputs.
        self.frozen = nn.Parameter(torch.randn(width, width) / width**0.5, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu_(self.up(self.norm(x))))
        y = torch.nn.functional.dropout(y, 0.2) * self.gain + (x @ self.frozen).tanh()
        return x + y


def model(depth: int = 5, width: int = 48) -> nn.Sequential:
    return nn.Sequential(*(Block(width) for _ in range(depth)))


def gradients(net: nn.Module, x: Tensor, context: contextlib.AbstractContextManager) -> list[Tensor]:
    torch.manual_seed(5)
    wanted = [x, *(p for p in net.parameters() if p.requires_grad)]
    with context:
        loss = net(x).square().mean()
    grads = list(torch.autograd.grad(loss, wanted))
    if x.is_cuda:  # copies to and from the device may go on, and keep their host memory until they have ended
        torch.cuda.synchronize()
    return grads


def offload(device: str, **options: object) -> offload_activations:
    # offload_activations leaves tensors below min_bytes on the device. With min_bytes=64, it offloads the
    # small tensors of these tests.
    return offload_activations(**{"device": device, "min_bytes": 64, **options})


def assert_same(received: list[Tensor], expected: list[Tensor]) -> None:
    assert len(received) == len(expected)
    for a, b in zip(received, expected, strict=True):
        assert torch.equal(a, b)
