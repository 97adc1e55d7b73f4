"""Cross-entropy of a linear layer whose classes are split over processes, or over whatever else the caller has."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from typing_extensions import TypedDict, Unpack

from shoestring.losses.linear_cross_entropy import operator_arguments

REDUCTIONS = ("mean", "sum", "none")


class ShardOptions(TypedDict, total=False):
    """Keyword arguments of ``linear_cross_entropy_shard`` that go to each shard, as for ``linear_cross_entropy``.

    softcap, logit_scale, scaling, workspace_mb: the same on every shard.
    lora_A: (rank, features), the same on every shard; lora_B: (classes here, rank).
    weight_grad: the shape of the weight here: its gradient is added to it.
    """

    softcap: float
    logit_scale: float | Tensor
    lora_A: Tensor | None
    lora_B: Tensor | None
    scaling: float
    weight_grad: Tensor | None
    workspace_mb: int


class Shard(NamedTuple):
    """What a shard of the classes knows of each token, in target's shape; 0 where the token is ignored.

    lse: log-sum-exp of its logits of the classes here.
    target_logit: the logit of its target, 0 where the target is elsewhere.
    """

    lse: Tensor
    target_logit: Tensor


def linear_cross_entropy_shard(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    first_class: int,
    ignore_index: int = -100,
    **options: Unpack[ShardOptions],
) -> Shard:
    """One shard's part of ``linear_cross_entropy``: the caller puts the parts together, by collectives of its own.

    With m the maximum of lse over the shards, the global log-sum-exp is ``m + log(sum(exp(lse - m)))`` over them, and a
    token's loss is that less the sum of ``target_logit``. Differentiating it gives weight's and bias's gradients of
    each shard; hidden's is the sum of what the shards have. The (tokens, classes) logits never exist; the backward
    pass computes them again.

    Args:
        hidden: (..., features), the same on every shard.
        weight: (classes here, features), classes ``first_class`` and following; or a :class:`QuantizedTensor`.
        target: (...), int64, classes of the whole vocabulary or ``ignore_index``. One that no shard has is not noticed
            here: ``vocab_parallel_linear_cross_entropy`` does.
        bias: (classes here).
        first_class: the class of weight's first row.
        ignore_index: as for ``linear_cross_entropy``.
        **options: see ``ShardOptions``.

    Returns:
        lse and target_logit, both differentiable, fp32 (fp64 for fp64).

    Raises:
        ValueError: an option that needs the logits of other shards.
        RuntimeError: a shape or dtype that does not fit.
    """
    _refuse_unknown("linear_cross_entropy_shard", options)
    arguments = operator_arguments(hidden, weight, target, bias, **options)
    operator = torch.ops.shoestring.linear_cross_entropy_shard
    return Shard(*operator(**arguments, first_class=first_class, ignore_index=ignore_index))


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    first_class: int | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    shift: bool = False,
    **options: Unpack[ShardOptions],
) -> Tensor:
    """``linear_cross_entropy`` with the classes split over the processes of a group, which all call it alike.

    Two all-reduces forward, of one and three numbers a token, and in backward one of hidden's gradient, in fp32. Every
    process gets the same loss and has to differentiate it with the same upstream gradient; it then has the whole
    gradient of hidden and lora_A, and that of its own rows of weight, bias and lora_B.

    Args:
        hidden, weight, target, bias, ignore_index: as for ``linear_cross_entropy_shard``. hidden, target and
            token_weights are the same in every process.
        group: the processes; None is the default group.
        first_class: the class of weight's first row. None: processes hold equally many, in the order of their ranks.
        reduction, z_loss, token_weights, shift: as for ``linear_cross_entropy``.
        **options: see ``ShardOptions``.

    Returns:
        A scalar, or target's shape for ``reduction="none"``; fp32 (fp64 for fp64).

    Raises:
        ValueError: an unknown reduction, or an option that needs logits of other processes.
        IndexError: a target that is no process's, or more than one's; on CUDA, an assertion on the device.
        RuntimeError: a shape or dtype that does not fit.

    The method is that of Megatron-LM's vocabulary-parallel cross-entropy (arXiv 1909.08053).
    """
    where = "vocab_parallel_linear_cross_entropy"
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"{where}: reduction: expected one of {', '.join(REDUCTIONS)}, received {reduction!r}"
        )
    if token_weights is not None and token_weights.shape != target.shape:
        expected, received = tuple(target.shape), tuple(token_weights.shape)
        raise ValueError(f"{where}: token_weights: expected shape {expected}, received {received}")
    _refuse_unknown(where, options)
    classes = weight.shape[0]
    first = dist.get_rank(group) * classes if first_class is None else first_class
    if shift:
        target = torch.cat([target[..., 1:], torch.full_like(target[..., :1], ignore_index)], -1)
    hidden = _Replicated.apply(hidden, group)  # type: ignore[no-untyped-call]
    for name in ("lora_A", "logit_scale"):
        if isinstance(options.get(name), Tensor):
            options[name] = _Replicated.apply(options[name], group)  # type: ignore[no-untyped-call]
    part = linear_cross_entropy_shard(
        hidden, weight, target, bias, first_class=first, ignore_index=ignore_index, **options
    )

    counted = target != ignore_index
    largest = part.lse.detach().clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    owners = (_owned(target, first, classes) & counted).to(largest.dtype)
    terms = torch.stack([(part.lse - largest).exp(), part.target_logit, owners])
    sums = _Summed.apply(terms, group)  # type: ignore[no-untyped-call]
    _check_owners(where, sums[2].detach(), counted)
    lse = largest + sums[0].log()
    token_loss = torch.where(counted, lse - sums[1] + z_loss * lse.square(), 0)

    each = counted.to(lse.dtype) if token_weights is None else token_weights.to(lse.dtype) * counted
    loss = token_loss * each
    if reduction == "none":
        return loss
    return loss.sum() / each.sum() if reduction == "mean" else loss.sum()


def _owned(target: Tensor, first_class: int, classes: int) -> Tensor:
    return (target >= first_class) & (target < first_class + classes)


def _refuse_unknown(where: str, options: Any) -> None:
    for name in options:
        if name not in ShardOptions.__annotations__:
            known = ", ".join(ShardOptions.__annotations__)
            raise ValueError(
                f"{where}: {name}: not possible on a shard of the classes; expected {known}; leave it out, or use "
                "linear_cross_entropy with the whole weight"
            )


def _check_owners(where: str, owners: Tensor, counted: Tensor) -> None:
    """Each target belongs to one process: else it is out of range, or shards overlap."""
    right = (owners == counted).all()
    message = f"{where}: target: expected each class to be one process's, received one that is none's, or several's; "
    message += "give first_class where processes hold unequally many"
    if right.is_cuda:
        torch._assert_async(right, message)
    elif not right:
        raise IndexError(message)


class _Replicated(torch.autograd.Function):
    """What every process has alike: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True).contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.to(grad.dtype), None


class _Summed(torch.autograd.Function):
    """The sum over processes, which all go on alike: each has the gradient of the sum already."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
