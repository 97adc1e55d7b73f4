"""Checks of single options, made while the command line is parsed: before PyTorch is imported and before any work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from shoestring.core.errors import InputError

COUNT = 10**9  # the most steps; a counter of anything that a run does once a step


def within(
    least: float, most: float, expected: str | None = None, *, without: float | None = None
) -> Callable[..., Any]:
    """Make the callback of a number that has to lie between ``least`` and ``most``.

    Args:
        expected: the lower end in words, or the range if ``without`` is the upper end.
        without: an end that is not in the range itself.
    """

    def check(param: typer.CallbackParam, value: Any) -> Any:
        # A value that is not a number fails every comparison.
        if value is not None and not (least <= value <= most and value != without):
            beyond = value > most and without != most
            _refuse(param, f"at most {most}" if beyond else expected or f"at least {least}", value)
        return value

    return check


def one_of(*choices: str) -> Callable[..., Any]:
    """Make the callback of an option that has one of a few values."""

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
    """Return "all-linear", or the names that commas separate, without the spaces around them."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError("--target-modules: expected all-linear, or names separated by commas; got none")
    return "all-linear" if names == ["all-linear"] else names
