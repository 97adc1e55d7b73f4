"""Recognise files that hold neither text nor JSON records, and say how to convert them."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from pathlib import Path

from shoestring.core.errors import InputError
from shoestring.files.read_file import check_regular

HEAD = 64 << 10  # number of bytes at the start of a file that are looked at

JSON_BEGINS = re.compile(rb'(\xef\xbb\xbf)?\s*(\[\s*)?\{\s*"[^"\n]{0,200}"\s*:')
TABLE = (
    "write its rows as JSONL, such as with pandas: {read}.to_json('data.jsonl', orient='records', lines=True)"
)


@dataclass(frozen=True)
class Format:
    """A format that is not read, known by the first bytes of a file or by the ending of its name."""

    name: str
    advice: str
    suffixes: tuple[str, ...]
    begins: bytes | None = None  # regular expression of the first bytes


FORMATS = (
    Format("a file compressed with gzip", "unpack it with gunzip", (".gz", ".tgz"), rb"\x1f\x8b"),
    Format("a file compressed with xz", "unpack it with unxz", (".xz", ".txz"), rb"\xfd7zXZ\0"),
    Format("a file compressed with zstd", "unpack it with unzstd", (".zst", ".zstd"), rb"\x28\xb5\x2f\xfd"),
    Format("a file compressed with bzip2", "unpack it with bunzip2", (".bz2",), rb"BZh[1-9]1AY&SY"),
    Format("a file compressed with lz4", "unpack it with unlz4", (".lz4",), rb"\x04\x22\x4d\x18"),
    Format("an Excel table", TABLE.format(read="read_excel(FILE)"), (".xlsx", ".xls", ".ods")),
    Format("a document of an office program", "save it as plain text", (".docx", ".doc", ".odt", ".pptx")),
    Format("an e-book", "save it as plain text", (".epub", ".mobi")),
    Format("NumPy arrays", "give the text", (".npy", ".npz"), rb"\x93NUMPY"),
    Format("a zip archive", "unpack it with unzip", (".zip",), rb"PK(\x03\x04|\x05\x06)"),
    Format("a 7-Zip archive", "unpack it with 7z", (".7z",), rb"7z\xbc\xaf\x27\x1c"),
    Format("a RAR archive", "unpack it with unrar", (".rar",), rb"Rar!\x1a\x07"),
    Format("a tar archive", "unpack it with tar", (".tar",), rb"(?s:.{257})ustar"),
    Format("a document of an office program", "save it as plain text", (), rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"),
    Format("a Parquet table", TABLE.format(read="read_parquet(FILE)"), (".parquet", ".pq"), rb"PAR1\x15"),
    Format(
        "an Arrow table",
        "write its rows as JSONL, such as with datasets: Dataset.from_file(FILE).to_json('data.jsonl')",
        (".arrow", ".feather", ".ipc"),
        rb"ARROW1\0|FEA1\0|\xff{4}",
    ),
    Format("an ORC table", TABLE.format(read="read_orc(FILE)"), (".orc",)),
    Format("an Avro table", "write its rows as JSONL", (".avro",), rb"Obj\x01"),
    Format("an SQLite database", "write its rows as JSONL", (".sqlite", ".sqlite3", ".db"), rb"SQLite format 3\0"),
    Format("an HDF5 file", "write its rows as JSONL", (".h5", ".hdf5"), rb"\x89HDF\r\n\x1a\n"),
    Format("a pickle", "write its rows as JSONL", (".pkl", ".pickle"), rb"\x80[\x02-\x05]"),
    Format(
        "a CSV table",
        TABLE.format(read="read_csv(FILE)") + "; to train on it as it stands, let its name end in .txt",
        (".csv",),
    ),
    Format(
        "a TSV table",
        TABLE.format(read="read_csv(FILE, sep='\\t')") + "; to train on it as it stands, let its name end in .txt",
        (".tsv", ".tab"),
    ),
    Format("a PDF", "write its text to a file, such as with pdftotext", (".pdf",), rb"%PDF-"),
    Format("a document in RTF", "save it as plain text", (".rtf",), rb"\{\\rtf1"),
    Format(
        "a token file, which the C++ programs read", "give the text that it was made of", (), rb"shoetok\x01"
    ),
    Format("weights of a model", "give text", (".safetensors", ".gguf", ".pt", ".pth", ".onnx"), rb"GGUF[\x01-\x09]\0"),
    Format(
        "an image", "give text", (".png", ".jpg", ".jpeg", ".gif", ".webp"), rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|RIFF(?s:.{4})WEBP"
    ),
    Format(
        "text in UTF-16 or UTF-32",
        "convert it with iconv --to-code UTF-8",
        (),
        rb"\xff\xfe|\xfe\xff|\0\0\xfe\xff",
    ),
)  # fmt: skip


def why_unsupported(path: Path) -> str | None:
    """Return why a file is neither text nor JSON records, and what to do; None if it may be either.

    The name of the file and its first bytes decide.

    Raises:
        InputError: the file cannot be read.
    """
    head = _read_head(path)
    kind = next((each for each in FORMATS if path.suffix.lower() in each.suffixes), None)
    if kind is None:
        kind = next((each for each in FORMATS if each.begins and re.match(each.begins, head)), None)
    if kind is not None:
        return f"expected text or JSON records, got {kind.name}; {kind.advice}"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < HEAD)
    except UnicodeDecodeError as error:
        return not_utf8(error, error.start)
    zero = head.find(b"\0")
    if zero >= 0:
        return f"expected text, got a binary file or text in UTF-16: byte {zero} is zero; convert it to UTF-8"
    return None


def looks_like_json(path: Path) -> bool:
    """Return whether a file begins as JSON objects do."""
    return JSON_BEGINS.match(_read_head(path)) is not None


def not_utf8(error: UnicodeDecodeError, offset: int) -> str:
    """Return the message about a byte of a file that is no UTF-8."""
    return f"not UTF-8 at byte {offset} ({error.reason}); convert the file to UTF-8"


def _read_head(path: Path) -> bytes:
    """Return the first bytes of a file."""
    try:
        check_regular(path, str(path))
        with open(path, "rb") as file:
            return file.read(HEAD)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
