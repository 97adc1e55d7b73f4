"""The build backend that pyproject.toml names: setuptools', and a check of the PyTorch that pip builds against.

The libraries serve one minor version of PyTorch, which must be that of the environment that pip installs into.
By default, pip builds in an environment of its own ("build isolation"), where it would download the newest PyTorch.
"""

import importlib.util
import re
import sys
import sysconfig
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import build_sdist, get_requires_for_build_sdist

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, str | list[str]] | None


def visible_torch() -> Path | None:
    """Return the folder of the PyTorch that this interpreter would import, without importing it."""
    spec = importlib.util.find_spec("torch")
    folders = spec.submodule_search_locations if spec else None
    return Path(next(iter(folders))) if folders else None


def environment_torch() -> Path | None:
    """Return the folder of the PyTorch in the environment of this interpreter, which pip may have hidden."""
    folders = [Path(sysconfig.get_path(kind)) / "torch" for kind in ("purelib", "platlib")]
    return next((folder for folder in folders if (folder / "version.py").is_file()), None)


def version(torch: Path) -> str:
    match = re.search(r"^__version__ = '(.+)'", (torch / "version.py").read_text(), re.MULTILINE)
    return match[1] if match else "of an unknown version"


def check(needed: bool) -> None:
    """Exit with one line if pip hides the environment's PyTorch, or if PyTorch is missing and needed."""
    seen, installed = visible_torch(), environment_torch()
    if installed is not None and (seen is None or version(seen) != version(installed)):
        taken = "" if seen is None else f" and takes {version(seen)}"
        sys.exit(
            f"shoestring: pip's build isolation hides PyTorch {version(installed)} of this environment{taken}; "
            "run `pip install 'setuptools>=77,<82' ninja`, then `pip install --no-build-isolation` with your arguments"
        )
    if seen is None and needed:
        sys.exit(
            "shoestring: PyTorch was not found, and the libraries are built against it; run `pip install torch` first"
        )


def requirements() -> list[str]:
    """Return PyTorch for an environment that has none; pip then builds for the newest one, and installs it."""
    check(needed=False)
    return [] if visible_torch() else ["torch>=2.11"]


def get_requires_for_build_wheel(settings: Settings = None) -> list[str]:
    return requirements() + build_meta.get_requires_for_build_wheel(settings)


def get_requires_for_build_editable(settings: Settings = None) -> list[str]:
    return requirements() + build_meta.get_requires_for_build_editable(settings)


def prepare_metadata_for_build_wheel(folder: str, settings: Settings = None) -> str:
    check(needed=True)
    return build_meta.prepare_metadata_for_build_wheel(folder, settings)


def prepare_metadata_for_build_editable(folder: str, settings: Settings = None) -> str:
    check(needed=True)
    return build_meta.prepare_metadata_for_build_editable(folder, settings)


def build_wheel(folder: str, settings: Settings = None, metadata: str | None = None) -> str:
    check(needed=True)
    return build_meta.build_wheel(folder, settings, metadata)


def build_editable(folder: str, settings: Settings = None, metadata: str | None = None) -> str:
    check(needed=True)
    return build_meta.build_editable(folder, settings, metadata)
