"""Tests that an optimizer class and its operator have the same options, defaults, ranges and error texts."""

import inspect
import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from optimizer_rules import ADAFACTOR, ADAMW, ADEMAMIX, CAME, LAMB, LION, MUON, SCHEDULE_FREE, SGD, Rule
from shoestring import optim
from shoestring.optim.base import LowMemoryOptimizer

CLASSES: tuple[tuple[type[LowMemoryOptimizer], Rule], ...] = (
    (optim.AdamW, ADAMW),
    (optim.Lion, LION),
    (optim.SGD, SGD),
    (optim.AdEMAMix, ADEMAMIX),
    (optim.ScheduleFreeAdamW, SCHEDULE_FREE),
    (optim.LAMB, LAMB),
    (optim.Adafactor, ADAFACTOR),
    (optim.CAME, CAME),
    (optim.Muon, MUON),
)
# Options of a class that its operator does not take.
OF_THE_CLASS = ("maximize", "state_format", "weight_rounding", "min_quantize_size", "seed", "train_mode")

NUMBERED = {"betas": "beta", "eps": "eps"}  # the elements of these tuples are arguments of their own


def matrix() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 8))]


def by_argument(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a class under the names of the operator's arguments: betas as beta1 and beta2."""
    arguments: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, tuple) and name in NUMBERED:
            arguments |= {f"{NUMBERED[name]}{i}": x for i, x in enumerate(value, 1)}
        else:
            arguments[name] = value
    return arguments


@pytest.mark.parametrize(("cls", "rule"), CLASSES, ids=lambda x: getattr(x, "name", None))
def test_the_operator_has_the_options_of_the_class(cls: type[LowMemoryOptimizer], rule: Rule) -> None:
    group = cls(matrix()).param_groups[0]
    own = {
        name: value
        for name, value in group.items()
        if name in inspect.signature(cls).parameters and name not in ("params", "lr", *OF_THE_CLASS)
    }
    expected = by_argument(own)
    schema = getattr(torch.ops.shoestring, f"{rule.name}_").default._schema
    keywords = [a for a in schema.arguments if a.kwarg_only]
    names = [a.name for a in keywords]
    assert names[0] == "lr" and sorted(names[1 : names.index("maximize")]) == sorted(expected)
    for argument in keywords[1 : names.index("maximize")]:
        if argument.has_default_value():
            default = expected[argument.name]
            assert argument.default_value == (list(default) if isinstance(default, tuple) else default)


@pytest.mark.parametrize(("cls", "rule"), CLASSES, ids=lambda x: getattr(x, "name", None))
def test_the_operator_has_the_state_of_the_class(cls: type[LowMemoryOptimizer], rule: Rule) -> None:
    params = matrix()
    opt = cls(params, state_format="4bit")
    params[0].grad = torch.ones(4, 8)
    opt.step()
    schema = getattr(torch.ops.shoestring, f"{rule.name}_").default._schema
    names = [a.name for a in schema.arguments if not a.kwarg_only]
    absent = ["exp_avg", "exp_avg_scale"] if rule is ADAFACTOR else []
    assert names[:3] == ["params", "grads", "step"]
    assert [n for n in names[3:] if n not in absent] == list(opt.state[params[0]])[1:]
    # The operator changes each of these tensors, and none may share memory with another.
    letters = re.findall(r"\((\w)!\)", str(schema))
    assert len(letters) == len(set(letters)) == len(names) - 1 + len(("weight_remainder", "accumulated"))


@pytest.mark.parametrize(
    ("cls", "rule", "options"),
    [
        (optim.SGD, SGD, dict(momentum=0.0)),
        (optim.SGD, SGD, dict(dampening=math.inf)),
        (optim.SGD, SGD, dict(dampening=0.5, nesterov=True)),
        (optim.AdEMAMix, ADEMAMIX, dict(alpha=-1.0)),
        (optim.AdEMAMix, ADEMAMIX, dict(t_alpha=0)),
        (optim.ScheduleFreeAdamW, SCHEDULE_FREE, dict(warmup_steps=-1)),
        (optim.Adafactor, ADAFACTOR, dict(beta2_decay=0.5)),
        (optim.Adafactor, ADAFACTOR, dict(d=0.5)),
        (optim.CAME, CAME, dict(clip_threshold=0.0)),
        (optim.Muon, MUON, dict(momentum=1.0)),
        (optim.Muon, MUON, dict(ns_steps=100)),
        (optim.Muon, MUON, dict(adjust_lr_fn="rms")),
        (optim.LAMB, LAMB, dict(weight_decay=-1.0)),
        (optim.Lion, LION, dict(weight_decay=math.nan)),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else getattr(x, "name", None),
)
def test_class_and_operator_refuse_alike(
    cls: type[LowMemoryOptimizer], rule: Rule, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"^{cls.__name__}: ") as of_class:
        cls(matrix(), **options)
    arenas = dict(zip(rule.arena_names(), rule.arenas([32], "fp32"), strict=True))
    if rule is ADAFACTOR:
        arenas |= {"exp_avg": None, "exp_avg_scale": None}
    tensors = {"params": [torch.ones(4, 8)], "grads": [torch.ones(4, 8)], **arenas, **rule.extras([(4, 8)])}
    with pytest.raises(RuntimeError) as of_operator:
        getattr(torch.ops.shoestring, f"{rule.name}_")(**tensors, **rule.hyper | options)
    texts = []
    for error, name in ((of_class, cls.__name__), (of_operator, f"{rule.name}_")):
        found = re.match(rf"{name}: (\w+: expected .*), received", str(error.value))
        assert found is not None, error.value
        texts.append(found[1].replace("::", "."))
    assert texts[0] == texts[1]
