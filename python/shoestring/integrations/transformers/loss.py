"""Make a model's forward compute its loss without logits.

The forward of the model runs unchanged. While it runs with labels, the output layer is replaced by an object
that returns a ``Logits`` placeholder (logits.py).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.core.instances import derive
from shoestring.integrations.transformers.logits import Logits
from shoestring.integrations.transformers.names import renamed, uses
from shoestring.integrations.transformers.trial import evaluating

# name of an attribute of patched models: True while the forward runs without logits
RECORDING = "_shoestring_recording"
# Name of the loss module that some forwards make. torch.compile takes it for a function of tensors, so a copy
# of such a forward makes a ``TokenLoss``.
LOSS = "CrossEntropyLoss"


def head_path(model: Any) -> str | None:
    """Return the path of the output layer inside the model; None: the model has none, or takes no labels.

    The output layer may be inside a module of the model that transforms the hidden states first, such as
    ``cls.predictions.decoder`` of BERT.
    """
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # raised by models that consist of several models
        return None
    if not isinstance(head, nn.Module) or "labels" not in inspect.signature(type(model).forward).parameters:
        return None
    names = [name for name, module in model.named_modules() if module is head]
    return names[0] if names else None


def patched_class(
    original: type[Any], path: str | None, by_token: bool, logits: bool | None, workspace_mb: int
) -> type:
    """Return a subclass of the model class ``original``, for a single model instance.

    The forward is the original one, except that the output layer ``path`` computes no logits if labels are
    given. The output contains logits if ``logits`` is true, or None in evaluation mode. An output layer inside a module of the model needs :func:`replace_inside` as well. If
    ``by_token`` is true, the model calls this module with one tensor of hidden states, and the module
    computes each token by itself. It then runs for the tokens that have labels only.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        """Pickle the model with its original class, so that copies and files lack the patched class."""
        state: Any = object.__reduce_ex__(self, 2)[2]
        return object.__new__, (original,), {key: value for key, value in state.items() if key != RECORDING}

    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    body: dict[str, Any] = {"__reduce_ex__": reduce}
    if path is not None:
        body["forward"] = _forward(original.forward, path.split(".")[:-1], logits)
        first, _, inside = path.partition(".")
        if not inside:
            body[first] = _recording(first, workspace_mb)
        elif by_token:
            body[first] = _whole(first)
    return type(original.__name__, (original,), names | body)


def _forward(original: Callable[..., Any], parents: list[str], logits: bool | None) -> Callable[..., Any]:
    """Return a forward that computes the loss without logits if it gets labels."""
    position = list(inspect.signature(original).parameters).index("labels")
    without = renamed(original, LOSS) if uses(original, LOSS) else original

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = (
            kwargs["labels"]
            if "labels" in kwargs
            else (args[position - 1] if len(args) >= position else None)
        )
        # A loss function that the user has set on the model expects a tensor of logits.
        if labels is None or "_loss_function" in self.__dict__:
            return original(self, *args, **kwargs)
        owner = self
        for name in parents:
            owner = owner._modules[name]
        setattr(owner, RECORDING, True)
        setattr(self, RECORDING, True)
        try:
            out = without(self, *args, **kwargs)
        finally:
            setattr(self, RECORDING, False)
            setattr(owner, RECORDING, False)
        return _without(out, not self.training if logits is None else logits)

    return forward


def _recording(name: str, workspace_mb: int) -> property:
    """Return a property that gives an output layer, or a recording stand-in while a patched forward runs."""

    def head(self: Any) -> Any:
        layer = self._modules[name]
        return RecordingHead(layer, workspace_mb) if getattr(self, RECORDING) else layer

    return property(head)


def replace_inside(model: Any, path: str, workspace_mb: int) -> Callable[[], None]:
    """Let an output layer inside a module of the model be replaced while a patched forward runs.

    Returns:
        A function that undoes the change.
    """
    parent, _, name = path.rpartition(".")
    owner = model.get_submodule(parent)
    owner.__dict__[RECORDING] = False
    return derive(owner, {name: _recording(name, workspace_mb)}, (RECORDING,))


def _whole(name: str) -> property:
    """Return a property that gives a module, or a deferred call of it while a patched forward runs."""

    def transform(self: Any) -> Any:
        module = self._modules[name]
        plain = not getattr(self, RECORDING) or module._forward_hooks or module._forward_pre_hooks
        return module if plain else functools.partial(_deferred, module)

    return property(transform)


def _deferred(module: Any, hidden: Tensor) -> Logits:
    """Return a placeholder for ``module(hidden)``, whose loss runs the module for tokens with labels only."""
    # While the model's forward runs, the output layer inside the module returns a placeholder itself.
    stub: Logits = module(hidden[:0])
    return replace(stub, hidden=hidden, make=lambda: module(hidden), before=lambda rows: module(rows).hidden)


def computes_each_token(module: Any, run: Callable[[], object]) -> bool:
    """Return whether the model calls a module with one tensor, and its tokens do not depend on each other."""
    if any(isinstance(part, nn.modules.batchnorm._NormBase) for part in module.modules()):
        return False
    calls: list[tuple[Any, Any]] = []
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    try:
        run()
    finally:
        hook.remove()
    if len(calls) != 1 or calls[0][1] or len(calls[0][0]) != 1 or not isinstance(calls[0][0][0], Tensor):
        return False
    hidden = calls[0][0][0]
    with evaluating(module), torch.no_grad():
        whole = module(hidden)
        if not isinstance(whole, Tensor) or whole.shape[:-1] != hidden.shape[:-1]:
            return False
        rows, expected = hidden.flatten(0, -2), whole.flatten(0, -2)
        order = torch.arange(len(rows) - 1, 0, -2, device=rows.device)
        difference = (module(rows[order]) - expected[order]).float().norm()
    tolerance = 1e-5 if whole.dtype == torch.float32 else 1e-2
    return bool(difference <= tolerance * expected.float().norm())


class RecordingHead:
    """An object that replaces the output layer while the forward of a patched model runs.

    A call returns a ``Logits`` placeholder and computes no logits.
    """

    def __init__(self, layer: nn.Module, workspace_mb: int) -> None:
        self.layer = layer
        self.workspace_mb = workspace_mb

    def __call__(self, hidden: Tensor) -> Logits:
        layer = self.layer
        return Logits(hidden, layer, lambda: layer(hidden), self.workspace_mb)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class TokenLoss:
    """``nn.CrossEntropyLoss`` of logits, or of the ``Logits`` that stand for them."""

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        self.options = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)

    def __call__(self, logits: Any, target: Tensor) -> Tensor:
        if isinstance(logits, Logits):
            return logits.cross_entropy(target, *self.options)
        result: Tensor = F.cross_entropy(logits, target, *self.options)
        return result


def _without(out: Any, logits: bool) -> Any:
    """Replace ``Logits`` placeholders in the model's output by None, or, with ``logits``, by the logits."""

    def plain(value: Any) -> Any:
        return (value.make() if logits else None) if isinstance(value, Logits) else value

    if isinstance(out, tuple):
        return tuple(plain(value) for value in out)
    return type(out)(**{key: plain(value) for key, value in out.items()})
