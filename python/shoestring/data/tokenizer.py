"""Train, save and load byte-level BPE tokenizers as Hugging Face tokenizer directories."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoestring.core.errors import InputError
from shoestring.core.remote_code import why_not_loaded
from shoestring.data.progress import working
from shoestring.data.text import documents, size_of
from shoestring.files.read_file import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # tokens: one for each of the 256 bytes, and the end-of-text token
LONGEST_WORD = 1024  # maximum word length in training, in bytes; training time grows with its square


def train_bpe(files: list[Path], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the text of ``files``.

    Byte-pair encoding is from Sennrich et al., 2016; its application to bytes is from GPT-2. The vocabulary
    has ``vocab_size`` tokens, or fewer if the text yields fewer merges. A word is a run of characters of one
    kind: letters, digits, spaces or signs. Training splits words of more than ``LONGEST_WORD`` bytes; the
    returned tokenizer does not split them.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise InputError(
            f"--vocab-size: expected at least {SMALLEST_VOCABULARY} (256 bytes and end of text), got {vocab_size}"
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(LONGEST_WORD)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with working("training the tokenizer", size_of(files)):
        tokenizer.train_from_iterator(_pieces(files), trainer=trainer)
    tokenizer.pre_tokenizer = words
    return wrap(tokenizer)


def _pieces(files: list[Path]) -> Iterator[str]:
    for path in files:
        for document in documents(path):
            yield from document


def wrap(tokenizer: Any) -> PreTrainedTokenizerFast:
    """Wrap a tokenizer of the ``tokenizers`` package in a tokenizer class of transformers."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def quiet_transformers() -> None:
    """Silence the progress bars and messages of transformers, since the command line prints its own."""
    import warnings

    from transformers.utils import logging

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.|peft\.")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a local directory; code in the directory runs only with ``trust_remote_code``.

    Raises:
        InputError: the directory has no tokenizer, or the tokenizer is damaged or needs code that is not
            trusted.
    """
    known = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "vocab.txt")
    if not any((folder / name).is_file() for name in known):
        raise InputError(f"{folder}: no tokenizer there (expected tokenizer.json or the files of its model)")
    from transformers import AutoTokenizer

    quiet_transformers()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # tokenizer classes may raise any exception
        raise InputError(f"{folder}: the tokenizer cannot be loaded ({why_not_loaded(error)})") from None
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"{folder}: the tokenizer names no end-of-text token; set eos_token in tokenizer_config.json"
        )
    dropout = getattr(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None), "dropout", None)
    if dropout:
        raise InputError(
            f"{folder}: the tokenizer leaves out merges at random, so no run could be repeated; set dropout to null in "
            "tokenizer.json"
        )
    if isinstance(tokenizer.chat_template, dict):
        for name in tokenizer.chat_template:
            if Path(name).name != name:  # the name would become that of a file when the tokenizer is saved
                raise InputError(
                    f"{folder}: a chat template has the name {shown(name)}; expected no folder in it"
                )
    return tokenizer
