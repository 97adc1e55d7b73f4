"""The fields of records and of their messages that are understood; every other one is an error that names it."""

from __future__ import annotations

import json
from typing import Any

from shoestring.core.errors import InputError
from shoestring.data.records import CHAT, KINDS, kind_of_value
from shoestring.files.read_file import shown

# Fields that only describe a record. They change nothing, in any kind of record.
DESCRIPTIONS = ("id", "meta", "metadata", "source", "url")
TOOLS, WEIGHT = "tools", "weight"
# Names under which a message may have its reasoning.
REASONING = ("reasoning_content", "reasoning", "thinking")
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", *REASONING, WEIGHT)
ASSISTANT = "assistant"


def check_fields(record: dict[str, Any], kind: str, where: str) -> None:
    """Raise an InputError that names a field that records of a kind do not have. A field with null is absent."""
    known = {*KINDS[kind], *DESCRIPTIONS, *([TOOLS] if kind == CHAT else [])}
    for name, value in record.items():
        if name not in known and value is not None:
            raise InputError(
                f"{where}: the field {shown(name)} of a {kind} record is not understood; expected "
                f"{', '.join(KINDS[kind])}{' and tools' if kind == CHAT else ''}, or a description "
                f"({', '.join(DESCRIPTIONS)}). Remove it or rename it."
            )


def read_tools(record: dict[str, Any], where: str) -> list[dict[str, Any]] | None:
    """Return the tools of a chat record, or None if it has none."""
    tools = record.get(TOOLS)
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(f'{where}: "tools": expected a list of objects, got {kind_of_value(tools)}')
    return tools


def read_messages(record: dict[str, Any], where: str) -> tuple[list[dict[str, Any]], list[bool]]:
    """Return the messages of a chat record as templates take them, and whether to train on each."""
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        kind = "an empty list" if messages == [] else kind_of_value(messages)
        cause = f'"messages" is {kind}' if "messages" in record else f"its fields are {shown(sorted(record))}"
        raise InputError(f'{where}: expected a list "messages"; {cause}')
    read, trained = [], []
    for message in messages:
        result, weight = _read_message(message, where)
        read.append(result)
        trained.append(weight and result["role"] == ASSISTANT)
    return read, trained


def _read_message(message: object, where: str) -> tuple[dict[str, Any], bool]:
    if not isinstance(message, dict):
        raise InputError(
            f'{where}: each message needs the strings "role" and "content"; a message is {kind_of_value(message)}'
        )
    result = {name: value for name, value in message.items() if value is not None}
    for name in result:
        if name not in MESSAGE_FIELDS:
            raise InputError(
                f"{where}: the field {shown(name)} of a message is not understood; expected "
                f"{', '.join(MESSAGE_FIELDS)}. Remove it."
            )
    calls = result.get("tool_calls")
    if calls == []:
        del result["tool_calls"]
        calls = None
    if isinstance(result.get("content"), list):
        result["content"] = _joined(result["content"], where)
    texts = ("role", "name", "tool_call_id", *REASONING) + (
        () if calls and "content" not in result else ("content",)
    )
    for name in texts:
        if name in ("role", "content") and not isinstance(result.get(name), str):
            kinds = ", ".join(
                f"{json.dumps(key)} is {kind_of_value(value)}" for key, value in message.items()
            )
            raise InputError(f'{where}: each message needs the strings "role" and "content"; {kinds}')
        if name in result and not isinstance(result[name], str):
            raise InputError(f'{where}: "{name}": expected a string, got {kind_of_value(result[name])}')
    if calls is not None:
        result["tool_calls"] = _read_calls(calls, result["role"], where)
    return result, _read_weight(result, where)


def _joined(parts: list[Any], where: str) -> str:
    """Return the text of a content in parts, such as [{"type": "text", "text": "Hello"}]."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = shown(part.get("type")) if isinstance(part, dict) else kind_of_value(part)
            raise InputError(f'{where}: "content": expected parts of the type "text", got {kind}')
        unknown = [name for name, value in part.items() if name not in ("type", "text") and value is not None]
        if unknown:
            raise InputError(f'{where}: "content": the field {shown(unknown[0])} of a part is not understood')
    return "".join(part["text"] for part in parts)


def _read_calls(calls: object, role: str, where: str) -> list[dict[str, Any]]:
    """Return tool calls whose arguments are objects, as templates take them; records often have JSON text."""
    if role != ASSISTANT:
        raise InputError(
            f'{where}: "tool_calls": expected them in a message of the assistant, got {shown(role)}'
        )
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InputError(f'{where}: "tool_calls": expected a list of objects, got {kind_of_value(calls)}')
    result = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError(
                f'{where}: "tool_calls": expected a "function" with a string "name" in each call'
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except (ValueError, RecursionError):
                parsed = None
            if not isinstance(parsed, dict):
                raise InputError(
                    f'{where}: "arguments" of a tool call: expected a JSON object, got {shown(arguments)}'
                )
            function = {**function, "arguments": parsed}
        result.append({**call, "function": function} if "function" in call else function)
    return result


def _read_weight(message: dict[str, Any], where: str) -> bool:
    weight = message.pop(WEIGHT, None)
    if weight is None:
        return True
    if isinstance(weight, bool) or weight not in (0, 1):
        raise InputError(
            f'{where}: "weight" of a message: expected 0 (not trained on) or 1, got {shown(weight)}'
        )
    if weight and message["role"] != ASSISTANT:
        raise InputError(
            f'{where}: "weight": 1 of a message of the role {shown(message["role"])}: only messages of the assistant '
            "are trained on; remove it"
        )
    return bool(weight)
