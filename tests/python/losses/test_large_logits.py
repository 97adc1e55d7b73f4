"""Test losses of logits that are large and close to each other: a loss is small compared with its logits.

The right values are those of PyTorch, which subtracts the largest logit of a row first.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from relative_error import relative_error
from shoestring import ops

pytestmark = [pytest.mark.device]
SHIFTS = [-1e4, 1e6, -1e9]
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "smooth": {"label_smoothing": 0.2}}
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def check(ours: Tensor, own: list[Tensor], eager: Tensor, leaves: list[Tensor], tolerance: float) -> None:
    upstream = torch.rand(ours.shape)
    assert relative_error(ours, eager) < (1e-14 if ours.dtype == torch.float64 else 2e-6)
    gradients = torch.autograd.grad((ours * upstream.to(ours.dtype)).sum(), own)
    expected = torch.autograd.grad((eager * upstream.to(eager.dtype)).sum(), leaves)
    for gradient, other in zip(gradients, expected, strict=True):
        assert relative_error(gradient, other) < tolerance


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy(dtype: torch.dtype, shift: float, option: str, capability: str) -> None:
    logits = (torch.randn(9, 70) * 3 + shift).to(dtype).requires_grad_()
    wide = logits.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    target = torch.randint(70, (9,))
    ours = ops.cross_entropy(logits, target, reduction="none", **OPTIONS[option])
    eager = torch.nn.functional.cross_entropy(wide, target, reduction="none", **OPTIONS[option])
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float64: 1e-14}[dtype]
    check(ours, [logits], eager, [wide], tolerance)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_cross_entropy(dtype: torch.dtype, shift: float, option: str, capability: str) -> None:
    """The bias shifts all logits, so that their values in fp32 do not depend on the order of the product's sums.

    70 tokens and 64 features are served by the kernels for AMX, if the CPU has it.
    """
    hidden, weight = torch.randint(-2, 3, (70, 64)).to(dtype), torch.randint(-2, 3, (90, 64)).to(dtype) / 4
    # Multiples of 1/4 below 2^22 are exact in fp32, and the others are rounded once.
    own = [hidden, weight, torch.full((90,), shift, dtype=dtype)]
    leaves = [t.to(torch.promote_types(dtype, torch.float32)) for t in own]
    own, leaves = ([t.requires_grad_() for t in list_of] for list_of in (own, leaves))
    target = torch.randint(90, (70,))
    ours = ops.linear_cross_entropy(*own[:2], target, own[2], reduction="none", **OPTIONS[option])
    logits = torch.nn.functional.linear(*leaves)
    eager = torch.nn.functional.cross_entropy(logits, target, reduction="none", **OPTIONS[option])
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float64: 1e-14}[dtype]
    check(ours, own, eager, leaves, tolerance)
