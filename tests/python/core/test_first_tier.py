"""The first tier of the tests touches every public name of Python and every command (see tests/tiers.py).

A name is touched if a test of the tier mentions it: in its code, in the functions of the tests that it calls, in its
fixtures, or in the parameters of the cases that were drawn. Operators are recorded while they run.
"""

import dataclasses
import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import tiers

TESTS = Path(__file__).parents[2]
PUBLIC = Path(__file__).parent / "public"


class Mentions:
    """Collects the words in the code of tests, and of the functions and classes of the tests that they refer to."""

    def __init__(self) -> None:
        self.words: set[str] = set()
        self.seen: dict[int, object] = {}  # by its id; objects that are kept alive have ids of their own

    def is_new(self, value: object) -> bool:
        new = id(value) not in self.seen
        self.seen[id(value)] = value
        return new

    def code(self, code: types.CodeType, names: dict[str, Any]) -> None:
        if not self.is_new(code):
            return
        for constant in code.co_consts:
            self.value(constant, names)
        for name in code.co_names:
            self.words.add(name)
            self.value(names.get(name), names)

    def value(self, value: Any, names: dict[str, Any]) -> None:
        """Add the words of a constant, a parameter, or a function or class of the tests."""
        if isinstance(value, str):
            self.words.update(re.findall(r"\w+", value))
        elif isinstance(value, types.CodeType):
            self.code(value, names)
        elif isinstance(value, (tuple, list, frozenset, set)):
            if self.is_new(value):
                for part in value:
                    self.value(part, names)
        elif isinstance(value, dict):
            self.value([*value.keys(), *value.values()], names)
        elif inspect.isfunction(value) or inspect.isclass(value):
            self.words.add(value.__name__)
            self.defined(value)
        elif dataclasses.is_dataclass(value) and self.is_new(value):
            self.value(vars(value), names)

    def defined(self, value: Any) -> None:
        """Follow a function or a class if the tests define it."""
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
        if file is None or not Path(file).is_relative_to(TESTS):
            return
        parts = vars(value).values() if inspect.isclass(value) else [value]
        for part in parts:
            function = inspect.unwrap(getattr(part, "__func__", part))
            if inspect.isfunction(function):
                self.code(function.__code__, function.__globals__)

    def item(self, item: pytest.Function) -> None:
        self.defined(item.function)
        for definitions in item._fixtureinfo.name2fixturedefs.values():
            for definition in definitions:
                self.value(definition.func, {})
        if hasattr(item, "callspec"):
            self.value(list(item.callspec.params.values()), {})
            self.value(item.callspec.id, {})


def missing(items: list[pytest.Item]) -> list[str]:
    """Return the public functions, classes and commands that no test among the items touches.

    A class is also touched by the functions that return it or take it.
    """
    mentions = Mentions()
    for item in items:
        if isinstance(item, pytest.Function) and item.path != Path(__file__):
            mentions.item(item)
    lines = (PUBLIC / "python.txt").read_text().splitlines()
    paths = [re.split(r"[:(]", line)[0] for line in lines]
    words, count = mentions.words, 0
    while len(words) > count:  # types of types
        count = len(words)
        for path, line in zip(paths, lines, strict=True):
            if path.split(".")[-1] in words:
                words |= {word for word in re.findall(r"\w+", line[len(path) :]) if word[0].isupper()}
    names = [path for path in paths if not any(owner[0].isupper() for owner in path.split(".")[:-1])]
    commands = (line.split()[0] for line in (PUBLIC / "command_line.txt").read_text().splitlines())
    names += [f"shoestring {command}" for command in dict.fromkeys(commands)]
    return [name for name in names if re.split(r"[ .]", name)[-1] not in words]


@pytest.mark.first
def test_first_tier_touches_every_public_name(request: pytest.FixtureRequest) -> None:
    config = request.config
    if config.getoption("--tier") != "first" or len({item.path for item in request.session.items}) < 100:
        pytest.skip("for --tier=first and all files")
    assert not (left := missing(request.session.items)), (
        f"no test of the first tier mentions {left}; see tests/tiers.py"
    )


def test_slow_tests_exist() -> None:
    for line in tiers.SLOW:
        file, _, test = line.partition("::")
        text = (TESTS.parent / file).read_text()
        assert not test or f"def {test}(" in text, f"tests/slow.txt: {line} does not exist"
