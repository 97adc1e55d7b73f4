"""Mix the rows of a batch: mixup and cutmix.

Both are computed in C++, where ``shoestring::data`` has the same functions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shoestring import _load

_load.load()


class Mixed(NamedTuple):
    """A mixed batch.

    inputs: the mixed inputs, in the shape and dtype of the inputs.
    target: the targets that were passed.
    target2: the targets of the rows with which the rows were mixed.
    mix: the part of target, fp32 on the device of inputs: shape (), or with ``per_row`` that of target.

    Example:
        >>> images, labels = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
        >>> from shoestring.data import mixup
        >>> mixed = mixup(images, labels, seed=0, step=0)
        >>> mixed.inputs.shape, mixed.target2.shape, mixed.mix.shape
        (torch.Size([8, 3, 16, 16]), torch.Size([8]), torch.Size([]))
    """

    inputs: Tensor
    target: Tensor
    target2: Tensor
    mix: Tensor


def mixup(
    inputs: Tensor, target: Tensor, alpha: float = 0.2, *, seed: int, step: int, per_row: bool = False
) -> Mixed:
    """Mix each row of a batch with another row.

    The inputs become ``mix * inputs + (1 - mix) * others``, computed in fp32 for 16-bit inputs. Row i is mixed
    with row ``(i + shift) % rows`` for a random shift, so a row is mixed with itself only if it is the only
    one. The result depends on the arguments alone, so a resumed run repeats it; C++ gives the same bytes. The
    random numbers are drawn on the host, which does not wait for the device.

    Args:
        inputs: (rows, ...), fp32, fp64, bf16 or fp16. Differentiable.
        target: (rows, ...), any dtype, on the device of inputs.
        alpha: the part of target has the distribution Beta(alpha, alpha).
        seed: seed of the run. Processes that train on different batches need different seeds.
        step: number of the training step, at least 0. Each step draws other numbers.
        per_row: if True, each row has a part of its own. If False, the batch has one.

    Returns:
        A :class:`Mixed`, for the options ``target2`` and ``mix`` of ``cross_entropy`` and
        ``linear_cross_entropy``.

    Raises:
        ValueError: an argument does not fit.

    Example:
        >>> inputs, labels = torch.randn(8, 20), torch.randint(10, (8,))
        >>> from shoestring.data import mixup
        >>> mixed = mixup(inputs, labels, seed=0, step=5, per_row=True)
        >>> logits = mixed.inputs @ torch.randn(20, 10)
        >>> loss = shoestring.cross_entropy(logits, mixed.target, target2=mixed.target2, mix=mixed.mix)

    Reference: mixup (arXiv 1710.09412).
    """
    return _mixed("mixup", inputs, target, alpha, seed, step, per_row)


def cutmix(
    inputs: Tensor, target: Tensor, alpha: float = 1.0, *, seed: int, step: int, per_row: bool = False
) -> Mixed:
    """Replace a box in each image by the box at the same place in another image.

    The sides of the box are ``sqrt(1 - part)`` times those of the image, rounded down, where the part is drawn
    from Beta(alpha, alpha). The centre of the box is any pixel, and the box is clipped at the edges. ``mix`` is
    the exact share of the pixels that is left. Rows are chosen as by :func:`mixup`.

    Args:
        inputs: (rows, ..., height, width), any dtype.
        target: (rows, ...), any dtype, on the device of inputs.
        alpha: parameter of the distribution Beta(alpha, alpha).
        seed: see :func:`mixup`.
        step: see :func:`mixup`.
        per_row: if True, each row has a box of its own. If False, the batch has one.

    Returns:
        A :class:`Mixed`.

    Raises:
        ValueError: an argument does not fit.

    Example:
        >>> images, labels = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
        >>> from shoestring.data import cutmix
        >>> mixed = cutmix(images, labels, seed=0, step=5)
        >>> torch.isclose((mixed.inputs == images).float().mean(), mixed.mix)
        tensor(True)

    Reference: CutMix (arXiv 1905.04899).
    """
    return _mixed("cutmix", inputs, target, alpha, seed, step, per_row)


def _mixed(
    name: str, inputs: Tensor, target: Tensor, alpha: float, seed: int, step: int, per_row: bool
) -> Mixed:
    operator = getattr(torch.ops.shoestring, name)
    mixed, target2, mix = operator(inputs, target, alpha, seed=seed, step=step, per_row=per_row)
    return Mixed(mixed, target, target2, mix)
