"""One parameter for the ways in which processes train one model together."""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shoestring.checkpoint.weights import is_place
from shoestring.core.dtensors import is_dtensor
from shoestring.core.module_argument import check_module
from shoestring.core.process_memory import spare_bytes
from shoestring.core.save_pretrained import watch
from shoestring.core.stacks import EXCHANGE
from shoestring.distributed.groups import (
    backends,
    broadcast_module,
    group_or_default,
    name_collectives,
    plain_tensors,
    start_group,
)
from shoestring.distributed.shard import split_steps
from shoestring.optim.base import SPLITS_STEPS, LowMemoryOptimizer

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # environment variables that torchrun sets
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
COMPRESS = ("8bit", "4bit", "1bit", "powersgd")
STATE = 2 + 2 * 4 / 256  # bytes of the state of AdamW in 8 bits, for each trained element
FILLED = 0.5  # the part of the memory that weights, gradients and state may take, with "auto"


@dataclass(frozen=True)
class RankBytes:
    """The bytes of a rank between two steps: weights, gradients, and the state of AdamW in 8 bits.

    Compressed gradients add residuals.

    Attributes:
        weights: the bytes of parameters and buffers.
        gradients: the bytes of gradients.
        state: the bytes of the optimizer.
        residual: the bytes of what the codes of compressed gradients have left out.

    Example:
        >>> from shoestring.distributed import RankBytes
        >>> RankBytes(weights=4096, gradients=4096, state=2080).total
        10272
    """

    weights: int
    gradients: int
    state: int
    residual: int = 0

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.weights + self.gradients + self.state + self.residual


@dataclass
class ParallelReport:
    """The changes that ``parallelize`` has made; ``undo`` reverts them.

    Attributes:
        strategy: "ddp", "zero1", "zero2", "zero3" or "hsdp"; "none" if there is one process that is not in a
            process group.
        ranks: the number of processes.
        rank_bytes: the bytes of the first rank.
        reason: why "auto" has chosen this strategy; empty if it was given.
        compress: how gradients are compressed, or None.
        offload: where the parts of a rank are, or None for the device of the model.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(64, 8)
        >>> report = shoestring.parallelize(model, "zero1")
        >>> report.strategy, report.ranks
        ('zero1', 1)
        >>> optimizer = shoestring.optim.AdamW(model.parameters())
        >>> report.undo()
        >>> dist.destroy_process_group()
    """

    strategy: str
    ranks: int
    rank_bytes: RankBytes
    reason: str = ""
    compress: str | None = None
    offload: str | None = None
    _model: nn.Module | None = field(default=None, init=False, repr=False)
    _undo: list[Callable[[], None]] = field(default_factory=list, init=False, repr=False)
    _optimizers: list[LowMemoryOptimizer] = field(default_factory=list, init=False, repr=False)
    _sends: bool = field(default=True, init=False, repr=False)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, backward adds gradients up on the rank, without sending them.

        Use it around forward and backward of every micro-batch of a step but the last.
        """
        before = self._sends
        with ExitStack() as stack:
            stack.callback(setattr, self, "_sends", before)
            self._sends = False
            if self.strategy == "zero2":
                for optimizer in self._optimizers:
                    stack.enter_context(optimizer.accumulate())
            elif self.strategy != "none":
                model: Any = self._model
                model.set_requires_gradient_sync(False)
                stack.callback(model.set_requires_gradient_sync, True)
            yield

    def undo(self) -> None:
        """Give the model whole parameters and its own class again. A second call does nothing.

        All ranks must call it between the same collectives. With "zero3" and "hsdp", the parameters are new
        tensors. Make new optimizers after it: those that were made in between refuse to step with "zero1" and "zero2".
        """
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        per_rank = self.rank_bytes
        lines = [
            f"{self.strategy} over {self.ranks} ranks",
            f"a rank: {per_rank.weights:,} bytes of weights, {per_rank.gradients:,} of gradients, {per_rank.state:,} of the "
            "state of AdamW in 8 bits",
        ]
        if self.compress is not None:
            lines.append(
                f"gradients are sent by {self.compress}; a rank keeps {per_rank.residual:,} bytes of residuals"
            )
        if self.offload == "cpu":
            lines.append("weights, gradients and state are in host memory")
        elif self.offload is not None:
            lines.append(
                f"weights are in a file in {self.offload.removeprefix('nvme:')}; the kernel takes their pages back when "
                "memory is short"
            )
        return "\n".join(lines + [self.reason] * bool(self.reason))


def parallelize(
    model: nn.Module,
    strategy: str = "auto",
    *,
    mesh: DeviceMesh | tuple[int, ...] | None = None,
    compress: str | None = None,
    offload: str | None = None,
    find_unused: bool = False,
) -> ParallelReport:
    """Prepare a model in place for training by all processes of the default process group.

    If there is no group yet and torchrun has started the processes, the function starts the group, with Gloo for the CPU
    and the default backend of the model's device. The group ends with the program.

    Each process trains on its own part of each batch, and calls it with the same model. Rank 0's parameters
    and buffers are copied to all ranks first. Gradients are averaged over the ranks. Make the optimizer
    after this call. With "ddp", "zero1" and "zero2", each backward that sends gradients ends with a copy of rank
    0's running statistics, the buffers of BatchNorm, to all ranks.

    =======  ==============================================================  ================================
    name     what is split over N ranks                                      bytes of a rank
    =======  ==============================================================  ================================
    "ddp"    nothing (PyTorch's DistributedDataParallel)                     W + G + S
    "zero1"  the optimizer's state and steps (``shard``)                     W + G + S / N
    "zero2"  state, steps and gradients                                      W + (G + S) / N + buckets
    "zero3"  weights, too (PyTorch's ``fully_shard``, by blocks)             (W + G + S) / N + a whole block
    "hsdp"   as "zero3" over the last dimension of the mesh, with replicas   as "zero3", N of that dimension
             over the first
    =======  ==============================================================  ================================

    W, G and S are the bytes of the weights, of the gradients, and of the optimizer's state.

    "zero1" and "zero2" split the steps of each optimizer of ``shoestring.optim`` that is made of the
    parameters afterwards, and a forward without such an optimizer raises. With "zero2", ``.grad`` is None
    after backward: clip with the optimizer's ``max_grad_norm``. "zero3" and "hsdp" take any optimizer that
    accepts DTensors.

    ``compress`` sends gradients in few bits, for links that are slower than backward. Each rank adds what the
    codes leave out, the residual, to the gradients of its next step. All ranks get the same bits.

    ==========  ==============================  ===============================  ==========================
    name        bytes a parameter on the link,  with "zero2", "zero3"            bytes of residuals a
                x (N - 1) / N                                                    parameter
    ==========  ==============================  ===============================  ==========================
    None        8 in fp32, 4 in bf16            4 in fp32, 2 in bf16             0
    "8bit"      2.03                            1.02                             4 + 4 / N ("zero2": 4)
    "4bit"      1.06                            0.53                             the same
    "1bit"      0.28                            0.14                             the same
    "powersgd"  8 * 4 (m + n) / (m n) for a     not possible                     that of a gradient
                matrix (m, n)
    ==========  ==============================  ===============================  ==========================

    "hsdp" compresses the second reduction alone, in which the M replicas average the 1 / N of the parameters that a
    rank has: the link between machines takes the bytes of the first column x (M - 1) / M, and residuals have
    4 + 4 / M bytes, each for this part. Gradients stay whole within a machine. DTensors have the mesh of one machine.

    "powersgd" is PyTorch's PowerSGD of rank 4 after ten plain steps. Weights that "zero1", "zero2", "zero3" and
    "hsdp" send are not compressed. A checkpoint has no residuals, so a resumed run loses what its last step has left
    out. In one process nothing is sent or compressed.

    Of a model whose experts :func:`expert_parallel` has split, "ddp" averages the gradients of the other parameters.
    The other strategies refuse it.

    ``offload`` says where "zero3" and "hsdp" keep the parts of a rank; a gathered block is on the device of the
    model. The other strategies keep whole weights; give ``offload`` to the optimizer there.

    ==========  =====================================  =============================  ============================
    offload     weights of a rank                      gradients                      steps
    ==========  =====================================  =============================  ============================
    None        on the device                          on the device                  by the device
    "cpu"       in pinned host memory                  in pinned host memory          by the CPU
    "nvme:DIR"  in a file without a name in the        in host memory                 by the CPU
                folder DIR
    ==========  =====================================  =============================  ============================

    With "nvme:DIR", weights are mapped memory: the kernel reads their pages when they are used, and takes them
    back when memory is short. Optimizers, state dicts and files work as without it. An optimizer with
    ``offload="nvme:DIR"`` has its state in a file, too, and with ``step_in_backward`` gradients go as soon as a
    block has them. A disk that cannot read a page ends the process (SIGBUS).

    Args:
        model: the model, on its device.
        strategy: one of the names, or "auto" for the first of "ddp", "zero1", "zero2" and "zero3" with which
            weights, gradients and the state of AdamW in 8 bits fill at most half of a rank's memory.
        mesh: for "zero3" and "hsdp", the mesh of the ranks, or its shape. The default is one dimension for
            "zero3", and (machines, processes of a machine) for "hsdp".
        compress: how gradients are compressed: "8bit", "4bit", "1bit" or, for "ddp" and "zero1", "powersgd";
            None for not at all. Trained parameters must be in fp32, bf16 or fp16.
        offload: where weights are with "zero3" and "hsdp": None, "cpu" for a model on a GPU, or "nvme:DIR".
            "auto" takes "zero3" with it.
        find_unused: whether a backward may leave trained parameters without a gradient, with "ddp", "zero1" and
            "zero2". With "ddp" and "zero1", a parameter that no rank uses has no gradient, and is not stepped. "zero2"
            sends zeros for it, so moments and weight decay go on. With "zero3" and "hsdp", all ranks may leave out the
            same parameters without this option. If they leave out different ones, gradients are wrong, with an error only
            where the numbers of elements differ.
            Give it, and call this function before parameters are frozen, if a later step trains them. A forward with a
            trained parameter that "ddp" and "zero1" do not average raises.

    Raises:
        TypeError: gradients of a trained parameter's dtype cannot be compressed.
        ValueError: the strategy, ``compress`` or ``offload`` is unknown, or they or ``find_unused`` do not go together, the mesh does not
            have as many ranks as there are processes or has other dimensions than the strategy needs, or no names for
            two dimensions, it is given to a strategy without one, no parameter requires a gradient, the rows of a
            quantised weight are not whole blocks and "zero3" or "hsdp" has to split them, or the model is parallel
            already.
        RuntimeError: no process group was initialised although the environment is that of several processes and
            not that of torchrun, the processes do not connect, the parameters of the ranks differ, or the folder of ``offload`` has no room.

    Source: ZeRO, arXiv 1910.02054; ZeRO-Infinity, arXiv 2104.07857; error feedback of both hops: DoubleSqueeze,
    arXiv 1905.05957; PowerSGD, arXiv 1905.13727.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(64, 8)
        >>> report = shoestring.parallelize(model, "zero2")
        >>> optimizer = shoestring.optim.AdamW(model.parameters(), max_grad_norm=1.0)
        >>> model(torch.randn(4, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> dist.destroy_process_group()
    """
    check_module("parallelize", model)
    watch()
    if strategy not in ("auto", *STRATEGIES):
        _refuse("strategy", f"auto, {', '.join(STRATEGIES)}", repr(strategy))
    if not any(p.requires_grad for p in model.parameters()):
        _refuse("model", "parameters that require gradients", "none")
    if compress is not None:
        _check_compress(model, compress)
    if offload is not None:
        _check_offload(model, strategy, offload)
    from shoestring.distributed import composable  # imports much of torch.distributed

    if composable.is_parallel(model) or any(hasattr(p, SPLITS_STEPS) for p in model.parameters()):
        _refuse("model", "a model of one process", "one that is parallel already; call undo() of its report")
    if not (dist.is_available() and dist.is_initialized()) and os.environ.get("WORLD_SIZE", "1") == "1":
        if offload is not None:
            _refuse(
                "offload",
                "a process group",
                "none in one process. Use shoestring.offload_weights, or call init_process_group.",
            )
        if mesh is not None:
            _check_mesh(strategy, mesh, 1)
        return ParallelReport("none", 1, needed(model, "ddp", 1), "there is one process")
    _start_group(model)
    group = group_or_default(None, "parallelize")
    ranks = dist.get_world_size(group)
    reason = ""
    if strategy == "auto" and offload is not None:
        strategy, reason = "zero3", "offload needs split weights"
    elif strategy == "auto":
        strategy, reason = choose(model, ranks, compress)
    if split_experts(model):
        if reason:
            strategy, reason = "ddp", "the processes have split the experts"
        if strategy != "ddp":
            _refuse(
                "strategy", "'ddp' for a model whose experts the processes have split", f"{strategy!r}, which splits weights or "
                "steps, too"
            )  # fmt: skip
    _check_together(strategy, compress, find_unused)
    grid = _mesh(model, strategy, mesh, ranks)
    split = grid.size(grid.ndim - 1) if grid is not None else ranks
    replicas = ranks // split
    if grid is not None:
        check_rows(model, split)
        _check_read(model, strategy)
    if compress is not None and strategy == "hsdp" and replicas == 1 < ranks:
        _refuse(
            "compress",
            "several machines with 'hsdp', which compresses gradients between machines alone",
            f"{compress!r} with a mesh of (1, {ranks}). Pass another mesh, or use 'zero3'.",
        )
    needs = needed(model, strategy, split, compress, replicas)
    report = ParallelReport(strategy, ranks, needs, reason, compress, offload)
    report._model = model
    report._undo.append(name_collectives(group, *(grid.get_all_groups() if grid is not None else ())))
    try:
        _apply(model, report, grid, find_unused)
    except BaseException:
        report.undo()
        raise
    return report


def split_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules of experts that the processes have split (``expert_parallel``)."""
    return [module for module in model.modules() if EXCHANGE in module.__dict__]


def _start_group(model: nn.Module) -> None:
    """Start the group of all processes that torchrun has started, unless the program has done so."""
    if dist.is_initialized() or any(name not in os.environ for name in TORCHRUN):
        return
    device = next(model.parameters()).device
    if device.type not in ("cpu", "meta"):
        torch.accelerator.set_device_index(device)
    try:
        start_group(backends("cpu" if device.type == "meta" else device.type))
    except (ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise RuntimeError(
            f"parallelize: the processes do not connect: {reason}; start the program with torchrun"
        ) from None
    # A group that is left at exit keeps threads, which may end the process with an error.
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def _apply(
    model: nn.Module, report: ParallelReport, mesh: DeviceMesh | None, find_unused: bool = False
) -> None:
    """Apply the strategy of a report to a model."""
    from shoestring.distributed import composable
    from shoestring.distributed import compress as hooks

    broadcast_module(model)
    report._undo.append(_refuse_wrappers(model))
    group, compress = group_or_default(None, "parallelize"), report.compress
    if mesh is not None:
        prepare = None
        if compress is not None and mesh.ndim == 1:
            prepare = partial(hooks.compress_reduce_scatter, hooks.compressor(mesh.get_group(), compress))
        elif compress is not None:
            prepare = partial(hooks.compress_all_reduce, hooks.compressor(mesh.get_group(0), compress))
            # fully_shard does not average over replicas that it does not know.
            assert mesh.mesh_dim_names is not None
            mesh = mesh[mesh.mesh_dim_names[1]]
        report._undo.append(composable.shard_fully(model, mesh, prepare, report.offload))
        return
    if report.strategy != "zero2":
        hook = None
        if compress == "powersgd":
            hook = hooks.powersgd_hook(group)
        elif compress is not None:
            hook = hooks.all_reduce_hook(hooks.compressor(group, compress))
        report._undo.append(composable.replicate(model, hook, find_unused, split_experts(model)))
    if report.strategy != "ddp":
        report._undo.append(_split_steps(model, report, find_unused))
    report._undo.append(composable.share_statistics(model, group, lambda: report._sends))


def _check_compress(model: nn.Module, compress: str) -> None:
    """Raise unless gradients of the model can be compressed in this way."""
    if compress not in COMPRESS:
        _refuse("compress", f"None, {', '.join(COMPRESS)}", repr(compress))
    for name, p in model.named_parameters():
        if p.requires_grad and p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(
                f"parallelize: compress: expected trained parameters in fp32, bf16 or fp16, received {name} in {p.dtype}. "
                "Convert it, or leave compress out."
            )


def _check_offload(model: nn.Module, strategy: str, offload: str) -> None:
    """Raise unless a strategy can keep the weights of a model where ``offload`` says."""
    if not is_place(offload):
        _refuse("offload", "None, cpu or nvme:DIR", repr(offload))
    if strategy not in ("auto", "zero3", "hsdp"):
        _refuse(
            "offload",
            f"None with {strategy!r}, which keeps whole weights",
            f"{offload!r}. Use 'zero3', or give offload to the optimizer.",
        )
    device = next(model.parameters()).device.type
    if offload == "cpu" and device == "cpu":
        _refuse(
            "offload",
            "nvme:DIR for a model on the CPU, whose weights are in host memory already",
            f"{offload!r}",
        )


def _check_together(strategy: str, compress: str | None, find_unused: bool) -> None:
    """Raise unless the strategy can compress gradients in this way, and has the option ``find_unused``."""
    if find_unused and strategy in ("zero3", "hsdp"):
        _refuse(
            "find_unused",
            f"False with {strategy!r}, whose ranks may all leave out the same parameters without it",
            "True. Use 'ddp', 'zero1' or 'zero2' if the ranks leave out different ones.",
        )
    if compress == "powersgd" and strategy not in ("ddp", "zero1"):
        _refuse(
            "compress",
            f"8bit, 4bit or 1bit with {strategy!r}, since PowerSGD needs whole gradients",
            f"{compress!r}. Or use 'ddp' or 'zero1'.",
        )


def needed(
    model: nn.Module, strategy: str, ranks: int, compress: str | None = None, replicas: int = 1
) -> RankBytes:
    """Return the bytes of the rank that has the most, without buckets and gathered blocks.

    ``ranks`` is the number of ranks that split what the strategy splits, and ``replicas`` that of the replicas of "hsdp".
    """
    weights = trained = gradients = whole = 0
    for name, p in model.named_parameters():
        nbytes = sum(t.nbytes for _, t in plain_tensors(name, p))
        split = strategy in ("zero3", "hsdp")
        # FSDP2 pads the rows of a parameter to a multiple of the ranks
        part = math.ceil(p.shape[0] / ranks) / p.shape[0] if split and p.ndim and p.shape[0] else 1.0
        weights += round(nbytes * part)
        if p.requires_grad:
            trained += round(p.numel() * part)
            gradients += round(p.nbytes * part)
            whole += round(p.numel() * (part * ranks if split else 1))
    part = 1 / ranks
    residual = 0.0
    if compress is not None and strategy == "hsdp":
        residual = 4 * trained * (1 + 1 / replicas) if replicas > 1 else 0
    elif compress is not None and ranks > 1:
        residual = gradients if compress == "powersgd" else 4 * whole
        if compress != "powersgd" and strategy in ("ddp", "zero1"):
            residual += 4 * whole * part  # residuals of the averages
    return RankBytes(
        weights,
        math.ceil(gradients * (part if strategy == "zero2" else 1)),
        math.ceil(STATE * trained * (part if strategy in ("zero1", "zero2") else 1)),
        math.ceil(residual),
    )


def choose(model: nn.Module, ranks: int, compress: str | None = None) -> tuple[str, str]:
    """Return the strategy of "auto", and the reason. All ranks choose by the rank with the least memory."""
    device = next(model.parameters()).device
    if device.type == "cpu":
        free = spare_bytes()[1] // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    else:
        free = torch.get_device_module(device).mem_get_info(device)[0]
    least = torch.tensor(free + sum(p.nbytes for p in model.parameters()), device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    room = FILLED * least.item()
    for strategy in STRATEGIES[: 2 if compress == "powersgd" else 4]:
        total = needed(model, strategy, ranks, compress).total
        if total <= room:
            return strategy, f"{strategy} needs {total:,} of the {round(room):,} bytes that a rank may fill"
    return strategy, f"a rank may fill {round(room):,} bytes, and the strategy with the least needs {total:,}"


def _refuse(argument: str, expected: str, received: str) -> None:
    raise ValueError(f"parallelize: {argument}: expected {expected}, received {received}")


def _mesh(
    model: nn.Module, strategy: str, mesh: DeviceMesh | tuple[int, ...] | None, ranks: int
) -> DeviceMesh | None:
    """Return the mesh of a strategy that shards weights; None for the others."""
    if mesh is not None:
        _check_mesh(strategy, mesh, ranks)
    if strategy not in ("zero3", "hsdp"):
        return None
    if mesh is None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        mesh = (ranks,) if strategy == "zero3" else (ranks // local, local)
    if not isinstance(mesh, tuple):
        return mesh
    names = ("shards",) if strategy == "zero3" else ("replicas", "shards")
    return init_device_mesh(next(model.parameters()).device.type, mesh, mesh_dim_names=names)


def _check_mesh(strategy: str, mesh: DeviceMesh | tuple[int, ...], ranks: int) -> None:
    if strategy not in ("zero3", "hsdp"):
        _refuse("mesh", f"none with {strategy!r}, which takes all processes", "one")
    dimensions = 1 if strategy == "zero3" else 2
    shape = mesh if isinstance(mesh, tuple) else tuple(mesh.shape)
    if len(shape) != dimensions:
        _refuse("mesh", f"{dimensions} dimensions with {strategy!r}", f"{shape}")
    if math.prod(shape) != ranks:
        _refuse("mesh", f"a product of {ranks}, the number of processes", f"{shape}")
    if dimensions == 2 and not isinstance(mesh, tuple) and mesh.mesh_dim_names is None:
        _refuse("mesh", "names of its two dimensions", "none. Pass mesh_dim_names to init_device_mesh.")


def _check_read(model: nn.Module, strategy: str) -> None:
    """Raise if a module reads something else than a parameter by its name: ``fully_shard`` takes what it reads."""
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and getattr(module, key) is not parameter:
                _refuse(
                    "strategy", "'ddp', 'zero1' or 'zero2' for a model with adapters on stacks of experts", f"{strategy!r}, "
                    f"which cannot split {name}.{key}. Or give the adapters other targets"
                )  # fmt: skip


def check_rows(model: nn.Module, shards: int) -> None:
    """Raise if the ranks cannot split the rows of a quantised weight."""
    for name, p in model.named_parameters():
        if not is_traceable_wrapper_subclass(p) or p.shape[0] == 0:
            continue
        try:
            p.detach().split(math.ceil(p.shape[0] / shards))
        except ValueError as error:
            _refuse(
                "model",
                f"weights whose rows {shards} processes can split",
                f"{name}: {error}. Quantise it in another way, or use 'zero2', which keeps weights whole.",
            )


def _refuse_wrappers(model: nn.Module) -> Callable[[], None]:
    """Raise at the first forward if DistributedDataParallel wraps the model; return a function that undoes it.

    The wrapper would reduce gradients that are reduced already, or in part.
    """
    from shoestring.distributed import composable

    def check(module: nn.Module, *_: Any) -> None:
        if not (torch.is_grad_enabled() and module.training):
            return
        if composable.is_wrapped(module):
            raise RuntimeError(
                "parallelize: model: expected no wrapper, received a model in DistributedDataParallel, which reduces the "
                "gradients a second time. If a trainer wraps the model, as Accelerator.prepare(model) does, leave out "
                "parallelize, and call shoestring.distributed.shard(optimizer) for ZeRO-1"
            )
        hook.remove()

    hook = model.register_forward_pre_hook(check)
    return hook.remove


def _split_steps(model: nn.Module, report: ParallelReport, find_unused: bool) -> Callable[[], None]:
    """Split the steps of optimizers that are made of the parameters; return a function that undoes it.

    Frozen parameters count, too, since they may be trained later.
    """
    parameters = list(model.parameters())

    def split(optimizer: LowMemoryOptimizer) -> None:
        if any(is_dtensor(p) for p in optimizer._all_params()):
            _refuse("optimizer", "plain parameters", "DTensors beside parameters of the model")
        splits = report.strategy == "zero2"
        split_steps(
            optimizer,
            gradients=splits,
            find_unused=splits and find_unused,
            compress=report.compress if splits else None,
        )
        report._optimizers.append(optimizer)

    for p in parameters:
        setattr(p, SPLITS_STEPS, split)

    def check(module: nn.Module, *_: Any) -> None:
        if not (torch.is_grad_enabled() and module.training):
            return
        stepped = {id(p) for optimizer in report._optimizers for p in optimizer._all_params()}
        missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in stepped]
        if missing:
            raise RuntimeError(
                f"parallelize: {report.strategy}: expected optimizers of shoestring.optim, made after parallelize, for all "
                f"trained parameters, received none for {missing[0]}"
            )

    hook = model.register_forward_pre_hook(check)

    def undo() -> None:
        hook.remove()
        for p in parameters:
            delattr(p, SPLITS_STEPS)
        for optimizer in report._optimizers:
            optimizer._retire()

    return undo


__all__ = ["ParallelReport", "RankBytes", "parallelize"]
