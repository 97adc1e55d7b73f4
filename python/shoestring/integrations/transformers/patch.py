"""Define ``shoestring.patch``, which makes a transformers model use fused operators, and its report."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.module_argument import check_module
from shoestring.core.one_thread import holding
from shoestring.integrations.transformers.attention import use_attention
from shoestring.integrations.transformers.elementwise import fuse_dropouts, fuse_gelus
from shoestring.integrations.transformers.embeddings import fuse_embeddings
from shoestring.integrations.transformers.experts import use_experts
from shoestring.integrations.transformers.head import has_meta, weights
from shoestring.integrations.transformers.head_norms import fuse_head_norms
from shoestring.integrations.transformers.layers import fuse_mlps, fuse_norms, fuse_rotations
from shoestring.integrations.transformers.loss import (
    LOSS,
    RECORDING,
    TokenLoss,
    computes_each_token,
    head_path,
    patched_class,
    replace_inside,
)
from shoestring.integrations.transformers.mlps import fuse_gelu_mlps
from shoestring.integrations.transformers.names import claim, uses
from shoestring.integrations.transformers.products import Products, by_default, by_measurement
from shoestring.integrations.transformers.projections import fuse
from shoestring.integrations.transformers.residuals import fuse_post_norms, fuse_residuals
from shoestring.integrations.transformers.trial import alike, loss_of_few, output_of_few

# Held by patch() and undo(), which also change globals that models share.
_patching = threading.RLock()


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

    @holding(_patching)
    def undo(self) -> None:
        """Undo every change, the last one first. A second call does nothing.

        Threads that patch or undo wait for each other. No other thread may run the model meanwhile.

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


@holding(_patching)
def patch(
    model: nn.Module,
    *,
    logits: bool | None = None,
    projections: bool = True,
    attention: bool = True,
    experts: bool = True,
    norms: bool = True,
    rope: bool = True,
    mlp: bool = True,
    linear: bool | None = None,
    dropout: bool = True,
    embedding: bool = True,
    workspace_mb: int = 0,
) -> PatchReport:
    """Make a Hugging Face transformers model use fused operators, and a language model need no logits.

    Any transformers model is accepted: decoders, encoders, image models. A model without an output layer over
    a vocabulary keeps its loss.

    Loss: with ``labels``, the model's own forward runs up to the output layer. The loss is then
    ``shoestring.linear_cross_entropy`` of the hidden states. In training mode ``logits`` in the output is
    None; in evaluation mode the model also computes them (see ``logits``). Without labels, for example in
    ``generate``, or with a ``loss_function`` that the user has set, the model computes its own loss and
    logits. Operations on logits before the loss (a softcap, a scale) are recorded while the
    model's own forward runs. The shift of labels, ``shift_labels``, ``num_items_in_batch`` and
    ``logits_to_keep`` work for the same reason. An operation that is impossible without logits raises an
    error. The output layer may be quantised or have LoRA adapters (shoestring's or PEFT's), also if these are
    added later.

    A masked language model ignores most labels. The loss skips ignored tokens. On the CPU, a head that
    transforms each token before the output layer, such as BERT's ``cls``, runs for tokens with labels only.

    Projections: query, key and value of an attention module become one operator if their weights are frozen,
    have adapters or are quantised. The operator ``lora_linear_group`` does shared work once and uses one
    dropout mask for all adapters. Llama-style MLPs with a low-rank adapter on ``down_proj`` save neither
    ``silu(gate)`` nor its product with ``up`` for backward. Each call of a layer decides whether this is
    possible, so adapters may be added later.

    Attention: ``shoestring.attention`` replaces attention if the model uses transformers' attention interface
    and is set to "eager" or "sdpa" (:func:`shoestring.register_attention`). Set ``attention=False`` if
    attention weights are needed. The setting is stored in the model's configuration, so copies and pickles
    keep it, but ``save_pretrained`` does not write it.

    Experts: the experts of a mixture become calls of :func:`moe_experts` or :func:`grouped_linear`
    (:func:`shoestring.register_experts`), with transformers 5. The setting is stored in the model's configuration, as
    that of attention.

    Norms, rotary embeddings and MLPs: each item of the list below becomes one operator whose results equal
    the model's own within rounding. Each module is tested on random numbers. A module that computes something
    else stays unchanged, and the report says so.

    - RMSNorm with Llama's or Gemma's rounding, and LayerNorm, with the residual sum before them if the layer
      is Llama's, Gemma's, BERT's, ViT's or CLIP's. If the sum is in fp32, a layer of a decoder or of an image
      model also computes the norm at the start of the next layer, except under checkpoints and sharding; the
      bits are the same.
    - Rotary embeddings, with the per-head norms of queries and keys before them, if any.
    - The gated products of SwiGLU and GeGLU MLPs, and GELU modules. MLPs of two linear layers with GELU save
      the input of GELU for backward, but not its result.

    Dropout: modules of ``nn.Dropout`` use ``shoestring.seeded_dropout``, which stores no mask. Its random
    numbers differ from PyTorch's, so a run with dropout drops other elements than an unpatched run.

    Linear layers: dense ``nn.Linear`` layers, trainable or frozen, become the operators :func:`shoestring.linear` and
    :func:`shoestring.linear_group`. Query, key and value share one call, and so do gate and up. Under
    autocast, weights and activations are rounded while they are multiplied, and gradients are computed in
    the dtypes of the weights. The layers stay ``nn.Linear`` modules; their parents call the operators
    instead. Each call of a layer decides whether this is possible: a layer that has hooks, another class, a
    quantised weight or an adapter is called as usual, and so are layers on a GPU and batches of fewer than
    32 tokens. A direct layer of the model, such as the output layer, and a layer in an ``nn.Sequential`` stay
    unchanged. Products of the two libraries differ within rounding. On CPUs with AMX, ``linear=None`` gives
    the same bits in every process. Where choices are measured, two processes can choose differently, so
    their results can differ in the last bits; ``linear=False`` rules this out. A choice is measured once in a
    process for each shape, and the report says what time and memory the measurements took.

    Embeddings: trainable ``nn.Embedding`` modules on the CPU use ``shoestring.embedding``, whose backward
    writes the dense gradient in one pass.

    Only this model instance changes: it gets its own class, derived from its former class and with the same
    name. A deep copy or a pickle of the model has no changes. ``save_pretrained`` writes the same files
    before and after ``undo()``. Two threads must not run the forward of one instance at the same time.
    Replicas of the model, such as those of ``DataParallel``, may run at the same time.

    Args:
        model: the model itself, or a ``PeftModel`` around it. Patch the model before ``torch.compile``, DDP
            or other wrappers.
        logits: whether the output contains logits if labels are given. None: in evaluation mode only, as
            ``compute_metrics`` of the Trainer of transformers needs. Logits cost a second product with the
            output layer, and memory for tokens * vocabulary elements in the dtype of the model. False saves
            both in evaluation, too.
        projections: False computes query, key and value one after the other, and leaves MLPs with adapters
            unchanged.
        attention: False leaves the attention implementation unchanged.
        experts: False leaves the experts implementation unchanged.
        norms, rope, mlp, dropout, embedding: False leaves norms, rotary embeddings, the activations of MLPs,
            dropout or embeddings unchanged.
        linear: whether dense layers use shoestring's operators. False: none. True: measures each
            product of this model's layers, chooses the faster library for each, and leaves a layer to PyTorch
            if PyTorch is faster over all. None: uses them where whole training steps were measured faster.
            On CPUs with AMX these are products in bf16, autocast included, and nothing is measured. On other
            CPUs, a layer is measured, in fp32 and bf16, and left to PyTorch unless shoestring's products are
            clearly faster. The C++ function ``dense_linear_group`` chooses likewise.
            On a GPU, layers are left to PyTorch.
        workspace_mb: the argument of ``linear_cross_entropy``.

    Returns:
        A report: its text lists the changes, and ``undo()`` reverts them.

    Raises:
        TypeError: the model is no transformers model, or a causal language model whose loss needs more than
            ``linear_cross_entropy`` offers. Another model whose loss needs more keeps its loss.
        ValueError: the model is patched already, or its loss or output differs from the model's own in a test
            on eight tokens or one image.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(config)
        >>> report = shoestring.patch(model)
        >>> tokens = torch.tensor([[1, 2, 3, 4]])
        >>> model(input_ids=tokens, labels=tokens).logits is None
        True
        >>> model.eval()(input_ids=tokens, labels=tokens).logits.shape
        torch.Size([1, 4, 32])
    """
    check_module("shoestring.patch", model)
    get_base_model: Any = getattr(model, "get_base_model", None)
    target: Any = model if get_base_model is None else get_base_model()
    name, dtype = type(target).__name__, _check(target)
    path = head_path(target)
    # A causal language model has its output layer as an attribute. Its loss must work without logits. Another
    # model keeps its own loss if it does more with its logits.
    decoder = not getattr(target.config, "is_encoder_decoder", False)
    strict = path is not None and "." not in path and decoder
    if strict:
        weights(target.get_submodule(str(path)), torch.empty(0))
    reference, run, left = _first_results(target, path, strict)
    if run is not loss_of_few:
        path = None
    report = PatchReport(_own_class(target, path, logits, workspace_mb), left)

    def check() -> None:
        result = reference if run is None else run(target)
        if not alike(reference, result, dtype):
            what = "the loss" if run is loss_of_few else "an output"
            raise ValueError(
                f"shoestring.patch: model: expected {what} of {name} on few inputs with the norm "
                f"{reference.norm():.5f}, received {result.norm():.5f} after the patch; leave this model unpatched"
            )

    if path is not None and not strict:
        try:
            weights(target.get_submodule(path), torch.empty(0))
            check()
        except Exception as error:
            report.undo()
            report = PatchReport(_own_class(target, None, logits, workspace_mb), left)
            report.left.append((path, f"a loss that needs its logits: {error}"))
    trial = functools.partial(run or output_of_few, target)
    try:
        for is_on, fused in (
            (norms, fuse_norms),
            (rope, fuse_rotations),
            (mlp, fuse_mlps),
            (mlp, fuse_gelus),
            (mlp, fuse_gelu_mlps),
            (dropout, fuse_dropouts),
            (embedding, fuse_embeddings),
            (norms, fuse_post_norms),
            (norms and rope and run is not None, functools.partial(fuse_head_norms, run=trial)),
            (norms and run is not None, functools.partial(fuse_residuals, run=trial)),
        ):
            if is_on:
                changes, left = fused(target)
                report.changes += [Change(*change) for change in changes]
                report.left += left
        products = None if linear is False else Products(by_measurement if linear else by_default)
        if projections or products is not None:
            changes, left = fuse(target, adapters=projections, products=products, head=path)
            report.changes += [Change(*change) for change in changes]
            report.left += [pair for pair in left if pair not in report.left]
            report.measured = "" if products is None else str(products)
        # A convolutional model also has the setting, but no attention.
        kinds = ("sdpa", "attention_backend")
        attends = path is not None or any(getattr(target, f"_supports_{kind}", False) for kind in kinds)
        if experts and run is not None:
            changes, left = use_experts(target, check)
            report.changes += [Change(*change) for change in changes]
            report.left += left
        replaces_attention = attention and attends and run is not None
        changes, left = use_attention(target, check) if replaces_attention else ([], [])
        report.changes += [Change(*change) for change in changes]
        report.left += left
        if not changes:  # if use_attention() changed the model, it has called check()
            check()
    except (TypeError, AttributeError) as error:
        report.undo()
        raise TypeError(f"shoestring.patch: model: the loss of {name} needs its logits ({error})") from None
    except BaseException:
        report.undo()
        raise
    return report


def _check(target: Any) -> torch.dtype:
    """Raise unless ``target`` is a transformers model that can be patched; return its parameters' dtype."""
    name = type(target).__name__
    if RECORDING in target.__dict__:
        raise ValueError(
            f"shoestring.patch: model: this {name} is patched already; call undo() of its report first"
        )
    if not hasattr(target, "config") or not hasattr(target, "get_output_embeddings"):
        raise TypeError(
            f"shoestring.patch: model: expected a Hugging Face transformers model, received {name}; patch the "
            "model before it is wrapped"
        )
    if "forward" in target.__dict__:
        raise TypeError(
            f"shoestring.patch: model: the forward of this {name} was replaced by another library; call "
            "shoestring.patch before that library"
        )
    if has_meta(target):
        raise ValueError(
            f"shoestring.patch: model: this {name} is on the meta device; load its weights first"
        )
    dtypes = [p.dtype for p in target.parameters() if p.is_floating_point()]
    return dtypes[0] if dtypes else torch.float32


def _first_results(
    target: Any, path: str | None, strict: bool
) -> tuple[Tensor, Callable[[Any], Tensor] | None, list[tuple[str, str]]]:
    """Run the model on few inputs before it is patched.

    Returns:
        The results, the function that ran the model, and what is left unchanged with the reason. The function
        is ``loss_of_few`` if the model computes a loss from tokens, ``output_of_few`` for another model, and
        None if no inputs are known.

    Raises:
        TypeError: with ``strict``, the model computes no loss.
    """
    name = type(target).__name__
    left: list[tuple[str, str]] = []
    if path is not None:
        try:
            return loss_of_few(target), loss_of_few, left
        except Exception as error:
            if strict:
                raise TypeError(
                    f"shoestring.patch: model: expected {name} to compute a loss from input_ids and labels "
                    f"alone, received {type(error).__name__}: {error}"
                ) from None
            left.append((path, f"no loss from input_ids and labels alone: {error}"))
    try:
        return output_of_few(target), output_of_few, left
    except Exception as error:
        left.append((name, f"not run on few inputs, so its attention and residual sums stay: {error}"))
        return torch.empty(0), None, left


def _own_class(target: Any, path: str | None, logits: bool | None, workspace_mb: int) -> list[Change]:
    """Give the model its own class, whose forward computes the loss without logits if ``path`` is given."""
    original, name = type(target), type(target).__name__
    inside = path is not None and "." in path
    first = "" if path is None else path.partition(".")[0]
    by_token = inside and computes_each_token(target._modules[first], functools.partial(loss_of_few, target))
    patched = patched_class(original, path, by_token, logits, workspace_mb)

    def undo() -> None:
        if type(target) is not patched:
            raise RuntimeError(
                f"PatchReport.undo: model: expected {name} as patched, received {type(target).__name__}, "
                "which another library or a later patch has put in place; undo that first"
            )
        target.__class__ = original
        target.__dict__.pop(RECORDING, None)
        release()

    makes_loss = path is not None and uses(original.forward, LOSS)
    release = claim(original.forward, LOSS, TokenLoss) if makes_loss else lambda: None
    target.__dict__[RECORDING] = False
    target.__class__ = patched
    if path is None:
        return [Change(name, "a class of its own, with its own loss", undo)]
    what = f"loss without logits, from {path}"
    changes = [Change(name, what, undo)]
    if inside:
        only = f", and {first} for tokens with labels only" if by_token else ""
        changes[0].what = what + only
        changes.append(
            Change(
                path.rpartition(".")[0],
                "output layer without logits",
                replace_inside(target, path, workspace_mb),
            )
        )
    return changes
