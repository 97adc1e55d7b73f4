"""Build the small decoders of transformers that tests of patch() use."""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")


def build_decoder(name: str = "Llama", **extra: Any) -> Any:
    transformers.logging.set_verbosity_error()
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, name + "ForCausalLM")(
        getattr(transformers, name + "Config")(**sizes | extra)
    )
