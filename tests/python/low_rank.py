"""Parameters and gradients for the tests of the low-rank optimizers."""

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

# Shapes of the parameters: wide, tall, a convolution, one side below 8 (the rank), a vector, and an empty
# tensor.
SIZES = [(24, 40), (40, 24), (12, 3, 3, 3), (4, 50), (30,), (0, 8)]
# Indices of the parameters that a low-rank optimizer of rank 8 projects. Parameter 6, a transposed matrix, is
# not in SIZES.
PROJECTED = [0, 1, 2, 6]


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    values = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
    values.append(torch.randn((48, 16), generator=generator).to(dtype).T)
    return [Parameter(v) for v in values]


def gradients(params: list[Parameter], step: int, size: float = 1.0) -> None:
    """Set random gradients. In a matrix, the magnitude of rows decreases from the first to the last."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(step)
    for p in params:
        noise = torch.randn(p.shape, generator=generator)
        if p.dim() > 1:
            noise = noise * torch.linspace(2, 0.2, len(p)).view(-1, *[1] * (p.dim() - 1))
        p.grad = (noise * size).to(p.dtype)


def train(optimizer: Optimizer, params: list[Parameter], steps: range) -> None:
    for step in steps:
        gradients(params, step)
        optimizer.step()


def same(a: list[Parameter], b: list[Parameter]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


class Adam64:
    """Compute AdamW's update in fp64 for a learning rate of 1, without weight decay."""

    def __init__(self, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self.betas, self.eps, self.step = betas, eps, 0
        self.m = self.v = 0.0

    def __call__(self, grad: Tensor) -> Tensor:
        self.step += 1
        (b1, b2), g = self.betas, grad.double()
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        return -self.m / (1 - b1**self.step) / ((self.v / (1 - b2**self.step)).sqrt() + self.eps)
