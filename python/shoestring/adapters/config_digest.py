"""A digest of an adapter's configuration, which is stored in the metadata of the adapter's weights.

With the digest, a loader detects that the configuration file and the weights file come from different saves.
csrc/adapters/config_digest.cpp computes the same digest.
"""

import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoestring.adapters.peft_config import FIELDS

KEY = "adapter_config_sha1"
# Fields of adapter_config.json that change what an adapter computes. Users may edit any other field, such as
# base_model_name_or_path, without a change of the digest.
COMPUTATION = {"peft_type"} | {name for _, names in FIELDS.values() for name in names}


def config_digest(config: Mapping[str, Any]) -> str:
    """Return the SHA-1 of the fields of adapter_config.json that change what an adapter computes.

    A field that is null, false or empty has the same digest as a missing field. The order of the elements of
    a list does not change the digest, because PEFT writes them in any order.
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
    """Check that a weights file was saved together with its configuration file.

    A weights file without a digest, such as PEFT's, passes the check.

    Args:
        weights: path of the weights file, for the error message.
        metadata: metadata of the weights file, which may contain the digest.
        config: path of the configuration file, for the error message.
        values: the content of the configuration file.

    Raises:
        ValueError: the two files come from different saves.
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
    if depth == 2:  # No valid configuration field is nested this deeply; the limit bounds the recursion.
        return b"x"
    if isinstance(value, Mapping):
        parts = (_canonical(name) + _canonical(item, depth + 1) for name, item in value.items())
        return b"{" + b"".join(sorted(parts)) + b"}"
    return b"[" + b"".join(sorted(_canonical(item, depth + 1) for item in value)) + b"]"
