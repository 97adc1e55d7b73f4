"""Cross-entropy of a linear layer, without the whole logits in memory."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.losses.cross_entropy import (
    CrossEntropyOptions,
    CrossEntropyStats,
    mix_argument,
)
from shoestring.losses.head import lora_arguments, weight_arguments

__all__ = [
    "LinearCrossEntropyOptions",
    "LinearCrossEntropyStats",
    "linear_cross_entropy",
    "linear_cross_entropy_with_stats",
]


class LinearCrossEntropyOptions(CrossEntropyOptions, total=False):
    """Keyword arguments of ``linear_cross_entropy`` and ``linear_cross_entropy_with_stats``.

    The options of ``CrossEntropyOptions`` are included.

    filter_eps: if above 0, the products for the gradients of a chunk of tokens leave out some classes. A
        class is left out if, for every token of the chunk, its logit gradient divided by the token's upstream
        gradient is below filter_eps. The error of each entry of the logits' gradient is at most
        ``filter_eps`` (Cut Cross-Entropy uses 2 ** -12 for bf16). This saves up to two thirds of the time if
        most classes can be left out, and costs little if none can. Larger chunks (``workspace_mb``) leave out
        fewer classes. Not supported with a quantised weight. On CUDA the host waits for the GPU once per
        chunk, to read the number of remaining classes, so a CUDA graph cannot capture it.
    lora_A, lora_B, scaling: LoRA of the head: ``scaling * (hidden @ lora_A.T) @ lora_B.T`` is added to the
        logits. Shapes (rank, features) and (vocab, rank), any floating-point dtype; differentiable.
    weight_grad: a tensor with the shape of weight, fp32 (fp64 for fp64), such as the ``.grad`` of a tied
        embedding or a ``main_grad``. Backward adds the gradient of weight to weight_grad, and returns no
        gradient for weight. Backward then computes the logits a second time, unless upstream_grad is given.
        Nothing is added under ``torch.no_grad``. Not supported under ``torch.compile``.
    upstream_grad: only with weight_grad: the gradient that the loss will have in backward. The gradient of
        weight is then added in forward, and no logits are computed twice.
    workspace_mb: limit in MiB on the logits and their gradient that are in memory at a time. On the CPU it
        includes the packing buffers of the GEMM (9 MiB, or half of workspace_mb if that is less). 0 selects
        the default:

        - CPU: 64 MiB.
        - CUDA: 256 MiB, but at least 1024 tokens in fp32 and 128 tokens in 16 bits.
        - CUDA in 16 bits, if weight requires a gradient, additionally: a buffer for the gradient of the
          logits, ``2 * vocab`` bytes per token. If there are at most ``2 * features`` tokens, it holds all of
          them. Otherwise it holds ``max(2048, features)`` tokens, and an fp32 accumulator of the shape of
          weight is allocated too. The sum is at most ``vocab * max(6 * features, 4 * features + 4096)``
          bytes.

        If the buffer holds n tokens, adding to the accumulator takes a fraction of about ``230 / n`` of the
        total time on an H200.

    Example:
        >>> options = shoestring.ops.LinearCrossEntropyOptions(softcap=30.0, workspace_mb=16)
        >>> hidden, weight, target = torch.randn(4, 64), torch.randn(1000, 64), torch.tensor([3, 1, 4, 1])
        >>> shoestring.linear_cross_entropy(hidden, weight, target, **options).shape
        torch.Size([])
    """

    filter_eps: float
    lora_A: Tensor | None
    lora_B: Tensor | None
    scaling: float
    weight_grad: Tensor | None
    upstream_grad: float | None
    workspace_mb: int


LinearCrossEntropyStats = CrossEntropyStats


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    **options: Unpack[LinearCrossEntropyOptions],
) -> Tensor:
    """Compute the cross-entropy of ``hidden @ weight.T + bias`` against ``target``, in chunks of tokens.

    The whole (tokens, vocab) logits are never in memory; ``workspace_mb`` limits the memory besides the
    gradients.

    - If the result is a scalar, forward computes the gradients too, with three matrix products in total.
    - With ``reduction="none"``, backward computes the logits again, so there are four matrix products.
    - On a CPU with AMX, the logits of bf16 hidden states of at most 1,024 features are computed twice, a tile
      at a time, and never stored. This excludes softcap, class_weights, label_smoothing, target2, filter_eps,
      LoRA, quantised weights and statistics.
    - Logits, sums and products are fp32 (fp64 for fp64 input). The matrix products for the gradients of
      16-bit input are an exception. CUDA computes them in the dtype of the input. So does a CPU with bf16
      matrix units if the input is bf16.
    - 16-bit input needs an fp32 (vocab, features) accumulator for the gradient of the weight, on CUDA only if
      there are several chunks.
    - On CUDA the host does not wait for the GPU, except with ``filter_eps``.

    Args:
        hidden: (..., features), fp32, fp64, bf16 or fp16.
        weight: (vocab, features), in the dtype of hidden; or a frozen :class:`QuantizedTensor`, which is
            dequantised one panel of classes at a time. On the CPU, the weight may be fp32 if hidden is bf16 or
            fp16: its elements are rounded to the dtype of hidden, and its gradient is fp32. Autocast passes
            an fp32 weight in this way.
        target: (...), int64, classes in [0, vocab) or ``ignore_index``.
        bias: (vocab), in the dtype of hidden.
        **options: see ``LinearCrossEntropyOptions``.

    Returns:
        A scalar, or the shape of target for ``reduction="none"``; fp32 for 16-bit input. Bitwise repeatable.
        Differentiable once with respect to hidden, weight, bias, lora_A and lora_B.

    Raises:
        RuntimeError: a shape, dtype or option does not fit.
        IndexError: a target is outside [0, vocab) and is not ``ignore_index``. On CUDA this is a device-side
            assertion, as in PyTorch.

    Example:
        >>> hidden = torch.randn(2, 16, 64, requires_grad=True)
        >>> weight = torch.randn(1000, 64, requires_grad=True)
        >>> target = torch.randint(1000, (2, 16))
        >>> shoestring.linear_cross_entropy(hidden, weight, target, shift=True).backward()
        >>> hidden.grad.shape, weight.grad.shape
        (torch.Size([2, 16, 64]), torch.Size([1000, 64]))

    The method combines Cut Cross-Entropy (arXiv 2411.09009) with Liger Kernel's gradients in forward (arXiv
    2410.10989).
    """
    arguments = operator_arguments(hidden, weight, target, bias, **options)
    result: Tensor = torch.ops.shoestring.linear_cross_entropy(**arguments)
    return result


def linear_cross_entropy_with_stats(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    **options: Unpack[LinearCrossEntropyOptions],
) -> LinearCrossEntropyStats:
    """Compute ``linear_cross_entropy`` and each token's loss, log-sum-exp, entropy and most likely class.

    The statistics take one additional pass over each row of logits while the row is in cache. If ``loss`` is
    a scalar and only ``loss`` is differentiated, forward computes the gradients. Otherwise backward computes
    the logits again.

    Arguments and errors are those of ``linear_cross_entropy``.

    Returns:
        A :class:`CrossEntropyStats`. All fields except ``argmax`` and ``correct`` are differentiable.

    Example:
        >>> hidden, weight, target = torch.randn(4, 64), torch.randn(1000, 64), torch.tensor([3, 1, 4, 1])
        >>> stats = shoestring.linear_cross_entropy_with_stats(hidden, weight, target)
        >>> torch.allclose(stats.loss, stats.token_loss.mean())
        True
    """
    arguments = operator_arguments(hidden, weight, target, bias, **options)
    return LinearCrossEntropyStats(*torch.ops.shoestring.linear_cross_entropy_with_stats(**arguments))


def operator_arguments(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    logit_scale: float | Tensor = 1.0,
    lora_A: Tensor | None = None,
    lora_B: Tensor | None = None,
    scaling: float = 1.0,
    mix: float | Tensor | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the arguments of the operator linear_cross_entropy.

    If logit_scale is a tensor, hidden and bias are multiplied by it here. The product of hidden and lora_A is
    computed here as well.

    Raises:
        ValueError: logit_scale has several elements, or lora_A and lora_B do not fit.
    """
    where = "linear_cross_entropy"
    if isinstance(logit_scale, Tensor):
        if logit_scale.numel() != 1:
            raise ValueError(
                f"{where}: logit_scale: expected a number or one element, received {tuple(logit_scale.shape)}"
            )
        factor = logit_scale.reshape(())
        logit_scale = 1.0
        hidden = hidden * factor.to(hidden.dtype)
        bias = bias if bias is None else bias * factor.to(bias.dtype)
    if mix is not None:
        options["mix"] = mix_argument(mix)
    options |= weight_arguments(weight) | lora_arguments(where, hidden, lora_A, lora_B, scaling)
    return {"hidden": hidden, "target": target, "bias": bias, "logit_scale": logit_scale, **options}
