"""Test that C++ and Python give adapters of the same rank and alpha to the same layers."""

import re
import subprocess
from typing import Any

import pytest
from torch import nn

from build_folder import program
from shoestring import lora

PARTS = (
    "self_attn.q_proj",
    "self_attn.v_proj",
    "mlp.up_proj",
    "mlp.experts.0.up_proj",
    "mlp.experts.1.up_proj",
)
MODULES = (
    *(f"model.layers.{i}.{part}" for i in range(3) for part in PARTS),
    *(f"vision.encoder.block.{i}.q_proj" for i in (0, 2)),
    "h.1.c_proj",  # only one part precedes the number
    "model.head",
    "up_proj",
)
Q, UP = "q_proj", "up_proj"

CHOSEN: tuple[dict[str, Any], ...] = (
    dict(target_modules=[Q]),
    dict(target_modules=[Q, UP], exclude_modules=["1.up_proj", "model.layers.0.self_attn.q_proj"]),
    dict(exclude_modules=["head"]),
    # layer numbers: the first number counts, not that of an expert
    dict(target_modules=[Q, UP], layers_to_transform=[1]),
    dict(target_modules=[Q, UP, "c_proj"], layers_to_transform=[0, 1]),
    dict(target_modules=["up_proj", "h.1.c_proj"], layers_to_transform=[2]),
    dict(target_modules=[Q], layers_to_transform=[2], layers_pattern=["layers"]),
    dict(target_modules=[Q, "c_proj"], layers_to_transform=[0, 1], layers_pattern=["block", "h"]),
    dict(target_modules=[Q], layers_to_transform=[0], layers_pattern=[r"(?:layers|block)"]),
    dict(target_modules=[UP], layers_to_transform=[1], layers_pattern=["experts"]),
    # ranks and alphas: the first pattern that matches the name or its ending counts
    dict(target_modules=[Q, UP], rank_pattern={UP: 3, "experts.1.up_proj": 7}),
    dict(target_modules=[Q, UP], rank_pattern={"experts.1.up_proj": 7, UP: 3}, alpha_pattern={Q: 5.5}),
    dict(target_modules=[Q], rank_pattern={"^model.layers.1.self_attn.q_proj": 2, r".*block\.\d+\.q_proj": 9}),
    dict(target_modules=[Q, UP], alpha_pattern={r"layers\.[02]\.(self_attn|mlp)\..*": 3.0}, layers_to_transform=[0, 1]),
)  # fmt: skip
REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("exclude_modules: expected names of modules, received 'haed'", dict(exclude_modules=["haed"])),
    ("layers_to_transform: expected numbers of layers", dict(target_modules=[Q], layers_to_transform=[1, 7])),
    ("layers_to_transform: expected .*none|None unless", dict(layers_to_transform=[1])),
    ("layers_to_transform: expected layer numbers", dict(target_modules=[Q], layers_pattern=["layers"])),
    (
        "layers_pattern: expected .* first group",
        dict(target_modules=[Q], layers_to_transform=[1], layers_pattern=["(layers)"]),
    ),
    (
        "rank_pattern: expected patterns for names of layers with an adapter, received 'up_proj'",
        dict(target_modules=[Q], rank_pattern={UP: 4}),
    ),
    ("alpha_pattern: expected patterns", dict(target_modules=[Q], alpha_pattern={"q": 4.0})),
    ("rank.*: expected .*at least 1", dict(target_modules=[Q], rank_pattern={Q: 0})),
)  # fmt: skip


def model() -> nn.Module:
    root = nn.Module()
    for name in MODULES:
        node = root
        *parents, last = name.split(".")
        for part in parents:
            if part not in dict(node.named_children()):
                node.add_module(part, nn.Module())
            node = node.get_submodule(part)
        node.add_module(last, nn.Linear(4, 4))
    return root


def by_python(options: dict[str, Any]) -> dict[str, tuple[int, float]]:
    adapted = lora.apply(model(), lora.LoraOptions(**options))
    layers = {name: m for name, m in adapted.named_modules() if hasattr(m, "lora_A")}
    return {name: (m.lora_A["default"].shape[0], m.adapters["default"].alpha) for name, m in layers.items()}


def by_cpp(cases: list[dict[str, Any]]) -> list[list[str]]:
    """Return for each case the lines that the C++ program targets_file prints."""
    keys = {"target_modules": "target", "exclude_modules": "exclude", "layers_to_transform": "number"}
    arguments = [f"module={name}" for name in MODULES]
    for case in cases:
        for option, entries in case.items():
            if isinstance(entries, dict):
                key = option.removesuffix("_pattern")
                arguments += [f"{key}={value}:{pattern}" for pattern, value in entries.items()]
            else:
                arguments += [f"{keys.get(option, option)}={entry}" for entry in entries]
        arguments.append("apply=1")
    done = subprocess.run([*program("targets_file"), *arguments], capture_output=True, text=True, check=True)
    return [block.splitlines() for block in done.stdout.split("\n\n")[: len(cases)]]


def test_the_same_layers_and_ranks() -> None:
    for case, lines in zip(CHOSEN, by_cpp(list(CHOSEN)), strict=True):
        assert all(re.fullmatch(r"\S+ \d+ \S+", line) for line in lines), (case, lines)
        received = {name: (int(rank), float(alpha)) for name, rank, alpha in (line.split() for line in lines)}
        expected = by_python(case)
        assert received == expected and expected, case


def test_the_same_options_are_refused() -> None:
    for (message, case), lines in zip(REFUSED, by_cpp([case for _, case in REFUSED]), strict=True):
        assert re.match(f"lora::apply: (?:{message})", "\n".join(lines)), (case, lines)
        with pytest.raises(ValueError, match=message):
            lora.apply(model(), lora.LoraOptions(**case))
