"""Read a built site: its pages with their links and anchors, and its inventory of documented objects."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit


@dataclass
class Page(HTMLParser):
    """Links, anchors and images of a page."""

    path: Path
    links: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.anchors.add(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        self.files += [values[name] for name in ("src", "data") if values.get(name)]
        if tag == "link" and values.get("href"):
            self.files.append(values["href"])


def read_site(folder: Path) -> dict[str, Page]:
    """Return the pages of a site by their paths, such as "guides/losses.html"."""
    return {str(path.relative_to(folder)): Page(path) for path in sorted(folder.rglob("*.html"))}


def broken_links(folder: Path) -> list[str]:
    """Return a line for each link, anchor or file of the site that does not exist, or that is badly formed."""
    pages = read_site(folder)
    broken = []
    for name, page in pages.items():
        for link in [*page.links, *page.files]:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https"):
                if not parts.netloc or "." not in parts.netloc or " " in link:
                    broken.append(f"{name}: {link}: not a web address")
                continue
            if parts.scheme in ("mailto", "data"):
                continue
            if parts.scheme or parts.netloc:
                broken.append(f"{name}: {link}: expected http, https or a relative path")
                continue
            target = unquote(urlsplit(urljoin(name, parts.path)).path) if parts.path else name
            if target.endswith("/"):
                target += "index.html"
            if not (folder / target).is_file():
                broken.append(f"{name}: {link}: no such file")
                continue
            fragment = unquote(parts.fragment)
            if fragment and link in page.links and target in pages and fragment not in pages[target].anchors:
                broken.append(f"{name}: {link}: no such anchor")
    return broken


def inventory(folder: Path) -> dict[str, dict[str, str]]:
    """Return the pages of the documented objects by domain, such as "py", and name, from objects.inv."""
    data = (folder / "objects.inv").read_bytes()
    for _ in range(4):  # the header has four lines, and the rest is compressed
        data = data.partition(b"\n")[2]
    found: dict[str, dict[str, str]] = {}
    for line in zlib.decompress(data).decode().splitlines():
        # "name domain:role priority location title", where the names of C++ objects may hold spaces
        match = re.match(r"(.+?) (\w+):(\S+) (-?\d+) (\S*) ", line)
        assert match is not None, line
        found.setdefault(match[2], {})[match[1]] = match[5].replace("$", match[1])
    return found
