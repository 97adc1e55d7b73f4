"""Cross-entropy of a linear layer, without the logits."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.losses.cross_entropy import CrossEntropyOptions, CrossEntropyStats, cross_entropy_reference
from shoestring.losses.head import lora_arguments, reference_logits, weight_arguments


class LinearCrossEntropyOptions(CrossEntropyOptions, total=False):
    """Keyword arguments of ``linear_cross_entropy`` and ``linear_cross_entropy_with_stats``: those of
    ``CrossEntropyOptions``, and

    filter_eps: above 0, classes whose gradient by the logits is below it, as a share of the token's upstream gradient, for
        every token of a chunk are left out of the gradients' products: an error of at most ``filter_eps`` in each entry
        of the logits' gradient (Cut Cross-Entropy has 2 ** -12 for bf16). Costs little where nothing can be left out,
        and up to two thirds of the time is saved where most can. Not with a quantised weight. On CUDA it waits for the GPU
        once a chunk, to learn how many classes are left, so a CUDA graph cannot capture it; and where chunks are large
        (``workspace_mb``) a class has more tokens to be needed by.
    lora_A, lora_B, scaling: a LoRA'd head: ``scaling * (hidden @ lora_A.T) @ lora_B.T`` is added to the logits. (rank,
        features) and (vocab, rank), any floating dtype; differentiable.
    weight_grad: weight's shape, fp32 (fp64 for fp64): weight's gradient is added to it, and no other is made: a tied
        embedding's ``.grad``, or a ``main_grad``. That happens in backward, which then computes the logits a second
        time; under ``torch.no_grad`` never. Not under ``torch.compile``.
    grad_scale: with weight_grad, the gradient that the loss is going to have in backward: weight's is then added in the
        forward pass, and no logits are computed twice.
    workspace_mb: bound in MiB on the logits, and their gradient, that exist at a time; on the CPU, on what products pack
        into besides (9 MiB, or half of it if that is less). 0 is the device's default. CPU: 64. CUDA: 256 (at least
        1024 tokens in fp32, 128 in 16 bits); and in 16 bits, where weight needs a gradient, room for the logits'
        gradient, ``2 * vocab`` bytes each of all tokens if they are at most ``2 * features``, else of
        ``max(2048, features)`` beside an fp32 accumulator of weight's shape: never more than
        ``vocab * max(6 * features, 4 * features + 4096)`` bytes. Less costs about ``230 / tokens at a time`` of the
        time on an H200.
    """

    filter_eps: float
    lora_A: Tensor | None
    lora_B: Tensor | None
    scaling: float
    weight_grad: Tensor | None
    grad_scale: float | None
    workspace_mb: int


LinearCrossEntropyStats = CrossEntropyStats


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    **options: Unpack[LinearCrossEntropyOptions],
) -> Tensor:
    """Cross-entropy of ``hidden @ weight.T + bias`` against ``target``, a chunk of tokens at a time.

    The (tokens, vocab) logits never exist: beside the gradients, memory is bounded by ``workspace_mb``. With a scalar
    result the gradients are made in the forward pass (three matrix products in all); with ``reduction="none"`` the
    backward pass computes the logits again (four). Logits and sums are fp32 (fp64 for fp64 input), whatever the dtype,
    and so are the products, but that the gradients of 16-bit input are multiplied in its dtype on CUDA, and bf16 ones on
    a CPU that has units for it. 16-bit input also keeps an fp32 (vocab, features) accumulator for the weight's gradient,
    on CUDA only where there are several chunks. On CUDA nothing waits for the GPU, but with ``filter_eps``.

    Args:
        hidden: (..., features), fp32, fp64, bf16 or fp16.
        weight: (vocab, features), hidden's dtype; or a frozen :class:`QuantizedTensor`, which is dequantised a panel of
            classes at a time.
        target: (...), int64, classes in [0, vocab) or ``ignore_index``.
        bias: (vocab), hidden's dtype.
        **options: see ``LinearCrossEntropyOptions``.

    Returns:
        A scalar, or target's shape for ``reduction="none"``; fp32 for 16-bit input. Bitwise repeatable. Differentiable
        once by hidden, weight, bias, lora_A and lora_B.

    Raises:
        RuntimeError: a shape, dtype or option that does not fit.
        IndexError: a target outside [0, vocab) that is not ``ignore_index``; on CUDA, an assertion on the device, as
            PyTorch's own.

    The method is that of Cut Cross-Entropy (arXiv 2411.09009) and of Liger Kernel's gradients in forward
    (arXiv 2410.10989).
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
    """``linear_cross_entropy``, and what each token has besides: its loss, log-sum-exp, entropy and likeliest class.

    Costs one more pass over each row of logits while it is in cache. All but ``argmax`` are differentiable. As long as
    only ``loss`` is differentiated, and it is a scalar, the gradients are those made in the forward pass; else the
    backward pass computes the logits again.

    Arguments and errors are those of ``linear_cross_entropy``.
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
    **options: Any,
) -> dict[str, Any]:
    """The operator's: a scale that is a tensor multiplies hidden and bias, and lora_A is applied."""
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
    options |= weight_arguments(weight) | lora_arguments(where, hidden, lora_A, lora_B, scaling)
    return {"hidden": hidden, "target": target, "bias": bias, "logit_scale": logit_scale, **options}


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    **options: Unpack[LinearCrossEntropyOptions],
) -> Tensor:
    """``linear_cross_entropy`` in plain PyTorch, with the logits whole in memory; weight_grad and grad_scale are its own."""
    given: dict[str, Any] = {**options}
    head = {name: given.pop(name) for name in ("lora_A", "lora_B", "scaling") if name in given}
    logits = reference_logits(hidden, weight, bias, **head)
    return cross_entropy_reference(logits, target, **given).loss
