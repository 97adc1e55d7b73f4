"""Operators give the same bits on any number of threads, and wake threads only if that pays."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shoestring
from thread_counts import assert_same_bits

WIDTH = 256
COUNTS = (1, 2, 3, 7, 16, 64)


def adamw(x: Tensor) -> Tensor:
    parameter = torch.nn.Parameter(x.clone())
    parameter.grad = x.cos()
    shoestring.optim.AdamW([parameter], lr=1e-2).step()
    return parameter.detach()


def product(x: Tensor, columns: int) -> Tensor:
    out = torch.empty(len(x), columns)
    torch.ops.shoestring.addmm_(out, x, x[:WIDTH].repeat(math.ceil(columns / WIDTH), 1)[:columns].t(), beta=0)
    return out


OPERATORS: dict[str, Callable[[Tensor], Tensor | list[Tensor]]] = {
    "quantize_4bit": lambda x: shoestring.quantize_4bit(x).dequantize(),
    "quantize_int8": lambda x: shoestring.quantize_int8(x).dequantize(),
    "quantized_linear": lambda x: shoestring.quantized_linear(x[:3], shoestring.quantize_4bit(x)),
    "foreach_norm": lambda x: torch.ops.shoestring.foreach_norm([x, x[1:]]),
    "addmm_": lambda x: product(x, 256),
    "addmm_, few columns": lambda x: product(x, 32),
    "AdamW": adamw,
}


@pytest.mark.parametrize("rows", [256, 4096])
@pytest.mark.parametrize("name", OPERATORS)
def test_bits_do_not_depend_on_the_number_of_threads(name: str, rows: int) -> None:
    """A small input stays on one thread, a large one is divided among up to 64."""
    x = torch.randn(rows, WIDTH)

    def run() -> list[Tensor]:
        found = OPERATORS[name](x)
        return found if isinstance(found, list) else [found]

    assert_same_bits(run, COUNTS)
