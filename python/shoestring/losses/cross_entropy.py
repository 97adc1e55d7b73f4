"""Cross-entropy of logits."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import TypedDict, Unpack

__all__ = ["CrossEntropyOptions", "CrossEntropyStats", "cross_entropy", "cross_entropy_with_stats"]


class CrossEntropyOptions(TypedDict, total=False):
    """Keyword arguments that ``cross_entropy`` and ``linear_cross_entropy`` share.

    ignore_index: tokens with this target (default -100) are ignored: they count neither in the loss nor in
        the mean. On the CPU they take no time. On CUDA ``linear_cross_entropy`` takes as long for them as for
        other tokens.
    reduction: "mean" (default) over the tokens that are not ignored (NaN if all are ignored, as in PyTorch),
        "sum" or "none".
    label_smoothing: in [0, 1), as in ``torch.nn.functional.cross_entropy``.
    softcap: if not 0, logits become ``softcap * tanh(logits / softcap)`` (Gemma 2).
    logit_scale: factor of the logits, bias included, before softcap. A number other than 0, or a
        differentiable tensor of one element. A tensor multiplies hidden and bias, or the logits, and the
        product is rounded to their dtype.
    z_loss: ``z_loss * lse ** 2`` is added to the loss of each token, where lse is the log-sum-exp of its
        logits (PaLM). Class weights do not multiply this z term. The mean of the z terms is over the tokens,
        weighted by ``token_weights`` if given, as in Liger Kernel.
    class_weights: (vocab), a weight for each class, like ``weight`` of ``torch.nn.functional.cross_entropy``.
        The mean of the cross-entropies is then weighted by the class weights of the targets.
    token_weights: factors of the token losses, in the shape of target. The mean is weighted by these factors
        times the class weights of the targets. Differentiable; the logits are then read (or computed) twice,
        as for ``reduction="none"``.
    shift: if True, each token predicts the target of the next token along the last dimension of target, and
        the last token is ignored. Pass hidden (or logits) and target of whole sequences; only the targets are
        copied.
    hard_fraction: if below 1, only this fraction of the tokens, rounded up, is counted: those with the
        largest (weighted) losses, including ties (online hard example mining, arXiv 1604.03540). An
        additional forward pass finds them. On the CPU the other tokens then take no time.
    target2: a second target of each token, int64 in the shape of target, as mixup and cutmix need. The loss
        of a token is ``mix`` times its loss with target plus ``1 - mix`` times its loss with target2. The
        logits are read (or computed) as often as without target2. An ignored target adds nothing. In the mean
        a token counts by the sum of its other parts, each times the class weight of its target, so that it
        counts as one token if none is ignored and there are no class weights. ``correct`` of the statistics
        counts tokens whose argmax is target.
    mix: the part of target, in [0, 1]: a number, or an fp32 or fp64 tensor with one element or in the shape of
        target. Without gradient. On CUDA, numbers of a GPU tensor outside [0, 1] are a device-side assertion.

    Example:
        >>> options = shoestring.ops.CrossEntropyOptions(reduction="none", label_smoothing=0.1)
        >>> logits, target = torch.randn(4, 1000), torch.tensor([3, 1, 4, 1])
        >>> shoestring.cross_entropy(logits, target, **options).shape
        torch.Size([4])
        >>> mixed = shoestring.cross_entropy(logits, target, target2=target.flip(0), mix=0.7)
    """

    ignore_index: int
    reduction: str
    label_smoothing: float
    softcap: float
    logit_scale: float | Tensor
    z_loss: float
    class_weights: Tensor | None
    token_weights: Tensor | None
    shift: bool
    hard_fraction: float
    target2: Tensor | None
    mix: float | Tensor | None


class CrossEntropyStats(NamedTuple):
    """A loss, statistics of each token in the shape of target, and the number of correct predictions.

    loss: the result of ``cross_entropy`` or ``linear_cross_entropy``.
    token_loss: the loss of the token, not multiplied by ``token_weights``; 0 for ignored tokens.
    lse: log-sum-exp of the token's logits; 0 for ignored tokens.
    entropy: entropy of the softmax of the token's logits, in nats; 0 for ignored tokens.
    argmax: the most likely class, int64, the first one in a tie; -1 for ignored tokens.
    correct: the number of tokens whose argmax is their target, int64 of shape (). Ignored tokens do not
        count; with ``hard_fraction`` only the tokens that are kept do. Divide a sum over batches by the
        number of tokens to get the accuracy.

    Example:
        >>> logits, target = torch.randn(4, 1000), torch.tensor([3, 1, 4, -100])
        >>> stats = shoestring.cross_entropy_with_stats(logits, target)
        >>> stats.loss.shape, stats.entropy.shape, stats.argmax.dtype
        (torch.Size([]), torch.Size([4]), torch.int64)
        >>> accuracy = stats.correct / (target != -100).sum()
    """

    loss: Tensor
    token_loss: Tensor
    lse: Tensor
    entropy: Tensor
    argmax: Tensor
    correct: Tensor


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    dim: int = -1,
    inplace: bool = False,
    **options: Unpack[CrossEntropyOptions],
) -> Tensor:
    """Compute the cross-entropy of ``logits`` against ``target``, without temporaries as large as the logits.

    16-bit logits are converted to fp32 row by row. By default forward reads the logits once and does not
    change them. Backward writes the gradient into the memory of the logits if nothing else refers to them,
    and otherwise into a new tensor. So a model that drops its reference to the logits needs no second tensor
    of their size.

    Args:
        logits: (..., vocab), fp32, fp64, bf16 or fp16. Slices of tokens, or of the classes of a padded
            vocabulary, are read without a copy. Logits are copied once if the class dimension is not
            contiguous, or if the token dimensions need more than two strides. The gradient overwrites the
            copy.
        target: (...), int64, classes in [0, vocab) or ``ignore_index``. Its shape is that of logits without
            the dimension of the classes.
        dim: the dimension of the classes in logits. ``dim=1`` takes the (batch, classes, ...) of
            ``torch.nn.functional.cross_entropy``. Such logits are copied, unless their classes are contiguous
            in memory, as in channels_last images.
        inplace: if True, forward overwrites the logits with their gradient, in one read and one write. With
            ``reduction="none"``, backward overwrites the logits. See below.
        **options: see ``CrossEntropyOptions``.

    ``inplace=True`` overwrites the logits even if other references to them exist. Code that reads the logits
    afterwards, for example to compute an accuracy, silently finds a gradient. Autograd raises an error only
    if another node saved the logits or uses them later. In the following cases the logits are not
    overwritten:

    - if they have to be copied (see ``logits``);
    - if they do not require a gradient, or gradients are disabled;
    - if they are a leaf, or ``retain_grad`` was called on them;
    - if they are a view that autograd does not allow to be modified (of a leaf, or from ``chunk`` or
      ``unbind``);
    - under ``torch.compile``, which plans memory itself.

    If the upstream gradient is not 1, backward multiplies the gradient by it in an additional pass, which
    rounds 16-bit values a second time. fp16 with ``reduction="mean"`` always needs this pass, because the
    stored gradient is approximately that of the sum of the losses, not of the mean.

    Returns:
        A scalar, or the shape of target for ``reduction="none"``; fp32 for 16-bit logits, also under
        autocast. Bitwise repeatable. Differentiable once with respect to logits. Backward through a retained
        graph allocates a new tensor.

    Raises:
        RuntimeError: a shape, dtype or option does not fit.
        IndexError: a target is outside [0, vocab) and is not ``ignore_index``. On CUDA this is a device-side
            assertion, as in PyTorch.

    Example:
        >>> logits = torch.randn(4, 1000, requires_grad=True)
        >>> target = torch.tensor([3, 1, 4, -100])
        >>> loss = shoestring.cross_entropy(logits, target)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(logits, target))
        True
        >>> loss.backward()
        >>> images, classes = torch.randn(2, 10, 8, 8), torch.randint(10, (2, 8, 8))
        >>> loss = shoestring.cross_entropy(images, classes, dim=1)

    Overwriting the logits with their gradient is the method of Liger Kernel (arXiv 2410.10989).
    """
    logits, inplace, options = _arguments(logits, inplace, **options)
    operators = torch.ops.shoestring
    result: Tensor = (operators.cross_entropy_ if inplace else operators.cross_entropy)(
        logits, target, dim=dim, **options
    )
    return result


def cross_entropy_with_stats(
    logits: Tensor,
    target: Tensor,
    *,
    dim: int = -1,
    inplace: bool = False,
    **options: Unpack[CrossEntropyOptions],
) -> CrossEntropyStats:
    """Compute ``cross_entropy`` and, for each token, its loss, log-sum-exp, entropy and most likely class.

    Arguments and errors are those of ``cross_entropy``.

    Returns:
        A :class:`CrossEntropyStats`. All fields except ``argmax`` and ``correct`` are differentiable. If
        ``inplace`` has overwritten the logits or a copy of them in forward, only ``loss`` is differentiable.

    Example:
        >>> logits = torch.randn(4, 1000, requires_grad=True)
        >>> stats = shoestring.cross_entropy_with_stats(logits, torch.tensor([3, 1, 4, 1]))
        >>> torch.equal(stats.argmax, logits.argmax(-1))
        True
        >>> (stats.argmax == torch.tensor([3, 1, 4, 1])).sum() == stats.correct
        tensor(True)
        >>> (stats.loss - 0.01 * stats.entropy.mean()).backward()
    """
    logits, inplace, options = _arguments(logits, inplace, **options)
    operators = torch.ops.shoestring
    operator = operators.cross_entropy_with_stats_ if inplace else operators.cross_entropy_with_stats
    return CrossEntropyStats(*operator(logits, target, dim=dim, **options))


def _arguments(
    logits: Tensor,
    inplace: bool,
    *,
    logit_scale: float | Tensor = 1.0,
    mix: float | Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, bool, Any]:
    """Return the arguments of the operator cross_entropy: logits, inplace and options.

    If logit_scale is a tensor, the logits are multiplied by it here. Nothing else refers to the product, so
    the operator may overwrite the product.
    """
    if mix is not None:
        options["mix"] = mix_argument(mix)
    if isinstance(logit_scale, Tensor):
        if logit_scale.numel() != 1:
            raise ValueError(
                f"cross_entropy: logit_scale: expected a number or one element, received {tuple(logit_scale.shape)}"
            )
        return logits * logit_scale.reshape(()).to(logits.dtype), True, options
    return logits, inplace, {"logit_scale": logit_scale, **options}


def mix_argument(mix: float | Tensor) -> Tensor:
    """Return the option mix as a tensor. A number becomes a CPU scalar, whose value the operator checks."""
    if isinstance(mix, Tensor):
        return mix
    return torch.scalar_tensor(mix, dtype=torch.float64, device="cpu")
