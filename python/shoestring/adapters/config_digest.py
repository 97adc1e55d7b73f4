"""A digest of an adapter's configuration, kept in the metadata of its weights: files of two saves do not load.

csrc/adapters/config_digest.cpp computes the same.
"""

import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoestring.adapters.peft_config import FIELDS

KEY = "adapter_config_sha1"
# Fields that change what an adapter computes. People edit the others, such as base_model_name_or_path.
COMPUTATION = {"peft_type"} | {name for _, names in FIELDS.values() for name in names}


def config_digest(config: Mapping[str, Any]) -> str:
    """Return the SHA-1 of the fields of adapter_config.json that change the computation.

    An option that is off counts as one that is absent, and lists count as sets: PEFT writes them in any order.
    """
    kept = {name: value for name, value in config.items() if name in COMPUTATION}
    off: list[Any] = [None, False, "", [], {}]
    kept = {
        name: value
        for name, value in kept.items()
        if not any(type(value) is type(o) and value == o for o in off)
    }
    return hashlib.sha1(_canonical(kept), usedforsecurity=False).hexdigest()


def check_pair(weights: Path, metadata: Mapping[str, str], config: Path, values: Mapping[str, Any]) -> None:
    """Refuse weights that were saved with another configuration. Weights without a digest, such as PEFT's, pass.

    Raises:
        ValueError: the two files are of different saves.
    """
    if KEY in metadata and metadata[KEY] != config_digest(values):
        raise ValueError(
            f"lora.load_adapter: {weights}: expected the weights that were saved with {config}, received weights of "
            "another save, which was interrupted, or a changed configuration; save the adapter again"
        )


def _canonical(value: Any, depth: int = 0) -> bytes:
    if value is None or isinstance(value, bool):
        return {None: b"n", True: b"t", False: b"f"}[value]
    if isinstance(value, (int, float)):
        try:
            return b"d" + struct.pack(">d", value).hex().encode()
        except OverflowError:
            return b"d"
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return b"s%d:%s" % (len(text), text)
    if depth == 2:  # no field is nested as deep
        return b"x"
    if isinstance(value, Mapping):
        parts = (_canonical(name) + _canonical(item, depth + 1) for name, item in value.items())
        return b"{" + b"".join(sorted(parts)) + b"}"
    return b"[" + b"".join(sorted(_canonical(item, depth + 1) for item in value)) + b"]"
