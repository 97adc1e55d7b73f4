"""The site builds without warnings, holds every public name, and has no broken link."""

import inspect
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from doc_pages import REPOSITORY
from site_pages import broken_links, inventory

sys.path.insert(0, str(REPOSITORY / "docs/_ext"))
import doxygen_filter
import operator_reference
import python_names


def test_builds_without_warnings(build: subprocess.CompletedProcess[str]) -> None:
    assert build.returncode == 0 and not build.stderr, build.stderr


def test_links_and_anchors_exist(site: Path) -> None:
    assert broken_links(site) == []


def test_every_public_python_name_is_in_the_site(site: Path) -> None:
    documented = inventory(site)["py"]
    # Modules that a package lists are pages of their own.
    assert [name for name in python_names.public_names() if name not in documented] == []


def test_every_module_with_public_names_has_a_page() -> None:
    """A new module that collects public names, as shoestring.ops does, must not be forgotten."""
    package = REPOSITORY / "python/shoestring"
    collections = {"shoestring"} | {
        f"shoestring.{path.stem}"
        for path in package.glob("*.py")
        if not path.stem.startswith("_") and "__all__" in path.read_text()
    }
    public = {
        f"shoestring.{name}"
        for name, value in vars(sys.modules["shoestring"]).items()
        if isinstance(value, types.ModuleType) and name in sys.modules["shoestring"].__all__
    }
    assert (collections | public) - set(python_names.MODULES) == set()


def test_methods_of_optimizers_are_in_the_site(site: Path) -> None:
    """The public methods of the base class, which every optimizer has, are documented there."""
    from shoestring.optim.base import LowMemoryOptimizer

    own = {
        name
        for base in LowMemoryOptimizer.__mro__
        if base.__module__.startswith("shoestring.")
        for name, value in vars(base).items()
        if not name.startswith("_") and inspect.isfunction(value)
    }
    documented = inventory(site)["py"]
    prefix = "shoestring.optim.base.LowMemoryOptimizer."
    assert [name for name in sorted(own) if prefix + name not in documented] == []


def test_every_public_operator_is_in_the_site(site: Path) -> None:
    documented = inventory(site)["py"]
    names = operator_reference.operators()
    assert len(names) > 30 and "linear_cross_entropy" in names
    assert [name for name in names if f"torch.ops.shoestring.{name}" not in documented] == []


def test_schemas_are_those_that_are_registered(site: Path) -> None:
    text = re.sub(r"<[^>]*>", "", (site / "api/operators.html").read_text())
    for argument in torch.ops.shoestring.attention.default._schema.arguments:
        assert re.search(rf"\b{argument.name}\b", text), argument.name


@pytest.fixture(scope="module")
def symbols(site: Path) -> list[str]:
    """Return the names of all public C++ symbols that Doxygen found, with their namespaces and classes."""
    xml = site.parent / "doxygen/xml"
    names: list[str] = []
    for path in sorted(xml.glob("*.xml")):
        for compound in ElementTree.parse(path).iter("compounddef"):
            kind, name = compound.get("kind"), compound.findtext("compoundname", "")
            if kind in ("class", "struct") and compound.get("prot") == "public":
                names.append(name)
            if kind not in ("class", "struct", "file") or compound.get("prot", "public") != "public":
                continue
            for member in compound.iter("memberdef"):
                own = member.findtext("name", "")
                names.append(f"{name}::{own}" if kind != "file" else own)
    return sorted(set(names))


def test_every_public_cpp_symbol_is_in_the_site(site: Path, symbols: list[str]) -> None:
    assert len(symbols) > 300
    documented = {re.sub(r"(?<!operator)\(.*", "", name) for name in inventory(site)["cpp"]}
    documented |= set(inventory(site).get("c", {}))
    # A specialisation of a template is declared with its arguments.
    missing = [
        name for name in symbols if name.replace(" ", "") not in {d.replace(" ", "") for d in documented}
    ]
    assert missing == []


@pytest.mark.parametrize(
    "name",
    [
        "shoestring::linear_cross_entropy",
        "shoestring::AttentionOptions::causal",
        "shoestring::optim::AdamW",
        "shoestring::optim::AdamWOptions::betas",
        "shoestring::optim::OptionsOf::state_format",
        "shoestring::nn::Attention",
        "shoestring::nn::AttentionImpl::forward",
        "shoestring::lora::LoraOptions",
        "SHOESTRING_VERSION",
    ],
)
def test_known_cpp_symbols_are_found(symbols: list[str], name: str) -> None:
    """Options, holders of modules and aliases are behind macros, which Doxygen must see through."""
    assert name in symbols


def test_every_public_header_is_on_a_page() -> None:
    pages = "".join(path.read_text() for path in (REPOSITORY / "docs/api/cpp").glob("*.md"))
    root = REPOSITORY / "csrc/include"
    # Some headers only include others, and export.h only declares the visibility of symbols.
    headers = {
        str(path.relative_to(root))
        for path in root.rglob("*.h")
        if re.search(r"^(namespace|#define SHOESTRING_VERSION)", path.read_text(), re.MULTILINE)
    }
    listed = set(re.findall(r"\{doxygenfile\} (\S+)", pages))
    assert listed == headers


def test_filter_keeps_types_comments_and_defaults() -> None:
    source = """\
struct SHOESTRING_API Options {
  /// The rate.
  TORCH_ARG(std::map<int, float>, rate) = {{1, 2}};
  TORCH_ARG(bool, on);
  at::Tensor weight;  // (rows)
};
TORCH_MODULE(Norm);
using nn::Kind;
"""
    lines = doxygen_filter.declarations(source).splitlines()
    start = lines.index("  /// The rate.")
    assert lines[start : start + 4] == [
        "  /// The rate.",
        "  ///",
        "  /// Default: `{{1, 2}}`.",
        "  Options& rate(std::map<int, float> value);",
    ]
    assert "  Options& on(bool value);" in lines
    assert "  at::Tensor weight;  ///< (rows)" in lines
    assert "class Norm : public torch::nn::ModuleHolder<NormImpl> {};" in lines
    assert "using Kind = nn::Kind;" in lines


def test_every_command_and_option_is_in_the_site(site: Path) -> None:
    import typer

    from shoestring.cli.app import app

    text = (site / "cli.html").read_text()
    group: Any = typer.main.get_command(app)
    assert len(group.commands) >= 7
    options = {
        (name, spelling)
        for name, command in group.commands.items()
        for param in command.params
        for spelling in param.opts
        if spelling.startswith("-")
    }
    missing = [
        pair
        for pair in sorted(options)
        if f'id="cmdoption-shoestring-{pair[0]}-{pair[1].lstrip("-")}"' not in text
    ]
    assert missing == []


def test_benchmark_page_has_the_figures(site: Path) -> None:
    import json

    text = (site / "benchmarks.html").read_text()
    for path in (REPOSITORY / "benchmarks/results").glob("*.json"):
        data = json.loads(path.read_text())
        assert data["machine"] in text
        for benchmark in data["benchmarks"]:
            for table in benchmark["tables"]:
                for row in table["rows"]:
                    assert "ratio" not in row or f"{row['ratio']:.2f}" in text


def test_output_names_neither_the_machine_nor_a_date(site: Path) -> None:
    unwanted = [str(REPOSITORY), str(Path.home()), "Last updated"]
    found = [
        (str(path.relative_to(site)), text)
        for path in site.rglob("*")
        if path.suffix in (".html", ".js", ".css") and path.parent.name != "_static"
        for text in unwanted
        if text in path.read_text()
    ]
    assert found == []
    # The default of an argument that Sphinx cannot print shows an address.
    assert not [path for path in site.rglob("*.html") if re.search(r"\b0x7f[0-9a-f]{8}", path.read_text())]
