"""Run a model on few inputs, to compare its results before and after a change."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

IMAGE = 64  # height and width of the image for a model whose configuration names no size


def loss_of_few(model: Any) -> Tensor:
    """Return a language model's loss on eight tokens in evaluation mode."""
    ids = _ids(model)
    # Disable the key-value cache, because some kinds of cache need layers that a small model lacks, or an
    # encoder.
    options = {"use_cache": False} if "use_cache" in _parameters(model) else {}
    with evaluating(model), torch.no_grad():
        loss = model(input_ids=ids, labels=ids, return_dict=True, **options).loss
    if loss is None:
        raise TypeError("a loss of None")
    return torch.as_tensor(loss).detach()


def output_of_few(model: Any) -> Tensor:
    """Return the first output of a model for eight tokens, one image, or both, in evaluation mode.

    Raises:
        TypeError: the forward takes neither tokens nor images, or returns no tensor.
    """
    names, config, inputs = _parameters(model), model.config, {}
    if "input_ids" in names:
        inputs["input_ids"] = _ids(model)
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
            inputs["decoder_input_ids"] = inputs["input_ids"]
    if "pixel_values" in names:
        inputs["pixel_values"] = _image(model, getattr(config, "vision_config", config))
    if not inputs:
        raise TypeError("a forward without input_ids and pixel_values")
    with evaluating(model), torch.no_grad():
        output = model(**inputs, return_dict=True)
    for value in output.values():
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().clone()
    raise TypeError("an output without tensors")


def alike(before: Tensor, after: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the results of a model with parameters of ``dtype`` differ by rounding only."""
    tolerance = 1e-4 if dtype in (torch.float32, torch.float64) else 3e-2
    before, after = before.double(), after.double()
    largest = float(before.norm())
    return before.shape == after.shape and bool(
        (after - before).norm() <= tolerance * max(largest, 1.0 if before.dim() == 0 else largest)
    )


def shaken(x: Tensor) -> Tensor:
    """Move each element of x to a neighbouring number of its dtype, up or down at random."""
    draw = torch.Generator().manual_seed(0)
    signs = torch.randint(2, x.shape, generator=draw).to(x.device, x.dtype).mul_(2).sub_(1)
    return x * (1 + torch.finfo(x.dtype).eps * signs)


def within_rounding(theirs: Tensor, ours: Tensor, disturbed: Tensor) -> bool:
    """Return whether two results of a module differ by no more than a few roundings.

    Args:
        theirs: the result of the module.
        ours: the result of the operators that shall replace the module.
        disturbed: ``ours``, computed from ``shaken`` intermediate values. Its distance from ``ours`` is the
            effect of one unit in the last place of these values, however much cancels out in the products
            after them.

    With 16-bit dtypes, the two results differ by at most three roundings of the intermediate values. The root
    mean square of one is 0.29 units, of three 0.5 units. In fp32, functions such as exp are accurate to a few
    units. Each result is rounded once more, with a root mean square of 0.41 units for both.
    """
    if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return False
    units = 0.5 if ours.dtype in (torch.bfloat16, torch.float16) else 4
    rounding = 0.5 * torch.finfo(ours.dtype).eps * theirs.double().norm()
    allowed = units * (disturbed.double() - ours.double()).norm() + rounding
    return bool((ours.double() - theirs.double()).norm() <= allowed)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _parameters(model: Any) -> Any:
    return inspect.signature(model.forward).parameters


def _ids(model: Any) -> Tensor:
    """Return a row of a few token ids that the model knows."""
    try:
        table = model.get_input_embeddings().weight
        device, count = table.device, table.shape[0]
    except NotImplementedError:  # raised by a model of several models, such as CLIP
        device, count = next(model.parameters()).device, model.config.get_text_config().vocab_size
    return torch.arange(8, device=device).remainder(count)[None]


def _image(model: Any, config: Any) -> Tensor:
    size = getattr(config, "image_size", None) or IMAGE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    weight = next(model.parameters())
    draw = torch.Generator().manual_seed(0)
    image = torch.randn(1, getattr(config, "num_channels", 3), height, width, generator=draw)
    return image.to(weight.device, weight.dtype)
