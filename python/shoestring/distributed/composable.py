"""Apply PyTorch's DistributedDataParallel and ``fully_shard`` to a model in place, and take them back.

PyTorch has no functions that take them back. Those of this file remove the hooks, the class and the state that
``replicate`` and ``fully_shard`` give to a module.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from shoestring.checkpoint.blocks import listed_blocks
from shoestring.distributed.groups import plain_tensors

# The most bytes of tensors that are sent together, as in DistributedDataParallel.
BROADCAST_BYTES = 250 << 20


def is_parallel(model: nn.Module) -> bool:
    """Return whether the model, or a part of it, is in a wrapper, replicated or sharded."""
    return any(
        REGISTRY_KEY in module.__dict__ or isinstance(module, DistributedDataParallel)
        for module in model.modules()
    )


def is_wrapped(model: nn.Module) -> bool:
    """Return whether a DistributedDataParallel wraps the model. A module does not know its wrapper."""
    wrappers = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
    return any(module is model for wrapper in wrappers for module in wrapper.modules())


def replicate(
    model: nn.Module,
    hook: Callable[..., Any] | None = None,
    find_unused: bool = False,
    ignored: list[nn.Module] | None = None,
) -> Callable[[], None]:
    """Average gradients by DistributedDataParallel without a wrapper; return a function that undoes it.

    Those of the parameters of ``ignored`` modules are left out.

    ``hook`` is a communication hook, which averages buckets of gradients. With ``find_unused``, a backward may leave
    parameters without a gradient. A forward raises if a parameter requires gradients that the ranks do not average.
    """
    from torch.distributed._composable.replicate import replicate as torch_replicate

    # The ranks have equal parameters already.
    options: dict[str, Any] = {"init_sync": False, "find_unused_parameters": find_unused}
    torch_replicate(model, ignored or None, gradient_as_bucket_view=True, **options)
    state: Any = torch_replicate.state(model)
    if hook is not None:
        replicated: Any = model
        replicated.register_comm_hook(None, hook)
    reduced = set[nn.Parameter]()  # the parameters that DistributedDataParallel knows
    if find_unused:
        # The first forward would do this. By then, parameters may be frozen that a later step trains.
        state.lazy_init()
        reduced = {p for p in model.parameters() if p.requires_grad}

    def check(module: nn.Module, *_: Any) -> None:
        trained = {p: name for name, p in module.named_parameters() if p.requires_grad}
        if not reduced:
            reduced.update(trained)
        missing = [name for p, name in trained.items() if p not in reduced]
        if missing and torch.is_grad_enabled():
            raise RuntimeError(
                "parallelize: model: expected gradients of the parameters that were trained at the beginning, received "
                f"a model that trains {missing[0]}, too, whose gradient the ranks would not average. Call parallelize "
                "with find_unused=True while all of them require gradients, and freeze parameters afterwards."
            )

    handle = model.register_forward_pre_hook(check)  # runs after the hook of DistributedDataParallel

    def undo() -> None:
        handle.remove()
        for hooks in (model._forward_pre_hooks, model._forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is state]:
                del hooks[key]
                model._forward_pre_hooks_with_kwargs.pop(key, None)
        _forget(model)
        # The gradients are views of buckets, which belong to DistributedDataParallel.
        for p in model.parameters():
            if p.grad is not None:
                p.grad = p.grad.clone()

    return undo


def share_statistics(
    model: nn.Module, group: dist.ProcessGroup, sends: Callable[[], bool]
) -> Callable[[], None]:
    """Give all ranks the running statistics of rank 0 at the end of each backward that sends gradients.

    They are the buffers of modules that have a buffer "running_mean", such as BatchNorm. Return a function that
    undoes it.
    """
    layers = [m for m in model.modules() if m._buffers.get("running_mean") is not None]
    first = next((p for p in model.parameters() if p.requires_grad), None)
    if not layers or first is None or dist.get_world_size(group) == 1:
        return lambda: None

    def copy() -> None:
        buffers = [b.detach() for layer in layers for b in layer._buffers.values() if b is not None]
        dist._broadcast_coalesced(group, buffers, BROADCAST_BYTES, 0)  # type: ignore[attr-defined]

    def begin(_: Tensor) -> None:
        if sends():
            queue: Any = torch.autograd.Variable._execution_engine.queue_callback
            # A callback of DistributedDataParallel, which may come later, waits for gradients.
            queue(lambda: queue(copy))

    hook: RemovableHandle = first.register_hook(begin)
    return hook.remove


def shard_fully(
    model: nn.Module,
    mesh: DeviceMesh,
    prepare: Callable[[Any, int], None] | None = None,
    offload: str | None = None,
) -> Callable[[], None]:
    """Shard a model by ``fully_shard``, each block as a unit; return a function that undoes it.

    ``prepare`` is called with each unit and its number, to replace collectives of the unit. ``offload`` is the place of
    the shards: None, "cpu" or "nvme:DIR".
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    units = [*listed_blocks(model).values(), model]
    folder = offload.removeprefix("nvme:") if offload not in (None, "cpu") else None
    policy = OffloadPolicy()
    if offload is not None and next(model.parameters()).device.type != "cpu":
        policy = CPUOffloadPolicy(pin_memory=folder is None)
    memory = None if folder is None else torch.classes.shoestring.FileMemory("parallelize: offload", folder)
    moved: list[tuple[nn.Module, list[Tensor]]] = []
    for unit in units:
        fully_shard(unit, mesh=mesh, offload_policy=policy)
        if memory is not None:
            moved.append((unit, _shards(unit)))
            for tensor in moved[-1][1]:
                memory.move(tensor)
    forget = _advise(memory, moved)
    if prepare is not None:
        for number, unit in enumerate(units):
            prepare(unit, number)

    def undo() -> None:
        forget()
        for unit in units:
            _gather(unit)

    return undo


def _shards(unit: Any) -> list[Tensor]:
    """Return the tensors of which the shards of a unit of ``fully_shard`` consist."""
    group = unit._get_fsdp_state()._fsdp_param_group
    params = [] if group is None else [p.sharded_param for p in group.fsdp_params]
    return [tensor for p in params for _, tensor in plain_tensors("", p.to_local())]


def _advise(memory: Any, moved: list[tuple[nn.Module, list[Tensor]]]) -> Callable[[], None]:
    """Read the shards of a unit while the unit before it runs, and let the kernel take those that are gathered.

    Returns a function that ends it.
    """
    handles = []
    for number, (unit, shards) in enumerate(moved):
        following = moved[number + 1][1] if number + 1 < len(moved) else []

        # It runs after the hook of fully_shard, which gathers the unit.
        def advise(*_: Any, shards: list[Tensor] = shards, following: list[Tensor] = following) -> None:
            for tensor in shards:
                memory.let_go(tensor)
            for tensor in following:
                memory.will_need(tensor)

        handles.append(unit.register_forward_pre_hook(advise))

    def forget() -> None:
        for handle in handles:
            handle.remove()

    return forget


def _gather(unit: Any) -> None:
    """Give a unit of ``fully_shard`` whole parameters, which are new tensors."""
    state = unit._get_fsdp_state()
    unit.unshard()
    parameters: dict[int, nn.Parameter] = {}
    for module in unit.modules():
        for name, p in module._parameters.items():
            if p is None or hasattr(p, "to_local"):  # another unit has it
                continue
            if id(p) not in parameters:
                whole = p.detach().clone() if type(p) is nn.Parameter else p.detach()
                parameters[id(p)] = nn.Parameter(whole, p.requires_grad)
            module._parameters[name] = parameters[id(p)]
        for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            module.__dict__.pop(name, None)
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in [state._fsdp_param_group] if state._fsdp_param_group is not None else []:
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
    for handle in handles:
        handle.remove()
    _forget(unit)


def _forget(module: nn.Module) -> None:
    """Give a module the class that it had, and drop the record of what was applied to it."""
    module.__class__ = type(module).__mro__[2]
    _module_state_mapping.pop(module, None)
    module.__dict__.pop(STATE_KEY, None)
    module.__dict__.pop(REGISTRY_KEY, None)
