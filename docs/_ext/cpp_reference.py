"""The C++ reference: run Doxygen over the public headers, and hand its XML to Breathe."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

DOCS = Path(__file__).parents[1]


def run_doxygen(output: Path) -> Path:
    """Write the XML of the public headers below ``output``, and return its folder.

    Raises:
        ExtensionError: Doxygen is not installed, or warns.
    """
    if shutil.which("doxygen") is None:
        raise ExtensionError("doxygen was not found; run make setup, or install the package doxygen")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    settings = (DOCS / "Doxyfile").read_text() + f'OUTPUT_DIRECTORY = "{output}"\n'
    done = subprocess.run(["doxygen", "-"], cwd=DOCS, input=settings, capture_output=True, text=True)
    if done.returncode:
        raise ExtensionError(f"doxygen: {done.stderr.replace(str(DOCS.parent) + '/', '')}")
    xml = output / "xml"
    internal = {
        compound.get("id", "")
        for path in xml.glob("*.xml")
        for compound in ElementTree.parse(path).iter("compounddef")
        if compound.get("prot", "public") != "public"
    }
    for path in xml.glob("*.xml"):
        _leave_out_internals(path, internal)
    _flatten_files(xml)
    return xml


def _leave_out_internals(path: Path, internal: set[str]) -> None:
    """Remove what users of a class cannot use: protected and private members and classes, and friends."""
    tree = ElementTree.parse(path)
    for compound in tree.iter("compounddef"):
        for section in compound.findall("sectiondef"):
            if section.get("kind", "").startswith(("protected", "private", "friend")):
                compound.remove(section)
        for inner in compound.findall("innerclass"):
            if inner.get("refid") in internal:
                compound.remove(inner)
    tree.write(path, encoding="utf-8", xml_declaration=True)


def _flatten_files(xml: Path) -> None:
    """Put the members of namespaces into the XML of their header, and name each header by its path.

    Doxygen lists the members of a namespace in the namespace alone. Breathe would then declare the namespace on each
    page, and Sphinx would warn that it is declared several times.
    """
    members = [
        (f"{compound.findtext('compoundname')}::", section.get("kind", ""), member)
        for path in sorted(xml.glob("namespace*.xml"))
        for compound in ElementTree.parse(path).iter("compounddef")
        for section in compound.findall("sectiondef")
        for member in section.findall("memberdef")
    ]
    index = ElementTree.parse(xml / "index.xml")
    for entry in index.getroot().findall("compound[@kind='file']"):
        path = xml / f"{entry.get('refid')}.xml"
        tree = ElementTree.parse(path)
        compound = tree.getroot().find("compounddef")
        location = compound.find("location") if compound is not None else None
        assert compound is not None and location is not None, path
        for namespace in compound.findall("innernamespace"):
            compound.remove(namespace)
        own = [m for m in members if _file(m[2]) == location.get("file")]
        # Functions, types and so on each have a section, in the order of their lines.
        for kind in dict.fromkeys(kind for _, kind, _ in own):
            section = ElementTree.SubElement(compound, "sectiondef", kind=kind)
            for prefix, _, member in sorted((m for m in own if m[1] == kind), key=lambda m: _line(m[2])):
                name = member.find("name")
                assert name is not None and name.text is not None
                name.text = prefix + name.text
                section.append(member)
        # The schema of Doxygen's XML has the location as the last element.
        compound.remove(location)
        compound.append(location)
        tree.write(path, encoding="utf-8", xml_declaration=True)
        for name in entry.findall("name"):
            name.text = location.get("file")
    index.write(xml / "index.xml", encoding="utf-8", xml_declaration=True)


def _file(member: ElementTree.Element) -> str | None:
    location = member.find("location")
    # A function that is declared in a header and defined elsewhere has both places.
    return None if location is None else location.get("declfile") or location.get("file")


def _line(member: ElementTree.Element) -> int:
    location = member.find("location")
    assert location is not None
    return int(location.get("line", "0"))


def _make_xml(app: Sphinx) -> None:
    xml = run_doxygen(Path(app.outdir).parent / "doxygen")
    app.config.breathe_projects = {"shoestring": str(xml)}


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    # Breathe reads its settings when the builder starts, so this handler comes first.
    app.connect("builder-inited", _make_xml, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
