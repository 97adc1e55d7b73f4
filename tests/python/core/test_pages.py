"""Test statements of the documentation that repeat what the code says.

A capability or a figure stands once, or is compared here.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

import shoestring  # noqa: F401 (registers the operators)

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
sys.path.append(str(DOCS / "_ext"))
import operator_reference  # noqa: E402

PUBLIC = Path(__file__).parent / "public"
# Modules that are parts of a public name; every other part in front of the last is a class.
MODULES = {
    "shoestring",
    "callbacks",
    "checkpoint",
    "data",
    "diffusion",
    "distributed",
    "init",
    "lora",
    "mup",
    "nn",
}
MODULES |= {"ops", "optim", "packing", "planner"}


def section(page: str, heading: str) -> str:
    """Return the text below a heading, up to the next heading of the same or a higher level."""
    text = (DOCS / page).read_text()
    level = heading.split(" ", 1)[0]
    after = text.split(f"\n{heading}\n", 1)[1]
    return re.split(rf"\n#{{1,{len(level)}}} ", after, maxsplit=1)[0]


def names_in(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def rows(text: str, header: str) -> list[list[str]]:
    """Return the cells of the table whose first column has the title ``header``."""
    lines = text.split(f"| {header} |", 1)[1].split("\n")[2:]
    table = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def python_names() -> set[str]:
    """Return the public functions and classes of Python, without ``shoestring.``."""
    lines = (PUBLIC / "python.txt").read_text().splitlines()
    names = {re.split(r"[(:]", line)[0] for line in lines if line.startswith("shoestring.")}
    return {name[11:] for name in names if set(name.split(".")[:-1]) <= MODULES}


def cpp_words() -> set[str]:
    return set(re.findall(r"\w+", (PUBLIC / "cpp.txt").read_text()))


def test_what_exists_in_python_only() -> None:
    """The page lists each public name of Python that the C++ headers lack, and no other."""
    page, words = section("cpp.md", "## What exists in Python only, and why"), cpp_words()
    only = set().union(*(names_in(row[0]) for row in rows(page, "in Python only")))
    renamed = [(names_in(row[0]), names_in(row[1])) for row in rows(page, "in Python")]
    listed = only.union(*(names for names, _ in renamed))
    absent = {name for name in python_names() if name.rsplit(".", 1)[-1] not in words}
    assert listed == absent
    known = words | {word.removesuffix("Impl") for word in words}
    for _, others in renamed:
        for name in others:
            assert set(re.findall(r"\w+", name)) <= known, name
    for name in ("AutocastGuard", "GradScaler", "install_autograd_engine"):
        assert f"`{name}`" in page and name in words
        assert name not in {each.rsplit(".", 1)[-1] for each in python_names()}


def test_operators_page_lists_every_operator() -> None:
    assert "<!-- generated: guides of operators -->" in (DOCS / "guides/operators.md").read_text()
    table = rows(operator_reference.guides() + "\n\n", "operators")
    listed = [name for row in table for name in re.findall(r"`(\w+)`", row[0])]
    assert all((DOCS / "guides" / page).exists() for row in table for page in re.findall(r"\((.+)\)", row[1]))
    lines = (PUBLIC / "operators.txt").read_text().splitlines()
    registered = {line.split("::", 1)[1].split("(")[0].split(".")[0] for line in lines if "::" in line}
    assert sorted(listed) == sorted(registered)


def test_operators_have_the_devices_that_the_page_names() -> None:
    """An operator has kernels for CPU, CUDA and Meta, or is composed of operators that have them."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composites = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
    lacks = set()
    for line in (PUBLIC / "operators.txt").read_text().splitlines():
        name = line.split("(")[0]
        composed = any(has(name, key) for key in composites)
        if not composed and not all(has(name, key) for key in ("CPU", "CUDA", "Meta")):
            lacks.add(name.removeprefix("shoestring::"))
    page = (DOCS / "guides/operators.md").read_text()
    assert lacks == {"pack_sequences"} and "`pack_sequences`, `checkpoint_plan`" in page


def test_contributing_lists_every_room() -> None:
    listed = [names_in(row[0]).pop() for row in rows((ROOT / "CONTRIBUTING.md").read_text(), "room")]
    folders = {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    assert sorted(listed) == sorted(folders - {"include"})


def results() -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in (ROOT / "benchmarks/results").glob("*.json")]
    return [each for each in found if "CUDA" in str(each["machine"])]


def test_pages_name_the_gpus_that_have_results() -> None:
    """No page names another GPU, or says that something was not timed for which there are times."""
    gpus = {str(each["machine"]).split(",")[0] for each in results()}
    timed = {table["benchmark"] for each in results() for table in each["benchmarks"]}
    claims = {}
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        text = " ".join(page.read_text().split())
        for match in re.finditer(r"(?:run|tested|timed) on (?:an?|one GPU, an) (NVIDIA \w+)", text):
            assert match[1] in gpus, f"{page.name}: {match[0]}"
        if re.search(r"not (?:yet )?been timed", text):
            claims[page.relative_to(ROOT).as_posix()] = text
    # The part of each page that has not been timed; the prefetcher has no benchmark of its own.
    untimed = {
        "docs/choosing.md": {"attention", "layers"},
        "docs/guides/layers.md": {"layers"},
        "docs/internals/attention.md": {"attention"},
        "docs/internals/prefetcher.md": set(),
        "docs/migration/flash_attention.md": {"attention"},
    }
    assert claims.keys() == untimed.keys()
    for name, parts in untimed.items():
        assert parts.isdisjoint(timed), f"{name}: {sorted(parts & timed)} has been timed"


def test_figures_of_whole_runs_stand_in_the_readme_alone() -> None:
    """The figures of `make demo` are measured again from time to time, so no other page repeats them."""
    tables = [
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith("| ") and "tokens" not in line
    ]
    figures = {figure for line in tables for figure in re.findall(r"\b\d{1,3},\d{3}\b", line)}
    assert len(figures) >= 10
    for page in DOCS.rglob("*.md"):
        repeated = figures & set(re.findall(r"\b\d{1,3},\d{3}\b", page.read_text()))
        assert not repeated, f"{page.relative_to(ROOT)}: {sorted(repeated)}"


def test_files_and_tests_that_pages_name_exist() -> None:
    """Each path of the repository and each test that a page names in backticks exists."""
    folders = "csrc|cuda|python|tests|scripts|cmake|examples|benchmarks|docs"
    tests = [path for kind in ("py", "cpp") for path in (ROOT / "tests").rglob(f"*.{kind}")]
    files = {path.name for path in tests}
    defined = set(
        re.findall(r"^ *def (test_\w+)", "\n".join(path.read_text() for path in tests), re.MULTILINE)
    )
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")):
        for name in re.findall(r"`([^`\n]+)`", page.read_text()):
            where = f"{page.relative_to(ROOT)}: {name}"
            if re.fullmatch(r"test_\w+\.(?:py|cpp)(?:::\w+)?", name):
                assert name.split("::")[0] in files, where
            for test in re.findall(r"(?:^|::)(test_\w+)$", name):
                assert test in defined, where
            path = name.split("::")[0].split(" ")[0].rstrip("/")
            if re.match(rf"(?:{folders})/", path) and not set("<,{…").intersection(path):
                assert list(ROOT.glob(path)), where
