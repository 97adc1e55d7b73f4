"""Say in two lines what ``shoestring.patch`` has replaced in a model, and what it has left to PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from shoestring.checkpoint.blocks import listed_blocks
from shoestring.core.stacks import reads_stacks
from shoestring.integrations.transformers.names import uses

if TYPE_CHECKING:
    from shoestring.integrations.transformers.patch import PatchReport

SMALL = ("norm", "Norm", "dropout")  # words in descriptions of changes inside a module


def patch_lines(model: nn.Module, report: PatchReport) -> tuple[str, str]:
    """Return a line with the changes of a report, and one with the parts of the model's blocks that it lacks.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from shoestring.training.run.patch_lines import patch_lines
        >>> config = LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
        >>> model = LlamaForCausalLM(config)
        >>> patch_lines(model, shoestring.patch(model))[1]
        'left to PyTorch: no part of a block'
    """
    patched = Counter(change.what for change in report.changes)
    parts = dict(_unchanged(model, report))
    unpatched = Counter(f"{model.get_submodule(name).__class__.__name__}{why}" for name, why in parts.items())
    unpatched.update(f"{where}: {why}" for where, why in report.left if where not in parts)
    return (
        f"patched: {_listed(patched) or 'nothing'}",
        f"left to PyTorch: {_listed(unpatched) or 'no part of a block'}",
    )


def _listed(counts: Counter[str]) -> str:
    return "; ".join(f"{count} x {what}" if count > 1 else what for what, count in counts.items())


def _unchanged(model: nn.Module, report: PatchReport) -> Iterator[tuple[str, str]]:
    """Yield (name, reason or "") of the parts of the model's blocks that no change concerns."""
    reasons = dict(report.left)
    attends = any(change.what.startswith("attention of shoestring") for change in report.changes)
    changed = [change.where for change in report.changes if not any(word in change.what for word in SMALL)]
    for name, module in _parts(model):
        if attends and uses(type(module).forward, "ALL_ATTENTION_FUNCTIONS"):
            continue
        if not any(where == name or where.startswith(f"{name}.") for where in changed):
            yield name, f" ({reasons[name]})" if name in reasons else ""


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of blocks that compute: their children with matrices inside, and experts that are PyTorch's."""
    for name, block in listed_blocks(model).items():
        for part, module in block.named_children():
            yield from _with_matrices(f"{name}.{part}", module)


def _with_matrices(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module with matrices; of one with experts, what it has besides experts that our operators compute."""
    if reads_stacks(module) or not any(parameter.ndim > 1 for parameter in module.parameters()):
        return
    if any(reads_stacks(inner) for inner in module.modules()):
        for child, inner in module.named_children():
            yield from _with_matrices(f"{name}.{child}", inner)
        return
    yield name, module
    for inner_name, inner in module.named_modules():
        if inner_name and type(inner).__name__.endswith("Experts"):
            yield f"{name}.{inner_name}", inner
