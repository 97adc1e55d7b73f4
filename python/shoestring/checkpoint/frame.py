"""The state of a checkpoint between the first run of a function and the last backward pass over it.

In the first run, a placeholder (``_Number``) replaces each tensor that autograd saves. When backward asks for
the value of a placeholder, the function runs again. The tensors that autograd saves in the second run become
the values of the placeholders, in order. csrc/checkpoint/checkpoint.cpp does the same in C++.
torch.utils.checkpoint is not used, since its first recomputation imports PyTorch's compiler (120 MB).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError

from shoestring.checkpoint.buffers import buffers_kept
from shoestring.core.kept_calls import KeptCalls


class _Stop(Exception):
    """Raised inside the checkpointed function to end a recomputation after its last needed saved tensor."""


class _Inputs(torch.autograd.Function):
    """Save the inputs of a checkpointed function with autograd, as any operator does.

    Hooks of outer checkpoints then see them, and autograd detects in-place changes of them.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("nothing is computed from this")


class _State:
    """A copy of the states of the random generators and of autocast, taken at construction."""

    def __init__(self, tensors: list[Tensor], rng: bool) -> None:
        devices = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
        self._rng = [(device, _get(device)) for device in [torch.device("cpu"), *devices]] if rng else []
        kinds = {"cpu", *(t.device.type for t in tensors if torch.amp.is_autocast_available(t.device.type))}  # type: ignore[attr-defined]
        cache = torch.is_autocast_cache_enabled()
        self._autocast: list[dict[str, Any]] = [
            {
                "device_type": kind,
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": cache,
            }
            for kind in sorted(kinds)
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the block with the autocast and random states of the first run."""
        with ExitStack() as stack:
            for options in self._autocast:
                stack.enter_context(torch.autocast(**options))
            stack.callback(_set, [(device, _get(device)) for device, _ in self._rng])
            _set(self._rng)
            yield


def _get(device: torch.device) -> Tensor:
    """Return the state of a device's random generator."""
    return (
        torch.get_rng_state()
        if device.type == "cpu"
        else torch.get_device_module(device).get_rng_state(device)
    )


def _set(states: list[tuple[torch.device, Tensor]]) -> None:
    """Set the random states of devices."""
    for device, state in states:
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


class _Number:
    """A placeholder that autograd saves instead of a tensor, which the frame recomputes for it."""

    def __init__(self, frame: Frame, tensor: Tensor) -> None:
        self.frame = frame
        self.kind = (tuple(tensor.shape), tensor.dtype, tensor.device)
        self.values: dict[int, Tensor] = {}  # id of a backward pass -> the tensor recomputed in that pass


class Frame:
    """The state of one call of a function under checkpoint.

    Args:
        replay: a context manager entered around each run of the function after the first. It returns the kept
            results of operators instead of computing them. Outer checkpoints do not record the results of
            operators in such a run.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        preserve_rng_state: bool,
        early_stop: bool,
        replay: AbstractContextManager[Any],
    ) -> None:
        leaves, spec = tree_flatten((args, kwargs))
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[i] for i in positions]
        self._state = _State(tensors, preserve_rng_state)
        self._inputs = _Inputs.apply(torch.empty(0, requires_grad=True), *tensors)  # type: ignore[no-untyped-call]
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._positions, self._spec = positions, spec
        self._fn, self._early_stop = fn, early_stop
        self._replay = replay
        self._kept = KeptCalls()
        self._numbers: list[weakref.ref[_Number]] = []
        # Whether the first run of the checkpointed function has ended. A recomputation after its end must not
        # save more tensors than the first run.
        self._complete = False
        self._lock = threading.RLock()

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Return a context manager that sets the saved-tensor hooks for the function's first run."""
        with self._kept.run(recording=True), saved_tensors_hooks(self._pack, _unpack):
            yield
        self._complete = True

    def _pack(self, tensor: Tensor) -> _Number:
        number = _Number(self, tensor)
        self._numbers.append(weakref.ref(number))
        return number

    def value(self, number: _Number) -> Tensor:
        """Return the saved tensor that a placeholder stands for.

        The checkpointed function runs again if it has not yet run again in this backward pass.
        """
        pass_ = torch._C._current_graph_task_id()
        with self._lock:
            if pass_ not in number.values:
                run = self._run_again
                if "torch._dynamo" in sys.modules:
                    run = torch.compiler.disable(run)
                run(pass_)
            # An autograd node usually unpacks each of its saved tensors once. If it unpacks the same tensor
            # twice, the checkpointed function runs again.
            return number.values.pop(pass_)

    def _run_again(self, pass_: int) -> None:
        leaves = list(self._leaves)
        for position, tensor in zip(self._positions, self._inputs.grad_fn.saved_tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        if pass_ >= 0:  # when this backward pass ends, drop the recomputed tensors that it has not used
            frame = weakref.ref(self)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _forget(frame, pass_))
        seen = 0
        # Whether it is an error if this run saves more tensors than the first run. It is no error while the
        # first run has not ended, nor with early_stop, since the function may catch the exception _Stop,
        # which ends a run early, and continue.
        exact = self._complete and not self._early_stop

        def pack(tensor: Tensor) -> Tensor:
            nonlocal seen
            if tensor.requires_grad:
                # An operator's output refers to the operator's autograd node. If the node saved the output
                # itself, this would be a reference cycle, so the output is detached. Tensors that need no
                # gradient are saved unchanged, with their Python attributes.
                tensor = tensor.detach()
            number = self._numbers[seen]() if seen < len(self._numbers) else None
            seen += 1
            if number is not None:
                kind = (tuple(tensor.shape), tensor.dtype, tensor.device)
                if kind != number.kind:
                    raise CheckpointError(
                        f"checkpoint: saved tensor {seen - 1} was {_shown(number.kind)} in forward and is {_shown(kind)} "
                        "in backward: the function has to do the same both times"
                    )
                number.values[pass_] = tensor
            if self._early_stop and seen >= len(self._numbers) and not _calls_rrelu():
                raise _Stop
            return tensor

        with torch.enable_grad(), self._state.again(), saved_tensors_hooks(pack, lambda tensor: tensor):
            try:
                with self._replay, self._kept.run(recording=False), buffers_kept(self._fn, args, kwargs):
                    self._fn(*args, **kwargs)
            except _Stop:
                pass
        if seen < len(self._numbers) or (exact and seen > len(self._numbers)):
            raise CheckpointError(
                f"checkpoint: the function saved {len(self._numbers)} tensors in forward and {seen} in backward: "
                "it has to do the same both times"
            )


def _unpack(number: _Number) -> Tensor:
    return number.frame.value(number)


def _calls_rrelu() -> bool:
    """Return whether a function that is running within the recomputation calls RReLU.

    Autograd saves the noise of ``rrelu_with_noise`` before the operator fills it. It does so with no other operator.
    """
    caller: FrameType | None = sys._getframe(2)  # the caller of the hook
    while caller is not None and caller.f_code is not Frame._run_again.__code__:
        if any("rrelu" in name for name in caller.f_code.co_names):
            return True
        caller = caller.f_back
    return False


def _forget(frame: weakref.ref[Frame], pass_: int) -> None:
    """Free the tensors that a backward pass has recomputed and not used."""
    if (alive := frame()) is not None:
        for number in alive._numbers:
            if (one := number()) is not None:
                one.values.pop(pass_, None)


def _shown(kind: tuple[Any, ...]) -> str:
    return f"{str(kind[1]).removeprefix('torch.')}{list(kind[0])} on {kind[2]}"
