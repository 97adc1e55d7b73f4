"""The page of torch.ops.shoestring: every public operator, with the schema that PyTorch has registered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

import shoestring.ops

REPOSITORY = Path(__file__).parents[2]
# The definition of an operator in C++: its name follows a quote, and a parenthesis or a quote follows the
# name, as in m.def("rope(Tensor q, ...)"), define<Swiglu>(m, "swiglu(Tensor gate, ...)") and
# define<LionOptions>(m, "lion_").
DEFINITION = re.compile(
    r"(?:m\.def\((?:c10::str)?\(*|define<[^;]*?>\(\s*m,)\s*(?:R\"\(|\")(?P<name>\w+)[(\"]"
)
LIBRARY = re.compile(r"^TORCH_LIBRARY(?:_FRAGMENT)?\(", re.MULTILINE)
COMMENT = re.compile(r"(?:^ *//.*\n)+", re.MULTILINE)
# The guide of a room, if its name is not that of the room, and the operators that another guide describes.
ROOM_GUIDES = {"gemm": "operators", "optim": "optimizers"}
GUIDES = dict.fromkeys(("compress_gradient_", "decompress_mean_"), "slow_links") | dict.fromkeys(
    ("quantize_8bit", "dequantize_8bit", "quantize_state_4bit", "dequantize_state_4bit"), "optimizers"
)


def operators() -> list[str]:
    """Return the names of the public operators: those without a leading underscore."""
    names = (
        name.removeprefix("shoestring::") for name in torch._C._dispatch_get_all_op_names() if "." not in name
    )
    own = {n for n in names if "::" not in n and hasattr(torch.ops.shoestring, n)}
    return sorted(name for name in own if not name.startswith("_"))


def page() -> str:
    """Return the Markdown of all public operators, in alphabetical order."""
    comments = {name: _markdown(comment) for _, name, comment in definitions()}
    parts = []
    for name in operators():
        schema = getattr(torch.ops.shoestring, name).default._schema
        names = _names(schema)
        text = [
            f"````{{py:function}} torch.ops.shoestring.{name}({names})\n:single-line-parameter-list:\n",
            f"```text\n{_wrapped(str(schema))}\n```",
        ]
        if name in shoestring.ops.__all__:
            text.append(f"The Python function is {{py:func}}`shoestring.ops.{name}`.")
        if comments.get(name):
            text.append(comments[name])
        parts.append("\n\n".join([*text, "````"]))
    return "\n\n".join(parts) + "\n"


def _names(schema: torch._C.FunctionSchema) -> str:
    """Return the names of the arguments, as a Python signature has them."""
    names: list[str] = []
    for argument in schema.arguments:
        if argument.kwarg_only and "*" not in names:
            names.append("*")
        names.append(argument.name)
    return ", ".join(names)


def _wrapped(schema: str) -> str:
    """Return a schema with one argument a line if it is long."""
    schema = schema.removeprefix("shoestring::")
    # The shortest spelling of a default: 0.8, not 0.80000000000000004.
    schema = re.sub(r"\d+\.\d{12,}", lambda match: repr(float(match[0])), schema)
    if len(schema) <= 80:
        return schema
    name, _, rest = schema.partition("(")
    arguments, _, results = rest.rpartition(") -> ")
    depth, start, lines = 0, 0, []
    for index, character in enumerate(arguments):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            lines.append(arguments[start:index].strip())
            start = index + 1
    lines.append(arguments[start:].strip())
    return f"{name}(\n" + "".join(f"  {line},\n" for line in lines).rstrip(",\n") + f"\n) -> {results}"


def guides() -> str:
    """Return a table of the public operators, by the guides that describe them."""
    rooms = {name: room for room, name, _ in definitions()}
    by_guide: dict[str, list[str]] = {}
    for name in operators():
        guide = GUIDES.get(name) or ROOM_GUIDES.get(rooms[name], rooms[name])
        by_guide.setdefault(guide, []).append(f"`{name}`")
    lines = ["| operators | described in |", "| --- | --- |"]
    for guide, names in sorted(by_guide.items()):
        title = (REPOSITORY / f"docs/guides/{guide}.md").read_text().partition("\n")[0].removeprefix("# ")
        lines.append(
            f"| {', '.join(names)} | {'below' if guide == 'operators' else f'[{title}]({guide}.md)'} |"
        )
    return "\n".join(lines)


def definitions() -> Iterator[tuple[str, str, str]]:
    """Yield each operator that C++ defines: its room, its name, and the comment above it."""
    for path in sorted((REPOSITORY / "csrc").rglob("*.cpp")):
        source = path.read_text()
        if (library := LIBRARY.search(source)) is None:
            continue
        end = library.start()
        for definition in DEFINITION.finditer(source, end):
            blocks = [match[0] for match in COMMENT.finditer(source, end, definition.start())]
            end = definition.end()
            yield (
                path.relative_to(REPOSITORY / "csrc").parts[0],
                definition["name"],
                blocks[-1] if blocks else "",
            )


def _markdown(comment: str) -> str:
    """Return the text of a comment without the sentences on internal operators, escaped."""
    lines = [line.strip().removeprefix("//").removeprefix(" ") for line in comment.splitlines()]
    paragraphs = re.split(r"\n(?=- |\n)", "\n".join(lines))
    kept = []
    for paragraph in paragraphs:
        item = paragraph.startswith("- ")
        sentences = re.split(r"(?<=[.:]) (?=[A-Z])", " ".join(paragraph.split()))
        text = " ".join(s for s in sentences if not re.search(r"(?<![\w`.])_[a-z]\w+", s))
        if text:
            kept.append(("\n" if not item else "") + "".join(f"\\{c}" if c in "*_<[$" else c for c in text))
    return "\n".join(kept).strip()
