"""LoRA and DoRA adapters on subclasses of nn.Linear and nn.Embedding, whose own forward may do anything."""

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.adapters.adapted import AdaptedLayer, wide
from shoestring.adapters.embedding import LoraEmbedding
from shoestring.adapters.linear import LowRankLinear
from shoestring.layers.seeded_dropout import seeded_dropout


class CalledLinear(LowRankLinear, nn.Linear):
    """A subclass of ``nn.Linear`` with LoRA or DoRA adapters.

    The layer's own forward computes its output, to which the low-rank products of the layer's input are
    added. :class:`LoraLinear` computes both in one operator, and serves ``nn.Linear`` alone.
    """

    def dense_weight(self) -> Tensor:
        return self.weight.detach().to(wide(self.weight.dtype))

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base: Tensor = super().forward(input, *args, **kwargs)
        names = self.current()
        if not names:
            return base
        dropout = self.dropout_of(names)

        def product(name: str) -> Tensor:
            lora_A, lora_B = self.lora_A[name], self.lora_B[name]
            dropped = seeded_dropout(input, dropout) if dropout > 0 else input
            return F.linear(F.linear(dropped.to(lora_A.dtype), lora_A), lora_B)

        # DoRA multiplies the output without the bias.
        gained = any(self.adapters[name].dora for name in names)
        bias: Tensor | None = self.bias if gained else None
        if bias is None:
            return self.composed(base, names, product, (-1,))
        return self.composed(base - bias, names, product, (-1,)) + bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, adapters: {', '.join(self.adapters)}"


@functools.cache
def called_class(base_class: type[nn.Module]) -> type[AdaptedLayer]:
    """Create the class that a module of ``base_class``, a subclass of nn.Linear or nn.Embedding, gets."""
    kind = CalledLinear if issubclass(base_class, nn.Linear) else LoraEmbedding
    body = {"__doc__": kind.__doc__, "__module__": __name__}
    return type(f"Lora{base_class.__name__}", (kind, base_class), body)
