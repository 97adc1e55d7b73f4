"""Cross-entropy of logits that are there already."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import TypedDict, Unpack


class CrossEntropyOptions(TypedDict, total=False):
    """Keyword arguments that ``cross_entropy`` and ``linear_cross_entropy`` share.

    ignore_index: tokens with this target (default -100) count neither in the loss nor in the mean, and cost nothing on the
        CPU; on CUDA ``linear_cross_entropy`` takes as long for them as for the others.
    reduction: "mean" (default) over the tokens that count (NaN where none does, as in PyTorch), "sum" or "none".
    label_smoothing: in [0, 1), as in ``torch.nn.functional.cross_entropy``.
    softcap: if not 0, logits become ``softcap * tanh(logits / softcap)`` (Gemma 2).
    logit_scale: what logits, bias included, are multiplied by first; a number other than 0, or a tensor of one element,
        which is differentiable and multiplies hidden and bias, or logits, rounded to their dtype.
    z_loss: ``z_loss * lse ** 2`` is added to each token's loss, lse being its log-sum-exp (PaLM). Class weights do not
        multiply this term, so its mean is over the tokens (over ``token_weights`` where they are given), as in Liger
        Kernel.
    class_weights: (vocab), a weight for each class, as ``weight`` of ``torch.nn.functional.cross_entropy``; the mean of the
        cross-entropies then is over the weights of the targets.
    token_weights: target's shape; what each token's loss is multiplied by. The mean is over these, times the weights of
        the targets' classes. Differentiable; then the logits are read (or computed) twice, as for ``reduction="none"``.
    shift: each token predicts the target of the next one in its sequence, target's last dimension; the last token does
        not count. hidden, or logits, and target are those of whole sequences, and only targets are copied.
    hard_fraction: below 1, only this share of the tokens that count, rounded up, does: those of the largest (weighted)
        losses, and their equals (arXiv 1604.03540). A forward pass of its own finds them, and on the CPU the others
        then cost nothing.
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


class CrossEntropyStats(NamedTuple):
    """A loss, and for each token, in target's shape, what it has besides.

    loss: as the function without ``_with_stats`` returns it.
    token_loss: its loss, before ``token_weights``; 0 where it is ignored, as lse and entropy.
    lse: log-sum-exp of its logits.
    entropy: of the softmax of its logits, in nats.
    argmax: int64, its likeliest class, the first of equals; -1 where it is ignored.
    """

    loss: Tensor
    token_loss: Tensor
    lse: Tensor
    entropy: Tensor
    argmax: Tensor


def cross_entropy(
    logits: Tensor, target: Tensor, *, inplace: bool = False, **options: Unpack[CrossEntropyOptions]
) -> Tensor:
    """Cross-entropy of ``logits`` against ``target``, with nothing of the logits' size but their gradient.

    16-bit logits are computed in fp32, a row of classes at a time. By default logits stay as they are: the forward pass
    reads them once, and the backward pass writes the gradient: in their place if nothing refers to them any more, so that
    a model that lets go of them takes no second tensor.

    Args:
        logits: (..., vocab), fp32, fp64, bf16 or fp16. Rows may be strided (a slice of tokens, or of the classes of a padded
            vocabulary) without a copy; classes that do not lie side by side, or tokens in more than two strides, are copied.
        target: (...), int64, classes in [0, vocab) or ``ignore_index``.
        inplace: the forward pass, one read and one write, leaves the gradient where the logits were (with
            ``reduction="none"`` the backward pass does), whoever refers to them. False by default, because whoever reads
            them afterwards, as for an accuracy, finds a gradient, and nothing can warn of that; autograd does raise an
            error where another node saved them, or uses them later. Logits stay as they are where they need no gradient,
            or gradients are off; where they are a leaf, keep their own gradient (``retain_grad``), or are a view that
            autograd lets nobody change (of a leaf, or from ``chunk`` or ``unbind``); and under ``torch.compile``, which
            plans memory itself. If the upstream gradient is not 1, one more pass multiplies by it (in fp16 with
            ``reduction="mean"`` always: what is kept is the gradient of about the sum), and 16 bits are rounded again.
        **options: see ``CrossEntropyOptions``.

    Returns:
        A scalar, or target's shape for ``reduction="none"``; fp32 for 16-bit logits, under autocast too. Bitwise
        repeatable. Differentiable once by logits. A backward pass through a retained graph makes a new tensor.

    Raises:
        RuntimeError: a shape, dtype or option that does not fit.
        IndexError: a target outside [0, vocab) that is not ``ignore_index``; on CUDA, an assertion on the device, as
            PyTorch's own.

    The gradient in place of the logits is Liger Kernel's method (arXiv 2410.10989).
    """
    logits, inplace, options = _arguments(logits, inplace, **options)
    operators = torch.ops.shoestring
    result: Tensor = (operators.cross_entropy_ if inplace else operators.cross_entropy)(
        logits, target, **options
    )
    return result


def cross_entropy_with_stats(
    logits: Tensor, target: Tensor, *, inplace: bool = False, **options: Unpack[CrossEntropyOptions]
) -> CrossEntropyStats:
    """``cross_entropy``, and what each token has besides: its loss, log-sum-exp, entropy and likeliest class.

    All but ``argmax`` are differentiable, unless ``inplace`` has replaced the logits in the forward pass: then ``loss`` is.

    Arguments and errors are those of ``cross_entropy``.
    """
    logits, inplace, options = _arguments(logits, inplace, **options)
    operators = torch.ops.shoestring
    operator = operators.cross_entropy_with_stats_ if inplace else operators.cross_entropy_with_stats
    return CrossEntropyStats(*operator(logits, target, **options))


def _arguments(
    logits: Tensor, inplace: bool, *, logit_scale: float | Tensor = 1.0, **options: Any
) -> tuple[Tensor, bool, Any]:
    """The operator's: a scale that is a tensor multiplies the logits, and the product is nobody else's."""
    if isinstance(logit_scale, Tensor):
        if logit_scale.numel() != 1:
            raise ValueError(
                f"cross_entropy: logit_scale: expected a number or one element, received {tuple(logit_scale.shape)}"
            )
        return logits * logit_scale.reshape(()).to(logits.dtype), True, options
    return logits, inplace, {"logit_scale": logit_scale, **options}


def cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    logit_scale: float | Tensor = 1.0,
    z_loss: float = 0.0,
    class_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    shift: bool = False,
    hard_fraction: float = 1.0,
    workspace_mb: int = 0,
) -> CrossEntropyStats:
    """``cross_entropy_with_stats`` in plain PyTorch; workspace_mb is for ``linear_cross_entropy``, and changes nothing."""
    if shift:
        target = torch.cat([target[..., 1:], torch.full_like(target[..., :1], ignore_index)], -1)
    logits = logits * logit_scale
    if softcap != 0:
        logits = softcap * torch.tanh(logits / softcap)
    weights = None if class_weights is None else class_weights.to(logits.dtype)
    counted = target != ignore_index
    entropies = F.cross_entropy(
        logits.flatten(0, -2),
        target.flatten(),
        weights,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    ).view(target.shape)
    z_terms = z_loss * logits.logsumexp(-1).square() * counted
    token_loss = entropies + z_terms
    each = counted.to(logits.dtype) if token_weights is None else token_weights.to(logits.dtype) * counted
    if hard_fraction < 1 and counted.any():
        hard = (token_loss * each).where(counted, -torch.inf)
        least = hard.flatten().topk(math.ceil(hard_fraction * int(counted.sum()))).values[-1]
        counted = counted & (hard >= least)
        each = each * counted
        token_loss = token_loss * counted
    log_softmax = logits.log_softmax(-1)
    lse = torch.where(counted, logits.logsumexp(-1), 0)
    entropy = torch.where(
        counted, -torch.where(log_softmax.isinf(), 0, log_softmax.exp() * log_softmax).sum(-1), 0
    )
    argmax = torch.where(counted, logits.argmax(-1), -1)
    loss = token_loss * each
    if reduction == "mean":  # of the cross-entropies over class weights, of the z terms over tokens
        of_class = 1 if weights is None else weights[target.where(counted, 0)]
        loss = (entropies * each).sum() / (each * of_class).sum() + (z_terms * each).sum() / each.sum()
    elif reduction == "sum":
        loss = loss.sum()
    return CrossEntropyStats(loss, token_loss, lse, entropy, argmax)
