"""Test that texts are tokenised as wholes, with the special tokens of the tokenizer's own call, for each kind of tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli_helpers import write_jsonl
from shoestring.cli import generate
from shoestring.cli.config import GenerateConfig
from shoestring.core.errors import InputError
from shoestring.data import encoding, lines
from shoestring.data.encoding import Encoder, vocabulary_size
from shoestring.data.examples import Texts, encode_examples
from shoestring.data.records import COMPLETION
from shoestring.data.token_file import read_token_file, write_token_file
from shoestring.data.tokenizer import load_tokenizer
from tokenizer_kinds import KINDS, LETTERS, made

SLOW = "ByT5"


def drawn(draw: random.Random, length: int) -> str:
    return "".join(draw.choice(LETTERS) for _ in range(length))


def own(tokenizer: Any, text: str) -> list[int]:
    """The tokens of the tokenizer's own call, with the end-of-text token once."""
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_is_tokenised_as_a_whole(kind: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(encoding, "OVERLAP", 256)
    tokenizer, draw = made(kind), random.Random(seed)
    encoder, windows = Encoder(tokenizer), 0
    for runs in ([], ["a" * 700], [" " * 600], ["123456789" * 90], ["\n" * 300, "é" * 400]):
        text = drawn(draw, 1500) + "".join(runs) + drawn(draw, 900)
        cuts = sorted(draw.sample(range(1, len(text)), 6))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        parts = list(encoder.document(iter(pieces)))
        windows += len(parts) - 2
        assert [id for part in parts for id in part] == own(tokenizer, text)
    assert kind == SLOW or windows > 5, "every document was tokenised in one window"


@pytest.mark.parametrize("kind", ["GPT-2", "Llama-3", "Llama-2", "BERT"])
def test_windows_that_disagree_become_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of digits is cut into groups of three from its beginning, wherever a window begins."""
    monkeypatch.setattr(encoding, "OVERLAP", 264)  # compared are 44 groups of three
    tokenizer = made(kind)
    text = "numbers: " + "1234567890" * 120 + " and an end" * 60
    for cut in range(700, 706):
        pieces = iter([text[:cut], text[cut:900], text[900:]])
        assert [id for part in Encoder(tokenizer).document(pieces) for id in part] == own(tokenizer, text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_is_marked_in_the_whole_text(kind: str, seed: int) -> None:
    """The tokens are those of the whole text; trained are those that cover a character of the completion."""
    tokenizer, draw = made(kind), random.Random(seed)
    pairs = [
        ("2+2=", "4"),
        ("the cat", " sat"),
        ("Answer: ", "yes"),
        ("", "far"),
        ("x=", "漢字"),
        ("a", "  b"),
    ]
    pairs += [(drawn(draw, draw.randint(0, 30)), drawn(draw, draw.randint(1, 20))) for _ in range(40)]
    for prompt, completion in pairs:
        texts = Texts(COMPLETION, [[(prompt, False), (completion, True)]], [0])
        examples = encode_examples(texts, tokenizer, 400).examples
        whole = own(tokenizer, prompt + completion)
        assert examples.tokens.tolist() == whole, (prompt, completion)
        trained = examples.trained.tolist()
        first = trained.index(True)
        assert trained == [False] * first + [True] * (len(whole) - first)
        # The tokens before the first trained token are exactly those that cover characters of the prompt alone.
        alone = [*Encoder(tokenizer).begin, *Encoder(tokenizer).ids([prompt])[0]]
        covered = decoded(tokenizer, whole[:first])
        assert covered in decoded(tokenizer, alone) or "�" in covered, (prompt, completion)
        # An unknown token may cover characters of both.
        if tokenizer.unk_token_id not in whole and whole[: len(alone)] == alone:
            assert first >= len(alone), (prompt, completion)


def decoded(tokenizer: Any, ids: list[int]) -> str:
    return "".join(tokenizer.decode(ids, skip_special_tokens=True).split())


@pytest.mark.parametrize("kind", ["Llama-2", "Llama-2 legacy", "Llama-2 file", "Mistral with end"])
def test_a_completion_has_no_space_before_it(kind: str) -> None:
    tokenizer = made(kind)
    examples = encode_examples(
        Texts(COMPLETION, [[("2+2=", False), ("4", True)]], [0]), tokenizer, 32
    ).examples
    names = tokenizer.convert_ids_to_tokens(examples.tokens)
    assert names == ["<s>", "▁2", "+", "2", "=", "4", "</s>"]
    assert [n for n, mark in zip(names, examples.trained) if mark] == ["4", "</s>"]


def test_what_was_done_to_examples_is_said() -> None:
    tokenizer = made("GPT-2")
    pairs = [("the ", "cat"), ("the", " cat"), ("the " * 40, "cat")]
    texts = Texts(COMPLETION, [[(a, False), (b, True)] for a, b in pairs], [0, 1, 2], ["a note"])
    encoded = encode_examples(texts, tokenizer, 16)
    assert encoded.notes == [
        "a note",
        "2 example(s) have a token that covers the end of a prompt and the beginning of its completion; it is trained on",
        "1 example(s) were cut to --seq-len 16; 1 of them left out: no completion left",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_stand_once(kind: str) -> None:
    """A text that has the special tokens itself gets no others."""
    tokenizer = made(kind)
    encoder = Encoder(tokenizer)
    ids = encoder.finished(encoder.begun(encoder.ids(["the cat"])[0]))
    assert encoder.finished(encoder.begun(ids)) == ids == own(tokenizer, "the cat")
    assert ids.count(tokenizer.eos_token_id) == 1
    assert encoder.begin == ([] if kind in NO_BEGIN else [tokenizer.bos_token_id])
    assert encoder.ids([]) == [] and encoder.document(iter([])) is not None
    assert next(encoder.document(iter([]))) == own(tokenizer, "")


NO_BEGIN = ("GPT-2", "Qwen", "T5", "Unigram", "ByT5")


def test_offsets_keep_their_spaces_and_the_post_processor() -> None:
    tokenizer = made("GPT-2")
    before = tokenizer.backend_tokenizer.to_str()
    (tokens,) = Encoder(tokenizer).tokens(["the  cat "])
    assert (
        tokens.begins[0] == 0 and np.array_equal(tokens.begins[1:], tokens.ends[:-1]) and tokens.ends[-1] == 9
    )
    assert tokenizer.backend_tokenizer.to_str() == before


def test_files_of_a_tokenizer_that_lead_elsewhere(tmp_path: Path) -> None:
    """Names of templates cannot become paths, and no tokenizer is read from outside of the folder."""
    folder = tmp_path / "tokenizer"
    made("Llama-3").save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    load_tokenizer(folder)

    def refused(message: str, **changed: object) -> None:
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **changed}))
        with pytest.raises(InputError, match=message):
            load_tokenizer(folder)

    for name in ("../../evil", "/evil", "a/b"):
        templates = [{"name": name, "template": "x"}, {"name": "default", "template": "y"}]
        refused("expected no folder in it", chat_template=templates)
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    refused("cannot be loaded", tokenizer_file=str(tmp_path / "tokenizer.json"))


def test_a_vocabulary_with_gaps(tmp_path: Path) -> None:
    """The size of a vocabulary is above every id, which C++ programs and the embedding check."""
    made("Llama-3").save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 5000, "content": "<far>"})
    content["model"]["vocab"]["<far>"] = 5000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert vocabulary_size(tokenizer) == 5001 > len(tokenizer)


def test_a_tokenizer_that_cuts_at_random_is_refused(tmp_path: Path) -> None:
    made("Llama-3").save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.1
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="at random"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["Llama-3", "Llama-2", "T5", "Mistral with end"])
def test_a_token_file_has_the_special_tokens_of_each_document(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short documents, and one that is read in many pieces."""
    monkeypatch.setattr(encoding, "OVERLAP", 256)
    monkeypatch.setattr(lines, "CHUNK", 500)
    tokenizer = made(kind)
    texts = ["the cat", " sat on\n", "\n".join(f"line {i} of a long text" for i in range(100))]
    records = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    (tmp_path / "b.txt").write_text(texts[2])
    write_token_file(tmp_path / "t.bin", [records, tmp_path / "b.txt"], tokenizer)
    tokens, vocabulary = read_token_file(tmp_path / "t.bin")
    expected = [id for text in [*texts, texts[2]] for id in own(tokenizer, text)]
    assert tokens.tolist() == expected and vocabulary == len(tokenizer)


@pytest.mark.parametrize("kind", KINDS)
def test_generate_begins_as_an_example_does(kind: str) -> None:
    tokenizer = made(kind)
    for prompt in ("the cat", "2+2=", ""):
        ids = generate._prompt(GenerateConfig(prompt=prompt, model="m"), tokenizer)
        assert own(tokenizer, prompt)[: len(ids)] == ids and tokenizer.eos_token_id not in ids[1:]
        more = [
            *ids,
            *Encoder(tokenizer).ids([prompt + " sat"])[0][len(ids) - len(Encoder(tokenizer).begin) :],
        ]
        if prompt == "the cat" and kind != "BERT":
            assert generate._continuation(tokenizer, ids, more) == " sat"
    chat = generate._prompt(GenerateConfig(prompt="the cat", model="m", chat=True), tokenizer)
    assert chat == Encoder(tokenizer).begun(Encoder(tokenizer).ids(["user:\nthe cat\nassistant:\n"])[0])
