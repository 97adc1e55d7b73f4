"""A model of 925 weights and biases, and its training data."""

import torch
from torch import Tensor
from torch.nn import Module


def model() -> Module:
    generator = torch.Generator().manual_seed(7)
    found = torch.nn.Sequential(torch.nn.Linear(40, 20), torch.nn.Tanh(), torch.nn.Linear(20, 5))
    for p in found.parameters():
        torch.nn.init.normal_(p, std=0.1, generator=generator)
    return found


def batch(step: int) -> Tensor:
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(step))


def loss_of(net: Module, step: int) -> Tensor:
    return net(batch(step)).square().mean()


def assert_equal(a: Module, b: Module, **tolerance: float) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, **(tolerance or dict(rtol=0, atol=0)))
