"""Read prompt/completion or chat records, and tokenise them into examples with marked completions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoestring.core.errors import InputError
from shoestring.data.batches import Examples
from shoestring.data.progress import working
from shoestring.data.records import CHAT, kind_of_value, read_records
from shoestring.data.text import size_of
from shoestring.data.tokenizer import encode_all

# The chat template for tokenizers that have none. Each message is a line with its role, then its text. The
# assistant's messages end with the end-of-text token.
DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Encoded:
    """The tokenised examples of some files, and the numbers of examples that were too long."""

    examples: Examples
    shortened: int  # number of examples whose end was cut off, because they are longer than seq_len
    dropped: int  # number of examples that were dropped, because no completion token fits within seq_len


def read_segments(files: list[Path], kind: str, tokenizer: Any) -> list[list[tuple[str, bool]]]:
    """Return each example as a list of (text, whether to train on the text); check every record."""
    segments = []
    with working("reading examples", size_of(files)):
        for path in files:
            for where, record in read_records(path):
                read = _chat if kind == CHAT else _completion
                segments.append(read(record, where, tokenizer))
    return segments


def _completion(record: dict[str, Any], where: str, tokenizer: Any) -> list[tuple[str, bool]]:
    prompt, completion = record.get("prompt"), record.get("completion")
    if not isinstance(prompt, str) or not isinstance(completion, str):
        values = (("prompt", prompt), ("completion", completion))
        wrong = [(key, value) for key, value in values if key in record and not isinstance(value, str)]
        found = f"its fields are {sorted(record)}"
        if wrong:
            found = f'"{wrong[0][0]}" is {kind_of_value(wrong[0][1])}'
        raise InputError(f'{where}: expected the strings "prompt" and "completion"; {found}')
    if not completion:
        raise InputError(f"{where}: the completion is empty, so there is nothing to learn")
    return [(prompt, False), (completion + tokenizer.eos_token, True)]


def _chat(record: dict[str, Any], where: str, tokenizer: Any) -> list[tuple[str, bool]]:
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        kind = "an empty list" if messages == [] else kind_of_value(messages)
        found = f'"messages" is {kind}' if "messages" in record else f"its fields are {sorted(record)}"
        raise InputError(f'{where}: expected a list "messages"; {found}')
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            values = message.items() if isinstance(message, dict) else [("a message", message)]
            kinds = ", ".join(f'"{key}" is {kind_of_value(value)}' for key, value in values)
            raise InputError(f'{where}: each message needs the strings "role" and "content"; {kinds}')
    pieces: list[tuple[str, bool]] = []
    done = ""
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(messages[:turn], where, tokenizer, ask=True)
        answered = _render(messages[: turn + 1], where, tokenizer, ask=False)
        if not prompt.startswith(done) or not answered.startswith(prompt):
            raise InputError(
                f"{where}: the tokenizer's chat template rewrites earlier turns; the completion cannot be told apart"
            )
        pieces += [(prompt[len(done) :], False), (answered[len(prompt) :], True)]
        done = answered
    if not pieces:
        raise InputError(f'{where}: no message has the role "assistant", so there is nothing to learn')
    return pieces


def _render(messages: list[dict[str, str]], where: str, tokenizer: Any, ask: bool) -> str:
    if not messages:
        return ""
    template = tokenizer.chat_template or DEFAULT_CHAT_TEMPLATE
    try:
        result: str = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=ask
        )
        return result
    except Exception as error:  # a chat template may raise any exception
        raise InputError(
            f"{where}: the chat template refuses these messages ({type(error).__name__}: {error})"
        ) from None


def encode_examples(
    segments: list[list[tuple[str, bool]]], tokenizer: Any, seq_len: int, chat: bool
) -> Encoded:
    """Tokenise examples; cut each to ``seq_len`` + 1 tokens; drop examples without a token to train on.

    If the tokenizer puts a special token before every text, as Llama's does, each example begins with that
    token. With ``chat`` the token is not added, because chat templates write it themselves.
    """
    begin = [] if chat else beginning(tokenizer)
    pieces = [piece for example in segments for piece in example]
    encoded = encode_all(tokenizer, [text for text, _ in pieces])
    tokens: list[np.ndarray] = []
    marks: list[np.ndarray] = []
    shortened = dropped = 0
    for example in segments:
        ids, trained = list(begin), [False] * len(begin)
        for _, mark in example:
            part = next(encoded)
            ids += part
            trained += [mark] * len(part)
        if len(ids) > seq_len + 1:
            shortened += 1
        ids, trained = ids[: seq_len + 1], trained[: seq_len + 1]
        if not any(trained[1:]):
            dropped += 1
            continue
        tokens.append(np.asarray(ids, np.uint32))
        marks.append(np.asarray(trained, bool))
    if not tokens:
        raise InputError(
            f"--data: no example has a completion within --seq-len {seq_len} tokens; give a larger --seq-len"
        )
    starts = np.cumsum([0, *map(len, tokens)])
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return Encoded(Examples(np.concatenate(tokens), np.concatenate(marks), starts, pad), shortened, dropped)


def beginning(tokenizer: Any) -> list[int]:
    """Return a list with the token that the tokenizer puts before every text, or an empty list."""
    ids = tokenizer("")["input_ids"]
    return [ids[0]] if ids and ids[0] == tokenizer.bos_token_id else []
