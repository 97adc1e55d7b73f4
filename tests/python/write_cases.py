"""Write cases of the table (operator_cases.py) to a file that tests/cpp/core/test_operator_cases.cpp reads.

    python tests/python/write_cases.py [--seed N] [--backend simt]

The file is operator_cases.safetensors beside the C++ tests, and emulated_cases.safetensors for the emulated kernels. It
holds the tensors of each case: the arguments, the upstream gradients, and the results and gradients of the reference in
fp64. The metadata holds the other arguments and the bound of each error. The options may also be in PYTEST_ADDOPTS, as
those of the Python suites.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_iter

sys.path.append(str(Path(__file__).parents[1]))  # the folder of the references

import shoestring  # noqa: F401  (registers the operators)
from build_folder import BUILD, EMULATOR
from operator_cases import CAPABILITIES, Case, Draw, Operator, label, operators
from rounding import error_bounds

# The number of cases of an operator, and of elements of a case, by backends.
LIMITS = {"cpu": (25, 150_000), "simt": (4, 13_000)}
MANY = 20_000  # elements; at most 2 cases of an operator have more, so that the file has about 40 MB


def draw_cases(operator: Operator, seed: int, most: int, elements: int) -> list[Case]:
    """Draw cases of at most ``elements`` elements, in which the options, dtypes and sizes occur about equally often."""

    def count(case: Case) -> int:
        return sum(math.prod(draw.shape) for draw in tree_iter(case.arguments) if isinstance(draw, Draw))

    def parts(case: Case) -> tuple[Any, ...]:
        return case.size, case.dtype, label(case.options)

    cases = [case for case in operator.cases if count(case) <= elements]
    random.Random(f"{seed} {operator.name}").shuffle(cases)
    drawn: list[Case] = []
    frequency: Counter[Any] = Counter()
    while cases and len(drawn) < most:
        drawn.append(min(cases, key=lambda case: sum(frequency[part] for part in parts(case))))
        frequency.update(parts(drawn[-1]))
        large = sum(count(case) > MANY for case in drawn)
        cases = [case for case in cases if case is not drawn[-1] and (large < 2 or count(case) <= MANY)]
    assert drawn, f"{operator.name}: no case has at most {elements} elements"
    return drawn


def describe(
    case: Case, prefix: str, seed: int, capabilities: Sequence[str], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Return the metadata of a case, and add its tensors to ``tensors``, with ``prefix`` before their names."""
    operator, given = case.operator, case.given(seed)

    def store(name: str, value: Tensor) -> str:
        tensors[prefix + name] = value.detach().clone(memory_format=torch.contiguous_format)
        return prefix + name

    def argument(name: str, value: Any) -> Any:
        """Return an argument as JSON, in which a tensor has the name under which it is stored."""
        if isinstance(value, list | tuple):
            return [argument(f"{name} {i}", element) for i, element in enumerate(value)]
        if isinstance(value, Tensor):
            return names.get(id(value)) or store(name, value)
        return label(value) if isinstance(value, torch.dtype) else value

    def compute() -> list[Tensor]:
        return list(case.exact(given, seed).values())

    names = {id(value): store(name, value) for name, value in given.items() if isinstance(value, Tensor)}
    exacts = compute()
    made, leaves = case.run(operator.call, given)
    upstream = {f"result {i}": store(f"upstream {i}", t) for i, t in case.upstream(made, seed).items()}
    bounds = {}
    for capability in capabilities:
        torch.ops.shoestring._set_cpu_capability(capability)
        # References of losses round where the kernels of the capability do.
        ours, eager = (case.results(f, given, seed) for f in (operator.call, operator.reference))
        parts = (list(found.values()) for found in (ours, eager))
        computed = operator.computed(case.narrow)
        bounds[capability] = error_bounds(*parts, exacts, compute, operator.factor, case.slack, computed)
    return {
        "operator": operator.name,
        "case": case.name,
        "arguments": {name: argument(name, value) for name, value in operator.schema(**given).items()},
        "leaves": [prefix + name for name in leaves],
        "results": [
            {
                "name": name,
                "dtype": label(t.dtype),
                "exact": store(name, exact),
                "upstream": upstream.get(name),
            }
            for (name, t), exact in zip(eager.items(), exacts, strict=True)
        ],
        "bounds": bounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--backend", choices=LIMITS, default="cpu")
    words = [*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *sys.argv[1:]]
    options, _ = parser.parse_known_args(words)
    torch.manual_seed(options.seed)  # determines the random roundings
    capabilities = [name for name in CAPABILITIES if torch.ops.shoestring._set_cpu_capability(name)]
    if options.backend == "simt":  # the kernels of GPUs do not depend on the CPU
        torch.ops.load_library(str(EMULATOR))
        del capabilities[1:]
    tensors: dict[str, Tensor] = {}
    cases = [
        case
        for _, operator in sorted(operators().items())
        for case in draw_cases(operator, options.seed, *LIMITS[options.backend])
    ]
    described = [describe(case, f"{i} ", options.seed, capabilities, tensors) for i, case in enumerate(cases)]
    name = "operator" if options.backend == "cpu" else "emulated"
    metadata = {"seed": str(options.seed), "cases": json.dumps(described, allow_nan=False)}
    save_file(tensors, BUILD / f"tests/cpp/{name}_cases.safetensors", metadata)


if __name__ == "__main__":
    main()
