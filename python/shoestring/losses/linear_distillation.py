"""Distillation loss between the output heads of a student and a teacher, without storing their logits."""

import torch
from torch import Tensor

from shoestring.losses.head import lora_arguments, weight_arguments

__all__ = ["linear_distillation"]


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
    """Compute the divergence between the token distributions of a student and a teacher, in chunks of tokens.

    The student's distribution is softmax(``hidden @ weight.T + bias``). The teacher's is
    softmax(``teacher_hidden @ teacher_weight.T + teacher_bias``). The whole (tokens, vocab) logits of student
    and teacher are never in memory; ``workspace_mb`` limits the memory besides the gradients. If the result
    is a scalar, forward computes the gradients too. With ``reduction="none"``, backward computes the logits
    of student and teacher again.

    Logits and sums are fp32 (fp64 for fp64 input). The CPU multiplies in fp32 (fp64) too. CUDA multiplies
    16-bit input in the dtype of the input, and stores the gradient of the logits in that dtype. The host does
    not wait for the GPU.

    Args:
        hidden: (..., features), of the student, fp32, fp64, bf16 or fp16.
        weight: (vocab, features), in the dtype of hidden; or a frozen :class:`QuantizedTensor`, which is
            dequantised one panel of classes at a time.
        teacher_hidden: (..., teacher features), fp64 if hidden is fp64, else fp32, bf16 or fp16.
            teacher_hidden, teacher_weight and teacher_bias get no gradients.
        teacher_weight: (vocab, teacher features), in the dtype of teacher_hidden; or a
            :class:`QuantizedTensor`.
        bias: (vocab), in the dtype of hidden.
        teacher_bias: (vocab), in the dtype of teacher_hidden.
        lora_A, lora_B, scaling: LoRA of the student's head: ``scaling * (hidden @ lora_A.T) @ lora_B.T`` is
            added to its logits. Shapes (rank, features) and (vocab, rank), any floating-point dtype;
            differentiable.
        target: (...), int64. A token with the target ``ignore_index`` counts neither in the loss nor in the
            mean. On the CPU such a token takes no time; on CUDA it takes as long as the others. Other values
            of target have no effect. None: every token counts.
        ignore_index: default -100.
        divergence: "forward_kl" (default), KL(teacher || student); "reverse_kl", KL(student || teacher); or
            "jsd", the generalised Jensen-Shannon divergence, ``beta * KL(teacher || m) + (1 - beta) *
            KL(student || m)`` with ``m = beta * teacher + (1 - beta) * student``.
        beta: in (0, 1), only for "jsd". In TRL and Liger Kernel, beta 0 selects the forward divergence and
            beta 1 the reverse divergence.
        temperature: positive; the logits of student and teacher are divided by it. As in TRL and Liger
            Kernel, the loss is not multiplied by ``temperature ** 2``. If you add a loss on targets, multiply
            the distillation loss by ``temperature ** 2`` yourself (Hinton et al., section 2).
        reduction: "mean" (default) over the tokens that count (NaN if there are none), "sum" or "none".
        workspace_mb: limit in MiB on the logits of student and teacher and their gradient that are in memory
            at a time. 0 selects the default. CPU: 64. CUDA: 256, but at least 1024 tokens in fp32 and 128
            tokens in 16 bits. CUDA in 16 bits additionally holds the gradient of the logits, ``2 * vocab``
            bytes per token: of all tokens if there are at most ``2 * features``, otherwise of ``max(2048,
            features)`` tokens. In the latter case an fp32 accumulator of the shape of weight is allocated
            too.

    Returns:
        A scalar, or the shape of hidden without features for ``reduction="none"``, in nats; fp32 for 16-bit
        input. Bitwise repeatable. Differentiable once with respect to hidden, weight, bias, lora_A and
        lora_B. A class whose logits are -inf for both student and teacher adds nothing. If only one of them
        is -inf, a Kullback-Leibler divergence may be inf.

    Raises:
        RuntimeError: a shape, dtype or option does not fit.
        ValueError: only one of lora_A and lora_B is given, or lora_A does not fit hidden.

    Example:
        >>> hidden, weight = torch.randn(4, 64, requires_grad=True), torch.randn(1000, 64)
        >>> teacher_hidden, teacher_weight = torch.randn(4, 96), torch.randn(1000, 96)
        >>> shoestring.linear_distillation(hidden, weight, teacher_hidden, teacher_weight).backward()
        >>> hidden.grad.shape
        torch.Size([4, 64])

    Hinton's loss, which combines targets and a teacher, takes two calls with the same head::

        loss = alpha * linear_cross_entropy(hidden, weight, target)
        soft = linear_distillation(
            hidden, weight, teacher_hidden, teacher_weight, target=target, temperature=T
        )
        (loss + (1 - alpha) * T**2 * soft).backward()

    References: distillation, Hinton et al. (arXiv 1503.02531); the divergences, Agarwal et al. (GKD, arXiv
    2306.13649); gradients in forward, Liger Kernel (arXiv 2410.10989).
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
