"""Read the docstrings of the Python package: fields of options, and references without their module."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

# The line that begins the description of one or several fields, such as "lora_A, lora_B: LoRA of the head."
FIELD = re.compile(r"(?P<names>\w+(, \w+)*): ")


def _mark_fields(app: Sphinx, what: str, name: str, item: object, options: object, lines: list[str]) -> None:
    """Make a list of the descriptions of fields, in the docstrings of options and results."""
    if not isinstance(item, type):
        return
    known = _all_fields(item)
    marked: list[str] = []
    inside = False
    for line in lines:
        match = FIELD.match(line)
        if match is not None and set(match["names"].split(", ")) <= known:
            if not inside:
                marked.append("")
            inside = True
            names = ", ".join(f"**{field}**" for field in match["names"].split(", "))
            marked.append(f"- {names}: {line[match.end() :]}")
        elif inside and (not line or line.startswith("    ")):
            marked.append(line[2:])
        else:
            if inside:
                marked.append("")
            inside = False
            marked.append(line)
    lines[:] = marked


def _all_fields(item: object) -> set[str]:
    """Return the names of a class's fields, with those of its bases."""
    # The bases of a TypedDict are in __orig_bases__ only, but its __annotations__ hold their fields too.
    return {name for base in getattr(item, "__mro__", ()) for name in getattr(base, "__annotations__", {})}


def _resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.reference | None:
    """Resolve a name without dots, such as ``AttentionResult``, to the documented object of that name."""
    if node.get("refdomain") != "py" or "." in node.get("reftarget", "."):
        return None
    last = node["reftarget"]
    objects = env.domains.python_domain.objects
    found = sorted(
        (name for name in objects if name.rpartition(".")[2] == last and name.startswith("shoestring.")),
        key=lambda name: (objects[name].aliased, name.count("."), name),
    )
    if not found:
        return None
    return env.domains.python_domain.resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], found[0], node, content
    )


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    # Before Napoleon, whose priority is 500.
    app.connect("autodoc-process-docstring", _mark_fields, priority=400)
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
