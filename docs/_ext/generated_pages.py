"""Pages, or parts of pages, that are generated while the site is built.

A page holds a comment ``<!-- generated: NAME -->``. When Sphinx reads the page, the text that the generator NAME
returns takes the place of the comment. A page with such a comment is read again in every build.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import benchmark_tables
import command_reference
import operator_reference
import python_names
from sphinx.application import Sphinx

COMMENT = re.compile(r"^<!-- generated: ([\w ./-]+) -->$", re.MULTILINE)

GENERATORS: dict[str, Callable[[], str]] = {
    "commands": command_reference.page,
    "benchmarks": benchmark_tables.page,
    "operators": operator_reference.page,
    "guides of operators": operator_reference.guides,
    "ops": python_names.ops,
}


def _fill(app: Sphinx, docname: str, content: list[str]) -> None:
    """Replace the comments of a page by the generated text."""

    def text(match: re.Match[str]) -> str:
        app.env.note_reread()
        return GENERATORS[match[1]]()

    content[0] = COMMENT.sub(text, content[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.connect("source-read", _fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
