"""Check that an argument is a model, before it changes."""

from __future__ import annotations

import os
import reprlib

from torch import nn


def check_module(caller: str, model: object) -> None:
    """Raise TypeError if ``model`` is no module, such as the path of a model directory.

    Example:
        >>> check_module("patch", "folder")
        Traceback (most recent call last):
        TypeError: patch: model: expected a torch.nn.Module, received 'folder'. Load the model from there first.
    """
    if not isinstance(model, nn.Module):
        is_path = isinstance(model, (str, os.PathLike))
        advice = "Load the model from there first." if is_path else "Pass the model itself."
        raise TypeError(
            f"{caller}: model: expected a torch.nn.Module, received {reprlib.repr(model)}. {advice}"
        )
