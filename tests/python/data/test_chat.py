"""Test the examples made of chats: fields of records and messages, templates that trim earlier turns, marked answers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import write_jsonl
from shoestring.core.errors import InputError
from shoestring.data.chat import DEFAULT_CHAT_TEMPLATE, render, stop_tokens
from shoestring.data.examples import encode_examples, read_segments
from shoestring.data.records import CHAT, COMPLETION
from shoestring.data.text import check_text
from tokenizer_kinds import made

# Templates with the ways of known models, in few words: thinking stays in the last answer alone (Qwen3), or in
# no answer although the model is asked to think (DeepSeek-R1); answers are marked; tools are written.
CHATML = (
    "{% if tools %}{{ '<tools>' + (tools | tojson) + '</tools>' }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + (call.function | tojson) }}{% endfor %}"
    "{{ '<end>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% set text = m.content %}{% set thought = '' %}"
    "{% if '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ text + '<end>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<U>' + m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}{{ '<A>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<A><think>\\n' }}{% endif %}"
)
# Like Nemotron's template, it marks an answer without thinking in another way than it asks for thinking.
EMPTY_THINKING = CHATML.replace(
    "{% if m.content %}", "{% if m.role == 'assistant' %}{{ '<think></think>' }}{% endif %}{% if m.content %}"
).replace("'<|assistant|>'", "'<|assistant|><think>\\n'")
MARKED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<end>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content + '<end>\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def said(role: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TWO = [said("user", "one?"), said("assistant", "One."), said("user", "two?"), said("assistant", "Two.")]


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """A tokenizer of the kind Llama-3 with the token <end>, and the template of the test's parameter ``template``."""
    result = copy.deepcopy(made("Llama-3"))
    result.add_tokens(["<end>", "<|next|>"], special_tokens=True)
    result.chat_template = (
        request.node.callspec.params.get("template") if hasattr(request.node, "callspec") else None
    )
    return result


def examples(tmp_path: Path, tokenizer: Any, *records: dict[str, Any]) -> list[list[str]]:
    """Return for each example its whole text, and the texts that are trained on."""
    texts = read_segments([write_jsonl(tmp_path / "a.jsonl", list(records))], CHAT, tokenizer)
    encoded = encode_examples(texts, tokenizer, 1000).examples
    shown = []
    for first, end in zip(encoded.starts[:-1], encoded.starts[1:]):
        ids, marks = encoded.tokens[first:end].tolist(), encoded.trained[first:end].tolist()
        parts, run = [tokenizer.decode(ids)], list[int]()
        for token, mark in [*zip(ids, marks), (0, False)]:
            run = [*run, token] if mark else run
            if run and not mark:
                parts.append(tokenizer.decode(run))
                run = []
        shown.append(parts)
    return shown


def refused(tmp_path: Path, tokenizer: Any, record: dict[str, Any], kind: str = CHAT) -> str:
    with pytest.raises(InputError) as error:
        read_segments([write_jsonl(tmp_path / "a.jsonl", [record])], kind, tokenizer)
    assert str(error.value).startswith(f"{tmp_path / 'a.jsonl'}: line 1")
    return str(error.value)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_every_answer_is_trained_in_one_example(tmp_path: Path, tokenizer: Any, template: str) -> None:
    ((whole, *trained),) = examples(tmp_path, tokenizer, {"messages": TWO})
    assert whole == "<|user|>one?<end>\n<|assistant|>One.<end>\n<|user|>two?<end>\n<|assistant|>Two.<end>\n"
    end = "<end>" if template == MARKED else "<end>\n"
    assert trained == [f"One.{end}", f"Two.{end}"]


def test_the_default_template_begins_as_texts_do(tmp_path: Path, tokenizer: Any) -> None:
    ((whole, *trained),) = examples(tmp_path, tokenizer, {"messages": TWO[:2]})
    assert whole == "<s>user:\none?\nassistant:\nOne.</s>\n" and trained == ["One.</s>\n"]
    assert tokenizer.chat_template is None and "eos_token" in DEFAULT_CHAT_TEMPLATE


@pytest.mark.parametrize("template", [QWEN3])
def test_thinking_that_is_trimmed_from_earlier_turns(tmp_path: Path, tokenizer: Any, template: str) -> None:
    chat = [
        said("user", "1?"),
        said("assistant", "<think>\na\n</think>\n\nA"),
        said("user", "2?"),
        said("assistant", "B"),
    ]
    first, second = examples(tmp_path, tokenizer, {"messages": chat})
    assert first == [
        "<|user|>1?<end>\n<|assistant|><think>\na\n</think>\n\nA<end>\n",
        "<think>\na\n</think>\n\nA<end>\n",
    ]
    assert second == [
        "<|user|>1?<end>\n<|assistant|>A<end>\n<|user|>2?<end>\n<|assistant|><think>\n\n</think>\n\nB<end>\n",
        "<think>\n\n</think>\n\nB<end>\n",
    ]
    texts = read_segments([tmp_path / "a.jsonl"] * 2, CHAT, tokenizer)
    assert texts.records == [0, 0, 1, 1]
    texts = read_segments([tmp_path / "a.jsonl"], CHAT, tokenizer)
    assert "1 of 1 chats became several examples (2 in total)" in texts.notes[0]


@pytest.mark.parametrize("template", [R1])
def test_a_template_that_asks_to_think(tmp_path: Path, tokenizer: Any, template: str) -> None:
    """The thinking of an answer is trained on, although the template leaves it out of every answer."""
    chat = [
        said("user", "1?"),
        said("assistant", "<think>\na\n</think>A"),
        said("user", "2?"),
        said("assistant", "<B"),
    ]
    first, second = examples(tmp_path, tokenizer, {"messages": chat})
    assert first == ["<s><U>1?<A><think>\na\n</think>A</s>", "a\n</think>A</s>"]
    assert second == ["<s><U>1?<A>A</s><U>2?<A><B</s>", "<B</s>"]


@pytest.mark.parametrize("template", [EMPTY_THINKING])
def test_an_answer_that_begins_in_another_way_than_asked(
    tmp_path: Path, tokenizer: Any, template: str
) -> None:
    ((_, *trained),) = examples(tmp_path, tokenizer, {"messages": TWO})
    assert trained == ["</think>One.<end>\n", "</think>Two.<end>\n"]


@pytest.mark.parametrize(
    "template", [MARKED.replace("m.content + '<end>'", "m.content.split('</think>')[-1] + '<end>'")]
)
def test_marked_answers_without_their_thinking(tmp_path: Path, tokenizer: Any, template: str) -> None:
    line = refused(tmp_path, tokenizer, {"messages": [TWO[0], said("assistant", "<think>a</think>A")]})
    assert "marks no text as generated that holds the thinking" in line


@pytest.mark.parametrize("template", [CHATML, MARKED, QWEN3])
def test_a_message_of_weight_0_is_not_trained_on(tmp_path: Path, tokenizer: Any, template: str) -> None:
    for weights in ((0, 1), (1, 0), (1.0, None)):
        chat = [dict(message) for message in TWO]
        for message, weight in zip(chat[1::2], weights):
            message["weight"] = weight
        made_of = examples(tmp_path, tokenizer, {"messages": chat})
        trained = "".join(part for _, *parts in made_of for part in parts)
        assert ("One." in trained, "Two." in trained) == (weights[0] != 0, weights[1] != 0)
    for message in chat[1::2]:
        message["weight"] = 0
    assert 'has "weight": 0' in refused(tmp_path, tokenizer, {"messages": chat})


MARKED_CONTENT = MARKED.replace(
    "m.content + '<end>' }}{% endgeneration %}{{ '", "m.content }}{% endgeneration %}{{ '<end>"
)
# Like the template of GLM-4, in which the next message ends an answer.
ENDED_BY_NEXT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{% else %}{{ '<|next|>' + m.role + ':' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.mark.parametrize("template", [MARKED_CONTENT, MARKED_CONTENT.replace("<end>", "\\n<end>")])
def test_the_stop_token_after_the_marks_is_trained(tmp_path: Path, tokenizer: Any, template: str) -> None:
    ((whole, *trained),) = examples(tmp_path, tokenizer, {"messages": TWO})
    end = "\n<end>" if "\\n<end>" in template else "<end>"
    assert trained == [f"One.{end}", f"Two.{end}"] and whole.endswith(f"Two.{end}\n")


@pytest.mark.parametrize(
    ("template", "tail"),
    [
        (ENDED_BY_NEXT, ""),
        (PLAIN, "\n"),
        (CHATML.replace("<end>", "<stop>"), "<stop>\n"),  # <stop> is no token
        (MARKED_CONTENT.replace("<end>", ""), "\n"),
    ],
)
def test_a_stop_token_that_the_template_does_not_write_is_added(
    tmp_path: Path, tokenizer: Any, template: str, tail: str
) -> None:
    """Each answer is then an example of its own, since the template writes earlier answers without the token."""
    first, second = examples(tmp_path, tokenizer, {"messages": TWO})
    assert first[1:] == [f"One.{tail}</s>"] and second[1:] == [f"Two.{tail}</s>"]
    assert "One." in second[0] and "One.</s>" not in second[0] and first[0].endswith(first[1])
    before, after = read_segments([tmp_path / "a.jsonl"], CHAT, tokenizer).notes
    assert before.startswith(
        "the chat template writes no token at which generation stops after 2 answer(s): </s>"
    )
    assert "writes earlier answers without it: 1 of 1 chats became several examples" in after


@pytest.mark.parametrize("template", [ENDED_BY_NEXT])
def test_a_stop_token_ends_tool_calls(tmp_path: Path, tokenizer: Any, template: str) -> None:
    call, answer = examples(tmp_path, tokenizer, {"messages": CALLS})
    assert call[1:] == ['{"name": "add", "arguments": {"a": 1}}</s>'] and answer[1:] == ["It is 2.</s>"]
    tokenizer.eos_token = "<|next|>"  # the next message begins with the token that was added
    ((_, *trained),) = examples(tmp_path, tokenizer, {"messages": CALLS})
    assert trained == ['{"name": "add", "arguments": {"a": 1}}<|next|>', "It is 2.<|next|>"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, ["</s>"]),
        (CHATML, ["</s>", "<end>"]),
        (MARKED, ["</s>", "<end>"]),
        (ENDED_BY_NEXT, ["</s>", "<|next|>"]),
        (PLAIN, ["</s>"]),
        (R1, ["</s>"]),
        ("{{ raise_exception('no') }}", ["</s>"]),
    ],
)
def test_tokens_at_which_generation_stops(tokenizer: Any, template: str | None, expected: list[str]) -> None:
    assert stop_tokens(tokenizer) == expected


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLS = [
    said("user", "add"),
    said("assistant", None, tool_calls=[CALL]),
    said("tool", "2", name="add", tool_call_id="c1"),
    said("assistant", [{"type": "text", "text": "It is "}, {"type": "text", "text": "2."}], refusal=None),
]


@pytest.mark.parametrize("template", [CHATML])
def test_tools_and_their_calls_reach_the_template(tmp_path: Path, tokenizer: Any, template: str) -> None:
    ((whole, *trained),) = examples(tmp_path, tokenizer, {"messages": CALLS, "tools": [TOOL], "id": 5})
    assert whole.startswith(f"<tools>{json.dumps([TOOL])}</tools><|user|>add<end>")
    assert trained == ['<call>{"name": "add", "arguments": {"a": 1}}<end>\n', "It is 2.<end>\n"]


# Joins the arguments of calls as text, like the templates of DeepSeek-V3.
TEXT_ARGUMENTS = CHATML.replace("(call.function | tojson)", "call.function.arguments")


@pytest.mark.parametrize("template", [TEXT_ARGUMENTS])
def test_arguments_as_the_template_takes_them(tmp_path: Path, tokenizer: Any, template: str) -> None:
    ((_, *trained),) = examples(tmp_path, tokenizer, {"messages": CALLS})
    assert trained[0] == '<call>{"a": 1}<end>\n'


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("{% if m.content %}", "{% if m.content is not none %}").replace("{{ m.content }}", "{{ m.content + '' }}"),
        CHATML.replace("{% if m.content %}{{ m.content }}{% endif %}", "{{ m.content if m.content is string else m.content | tojson }}"),
    ],
)  # fmt: skip
def test_no_content_as_the_template_takes_it(tmp_path: Path, tokenizer: Any, template: str) -> None:
    ((_, *trained),) = examples(tmp_path, tokenizer, {"messages": CALLS})
    assert trained[0] == '<call>{"name": "add", "arguments": {"a": 1}}<end>\n'


@pytest.mark.parametrize("template", [None, QWEN3])
def test_what_the_template_leaves_out_is_named(tmp_path: Path, tokenizer: Any, template: str | None) -> None:
    line = refused(tmp_path, tokenizer, {"messages": TWO, "tools": [TOOL]})
    assert 'does not write "tools"' in line
    line = refused(
        tmp_path, tokenizer, {"messages": [TWO[0], said("assistant", "One.", reasoning_content="so")]}
    )
    assert "leaves out 'reasoning_content' of a message of the role 'assistant'" in line
    line = refused(tmp_path, tokenizer, {"messages": [said("user", "one?", name="Ann"), TWO[1]]})
    assert "leaves out 'name' of a message of the role 'user'" in line
    line = refused(tmp_path, tokenizer, {"messages": [TWO[0], said("assistant", "x", tool_calls=[CALL])]})
    assert "leaves out 'tool_calls'" in line


@pytest.mark.parametrize("template", [R1])
def test_a_message_that_the_template_leaves_out(tmp_path: Path, tokenizer: Any, template: str) -> None:
    line = refused(tmp_path, tokenizer, {"messages": [said("system", "be kind"), *TWO]})
    assert "leaves out 'content' of a message of the role 'system'" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": True}, "the field 'label' of a chat record is not understood"),
        ({"prompt": "a"}, "the field 'prompt' of a chat record is not understood"),
        ({"tools": "add"}, '"tools": expected a list of objects, got a string'),
        ({"messages": [said("user", "a"), said("assistant", "b", train=False)]}, "the field 'train' of a message"),
        ({"messages": [said("user", "a"), said("assistant", "b", weight=0.5)]}, "expected 0 (not trained on) or 1"),
        ({"messages": [said("user", "a", weight=1), said("assistant", "b")]}, "only messages of the assistant"),
        ({"messages": [said("user", "a"), said("assistant")]}, '"content" is null'),
        ({"messages": [said("user", [{"type": "image_url"}]), said("assistant", "b")]}, "got 'image_url'"),
        ({"messages": [said("user", "a", tool_calls=[CALL]), said("assistant", "b")]}, "a message of the assistant"),
        ({"messages": [said("user", "a"), said("assistant", None, tool_calls=["x"])]}, "expected a list of objects"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_understood_is_named(
    tmp_path: Path, tokenizer: Any, change: dict[str, Any], message: str
) -> None:
    assert message in refused(tmp_path, tokenizer, {"messages": TWO, **change})


def test_a_field_of_a_completion_is_named(tmp_path: Path, tokenizer: Any) -> None:
    record = {"prompt": "a", "completion": "b", "weight": 0}
    assert "the field 'weight' of a prompt/completion record" in refused(
        tmp_path, tokenizer, record, COMPLETION
    )


@pytest.mark.parametrize("template", [{"default": CHATML, "tool_use": MARKED}])
def test_named_templates(tokenizer: Any, template: dict[str, str]) -> None:
    assert render(tokenizer, TWO[:1], None, "--chat", ask=True).text == "<|user|>one?<end>\n<|assistant|>"


def test_a_field_of_a_text_is_named(tmp_path: Path) -> None:
    """Fields that describe a record are allowed, and a field without a value is none."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "meta": {"n": 1}, "id": 5, "label": None}])
    assert check_text([file]) == 1
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b", "label": 1}])
    with pytest.raises(InputError, match="line 2: the field 'label' of a text record is not understood"):
        check_text([file])
