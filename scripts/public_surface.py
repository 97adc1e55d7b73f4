#!/usr/bin/env python3
"""List the public surface: Python names, operators, command-line options and C++ declarations.

Prints the list of one part, or with --write replaces the committed lists in tests/python/core/public, which
tests/python/core/test_public_surface.py compares with the code. Needs the built libraries and Doxygen.

    python scripts/public_surface.py [python | operators | command_line | cpp]
    python scripts/public_surface.py --write
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import subprocess
import sys
import tempfile
import typing
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tests/python/core/public"
# The modules whose `__all__` is public.
MODULES = (
    "shoestring",
    "shoestring.checkpoint.planner",
    "shoestring.data",
    "shoestring.data.packing",
    "shoestring.callbacks",
    "shoestring.diffusion",
    "shoestring.distributed",
    "shoestring.lora",
    "shoestring.nn",
    "shoestring.nn.init",
    "shoestring.ops",
    "shoestring.optim",
    "shoestring.optim.schedules",
)
DOXYGEN = """
INPUT = {root}/csrc/include/shoestring
OUTPUT_DIRECTORY = {out}
RECURSIVE = YES
GENERATE_HTML = NO
GENERATE_LATEX = NO
GENERATE_XML = YES
XML_PROGRAMLISTING = NO
EXTRACT_ALL = YES
QUIET = YES
WARNINGS = NO
MACRO_EXPANSION = YES
EXPAND_ONLY_PREDEF = YES
PREDEFINED = SHOESTRING_API= \\
  "TORCH_ARG(T,name)=T name" \\
  "SHOESTRING_OPTION(T,name)=T name;" \\
  "TORCH_MODULE(name)=using name = torch::nn::ModuleHolder<name##Impl>"
"""


# ---- Python


def python() -> list[str]:
    """Return a line for each public name: functions with their signatures, classes with their members."""
    lines: list[str] = []
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in sorted(module.__all__):
            lines += described(f"{module_name}.{name}", getattr(module, name))
    return lines


def described(path: str, value: Any) -> list[str]:
    if inspect.ismodule(value):
        return [f"{path}: module"]
    if typing.is_typeddict(value):
        fields = ", ".join(f"{name}: {annotation(kind)}" for name, kind in value.__annotations__.items())
        return [f"{path}: keyword arguments {fields}"]
    if inspect.isclass(value):
        return [f"{path}: class{signature(value)}", *members(path, value)]
    if callable(value):
        return [f"{path}{signature(value)}"]
    return [f"{path}: {type(value).__name__}"]


def members(path: str, cls: type) -> Iterator[str]:
    """Yield the public members that the class or a base class in this package defines."""
    own: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("shoestring"):
            own |= {name: value for name, value in vars(base).items() if not name.startswith("_")}
    for name, value in sorted(own.items()):
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property) or not callable(value):
            yield f"{path}.{name}"
        else:
            yield f"{path}.{name}{signature(value)}"


def signature(function: Any) -> str:
    try:
        found = inspect.signature(function)
    except ValueError:
        return ""
    parts: list[str] = []
    keyword_only = False
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        text = parameter.name
        if parameter.kind is parameter.VAR_POSITIONAL:
            text, keyword_only = f"*{text}", True
        elif parameter.kind is parameter.VAR_KEYWORD:
            text = f"**{text}"
        elif parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        if parameter.annotation is not parameter.empty:
            text += f": {annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {default(parameter.default)}"
        parts.append(text)
    returned = found.return_annotation
    arrow = "" if returned is found.empty or inspect.isclass(function) else f" -> {annotation(returned)}"
    return f"({', '.join(parts)}){arrow}"


def annotation(kind: Any) -> str:
    if isinstance(kind, str):
        return kind
    text = str(kind) if typing.get_origin(kind) or not inspect.isclass(kind) else kind.__qualname__
    return re.sub(r"\b(?:[a-z_0-9]+\.)+(?=[A-Za-z_])", "", text)


def default(value: Any) -> str:
    if isinstance(value, (enum.Enum, Path)):
        return str(value)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


# ---- Operators


def operators() -> list[str]:
    """Return the schemas of the operators whose names do not begin with an underscore."""
    import torch

    import shoestring  # noqa: F401

    schemas = (str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("shoestring::"))
    return sorted(s for s in schemas if not s.startswith("shoestring::_"))


# ---- Command line


def command_line() -> list[str]:
    """Return a line for each option of each command, with its default."""
    import typer

    from shoestring.cli.app import app

    group: Any = typer.main.get_command(app)
    lines = []
    for name, command in sorted(group.commands.items()):
        for parameter in command.params:
            if parameter.name == "help":
                continue
            names = " ".join([*parameter.opts, *parameter.secondary_opts])
            values = f" {parameter.metavar}" if parameter.metavar else ""
            required = "required" if parameter.required else f"default {default(parameter.default)}"
            lines.append(f"{name} {names}{values}: {required}")
    return lines


# ---- C++


def cpp() -> list[str]:
    """Return the public declarations of the installed headers, as Doxygen reads them."""
    with tempfile.TemporaryDirectory() as out:
        settings = DOXYGEN.format(root=ROOT, out=out)
        subprocess.run(["doxygen", "-"], input=settings, text=True, check=True, capture_output=True)
        found = {
            line for path in Path(out, "xml").glob("*.xml") for line in declared(ET.parse(path).getroot())
        }
    return sorted(found, key=lambda line: (re.search(r"shoestring::[\w:~=]+", line) or [line])[0] + line)


def declared(root: ET.Element) -> Iterator[str]:
    for compound in root.iter("compounddef"):
        if compound.get("kind") not in ("class", "struct", "namespace"):
            continue
        if compound.get("prot", "public") != "public":
            continue
        scope = text_of(compound.find("compoundname"))
        if not scope.startswith("shoestring") or "::detail" in scope:
            continue
        if compound.get("kind") != "namespace":
            bases = ", ".join(text_of(base) for base in compound.findall("basecompoundref"))
            yield f"{compound.get('kind')} {scope}{': ' + bases if bases else ''}"
        for member in compound.iter("memberdef"):
            if member.get("prot") != "public" or member.get("kind") in ("define", "friend"):
                continue
            yield declaration(scope, member)


def declaration(scope: str, member: ET.Element) -> str:
    name = f"{scope}::{text_of(member.find('name'))}"
    kind = member.get("kind")
    if kind == "enum":
        return f"enum {name} {{ {', '.join(text_of(v.find('name')) for v in member.findall('enumvalue'))} }}"
    template = member.find("templateparamlist")
    prefix = "" if template is None else f"template <{', '.join(text_of(p) for p in template)}> "
    static = "static " if member.get("static") == "yes" and kind == "function" else ""
    returned = text_of(member.find("type"))
    if kind == "typedef":
        return f"{prefix}using {name} = {returned}"
    value = text_of(member.find("initializer")) if kind == "variable" else ""
    arguments = text_of(member.find("argsstring"))
    return " ".join(f"{prefix}{static}{returned} {name}{arguments} {value}".split())


def text_of(element: ET.Element | None) -> str:
    return "" if element is None else " ".join("".join(element.itertext()).split())


PARTS: dict[str, Callable[[], list[str]]] = {
    "python": python,
    "operators": operators,
    "command_line": command_line,
    "cpp": cpp,
}


def main() -> None:
    wanted = sys.argv[1:]
    if wanted == ["--write"]:
        LISTS.mkdir(exist_ok=True)
        for name, part in PARTS.items():
            (LISTS / f"{name}.txt").write_text("\n".join(part()) + "\n")
    elif len(wanted) == 1 and wanted[0] in PARTS:
        print("\n".join(PARTS[wanted[0]]()))
    else:
        sys.exit(
            f"public_surface: expected {' | '.join(PARTS)} | --write, got {' '.join(wanted) or 'nothing'}"
        )


if __name__ == "__main__":
    main()
