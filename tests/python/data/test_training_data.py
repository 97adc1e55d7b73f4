"""Test reading text and examples, training tokenizers, and building batches."""

from __future__ import annotations

import itertools
import json
import random
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from cli_helpers import text, write_jsonl
from shoestring.core.errors import InputError
from shoestring.data import lines as text_module
from shoestring.data import progress
from shoestring.data.batches import IGNORE, BatchOrder, Blocks, Examples, split_blocks, split_examples
from shoestring.data.examples import encode_examples, read_segments
from shoestring.data.lines import read_text
from shoestring.data.records import CHAT, COMPLETION, kind_of
from shoestring.data.text import documents, find_files
from shoestring.data.token_file import read_token_file, write_token_file
from shoestring.data.tokenizer import train_bpe


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("tokenizer") / "a.txt"
    file.write_text(text())
    return train_bpe([file], 300)


def test_text_in_pieces_is_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Reading chunks of 7 bytes splits some UTF-8 characters of two to four bytes.
    monkeypatch.setattr(text_module, "CHUNK", 7)
    whole = "añ\n漢字 and 😀😀😀\n\nno end of line: ü"
    (tmp_path / "a.txt").write_text(whole, encoding="utf-8")
    assert "".join(read_text(tmp_path / "a.txt")) == whole


@pytest.mark.parametrize("before", [0, 1, 6, 7, 8, 20])
@pytest.mark.parametrize("bad", [b"\xff", b"\xc3(", b"\xe6\xbc"])
def test_bad_byte_is_named_by_its_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, bad: bytes
) -> None:
    monkeypatch.setattr(text_module, "CHUNK", 7)
    (tmp_path / "a.txt").write_bytes(b"x" * before + bad)
    with pytest.raises(InputError, match=rf"a\.txt: not UTF-8 at byte {before} "):
        list(read_text(tmp_path / "a.txt"))


def test_jsonl_line_numbers_survive_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "CHUNK", 7)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n{"text": \n')
    found = []
    with pytest.raises(InputError, match="line 4 is not valid JSON"):
        for document in documents(tmp_path / "a.jsonl"):
            found.append("".join(document))
    assert found == ["one", "two"]


def test_directory_is_searched_by_pattern(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "c.txt", ".hidden/d.py", "in/e.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "empty.py").touch()
    assert [p.name for p in find_files([tmp_path], "*.py")] == ["a.py", "b.py", "e.py"]


def test_token_file_holds_the_text(tmp_path: Path, tokenizer) -> None:
    files = []
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name + text(3))
        files.append(tmp_path / name)
    count = write_token_file(tmp_path / "t.bin", files, tokenizer)
    raw = (tmp_path / "t.bin").read_bytes()
    assert raw[:64] == struct.pack("<8sIIQ", b"shoetok\x01", len(tokenizer), 2, count) + bytes(40)
    tokens, vocab = read_token_file(tmp_path / "t.bin")
    assert vocab == len(tokenizer) == 300 and len(tokens) == count == (len(raw) - 64) // 2
    first, second, rest = tokenizer.decode(tokens).split(tokenizer.eos_token)
    assert (first, second, rest) == (files[0].read_text(), files[1].read_text(), "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: b"not a token file", "not a token file"),
        (lambda raw: raw[:-1], "header says"),
        (lambda raw: raw[:12] + b"\x03" + raw[13:], "header says"),
        (lambda raw: raw[:16] + b"\xff" * 8 + raw[24:], "header says"),
        (lambda raw: raw[:16] + bytes(8) + raw[24:64], "no token"),
    ],
)
def test_damaged_token_file_is_refused(tmp_path: Path, tokenizer, change, message: str) -> None:
    (tmp_path / "a.txt").write_text("a text")
    write_token_file(tmp_path / "t.bin", [tmp_path / "a.txt"], tokenizer)
    (tmp_path / "t.bin").write_bytes(change((tmp_path / "t.bin").read_bytes()))
    with pytest.raises(InputError, match=message):
        read_token_file(tmp_path / "t.bin")


def test_blocks_cover_the_tokens_once() -> None:
    train, val = split_blocks(np.arange(103, dtype=np.uint16), 10, 0.1)
    # split_blocks holds out 11 of the 103 tokens for validation. The other 92 tokens hold nine blocks of 10
    # tokens and a last label.
    assert (len(train), len(val)) == (9, 1)
    inputs, labels = train.rows([0, 8])
    assert inputs.tolist() == [list(range(10)), list(range(80, 90))]
    assert torch.equal(labels, inputs + 1) and inputs.dtype == torch.int64
    with pytest.raises(InputError, match="12 tokens are too few"):
        split_blocks(np.arange(12, dtype=np.uint16), 10, 0.1)


def test_order_is_a_pure_function_of_seed_and_step() -> None:
    order = BatchOrder(rows=10, batch_size=2, accumulate=2, seed=3)
    steps = [order.step(i) for i in range(5)]
    drawn = [row for step in steps for batch in step for row in batch]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10)) and drawn[:10] != drawn[10:]
    assert BatchOrder(10, 2, 2, 3).step(3) == steps[3] and order.step(0) == steps[0]
    assert BatchOrder(10, 2, 2, 4).step(3) != steps[3]


def test_examples_are_padded_and_split() -> None:
    examples = Examples(
        np.arange(1, 8, dtype=np.uint32),
        np.array([0, 1, 1, 0, 0, 0, 1], bool),
        np.array([0, 3, 7]),
        np.arange(2),
        pad=0,
    )
    inputs, labels = examples.rows([0, 1])
    assert inputs.tolist() == [[1, 2, 0], [4, 5, 6]]
    assert labels.tolist() == [[2, 3, IGNORE], [IGNORE, IGNORE, 7]]
    assert examples.count([0, 1]) == 5
    train, val = split_examples(examples, seed=0, val_fraction=0.1)
    assert (len(train), len(val)) == (1, 1)
    train, val = split_examples(examples, seed=0, val_fraction=0)
    assert train.tokens.tolist() == examples.tokens.tolist() and len(val) == 0


def test_examples_of_one_record_stay_together() -> None:
    """A chat whose template rewrites earlier turns becomes several examples, each with the turns before."""
    sizes = [3, 1, 2, 4, 1, 3, 2, 1, 3]
    records = np.repeat([*range(8), 9], sizes)  # no example of record 8 was kept
    count = len(records)
    examples = Examples(records.astype(np.uint32), np.ones(count, bool), np.arange(count + 1), records, pad=0)
    for seed in range(8):
        train, val = split_examples(examples, seed, val_fraction=0.4)
        assert len(np.unique(val.records)) == 3 and not set(train.records) & set(val.records)
        assert train.tokens.tolist() == train.records.tolist() and val.tokens.tolist() == val.records.tolist()
        assert len(train) + len(val) == count
    with pytest.raises(InputError, match=r"1 record\(s\) are too few to train on and to hold out 1"):
        split_examples(examples.subset([0, 1, 2]), 0, val_fraction=0.1)


def trained_text(tokenizer, examples: Examples, row: int) -> str:
    _, labels = examples.rows([row])
    return tokenizer.decode(labels[labels != IGNORE])


def test_loss_is_on_the_completion_only(tmp_path: Path, tokenizer) -> None:
    file = write_jsonl(
        tmp_path / "a.jsonl",
        [{"prompt": "the cat", "completion": " sat on"}, {"prompt": "", "completion": "far"}],
    )
    assert kind_of([file]) == COMPLETION
    encoded = encode_examples(read_segments([file], COMPLETION, tokenizer), tokenizer, 32)
    assert trained_text(tokenizer, encoded.examples, 0) == " sat on" + tokenizer.eos_token
    inputs, _ = encoded.examples.rows([0])
    assert tokenizer.decode(inputs[0]) == "the cat sat on"


def test_chat_trains_on_every_answer(tmp_path: Path, tokenizer) -> None:
    roles = ["system", "user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}])
    assert kind_of([file]) == CHAT
    encoded = encode_examples(read_segments([file], CHAT, tokenizer), tokenizer, 200)
    end = tokenizer.eos_token
    assert trained_text(tokenizer, encoded.examples, 0) == f"assistant 2{end}\nassistant 4{end}\n"
    whole = "".join(tokenizer.decode(encoded.examples.tokens))
    assert whole.startswith("system:\nsystem 0\nuser:\nuser 1\nassistant:\nassistant 2")


def test_long_examples_are_cut_and_counted(tmp_path: Path, tokenizer) -> None:
    file = write_jsonl(
        tmp_path / "a.jsonl",
        [
            {"prompt": "x" * 50, "completion": "lost"},
            {"prompt": "x", "completion": "y" * 50},
            {"prompt": "x", "completion": "y"},
        ],
    )
    encoded = encode_examples(read_segments([file], COMPLETION, tokenizer), tokenizer, 16)
    assert (len(encoded.examples), encoded.shortened, encoded.dropped) == (2, 2, 1)
    assert encoded.examples.rows([0])[0].shape == (1, 16)


def test_template_that_rewrites_the_past_is_refused(tmp_path: Path, tokenizer) -> None:
    file = write_jsonl(
        tmp_path / "a.jsonl",
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
    )
    template, tokenizer.chat_template = (
        tokenizer.chat_template,
        "{{ messages | length }} {{ messages[-1]['content'] }}",
    )
    try:
        with pytest.raises(InputError, match="rewrites earlier turns"):
            read_segments([file], CHAT, tokenizer)
    finally:
        tokenizer.chat_template = template


def test_blocks_protocol_is_cheap() -> None:
    # This array has 2^40 tokens that all share the same two bytes of memory. So the test only passes if no
    # code copies all tokens.
    tokens = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint16), (1 << 40,), (0,))
    assert Blocks(tokens, 512).rows([1 << 30])[0].shape == (1, 512)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_byte_order_mark_is_left_out(tmp_path: Path, name: str) -> None:
    content = "line\n" if name == "a.txt" else '{"text": "line\\n"}\n'
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert ["".join(document) for document in documents(tmp_path / name)] == ["line\n"]


def test_long_lines_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """read_text cuts long texts, without loss, into pieces of limited length.

    It cuts at line ends or spaces if possible.
    """
    monkeypatch.setattr(text_module, "LONGEST", 1000)
    monkeypatch.setattr(text_module, "CHUNK", 300)
    draw = random.Random(seed)
    for ends, longest in (("\n ", 1000), (" ", 1000), ("", 1300)):
        content = "".join(draw.choice("ab" * 40 + ends) for _ in range(20_000))
        (tmp_path / "a.txt").write_text(content)
        for pieces in (list(read_text(tmp_path / "a.txt")), list(text_module.cut_long(content))):
            assert "".join(pieces) == content and max(map(len, pieces)) <= longest
            if ends:
                pairs = itertools.pairwise(pieces)
                assert all(piece.endswith("\n") or after.startswith(" ") for piece, after in pairs)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a" * 5000}) + "\n")
    assert "".join(next(documents(tmp_path / "a.jsonl"))) == "a" * 5000


def test_training_a_tokenizer_takes_linear_time(tmp_path: Path) -> None:
    """Training a tokenizer on one word of 1 MB takes linear time; quadratic time would take ten minutes."""
    (tmp_path / "a.txt").write_text("a" * 1_000_000 + " the cat sat on the mat" * 50)
    began = time.monotonic()
    trained = train_bpe([tmp_path / "a.txt"], 300)
    tokens = write_token_file(tmp_path / "a.bin", [tmp_path / "a.txt"], trained)
    assert time.monotonic() - began < 60
    assert trained.decode(read_token_file(tmp_path / "a.bin")[0][:tokens]).startswith(
        "a" * 1_000_000 + " the cat"
    )


def test_words_of_ordinary_length_are_whole_in_training(tmp_path: Path, seed: int) -> None:
    """Tokenizer training cuts only words of unusual length, and the saved tokenizer does not cut words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    draw = random.Random(seed)
    content = " ".join(
        "".join(draw.choice("abcdeé漢\n") for _ in range(draw.randint(1, 300))) for _ in range(500)
    )
    (tmp_path / "a.txt").write_text(content)
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    plain.train_from_iterator([content], trainer=trainer)
    trained = train_bpe([tmp_path / "a.txt"], 400)
    assert json.loads(trained.backend_tokenizer.to_str())["model"] == json.loads(plain.to_str())["model"]
    assert json.loads(trained.backend_tokenizer.to_str())["pre_tokenizer"]["type"] == "ByteLevel"


def test_long_work_tells_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIRST", 0.05)
    with progress.working("reading", 200):
        progress.advance(50)
        time.sleep(0.3)
        progress.advance(150)
        time.sleep(0.6)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "reading: 25 %, 0:00" and lines[-1] == "reading: 0:00" and 3 <= len(lines) <= 6
    monkeypatch.setattr(progress, "FIRST", 60)
    began = time.monotonic()
    with progress.working("short"):
        progress.advance(1)
    assert capsys.readouterr().out == "" and time.monotonic() - began < 30
