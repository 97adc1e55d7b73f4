"""Measure the time and the exact memory of a model's blocks by running each kind of block alone."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shoestring.checkpoint.buffers import buffers_kept
from shoestring.checkpoint.offload import offload_activations
from shoestring.core.device import forked_rng, synchronize
from shoestring.core.storages import storages

RUNS = 3  # number of times that each block is run; the time of the fastest run counts

Forward = Callable[..., Any]


@dataclass
class Cost:
    """Time and memory of a block's forward and backward.

    ``held``: bytes that the block's autograd graph holds between forward and backward, with its input.
    ``forward_bytes``, ``backward_bytes``: peak bytes of the forward and of the backward pass.
    """

    forward_seconds: float
    backward_seconds: float
    held: int
    forward_bytes: int
    backward_bytes: int

    def slower(self, factor: float) -> Cost:
        """Return the same cost with times that are multiplied by a factor."""
        return replace(
            self,
            forward_seconds=factor * self.forward_seconds,
            backward_seconds=factor * self.backward_seconds,
        )


@dataclass
class Call:
    """The arguments of one call of a block, its autocast, and which of the storages no other block receives."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: dict[str, Any]  # arguments of torch.autocast that set it as it was
    # identifiers of storages of arguments that no other block receives
    private: set[int] = field(default_factory=set)


def _storages(tree: Any) -> dict[int, int]:
    return storages(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def kind(module: nn.Module, call: Call) -> tuple[Any, ...]:
    """Return a key that is the same for blocks whose time and memory are the same.

    Such blocks have the same class, and parameters, buffers and arguments of the same shapes, strides, dtypes
    and devices.
    """

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
        return value if isinstance(value, (int, float, bool, str, type(None))) else type(value)

    leaves, spec = tree_flatten((call.args, call.kwargs))
    tensors = [(name, of(t)) for name, t in [*module.named_parameters(), *module.named_buffers()]]
    return type(module).__qualname__, tuple(tensors), tuple(map(of, leaves)), str(spec), module.training


def _autocast(device: torch.device) -> dict[str, Any]:
    """Return the arguments of torch.autocast that set it for the type of a device as it is now."""
    return {
        "dtype": torch.get_autocast_dtype(device.type),
        "enabled": torch.is_autocast_enabled(device.type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


class _Source(torch.autograd.Function):
    """Copy a tensor. The copy is no leaf of the autograd graph; only operators that save it keep it alive."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


@contextmanager
def metered(device: torch.device | str = "cpu") -> Iterator[Any]:
    meter = torch.classes.shoestring.MemoryMeter()
    meter.begin(torch.device(device))
    try:
        yield meter
    finally:
        meter.end()


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's cyclic garbage collector from freeing older tensors inside the ``with`` block."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GradientsAside:
    """``gradients_aside`` yields this object, which decides whether steps free each gradient once it is accumulated."""

    def __init__(self, params: list[Tensor]) -> None:
        self._params = params
        self._frees = True

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Let gradients stay inside the ``with`` block, as in training, and free them at its end."""
        self._frees = False
        try:
            yield
        finally:
            self._frees = True
            for p in self._params:
                p.grad = None

    def forget(self, p: Tensor) -> None:
        if self._frees:
            p.grad = None


@contextmanager
def gradients_aside(model: nn.Module) -> Iterator[GradientsAside]:
    """Inside the ``with`` block, let steps run without side effects on gradients, buffers and random state.

    Each new gradient is freed as soon as it has been accumulated. At the end, the former gradients, the
    buffers and the random state are restored.
    """
    before = [(p, p.grad) for p in model.parameters() if p.requires_grad]
    aside = GradientsAside([p for p, _ in before])
    hooks = [p.register_post_accumulate_grad_hook(aside.forget) for p, _ in before if p.is_leaf]
    for p, _ in before:
        p.grad = None
    try:
        with forked_rng(), buffers_kept(model):
            yield aside
    finally:
        for hook in hooks:
            hook.remove()
        for p, grad in before:
            p.grad = grad


def sharded_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules to which FSDP2's ``fully_shard`` was applied, by name."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return {
        name: m for name, m in model.named_modules() if fsdp is not None and isinstance(m, fsdp.FSDPModule)
    }


@contextmanager
def gathered(model: nn.Module, block: nn.Module) -> Iterator[None]:
    """Unshard the FSDP2 weights of a block inside the ``with`` block, without side effects on gradients.

    All processes have to call this function, since unsharding is a collective.
    """
    around: list[Any] = [
        m for m in sharded_modules(model).values() if any(inner is block for inner in m.modules())
    ]
    for module in around:
        module.unshard()
    try:
        with gradients_aside(block) if around else nullcontext():
            yield
    finally:
        for module in around:
            module.reshard()


def measure(run: Forward, call: Call, device: torch.device, runs: int = RUNS) -> Cost:
    """Measure the time and memory of forward and backward of one block alone, on copies of its arguments."""
    costs = [_measure_once(run, call, device) for _ in range(runs)]
    # the bytes are taken from the last run, since the first may allocate caches and workspaces
    last = costs[-1]
    return Cost(
        min(cost.forward_seconds for cost in costs),
        min(cost.backward_seconds for cost in costs),
        last.held,
        last.forward_bytes,
        last.backward_bytes,
    )


def measure_offloaded(run: Forward, call: Call, device: torch.device, offload: offload_activations) -> int:
    """Return the device bytes that a block holds after offloading: small storages and excluded tensors."""

    def run_and_leave(*args: Any, **kwargs: Any) -> Any:
        with offload:
            result = run(*args, **kwargs)
        offload.mark()
        offload.wait(0)
        return result

    return _measure_once(run_and_leave, call, device).held


def run_backward(outputs: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Run backward from outputs with their gradients, and accumulate the gradients of leaves."""
    # torch.autograd.backward with a gradient argument would import the symbolic shapes of PyTorch's
    # compiler, which take 32 MiB, so call the autograd engine directly.
    if outputs:
        torch.autograd.Variable._execution_engine.run_backward(
            tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def copied_arguments(call: Call, anchor: Tensor) -> tuple[Any, Any]:
    """Return the arguments of a call, with copies of the tensors that no other block receives.

    ``anchor`` is a leaf that requires a gradient, from which the copies seem to be computed.
    """
    leaves, spec = tree_flatten((call.args, call.kwargs))

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or call.private.isdisjoint(storages([leaf])):
            return leaf
        if not leaf.requires_grad:
            return leaf.detach().clone()
        return _Source.apply(anchor, leaf.detach())  # type: ignore[no-untyped-call]

    args, kwargs = tree_unflatten([copied(leaf) for leaf in leaves], spec)
    return args, kwargs


def _measure_once(run: Forward, call: Call, device: torch.device) -> Cost:
    """Run forward and backward of a block once, on copies of its arguments, and measure both."""
    anchor = torch.zeros((), requires_grad=True)
    with metered(device) as meter:
        args, kwargs = copied_arguments(call, anchor)
        synchronize(device)
        began = time.perf_counter()
        with torch.autocast(device.type, **call.autocast):
            result = run(*args, **kwargs)
        synchronize(device)
        forward = time.perf_counter() - began
        forward_bytes = meter.peak()
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
        edges = [get_gradient_edge(output) for output in outputs]
        before = meter.current()
        upstream = [torch.ones_like(output) for output in outputs]
        gradient_bytes = meter.current() - before
        del args, kwargs, result, outputs
        # The block may free what it allocated in an earlier call.
        held_bytes = max(0, meter.current() - gradient_bytes)
        meter.reset_peak()
        synchronize(device)
        began = time.perf_counter()
        run_backward(edges, upstream)
        synchronize(device)
        backward = time.perf_counter() - began
        return Cost(forward, backward, held_bytes, forward_bytes, meter.peak())


@dataclass
class Step:
    """A measured training step with checkpointed blocks.

    ``modules``: the blocks in the order of their calls. ``kinds``: the :func:`kind` of each block.
    """

    modules: list[nn.Module]
    kinds: list[tuple[Any, ...]]
    # kind of block -> the recorded arguments of one call of a block of this kind
    calls: dict[tuple[Any, ...], Call]
    before: Cost  # time and memory of the part of the step before the first block
    # Time and memory of the part of the step after the last block. The bytes include those that the blocks
    # hold.
    after: Cost
    # Bytes that the backward of this last part leaves on the device: the gradient of a weight that the first
    # part of the step uses, too, and gradients of its own weights if they are kept.
    left: int
    seconds: float  # time of forward and backward of the whole step


def run_step(
    modules: list[nn.Module],
    step: Callable[[], Tensor],
    device: torch.device,
    caller: str = "checkpoint_model",
) -> Step:
    """Run and measure a training step in which each block is checkpointed and keeps only its input.

    Args:
        modules: the blocks.
        step: function that runs the forward of the model and returns the loss.
        device: the device of the model.
        caller: the function that begins error messages.

    Raises:
        ValueError: the step does not run each block exactly once, or does not return a loss.
    """
    order: list[nn.Module] = []
    kinds: list[tuple[Any, ...]] = []
    calls: dict[tuple[Any, ...], Call] = {}
    inputs: list[dict[int, int]] = []
    # For each named moment of the step: time in seconds, allocated bytes, and peak bytes since the previous
    # moment.
    marks: dict[str, tuple[float, int, int]] = {}

    def mark(name: str) -> None:
        synchronize(device)
        marks[name] = (time.perf_counter(), meter.current(), meter.peak())
        meter.reset_peak()

    def mark_gradient(tree: Any, name: str) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda grad: mark(name))
                return

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not order:
            mark("blocks")
            mark_gradient((args, kwargs), "blocks are back")
        call = Call(args, kwargs, _autocast(device))
        order.append(module)
        kinds.append(kind(module, call))
        calls.setdefault(kinds[-1], call)
        inputs.append(_storages((args, kwargs)))

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        if len(order) == len(modules):
            mark("behind")
            mark_gradient(result, "back at blocks")

    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in modules]
    hooks += [module.register_forward_hook(leave) for module in modules]
    try:
        with metered(device) as meter:
            synchronize(device)
            began = time.perf_counter()
            loss = step()
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ValueError(
                    f"{caller}: example: expected a loss of one element that backward can start from"
                )
            if sorted(map(id, modules)) != sorted(map(id, order)):
                raise ValueError(
                    f"{caller}: example: expected each of the {len(modules)} blocks to be called once, "
                    f"received {len(order)} calls; name the blocks that are"
                )
            mark("forward")
            loss.backward()
            del loss
            mark("end")
    finally:
        for hook in hooks:
            hook.remove()
    often: dict[int, int] = {}
    for addresses in inputs:
        for address in addresses:
            often[address] = often.get(address, 0) + 1
    for call in calls.values():
        call.private = {address for address in _storages((call.args, call.kwargs)) if often[address] == 1}
    private_bytes = [sum(size for address, size in one.items() if often[address] == 1) for one in inputs]
    # bytes of block inputs that `calls` keeps alive after the step
    still_here = sum(private_bytes[kinds.index(one)] for one in calls)
    none = (began, 0, 0)
    blocks, behind, forward, end = (marks.get(name, none) for name in ("blocks", "behind", "forward", "end"))
    at_blocks, blocks_back = marks.get("back at blocks", end), marks.get("blocks are back", end)
    # Bytes that the step holds when the first block begins, without the input of that block. If the input is
    # older than the step, the difference would be negative, and 0 is used.
    below = max(0, blocks[1] - private_bytes[0])
    before = Cost(blocks[0] - began, end[0] - blocks_back[0], below, blocks[2], max(0, end[2] - still_here))
    after = Cost(forward[0] - behind[0], at_blocks[0] - forward[0], forward[1], forward[2], at_blocks[2])
    left = max(0, at_blocks[1] - behind[1])
    return Step(order, kinds, calls, before, after, left, end[0] - began)
