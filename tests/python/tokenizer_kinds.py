"""Tokenizers of the kinds that models have, trained on a few lines: byte-level BPE, SentencePiece, WordPiece, Unigram."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "the cat sat on a mat while two dogs ran over hills and far away to see rivers",
    "2+2=4, 10 + 20 = 30; x=1\n\n  indented   text\tand tabs\r\nnew lines",
    "Überall sind Bäume. 漢字 and かな 😀 emoji, naïve café",
    "123 456 789 012 345 678 901 234 567 890",
] * 20
# A text with what cuts go wrong at: runs of spaces and lines, digits, accents, characters of several tokens.
LETTERS = (
    list("abcdehinorst") * 4
    + list("    \n\n\t0123456789+=.,;'")
    + list("éüÄ漢字😀")
    + ["  ", "\n ", " \n", "the cat", "'s", "e\u0301"]
)
PATTERN = (
    r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _template(single: str, tokenizer: Tokenizer) -> processors.TemplateProcessing:
    names = [part for part in single.split() if part != "$A"]
    return processors.TemplateProcessing(
        single=single, pair=f"{single} {single.replace('$A', '$B')}", special_tokens=[(n, tokenizer.token_to_id(n)) for n in names]
    )  # fmt: skip


def _wrapped(tokenizer: Tokenizer, **names: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{"bos_token": "<s>", "eos_token": "</s>", **names}
    )


def _byte_level(pre: Any, post: Callable[[Tokenizer], Any], normalizer: Any = None) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, pre, decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = post(tokenizer)
    return _wrapped(tokenizer)


def _sentencepiece_bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return vocabulary and merges as a converted SentencePiece model has them, with bytes as fallback."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=special, show_progress=False, limit_alphabet=40
    )
    tokenizer.train_from_iterator([" ".join(CORPUS[0].split()), "2 + 2 = 4 , 1 0"] * 20, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    return model["vocab"], merges


def _llama(**options: Any) -> Any:
    from transformers import LlamaTokenizer

    vocab, merges = _sentencepiece_bpe()
    return LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True, **options)


def _sentencepiece_file(normalizer: Any, pre: Any, single: str) -> Any:
    """A SentencePiece model as in the tokenizer.json of Llama-2 or Gemma, which normalise spaces."""
    vocab, merges = _sentencepiece_bpe()
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.normalizer = normalizer
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = _template(single, tokenizer)
    return _wrapped(tokenizer, unk_token="<unk>")


def _unigram(scheme: str, single: str) -> Any:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = _template(single, tokenizer)
    return _wrapped(tokenizer, unk_token="<unk>")


def _wordpiece() -> Any:
    from transformers import BertTokenizer

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    return BertTokenizer(vocab=tokenizer.get_vocab(), bos_token="[CLS]", eos_token="[SEP]")


def _bytes() -> Any:
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


_DEFAULT = pre_tokenizers.ByteLevel(add_prefix_space=False)
_SPLIT = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
)  # fmt: skip
_DUMMY_PREFIX = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])

KINDS: dict[str, Callable[[], Any]] = {
    "GPT-2": lambda: _byte_level(_DEFAULT, lambda _: processors.ByteLevel(trim_offsets=True)),
    "RoBERTa": lambda: _byte_level(
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        lambda t: processors.RobertaProcessing(
            ("</s>", t.token_to_id("</s>")), ("<s>", t.token_to_id("<s>"))
        ),
    ),
    "Llama-3": lambda: _byte_level(
        _SPLIT,
        lambda t: processors.Sequence([processors.ByteLevel(trim_offsets=True), _template("<s> $A", t)]),
    ),
    "Qwen": lambda: _byte_level(
        _SPLIT, lambda _: processors.ByteLevel(trim_offsets=False), normalizers.NFC()
    ),
    "Llama-2": lambda: _llama(legacy=False),
    "Llama-2 legacy": lambda: _llama(legacy=True),
    "Llama-2 without prefix": lambda: _llama(legacy=False, add_prefix_space=False),
    "Llama-2 file": lambda: _sentencepiece_file(_DUMMY_PREFIX, None, "<s> $A"),
    "Mistral with end": lambda: _sentencepiece_file(_DUMMY_PREFIX, None, "<s> $A </s>"),
    "Gemma": lambda: _sentencepiece_file(
        normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"), "<s> $A"
    ),
    "T5": lambda: _unigram("always", "$A </s>"),
    "Unigram": lambda: _unigram("first", "$A"),
    "BERT": _wordpiece,
    "ByT5": _bytes,
}


@cache
def made(kind: str) -> Any:
    """Return the tokenizer of a kind, which is trained once."""
    return KINDS[kind]()
