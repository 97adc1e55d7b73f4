"""8-bit floats are refused: their elements are smaller than those that any kernel reads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shoestring
from shoestring import ops

pytestmark = pytest.mark.device

FLOAT8 = [getattr(torch, name) for name in sorted(dir(torch)) if name.startswith("float8_")]


# Calls by operator, and by the argument that has 8 bits. x has 8 bits, w is fp32, and both are (8, 64).
CALLS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "swiglu_backward": lambda x, w: torch.ops.shoestring._swiglu_backward(x, x, x),
    "swiglu_backward grad": lambda x, w: torch.ops.shoestring._swiglu_backward(x, w, w),
    "geglu_backward": lambda x, w: torch.ops.shoestring._geglu_backward(x, x, x, "none"),
    "gelu_backward": lambda x, w: torch.ops.shoestring._gelu_backward(x, x, "none"),
    "quantize_4bit": lambda x, w: ops.quantize_4bit(x),
    "quantize_int8": lambda x, w: ops.quantize_int8(x),
    "quantize_8bit": lambda x, w: ops.quantize_8bit(x.flatten(), signed=True),
    "foreach_norm": lambda x, w: ops.foreach_norm([x]),
    "AdamW": lambda x, w: shoestring.optim.AdamW([x.requires_grad_()]),
}


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_eight_bits_are_refused(backend: str, call: str, dtype: torch.dtype) -> None:
    """Each operator raises an error that states the dtype, before it reads or writes an element."""
    x = torch.ones(8, 64).to(dtype)
    with pytest.raises((RuntimeError, ValueError, TypeError, NotImplementedError), match="(?i)float8"):
        CALLS[call](x, torch.ones(8, 64))


@pytest.mark.parametrize("op", ["swiglu", "geglu"])
def test_a_gradient_of_another_shape_is_refused(backend: str, op: str) -> None:
    rest = ("none",) if op == "geglu" else ()
    x = torch.ones(8, 64)
    with pytest.raises(
        RuntimeError, match=f"{op}_backward: grad: expected the shape, dtype and device of up"
    ):
        getattr(torch.ops.shoestring, f"_{op}_backward")(x[:4], x, x, *rest)
