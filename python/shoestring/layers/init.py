"""Initial values of weights. ``torch.nn.init`` has the distributions; this module has what depends on the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shoestring.core.name_patterns import matching
from shoestring.layers.mup import mup_, mup_groups

__all__ = ["depth_scaled_", "mup_", "mup_groups"]


@torch.no_grad()
def depth_scaled_(model: nn.Module, patterns: str | Sequence[str], layers: int) -> list[str]:
    """Divide the parameters that match one of the patterns by ``sqrt(2 * layers)``.

    Call it once, after the initialisation, for the output projections of residual branches. A transformer of
    ``layers`` blocks has two branches in each block, so that the variance of the residual sum does not grow with
    depth.

    Args:
        model: the model, whose parameters change in place.
        patterns: patterns of parameter names, as of ``fnmatch``: ``*`` stands for any text, dots included.
        layers: number of blocks.

    Returns:
        The names of the parameters that were scaled.

    Raises:
        ValueError: a pattern matches no parameter. Nothing has changed then.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16)
        >>> model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        >>> names = shoestring.nn.init.depth_scaled_(model, ["*.out_proj.weight", "*.linear2.weight"], layers=4)
        >>> len(names), names[0]
        (8, 'layers.0.self_attn.out_proj.weight')

    Reference: A. Radford et al., Language models are unsupervised multitask learners, 2019.
    """
    if layers < 1:
        raise ValueError(f"depth_scaled_: layers: expected a number of at least 1, received {layers}")
    parameters = dict(model.named_parameters())
    matched: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matched.update(matching("depth_scaled_", "patterns", pattern, list(parameters)))
    scaled = [name for name in parameters if name in matched]
    for name in scaled:
        parameters[name].mul_((2 * layers) ** -0.5)
    return scaled
