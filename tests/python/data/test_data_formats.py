"""Data files are recognised by their contents and names, and JSON records are read one by one from any layout."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import random
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cli_helpers import write_jsonl
from shoestring.core.errors import InputError
from shoestring.data import lines
from shoestring.data.formats import FORMATS, why_unsupported
from shoestring.data.records import COMPLETION, kind_of, read_records
from shoestring.data.text import documents, find_files

ROWS = "text,label\nthe cat,1\n"


def zipped(names: str = "a.txt") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(names, "text")
    return buffer.getvalue()


def tarred() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return buffer.getvalue()


def database() -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table a (b)")
    return connection.serialize()


def saved() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(3))
    return buffer.getvalue()


# contents that are recognised whatever the name of the file is
CONTENTS: dict[str, Callable[[], bytes]] = {
    "compressed with gzip": lambda: gzip.compress(b"text"),
    "compressed with xz": lambda: lzma.compress(b"text"),
    "compressed with bzip2": lambda: bz2.compress(b"text"),
    "compressed with zstd": lambda: b"\x28\xb5\x2f\xfd\x24\x04!\0\0text",
    "zip archive": zipped,
    "tar archive": tarred,
    "SQLite": database,
    "NumPy": saved,
    "pickle": lambda: pickle.dumps({"text": "a"}),
    "Parquet": lambda: b"PAR1\x15\x04\x15\x10\x15\x14" + bytes(40) + b"PAR1",
    "Arrow": lambda: b"ARROW1\0\0" + bytes(40),
    "an Arrow": lambda: b"\xff\xff\xff\xff\xf0\0\0\0",
    "PDF": lambda: b"%PDF-1.7\n%\xe2\xe3",
    "RTF": lambda: b"{\\rtf1\\ansi text}",
    "image": lambda: b"\x89PNG\r\n\x1a\n" + bytes(20),
    "token file": lambda: b"shoetok\x01" + bytes(60),
    "UTF-16": lambda: "text".encode("utf-16"),
    "UTF-16: byte 1": lambda: "text".encode("utf-16-le"),
    "binary file": lambda: b"\x01\x02\0\x03",
    "not UTF-8 at byte 3": lambda: "abcß".encode("latin-1"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_contents_are_refused_by_name(tmp_path: Path, name: str) -> None:
    for file in ("data.txt", "data", "data.jsonl"):
        (tmp_path / file).write_bytes(CONTENTS[name]())
        with pytest.raises(InputError, match=f"^--data .*{file}: .*{name}.*; .*") as caught:
            find_files([tmp_path / file])
        assert len(str(caught.value)) < len(str(tmp_path)) + 300


def test_names_are_refused_and_say_what_to_do(tmp_path: Path) -> None:
    suffixes = [suffix for each in FORMATS for suffix in each.suffixes]
    assert len(suffixes) == len(set(suffixes))
    for suffix in suffixes:
        path = tmp_path / f"data{suffix.upper()}"
        path.write_text(ROWS)
        why = why_unsupported(path)
        assert why is not None and why.startswith("expected text or JSON records, got ") and "; " in why
    (tmp_path / "data.csv").write_text(ROWS)
    with pytest.raises(InputError, match=r"got a CSV table; .*read_csv.*to_json.*\.txt"):
        find_files([tmp_path / "data.csv"])


def test_text_is_text(tmp_path: Path) -> None:
    texts = [
        "PARENTS",
        "ARROW1 is",
        "FEA1",
        "BZh9",
        "RIFFs",
        "PK",
        "[1] a",
        '{"text": "a"}',
        "ä" * 40_000,
        "a: 1",
    ]
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.txt"
        path.write_text("x" * (number % 2) + text, encoding="utf-8")
        assert why_unsupported(path) is None and "".join(next(documents(path))) == path.read_text("utf-8")


RECORDS = [{"text": f'one {i}: ä [{{}}] " \\ \n', "meta": [1, {"a": None}]} for i in range(7)]
LAYOUTS: dict[str, Callable[[], str]] = {
    "list": lambda: json.dumps(RECORDS),
    "indented": lambda: json.dumps(RECORDS, indent=2, ensure_ascii=False),
    "one by one": lambda: "\n".join(json.dumps(record, indent=1) for record in RECORDS),
    "without spaces": lambda: "".join(json.dumps(record) for record in RECORDS),
    "lines": lambda: "\n".join(map(json.dumps, RECORDS)) + "\n",
    "lines of a list": lambda: " [\r\n" + ",\r\n".join(map(json.dumps, RECORDS)) + "\r\n]\r\n\r\n",
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk", [7, 100, 1 << 20])
def test_json_files_have_the_records_that_json_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, chunk: int
) -> None:
    monkeypatch.setattr(lines, "CHUNK", chunk)
    path = tmp_path / "a.json"
    path.write_text(LAYOUTS[layout](), encoding="utf-8")
    found = list(read_records(path))
    assert [record for _, record in found] == RECORDS
    assert found[2][0] == f"{path}: record 3"
    assert ["".join(document) for document in documents(path)] == [record["text"] for record in RECORDS]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}, {"text": "b"}', "the list of records has no end: the file is cut off"),
        ('[{"text": "a"}, {"text": "b', "record 2 is not valid JSON"),
        ('[{"text": "a"} {"text": "b"}]', "expected a comma after record 1, got '{'"),
        ('[{"text": "a"}] {"text": "b"}', "expected one list of records, got '{' after its end"),
        ('[{"text": "a"}, "b"]', "record 2 is not a JSON object but a string"),
        ('[{"text": "a"},]', "record 2 is not valid JSON"),
        ("[]", "no record in the file"),
        ("7", "record 1 is not a JSON object but a number"),
        ("[" * 100_000, "record 1 is not valid JSON"),
        ('{"text": "a", "text": "b"}', "record 1: the field 'text' appears twice"),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", "record 1 holds an integer of too many digits"),
        (
            '{"version": 1, "data": [{"text": "a"}, {}]}',
            "the field 'data' has a list of 2 objects: if these are the",
        ),
        (
            '{"instruction": "a", "output": "b"}',
            "record 1 has the fields .'instruction', 'output'.; expected \"text\"",
        ),
    ],
    ids=lambda value: value[:20],
)
def test_other_json_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        kind_of([path])
        list(read_records(path))


def test_lines_that_are_no_records_name_json(tmp_path: Path) -> None:
    for content in (json.dumps(RECORDS), json.dumps(RECORDS, indent=1), json.dumps(RECORDS[0], indent=1)):
        (tmp_path / "a.jsonl").write_text(content)
        with pytest.raises(InputError, match=r"line 1 .*let its name end in \.json"):
            list(read_records(tmp_path / "a.jsonl"))


def test_records_of_finetune_are_named_in_text(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}])
    assert kind_of([file]) == COMPLETION
    with pytest.raises(
        InputError, match='no "text" string.*`shoestring finetune` trains on prompt/completion'
    ):
        list(documents(file))
    file = write_jsonl(tmp_path / "b.json", [{"version": 1, "data": [{"text": "a"}]}])
    with pytest.raises(
        InputError, match='no "text" string; .*; the field .data. has a list of 1 objects: if these'
    ):
        list(documents(file))


def test_a_directory_leaves_out_what_it_names(tmp_path: Path, seed: int) -> None:
    (tmp_path / "a.py").write_text("text")
    (tmp_path / "b.csv").write_text(ROWS)
    (tmp_path / "c.bin").write_bytes(random.Random(seed).randbytes(100) + b"\0")
    (tmp_path / "package.json").write_text('{"name": "a", "files": []}')
    (tmp_path / "wide.txt").write_bytes("text".encode("utf-16"))
    told: list[str] = []
    assert find_files([tmp_path], tell=told.append) == [tmp_path / "a.py"]
    assert [line.split(":")[0] for line in told] == [
        f"left out {tmp_path / name}" for name in ("b.csv", "c.bin", "package.json", "wide.txt")
    ]
    assert "got a CSV table" in told[0] and "['files', 'name']" in told[2]
    (tmp_path / "a.py").unlink()
    with pytest.raises(
        InputError, match=r"no file that matches '\*' in this directory can be read; .*b\.csv: "
    ):
        find_files([tmp_path])
    for number in range(12):
        (tmp_path / f"{number:02}.csv").write_text(ROWS)
    (tmp_path / "a.py").write_text("text")
    told.clear()
    find_files([tmp_path], tell=told.append)
    assert len(told) == 11 and told[-1].startswith("left out 6 more files of ")


def test_text_that_looks_like_records_is_named(tmp_path: Path) -> None:
    contents = [
        '{"text": "a"}\n',
        ' [\n {"prompt": 1}]',
        '\ufeff{ "a":1}',
        "{x}",
        "[1]",
        '{"a", 1}',
        'text {"a": 1}',
    ]
    for number, content in enumerate(contents):
        path = tmp_path / f"{number}.txt"
        path.write_text(content, encoding="utf-8")
        told: list[str] = []
        assert find_files([path], tell=told.append) == [path]
        assert told == [
            f"{path}: read as text, but begins as JSON does; for records, let the name end in .jsonl or .json"
        ] * (number < 3)
    told.clear()
    find_files([tmp_path], tell=told.append)
    assert len(told) == 1 and "0.txt (and 2 more files): read as text" in told[0]


def test_damage_in_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.json").write_text('[{"text": ')
    assert find_files([tmp_path], tell=pytest.fail) == [tmp_path / "a.txt", tmp_path / "b.json"]
    with pytest.raises(InputError, match="record 1 is not valid JSON"):
        list(documents(tmp_path / "b.json"))
