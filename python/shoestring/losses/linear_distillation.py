"""How far a student is from its teacher over the vocabulary, without the logits of either."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from shoestring.losses.head import lora_arguments, reference_logits, weight_arguments


def linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    lora_A: Tensor | None = None,
    lora_B: Tensor | None = None,
    scaling: float = 1.0,
    target: Tensor | None = None,
    ignore_index: int = -100,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "mean",
    workspace_mb: int = 0,
) -> Tensor:
    """Divergence of softmax(``hidden @ weight.T + bias``) and the teacher's, a chunk of tokens at a time.

    Neither's (tokens, vocab) logits ever exist: beside the gradients, memory is bounded by ``workspace_mb``. With a
    scalar result the gradients are made in the forward pass; with ``reduction="none"`` the backward pass computes
    both logits again. Logits and sums are fp32 (fp64 for fp64 input), whatever the dtype, and on the CPU so are all
    products; on CUDA those of 16-bit input are multiplied in its dtype, and so is the gradient of the logits. On CUDA
    nothing waits for the GPU.

    Args:
        hidden: (..., features), the student's, fp32, fp64, bf16 or fp16.
        weight: (vocab, features), hidden's dtype; or a frozen :class:`QuantizedTensor`, which is dequantised a panel of
            classes at a time.
        teacher_hidden: (..., teacher features), fp64 if hidden is, else fp32, bf16 or fp16. Neither it nor the
            teacher's weight and bias get a gradient.
        teacher_weight: (vocab, teacher features), teacher_hidden's dtype; or a :class:`QuantizedTensor`.
        bias: (vocab), hidden's dtype.
        teacher_bias: (vocab), teacher_hidden's dtype.
        lora_A, lora_B, scaling: a student with a LoRA'd head: ``scaling * (hidden @ lora_A.T) @ lora_B.T`` is added to
            its logits. (rank, features) and (vocab, rank), any floating dtype; differentiable.
        target: (...), int64: tokens that have ``ignore_index`` there count neither in the loss nor in the mean, and
            cost nothing on the CPU; on CUDA they cost as much as the others. What else it holds does not matter. None: every token counts.
        ignore_index: default -100.
        divergence: "forward_kl" (default), KL(teacher || student), for probabilities that the teacher gives;
            "reverse_kl", KL(student || teacher); or "jsd", the generalised Jensen-Shannon divergence, ``beta *
            KL(teacher || m) + (1 - beta) * KL(student || m)`` with ``m = beta * teacher + (1 - beta) * student``.
        beta: in (0, 1), for "jsd" only; other divergences do not read it. TRL and Liger Kernel call the forward
            divergence beta 0, and the reverse one beta 1.
        temperature: positive; both logits are divided by it. The loss is not multiplied by its square, as in TRL and
            Liger Kernel; with a loss on targets beside it, multiply it yourself (Hinton et al., section 2).
        reduction: "mean" (default) over the tokens that count (NaN where none does), "sum" or "none".
        workspace_mb: bound in MiB on the logits, of both, and their gradient, that exist at a time. 0 is the device's
            default. CPU: 64. CUDA: 256 (at least 1024 tokens in fp32, 128 in 16 bits), and in 16 bits ``2 * vocab``
            bytes for the gradient of each of all tokens if they are at most ``2 * features``, else of
            ``max(2048, features)``. Where they are not all, there is an fp32 accumulator of weight's shape besides.

    Returns:
        A scalar, or hidden's shape without features for ``reduction="none"``, in nats; fp32 for 16-bit input. Bitwise
        repeatable. Differentiable once by hidden, weight, bias, lora_A and lora_B. A class whose probability is 0 adds nothing where
        logits of -inf rule it out on both sides; where they do on one side only, a Kullback-Leibler divergence may be
        inf.

    Raises:
        RuntimeError: a shape, dtype or option that does not fit.
        ValueError: lora_A without lora_B, or of other features than hidden's.

    Hinton's loss, of targets and of a teacher, is two calls on the same head::

        loss = alpha * linear_cross_entropy(hidden, weight, target)
        soft = linear_distillation(hidden, weight, teacher_hidden, teacher_weight, target=target, temperature=T)
        (loss + (1 - alpha) * T**2 * soft).backward()

    Distillation is that of Hinton et al. (arXiv 1503.02531), the divergences are those of Agarwal et al. (GKD, arXiv
    2306.13649), and gradients in forward are Liger Kernel's (arXiv 2410.10989).
    """
    result: Tensor = torch.ops.shoestring.linear_distillation(
        hidden=hidden,
        teacher_hidden=teacher_hidden,
        bias=bias,
        teacher_bias=teacher_bias,
        **weight_arguments(weight),
        **weight_arguments(teacher_weight, "teacher_"),
        **lora_arguments("linear_distillation", hidden, lora_A, lora_B, scaling),
        target=target,
        ignore_index=ignore_index,
        divergence=divergence,
        beta=beta,
        temperature=temperature,
        reduction=reduction,
        workspace_mb=workspace_mb,
    )
    return result


def linear_distillation_reference(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    lora_A: Tensor | None = None,
    lora_B: Tensor | None = None,
    scaling: float = 1.0,
    target: Tensor | None = None,
    ignore_index: int = -100,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "mean",
    workspace_mb: int = 0,
) -> Tensor:
    """``linear_distillation`` in plain PyTorch, with the logits of both whole in memory."""
    return distillation_reference(
        reference_logits(hidden, weight, bias, lora_A, lora_B, scaling),
        reference_logits(teacher_hidden, teacher_weight, teacher_bias),
        target=target,
        ignore_index=ignore_index,
        divergence=divergence,
        beta=beta,
        temperature=temperature,
        reduction=reduction,
    )


def distillation_reference(
    logits: Tensor,
    teacher_logits: Tensor,
    *,
    target: Tensor | None = None,
    ignore_index: int = -100,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """What follows the linear layers, in plain PyTorch: logits (..., vocab) of both."""
    student = (logits / temperature).log_softmax(-1)
    teacher = (teacher_logits.detach() / temperature).log_softmax(-1)

    def kl(p: Tensor, q: Tensor) -> Tensor:
        """KL(p || q) of each token."""
        return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)

    if divergence == "forward_kl":
        loss = kl(teacher, student)
    elif divergence == "reverse_kl":
        loss = kl(student, teacher)
    else:
        mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
        loss = beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)
    counted = torch.ones_like(loss, dtype=torch.bool) if target is None else target != ignore_index
    loss = loss.masked_fill(~counted, 0)
    if reduction == "none":
        return loss
    return loss.sum() / counted.sum() if reduction == "mean" else loss.sum()
