"""Rewrite a public header for Doxygen, which calls this script as its INPUT_FILTER.

The macros of LibTorch's style stand for declarations that a reader uses:

- ``TORCH_ARG(T, name) = value;`` and ``SHOESTRING_OPTION(T, name)`` become the setter ``Options& name(T value)`` with
  the comment of the macro and the default. The getter of the same name is left out; the pages describe it once.
- ``TORCH_MODULE(Name);`` becomes the class ``Name``, the holder of the module ``NameImpl``.

A using-declaration at namespace scope becomes an alias, since Doxygen lists only aliases. A comment at the end of a line that declares a public member becomes the documentation of the member.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

TYPE = r"(?P<type>(?:[^(),<>]|<(?:[^<>]|<[^<>]*>)*>)+)"
ARGUMENT = re.compile(
    rf"^(?P<indent> *)TORCH_ARG\({TYPE}, (?P<name>\w+)\)(?: = (?P<value>[^;]+))?;", re.MULTILINE
)
OPTION = re.compile(rf"^(?P<indent> *)SHOESTRING_OPTION\({TYPE}, (?P<name>\w+)\)$", re.MULTILINE)
MODULE = re.compile(r"^TORCH_MODULE\((?P<name>\w+)\);", re.MULTILINE)
USING = re.compile(r"^using (?P<scope>[\w:]+)::(?P<name>\w+);", re.MULTILINE)
DEFINE = re.compile(r"^#define SHOESTRING_OPTION(?:.*\\\n)*.*\n", re.MULTILINE)
CLASS = re.compile(
    r"^ *(?:struct|class) (?:SHOESTRING_API )?(?P<name>\w+)(?: final)?(?: : [^{;]*)? ?\{", re.MULTILINE
)
TRAILING = re.compile(r"^(?P<code> +[\w:<>, &*]+(?: = [^;]*|\{[^;]*\})?;)  // (?P<text>.*)$", re.MULTILINE)


def declarations(source: str) -> str:
    """Return the header with declarations in the place of macros. The numbers of its lines change."""
    source = DEFINE.sub("", source)
    classes = [(match.start(), match["name"]) for match in CLASS.finditer(source)]

    def accessors(match: re.Match[str], options: str) -> str:
        indent, kind, name = match["indent"], match["type"], match["name"]
        value = match.groupdict().get("value")
        lines = []
        if value is not None:
            lines += ["///", f"/// Default: `{' '.join(value.split())}`."]
        lines.append(f"{options}& {name}({kind} value);")
        return "\n".join(indent + line for line in lines)

    def argument(match: re.Match[str]) -> str:
        return accessors(match, next(name for start, name in reversed(classes) if start < match.start()))

    source = ARGUMENT.sub(argument, source)
    source = OPTION.sub(lambda match: accessors(match, "Options"), source)
    source = MODULE.sub(
        lambda match: (
            f"/// Holder of the module {match['name']}Impl, a shared pointer. Its constructor takes the arguments of\n"
            f"/// {match['name']}Impl, and it calls forward() of the module.\n"
            f"class {match['name']} : public torch::nn::ModuleHolder<{match['name']}Impl> {{}};"
        ),
        source,
    )
    source = USING.sub(r"using \g<name> = \g<scope>::\g<name>;", source)
    return TRAILING.sub(r"\g<code>  ///< \g<text>", source)


if __name__ == "__main__":
    sys.stdout.write(declarations(Path(sys.argv[1]).read_text()))
