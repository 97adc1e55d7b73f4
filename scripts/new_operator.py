#!/usr/bin/env python3
"""Write the files of an elementwise operator with a gradient, which compile and pass their tests.

    python scripts/new_operator.py layers softsign
    python scripts/new_operator.py layers softsign_gate --inputs gate up --option offset 1.0

The operator computes the first input / (1 + |first input|), times the other inputs. An option takes the place of the
1. Replace this formula in NAME_rule.h, in fp64 in NAME.cpp, and in the test, and each TODO in the texts.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = ROOT / "scripts/operator_templates"
# The files of an operator, by their templates.
FILES = {
    "rule.h": "csrc/@room@/@name@_rule.h",
    "simd.cpp": "csrc/@room@/@name@_simd.cpp",
    "operator.cpp": "csrc/@room@/@name@.cpp",
    "kernel.cu": "cuda/@room@/@name@.cu",
    "function.py": "python/shoestring/@room@/@name@.py",
    "test.py": "tests/python/@room@/test_@name@.py",
}


def filled(text: str, values: dict[str, str]) -> str:
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], text)


def values_of(room: str, name: str, inputs: list[str], option: str, default: float) -> dict[str, str]:
    """Return the text of each marker in the templates. ``option`` is the name of an option, or empty."""
    first, *others = inputs
    count, class_name = len(inputs), "".join(word.capitalize() for word in name.split("_"))
    one = option or "1"

    def gradients(upstream: str, value: str, square: str, factors: list[str]) -> list[str]:
        """Return the gradient of each input, where the operator is a function of the first input times factors."""
        slope = f"{upstream} * {option} / {square}" if option else f"{upstream} / {square}"
        return [
            " * ".join([slope, *factors]),
            *(" * ".join([upstream, value, *factors[:k], *factors[k + 1 :]]) for k in range(len(factors))),
        ]

    def product(function: str) -> str:
        return " * ".join([function, *others])

    in_rule = gradients("in[0]", "in[1] / size", "(size * size)", [f"in[{k + 2}]" for k in range(count - 1)])
    in_fp64 = gradients("grad", f"{first} / size", "size.square()", others)
    values = {
        "room": room,
        "name": name,
        "Class": class_name,
        "count": str(count),
        "first": first,
        "last": inputs[-1],
        "names": ", ".join(inputs),
        "arguments": ", ".join([*inputs, *([option] if option else [])]),
        "quoted": ", ".join(f'"{x}"' for x in inputs),
        "schema": ", ".join(f"Tensor {x}" for x in inputs),
        "tensors": ", ".join(f"const Tensor& {x}" for x in inputs),
        "tensors_at": ", ".join(f"const at::Tensor& {x}" for x in inputs),
        "python": ", ".join(f"{x}: Tensor" for x in inputs),
        "formula": product(f"{first} / ({one} + |{first}|)"),
        "one": option or "1.f",
        "one_fp64": one,
        "value": " * ".join(
            [f"in[0] / ({option or '1.f'} + math.abs(in[0]))", *(f"in[{k}]" for k in range(1, count))]
        ),
        "gradients": "\n".join(f"    out[{k}] = {text};" for k, text in enumerate(in_rule)),
        "value_fp64": product(f"{first} / {first}.abs().add_({one})"),
        "gradients_fp64": ", ".join(in_fp64),
        "reference": product(f"{first} / ({one} + {first}.abs())"),
        "draws": ", ".join(f'"{x}": normal(rows, features)' for x in inputs),
        "shape": f"{count}, 16, 64" if others else "16, 64",
        "first_and_ones": ", ".join([first, *(f"torch.ones_like({first})" for _ in others)]),
        "all_wrong": ", ".join("wrong" for _ in inputs),
    }
    with_option = {
        "rule_option": f"  float {option};\n",
        "option_type": "double",
        "members": f"""  double {option};
  kernels::{class_name} rule;
  explicit {class_name}(double {option}) : {option}({option}), rule{{static_cast<float>({option})}} {{}}
""",
        "rule": ", &rule",
        "option_schema": f", float {option}={default}",
        "option_cpp": f", double {option}",
        "option_declared": f", double {option} = {default}",
        "option_python": f", {option}: float = {default}",
        "option_doc": f"        {option}: TODO.\n",
        "option_cases": f'        options=[{{"{option}": {default}}}, {{"{option}": {default + 0.5}}}],\n',
    }
    return values | (with_option if option else dict.fromkeys(with_option, ""))


def before_last(text: str, mark: str, line: str) -> str:
    head, _, tail = text.rpartition(mark)
    return f"{head}{line}{mark}{tail}"


def after_block(text: str, start: str, line: str) -> str:
    """Insert a line at the end of the block of lines that follows the line beginning with ``start``."""
    return re.sub(rf"(?m)^{re.escape(start)}.*\n(?:.+\n)*", lambda match: match[0] + line, text, count=1)


def edits(root: Path, values: dict[str, str]) -> dict[str, str]:
    """Return the shared files with the operator: the header, the list of functions, the guide, the changelog."""
    room, name = values["room"], values["name"]
    header, functions = f"csrc/include/shoestring/{room}/ops.h", "python/shoestring/ops.py"
    guide, changelog = f"docs/guides/{room}.md", "CHANGELOG.md"
    text = {path: (root / path).read_text() for path in (header, functions, guide, changelog)}
    declaration = filled((TEMPLATES / "declaration.h.in").read_text(), values)
    text[header] = before_last(text[header], "}  // namespace shoestring", declaration)
    imports = [
        *re.findall(r"from shoestring\..*\n", text[functions]),
        f"from shoestring.{room}.{name} import *\n",
    ]
    text[functions] = re.sub(r"(?:from shoestring\..*\n)+", "".join(sorted(imports)), text[functions])
    text[guide] = after_block(text[guide], "| function |", f"| `{name}` | | TODO |\n")
    text[changelog] = after_block(text[changelog], f"### {room.capitalize()}", f"- `{name}`: TODO.\n")
    return text


def write(root: Path, values: dict[str, str]) -> list[str]:
    """Write the new files and the edits below ``root``, and return their paths."""
    written = {
        filled(path, values): filled((TEMPLATES / f"{template}.in").read_text(), values)
        for template, path in FILES.items()
    } | edits(root, values)
    for path, text in written.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return list(written)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "room", choices=sorted(path.parent.name for path in ROOT.glob("csrc/include/shoestring/*/ops.h"))
    )
    parser.add_argument("name", help="name of the operator, such as softsign_gate")
    parser.add_argument("--inputs", nargs="+", default=["x"], help="names of its tensors")
    parser.add_argument(
        "--option",
        nargs=2,
        default=("", 1),
        metavar=("NAME", "DEFAULT"),
        help="a number that it takes besides",
    )
    options = parser.parse_args()
    option, default = options.option[0], float(options.option[1])
    for word in (options.name, *options.inputs, *filter(None, [option])):
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", word):
            parser.error(f"expected words of small letters and digits joined by _, received {word}")
    if list(ROOT.glob(f"csrc/*/{options.name}.cpp")):
        parser.error(f"name: expected a new name, received {options.name}")
    paths = write(ROOT, values_of(options.room, options.name, options.inputs, option, default))
    if clang_format := shutil.which("clang-format"):
        cpp = [path for path in paths if Path(path).suffix in (".cpp", ".h", ".cu")]
        subprocess.run([clang_format, "-i", *cpp], cwd=ROOT, check=True)
    subprocess.run(
        [sys.executable, "-m", "ruff", "format", "-q", *(path for path in paths if path.endswith(".py"))],
        cwd=ROOT,
        check=True,
    )
    print(*paths, sep="\n")
    print(
        "Next: make build-tests && python scripts/public_surface.py --write && python tests/python/gpu_kernels.py "
        f"--write && python -m pytest tests/python/{options.room}/test_{options.name}.py"
    )


if __name__ == "__main__":
    main()
