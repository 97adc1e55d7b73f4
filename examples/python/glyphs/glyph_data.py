"""Render the letters and digits of installed fonts as 64 x 64 images, and hold out whole font families."""

from __future__ import annotations

import argparse
import json
import re
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
SIDE = 64  # pixels
FONT_SIZE, BASELINE = 44, 46  # one size and one baseline, so that "c" and "C" differ
SYSTEM_FONTS = Path("/usr/share/fonts")
# Fonts that hold pictures, or letters of other scripts, at the codes of Latin letters.
NOT_LATIN = re.compile("dingbat|symbol|icon|emoji|math|music|initial|^d050000l|^cm(ex|mi|sy)", re.IGNORECASE)


@dataclass(frozen=True)
class Glyphs:
    """Rendered glyphs of some font families.

    images: (glyphs, 1, 64, 64), uint8, 0 is the background.
    labels: (glyphs,), int64, positions in ``CHARACTERS``.
    families: the names of the families.
    """

    images: Tensor
    labels: Tensor
    families: tuple[str, ...]


def render(path: Path) -> Tensor | None:
    """Render all characters of a font, (62, 64, 64) in uint8, or return None if the font lacks some of them.

    A font in which more than four characters look like another one is left out: its lower case is upper case, or
    missing characters have the same box.
    """
    font = ImageFont.truetype(str(path), FONT_SIZE, layout_engine=ImageFont.Layout.BASIC)
    images = np.zeros((len(CHARACTERS), SIDE, SIDE), np.uint8)
    for image, character in zip(images, CHARACTERS, strict=True):
        picture = Image.new("L", (SIDE, SIDE))
        ImageDraw.Draw(picture).text((SIDE // 2, BASELINE), character, 255, font, anchor="ms")
        image[:] = np.asarray(picture)
    distinct = {image.tobytes() for image in images if image.max() > 127}
    return torch.from_numpy(images) if len(distinct) >= len(CHARACTERS) - 4 else None


def fonts_in(folder: Path) -> dict[str, list[Path]]:
    """Return the font files of each family. Families whose names begin with the same word count as one."""
    found: dict[str, dict[tuple[str | None, str | None], Path]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".ttf", ".otf")):
        try:
            name = ImageFont.truetype(str(path), 10).getname()
        except OSError:  # not a font that FreeType reads
            continue
        if name[0] and not NOT_LATIN.search(name[0]):
            found.setdefault(name[0].split()[0], {}).setdefault(name, path)
    return {family: list(files.values()) for family, files in sorted(found.items())}


@cache
def load(folder: Path | None = None, per_family: int = 2) -> tuple[Glyphs, Glyphs]:
    """Render the fonts of a folder; return (training glyphs, glyphs of the held-out families).

    One family in five is held out. The checksums of the names decide which ones.

    Args:
        folder: a folder with .ttf and .otf files. None stands for /usr/share/fonts if it has enough families, and
            otherwise for the fonts of matplotlib.
        per_family: the largest number of fonts of a family, so that no family dominates.

    Raises:
        ValueError: the folder has fewer than three families with all characters.
    """
    if folder is None:
        rendered = _rendered(SYSTEM_FONTS, per_family)
        folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        rendered = rendered if len(rendered) >= 3 else _rendered(folder, per_family)
    else:
        rendered = _rendered(folder, per_family)
    if len(rendered) < 3:
        raise ValueError(
            f"fonts: expected at least 3 families with A-Z, a-z and 0-9 in {folder}, got {len(rendered)}. "
            "Install fonts, or pass --fonts FOLDER."
        )
    families = sorted(rendered, key=lambda family: zlib.crc32(family.encode()))
    held_out = max(1, len(families) // 5)
    return _glyphs(families[held_out:], rendered), _glyphs(families[:held_out], rendered)


def _rendered(folder: Path, per_family: int) -> dict[str, Tensor]:
    """Return the images of each family, (fonts, 62, 64, 64), without families of which no font is complete."""
    rendered = {}
    for family, paths in fonts_in(folder).items():
        paths = sorted(paths, key=lambda path: zlib.crc32(path.name.encode()))
        fonts = []
        for path in paths:
            images = render(path)
            if images is not None:
                fonts.append(images)
            if len(fonts) == per_family:
                break
        if fonts:
            rendered[family] = torch.stack(fonts)
    return rendered


def _glyphs(families: list[str], rendered: dict[str, Tensor]) -> Glyphs:
    images = torch.cat([rendered[family] for family in families])
    labels = torch.arange(len(CHARACTERS)).repeat(len(images))
    return Glyphs(images.reshape(-1, 1, SIDE, SIDE), labels, tuple(sorted(families)))


class Parser(argparse.ArgumentParser):
    """A parser with the options of all glyph examples, which prints errors in one line."""

    def __init__(self, description: str) -> None:
        super().__init__(description=description)
        self.add_argument("--fonts", type=Path, help="a folder with fonts; by default /usr/share/fonts")
        self.add_argument("--seed", type=int, default=0)
        self.add_argument("--threads", type=int, default=torch.get_num_threads())
        self.add_argument("--quick", action="store_true", help="a few fonts and steps: to see that it runs")
        self.add_argument("--json", type=Path, help="also add the figures to this file")

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}\n")

    def glyphs(self, options: argparse.Namespace) -> tuple[Glyphs, Glyphs]:
        """Return the glyphs that the options ask for; too few fonts end the program."""
        try:
            return load(options.fonts, per_family=1 if options.quick else 2)
        except ValueError as error:
            self.error(str(error))


def add_to_json(path: Path, part: str, results: dict[str, Any]) -> None:
    """Merge results into one part of a JSON file, which may not exist yet."""
    everything = json.loads(path.read_text()) if path.exists() else {}
    everything[part] = _merged(everything.get(part, {}), results)
    path.write_text(json.dumps(everything, indent=1) + "\n")


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        both = isinstance(value, dict) and isinstance(old.get(key), dict)
        merged[key] = _merged(old[key], value) if both else value
    return merged
