"""Compare a patched model with the plain one."""

import copy
from typing import Any

import torch
from torch import Tensor

UNITS = 16  # roundings of fp32 that a gradient may differ by, besides the error of the plain model


def results(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return a model's loss, under the name "", and its gradients by the names of their parameters."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return {"": loss.detach().double(), **found}


def assert_same(model: Any, plain: Any, inputs: dict[str, Any]) -> None:
    """Assert that the loss and the gradients of a patched fp32 model equal those of the plain one.

    The plain model in fp64 shows how large its error in fp32 is. Both models have such an error, so they may
    differ by three times as much, and by a few roundings, since the error of a short gradient may happen to be
    small. Gradients that almost cancel out, such as that of a bias of the keys, have errors like the largest
    gradients.
    """
    wide = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    double = copy.deepcopy(plain).double()
    if hasattr(double, "set_experts_implementation"):
        double.set_experts_implementation("eager")  # the grouped product of PyTorch has no fp64
    ours, theirs, exact = results(model, inputs), results(plain, inputs), results(double, wide)
    assert ours.keys() == theirs.keys() == exact.keys()
    rounding = UNITS * torch.finfo(torch.float32).eps
    largest = max(gradient.norm() for name, gradient in exact.items() if name)
    for name, gradient in ours.items():
        size = exact[name].norm().clamp_min(0.1 * largest if name else 1.0)
        allowed = 3 * (theirs[name] - exact[name]).norm() + rounding * size
        assert (gradient - theirs[name]).norm() <= allowed, name or "loss"
