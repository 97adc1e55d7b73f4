"""A digest of an adapter's configuration, which is stored in the metadata of the adapter's weights.

It detects configuration and weights that come from different saves. csrc/adapters/config_digest.cpp computes
the same digest.
"""

import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoestring.adapters.peft_config import FIELDS

KEY = "adapter_config_sha1"
# Fields that change what an adapter computes. Other fields, such as base_model_name_or_path, may be edited by
# users.
COMPUTATION = {"peft_type"} | {name for _, names in FIELDS.values() for name in names}


def config_digest(config: Mapping[str, Any]) -> str:
    """Return the SHA-1 of those fields of adapter_config.json that change the computation.

    A field that is null, false or empty has the same digest as a missing field. The order of lists does not
    matter, because PEFT writes them in any order.
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
    """Check that weights were saved together with their configuration.

    Weights without a digest, such as PEFT's, pass the check.

    Args:
        weights: path of the weights, for the message.
        metadata: metadata of the weights.
        config: path of the configuration, for the message.
        values: the content of the configuration.

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
    if depth == 2:  # no valid field is nested this deeply; the limit bounds the recursion
        return b"x"
    if isinstance(value, Mapping):
        parts = (_canonical(name) + _canonical(item, depth + 1) for name, item in value.items())
        return b"{" + b"".join(sorted(parts)) + b"}"
    return b"[" + b"".join(sorted(_canonical(item, depth + 1) for item in value)) + b"]"
