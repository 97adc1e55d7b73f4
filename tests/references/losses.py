"""Losses in plain PyTorch."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from shoestring.losses.cross_entropy import CrossEntropyStats
from shoestring.losses.linear_cross_entropy import LinearCrossEntropyOptions
from shoestring.quantization.quantized_tensor import QuantizedTensor


def cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    *,
    dim: int = -1,
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
    target2: Tensor | None = None,
    mix: float | Tensor | None = None,
    workspace_mb: int = 0,
) -> CrossEntropyStats:
    """Compute ``cross_entropy_with_stats`` in plain PyTorch.

    ``workspace_mb``, an option of ``linear_cross_entropy``, is accepted and has no effect.
    """
    logits = logits.movedim(dim, -1)
    targets = [target] if target2 is None else [target, target2]
    if shift:
        targets = [torch.cat([t[..., 1:], torch.full_like(t[..., :1], ignore_index)], -1) for t in targets]
    mix = torch.as_tensor(1.0 if mix is None else mix, dtype=torch.float64, device=logits.device)
    parts = [part * (t != ignore_index) for t, part in zip(targets, (mix, 1 - mix))]
    part = torch.stack(parts).sum(0).to(logits.dtype)
    logits = logits * logit_scale
    if softcap != 0:
        logits = softcap * torch.tanh(logits / softcap)
    weights = None if class_weights is None else class_weights.to(logits.dtype)
    counted = part > 0
    entropies = torch.zeros_like(part)
    for t, share in zip(targets, parts):
        entropy_of_target = F.cross_entropy(
            logits.flatten(0, -2),
            t.flatten(),
            weights,
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        ).view(t.shape)
        entropies = entropies + torch.where(share > 0, share.to(logits.dtype) * entropy_of_target, 0)
    z_terms = z_loss * logits.logsumexp(-1).square() * part
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
    correct = (counted & (argmax == targets[0])).sum()
    loss = token_loss * each
    # The mean of the cross-entropies is weighted by class weights, but the mean of the z-loss terms is not.
    if reduction == "mean":
        of_classes = part
        if weights is not None:
            of_classes = torch.stack(
                [p.to(logits.dtype) * weights[t.where(t != ignore_index, 0)] for t, p in zip(targets, parts)]
            ).sum(0)
        loss = (entropies * each).sum() / (each * of_classes).sum() + (z_terms * each).sum() / (
            each * part
        ).sum()
    elif reduction == "sum":
        loss = loss.sum()
    return CrossEntropyStats(loss, token_loss, lse, entropy, argmax, correct)


def reference_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    lora_A: Tensor | None = None,
    lora_B: Tensor | None = None,
    scaling: float = 1.0,
) -> Tensor:
    """Compute the logits of an output head, with LoRA if given, in plain PyTorch."""
    if isinstance(weight, QuantizedTensor):
        weight = weight.dequantize(hidden.dtype)
    logits = F.linear(hidden, weight, bias)
    if lora_A is not None and lora_B is not None:
        logits = logits + scaling * (hidden.to(lora_A.dtype) @ lora_A.T @ lora_B.T).to(logits.dtype)
    return logits


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    **options: Unpack[LinearCrossEntropyOptions],
) -> Tensor:
    """Compute ``linear_cross_entropy`` in plain PyTorch, with the whole logits in memory.

    The options filter_eps, weight_grad and upstream_grad are not accepted.
    """
    given: dict[str, Any] = {**options}
    head = {name: given.pop(name) for name in ("lora_A", "lora_B", "scaling") if name in given}
    logits = reference_logits(hidden, weight, bias, **head)
    return cross_entropy_reference(logits, target, **given).loss


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
    """Compute ``linear_distillation`` in plain PyTorch, with the whole logits of both models in memory."""
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
    """Compute the divergence from the logits (..., vocab) of student and teacher, in plain PyTorch."""
    student = (logits / temperature).log_softmax(-1)
    teacher = (teacher_logits.detach() / temperature).log_softmax(-1)

    def kl(p: Tensor, q: Tensor) -> Tensor:
        """Compute KL(p || q) for each token, where p and q are log-probabilities (..., vocab)."""
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
