"""Draws of frozen weights, dense or quantised, and the reference of the linear operators that multiply with them."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

import shoestring
from operator_cases import Arguments, Draw, product_dtype, uniform, wide_dtype
from references.adapters import lora_linear_reference

# Numbers of out_features by numbers of in_features.
OUTPUTS = {5: 7, 64: 32, 77: 37, 100: 70, 192: 37, 2048: 300, 4096: 300}


def outputs(features: int) -> int:
    return OUTPUTS.get(features, features // 2 + 3)


def blocks(features: int, block_size: int = 64) -> int:
    return math.ceil(outputs(features) * features / block_size)


def codes(*shape: int, low: int = 0, high: int = 256, dtype: torch.dtype = torch.uint8) -> Draw:
    def values(s: tuple[int, ...], g: torch.Generator) -> Tensor:
        return torch.randint(low, high, s, generator=g, dtype=dtype, device="cpu")

    return Draw(shape, values, gradient=False)


def scales(count: int) -> Draw:
    return uniform(count, low=0.01, dtype=torch.float32, gradient=False)


def scales_and_offsets(tokens: int, features: int) -> Draw:
    """Draw the scales of int4: a bf16 scale in the lower half of a number, and a bf16 offset in its upper half."""

    def values(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
        halves = torch.rand((*shape, 2), generator=g, device="cpu").bfloat16()
        return halves.view(torch.int32).squeeze(-1)

    return Draw((blocks(features),), values)


# The options of a quantised weight of each kind: quant_type, block_size, the codes, and their scales.
INT8: Arguments = {
    "quant_type": "int8",
    "block_size": lambda tokens, features: features,
    "weight": lambda tokens, features: codes(
        outputs(features), features, low=-127, high=128, dtype=torch.int8
    ),
    "absmax": lambda tokens, features: scales(outputs(features)),
}
INT4: Arguments = {
    "quant_type": "int4",
    "weight": lambda tokens, features: codes(blocks(features, 2)),
    "absmax": scales_and_offsets,
}
NF4 = INT4 | {"quant_type": "nf4", "absmax": lambda tokens, features: scales(blocks(features))}
NESTED = NF4 | {
    "absmax": lambda tokens, features: codes(blocks(features)),
    "nested": lambda tokens, features: scales(257 + math.ceil(blocks(features) / 256)),
}
FP4 = INT4 | {
    "quant_type": "fp4",
    "block_size": 32,
    "absmax": lambda tokens, features: scales(blocks(features, 32)),
}


def with_weight(
    x: Tensor,
    weight: Tensor,
    absmax: Tensor | None = None,
    nested: Tensor | None = None,
    quant_type: str = "nf4",
    block_size: int = 64,
    **others: Any,
) -> Arguments:
    """Return the arguments of a function of Python for those of a schema: the weight is one tensor."""
    if absmax is not None:
        weight = shoestring.QuantizedTensor(
            weight,
            absmax.float()
            if absmax.is_floating_point()
            else absmax,  # the reference in fp64 gets fp64 scales
            None if nested is None else nested.float(),
            shape=(outputs(x.size(-1)), x.size(-1)),
            dtype=torch.float32,
            quant_type=quant_type,
            block_size=block_size,
        )
    return {"x": x, "weight": weight, **others}


def reference(
    gate: Tensor | None = None, gain: Tensor | None = None, bias: Tensor | None = None, **given: Any
) -> Tensor:
    """Compute ``lora_linear`` with products in the dtype of the kernels.

    The kernels round their input silu(gate) * x to the dtype of x, and compute the gradient of the gain from the
    rounded result.
    """
    given = with_weight(**given)
    x = given.pop("x")
    dtype, wide = product_dtype(x.dtype), wide_dtype(x.dtype)
    adapter = {
        name: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
        for name, t in given.items()
        if name != "weight"
    }
    rounded = x if gate is None else (silu(gate.to(wide)) * x.to(wide)).to(x.dtype)
    y = lora_linear_reference(rounded.to(dtype), given["weight"], **adapter)
    added = 0 if bias is None else bias.to(dtype)
    if gain is None:
        return (y + added).to(x.dtype)
    fixed = gain.detach().to(dtype)
    y = fixed * y + added
    by_gain = (y.detach().to(x.dtype).to(dtype) - added) / fixed
    return (y + (gain.to(dtype) - fixed) * by_gain).to(x.dtype)
