"""Turn a figure of matplotlib into an ``<svg>`` element for a page of HTML, which follows the page's colours."""

from __future__ import annotations

import io
import re
import warnings
from typing import Any
from xml.etree import ElementTree

from shoestring.training.report.colours import LIGHT

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
NUMBER = re.compile(r"-?\d+\.\d+")
COLOUR = re.compile(r"#[0-9a-f]{6}")
REFERENCE = re.compile(r"#([\w-]+)")
PROPERTIES = {colour: f"var(--{part})" for part, colour in LIGHT.items()}
ElementTree.register_namespace("", SVG)
ElementTree.register_namespace("xlink", XLINK)


def inline_svg(figure: Any, name: str, words: str) -> str:
    """Return a figure as an ``<svg>`` element.

    The page sets a custom property of CSS for each colour of ``colours.COLOURS``; a colour of the light theme
    becomes a reference to its property. Text takes the font of the page. The element has no script, no style
    sheet and no address.

    Args:
        figure: figure whose colours are light colours of ``colours.COLOURS``.
        name: prefix of the ids in the element, unique within the page.
        words: description of the plot for people who do not see it.
    """
    import matplotlib

    buffer = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    # The salt makes the ids the same in every run; without it, matplotlib draws them by chance.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "shoestring"}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Glyph"
        )  # a letter that matplotlib's font lacks, and the page's has
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    root = ElementTree.fromstring(buffer.getvalue())
    _slim(root, name)
    box = root.get("viewBox", "")
    root.attrib = {"viewBox": box, "role": "img", "aria-label": words, "class": "plot"}
    return ElementTree.tostring(root, encoding="unicode").replace(f' xmlns="{SVG}"', "", 1)


def _slim(root: ElementTree.Element, name: str) -> None:
    """Remove what a page does not need, and replace fixed colours, fonts and ids."""
    text = ElementTree.tostring(root, encoding="unicode")
    referenced_ids = set(REFERENCE.findall(text))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        identity = element.attrib.pop("id", None)
        if identity in referenced_ids:
            element.set("id", f"{name}-{identity}")
        if not element.tag.endswith("}text"):
            element.text = None  # white space between elements
        element.tail = None
        for key, value in element.attrib.items():
            if key in ("clip-path", f"{{{XLINK}}}href"):
                element.set(key, REFERENCE.sub(rf"#{name}-\1", value))
            elif key == "style":
                element.set(key, COLOUR.sub(lambda match: PROPERTIES.get(match[0], match[0]), _font(value)))
            elif key in ("d", "x", "y", "width", "height", "transform"):
                short = NUMBER.sub(lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), value)
                element.set(key, " ".join(short.split()))


def _font(style: str) -> str:
    return ";".join(part for part in style.split("; ") if not part.startswith("font-family"))
