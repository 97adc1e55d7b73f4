"""The code in README.md and in the pages of the documentation runs, or compiles."""

import subprocess
import sys
from pathlib import Path

import pytest
from compile_cpp import compile_pages, translation_unit
from doc_pages import REPOSITORY, blocks, pages
from run_pages import run_pages

# Blocks that readers see and no test runs. Lower this number when one of them goes.
NORUN = 5
# test_choosing_tables.py runs the blocks of this page, and compares what they print with the page.
CHOOSING = REPOSITORY / "docs/choosing.md"


def _run(pages: list[Path]) -> None:
    # A process of its own: it forks, which PyTorch allows before other threads have run.
    command = [sys.executable, str(Path(__file__).with_name("run_pages.py")), *map(str, pages)]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0 and "ok README.md" in done.stdout, done.stdout + done.stderr


def test_python_blocks_of_the_first_pages_run() -> None:
    _run([REPOSITORY / "README.md", REPOSITORY / "docs/quickstart.md"])


def test_python_blocks_run() -> None:
    _run([page for page in pages() if page != CHOOSING])


def test_cpp_blocks_compile() -> None:
    assert "auto body()" in translation_unit(pages())
    done = compile_pages(pages())
    assert done.returncode == 0, done.stderr


def test_few_blocks_do_not_run() -> None:
    left_out = [block.place for page in pages() for block in blocks(page) if block.kind == "norun"]
    assert len(left_out) <= NORUN, left_out


def _page(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


def test_failing_python_block_names_page_and_line(tmp_path: Path) -> None:
    page = _page(tmp_path, "# Title\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    (result,) = run_pages([page], preloaded=())
    assert not result.passed
    assert f'"{page}", line 8' in result.output and "assert x == 2" in result.output


def test_blocks_share_a_namespace_and_an_empty_folder(tmp_path: Path) -> None:
    page = _page(
        tmp_path,
        "<!-- setup\nimport os, sys\nassert os.listdir() == []\n-->\n\n"
        "- item\n\n  ```python\n  class Point: pass\n  ```\n\n"
        "````{note}\n```python\nassert sys.modules['__main__'].Point is Point\n```\n````\n",
    )
    (result,) = run_pages([page], preloaded=())
    assert result.passed, result.output


def test_failing_cpp_block_names_page_and_line(tmp_path: Path) -> None:
    page = _page(
        tmp_path,
        "<!-- cpp-setup\nint given = 1;\n-->\n```cpp\n#include <vector>\n\nstd::vector<int> v{given};\nnone();\n```\n",
    )
    done = compile_pages([page], prelude="")
    assert done.returncode != 0
    assert f"{page}:8:" in done.stderr and "none" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```py\n1\n```\n", "page.md:1: the language 'py'"),
        ("<!-- setup x = 1 -->\n", "page.md:1: expected '<!-- setup'"),
        ("<!-- cpp-setup\nint x;\n-->\n\ntext\n", "page.md:2: no C"),
        ("```{code-block} python\n:class: skip\nx\n```\n", "page.md:2: expected :class: norun"),
    ],
)
def test_unclear_blocks_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        blocks(_page(tmp_path, text))
