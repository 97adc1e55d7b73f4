"""Choose parameters by patterns of their names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase


def matching(function: str, argument: str, pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that match a pattern of fnmatch.

    Raises:
        ValueError: no name matches. The message lists similar names.
    """
    matched = [name for name in names if fnmatchcase(name, pattern)]
    if not matched:
        raise ValueError(
            f"{function}: {argument}: expected a pattern that matches a parameter, received {pattern!r}. "
            f"{candidates(pattern, names)}"
        )
    return matched


def candidates(wanted: str, names: Sequence[str]) -> str:
    """Return a sentence that lists the names most similar to the wanted one, or the first names."""
    similar = difflib.get_close_matches(wanted.replace("*", ""), names, 5, 0.4)
    shown = similar or list(names[:5])
    if not shown:
        return "There are none."
    more = ", ..." if len(names) > len(shown) else ""
    return f"{'Similar names are' if similar else 'The names are'} {', '.join(shown)}{more}"
