"""Embeddings with LoRA and DoRA adapters."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.adapters.adapted import wide
from shoestring.adapters.low_rank import LowRankLayer
from shoestring.adapters.options import LoraOptions


class LoraEmbedding(LowRankLayer, nn.Embedding):
    """``nn.Embedding`` or a subclass with LoRA or DoRA adapters. The option ``dropout`` is ignored.

    ``lora_embedding_A.<name>`` is (rank, num_embeddings) and starts as zeros. ``lora_embedding_B.<name>`` is
    (embedding_dim, rank). DoRA's ``lora_magnitude_vector.<name>`` is (embedding_dim); it starts as the norm
    of each embedding dimension over all tokens of the vocabulary.
    """

    PARAMETERS = {
        "lora_embedding_A": "lora_embedding_A",
        "lora_embedding_B": "lora_embedding_B",
        "lora_magnitude_vector": "lora_magnitude_vector",
    }

    lora_embedding_A: nn.ParameterDict
    lora_embedding_B: nn.ParameterDict

    @classmethod
    def shapes(cls, layer: nn.Embedding, options: LoraOptions) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "lora_embedding_A": (options.rank, layer.num_embeddings),
            "lora_embedding_B": (layer.embedding_dim, options.rank),
        }
        return shapes | ({"lora_magnitude_vector": (layer.embedding_dim,)} if options.dora else {})

    def start(self, options: LoraOptions) -> dict[str, Tensor]:
        shapes = self.shapes(self, options)
        # PEFT creates both parameters with random values before it initialises them. Drawing the same numbers
        # here gives the same initial values for the same seed.
        lora_A = torch.randn(shapes["lora_embedding_A"], device="cpu")
        lora_B = torch.randn(shapes["lora_embedding_B"], device="cpu")
        if options.init != "random":
            lora_A, lora_B = torch.zeros_like(lora_A), torch.randn_like(lora_B)
        lora_A, lora_B = lora_A.to(self.weight.dtype), lora_B.to(self.weight.dtype)
        tensors = {"lora_embedding_A": lora_A, "lora_embedding_B": lora_B}
        if options.dora:
            tensors["lora_magnitude_vector"] = self.first_magnitude(options, lora_A, lora_B)
        return tensors

    def factors(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        return self.weight, self.lora_embedding_A[name], self.lora_embedding_B[name]

    def matrices(self, weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return weight.T, lora_A, lora_B

    def dense_weight(self) -> Tensor:
        return self.weight.detach().T.to(wide(self.weight.dtype))

    def folded(self, matrix: Tensor) -> Tensor:
        return matrix.T.contiguous()

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Some subclasses, as in Gemma and BART, multiply their output by this number or tensor of one element.
        scale = getattr(self, "embed_scale", None)

        def product(name: str) -> Tensor:
            low = F.embedding(input, self.lora_embedding_A[name].T, self.padding_idx)
            high = F.linear(low, self.lora_embedding_B[name])
            return high if scale is None else high * scale

        # The forward of the class without adapters, which may be a subclass of nn.Embedding.
        base: Tensor = super().forward(input, *args, **kwargs)
        return self.composed(base, self.current(), product, (-1,))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, adapters: {', '.join(self.adapters)}"


def embedding_refusal(layer: Any, options: Any) -> str | None:
    """Return None if this embedding can have the adapter, else what is supported, for an error message."""
    if layer.max_norm is not None or layer.sparse:
        return "an embedding without max_norm and sparse"
    return "lora_bias=False for an embedding" if options.lora_bias else None
