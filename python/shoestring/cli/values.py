"""Check single options while the command line is parsed, before PyTorch is imported and before any work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from shoestring.core.errors import InputError

COUNT = 10**9  # largest number of steps, and of anything that happens at most once per step


def within(
    least: float, most: float, expected: str | None = None, *, without: float | None = None
) -> Callable[..., Any]:
    """Return the callback of a numeric option that must be between ``least`` and ``most``.

    Args:
        expected: describes the lower end, or the whole range if ``without`` is the upper end.
        without: an end that is itself excluded.
    """

    def check(param: typer.CallbackParam, value: Any) -> Any:
        # NaN fails every comparison.
        if value is not None and not (least <= value <= most and value != without):
            beyond = value > most and without != most
            _refuse(param, f"at most {most}" if beyond else expected or f"at least {least}", value)
        return value

    return check


def one_of(*choices: str) -> Callable[..., Any]:
    """Return the callback of an option that must be one of ``choices``."""

    def check(param: typer.CallbackParam, value: Any) -> Any:
        if value is not None and value not in choices:
            _refuse(param, " | ".join(choices), value)
        return value

    return check


def _refuse(param: typer.CallbackParam, expected: str, value: Any) -> None:
    received = str(value)
    received = received if len(received) <= 80 else received[:77] + "..."
    raise InputError(f"{param.opts[0]}: expected {expected}, got {received}")


def target_names(text: str) -> str | list[str]:
    """Return "all-linear", or the list of the names separated by commas, without surrounding spaces."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError("--target-modules: expected all-linear, or names separated by commas; got none")
    return "all-linear" if names == ["all-linear"] else names
