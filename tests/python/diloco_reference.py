"""DiLoCo with fragments and overlap in fp64, in one process, for the tests of both languages.

The training is that of tests/distributed/diloco.cpp: every weight moves by a multiple of 1 / 256 in each step.
"""

from __future__ import annotations

import torch
from torch import Tensor

PARAMETERS, ELEMENTS = 6, 40


def parameters(rank: int) -> list[Tensor]:
    """Return the first weights of a rank, (8, 5) each."""
    return [((torch.arange(40.0) + p + 1000 * rank) / 64).view(8, 5) for p in range(PARAMETERS)]


def train(params: list[Tensor], step: int, rank: int) -> None:
    for p, param in enumerate(params):
        element = torch.arange(param.numel(), dtype=param.dtype).view_as(param)
        shift = 7 * step + 5 * rank + p
        param.sub_(((3 * element + shift) % 11 - 4) * (rank + 1) / 256)


def reference(
    ranks: int,
    steps: int,
    every: int,
    lr: float = 0.7,
    momentum: float = 0.9,
    fragments: int = 1,
    overlap: int = 0,
    alpha: float | None = None,
) -> list[list[Tensor]]:
    """Return the weights of each rank after the steps, and a last average of all if there is no overlap.

    The parameters have the same size, so they go to the fragments in turn.
    """
    alpha = (0.5 if overlap else 0.0) if alpha is None else alpha
    weights = [[p.double() for p in parameters(0)] for _ in range(ranks)]
    anchors = [p.clone() for p in weights[0]]
    momenta = [torch.zeros_like(p) for p in anchors]
    under_way: dict[int, tuple[int, dict[int, Tensor]]] = {}

    def differences(fragment: int) -> dict[int, Tensor]:
        return {
            p: torch.stack([anchors[p] - own[p] for own in weights]).mean(0)
            for p in range(fragment, PARAMETERS, fragments)
        }

    def outer_step(means: dict[int, Tensor]) -> None:
        for p, mean in means.items():
            momenta[p] = momentum * momenta[p] + mean
            anchors[p] = anchors[p] - lr * (mean + momentum * momenta[p])
            for own in weights:
                own[p].copy_(alpha * own[p] + (1 - alpha) * anchors[p])

    for step in range(1, steps + 1):
        for rank, own in enumerate(weights):
            train(own, step, rank)
        for fragment, (begun, means) in list(under_way.items()):
            if step - begun == overlap:
                outer_step(means)
                del under_way[fragment]
        for fragment in range(fragments):
            if step % every == (fragment + 1) * every // fragments % every:
                under_way[fragment] = step, differences(fragment)
                if overlap == 0:
                    outer_step(under_way.pop(fragment)[1])
    if overlap == 0:
        for fragment in range(fragments):
            outer_step(differences(fragment))
    return weights
