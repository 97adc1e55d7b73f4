"""Split the weights of layers into tiles, of which ``offload_weights`` has two on the device at a time."""

from __future__ import annotations

import copy
import glob
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.checkpoint.blocks import find_blocks
from shoestring.core.device import is_asynchronous
from shoestring.core.errors import InputError
from shoestring.core.module_argument import check_module
from shoestring.core.presence import expect_here, is_away, weights_present
from shoestring.losses.head import weight_arguments
from shoestring.losses.vocab_parallel import REDUCTIONS, loss_of_shards
from shoestring.quantization.quantized_linear_module import QuantizedLinear
from shoestring.quantization.quantized_tensor import QuantizedTensor, join_rows, quantize_parts


def tile_layers(
    model: nn.Module,
    layers: str | nn.Module | Sequence[str | type | nn.Module] | Mapping[str, int],
    *,
    tiles: int | None = None,
) -> TiledLayers:
    """Split layers of a model into tiles of rows of the weight, which :func:`offload_weights` brings one by one.

    Each tile has parameters of its own. ``offload_weights`` fetches and steps tile by tile, also outside of its
    blocks, so a layer may be larger than the memory of the device. Two tiles are on the device at a time, in
    forward and in backward, and a third one while changed weights are written.

    Layers are ``nn.Linear`` and :class:`shoestring.nn.QuantizedLinear`, frozen or trained, and ``nn.Embedding``.
    Rows of a linear layer are output features, and rows of an embedding are tokens. An output layer in tiles
    computes its loss by :meth:`shoestring.nn.TiledLinear.cross_entropy`, without all logits in memory. Frozen
    embeddings and frozen dense output layers need no tiles, since ``offload_weights`` reads their rows as tables.

    The tiles begin at multiples of 256 elements of the weight where their number allows it. 8-bit optimizer state
    of the weight then has the same blocks as without tiles. The gradient of the input is the sum of those of the
    tiles, in fp32 for 16-bit dtypes, and rounded once.

    The other modules of a block with tiled layers become blocks by themselves, in the order in which the block has
    registered them. ``state_dict()`` has the keys and tensors of the whole layers, as copies, and
    ``load_state_dict`` takes them. Names of parameters are those of the tiles. Make the optimizer after this call,
    since the parameters are new ones. Limits:

    - While a layer is split, joined or put into a state dict, its weight is in memory twice. Tiles of a layer on
      the meta device get their weights one by one, from ``param_init_fn`` of ``offload_weights``.
    - An embedding and an output layer that share a weight are refused.
    - Code that reads ``layer.weight`` gets an AttributeError. So :func:`patch` leaves MLPs with tiled layers as they
      are, and refuses a model whose trained embedding or output layer is in tiles.

    Args:
        model: the model, which is changed in place.
        layers: the layers, as ``blocks`` of ``checkpoint_model``: names with wildcards, classes or modules. Or names
            with the most rows of a tile, as :func:`plan_tiles` and ``TrainingPlan.tiles`` have them.
        tiles: the number of tiles of each layer; None if the layers have rows.

    Returns:
        A handle with ``undo()``.

    Raises:
        ValueError: a layer is of another class, shares its weight with another module, has hooks or fewer rows
            than tiles, or its weight is away. Nothing has changed then.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 64))
        >>> tiled_layers = shoestring.tile_layers(model.requires_grad_(False), ["0", "2"], tiles=4)
        >>> offloaded = shoestring.offload_weights(model, "nvme:.")
        >>> model(torch.randn(2, 64)).shape
        torch.Size([2, 64])
        >>> statistics = offloaded.statistics()
        >>> statistics["away"], statistics["device"]
        (524288, 131072)
        >>> model.state_dict()["0.weight"].shape
        torch.Size([1024, 64])
        >>> offloaded.undo()
        >>> tiled_layers.undo()
    """
    check_module("tile_layers", model)
    rows = layers if isinstance(layers, Mapping) else None
    if (rows is None) != (tiles is not None):
        raise InputError(
            "tile_layers: tiles: expected the number of tiles, or layers with the rows of a tile, received "
            + ("neither" if tiles is None else "both")
        )
    patterns: Any = [layers] if isinstance(layers, (str, nn.Module)) else layers
    found = find_blocks(
        model, patterns if rows is None else [*map(glob.escape, rows)], "tile_layers", "layers"
    )
    counts = {}
    for name, layer in found.items():
        check_layer(model, name, layer)
        counts[name] = tiles_of_rows(layer, rows[name]) if rows is not None else tiles or 0
        check_tiles(name, layer, counts[name])
    handle = TiledLayers(model)
    for name, layer in found.items():
        kind = TiledEmbedding if isinstance(layer, nn.Embedding) else TiledLinear
        model.set_submodule(name, kind(layer, counts[name]))
        handle.names.append(name)
    return handle


def tiles_of_rows(layer: nn.Module, rows: int) -> int:
    """Return the least number of tiles with which no tile of a layer has more than ``rows`` rows."""
    weight: Any = layer.weight
    if rows < 1:
        raise InputError(f"tile_layers: layers: expected at least 1 row of a tile, received {rows}")
    tiles: int = -(-weight.shape[0] // rows)
    while max(rows_of_tiles(layer, tiles)) > rows:
        tiles += 1
    return tiles


def rows_of_tiles(layer: nn.Module, tiles: int) -> list[int]:
    """Return the rows of each of so many tiles of a layer."""
    weight: Any = layer.weight
    return [end - begin for begin, end in itertools.pairwise(_begins(weight, tiles))]


def tiled_rows(model: nn.Module) -> dict[str, int]:
    """Return the names of a model's layers in tiles, each with the rows of its largest tile."""
    return {
        name: max(tile.end - tile.begin for tile in layer._tiles())
        for name, layer in model.named_modules()
        if isinstance(layer, TiledLayer)
    }


class TiledLayers:
    """The layers that :func:`tile_layers` has split.

    Attributes:
        names: the names of the layers.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.ReLU())
        >>> tiled_layers = shoestring.tile_layers(model, [torch.nn.Linear], tiles=4)
        >>> tiled_layers.names, type(model[0]).__name__
        (['0'], 'TiledLinear')
        >>> tiled_layers.undo()
        >>> model[0]
        Linear(in_features=64, out_features=1024, bias=True)
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: list[str] = []
        self._model = model

    def undo(self) -> None:
        """Put whole layers in the places of the tiled ones. Their parameters are new ones."""
        expect_here("TiledLayers.undo", self._model, self.names)
        while self.names:
            layer = self._model.get_submodule(self.names[-1])
            if isinstance(layer, TiledLayer):
                self._model.set_submodule(self.names[-1], layer.whole())
            self.names.pop()


class Tile(nn.Module):
    """Rows of a layer, as a layer of its own. ``offload_weights`` brings its weights before a call."""

    def __init__(self, layer: nn.Module, begin: int, end: int) -> None:
        super().__init__()
        self.layer = layer
        self.begin, self.end = begin, end

    def forward(self, x: Tensor | None, use: Callable[[Tile, Any], Any]) -> Any:
        """Return ``use(self, x)``. The weight is on the device meanwhile, and in the backward of the result."""
        return use(self, x)

    def extra_repr(self) -> str:
        return f"rows {self.begin} to {self.end}"


class TiledLayer(nn.Module):
    """A layer whose rows are those of its tiles, which are its submodules "0", "1" and so on."""

    _plain: nn.Module  # the layer without its weights; no submodule

    def __init__(self, layer: nn.Module, tiles: int) -> None:
        super().__init__()
        weight: Any = layer.weight
        self.training = layer.training
        self._form = layer.extra_repr()
        self.__dict__["_plain"] = _with_parameters(layer, dict.fromkeys(layer._parameters))
        for i, (begin, end) in enumerate(itertools.pairwise(_begins(weight, tiles))):
            parts = {
                name: None if p is None else nn.Parameter(p.detach()[begin:end].clone(), p.requires_grad)
                for name, p in layer._parameters.items()
            }
            self.add_module(str(i), Tile(_with_parameters(layer, parts), begin, end))

    def _tiles(self) -> list[Tile]:
        """Return the tiles, in the order of their rows."""
        return [tile for tile in self.children() if isinstance(tile, Tile)]

    def whole(self) -> nn.Module:
        """Return the layer with copies of all rows, in host memory if some are away from the device."""
        to_host = any(is_away(p) for tile in self._tiles() for p in tile.parameters())
        parts = {name: self._joined(name, to_host) for name in self._plain._parameters}
        layer: nn.Module = _with_parameters(self._plain, parts)
        return layer.train(self.training)

    def _joined(self, name: str, to_host: bool) -> nn.Parameter | None:
        first = self._tiles()[0].layer._parameters[name]
        if first is None:
            return None
        pieces = []
        for tile in self._tiles():
            piece: Any = tile.layer._parameters[name]
            with weights_present(tile) if is_away(piece) else nullcontext():
                pieces.append(piece.detach().to("cpu", copy=True) if to_host else piece.detach())
        whole = join_rows(pieces) if isinstance(first, QuantizedTensor) else torch.cat(pieces)
        return nn.Parameter(whole, first.requires_grad)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        for tile in self._tiles():
            if tile.layer._modules or tile.layer._parameters.keys() != self._plain._parameters.keys():
                raise InputError(
                    f"tile_layers: state_dict: expected tiles of {type(self._plain).__name__} as they were made, received "
                    f"one with adapters, {type(tile.layer).__name__}. Save the adapters alone."
                )
        return self.whole().state_dict(*args, **options)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        """Read the whole layer's tensors, without a copy, and leave their rows in the dict for the tiles to load."""
        tiles = self._tiles()
        forms = {
            name: ((tiles[-1].end, *p.shape[1:]), p.dtype)
            for name, p in tiles[0].layer._parameters.items()
            if p is not None
        }
        places = {
            name: nn.Parameter(torch.empty(shape, device="meta", dtype=dtype), False)
            for name, (shape, dtype) in forms.items()
        }
        whole = _with_parameters(self._plain, dict(dict.fromkeys(self._plain._parameters), **places))
        is_assigned = local_metadata.get("assign_to_params_buffers", False)
        whole._load_from_state_dict(
            state_dict, prefix, {**local_metadata, "assign_to_params_buffers": True}, *args
        )
        for name in forms:
            first: Any = tiles[0].layer._parameters[name]
            loaded: Any = whole._parameters[name]
            if loaded is None or loaded is places[name]:  # missing, or of another shape: an error by now
                loaded = None
            elif isinstance(first, QuantizedTensor) and not isinstance(loaded, QuantizedTensor):
                # Tiles would get nested scales of their own, which could not be joined.
                loaded = quantize_parts(
                    loaded.detach(), first.quant_type, first.block_size, first.nested is not None
                )
            for i, tile in enumerate(tiles):
                rows: Any = tile.layer._parameters[name]
                if loaded is not None:
                    rows = loaded.detach()[tile.begin : tile.end]
                    rows = rows.clone() if is_assigned else rows
                state_dict[f"{prefix}{i}.layer.{name}"] = rows

    def extra_repr(self) -> str:
        return f"{self._form}, tiles={len(self._tiles())}"


class TiledLinear(TiledLayer):
    """A linear layer in tiles of output features. :func:`shoestring.tile_layers` makes it of a layer.

    Args:
        layer: an ``nn.Linear`` or :class:`QuantizedLinear`.
        tiles: the number of tiles.

    Example:
        >>> head = shoestring.nn.TiledLinear(torch.nn.Linear(64, 1000), 4)
        >>> head(torch.randn(2, 64)).shape
        torch.Size([2, 1000])
        >>> head.cross_entropy(torch.randn(2, 64), torch.tensor([3, 999])).shape
        torch.Size([])
        >>> head.whole()
        Linear(in_features=64, out_features=1000, bias=True)
    """

    def __init__(self, layer: nn.Module, tiles: int) -> None:
        super().__init__(layer, tiles)
        self.in_features: int = layer.in_features  # type: ignore[assignment]
        self.out_features: int = layer.out_features  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """Return the output features (..., out_features) of x (..., in_features)."""
        return torch.cat(list(self._each(lambda tile, part: tile.layer(part), x)), -1)

    def _each(self, use: Callable[[Tile, Tensor], Any], x: Tensor) -> Iterator[Any]:
        """Yield ``use(tile, x)`` for each tile."""
        source = torch.ops.shoestring._tile_source(x)
        for tile in self._tiles():
            yield tile(torch.ops.shoestring._tile_input(x, source), use)

    def cross_entropy(
        self,
        hidden: Tensor,
        target: Tensor,
        *,
        reduction: str = "mean",
        ignore_index: int = -100,
        z_loss: float = 0.0,
        softcap: float = 0.0,
        logit_scale: float = 1.0,
        workspace_mb: int = 0,
    ) -> Tensor:
        """Compute :func:`shoestring.linear_cross_entropy` of this output layer, tile by tile.

        Forward and backward read each tile once. Logits are in memory in parts of ``workspace_mb`` alone.

        Args:
            hidden: (..., features).
            target: (...), int64, classes or ``ignore_index``.
            reduction: "mean", "sum" or "none".
            ignore_index, z_loss, softcap, logit_scale, workspace_mb: as for ``linear_cross_entropy``.

        Returns:
            A scalar, or the shape of target for ``reduction="none"``; fp32 (fp64 for fp64).

        Raises:
            ValueError: the reduction is unknown.
            IndexError: a target is no class. On CUDA this is a device-side assertion.
        """
        if reduction not in REDUCTIONS:
            raise InputError(
                f"cross_entropy: reduction: expected one of {', '.join(REDUCTIONS)}, received {reduction!r}"
            )
        counted = target != ignore_index
        is_class = ((target >= 0) & (target < self.out_features) | ~counted).all()
        message = f"cross_entropy: target: expected classes in [0, {self.out_features}) or {ignore_index}"
        if is_asynchronous(is_class.device):
            torch._assert_async(is_class, message)
        elif not is_class:
            raise IndexError(message)

        def use(tile: Tile, x: Tensor) -> Any:
            layer: Any = tile.layer
            return torch.ops.shoestring._linear_cross_entropy_shard(
                hidden=x,
                target=target,
                bias=layer.bias,
                first_class=tile.begin,
                ignore_index=ignore_index,
                softcap=softcap,
                logit_scale=logit_scale,
                workspace_mb=workspace_mb,
                **weight_arguments(layer.weight),
            )

        lse, target_loss = map(torch.stack, zip(*self._each(use, hidden), strict=True))
        here = torch.stack([(target >= tile.begin) & (target < tile.end) & counted for tile in self._tiles()])
        losses, _ = loss_of_shards(
            lse, target_loss, here, lse.detach().amax(0), z_loss, lambda terms: terms.sum(1)
        )
        losses = losses.masked_fill(~counted, 0)
        if reduction == "none":
            return losses
        return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


class TiledEmbedding(TiledLayer):
    """An embedding in tiles of tokens. :func:`shoestring.tile_layers` makes it of an embedding.

    Args:
        layer: an ``nn.Embedding``.
        tiles: the number of tiles.

    Example:
        >>> embedding = shoestring.nn.TiledEmbedding(torch.nn.Embedding(1000, 64), 4)
        >>> embedding(torch.tensor([[3, 999]])).shape
        torch.Size([1, 2, 64])
    """

    def __init__(self, layer: nn.Module, tiles: int) -> None:
        super().__init__(layer, tiles)
        self.num_embeddings: int = layer.num_embeddings  # type: ignore[assignment]
        self.embedding_dim: int = layer.embedding_dim  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows (..., embedding_dim) of tokens (...)."""

        def use(tile: Tile, y: Tensor | None) -> Tensor:
            """Replace the rows of the tile's tokens in ``y``."""
            layer: Any = tile.layer
            numbers = tokens - tile.begin
            # A token that no tile has is one of the first or the last tile, where F.embedding raises an error.
            is_here = torch.full_like(tokens, True, dtype=torch.bool) if tile.begin == 0 else numbers >= 0
            if tile.end < self.num_embeddings:
                is_here = is_here & (tokens < tile.end)
            padding = layer.padding_idx
            if padding is not None:
                padding = padding - tile.begin if tile.begin <= padding < tile.end else None
            rows = F.embedding(numbers.where(is_here, 0), layer.weight, padding)
            return rows if y is None else rows.where(is_here[..., None], y)

        y: Any = None
        for tile in self._tiles():
            y = tile(y, use)
        result: Tensor = y
        return result


def _with_parameters(layer: nn.Module, parameters: dict[str, nn.Parameter | None]) -> Any:
    """Return a shallow copy of a layer with other parameters, and with the sizes that these have."""
    part = copy.copy(layer)
    part.__dict__["_parameters"] = parameters
    weight = parameters["weight"]
    if weight is not None:
        name = "num_embeddings" if isinstance(layer, nn.Embedding) else "out_features"
        setattr(part, name, weight.shape[0])
    return part


def _begins(weight: Tensor, tiles: int) -> list[int]:
    """Return the rows at which the tiles of a weight begin, and the number of rows."""
    # 256 nested scales of a quantised weight share a scale.
    is_nested = isinstance(weight, QuantizedTensor) and weight.nested is not None and weight.absmax.dim() == 2
    columns = weight.absmax.shape[1] if is_nested else weight.shape[1]  # type: ignore[attr-defined]
    begins: list[int] = torch.ops.shoestring._tile_rows(weight.shape[0], columns, tiles)
    return begins


def check_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Raise InputError unless a layer can be split into tiles."""
    what = f"tile_layers: layers: {name}: expected"
    weight: Any = getattr(layer, "weight", None)
    if type(layer) not in (nn.Linear, QuantizedLinear, nn.Embedding):
        raise InputError(
            f"{what} torch.nn.Linear, shoestring.nn.QuantizedLinear or torch.nn.Embedding, received "
            f"{type(layer).__module__}.{type(layer).__name__}"
        )
    if isinstance(layer, nn.Embedding):
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(layer, option):
                raise InputError(f"{what} an embedding without {option}, received {getattr(layer, option)}")
    if is_away(weight):
        raise InputError(
            f"{what} a weight on its device, received one that is away; tile before offload_weights"
        )
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        raise InputError(f"{what} a layer without hooks, received one with; register them after tile_layers")
    for other_name, other in model.named_modules():
        if other is not layer and any(
            p is q for p in other._parameters.values() for q in layer._parameters.values() if q is not None
        ):
            raise InputError(
                f"{what} a weight of its own, received one that {other_name} has, too; untie the weights first"
            )


def check_tiles(name: str, layer: nn.Module, tiles: int) -> None:
    """Raise InputError unless a layer has rows for so many tiles, and can be split between them."""
    weight: Any = layer.weight
    if not 1 <= tiles <= weight.shape[0]:
        raise InputError(
            f"tile_layers: tiles: expected 1 to the rows of {name} ({weight.shape[0]}), received {tiles}"
        )
    if isinstance(weight, QuantizedTensor):
        try:
            for begin, end in itertools.pairwise(_begins(weight, tiles)):
                weight.detach()[begin:end]
        except ValueError as error:
            raise InputError(
                f"tile_layers: layers: {name}: expected a weight whose rows can be split into {tiles} tiles: {error}"
            ) from error
