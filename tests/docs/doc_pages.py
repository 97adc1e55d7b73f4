"""The code blocks of the documentation: read them from the Markdown pages.

Blocks of these kinds are code that the tests run or compile:

- ``python``: a fence ```` ```python ````, or a comment ``<!-- setup``, which runs at its place and is not shown;
- ``cpp``: a fence ```` ```cpp ````, the body of a function; ``setup`` holds the hidden lines before it, from a
  comment ``<!-- cpp-setup``;
- ``cpp toplevel``: a ``{code-block} cpp`` with ``:class: toplevel``, definitions of a namespace;
- ``norun``: a ``{code-block} python`` with ``:class: norun``, which does not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

REPOSITORY = Path(__file__).parents[2]
# Hidden code is in a comment whose first line is "<!-- setup" or "<!-- cpp-setup", and whose last line is "-->".
SETUP = re.compile(r"<!-- (?P<kind>setup|cpp-setup)\n(?P<code>.*)\n-->\s*", re.DOTALL)
OPTION = re.compile(r":(?P<name>[\w-]+):\s*(?P<value>.*)")
DIRECTIVE = re.compile(r"\{(?P<name>[\w:-]+)\}\s*(?P<argument>.*)")
# The language of a fence that people write for one of the kinds above, but whose code no test would see.
UNKNOWN = {"py", "python3", "pycon", "c++", "cc", "cxx", "c"}


@dataclass(frozen=True)
class Block:
    """A block of code: its kind, its page, the number of its first line in the page (from 1), and its text."""

    kind: str
    page: Path
    line: int
    code: str
    setup: tuple[Block, ...] = ()

    @property
    def place(self) -> str:
        """Return page and line, as an error message names them."""
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """Return the path of a page relative to the repository, or the whole path of another file."""
    return str(page.relative_to(REPOSITORY) if page.is_relative_to(REPOSITORY) else page)


def pages() -> list[Path]:
    """Return README.md and all pages of the documentation."""
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in their order.

    Raises:
        ValueError: a comment with hidden code has no block that it belongs to, or is not closed as it must
            be, or a fence has a language that no test reads.
    """
    found: list[Block] = []
    setup: list[Block] = []
    for block in _read(page, page.read_text(), 1):
        if block.kind == "cpp-setup":
            setup.append(block)
        elif setup and not block.kind.startswith("cpp"):
            raise ValueError(f"{setup[0].place}: no C++ block follows this cpp-setup")
        else:
            found.append(Block(block.kind, page, block.line, block.code, tuple(setup)))
            setup.clear()
    if setup:
        raise ValueError(f"{setup[0].place}: no C++ block follows this cpp-setup")
    return found


def _read(page: Path, text: str, first: int) -> Iterator[Block]:
    """Yield the blocks of a text whose first line has the number ``first`` in the page."""
    for token in MarkdownIt("commonmark").parse(text):
        line = first + (token.map[0] if token.map else 0)
        if token.type == "html_block" and re.match(r"<!--\s*(cpp-)?setup\b", token.content):
            match = SETUP.fullmatch(token.content)
            if match is None:
                raise ValueError(
                    f"{name_of(page)}:{line}: expected '<!-- setup' or '<!-- cpp-setup' on a line of its own, "
                    "code, and '-->' on a line of its own"
                )
            kind = "python" if match["kind"] == "setup" else "cpp-setup"
            yield Block(kind, page, line + 1, match["code"] + "\n")
        elif token.type == "fence":
            yield from _fence(page, token.info.strip(), token.content, line + 1)


def _fence(page: Path, info: str, content: str, line: int) -> Iterator[Block]:
    """Yield the block of a fence, or the blocks inside of a directive whose content is Markdown."""
    if info in ("python", "cpp"):
        yield Block(info, page, line, content)
    elif info.lower() in UNKNOWN:
        raise ValueError(
            f"{name_of(page)}:{line - 1}: the language {info!r} is written as python or cpp here"
        )
    elif match := DIRECTIVE.fullmatch(info):
        options, start = _options(content)
        code = "".join(content.splitlines(keepends=True)[start:])
        if match["name"] not in ("code-block", "code", "sourcecode"):
            yield from _read(page, code, line + start)
        elif match["argument"] in ("python", "cpp"):
            classes = options.get("class", "").split()
            known = {"python": "norun", "cpp": "toplevel"}[match["argument"]]
            if set(classes) - {known}:
                raise ValueError(f"{name_of(page)}:{line}: expected :class: {known}, got {classes}")
            kind = match["argument"] if not classes else {"norun": "norun", "toplevel": "cpp toplevel"}[known]
            yield Block(kind, page, line + start, code)


def _options(content: str) -> tuple[dict[str, str], int]:
    """Return the options of a directive, and the number of lines that they take, with the empty line after."""
    options: dict[str, str] = {}
    lines = content.splitlines()
    count = 0
    while count < len(lines) and (match := OPTION.fullmatch(lines[count].strip())):
        options[match["name"]] = match["value"].strip()
        count += 1
    if options and count < len(lines) and not lines[count].strip():
        count += 1
    return options, count
