"""Compile all C++ blocks of documentation pages as one translation unit.

Usage: python tests/docs/compile_cpp.py PAGE...

Each block is in a namespace of its own. A block is the body of a function, or definitions at namespace scope if
it has ``:class: toplevel``. Its ``#include`` lines go to the start of the unit. ``#line`` gives each line the page
and the line number that it has there, so that the compiler's messages name them.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from doc_pages import REPOSITORY, Block, blocks, name_of

INCLUDE = re.compile(r"\s*#\s*include\b.*")
# Pages may leave out these two, which every program includes.
PRELUDE = "#include <torch/torch.h>\n#include <shoestring/shoestring.h>\n"


def _lines(block: Block) -> str:
    """Return a block without its includes, with the #line that names its place."""
    code = "\n".join("" if INCLUDE.fullmatch(line) else line for line in block.code.splitlines())
    return f'#line {block.line} "{name_of(block.page)}"\n{code}\n'


def translation_unit(pages: list[Path], prelude: str = PRELUDE) -> str:
    """Return a C++ source with all C++ blocks of the pages."""
    includes, bodies = [prelude], []
    for number, block in enumerate(b for page in pages for b in blocks(page) if b.kind.startswith("cpp")):
        for part in (*block.setup, block):
            for index, line in enumerate(part.code.splitlines()):
                if INCLUDE.fullmatch(line):
                    includes.append(f'#line {part.line + index} "{name_of(part.page)}"\n{line}\n')
        setup = "".join(_lines(part) for part in block.setup)
        # auto: a block may end with a return of any type.
        before, after = ("", "") if block.kind == "cpp toplevel" else ("auto body() {\n", "}\n")
        bodies.append(f"namespace block_{number} {{\n{before}{setup}{_lines(block)}{after}}}\n")
    return "".join(includes + bodies)


def torch_folder() -> Path:
    """Return the folder of PyTorch, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def compile_pages(pages: list[Path], prelude: str = PRELUDE) -> subprocess.CompletedProcess[str]:
    """Compile the C++ blocks of pages with g++; stderr of the result holds the errors."""
    torch = torch_folder()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "blocks.cpp")
        source.write_text(translation_unit(pages, prelude))
        # -fsyntax-only would not instantiate every template.
        command = [
            *([ccache] if (ccache := shutil.which("ccache")) else []),
            *("g++", "-std=c++20", "-O0", "-c", "-D_GLIBCXX_USE_CXX11_ABI=1", "-o", str(source) + ".o"),
            f"-I{REPOSITORY / 'csrc/include'}",
            f"-isystem{torch / 'include'}",
            f"-isystem{torch / 'include/torch/csrc/api/include'}",
            str(source),
        ]
        return subprocess.run(command, capture_output=True, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the C++ blocks of documentation pages.")
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--source", action="store_true", help="print the translation unit instead")
    options = parser.parse_args()
    pages = [page.resolve() for page in options.pages]
    if options.source:
        print(translation_unit(pages))
        return 0
    done = compile_pages(pages)
    print(done.stderr, end="")
    print("not ok C++" if done.returncode else "ok C++")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
