"""Define ``shoestring.patch``, which makes a transformers model use fused operators, and its report."""

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
from shoestring.integrations.transformers.products import Products, by_measurement, by_rule
from shoestring.integrations.transformers.projections import fuse
from shoestring.integrations.transformers.residuals import fuse_residuals

# name of an attribute of patched models: True while the forward runs without logits
RECORDING = "_shoestring_recording"


@dataclass
class Change:
    """One change by ``patch``: name of the module, description, and a function that undoes the change."""

    where: str
    what: str
    undo: Callable[[], None] = field(repr=False)


@dataclass
class PatchReport:
    """The changes that ``shoestring.patch`` made; ``undo`` reverts them.

    Attributes:
        changes: the changes, in the order in which they were made.
        left: pairs of a module that was left unchanged and the reason.
        measured: the time and memory that measurements of linear layers took; empty if nothing was measured.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(config)
        >>> report = shoestring.patch(model)
        >>> len(report.changes) > 0, report.left
        (True, [])
        >>> report.undo()
    """

    changes: list[Change]
    left: list[tuple[str, str]] = field(default_factory=list)
    measured: str = ""

    def undo(self) -> None:
        """Undo every change, the last one first. A second call does nothing.

        Raises:
            RuntimeError: other code has changed the model after the patch; undo the other change first.
        """
        while self.changes:
            self.changes[-1].undo()
            self.changes.pop()

    def __str__(self) -> str:
        lines = [f"{change.where}: {change.what}" for change in self.changes] or ["nothing is patched"]
        lines += [f"{where}: left alone: {why}" for where, why in self.left]
        return "\n".join(lines + [self.measured] * bool(self.measured))


def patch(
    model: nn.Module,
    *,
    logits: bool = False,
    projections: bool = True,
    attention: bool = True,
    norms: bool = True,
    rope: bool = True,
    mlp: bool = True,
    linear: bool | None = False,
    workspace_mb: int = 0,
) -> PatchReport:
    """Make a Hugging Face causal language model use fused operators and compute its loss without logits.

    Loss: with ``labels``, the model's own forward runs up to the output layer. The loss is then
    ``shoestring.linear_cross_entropy`` of the hidden states, and ``logits`` in the output is None. Without
    labels, for example in ``generate``, or with a ``loss_function`` that the user has set, the model computes
    its own loss and logits. Operations on logits before the loss (a softcap, a scale) are recorded while the
    model's own forward runs. The shift of labels, ``shift_labels``, ``num_items_in_batch`` and
    ``logits_to_keep`` work for the same reason. An operation that is impossible without logits raises an
    error. The output layer may be quantised or have LoRA adapters (shoestring's or PEFT's), also if these are
    added later.

    Projections: query, key and value of an attention module become one operator if their weights are frozen,
    have adapters or are quantised. The operator ``lora_linear_group`` does shared work once and uses one
    dropout mask for all adapters. Llama-style MLPs with a low-rank adapter on ``down_proj`` save neither
    ``silu(gate)`` nor its product with ``up`` for backward. Each call of a layer decides whether this is
    possible, so adapters may be added later.

    Attention: ``shoestring.attention`` replaces attention if the model uses transformers' attention interface
    and is set to "eager" or "sdpa" (:func:`shoestring.register_attention`). Set ``attention=False`` if
    attention weights are needed. The setting is stored in the model's configuration, so copies and pickles
    keep it, but ``save_pretrained`` does not write it.

    Norms, rotary embeddings and MLPs: each item of the list below becomes one operator whose results equal
    the model's own within rounding. Each module is tested on random numbers. A module that computes something
    else stays unchanged, and the report says so.

    - RMSNorm with Llama's or Gemma's rounding, with the residual sum before it if the decoder layer allows
      it, and LayerNorm.
    - Rotary embeddings, with the per-head norms of queries and keys before them, if any.
    - The gated products of SwiGLU and GeGLU MLPs.

    Linear layers: trainable dense ``nn.Linear`` layers become the operators :func:`shoestring.linear` and
    :func:`shoestring.linear_group`. Query, key and value share one call, and so do gate and up. Under
    autocast, weights and activations are rounded while they are multiplied, and gradients are computed in
    the dtypes of the weights. The layers stay ``nn.Linear`` modules; their parents call the operators
    instead. Each call of a layer decides whether this is possible: a layer that has hooks, another class, a
    quantised weight or an adapter is called as usual, and so are layers on a GPU and batches of fewer than
    32 tokens. A direct layer of the model, such as the output layer, and a layer in an ``nn.Sequential`` stay
    unchanged.

    Only this model instance changes: it gets its own class, derived from its former class and with the same
    name. A deep copy or a pickle of the model has no changes. ``save_pretrained`` writes the same files
    before and after ``undo()``. Two threads must not run the forward of one instance at the same time.
    Replicas of the model, such as those of ``DataParallel``, may run at the same time.

    Args:
        model: the model itself, or a ``PeftModel`` around it. Patch the model before ``torch.compile``, DDP
            or other wrappers.
        logits: whether the output contains logits also if labels are given, as ``compute_metrics`` needs. The
            whole tensor of logits is then in memory.
        projections: False computes query, key and value one after the other, and leaves MLPs with adapters
            unchanged.
        attention: False leaves the attention implementation unchanged.
        norms, rope, mlp: False leaves norms, rotary embeddings or the activations of MLPs unchanged.
        linear: whether trainable dense layers use shoestring's operators. None uses them where whole training
            steps were measured faster: in bf16, autocast included, on CPUs with AMX. True measures the products of this
            model, chooses the faster one for each, and leaves a layer to PyTorch if PyTorch is faster.
            Products by the two libraries differ within rounding, so two processes that measure may
            differ in the last bits. The rule gives the same bits in every process.
        workspace_mb: the argument of ``linear_cross_entropy``.

    Returns:
        A report: its text lists the changes, and ``undo()`` reverts them.

    Raises:
        TypeError: the model is not a causal language model, or its loss needs more than
            ``linear_cross_entropy`` offers.
        ValueError: the model is patched already, or its loss differs from the model's own in a test on eight
            tokens.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(config)
        >>> report = shoestring.patch(model)
        >>> tokens = torch.tensor([[1, 2, 3, 4]])
        >>> model(input_ids=tokens, labels=tokens).logits is None
        True
    """
    get_base_model: Any = getattr(model, "get_base_model", None)
    target: Any = model if get_base_model is None else get_base_model()
    name = type(target).__name__
    if RECORDING in target.__dict__:
        raise ValueError(
            f"shoestring.patch: model: this {name} is patched already; call undo() of its report first"
        )
    head_name = _head_name(target)
    if has_meta(target):
        raise ValueError(
            f"shoestring.patch: model: this {name} is on the meta device; load its weights first"
        )
    weights(target.get_submodule(head_name), torch.empty(0))
    original = type(target)
    patched = _patched_class(original, head_name, logits, workspace_mb)

    def undo() -> None:
        if type(target) is not patched:
            raise RuntimeError(
                f"PatchReport.undo: model: expected {name} as patched, received {type(target).__name__}, "
                "which another library or a later patch has put in place; undo that first"
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
    products = None if linear is False else Products(by_measurement if linear else by_rule)
    if projections or products is not None:
        changes, left = fuse(target, adapters=projections, products=products)
        report.changes += [Change(*change) for change in changes]
        report.left += left
        report.measured = "" if products is None else str(products)
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
        if not changes:  # if use_attention() changed the model, it has already called check()
            check()
    except (TypeError, AttributeError) as error:
        report.undo()
        raise TypeError(f"shoestring.patch: model: the loss of {name} needs its logits ({error})") from None
    except BaseException:
        report.undo()
        raise
    return report


def _head_name(model: Any) -> str:
    """Return the name of the model's attribute that holds its output layer."""
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
            f"shoestring.patch: model: the forward of this {type(model).__name__} was replaced by another "
            "library; call shoestring.patch before that library"
        )
    return names[0]


def _patched_class(original: type[Any], head_name: str, logits: bool, workspace_mb: int) -> type:
    """Return a subclass of the model class ``original``, for a single model instance.

    The forward is the original one, except that the output layer computes no logits if labels are given.
    """
    position = list(inspect.signature(original.forward).parameters).index("labels")

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = (
            kwargs["labels"]
            if "labels" in kwargs
            else (args[position - 1] if len(args) >= position else None)
        )
        # A loss function that the user has set on the model expects a tensor of logits.
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
        """Pickle the model with its original class, so that copies and files lack the patched class."""
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


def _without(out: Any, logits: bool) -> Any:
    """Replace ``Logits`` placeholders in the model's output by None, or, with ``logits``, by the logits."""

    def plain(value: Any) -> Any:
        return (value.make() if logits else None) if isinstance(value, Logits) else value

    if isinstance(out, tuple):
        return tuple(plain(value) for value in out)
    return type(out)(**{key: plain(value) for key, value in out.items()})


def _loss_of_few(model: Any) -> float:
    """Return the model's loss on eight tokens in evaluation mode, to compare it before and after patching."""
    table = model.get_input_embeddings().weight
    ids = torch.arange(8, device=table.device).remainder(table.shape[0])[None]
    modes = [(module, module.training) for module in model.modules()]
    # Disable the key-value cache, because some kinds of cache need layers that a small model lacks, or an
    # encoder.
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    model.eval()
    try:
        with torch.no_grad():
            return float(model(input_ids=ids, labels=ids, return_dict=True, **options).loss)
    finally:
        for module, mode in modes:
            module.training = mode
