"""Compute initial values of adapters from the weight (PiSSA, OLoRA, LoftQ) or the layer's inputs (EVA)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.adapters.adapted import DEFAULT, AdaptedLayer, wide
from shoestring.adapters.conv1d import former_matrix
from shoestring.adapters.linear import LoraLinear
from shoestring.adapters.options import LoraOptions
from shoestring.quantization.quantized_tensor import QuantizedTensor

# The form of a weight: quant_type, None if it is dense, block_size and double_quant.
Form = tuple[str | None, int, bool]


@torch.no_grad()
def take_out(layer: nn.Module, options: LoraOptions, form: Form = (None, 64, False)) -> dict[str, Tensor]:
    """Compute initial values for an adapter and subtract their product from the layer's weight, in place.

    The weight becomes ``weight - scaling * lora_B @ lora_A``. A quantised weight is dequantised first, and
    the remainder is quantised again in the same format.

    Args:
        layer: the linear layer or Conv1D, whose weight changes.
        options: the options of the adapter, with init "pissa", "olora" or "loftq".
        form: how the remainder will be quantised.

    Returns:
        lora_A and lora_B.

    Raises:
        ValueError: init is "loftq" and the remainder will not be quantised.
    """
    w = former_matrix(layer)
    dense = w.dequantize(torch.float32) if isinstance(w, QuantizedTensor) else w.detach().to(wide(w.dtype))
    rest, lora_A, lora_B = torch.ops.shoestring._lora_take_out(
        dense, options.init, options.rank, options.alpha, options.rslora, options.loftq_iterations, *form
    )  # fmt: skip
    w.copy_(rest.to(w.dtype))
    return {"lora_A": lora_A, "lora_B": lora_B}


class Directions:
    """Incremental PCA (Ross et al., 2008): the first ``count`` principal directions of a stream of rows."""

    def __init__(self, count: int) -> None:
        self.count, self.seen = count, 0
        self.mean = self.values = self.vectors = self.variance = torch.empty(0)

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Update the principal directions with new rows, (..., features)."""
        rows = rows.detach().flatten(0, -2).to(wide(rows.dtype))
        n, mean = rows.shape[0], rows.mean(0)
        spread = (rows - mean).square().sum(0)
        if self.seen == 0:
            stack, self.mean, self.variance = rows - mean, mean, spread
        else:
            shift, weight = mean - self.mean, self.seen * n / (self.seen + n)
            stack = torch.cat([self.values[:, None] * self.vectors, rows - mean, (weight**0.5 * shift)[None]])
            self.variance = self.variance + spread + weight * shift.square()
            self.mean = self.mean + shift * (n / (self.seen + n))
        self.seen += n
        _, values, vectors = torch.linalg.svd(stack, full_matrices=False)
        # The sign of a principal direction is arbitrary. As in PEFT, its element of largest magnitude is made
        # positive.
        signs = vectors.gather(1, vectors.abs().argmax(1, keepdim=True)).sign()
        self.values, self.vectors = values[: self.count], (vectors * signs)[: self.count]

    def explained(self) -> Tensor:
        """Return the fraction of the total variance of the rows along each principal direction."""
        return self.values.square() / self.variance.sum().clamp_min(torch.finfo(self.values.dtype).tiny)


def initialize_eva(
    model: nn.Module, batches: Iterable[Any], adapter_name: str = DEFAULT, *, rho: float = 2.0
) -> dict[str, int]:
    """Initialise lora_A of an adapter with the principal directions of layer inputs (EVA, arXiv 2410.07170).

    Ranks are redistributed to the layers whose principal directions explain the largest fractions of
    variance. The sum of the ranks and the scaling of each layer do not change. A layer that gets the rank 0
    loses the adapter. A layer whose rank changes gets new parameters, so create the optimizer after this
    call.

    Args:
        model: a model with an active, untrained LoRA adapter of this name, whose lora_B is zero.
        batches: the batches to run through the model. A dict is passed as keyword arguments, any other value
            as one argument. In a dict, tokens with attention_mask 0 or with the label -100 are ignored.
        adapter_name: name of the adapter.
        rho: a layer gets at most rho times its rank; 1 leaves all ranks unchanged.

    Returns:
        The new rank of each layer, by name; 0 if the adapter was removed.

    Raises:
        ValueError: no linear layer has a plain LoRA adapter of this name, the adapter is trained already, or
            there are too few tokens.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
        >>> model = shoestring.lora.apply(model, rank=4, init="eva")
        >>> ranks = shoestring.lora.initialize_eva(model, [torch.randn(64, 16)])
        >>> sorted(ranks), sum(ranks.values())
        (['0', '2'], 8)
    """
    layers = {
        n: m for n, m in model.named_modules() if isinstance(m, LoraLinear) and adapter_name in m.adapters
    }
    for name, layer in layers.items():
        if layer.adapters[adapter_name].changes_base or layer.lora_B[adapter_name].any():
            raise ValueError(
                "lora.initialize_eva: model: expected lora_B of zeros, as before training, received other "
                f"values in {name}"
            )
    if not layers:
        raise ValueError(
            f"lora.initialize_eva: model: expected linear layers with an adapter {adapter_name!r}, received none"
        )
    directions = {n: Directions(round(rho * m.adapters[adapter_name].rank)) for n, m in layers.items()}
    _observe(model, layers, batches, directions)
    ranks = _distribute({n: m.adapters[adapter_name].rank for n, m in layers.items()}, directions)
    for name, layer in layers.items():
        _begin(layer, adapter_name, ranks[name], directions[name].vectors)
    return ranks


@torch.no_grad()
def _observe(
    model: nn.Module,
    layers: Mapping[str, AdaptedLayer],
    batches: Iterable[Any],
    directions: Mapping[str, Directions],
) -> None:
    """Run the batches and update the directions of each layer with the layer's inputs."""
    chosen: Tensor | None = None

    def reader(seen: Directions) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def read(_: nn.Module, args: tuple[Any, ...]) -> None:
            seen.update(args[0][chosen] if chosen is not None else args[0])

        return read

    handles = [layer.register_forward_pre_hook(reader(directions[name])) for name, layer in layers.items()]
    training = model.training
    model.eval()
    try:
        for batch in batches:
            if not isinstance(batch, Mapping):
                model(batch)
                continue
            mask = batch.get("attention_mask")
            chosen = None if mask is None else mask.bool()
            if batch.get("labels") is not None:
                labelled = batch["labels"] != -100
                chosen = labelled if chosen is None else chosen & labelled
            model(**batch)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    few = [name for name, d in directions.items() if len(d.values) < d.count]
    if few:
        raise ValueError(
            f"lora.initialize_eva: batches: expected at least {directions[few[0]].count} directions in the inputs "
            f"of {few[0]}, received {len(directions[few[0]].values)}; give more tokens or a smaller rank"
        )


def _distribute(ranks: Mapping[str, int], directions: Mapping[str, Directions]) -> dict[str, int]:
    """Return new ranks of the layers, whose sum is that of the old ranks.

    Let n be the sum of the ranks. Over all layers, the n principal directions with the largest fractions of
    variance are selected. A layer's new rank is the number of selected directions that belong to it.
    """
    every = sorted(
        ((share, name) for name, d in directions.items() for share in d.explained().tolist()), reverse=True
    )
    layer_names = [name for _, name in every[: sum(ranks.values())]]
    return {name: layer_names.count(name) for name in ranks}


def _begin(layer: LoraLinear, name: str, rank: int, vectors: Tensor) -> None:
    """Give an adapter its new rank, and principal directions of the layer's inputs as lora_A; remove it at rank 0."""
    options = layer.adapters[name]
    if rank == 0:
        layer.remove(name)
        return
    alpha = options.scaling * (rank**0.5 if options.rslora else rank)
    bias = {"lora_bias": layer.lora_bias[name]} if options.lora_bias else {}
    trainable = layer.lora_A[name].requires_grad
    lora_B = vectors.new_zeros(layer.out_features, rank)
    magnitude = {"lora_magnitude_vector": layer.lora_magnitude_vector[name]} if options.dora else {}
    layer.add(
        name,
        replace(options, rank=rank, alpha=alpha),
        {"lora_A": vectors[:rank], "lora_B": lora_B} | bias | magnitude,
    )
    for parameter in layer.tensors(name).values():
        parameter.requires_grad_(trainable)
