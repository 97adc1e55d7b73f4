"""Build commands whose options are the fields of settings classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_args, get_type_hints

import typer
from typer.models import ParameterInfo

GIVEN = "given"  # the field of a settings class that takes the names of the options that the user gave


def expand_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a settings class by the options that the class declares.

    A settings class is a dataclass. Its options are the fields of type ``Annotated[T, typer.Option(...)]`` or
    ``Annotated[T, typer.Argument(...)]``. The other fields keep their defaults, but a field named ``given`` takes the
    names of the options that are on the command line. In the help, required options
    come first. Otherwise the order is that of the parameters, and of the fields within a class; fields that a
    class adds come before those that it inherits.

    Example:
        >>> from shoestring.cli.config import Source
        >>> @expand_settings
        ... def show(source: Source) -> None:
        ...     print(source.data, source.glob)
        >>> show(data=["a.txt"], glob="*")
        ['a.txt'] *
    """
    parameters: list[Parameter] = []
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in signature(command).parameters.items():
        if is_dataclass(hints[name]):
            group = list(_parameters(hints[name]))
            groups[name] = hints[name], [each.name for each in group]
            parameters += group
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))
    parameters.sort(key=lambda each: each.default is not Parameter.empty)

    if any(_takes_given(settings) for settings, _ in groups.values()):
        parameters.append(
            Parameter("context", Parameter.KEYWORD_ONLY, default=None, annotation=typer.Context)
        )

    @wraps(command)
    def run(context: Any = None, **values: Any) -> None:
        filled = {}
        for name, (settings, keys) in groups.items():
            options = {key: values.pop(key) for key in keys}
            if _takes_given(settings):
                options[GIVEN] = frozenset(key for key in keys if _is_given(context, key))
            filled[name] = settings(**options)
        command(**filled, **values)

    # typer reads the options of a command from these two attributes of its function
    vars(run)["__signature__"] = Signature(parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _takes_given(settings: type[Any]) -> bool:
    return GIVEN in {each.name for each in fields(settings)}


def _is_given(context: Any, name: str) -> bool:
    source = None if context is None else context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _parameters(settings: type[Any]) -> Iterator[Parameter]:
    """Yield the parameter of each option that the class declares."""
    hints = get_type_hints(settings, include_extras=True)
    for option in _own_fields_first(settings):
        if any(isinstance(extra, ParameterInfo) for extra in get_args(hints[option.name])[1:]):
            yield Parameter(
                option.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if option.default is MISSING else option.default,
                annotation=hints[option.name],
            )


def _own_fields_first(settings: type[Any]) -> list[Field[Any]]:
    inherited = {option.name for base in settings.__bases__ if is_dataclass(base) for option in fields(base)}
    return sorted(fields(settings), key=lambda option: option.name in inherited)
