"""Draws of arguments and lists of options that the cases of several losses share."""

import torch
from torch import Tensor
from torch.nn import functional as F

from operator_cases import Arguments, Draw


def targets(tokens: int, classes: int) -> Draw:
    """Draw classes for two sequences of tokens, of which a fifth is -100.

    The first two tokens of the first sequence have the last class, so that a token with a class weight counts also if
    the option ``shift`` is set.
    """

    def values(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
        drawn = torch.randint(classes, shape, generator=g, device="cpu")
        drawn[torch.rand(shape, generator=g, device="cpu") < 0.2] = -100
        drawn[0, :2] = classes - 1
        return drawn

    return Draw((2, tokens), values)


def eighths(shape: tuple[int, ...], g: torch.Generator, most: int) -> Tensor:
    """Draw numbers of which fp32 represents the products and sums, since weights are multiplied in their own dtype."""
    return torch.randint(1, most + 1, shape, generator=g, device="cpu") / 8


def class_weights(tokens: int, classes: int) -> Draw:
    """Draw a weight for each class: 0 for some classes, but not for the last one."""

    def values(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
        drawn = eighths(shape, g, 8)
        drawn[:: max(2, classes // 5)] = 0
        drawn[-1] = 3
        return drawn

    return Draw((classes,), values, torch.float32, gradient=False)


def token_weights(tokens: int, classes: int) -> Draw:
    def values(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
        drawn = eighths(shape, g, 16)
        drawn[-1, -1] = 0
        return drawn

    return Draw((2, tokens), values, torch.float32, gradient=False)


def parts(tokens: int, classes: int) -> Draw:
    """Draw the part of the first target for each token. It is 0 and 1 for some tokens."""

    def values(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
        drawn = eighths(shape, g, 7)
        drawn[1, 0], drawn[1, -1] = 0, 1
        return drawn

    return Draw((2, tokens), values, torch.float32, gradient=False)


def one_part(tokens: int, classes: int) -> Draw:
    return Draw((), lambda shape, g: torch.full(shape, 0.3, device="cpu"), torch.float64, gradient=False)


TWO_TARGETS: Arguments = {"target2": targets, "mix": parts}
# The logits reach +-5, so a softcap of 2 matters. A negative logit scale reverses the order of the classes. The
# log-sum-exp is about log(classes), so the z-loss terms matter.
OPTIONS: list[Arguments] = [
    {},
    {"shift": True, "token_weights": token_weights, "class_weights": class_weights, "z_loss": 0.1}
    | {"label_smoothing": 0.1, "softcap": 2.0, "reduction": "none"},
    {"reduction": "sum"},
    {"reduction": "none", "z_loss": 1e-3},
    {"label_smoothing": 0.1},
    {"z_loss": 0.5},
    {"softcap": 3.0, "logit_scale": -1.7},
    {"class_weights": class_weights},
    {"class_weights": class_weights, "label_smoothing": 0.3, "z_loss": 0.1, "logit_scale": 0.25},
    {"token_weights": token_weights},
    {"token_weights": token_weights, "class_weights": class_weights, "reduction": "sum"},
    {"token_weights": token_weights, "reduction": "none", "softcap": 2.0, "label_smoothing": 0.1},
    {"target2": targets, "mix": one_part, "label_smoothing": 0.1, "z_loss": 0.1},
    TWO_TARGETS | {"class_weights": class_weights, "z_loss": 0.5, "token_weights": token_weights},
    TWO_TARGETS | {"reduction": "none", "softcap": 2.0, "logit_scale": -1.7},
    {"shift": True, "token_weights": token_weights},
    TWO_TARGETS | {"shift": True, "hard_fraction": 0.5},
    {"hard_fraction": 0.3},
    {"hard_fraction": 0.5, "token_weights": token_weights, "reduction": "none"},
]


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor, rounded: bool) -> Tensor:
    """Compute the logits of 16-bit tensors in fp32.

    If ``rounded`` is set, their gradient is rounded to the dtype of ``hidden``, as by products in that dtype.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = F.linear(*(t.to(wide) for t in (hidden, weight, bias)))
    if rounded:
        logits.register_hook(lambda gradient: gradient.to(hidden.dtype).to(wide))
    return logits
