"""Find which tensors of files make a tensor of a model, by the rules of transformers.

Files of a mixture of experts have a tensor for each expert, where the model of transformers 5 has one stack of all.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoestring.core.remote_code import why_not_loaded

Read = Callable[[str], Tensor]


class Conversion(NamedTuple):
    """A rule of transformers with the stored tensors to which it is applied, and the tensors of the model that it makes.

    rule: the WeightConverter.
    target: the name of a tensor in the model, which the rule calls its target.
    sources: names of the stored tensors by the rule's pattern, in the order in which it takes them.
    shapes: shapes of the tensors that it makes, by their names in the model.
    """

    rule: Any
    target: str
    sources: dict[str, list[str]]
    shapes: dict[str, tuple[int, ...]]

    def make(self, read: Read, model: Any) -> dict[str, Tensor]:
        """Return the tensors by their names in the model; ``read`` returns a stored tensor."""
        return _apply(self.rule, self.target, self.sources, read, model)

    def slabs(self, read: Read, model: Any) -> Iterator[Tensor]:
        """Yield the matrices of the one stack that the rule makes, or else the whole stack."""
        ((name, shape),) = self.shapes.items()
        counts = {len(names) for names in self.sources.values()}
        first, *later = self.rule.operations
        is_by_matrix = (
            (type(first).__name__, getattr(first, "dim", None)) == ("MergeModulelist", 0)
            and all(type(op).__name__ in ("Concatenate", "Transpose") for op in later)
            and all(0 not in vars(op).values() for op in later)
            and counts == {shape[0]}
        )
        if not is_by_matrix:
            yield self.make(read, model)[name]
            return
        for e in range(shape[0]):
            one = {pattern: names[e : e + 1] for pattern, names in self.sources.items()}
            yield _apply(self.rule, self.target, one, read, model)[name]


def _apply(
    rule: Any, target: str, sources: Mapping[str, list[str]], read: Read, model: Any
) -> dict[str, Tensor]:
    rule = copy.deepcopy(rule)
    for pattern, names in sources.items():
        for name in names:
            rule.add_tensor(target, name, pattern, lambda name=name: read(name))
    made = rule.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def conversions(
    model: Any, shapes: Mapping[str, tuple[int, ...]], where: str
) -> tuple[dict[str, str], list[Conversion]]:
    """Return how the files of a model make its tensors, as transformers would load them.

    Args:
        model: a model of transformers, on the meta device.
        shapes: shapes of the stored tensors, by the names that the files have.
        where: what begins errors.

    Returns:
        For each stored tensor that is loaded as it is, its name in the model (of others that are not in the model, too); and
        the rules for the rest.

    Raises:
        ValueError: a rule cannot be applied to the stored tensors.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError:  # transformers 4 has no rules
        return {name: name for name in shapes}, []
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    names: dict[str, str] = {}
    taken: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    # transformers sorts the names, too, so matrices of experts come in the order of their numbers.
    for stored in sorted(shapes, key=dot_natural_key):
        name, pattern = rename_source_key(stored, renamings, converters, prefix, state)
        if name not in state:
            name, pattern = rename_source_key(stored, [], [], prefix, state)
        if pattern is None:
            names[stored] = name
            continue
        rule = next(rule for rule in converters if pattern in rule.source_patterns)
        taken.setdefault(name, (rule, {}))[1].setdefault(pattern, []).append(stored)
    found = []
    for target, (rule, sources) in taken.items():
        _check_numbers(target, sources, where)
        try:
            made = _apply(rule, target, sources, lambda name: torch.empty(shapes[name], device="meta"), model)
        except Exception as error:  # rules may raise anything for tensors that do not fit
            first = next(iter(sources.values()))[0]
            raise ValueError(
                f"{where}: {target}: expected tensors that transformers makes it of, such as {first}, received others "
                f"({why_not_loaded(error)})"
            ) from None
        found.append(Conversion(rule, target, sources, {name: tuple(t.shape) for name, t in made.items()}))
    return names, found


def _check_numbers(target: str, sources: Mapping[str, list[str]], where: str) -> None:
    """Raise ValueError if the numbers of stored experts have a gap, which would shift the experts after it."""
    for pattern, names in sources.items():
        numbers = [re.search(pattern.replace("*", r"(\d+)"), name) for name in names]
        found = [int(number.group(1)) for number in numbers if number is not None and "*" in pattern]
        gap = next((i for i, number in enumerate(found) if number != i), None)
        if gap is not None:
            raise ValueError(
                f"{where}: {target}: expected tensors of experts 0 to {len(found) - 1}, received {names[gap]} in the place of "
                f"expert {gap}"
            )
