"""Gradient checkpointing: parts of a model keep only their inputs and run a second time in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from shoestring.checkpoint.frame import Frame

Keep = str | torch._ops.OpOverload | torch._ops.OpOverloadPacket


class _Run(AbstractContextManager[None]):
    """A context manager inside which results of operators are recorded on a tape, or read from it."""

    def __init__(self, tape: Any, begin: Callable[[], None]) -> None:
        self._tape, self._begin = tape, begin

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, error: type[BaseException] | None, *rest: Any) -> None:
        (self._tape.end if error is None else self._tape.abandon)()


def _name(item: Keep) -> str:
    """Return the text by which the checkpoint knows an operator, group or tag."""
    if isinstance(item, torch._ops.OpOverload):
        return f"{item.namespace}::{item._opname}.{item._overloadname}"
    if isinstance(item, torch._ops.OpOverloadPacket):
        return item._qualified_op_name
    if not isinstance(item, str):
        raise TypeError(
            f"checkpoint: keep: expected operators, groups or tags, received {item!r}; "
            'give for example ["attention", torch.ops.aten.mm]'
        )
    return item


def _runs(names: tuple[str, ...]) -> tuple[AbstractContextManager[Any], _Run]:
    """Return two context managers: for a checkpointed function's first run, and for its later runs.

    If ``names`` is empty, no results of operators are recorded. In any case, outer checkpoints do not record
    results of operators in the later runs.
    """
    if not names:
        return nullcontext(), _run_without_tape()
    tape = torch.classes.shoestring.OperatorTape(list(names))
    return _Run(tape, tape.record), _Run(tape, tape.replay)


@functools.cache
def _run_without_tape() -> _Run:
    tape = torch.classes.shoestring.OperatorTape([])
    return _Run(tape, tape.replay)


@functools.cache
def _operators(names: tuple[str, ...]) -> set[str]:
    """Return the operators that ``keep`` names, with those of its groups."""
    operators = set(torch.ops.shoestring._checkpoint_operators(names))
    for name in names:
        if name not in operators and name not in ("attention", "products"):
            raise ValueError(
                f"checkpoint: keep: expected operators or groups of them under torch.compile, received the tag {name!r}"
            )
    return operators


def _policy(
    names: tuple[str, ...], ctx: Any, op: Any, *args: Any, **kwargs: Any
) -> torch_checkpoint.CheckpointPolicy:
    """Decide for one operator whether torch.compile's selective checkpointing saves its result.

    The operator is compared by name, since ``names`` holds names of operators and groups.
    """
    name = _name(op)
    if name in _operators(names) or name.rpartition(".")[0] in _operators(names):
        return torch_checkpoint.CheckpointPolicy.MUST_SAVE
    return torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint(
    fn: Callable[..., Any],
    *args: Any,
    keep: Sequence[Keep] = (),
    preserve_rng_state: bool = True,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Compute ``fn(*args, **kwargs)``; recompute in backward the tensors that autograd would save.

    Only the results of the operators in ``keep`` are kept, and those of :func:`moe_route` and :func:`moe_sort`, so that
    each token has the same experts in both runs. Backward runs ``fn`` a second time (gradient
    checkpointing, Chen et al. 2016), up to the last tensor that it needs. The second run has the random
    numbers and the autocast state of the first run. Gradients are bitwise equal to those without a
    checkpoint. Calls may be nested. ``retain_graph``, second derivatives, ``torch.autograd.grad`` (also
    inside ``fn``), DDP, FSDP2 and ``torch.compile`` work as usual. Saved tensors that need no gradient are
    returned unchanged, with any attributes set by Python code. If ``fn`` itself runs backward passes, ``fn``
    runs again for each of them, and results of operators in these passes are not kept.
    The second run leaves the buffers of modules as they are before it, so a batch norm counts each batch
    once. This holds for modules that are ``fn``, to which ``fn`` refers as a bound method, a partial function, a
    closure, a default or a global name, or that are in the arguments. Other state that ``fn`` changes, such
    as an attribute that counts calls, changes in both runs.

    Args:
        fn: a function of any arguments and results. It has to do the same in both runs, and must not change
            its arguments in place.
        keep: operators whose results are kept, so that backward does not compute them again. An item is an
            operator (``torch.ops.aten.mm``), the name of one (``"aten::mm"``), a group, or a tag of
            :func:`tag_activation` (not under ``torch.compile``, which also needs the names of ``moe_route`` and
            ``moe_sort``). The groups are ``"attention"`` (every scaled
            dot product attention) and ``"products"`` (matrix products, including shoestring's).
        preserve_rng_state: whether both runs draw the same random numbers.
        early_stop: whether the second run ends after the last tensor that backward needs. It does not end early in a
            Python function that calls ``rrelu``, whose noise autograd saves before it is drawn. TorchScript that
            calls ``rrelu`` last needs False.

    Returns:
        The result of ``fn``.

    Raises:
        TypeError: ``keep`` is a string, or an item is neither an operator, a group nor a tag.
        torch.utils.checkpoint.CheckpointError: raised in backward if ``fn`` saved other tensors in the second
            run.

    Example:
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> x = torch.randn(4, 8, requires_grad=True)
        >>> y = shoestring.checkpoint(block, x, keep=["products"])
        >>> torch.equal(y, block(x))
        True
        >>> y.sum().backward()  # computes the GELU again, but no matrix product
    """
    if isinstance(keep, str):
        raise TypeError(f'checkpoint: keep: expected a list, received {keep!r}; write ["{keep}"]')
    names = tuple(_name(item) for item in keep)
    if torch.compiler.is_compiling():  # torch.compile supports only PyTorch's own checkpoint
        options: dict[str, Any] = {"preserve_rng_state": preserve_rng_state, "early_stop": early_stop}
        if names:
            make = torch_checkpoint.create_selective_checkpoint_contexts
            options["context_fn"] = functools.partial(make, functools.partial(_policy, names))
        return torch_checkpoint.checkpoint(fn, *args, use_reentrant=False, **options, **kwargs)
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    record, replay = _runs(names)
    frame = Frame(
        fn, args, kwargs, preserve_rng_state=preserve_rng_state, early_stop=early_stop, replay=replay
    )
    # Remove the saved-tensor hooks of this checkpoint before the record of operator results ends. The hooks
    # of outer checkpoints thus receive the recorded results, which are saved for backward.
    with record, frame.first_run():
        return fn(*args, **kwargs)


def checkpoint_sequential(
    functions: Iterable[Callable[[Any], Any]],
    segments: int,
    x: Any,
    *,
    keep: Sequence[Keep] = (),
    **options: Any,
) -> Any:
    """Run ``functions`` in sequence, in ``segments`` checkpointed parts of about equal length.

    The last part has no checkpoint: backward begins with this part, so a checkpoint would save no memory.

    Args:
        functions: functions of one argument each, such as an ``nn.Sequential``; each takes the output of the
            previous one.
        segments: the number of parts, 1 to the number of functions.
        x: the argument of the first function.
        keep, options: as for :func:`checkpoint`.

    Returns:
        The result of the last function.

    Raises:
        ValueError: ``segments`` is out of range.

    Example:
        >>> layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
        >>> x = torch.randn(2, 8)
        >>> y = shoestring.checkpoint_sequential(layers, 2, x)
        >>> torch.equal(y, layers(x))
        True
    """
    steps = list(functions)
    if not 1 <= segments <= len(steps):
        raise ValueError(
            f"checkpoint_sequential: segments: expected 1 to the number of functions ({len(steps)}), received {segments}"
        )

    def run(part: list[Callable[[Any], Any]], x: Any) -> Any:
        for step in part:
            x = step(x)
        return x

    length = len(steps) // segments
    for begin in range(0, length * (segments - 1), length):
        x = checkpoint(run, steps[begin : begin + length], x, keep=keep, **options)
    return run(steps[length * (segments - 1) :], x)


def tag_activation(x: Tensor, tag: str) -> Tensor:
    """Return ``x`` itself, tagged for checkpoints whose ``keep`` argument contains the tag.

    Such a checkpoint keeps the results of the operator that made ``x`` instead of computing them again.
    Without such a checkpoint, the tag does nothing.

    Args:
        x: the result of an operator.
        tag: a name for the ``keep`` argument of :func:`checkpoint`.

    Raises:
        RuntimeError: ``x`` was modified in place after it was made.

    Example:
        >>> linear = torch.nn.Linear(8, 8)
        >>> def block(x):
        ...     return torch.nn.functional.gelu(shoestring.tag_activation(linear(x), "projection"))
        >>> y = shoestring.checkpoint(block, torch.randn(2, 8), keep=["projection"])
        >>> y.sum().backward()  # does not compute the linear layer again
        >>> linear.weight.grad.shape
        torch.Size([8, 8])
    """
    result: Tensor = torch.ops.shoestring.tag_activation(x, tag)
    return result
