"""Give each process a part of the experts, and send it the tokens that choose them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoestring.core.module_argument import check_module
from shoestring.core.presence import expect_here
from shoestring.core.stacks import EXCHANGE, OF_ONE_PROCESS, reads_stacks, stacks_of
from shoestring.distributed.groups import group_or_default
from shoestring.quantization.quantized_tensor import QuantizedTensor, join_rows

CALLER = "expert_parallel"


@dataclass
class ExpertParallelReport:
    """The changes that :func:`expert_parallel` has made; ``undo`` reverts them.

    Attributes:
        modules: the modules of experts that have a part of their experts now, by name.
        ranks: the number of processes.
        experts: the number of experts that a process has, in all modules together.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> report = shoestring.expert_parallel(shoestring.nn.MoE(16, 24, experts=8, top_k=2))
        >>> list(report.modules), report.ranks, report.experts
        (['experts'], 1, 8)
        >>> report.undo()
        >>> dist.destroy_process_group()
    """

    modules: dict[str, nn.Module]
    ranks: int
    experts: int
    _group: dist.ProcessGroup
    _undo: list[Callable[[], None]] = field(default_factory=list, init=False, repr=False)

    @torch.no_grad()
    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Clip the gradients of all processes together, as ``torch.nn.utils.clip_grad_norm_`` does in one with all experts.

        Call it on all processes, after the gradients of the parameters that all have are averaged.

        Args:
            parameters: all trained parameters of the model. Those without a gradient do not count.
            max_norm: the largest norm.

        Returns:
            The norm before clipping, the same on all processes.
        """
        own = {p for module in self.modules.values() for p in module.parameters()}
        grads = [(int(p in own), p.grad) for p in parameters if p.grad is not None]
        device = next(iter(own)).device
        squares = torch.zeros(
            2, dtype=torch.float64, device=device
        )  # of the parameters of all, and of the experts
        for of_experts, grad in grads:
            squares[of_experts] += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
        dist.all_reduce(squares[1:], group=self._group)
        norm = squares.sum().sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for _, grad in grads:
            grad.mul_(factor.to(grad.dtype))
        return norm

    def undo(self) -> None:
        """Give the modules all their experts again, with the values that the processes have now. Call it on all of them.

        The parameters are new tensors, so make new optimizers after it. A second call does nothing.
        """
        while self._undo:
            self._undo.pop()()


def expert_parallel(model: nn.Module, group: dist.ProcessGroup | None = None) -> ExpertParallelReport:
    """Split the experts of a model over processes, in place: each keeps an equal part, and computes it for all tokens.

    A process routes its own tokens. Each token then travels once to each process that has some of its experts, and the
    weighted sums of their results travel back (GShard, arXiv 2006.16668), in both directions of a pass by all-to-all
    with uneven parts. The experts are those of ``nn.Experts`` and ``nn.MoE``, and of models of transformers after
    :func:`register_experts` or ``patch``. The MLP ``shared`` of ``nn.MoE`` computes while its tokens travel.

    Gradients of experts are the mean over the processes of the gradients of their losses, so they have the scale of all
    other gradients once these are averaged. ``parallelize(model, "ddp")`` averages the others and leaves the experts
    out. Clip by ``clip_grad_norm_`` of the report: an optimizer with ``max_grad_norm`` refuses to step. Without "ddp", average the others yourself, for example by :func:`shoestring.distributed.mean_over_ranks`.

    All processes must call forward and backward of the model equally often. Recomputation by ``shoestring.checkpoint``
    sends the same tokens again.

    Args:
        model: a model with the same whole experts on all processes. Call this before adapters are added, before
            ``parallelize``, and before the optimizer is made. Parameters of the experts are new tensors, of
            experts / ranks experts each. Codes of quantised stacks are split, too.
        group: the processes; None for all.

    Returns:
        What has changed. ``state_dict`` has the experts of this process alone; ``undo`` brings all of them together.

    Raises:
        ValueError: the model has no such experts, or experts with adapters or other parameters, their number is not
            divisible by that of the processes, or they are split already.
        RuntimeError: no process group was initialised, or this process is not in the group.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> moe = shoestring.nn.MoE(16, 24, experts=8, top_k=2, shared_hidden=24)
        >>> report = shoestring.expert_parallel(moe)
        >>> y, route = moe(torch.randn(10, 16))
        >>> y.square().mean().backward()
        >>> dist.destroy_process_group()
    """
    check_module(CALLER, model)
    group = group_or_default(group, CALLER)
    if dist.get_rank(group) < 0:
        raise RuntimeError(f"{CALLER}: group: expected a group with this process, received one without")
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    modules = {name: m for name, m in model.named_modules() if reads_stacks(m) and any(stacks_of(m))}
    if not modules:
        raise ValueError(
            f"{CALLER}: model: expected nn.Experts, or experts of transformers after register_experts or patch, received a "
            f"{type(model).__name__} without; call shoestring.patch(model) first"
        )
    parts = {name: _part(name, module, rank, ranks) for name, module in modules.items()}
    expect_here(CALLER, model, tuple(modules))
    counts = {name: next(stacks_of(module))[1].shape[0] // ranks for name, module in modules.items()}
    report = ExpertParallelReport(modules, ranks, sum(counts.values()), group)
    for name, module in modules.items():
        module._parameters.update(parts[name])
        exchange = Exchange(module, counts[name], group)
        module.__dict__[EXCHANGE] = exchange
        module.__dict__["forward"] = functools.partial(_forward, exchange)
        report._undo.append(functools.partial(_join, module, group))
    return report


def _part(name: str, module: nn.Module, rank: int, ranks: int) -> dict[str, nn.Parameter]:
    """Return this process's part of each parameter of a module of experts."""
    if EXCHANGE in module.__dict__:
        raise ValueError(
            f"{CALLER}: model: expected whole experts, received {name}, which processes have split already"
        )
    experts = next(stacks_of(module))[1].shape[0]
    if experts % ranks:
        raise ValueError(
            f"{CALLER}: model: expected a number of experts that is divisible by the {ranks} processes, received {experts} in "
            f"{name}"
        )
    own: dict[str, nn.Parameter] = {}
    for key, parameter in module.named_parameters(remove_duplicate=False):
        if "." in key or parameter.dim() < 2 or parameter.shape[0] != experts:
            raise ValueError(
                f"{CALLER}: model: expected experts whose parameters are stacks of {experts}, received {name}.{key} of shape "
                f"{tuple(parameter.shape)}; add adapters after this call"
            )
        count = experts // ranks
        part = parameter.detach()[rank * count : (rank + 1) * count].clone()
        own[key] = nn.Parameter(part, requires_grad=parameter.requires_grad)
    return own


def _join(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Give a module of experts whole parameters again."""
    for key, parameter in module.named_parameters(recurse=False):
        module._parameters[key] = nn.Parameter(
            _gathered(parameter.detach(), group), requires_grad=parameter.requires_grad
        )
    del module.__dict__[EXCHANGE], module.__dict__["forward"]


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    if isinstance(part, QuantizedTensor):
        packed, absmax = (_gathered_list(tensor, group) for tensor in (part.packed, part.absmax))
        nested = [None] * len(packed) if part.nested is None else _gathered_list(part.nested, group)
        return join_rows([part._of(*of_rank, part.shape) for of_rank in zip(packed, absmax, nested)])
    return torch.cat(_gathered_list(part, group))


def _gathered_list(part: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    found = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, part.contiguous(), group=group)
    return found


@dataclass
class Sent:
    """Tokens on their way to the processes of their experts, and what is needed to bring the results back."""

    shape: torch.Size  # of x
    rows: Tensor  # the token of each row that was sent
    index: Tensor  # of the rows that arrive: their experts on this process, or -1
    x: Tensor
    weight: Tensor
    out: list[int]  # numbers of rows for each process
    into: list[int]  # numbers of rows from each process
    works: list[Any]


class Exchange:
    """Sends tokens of a module of experts to the processes that have them, and brings the results back."""

    def __init__(self, module: nn.Module, experts: int, group: dist.ProcessGroup) -> None:
        self.module, self.experts, self.group = module, experts, group
        self.ranks = dist.get_world_size(group)

    def send(self, x: Tensor, index: Tensor, weight: Tensor) -> Sent:
        """Start to send tokens. ``receive`` must follow.

        Args:
            x: (..., features).
            index: (..., top_k), int64: experts of all processes; -1 is no expert.
            weight: (..., top_k).
        """
        for parameter in self.module.parameters():  # adapters may be new
            setattr(parameter, OF_ONE_PROCESS, True)
        tokens, top_k = x.reshape(-1, x.shape[-1]), index.shape[-1]
        index, weight = index.reshape(-1, top_k), weight.reshape(-1, top_k)
        total = self.experts * self.ranks
        if not index.device.type == "meta" and bool(((index < -1) | (index >= total)).any()):
            raise RuntimeError(f"{CALLER}: index: expected -1 to {total - 1}, received others")
        owner = index.div(self.experts, rounding_mode="floor")  # -1 stays -1
        ranks = torch.arange(self.ranks, device=x.device)
        hits = (owner.unsqueeze(-1) == ranks).any(1)  # (tokens, ranks)
        to, rows = hits.t().nonzero(as_tuple=True)
        local = index[rows] - to.unsqueeze(1) * self.experts
        elsewhere = owner[rows] != to.unsqueeze(1)
        counts = hits.sum(0)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        out, into = counts.tolist(), arriving.tolist()
        local = local.masked_fill(elsewhere, -1)
        index_there = local.new_empty(sum(into), top_k)
        works = [dist.all_to_all_single(index_there, local, into, out, group=self.group, async_op=True)]
        weights = weight[rows].masked_fill(elsewhere, 0)
        found: tuple[Tensor, Tensor] = _Send.apply(  # type: ignore[no-untyped-call]
            tokens[rows], weights, self, out, into, works
        )
        # The tensors on their way must live until they have arrived.
        works.append(_Kept((local, weights)))
        return Sent(x.shape, rows, index_there, *found, out, into, works)

    def receive(self, sent: Sent) -> Tensor:
        """Compute the experts of this process for the tokens that have arrived, and bring the results of its own tokens."""
        for work in sent.works:
            work.wait()
        y = type(self.module).forward(self.module, sent.x, sent.index, sent.weight)
        back: Tensor = _Return.apply(y, self, sent.into, sent.out)  # type: ignore[no-untyped-call]
        tokens = sent.shape[:-1].numel()
        wide = torch.promote_types(back.dtype, torch.float32)
        sums = back.new_zeros(tokens, back.shape[-1], dtype=wide).index_add(0, sent.rows, back.to(wide))
        return sums.to(back.dtype).view(*sent.shape[:-1], back.shape[-1])

    def exchange(self, x: Tensor, out: list[int], into: list[int]) -> tuple[Tensor, Any]:
        """Send ``out`` rows of x to each process; return the tensor for the ``into`` rows from each, and the work."""
        x = x.contiguous()
        received = x.new_empty(sum(into), *x.shape[1:])
        work = dist.all_to_all_single(received, x, into, out, group=self.group, async_op=True)
        return received, _Kept((x,), work)


class _Kept:
    """Keeps tensors alive until a collective has read them."""

    def __init__(self, tensors: tuple[Tensor, ...], work: Any = None) -> None:
        self.tensors, self.work = tensors, work

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


class _Send(torch.autograd.Function):
    """Sends tokens and weights to the processes of the experts, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        exchange: Exchange,
        out: list[int],
        into: list[int],
        works: list[Any],
    ) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.out, ctx.into = exchange, out, into
        (x, first), (weight, second) = exchange.exchange(x, out, into), exchange.exchange(weight, out, into)
        works += [first, second]
        return x, weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found = [ctx.exchange.exchange(grad, ctx.into, ctx.out) for grad in grads]
        for _, work in found:
            work.wait()
        # _Return has divided the gradients by the number of processes for the experts alone.
        return (*(grad * ctx.exchange.ranks for grad, _ in found), None, None, None, None)


class _Return(torch.autograd.Function):
    """Brings results back to the processes of the tokens, and sends their gradients, divided by the number of processes."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, exchange: Exchange, out: list[int], into: list[int]) -> Tensor:
        ctx.exchange, ctx.out, ctx.into = exchange, out, into
        back, work = exchange.exchange(y, out, into)
        work.wait()
        return back

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad, work = ctx.exchange.exchange(grads[0] / ctx.exchange.ranks, ctx.into, ctx.out)
        work.wait()
        return grad, None, None, None


def _forward(exchange: Exchange, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    return exchange.receive(exchange.send(x, index, weight))
