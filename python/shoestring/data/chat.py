"""Render chats by a tokenizer's chat template, and tell the assistant's answers from the text around them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shoestring.core.errors import InputError
from shoestring.data.fields import REASONING, read_messages, read_tools
from shoestring.files.read_file import shown

# The chat template for tokenizers that have none. Each message is a line with its role, then its text. The
# assistant's messages end with the end-of-text token.
DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
MARKS_ANSWERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
PLACEHOLDER = "\ue000"  # stands for the content of a message, to find where a template puts it
END_OF_THINKING = "</think>"

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
Spans = list[tuple[int, int]]  # (first, end) characters of each piece of an answer
Segments = list[tuple[str, bool]]  # a text in pieces, each with whether to train on it


@dataclass(frozen=True)
class Rendered:
    """A rendered chat, and the (first, end) characters of answers that the template marks."""

    text: str
    answers: Spans


def render(tokenizer: Any, messages: Messages, tools: Tools, where: str, ask: bool) -> Rendered:
    """Render messages by the tokenizer's template, or the default one; ``ask`` adds the head of an answer."""
    if not messages:
        return Rendered("", [])
    refusal: Exception | None = None
    for form in _forms(messages):
        try:
            result = _render(tokenizer, form, tools, ask)
        except Exception as error:  # a chat template may raise any exception
            refusal = refusal or error
            continue
        if not _writes_none(form, result.text):
            return result
    reason = " ".join(str(refusal).split())
    raise InputError(
        f"{where}: the chat template refuses these messages ({type(refusal).__name__}: {reason})"
    )


def stop_tokens(tokenizer: Any) -> list[str]:
    """Return the tokens that end an answer: the end-of-text token, and what the template puts after an answer.

    A template may leave the end of an answer to the next message, whose first special token then ends it.
    """
    tokens = [tokenizer.eos_token]
    added = _added_tokens(tokenizer)
    answer = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PLACEHOLDER}]
    for messages, among in (
        (answer, [*added]),
        ([*answer, answer[0]], [text for text, is_special in added.items() if is_special]),
    ):
        try:
            text = render(tokenizer, messages, None, "", ask=False).text
        except InputError:
            continue
        after = text.rpartition(PLACEHOLDER)[2].lstrip()
        tokens += sorted(filter(after.startswith, among), key=len)[-1:]
    return list(dict.fromkeys(tokens))


def stop_at_answers(model: Any, tokenizer: Any) -> list[int]:
    """Let a model of transformers generate up to the end of an answer, or to its own end tokens; return the ids."""
    config = getattr(model, "generation_config", None)
    eos = getattr(config, "eos_token_id", None)
    known = eos if isinstance(eos, list) else [] if eos is None else [eos]
    missing = [i for i in tokenizer.convert_tokens_to_ids(stop_tokens(tokenizer)) if i not in known]
    if config is not None and missing:
        config.eos_token_id = [*known, *missing]
    return [*known, *missing]


def _added_tokens(tokenizer: Any) -> dict[str, bool]:
    """Return the tokens that texts may spell out, each with whether it is special."""
    return {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}


def _forms(messages: Messages) -> Iterator[Messages]:
    """Yield the forms of the same messages that templates take, the usual one first.

    A message without content has none, or null, or an empty text; arguments of tool calls are objects or text.
    """
    contents: list[dict[str, Any]] = (
        [{}]
        if all("content" in message for message in messages)
        else [{}, {"content": None}, {"content": ""}]
    )
    for content in contents:
        form = [{**content, **message} for message in messages]
        yield form
        as_text = _arguments_as_text(form)
        if as_text != form:
            yield as_text


def _writes_none(messages: Messages, text: str) -> bool:
    """Return whether the text may hold a content of null as a word."""
    return any(message.get("content", "") is None for message in messages) and (
        "null" in text or "None" in text
    )


def _render(tokenizer: Any, messages: Messages, tools: Tools, ask: bool) -> Rendered:
    """Apply the chat template to messages; ``ask`` adds the prompt for an answer at the end."""
    from transformers.utils import chat_template_utils

    template: str = DEFAULT_CHAT_TEMPLATE
    if tokenizer.chat_template:
        template = tokenizer.get_chat_template(tools=tools)
    render_template: Any = chat_template_utils.render_jinja_template
    texts, answers = render_template(
        [messages],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=bool(MARKS_ANSWERS.search(template)),
        add_generation_prompt=ask,
        **tokenizer.special_tokens_map,
    )
    return Rendered(texts[0], answers[0] if answers else [])


def _arguments_as_text(messages: Messages) -> Messages:
    """Return the messages with the arguments of tool calls as JSON text, which some templates take."""

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), dict):
            return {**call, "function": as_text(call["function"])}
        if isinstance(call.get("arguments"), dict):
            return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
        return call

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


@dataclass
class ChatReader:
    """Turn chat records into examples, and count how often a template gave several examples for one record.

    Most templates write a chat so that each answer follows the text before it. Templates of models that think
    leave the thinking of earlier answers out. Then the text up to an answer is an example of its own, as the
    model sees it when it answers.
    """

    tokenizer: Any
    chats: int = 0  # number of records
    divided: int = 0  # number of records that became several examples
    examples: int = 0  # number of examples
    finished: int = 0  # number of answers to which the end-of-text token was added
    _ends: tuple[str, ...] = ()  # the tokens that may end an answer
    _written: set[tuple[str, str]] = field(default_factory=set)  # (role, field) that the template writes

    def read(self, record: dict[str, Any], where: str) -> list[Segments]:
        """Return the examples of one record: its text in pieces, each with whether to train on it."""
        messages, trained = read_messages(record, where)
        tools = read_tools(record, where)
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise InputError(f'{where}: no message has the role "assistant", so there is nothing to learn')
        if not any(trained):
            raise InputError(
                f'{where}: every message of the assistant has "weight": 0, so there is nothing to learn'
            )
        chats: list[tuple[str, Spans]] = [("", [])]
        previous = 0
        for turn in turns:
            text, spans = self._finished(*self._answer(messages[: turn + 1], tools, where))
            self._check_written(messages[: turn + 1], previous, tools, text, where)
            previous = turn + 1
            if not text.startswith(chats[-1][0]):
                chats.append(("", []))
            chats[-1] = (text, [*chats[-1][1], *(spans if trained[turn] else [])])
        result = [_pieces(text, spans) for text, spans in chats if spans]
        self.chats += 1
        self.examples += len(result)
        self.divided += len(result) > 1
        return result

    def notes(self) -> list[str]:
        """Return lines for the user about what was done."""
        result = []
        if self.finished:
            result.append(
                f"the chat template writes no token at which generation stops after {self.finished} answer(s): "
                f"{self.tokenizer.eos_token} was added to each"
            )
        if self.divided:
            writes = "writes earlier answers without it" if self.finished else "rewrites earlier turns"
            result.append(
                f"the chat template {writes}: {self.divided} of {self.chats} chats became several examples "
                f"({self.examples} in total), each up to an answer as the model sees it when it answers"
            )
        return result

    def _finished(self, text: str, spans: Spans) -> tuple[str, Spans]:
        """Let the last answer end with a token at which generation stops.

        A template may put the token behind the text that it marks as generated, into the next message, or nowhere.
        """
        if not self._ends:
            special = [token for token, is_special in _added_tokens(self.tokenizer).items() if is_special]
            self._ends = (*stop_tokens(self.tokenizer), *special)
        first, end = spans[-1]
        if text[first:end].rstrip().endswith(self._ends):
            return text, spans
        after = text[end:].lstrip()
        following = max((len(token) for token in self._ends if after.startswith(token)), default=0)
        if following:
            end = len(text) - len(after) + following
        else:
            text += self.tokenizer.eos_token
            end = len(text)
            self.finished += 1
        return text, [*spans[:-1], (first, end)]

    def _answer(self, messages: Messages, tools: Tools, where: str) -> tuple[str, Spans]:
        """Return the text of a chat that ends with an answer, and the (first, end) characters of the answer."""

        def rendered(messages: Messages, ask: bool) -> Rendered:
            return render(self.tokenizer, messages, tools, where, ask)

        asked, whole = rendered(messages[:-1], ask=True), rendered(messages, ask=False)
        text, content = whole.text, messages[-1].get("content", "")
        lost = END_OF_THINKING in content and _squeezed(content) not in _squeezed(text)
        if whole.answers or asked.answers:
            spans = whole.answers[len(asked.answers) :]
            if lost or not spans:
                missing = "the thinking of an answer" if lost else "an answer"
                raise InputError(
                    f"{where}: the chat template marks no text as generated that holds {missing}"
                )
            return text, spans
        begin = len(asked.text)
        if lost or not text.startswith(asked.text):
            # The template asks for an answer with more than the head of a message, such as "<think>".
            placed = rendered([*messages[:-1], {**messages[-1], "content": PLACEHOLDER}], ask=False).text
            head, mark, tail = placed.partition(PLACEHOLDER)
            if lost and mark:  # the template leaves the thinking out even here, and the model has to learn it
                text = head + content + tail
            # The end of the earlier turns in the text.
            before = _common(asked.text, rendered(messages[:-1], ask=False).text)
            begin = _common(asked.text, text)
            if begin < before or (lost and not mark):
                raise InputError(
                    f"{where}: the chat template rewrites earlier turns; the completion cannot be told apart"
                )
            if begin < len(asked.text) and text.startswith(head):
                begin = min(begin, len(head))
        return text, [(begin, len(text))]

    def _check_written(self, messages: Messages, first: int, tools: Tools, text: str, where: str) -> None:
        """Raise an InputError that names a field of the messages from ``first`` on that the template leaves out."""

        def changes(changed: Messages, tools: Tools) -> bool:
            try:
                return render(self.tokenizer, changed, tools, where, ask=False).text != original()
            except InputError:
                return True  # the template refuses the change, so it reads the field

        def original() -> str:
            return render(self.tokenizer, messages, tools, where, ask=False).text

        if tools and ("", "tools") not in self._written:
            if not changes(messages, None):
                raise InputError(
                    f'{where}: the chat template does not write "tools"; take a model that calls tools, or remove them'
                )
            self._written.add(("", "tools"))
        for index in range(first, len(messages)):
            message = messages[index]
            for name, value in message.items():
                key = message["role"], name
                if name in ("role", "tool_call_id") or (name == "name" and message["role"] == "tool"):
                    continue  # a tool's answer follows its call; many templates tell them by their order
                if value == "" or (name == "content" and value.strip() in text):
                    continue
                if name != "content" and key in self._written:
                    continue
                other = value + PLACEHOLDER if isinstance(value, str) else []
                changed = {**message, **dict.fromkeys(REASONING if name in REASONING else [name], other)}
                if name in REASONING:
                    changed = {key: value for key, value in changed.items() if key in message}
                if not changes([*messages[:index], changed, *messages[index + 1 :]], tools):
                    raise InputError(
                        f"{where}: the chat template leaves out {shown(name)} of a message of the role "
                        f"{shown(message['role'])}; remove it, or take a model whose template writes it"
                    )
                self._written.add(key)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _common(a: str, b: str) -> int:
    """Return the length of the longest common beginning of two texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _pieces(text: str, spans: Spans) -> Segments:
    """Split a text at spans; return the pieces, each with whether it is one of the spans."""
    pieces, end = list[tuple[str, bool]](), 0
    for first, last in spans:
        pieces += [(text[end:first], False), (text[first:last], True)]
        end = last
    return [*pieces, (text[end:], False)]
