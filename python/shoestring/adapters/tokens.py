"""Train the rows of single tokens in an embedding (PEFT's trainable_token_indices)."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.adapters.adapted import AdaptedLayer, wide
from shoestring.adapters.options import LoraOptions, Options, TokenOptions
from shoestring.adapters.targets import base_modules, former_class, matches, refuse_unmatched
from shoestring.adapters.tied import sharing


class TokenLayer(AdaptedLayer):
    """An embedding or linear layer, some of whose rows are replaced by trained ones.

    The parameter ``trainable_tokens_delta.<name>`` is (tokens, features) and starts as the rows of the
    weight. A layer whose weight is tied to that of an embedding has no parameter, and uses the embedding's.
    """

    PARAMETERS = {"trainable_tokens_delta": "token_adapter.trainable_tokens_delta"}
    CAN_ADD = False
    trainable_tokens_delta: nn.ParameterDict

    @classmethod
    def shapes(cls, layer: Any, options: TokenOptions) -> dict[str, tuple[int, ...]]:
        rows = (len(options.indices), layer.weight.shape[1])
        return {"trainable_tokens_delta": rows} if options.tied_to is None else {}

    def start(self, options: TokenOptions) -> dict[str, Tensor]:
        if options.tied_to is not None:
            return {}
        rows = torch.tensor(options.indices, device=self.weight.device)
        return {"trainable_tokens_delta": self.weight.detach()[rows]}

    def tie(self, source: nn.Module) -> None:
        """Use the trained rows of ``source``, a layer whose weight is tied to the weight of this layer."""
        self.__dict__["source"] = [source]  # in a list, so that the module is no child of this one

    def rows_of(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the indices of an adapter's tokens and their rows in the dtype of the weight."""
        options: TokenOptions = self.adapters[name]
        holder: Any = self if options.tied_to is None else self.__dict__["source"][0]
        rows: Tensor = holder.trainable_tokens_delta[name].to(self.weight.dtype)
        cache = self.__dict__.setdefault("_indices", {})
        key = (options.indices, rows.device)
        if key not in cache:
            cache[key] = torch.tensor(options.indices, device=rows.device)
        return cache[key], rows

    def detach(self) -> dict[str, Any]:
        self.__dict__.pop("_indices", None)
        source = self.__dict__.pop("source", None)
        detached = super().detach()
        if source is not None:
            detached["held"]["source"] = source
        return detached

    def merged(self, names: Sequence[str]) -> dict[str, Tensor]:
        weight = self.weight.detach().to(wide(self.weight.dtype))
        for name in names:
            indices, rows = self.rows_of(name)
            weight = weight.index_copy(0, indices, rows.detach().to(weight.dtype))
        return {"weight": weight}


class TokenEmbedding(TokenLayer, nn.Embedding):
    """``nn.Embedding`` or a subclass with trained rows. The forward of its class computes all other rows."""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = super().forward(input, *args, **kwargs)
        scale = getattr(self, "embed_scale", None)  # as in Gemma and BART
        for name in self.current():
            indices, rows = self.rows_of(name)
            # For each token id, its row among the trained ones, or -1.
            row_of = torch.full((self.num_embeddings,), -1, device=indices.device)
            row = row_of.index_copy(0, indices, torch.arange(len(indices), device=indices.device))[input]
            known: tuple[int, ...] = self.adapters[name].indices
            padding = known.index(self.padding_idx) if self.padding_idx in known else None
            trained = F.embedding(row.clamp_min(0), rows, padding)
            if scale is not None:
                trained = (trained * scale).to(y.dtype)
            y = torch.where((row >= 0)[..., None], trained, y)
        return y


class TokenLinear(TokenLayer, nn.Linear):
    """``nn.Linear`` with trained rows, such as an output head that is tied to an embedding."""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = super().forward(input, *args, **kwargs)
        for name in self.current():
            indices, rows = self.rows_of(name)
            bias = None if self.bias is None else self.bias[indices]
            y = y.index_copy(-1, indices, F.linear(input, rows, bias).to(y.dtype))
        return y


class Target(NamedTuple):
    """The class that a layer gets, and its options."""

    kind: type[TokenLayer]
    options: TokenOptions


def token_targets(model: nn.Module, options: Options) -> dict[str, Target]:
    """Return the layers with rows that ``trainable_token_indices`` trains, by name.

    Layers whose weight is tied to the input embedding follow it, unless they have other indices.

    Raises:
        ValueError: a name matches no module, a module cannot have trained rows, or an index is out of range.
    """
    requested: Any = options.trainable_token_indices if isinstance(options, LoraOptions) else ()
    if not isinstance(options, LoraOptions) or not requested:
        return {}
    modules = {name: module for name, module in base_modules(model).items() if name}
    get = getattr(model, "get_input_embeddings", None)
    inputs = get() if callable(get) else None
    if not isinstance(requested, Mapping):
        requested = {
            next((name for name, module in modules.items() if module is inputs), "embed_tokens"): requested
        }
    refuse_unmatched("trainable_token_indices", requested, modules)
    indices = {name: tuple(ids) for key, ids in requested.items() for name in modules if matches(name, [key])}
    tied = {}
    for name, ids in indices.items():
        if modules[name] is inputs:
            shared = sharing(modules, name)
            tied = dict.fromkeys((other for other in shared if indices.get(other, ids) == ids), name)
            if options.ensure_weight_tying and len(tied) < len(shared):
                raise ValueError(
                    "lora.apply: trainable_token_indices: expected the same indices for tied layers, since ensure_weight_tying "
                    f"is True, received others for {next(n for n in shared if n not in tied)} than for {name}"
                )
    plan: dict[str, tuple[tuple[int, ...], str | None]] = {
        n: (i, None) for n, i in indices.items() if n not in tied
    }
    plan |= {other: (indices[name], name) for other, name in tied.items()}
    # init concerns low-rank matrices, which these layers do not have.
    values = {field.name: getattr(options, field.name) for field in fields(LoraOptions)} | {"init": "default"}
    return {
        name: _target(modules[name], name, TokenOptions(**values, indices=ids, tied_to=source))
        for name, (ids, source) in plan.items()
    }


def _target(module: nn.Module, name: str, options: TokenOptions) -> Target:
    """Return the layer that trains rows of the weight of a module; raise ValueError for other modules and indices."""
    former = former_class(module)
    weight = module._parameters.get("weight")
    dense = issubclass(former, (nn.Embedding, nn.Linear)) and type(weight) is nn.Parameter
    if not dense or getattr(module, "max_norm", None) is not None or getattr(module, "sparse", False):
        raise ValueError(
            "lora.apply: trainable_token_indices: expected dense embeddings without max_norm and sparse, or linear layers, "
            f"received {name}, a {former.__name__}"
        )
    rows = weight.shape[0] if weight is not None else 0
    wrong = [index for index in options.indices if not 0 <= index < rows]
    if wrong or len(set(options.indices)) < len(options.indices):
        raise ValueError(
            f"lora.apply: trainable_token_indices: expected different indices from 0 to {rows - 1} for {name}, received "
            f"{wrong[0] if wrong else 'one of them twice'}"
        )
    return Target(_class(former), options)  # type: ignore[arg-type]  # mypy takes the class for an instance


@functools.cache
def _class(former: type[nn.Module]) -> type[TokenLayer]:
    """Return the class that a module of class ``former`` has while it trains tokens."""
    kind = TokenEmbedding if issubclass(former, nn.Embedding) else TokenLinear
    if former in (nn.Embedding, nn.Linear):
        return kind
    body = {"__doc__": kind.__doc__, "__module__": __name__}
    return type(f"Token{former.__name__}", (kind, former), body)
