"""Cross-entropy of a linear layer, without the logits."""

import torch
from torch import Tensor
from torch.nn import functional as F


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    workspace_mb: int = 0,
) -> Tensor:
    """Cross-entropy of ``hidden @ weight.T + bias`` against ``target``, a chunk of tokens at a time.

    The (tokens, vocab) logits never exist: beside the gradients, memory is bounded by ``workspace_mb``. With a scalar
    result the gradients are made in the forward pass (three matrix products in all); with ``reduction="none"`` the
    backward pass computes the logits again (four). Logits and sums are fp32 (fp64 for fp64 input), whatever the dtype,
    and so are the products, but that the gradients of 16-bit input are multiplied in its dtype on CUDA, and bf16 ones on
    a CPU that has units for it. 16-bit input also keeps an fp32 (vocab, features) accumulator for the weight's gradient,
    on CUDA only where there are several chunks. On CUDA nothing waits for the GPU.

    Args:
        hidden: (..., features), fp32, fp64, bf16 or fp16.
        weight: (vocab, features), hidden's dtype.
        target: (...), int64, classes in [0, vocab) or ``ignore_index``.
        bias: (vocab), hidden's dtype.
        ignore_index: tokens with this target count neither in the loss nor in the mean, and cost nothing on the CPU; on
            CUDA they cost as much as the others.
        reduction: "mean" over the tokens that count (NaN where none does, as in PyTorch), "sum" or "none".
        label_smoothing: in [0, 1), as in ``torch.nn.functional.cross_entropy``.
        softcap: if not 0, logits become ``softcap * tanh(logits / softcap)`` (Gemma 2).
        workspace_mb: bound in MiB on the logits, and their gradient, that exist at a time. 0 is the device's default. CPU:
            64. CUDA: 256 (at least 1024 tokens in fp32, 128 in 16 bits); and in 16 bits, where weight needs a gradient,
            room for the logits' gradient, ``2 * vocab`` bytes each of all tokens if they are at most ``2 * features``,
            else of ``max(2048, features)`` beside an fp32 accumulator of weight's shape: never more than
            ``vocab * max(6 * features, 4 * features + 4096)`` bytes. Less costs about ``230 / tokens at a time`` of the
            time on an H200.

    Returns:
        A scalar, or target's shape for ``reduction="none"``; fp32 for 16-bit input. Bitwise repeatable. Differentiable
        once by hidden, weight and bias.

    Raises:
        RuntimeError: a shape, dtype or option that does not fit.
        IndexError: a target outside [0, vocab) that is not ``ignore_index``; on CUDA, an assertion on the device, as
            PyTorch's own.

    The method is that of Cut Cross-Entropy (arXiv 2411.09009) and of Liger Kernel's gradients in forward
    (arXiv 2410.10989).
    """
    return torch.ops.shoestring.linear_cross_entropy(
        hidden,
        weight,
        target,
        bias,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
        workspace_mb=workspace_mb,
    )


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """The same in plain PyTorch, with the logits whole in memory."""
    return cross_entropy_reference(
        F.linear(hidden, weight, bias),
        target,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
    )


def cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """What follows the linear layer, in plain PyTorch: logits (..., vocab), target (...)."""
    if softcap != 0:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(
        logits.flatten(0, -2),
        target.flatten(),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return loss.view(target.shape) if reduction == "none" else loss
