"""Run a model with few of its blocks, so that blocks that are alike are measured once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

Result = TypeVar("Result")

# Blocks of each structure that run. The first one may get an input without gradients, and the others one with them.
RUN = 2


class OtherResultError(Exception):
    """A block returns something else than a tensor like its input, so that a model cannot run without it."""


class _PassedOver(nn.Module):
    """Stands for a block that does not run: returns its input in the form in which a block like it returns its result.

    The attributes are those of the block.
    """

    def __init__(self, block: nn.Module, alike: _Result) -> None:
        super().__init__()
        self.__dict__["block"] = block  # not a submodule, so that the model has no parameter twice
        self.alike = alike

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.alike.of(_input(args, kwargs))


class _Result:
    """The form in which blocks of one structure return their result, as seen in the last call of one of them."""

    def __init__(self) -> None:
        self.is_tuple = False
        self.others: tuple[Any, ...] = ()

    def see(self, block: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        x = _input(args, kwargs)
        first = result[0] if isinstance(result, tuple) and result else result
        others = result[1:] if isinstance(result, tuple) else ()
        is_like_input = isinstance(first, Tensor) and x is not None and first.shape == x.shape
        if not is_like_input or any(other is not None for other in others):
            raise OtherResultError(type(block).__name__)
        self.is_tuple, self.others = isinstance(result, tuple), others

    def of(self, x: Tensor | None) -> Any:
        return (x, *self.others) if self.is_tuple else x


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the first tensor among the arguments of a block."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def structure(block: nn.Module) -> tuple[Any, ...]:
    """Return a key that is the same for blocks of one class whose parameters and buffers are alike."""
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return type(block).__qualname__, *(
        (name, tuple(t.shape), t.dtype, t.requires_grad, type(t).__qualname__) for name, t in tensors
    )


@contextmanager
def shortened(model: nn.Module, blocks: Mapping[str, nn.Module]) -> Iterator[list[nn.Module]]:
    """Inside the ``with`` block, let the model run the first blocks of each structure alone; yield them.

    Args:
        model: the model.
        blocks: its blocks by their names, in the order of their calls.

    Raises:
        OtherResultError: in a forward: a block does not return a tensor like its input.
    """
    alike: dict[Any, _Result] = {}
    counts: dict[Any, int] = {}
    run: list[nn.Module] = []
    hooks, replaced = [], []
    try:
        for name, block in blocks.items():
            key = structure(block)
            counts[key] = counts.get(key, 0) + 1
            if counts[key] <= RUN:
                run.append(block)
                alike.setdefault(key, _Result())
                hooks.append(block.register_forward_hook(alike[key].see, with_kwargs=True))
                continue
            parent, _, child = name.rpartition(".")
            owner = model.get_submodule(parent)
            replaced.append((owner, child, block))
            owner._modules[child] = _PassedOver(block, alike[key])
        yield run
    finally:
        for hook in hooks:
            hook.remove()
        for owner, child, block in replaced:
            owner._modules[child] = block


def with_few_blocks(
    model: nn.Module, blocks: Mapping[str, nn.Module], measure: Callable[[list[nn.Module]], Result]
) -> Result:
    """Return the result of ``measure`` for the blocks that run: few of those that are alike, if their results allow it."""
    try:
        with shortened(model, blocks) as run:
            return measure(run)
    except OtherResultError:
        return measure(list(blocks.values()))
