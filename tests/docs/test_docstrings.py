"""The examples in docstrings of public functions and classes run, and their number only grows."""

import doctest
import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_pages import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "docs/_ext"))
import python_names

# Public functions and classes whose docstring has no example that runs. The number may only become smaller.
WITHOUT_EXAMPLE = 0


def public_objects() -> dict[str, Any]:
    """Return the public functions and classes by their full names; an object with two names has the first."""
    objects: dict[int, tuple[str, Any]] = {}
    for name in python_names.public_names():
        module, _, last = name.rpartition(".")
        item = getattr(importlib.import_module(module), last)
        if inspect.isroutine(item) or (inspect.isclass(item) and not issubclass(item, types.ModuleType)):
            objects.setdefault(id(item), (name, item))
    return dict(objects.values())


def examples(name: str, item: Any) -> list[doctest.DocTest]:
    """Return the examples in the docstrings of a public object, and of the methods of a class."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    # The finder needs the module that defines an object, to leave out methods of base classes.
    module = importlib.import_module(item.__module__)
    # An example uses what its reader would: `import torch` and `import shoestring` stand before it.
    namespace = {"torch": torch, "shoestring": importlib.import_module("shoestring")}
    found = finder.find(item, name, module=module, globs=namespace)
    return [test for test in found if test.examples]


def _with_examples() -> Iterator[Any]:
    for name, item in public_objects().items():
        for test in examples(name, item):
            yield pytest.param(test, id=test.name)


@pytest.mark.parametrize("test", list(_with_examples()))
def test_examples_run(test: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failed = runner.run(test, out=output.append).failed
    assert not failed, "".join(output)


def test_number_of_docstrings_without_an_example() -> None:
    objects = public_objects()
    assert len(objects) > 80
    without = [name for name, item in objects.items() if not examples(name, item)]
    print(f"{len(without)} of {len(objects)} without an example: {', '.join(without)}")
    assert len(without) <= WITHOUT_EXAMPLE, "a docstring of a new public name needs an example that runs"
    assert len(without) == WITHOUT_EXAMPLE, f"set WITHOUT_EXAMPLE to {len(without)}"


def test_every_public_object_has_a_docstring() -> None:
    missing = [name for name, item in public_objects().items() if not (item.__doc__ or "").strip()]
    assert missing == []


def test_failing_example_is_seen() -> None:
    """The runner above finds examples of functions, and of methods, and sees a wrong result."""

    class Example:
        def method(self) -> int:
            """Return one.

            >>> 1 + 1
            3
            """
            return 1

    (test,) = examples("Example", Example)
    assert test.name == "Example.method"
    output: list[str] = []
    assert doctest.DocTestRunner().run(test, out=output.append).failed == 1
