"""A digest of an adapter's configuration, which is stored in the metadata of the adapter's weights.

With the digest, a loader detects that the configuration file and the weights file come from different saves.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

KEY = "adapter_config_sha1"


def config_digest(config: Mapping[str, Any]) -> str:
    """Return the SHA-1 of the fields of adapter_config.json that change what an adapter computes.

    A field that is null, false or empty has the same digest as a missing field. The order of the elements of
    a list does not change the digest, because PEFT writes them in any order.
    """
    # A field that does not count, such as a path, may have lone surrogates, which UTF-8 cannot encode.
    text = json.dumps(dict(config), ensure_ascii=False).encode(errors="replace")
    digest: str = torch.ops.shoestring._adapter_config_digest(text)
    return digest


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
