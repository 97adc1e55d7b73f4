"""``shoestring.patch``: what it changes, and its way back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.integrations.transformers.attention import use_attention
from shoestring.integrations.transformers.head import has_meta, weights
from shoestring.integrations.transformers.head_norms import fuse_head_norms
from shoestring.integrations.transformers.layers import fuse_mlps, fuse_norms, fuse_rotations
from shoestring.integrations.transformers.logits import Logits
from shoestring.integrations.transformers.projections import fuse
from shoestring.integrations.transformers.residuals import fuse_residuals

RECORDING = "_shoestring_recording"  # an attribute of a patched model, true while its forward makes no logits


@dataclass
class Change:
    """One thing that ``patch`` changed: where, what, and how to take it back."""

    where: str
    what: str
    undo: Callable[[], None] = field(repr=False)


@dataclass
class PatchReport:
    """What ``shoestring.patch`` changed; ``undo`` makes it as it was. ``left``: where it changed nothing, and why."""

    changes: list[Change]
    left: list[tuple[str, str]] = field(default_factory=list)

    def undo(self) -> None:
        """Takes every change back, the last first; a second call does nothing.

        Raises:
            RuntimeError: the model has been changed by others since, who have to take theirs back first.
        """
        while self.changes:
            self.changes[-1].undo()
            self.changes.pop()

    def __str__(self) -> str:
        lines = [f"{change.where}: {change.what}" for change in self.changes] or ["nothing is patched"]
        return "\n".join(lines + [f"{where}: left alone: {why}" for where, why in self.left])


def patch(
    model: nn.Module,
    *,
    logits: bool = False,
    projections: bool = True,
    attention: bool = True,
    norms: bool = True,
    rope: bool = True,
    mlp: bool = True,
    workspace_mb: int = 0,
) -> PatchReport:
    """Makes a Hugging Face causal language model compute its loss without logits, and its layers with fused operators.

    With ``labels``, its forward then goes as ever, but from the output layer on: the loss is
    ``shoestring.linear_cross_entropy`` of the hidden states, and ``logits`` of what it returns is None. Without labels,
    in ``generate`` for one, or with a ``loss_function`` that the user has set, it is the model's own. What the model
    does to its logits before the loss (a softcap, a scale) is taken from its own forward while that runs, as are shift,
    ``shift_labels``, ``num_items_in_batch`` and ``logits_to_keep``; what cannot be done without logits is refused. A
    head with LoRA (ours or PEFT's), or quantised, is honoured, and so is one that gets there later.

    Query, key and value of an attention module are one operator where their weights are frozen, with adapters or
    quantised (``lora_linear_group``: what they share is done once, and the dropout of their adapters has one mask), and
    MLPs of Llama's form with a low-rank adapter on ``down_proj`` keep neither ``silu(gate)`` nor its product with ``up``
    for backward. That goes by what the layers are when they are called: adapters may come later.

    Attention is ``shoestring.attention`` where the model leaves it to transformers' interface and is set to "eager" or
    "sdpa" (:func:`shoestring.register_attention`); what needs attention weights has to leave it out. The setting is the
    configuration's, so copies and pickles have it too, though no file that ``save_pretrained`` writes.

    RMSNorm (in Llama's or Gemma's manner of rounding; with the residual's sum before it, where a decoder layer has no
    more than that) and LayerNorm, rotary embeddings (with the norms of each head of queries and keys before them, where
    there are such) and the products of SwiGLU's and GeGLU's MLPs are one operator each, with the model's own results
    within rounding. What a module computes is found out on random numbers; one that computes something else stays as it
    is, and the report says so.

    Only this instance changes: it gets a class of its own, derived from its class and with that one's name. A deep copy
    of it, and what is unpickled, is the plain model. Undo, or not, before ``save_pretrained``: the files are the same.
    Two threads must not be in its forward at a time (in replicas, ``DataParallel``'s for one, they may).

    Args:
        model: the model itself, or a ``PeftModel`` around it; patch before ``torch.compile``, DDP and the like.
        logits: whether the output has logits with labels too, as ``compute_metrics`` wants them. They then exist whole.
        projections: False: query, key and value one after the other, MLPs with adapters as they are.
        attention: False leaves attention itself alone.
        norms, rope, mlp: False leaves norms, rotary embeddings or the activations of MLPs as they are.
        workspace_mb: as for ``linear_cross_entropy``.

    Returns:
        A report: its text says what was changed; ``undo()`` takes it back.

    Raises:
        TypeError: not a causal language model, or one whose loss needs more than ``linear_cross_entropy`` has.
        ValueError: patched already, or a loss that differs from the model's own on eight tokens, which are tried.
    """
    get_base_model: Any = getattr(model, "get_base_model", None)
    target: Any = model if get_base_model is None else get_base_model()
    name = type(target).__name__
    if RECORDING in target.__dict__:
        raise ValueError(
            f"shoestring.patch: model: this {name} is patched already; undo the first report before"
        )
    head_name = _head_name(target)
    if has_meta(target):
        raise ValueError(
            f"shoestring.patch: model: this {name} is on the meta device; load its weights before"
        )
    weights(target.get_submodule(head_name), torch.empty(0))
    original = type(target)
    patched = _patched_class(original, head_name, logits, workspace_mb)

    def undo() -> None:
        if type(target) is not patched:
            raise RuntimeError(
                f"PatchReport.undo: model: expected {name} as patched, received {type(target).__name__}, changed after "
                "that; take that back before"
            )
        target.__class__ = original
        target.__dict__.pop(RECORDING, None)

    try:
        own = _loss_of_few(target)
    except Exception as error:
        raise TypeError(
            f"shoestring.patch: model: expected {name} to compute a loss from input_ids and labels alone, received "
            f"{type(error).__name__}: {error}"
        ) from None
    target.__dict__[RECORDING] = False
    target.__class__ = patched
    report = PatchReport([Change(name, f"loss without logits, from {head_name}", undo)])
    run = functools.partial(_loss_of_few, target)
    for wanted, fused in (
        (norms, fuse_norms),
        (rope, fuse_rotations),
        (mlp, fuse_mlps),
        (norms and rope, functools.partial(fuse_head_norms, run=run)),
        (norms, functools.partial(fuse_residuals, run=run)),
    ):
        if wanted:
            changes, left = fused(target)
            report.changes += [Change(*change) for change in changes]
            report.left += left
    if projections:
        report.changes += [Change(*change) for change in fuse(target)]
    tolerance = 1e-4 if next(target.parameters()).dtype in (torch.float32, torch.float64) else 3e-2

    def check() -> None:
        ours = _loss_of_few(target)
        if not abs(own - ours) <= tolerance * max(1.0, abs(own)):
            raise ValueError(
                f"shoestring.patch: model: expected the loss of {name}, {own:.5f} on eight tokens, received {ours:.5f} "
                "without logits; leave this model unpatched"
            )

    try:
        changes, left = use_attention(target, check) if attention else ([], [])
        report.changes += [Change(*change) for change in changes]
        report.left += left
        if not changes:  # else it has been
            check()
    except (TypeError, AttributeError) as error:
        report.undo()
        raise TypeError(f"shoestring.patch: model: the loss of {name} needs its logits ({error})") from None
    except BaseException:
        report.undo()
        raise
    return report


def _head_name(model: Any) -> str:
    """The attribute of the model that is its output layer."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    names: list[str] = [key for key, child in model._modules.items() if child is head and head is not None]
    forward = inspect.signature(type(model).forward).parameters
    if not names or "labels" not in forward:
        raise TypeError(
            f"shoestring.patch: model: expected a Hugging Face causal language model with its output layer as an "
            f"attribute and labels in forward, received {type(model).__name__}; patch the model before it is wrapped"
        )
    if "forward" in model.__dict__:
        raise TypeError(
            f"shoestring.patch: model: the forward of this {type(model).__name__} was replaced by another library; "
            "patch before that"
        )
    return names[0]


def _patched_class(original: type[Any], head_name: str, logits: bool, workspace_mb: int) -> type:
    """A class for one instance: the original's forward, with an output layer that makes no logits."""
    position = list(inspect.signature(original.forward).parameters).index("labels")

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = (
            kwargs["labels"]
            if "labels" in kwargs
            else (args[position - 1] if len(args) >= position else None)
        )
        # A loss function that the user has set wants what it always got.
        if labels is None or "_loss_function" in self.__dict__:
            return original.forward(self, *args, **kwargs)
        setattr(self, RECORDING, True)
        try:
            out = original.forward(self, *args, **kwargs)
        finally:
            setattr(self, RECORDING, False)
        return _without(out, logits)

    def head(self: Any) -> Any:
        layer = self._modules[head_name]
        return RecordingHead(layer, workspace_mb) if getattr(self, RECORDING) else layer

    def reduce(self: Any, protocol: Any) -> Any:
        """As the plain model, so that copies and files know nothing of this class."""
        state: Any = object.__reduce_ex__(self, 2)[2]
        return object.__new__, (original,), {key: value for key, value in state.items() if key != RECORDING}

    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    body = {"forward": forward, head_name: property(head), "__reduce_ex__": reduce}
    return type(original.__name__, (original,), names | body)


class RecordingHead:
    """The output layer while a patched forward runs: called, it makes no logits."""

    def __init__(self, layer: nn.Module, workspace_mb: int) -> None:
        self.layer = layer
        self.workspace_mb = workspace_mb

    def __call__(self, hidden: Tensor) -> Logits:
        layer = self.layer
        return Logits(hidden, layer, lambda: layer(hidden), self.workspace_mb)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def _without(out: Any, logits: bool) -> Any:
    """The model's output with None, or the logits themselves, where it has what stands for them."""

    def plain(value: Any) -> Any:
        return (value.make() if logits else None) if isinstance(value, Logits) else value

    if isinstance(out, tuple):
        return tuple(plain(value) for value in out)
    return type(out)(**{key: plain(value) for key, value in out.items()})


def _loss_of_few(model: Any) -> float:
    """The model's loss of eight tokens, without dropout."""
    table = model.get_input_embeddings().weight
    ids = torch.arange(8, device=table.device).remainder(table.shape[0])[None]
    modes = [(module, module.training) for module in model.modules()]
    # Some caches ask for layers that a model need not have, or for an encoder.
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    model.eval()
    try:
        with torch.no_grad():
            return float(model(input_ids=ids, labels=ids, return_dict=True, **options).loss)
    finally:
        for module, mode in modes:
            module.training = mode
