"""Cross-entropy of a linear layer whose classes are sharded over the ranks of a process group."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from typing_extensions import TypedDict, Unpack

from shoestring.core.device import is_asynchronous
from shoestring.losses.linear_cross_entropy import operator_arguments

__all__ = ["linear_cross_entropy_shard", "vocab_parallel_linear_cross_entropy"]

REDUCTIONS = ("mean", "sum", "none")


class ShardOptions(TypedDict, total=False):
    """Keyword arguments of ``linear_cross_entropy_shard``, with the meaning of ``linear_cross_entropy``.

    softcap, logit_scale, scaling, workspace_mb: must be equal on every shard.
    lora_A: (rank, features), must be equal on every shard.
    lora_B: (classes of the shard, rank).
    weight_grad: a tensor with the shape of the shard's weight, to which backward adds the gradient of the
        shard's weight.
    """

    softcap: float
    logit_scale: float | Tensor
    lora_A: Tensor | None
    lora_B: Tensor | None
    scaling: float
    weight_grad: Tensor | None
    workspace_mb: int


class Shard(NamedTuple):
    """The contribution of one shard of the classes to the cross-entropy of each token.

    lse and target_logit have the shape of target, and are 0 for ignored tokens.

    lse: log-sum-exp of the token's logits over the classes of this shard.
    target_logit: the logit of the token's target; 0 if the target belongs to another shard.
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
    """Compute the part of ``linear_cross_entropy`` that one shard of the classes contributes.

    The caller combines the shards, with its own collectives. Let m be the maximum of lse over the shards. The
    global log-sum-exp is ``m + log(sum(exp(lse - m)))``, where the sum is over the shards. The loss of a
    token is the global log-sum-exp minus the sum of ``target_logit`` over the shards.

    Backward gives each shard the gradients of its weight and bias. The gradient of hidden is the sum of the
    gradients of all shards. The whole (tokens, classes) logits are never in memory; backward computes them
    again.

    Args:
        hidden: (..., features), the same on every shard.
        weight: (classes of the shard, features), for consecutive classes from ``first_class``; or a
            :class:`QuantizedTensor`.
        target: (...), int64, classes of the whole vocabulary or ``ignore_index``. A target that belongs to no
            shard is not detected here; ``vocab_parallel_linear_cross_entropy`` detects it.
        bias: (classes of the shard).
        first_class: the class of the first row of weight.
        ignore_index: as for ``linear_cross_entropy``.
        **options: see ``ShardOptions``.

    Returns:
        lse and target_logit, both differentiable, fp32 (fp64 for fp64).

    Raises:
        ValueError: an option needs the logits of other shards.
        RuntimeError: a shape or dtype does not fit.

    Example:
        >>> hidden, weight, target = torch.randn(3, 64), torch.randn(100, 64), torch.tensor([3, 59, 99])
        >>> first = shoestring.linear_cross_entropy_shard(hidden, weight[:50], target, first_class=0)
        >>> second = shoestring.linear_cross_entropy_shard(hidden, weight[50:], target, first_class=50)
        >>> loss = torch.logaddexp(first.lse, second.lse) - first.target_logit - second.target_logit
        >>> torch.allclose(loss.mean(), shoestring.linear_cross_entropy(hidden, weight, target), atol=1e-4)
        True
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
    """Compute ``linear_cross_entropy`` with the classes sharded over the ranks of a process group.

    Every rank must call this function, with the same options. Forward needs two all-reduces, of one and of
    three numbers per token. Backward needs one all-reduce of the gradient of hidden, in fp32. Every rank gets
    the same loss, and must run backward with the same upstream gradient. After backward, each rank has the
    whole gradients of hidden and lora_A, and the gradients of its own rows of weight, bias and lora_B. The
    method is Megatron-LM's vocabulary-parallel cross-entropy (arXiv 1909.08053).

    Args:
        hidden, weight, target, bias, ignore_index: as for ``linear_cross_entropy_shard``. hidden, target and
            token_weights are the same on every rank.
        group: the process group; None is the default group.
        first_class: the class of the first row of weight. None: all ranks hold the same number of classes, in
            the order of their ranks.
        reduction, z_loss, token_weights, shift: as for ``linear_cross_entropy``.
        **options: see ``ShardOptions``.

    Returns:
        A scalar, or the shape of target for ``reduction="none"``; fp32 (fp64 for fp64).

    Raises:
        ValueError: the reduction is unknown, token_weights has another shape than target, or an option needs
            the logits of other ranks.
        IndexError: a target belongs to no rank, or to several. On CUDA this is a device-side assertion.
        RuntimeError: a shape or dtype does not fit.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank
        >>> hidden, weight, target = torch.randn(3, 64), torch.randn(100, 64), torch.tensor([3, 59, 99])
        >>> shoestring.vocab_parallel_linear_cross_entropy(hidden, weight, target).shape
        torch.Size([])
        >>> dist.destroy_process_group()
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
    arguments = operator_arguments(hidden, weight, target, bias, **options)
    operator = torch.ops.shoestring._linear_cross_entropy_shard
    lse, target_loss = operator(**arguments, first_class=first, ignore_index=ignore_index)

    counted = target != ignore_index
    largest = lse.detach().clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    here = _owned(target, first, classes) & counted
    token_loss, owners = loss_of_shards(
        lse,
        target_loss,
        here,
        largest,
        z_loss,
        lambda terms: _Summed.apply(terms, group),  # type: ignore[no-untyped-call]
    )
    _check_owners(where, owners, counted)

    each = (
        counted.to(token_loss.dtype)
        if token_weights is None
        else token_weights.to(token_loss.dtype) * counted
    )
    loss = token_loss.masked_fill(~counted, 0) * each
    if reduction == "none":
        return loss
    return loss.sum() / each.sum() if reduction == "mean" else loss.sum()


def loss_of_shards(
    lse: Tensor,
    target_loss: Tensor,
    here: Tensor,
    largest: Tensor,
    z_loss: float,
    add: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and the number of shards that have its target.

    All terms are differences to ``largest``, since the loss may be small compared with the log-sum-exp.

    Args:
        lse, target_loss: the results of ``_linear_cross_entropy_shard``.
        here: whether the target of a token belongs to the shard.
        largest: the maximum of lse over the shards.
        z_loss: as for ``linear_cross_entropy``.
        add: returns the sum of a tensor (3, *lse.shape) over the shards.
    """
    from_largest = (largest - lse).masked_fill(~here, 0) + target_loss
    sums = add(torch.stack([(lse - largest).exp(), from_largest, here.to(largest.dtype)]))
    log_sum = sums[0].log()
    return log_sum + sums[1] + z_loss * (largest + log_sum).square(), sums[2].detach()


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
    """Check that each target class belongs to the shard of exactly one rank.

    Raises:
        IndexError: a target class belongs to no rank, or to several. On an accelerator an assertion on
            the device fails instead.
    """
    right = (owners == counted).all()
    message = f"{where}: target: expected each class to be one process's, received one that is none's, or several's; "
    message += "give first_class where processes hold unequally many"
    if is_asynchronous(right.device):
        torch._assert_async(right, message)
    elif not right:
        raise IndexError(message)


class _Replicated(torch.autograd.Function):
    """In forward, return the tensor unchanged; it is equal on all ranks.

    In backward, sum the gradients of the tensor over all ranks.
    """

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
    """In forward, sum a tensor over all ranks.

    In backward, pass on the gradient, which is the same on every rank.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
