"""The page of torch.ops.shoestring: every public operator, with the schema that PyTorch has registered."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import shoestring.ops

REPOSITORY = Path(__file__).parents[2]
# The definition of an operator in schema.cpp: its name follows a quote, and a parenthesis or a quote follows the
# name, as in m.def("swiglu(Tensor gate, ...)") and define<LionOptions>(m, "lion_").
DEFINITION = re.compile(r"(?:m\.def\(\(*|define<[^;]*?>\(\s*m,)\s*(?:R\"\(|\")(?P<name>\w+)[(\"]")
COMMENT = re.compile(r"(?:^ *//.*\n)+", re.MULTILINE)


def operators() -> list[str]:
    """Return the names of the public operators: those without a leading underscore."""
    names = (
        name.removeprefix("shoestring::") for name in torch._C._dispatch_get_all_op_names() if "." not in name
    )
    own = {n for n in names if "::" not in n and hasattr(torch.ops.shoestring, n)}
    return sorted(name for name in own if not name.startswith("_"))


def page() -> str:
    """Return the Markdown of all public operators, in alphabetical order."""
    comments = schema_comments()
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


def schema_comments() -> dict[str, str]:
    """Return the comments of the files schema.cpp on public operators, as Markdown, by the operators' names."""
    found: dict[str, str] = {}
    for path in sorted((REPOSITORY / "csrc").glob("*/schema.cpp")):
        source = path.read_text()
        end = source.index("TORCH_LIBRARY")
        for definition in DEFINITION.finditer(source):
            blocks = [match[0] for match in COMMENT.finditer(source, end, definition.start())]
            end = definition.end()
            if blocks:
                found[definition["name"]] = _markdown(blocks[-1])
    return found


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
