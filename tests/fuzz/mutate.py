"""Damage files: bits, lengths and ends of binary files; types, numbers, nesting and names in JSON."""

import copy
import json
import math
import random
import struct
from collections.abc import Callable
from typing import Any

HUGE = (
    0,
    -1,
    1,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    2**64,
    10**22,
    10**400,
    1e300,
    -1e300,
    float("inf"),
    float("nan"),
    0.5,
    1e-320,
)
TEXTS = (
    "",
    "\0",
    "x" * 5000,
    "é\n",
    "../x",
    "[",
    "(a+)+$",
    "(" * 500,
    ".*" * 20 + "x",
    "nf4",
    "F32",
    "BF16",
    "cpu",
)
NOTHING = (None, True, False, [], {}, [[]], {"a": {}})


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    """Flip one to eight random bits of a file's content."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(data: bytes, rng: random.Random) -> bytes:
    """Shorten a file's content: keep only its beginning or only its end, or remove a range of bytes."""
    begin = rng.randrange(len(data) + 1)
    end = rng.randrange(begin, len(data) + 1)
    return rng.choice((data[:begin], data[begin:], data[:begin] + data[end:]))


def grow(data: bytes, rng: random.Random) -> bytes:
    """Insert new bytes into a file's content, or copies of a part of it."""
    at = rng.randrange(len(data) + 1)
    piece = data[at : at + rng.randint(1, 64)] * rng.randint(1, 20)
    return (
        data[:at]
        + rng.choice((piece, bytes(rng.randrange(256) for _ in range(8)), b"\xff" * 16, b"\0" * 16))
        + data[at:]
    )


def change_length(data: bytes, rng: random.Random) -> bytes:
    """Overwrite 4 or 8 bytes with an integer, as if they stored a length; most often the first bytes."""
    form = rng.choice(("<I", "<Q"))
    size = struct.calcsize(form)
    if len(data) < size:
        return b"\xff" * 16
    at = rng.choice((0, 0, 0, 8, 12, 16, rng.randrange(len(data) - size + 1)))
    value = rng.choice(
        (0, 1, len(data), len(data) - 8, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, rng.randrange(2**20))
    )
    return data[:at] + struct.pack(form, value % 2 ** (8 * size)) + data[at + size :]


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (flip_bits, cut, grow, change_length)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return the container and the key (or list index) of every value in a JSON tree."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        each = waiting.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        for key in keys:
            found.append((each, key))
            waiting.append(each[key])
    return found


def another(value: Any, rng: random.Random) -> Any:
    """Return a JSON value of another type or range than ``value``."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(HUGE)
    if kind == 1:
        return rng.choice(TEXTS)
    if kind == 2:
        return copy.deepcopy(rng.choice(NOTHING))
    if kind == 3:
        return [value] if rng.random() < 0.5 else {"a": value}
    if isinstance(value, bool) or value is None:
        return rng.choice((0, 1, "true", [], 10**22))
    if isinstance(value, int):
        more = rng.choice((-1, 1, -value, value, 7, 2**31, 0.5))
        return value + (more if abs(value) < 2**1000 else math.ceil(more))  # larger ones are no floats
    if isinstance(value, float):
        whole = int(value) if math.isfinite(value) else 0
        return rng.choice((-value, whole, value * 1e300, str(value)))
    if isinstance(value, str):
        return rng.choice((value[::-1], value + "x", value[:-1], value * 300, "." + value, 5))
    return rng.choice((list(range(5)), None, "x", 3))


def mutate_json(text: bytes, rng: random.Random) -> bytes:
    """Change one to three values of a JSON document, or its bytes if the text is not valid JSON."""
    kind = rng.randrange(12)
    if kind == 0:
        return b"[" * rng.choice((10, 1000, 100_000)) + (b"" if rng.random() < 0.5 else text)
    if kind == 1:
        return rng.choice(BYTES)(text, rng)
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return rng.choice(BYTES)(text, rng)
    for _ in range(rng.randint(1, 3)):
        where = places(tree)
        if not where:
            return json.dumps(another(tree, rng)).encode()
        inside, key = rng.choice(where)
        if isinstance(key, int) and key >= len(inside):
            continue
        action = rng.randrange(6)
        if action == 0:
            del inside[key]
        elif action == 1 and isinstance(inside, dict):
            inside[rng.choice((*TEXTS, "peft_type", "format", "shape"))] = inside.pop(key)
        elif action == 2:
            nested: Any = inside[key]
            for _ in range(rng.choice((5, 70, 400))):
                nested = [nested]
            inside[key] = nested
        else:
            inside[key] = another(inside[key], rng)
    mutated = json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if kind == 2 and mutated[:1] == b"{" and len(mutated) > 2:  # write every key of the JSON object twice
        return mutated[:-1] + b", " + mutated[1:]
    if kind == 3:
        return mutated.replace(b'"', b'"\\ud800', 1)
    return mutated


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Apply one or two of the mutations in ``BYTES`` to a binary file."""
    for _ in range(rng.randint(1, 2)):
        data = rng.choice(BYTES)(data, rng)
    return data


def mutate_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Change a safetensors file: any bytes, or its JSON header (mostly with a correct header length)."""
    if rng.random() < 0.4 or len(data) < 8:
        return mutate_bytes(data, rng)
    size = int.from_bytes(data[:8], "little")
    header = mutate_json(data[8 : 8 + size], rng)
    if rng.random() < 0.3:
        header = inner_json(data[8 : 8 + size], rng)
    length = len(header) if rng.random() < 0.9 else rng.choice((0, size, len(header) + 1, 2**40))
    return length.to_bytes(8, "little") + header + data[8 + size :]


def inner_json(header: bytes, rng: random.Random) -> bytes:
    """Change JSON that is stored as text in the metadata of a safetensors header."""
    tree = json.loads(header)
    metadata = tree.get("__metadata__", {})
    for name, text in metadata.items():
        if text[:1] in ("{", "["):
            metadata[name] = mutate_json(text.encode(), rng).decode("utf-8", "replace")
    return json.dumps(tree).encode()


def mutate_lines(data: bytes, rng: random.Random) -> bytes:
    """Change one line of a JSONL file."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = mutate_json(lines[at], rng)
    return b"\n".join(lines)
