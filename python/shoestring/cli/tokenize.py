"""`shoestring tokenize`: write text as a flat token file."""

from __future__ import annotations

import glob
from pathlib import Path

from shoestring.cli.config import Source
from shoestring.cli.console import say
from shoestring.core.errors import InputError
from shoestring.data.text import check_text, find_files
from shoestring.data.token_file import write_token_file
from shoestring.data.tokenizer import load_tokenizer, train_bpe
from shoestring.files.atomic import PARTIAL, atomic_directory
from shoestring.files.lock import LOCK, locked


def tokenize(
    source: Source,
    out: Path,
    tokenizer_folder: Path | None,
    vocab_size: int | None,
    trust_remote_code: bool = False,
) -> int:
    """Write the token file ``out``; return the number of tokens.

    With ``vocab_size``, a tokenizer is trained on the data and saved next to ``out``, in the folder
    ``out``-tokenizer. The folder of ``out`` is made. After a failure, none of these exists.
    """
    if (tokenizer_folder is None) == (vocab_size is None):
        raise InputError(
            "give either --tokenizer DIR, to use one, or --vocab-size N, to train one on the data"
        )
    if not out.name:
        raise InputError(f"--out {out}: expected the name of a file")
    with locked(out.with_name(f".{out.name}{LOCK}"), f"--out {out}"):
        trained = out.with_name(out.stem + "-tokenizer")
        for path in (out, *([trained] if vocab_size else [])):
            if path.exists():
                raise InputError(f"--out {out}: {path} exists; give another name or remove it")
        # remove partial files that a killed process has left
        for leftover in out.parent.glob(f"{glob.escape(out.name)}.*{PARTIAL}"):
            leftover.unlink(missing_ok=True)
        files = find_files(source.data, source.glob, say)
        check_text(files)
        if tokenizer_folder is not None:
            return write_token_file(out, files, load_tokenizer(tokenizer_folder, trust_remote_code))
        assert vocab_size is not None
        tokenizer = train_bpe(files, vocab_size)
        try:
            with atomic_directory(trained) as partial:
                tokenizer.save_pretrained(partial)
                return write_token_file(out, files, tokenizer)
        except BaseException:
            out.unlink(missing_ok=True)
            raise
