"""The public names of the Python package, and the parts of its pages that follow from them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

# The list of the public surface names the modules whose __all__ holds the public names.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from public_surface import MODULES

# Keyword arguments of public functions, which are described once, in classes of their own.
ARGUMENTS = (
    "shoestring.losses.vocab_parallel.ShardOptions",
    "shoestring.losses.vocab_parallel.Shard",
)


def public_names() -> list[str]:
    """Return the full names of everything that the modules list in ``__all__``."""
    return [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]


def ops() -> str:
    """Return the Markdown of ``shoestring.ops``: its own names, and references to those of ``shoestring``."""
    own = importlib.import_module("shoestring.ops")
    package = importlib.import_module("shoestring")
    shared = [name for name in own.__all__ if getattr(package, name, None) is getattr(own, name)]
    classes = {name for name in own.__all__ if isinstance(getattr(own, name), type)}
    types = [name for name in own.__all__ if name in classes and name not in shared]
    rest = [name for name in own.__all__ if name not in {*shared, *types}]
    kinds = {name: "class" if name in classes else "function" for name in shared}
    aliases = "\n\n".join(
        f"```{{py:{kind}}} {name}\n:no-contents-entry:\n\n"
        f"The same {kind} as {{py:obj}}`shoestring.{name}`.\n```"
        for name, kind in kinds.items()
    )
    return "\n\n".join(
        (
            "## Operators that are here only",
            _auto("function", rest),
            "## Options and results",
            _auto("class", types),
            _auto("class", ARGUMENTS),
            "## Operators that are also in `shoestring`",
            aliases,
        )
    )


def _auto(kind: str, names: Iterable[str]) -> str:
    """Return the directive of autodoc for each of the names, of ``shoestring.ops`` if they have no dots."""
    full = (name if "." in name else f"shoestring.ops.{name}" for name in names)
    lines = "\n".join(f".. auto{kind}:: {name}" for name in full)
    return f"```{{eval-rst}}\n{lines}\n```"
