"""The page of the command line: every command of the typer application, with its options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import typer

from shoestring.cli.app import app

TYPES = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}


def page() -> str:
    """Return the Markdown of all commands, in the order of ``shoestring --help``."""
    group: Any = typer.main.get_command(app)
    types = {
        (each.name or each.callback.__name__): inspect.signature(each.callback).parameters
        for each in app.registered_commands
        if each.callback is not None
    }
    parts = []
    for name, command in group.commands.items():
        if command.hidden:
            continue
        arguments = [p for p in command.params if not p.opts[0].startswith("-")]
        usage = " ".join([f"shoestring {name}", *(_usage(p) for p in arguments), "[OPTIONS]"])
        parts += [f"## `shoestring {name}`", command.help, f"```text\n{usage}\n```"]
        parts.append(f"```{{program}} shoestring {name}\n```")
        parts += [_option(p, types[name][p.name].annotation) for p in command.params if not p.hidden]
    return "\n\n".join(parts) + "\n"


def _usage(argument: Any) -> str:
    text = argument.name.upper() + ("..." if argument.nargs != 1 else "")
    return text if argument.required else f"[{text}]"


def _option(param: Any, annotation: Any) -> str:
    """Return the directive of an option or an argument."""
    kind = _kind(annotation)
    spellings = [
        f"{spelling} <{kind}>" if kind and spelling.startswith("-") else spelling
        for spelling in _spellings(param)
    ]
    # The whitespace of help texts has no meaning; a line break would end a directive's paragraph.
    text = " ".join((param.help or "").split())
    if param.required:
        note = "Required."
    elif param.default in (None, False):
        note = ""
    else:
        default = param.default
        note = f"Default: `{' '.join(map(str, default)) if isinstance(default, (list, tuple)) else default}`."
    repeated = get_origin(_plain(annotation)) is list and param.opts[0].startswith("-")
    if repeated and "several times" not in text:
        note = f"May be given several times. {note}"
    return f"````{{option}} {', '.join(spellings)}\n{_escaped(text)} {note}\n````"


def _spellings(param: Any) -> Iterator[str]:
    yield from (spelling if spelling.startswith("-") else spelling.upper() for spelling in param.opts)
    yield from param.secondary_opts


def _plain(annotation: Any) -> Any:
    """Return the type of an ``Annotated`` and of ``T | None``."""
    if hasattr(annotation, "__metadata__"):
        annotation = get_args(annotation)[0]
    inner = [each for each in get_args(annotation) if each is not type(None)]
    return inner[0] if type(None) in get_args(annotation) else annotation


def _kind(annotation: Any) -> str:
    """Return the word for the values of an option, or an empty string for a flag."""
    plain = _plain(annotation)
    if get_origin(plain) is list:
        plain = get_args(plain)[0]
    return "" if plain is bool else TYPES.get(plain, "TEXT")


def _escaped(text: str) -> str:
    """Escape what Markdown would read as markup in a plain help text, and write options as code.

    Outside code, Sphinx makes a dash of the two hyphens of an option.
    """
    parts = re.split(r"((?<![\w-])--[a-z][a-z-]*)", text)
    escaped = ["".join(f"\\{c}" if c in "*_<[`$" else c for c in part) for part in parts[::2]]
    options = [f"`{part}`" for part in parts[1::2]] + [""]
    return "".join(plain + option for plain, option in zip(escaped, options, strict=True))
