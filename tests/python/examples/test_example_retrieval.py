"""Test finetune_retrieval.py: the text that it reads from source files, and a run with a tiny encoder."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

SOURCE = '''
class A:
    def area(self, width, height):
        """The area of a   rectangle, given
        its sides.

        More that is not read.
        """
        return width * height

def short():
    """Two words."""
    return 1

async def alone():
    """Nothing follows these five words or more."""
'''


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples/python"))


@functools.cache
def library() -> tuple[list[Any], list[Any]]:
    """Return the pairs of Python's standard library, whose files are read once for all tests."""
    from finetune_retrieval import standard_library

    return standard_library()


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path / "encoder"
    words = "the of a to is return def self if in for not none and value name".split()
    letters = [
        mark + letter for letter in "abcdefghijklmnopqrstuvwxyz0123456789_.,()[]:=" for mark in ("", "##")
    ]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *letters]
    BertTokenizerFast(vocab={word: i for i, word in enumerate(vocabulary)}).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


def test_pairs_are_docstrings_and_the_code_without_them(tmp_path: Path) -> None:
    from finetune_retrieval import pairs_of

    (tmp_path / "source.py").write_text(SOURCE)
    (pair,) = pairs_of(tmp_path / "source.py")
    assert pair.doc == "The area of a rectangle, given its sides."
    assert pair.code == "def area(self, width, height):\n    return width * height"
    (tmp_path / "old.py").write_text("print 'of Python 2'")
    assert pairs_of(tmp_path / "old.py") == []


def test_modules_are_held_out() -> None:
    pairs, held_out = library()
    assert len(pairs) > 2 * len(held_out) > 500
    assert not {pair.doc for pair in pairs} & {pair.doc for pair in held_out}


def test_it_learns_to_tell_functions_apart(encoder: Path) -> None:
    from finetune_retrieval import Encoder, recall, train

    import shoestring

    pairs = library()[0][:24]
    net = Encoder(encoder)
    before = recall(net, pairs)
    shoestring.lora.apply(net.model, rank=8, alpha=64, quantize="nf4")
    train(net, pairs, steps=60, batch_size=24, seed=0)
    assert recall(net, pairs)["recall@1"] > before["recall@1"] + 0.1


def test_it_runs(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune_retrieval import main

    pairs = library()
    monkeypatch.setattr("finetune_retrieval.standard_library", lambda: pairs)

    report = tmp_path / "report.json"
    results = main(["--quick", "--threads", "1", "--model", str(encoder), "--json", str(report)])
    assert json.loads(report.read_text()) == results and list(results) == ["before", "LoRA", "QLoRA, NF4"]
    assert all(0 <= found["recall@1"] <= found["recall@10"] <= 1 for found in results.values())
