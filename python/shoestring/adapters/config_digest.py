"""A digest of an adapter's configuration, which is stored in the metadata of the adapter's weights.

With the digest, a loader detects that the configuration file and the weights file come from different saves.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch

KEY = "adapter_config_sha1"


def config_digest(config: Mapping[str, Any]) -> str:
    """Return the SHA-1 of the fields of adapter_config.json that change what an adapter computes.

    A field that is null, false or empty has the same digest as a missing field. The order of the elements of
    a list does not change the digest, because PEFT writes them in any order.
    """
    digest: str = torch.ops.shoestring._adapter_config_digest(json.dumps(config))
    return digest
