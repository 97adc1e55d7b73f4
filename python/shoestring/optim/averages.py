"""Averages of the weights of a training run: exponential, over all steps, or over the last snapshots."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoestring.core.dtensors import is_dtensor
from shoestring.core.module_argument import check_module
from shoestring.core.presence import is_away
from shoestring.optim.sharded import local
from shoestring.optim.state_tensors import state_tensors

# The entries of a state dict that are numbers.
NUMBERS = ("kind", "steps", "updates")


class Averages:
    """Average the weights of a model over the steps of training.

    Call ``update()`` after each step of the optimizer. ``swap()`` puts the averages into the model for an
    evaluation::

        averages = Averages(model, decay=0.999)
        for batch in data:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            averages.update()
        with averages.swap():
            evaluate(model)

    The averages cover parameters and floating-point buffers (fp64, fp32, bf16, fp16), as
    ``torch.optim.swa_utils.AveragedModel`` does with ``use_buffers=True``. All other buffers, such as counters,
    are copied by each update. A parameter that is frozen when the object is created has no average and takes
    no memory. Tied weights are averaged once. Of a DTensor, such as a parameter under FSDP2, each process
    averages its own shard, and its state dict holds that shard.

    The first update copies the weights, and an exponential average starts from there. Before it, the averages
    are the weights. Averages are computed in fp32, also those of bf16 weights, and those of fp64 weights in
    fp64.

    ``update()`` does not wait for a GPU. With ``offload="cpu"`` the weights are copied to pinned memory in the
    current stream, and a thread averages them on the CPU. Then ``update()`` waits if the CPU has not finished
    the update before.

    Memory in bytes per weight, allocated by the first updates (k is ``last``):

    ======== ============ ============ ==========================
    kind     ``"fp32"``   ``"bf16"``   fp64 weights, each format
    ======== ============ ============ ==========================
    ema, swa 4            2            8
    lawa     k x weight   2 k          8 k
    ======== ============ ============ ==========================

    ``swap()`` takes a copy of the weights while it lasts. With ``offload="cpu"`` the averages and this copy are in
    host memory, with one more copy of the weights in pinned memory. The device has no additional memory.

    With the format ``"bf16"``, averages are rounded stochastically, because an average with decay 0.999 that is
    rounded to nearest would stand still. The expected value is the exact average. The random error has a
    standard deviation of about ``sqrt(d u / 2)``, where d is the distance between weight and average, and u the
    spacing of bf16 numbers there, at most 1/128 of the average.

    Args:
        model: the module whose weights are averaged.
        kind: ``"ema"`` is the exponential moving average ``a = decay a + (1 - decay) w``. ``"swa"`` is the mean
            of the weights of all updates (arXiv 1803.05407). ``"lawa"`` is the mean of the weights of the last
            ``last`` updates (arXiv 2209.14981); it keeps as many snapshots.
        decay: factor of the old average in ``"ema"``, in [0, 1). It is rounded to fp32.
        every: number of calls of ``update()`` per update of the averages.
        last: number of snapshots that ``"lawa"`` keeps.
        format: how averages of fp32, bf16 and fp16 weights are stored, ``"fp32"`` or ``"bf16"``. Snapshots of
            ``"lawa"`` are stored in the dtype of the weight with ``"fp32"``, and rounded to nearest with
            ``"bf16"``.
        offload: ``"cpu"`` keeps the averages in host memory. None keeps them on the device of the weights.
        seed: seed of the stochastic rounding. Equal seeds and weights give equal averages, bit for bit, also
            after a resume.

    Raises:
        ValueError: an option is out of range, or ``format="bf16"`` meets a device other than the CPU and CUDA
            without ``offload="cpu"``.

    Example:
        >>> model = torch.nn.Linear(8, 2)
        >>> averages = shoestring.optim.Averages(model, decay=0.5)
        >>> averages.update()  # copies the weights
        >>> first = model.weight.detach().clone()
        >>> with torch.no_grad():
        ...     _ = model.weight.add_(1.0)
        >>> averages.update()
        >>> with averages.swap():
        ...     torch.testing.assert_close(model.weight, first + 0.5)
        >>> torch.testing.assert_close(model.weight, first + 1.0)

    Reference: P. Izmailov et al., Averaging weights leads to wider optima and better generalization, arXiv
    1803.05407. J. Kaddour, Stop wasting my time! Saving days of ImageNet and BERT training with latest weight
    averaging, arXiv 2209.14981.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: Literal["ema", "swa", "lawa"] = "ema",
        *,
        decay: float = 0.999,
        every: int = 1,
        last: int = 5,
        format: Literal["fp32", "bf16"] = "fp32",
        offload: Literal["cpu"] | None = None,
        seed: int = 0,
    ) -> None:
        check_module("Averages", model)
        parameters, buffers = _slots(model, "_parameters"), _slots(model, "_buffers")
        self._slots, self._buffers = parameters + buffers, buffers
        # A program that has not imported FSDP2 has no modules of it. Importing it takes long.
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        self._sharded = [m for m in model.modules() if fsdp is not None and isinstance(m, fsdp.FSDPModule)]
        names = [name for _, _, name in self._slots]
        self._core: Any = torch.classes.shoestring.Averages(
            names, *self._weights(), len(parameters), kind, decay, every, last, format, offload or "", seed
        )

    def update(self) -> None:
        """Count a step, and update the averages in every ``every``-th call.

        Raises:
            ValueError: a weight has changed its dtype, device or shape since the averages were created, or a
                parameter that was frozen then requires a gradient now. Nothing has changed.
            RuntimeError: the model holds the averages, within ``swap()``.
        """
        if self._core.is_due():
            self._core.update(*self._weights())
        else:
            self._core.count()

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Put the averages into the model; restore the training weights, bit for bit, at the end of the block.

        The weights are restored also if the block raises an exception. The weights are changed in place, so
        optimizers, compiled code and CUDA graphs that refer to them are not affected.

        Raises:
            ValueError: a weight has changed its dtype, device or shape. If this has happened within the block,
                the training weights are lost.
            RuntimeError: the model holds the averages already.
        """
        self._core.swap_in(*self._weights())
        buffers = [(owner, key, owner.get(key)) for owner, key, _ in self._buffers]
        try:
            yield
        finally:
            _reshard(self._sharded)  # the unsharded weights are copies of the averages
            self._core.swap_out()
            for owner, key, buffer in buffers:
                owner[key] = buffer  # forward may have assigned another tensor

    def copy_to(self, model: nn.Module) -> None:
        """Copy the averages to the parameters and buffers of another model, or of the same, by name.

        Parameters without an average do not change. The dtypes of the other model may differ.

        Args:
            model: a module with the names and shapes of the averaged one.

        Raises:
            ValueError: a name is missing or a shape differs. Nothing has changed then.
        """
        slots = _slots(model, "_parameters") + _slots(model, "_buffers")
        self._core.copy_to([name for _, _, name in slots], _tensors(slots)[0])

    @property
    def updates(self) -> int:
        """The number of updates of the averages so far."""
        return int(self._core.updates())

    @property
    def _is_split(self) -> bool:
        """Whether the averages are parts of DTensors, so that no process has the state of all."""
        return any(is_dtensor(owner.get(key)) for owner, key, _ in self._slots)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in the layout of ``state()`` in C++.

        Returns:
            The numbers ``"kind"``, ``"steps"`` and ``"updates"``, and tensors: ``"average.<name>"``, or
            ``"snapshot.<index>.<name>"`` for ``"lawa"``, where the oldest has the index 0, and
            ``"copy.<name>"`` for buffers that are not averaged. The tensors share the memory of the averages,
            as those of ``Module.state_dict()`` do.
        """
        state = dict(self._core.state())
        return {name: value.item() if name in NUMBERS else value for name, value in state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of ``state_dict()``, or of ``state()`` in C++.

        Later updates give the averages of a run without interruption, bit for bit.

        Args:
            state_dict: the state. Its numbers may be integers or tensors of one element. The names, shapes and
                dtypes of the tensors and the kind must be those of this object; other options may differ.
                ``"lawa"`` keeps the newest ``last`` snapshots.

        Raises:
            ValueError: the state does not fit. Nothing has changed then.
            RuntimeError: the model holds the averages, within ``swap()``.
        """
        self._core.load_state(state_tensors(state_dict))

    def _weights(self) -> tuple[list[Tensor], list[bool]]:
        _reshard(self._sharded)
        return _tensors(self._slots)


# The dict of a module that holds a parameter or buffer, its key there, and its full name. Modules may replace
# the tensor in the dict.
_Slot = tuple[dict[str, Any], str, str]


def _slots(model: nn.Module, kind: str) -> list[_Slot]:
    """Return the slots of all parameters (or buffers), with those of tied tensors."""
    return [
        (owner, key, f"{prefix}.{key}" if prefix else key)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for owner in [getattr(module, kind)]
        for key, tensor in owner.items()
        if tensor is not None
    ]


@torch.no_grad()
def _tensors(slots: list[_Slot]) -> tuple[list[Tensor], list[bool]]:
    """Return the tensors of slots, for a DTensor its shard, and whether each requires a gradient."""
    tensors, trained = [], []
    for owner, key, name in slots:
        tensor = owner.get(key)
        if tensor is None:
            raise ValueError(
                f"Averages: {name}: expected a tensor, as when the averages were created, received none"
            )
        # A frozen parameter may be away, since it is neither read nor changed.
        if (tensor.requires_grad or not isinstance(tensor, nn.Parameter)) and is_away(tensor):
            raise ValueError(
                f"Averages: {name}: expected a tensor on its device, received one that is away. Call undo() of "
                "offload_weights first, or train without Averages."
            )
        trained.append(tensor.requires_grad)
        tensors.append(local(tensor))
    return tensors, trained


def _reshard(modules: list[Any]) -> None:
    """Make the modules of FSDP2 hold their shards, and not the whole weights of the last forward."""
    for module in modules:
        module.reshard()
