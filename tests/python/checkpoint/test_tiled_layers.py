"""Test that layers in tiles compute, train and save what whole layers do, with two tiles on the device at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring import offload_weights, tile_layers
from shoestring.checkpoint import tiled_layers, weights
from shoestring.checkpoint.measure import metered
from shoestring.nn import QuantizedLinear
from shoestring.optim import SGD, AdamW

pytestmark = pytest.mark.usefixtures("small_weights_leave")

TILES = [1, 2, 3]


def whole_numbers(*shape: int) -> Tensor:
    """Return whole numbers, whose products and sums are exact in any order."""
    return torch.randint(-3, 4, shape).float()


def quantised(layer: nn.Linear, quant_type: str) -> QuantizedLinear:
    double = quant_type == "nf4, nested"
    return QuantizedLinear.from_linear(layer, quant_type.split(",")[0], double_quant=double)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("kind", ["frozen", "trained", "nf4", "nf4, nested", "int4", "int8"])
def test_linear(kind: str, tiles: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Errors of results and gradients are at most those of the whole layer, and the rounding of each tile."""
    torch.manual_seed(0)
    layer: nn.Module = nn.Linear(512, 200, dtype=dtype)
    if kind not in ("frozen", "trained"):
        layer = quantised(layer, kind)  # type: ignore[arg-type]
    layer.requires_grad_(kind == "trained")
    exact = nn.Linear(512, 200, dtype=torch.float64)
    with torch.no_grad():
        weight: Any = layer.weight
        exact.weight.copy_(weight if kind in ("frozen", "trained") else weight.dequantize())
        exact.bias.copy_(layer.bias)  # type: ignore[arg-type]
    model = nn.Sequential(copy.deepcopy(layer))
    optimizer = None
    tile_layers(model, "0", tiles=tiles)
    if kind == "trained":
        optimizer = AdamW(model.parameters(), lr=0.0, weight_decay=0.0, step_in_backward=True)
        seen: dict[int, Tensor] = {}
        for i, p in enumerate(tile.layer.weight for tile in model[0].children()):
            p.register_hook(lambda grad, i=i: seen.__setitem__(i, grad.clone()))
    handle = offload_weights(model, f"nvme:{tmp_path}", optimizer=optimizer)
    x = torch.randn(2, 3, 512, dtype=dtype)
    gradient = torch.randn(2, 3, 200, dtype=dtype)

    def run(module: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        leaf = x.to(dtype, copy=True).requires_grad_()
        y = module(leaf * 1)
        y.backward(gradient.to(dtype))
        assert leaf.grad is not None
        return y.detach(), leaf.grad

    results, plain, best = run(model, dtype), run(layer, dtype), run(exact, torch.float64)
    for ours, theirs, value in zip(results, plain, best, strict=True):
        rounding = (tiles + 1) * torch.finfo(dtype).eps / 2 * value.abs().max()
        assert (ours - value).abs().max() <= 1.5 * (theirs - value).abs().max() + rounding
    if kind == "trained":
        grads = torch.cat([seen[i] for i in range(tiles)])
        assert isinstance(layer.weight.grad, Tensor) and exact.weight.grad is not None
        error = (layer.weight.grad - exact.weight.grad).abs().max()
        eps = torch.finfo(dtype).eps * exact.weight.grad.abs().max()
        assert (grads - exact.weight.grad).abs().max() <= 1.5 * error + eps
    assert handle.statistics()["fetched"] > 0


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_steps_have_the_same_bits(tiles: int, has_gradient: bool, tmp_path: Path) -> None:
    """Gradients of whole numbers are exact, so 8-bit steps of whole and tiled layers must be equal."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 100, bias=False)
    model = nn.Sequential(copy.deepcopy(layer))
    tile_layers(model, [nn.Linear], tiles=tiles)
    options: dict[str, Any] = {"lr": 1e-2, "state_format": "8bit", "step_in_backward": True}
    plain, ours = AdamW(layer.parameters(), **options), AdamW(model.parameters(), **options)
    handle = offload_weights(model, f"nvme:{tmp_path}", optimizer=ours)
    gradient = whole_numbers(6, 100)
    for _ in range(3):
        x = whole_numbers(6, 64).requires_grad_(has_gradient)
        for module, optimizer in ((layer, plain), (model, ours)):
            (module(x) * gradient).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model.state_dict()["0.weight"], layer.weight)
    assert (handle.statistics()["written"] > 0) == (tiles > 2)  # two stay
    handle.undo()


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize(
    ("columns", "rows", "tiles"),
    [(37, 53, 4), (33, 7, 7), (1, 9, 2), (1024, 2500, 2)],
    ids=["odd", "one row each", "one column", "more bytes than one read"],
)
def test_sizes(
    columns: int, rows: int, tiles: int, trained: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Layers of whole numbers have equal bits in any order of the sums."""
    monkeypatch.setattr(weights, "LEAST", 1)
    torch.manual_seed(0)
    layer = nn.Linear(columns, rows).requires_grad_(trained)
    with torch.no_grad():
        layer.weight.copy_(whole_numbers(rows, columns))
        layer.bias.copy_(whole_numbers(rows))
    model = nn.Sequential(copy.deepcopy(layer))
    tile_layers(model, "0", tiles=tiles)
    plain = ours = None
    if trained:
        options: dict[str, Any] = {"lr": 1.0, "momentum": 0.5, "state_format": "fp32"}
        plain, ours = (SGD(m.parameters(), step_in_backward=True, **options) for m in (layer, model))
    handle = offload_weights(model, f"nvme:{tmp_path}", optimizer=ours)
    x, gradient = whole_numbers(3, columns), whole_numbers(3, rows)
    for _ in range(2):
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        results = [module(leaf * 1) for module, leaf in zip((layer, model), inputs, strict=True)]
        assert torch.equal(*results)
        for result, optimizer in zip(results, (plain, ours), strict=True):
            (result * gradient).sum().backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        assert inputs[0].grad is not None and torch.equal(inputs[0].grad, inputs[1].grad)
    assert (handle.statistics()["written"] > 0) == (trained and tiles > 2)  # two stay
    handle.undo()
    assert torch.equal(model.state_dict()["0.weight"], layer.weight)
    assert torch.equal(model.state_dict()["0.bias"], layer.bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_a_16_bit_input_is_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=False, dtype=dtype)).requires_grad_(False)
    weight, gradient = model[0].weight, torch.randn(32, 128, dtype=dtype)
    tile_layers(model, "0", tiles=8)
    offload_weights(model, f"nvme:{tmp_path}")
    x = torch.randn(32, 64, dtype=dtype, requires_grad=True)
    model(x * 1).backward(gradient)
    parts = [gradient[:, i : i + 16] @ weight[i : i + 16] for i in range(0, 128, 16)]
    expected = torch.stack(parts).double().sum(0).to(dtype)
    assert x.grad is not None and (x.grad != expected).float().mean() < 0.01


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_that_are_not_finite(dtype: torch.dtype, where: str, value: float, tmp_path: Path) -> None:
    layer = nn.Linear(32, 96, dtype=dtype).requires_grad_(False)
    tensors = {
        "input": whole_numbers(4, 32).to(dtype),
        "weight": layer.weight.copy_(whole_numbers(96, 32)),
        "gradient": whole_numbers(4, 96).to(dtype),
    }
    layer.bias.zero_()
    tensors[where][2, 5] = value
    model = nn.Sequential(copy.deepcopy(layer))
    tile_layers(model, "0", tiles=3)
    offload_weights(model, f"nvme:{tmp_path}")
    results = []
    for module in (layer, model):
        leaf = tensors["input"].clone().requires_grad_()
        y = module(leaf * 1)
        y.backward(tensors["gradient"])
        results.append((y, leaf.grad))
    assert not all(theirs.isfinite().all() for theirs in results[0])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_autocast(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 96).requires_grad_(False)
    model = nn.Sequential(copy.deepcopy(layer))
    tile_layers(model, "0", tiles=3)
    offload_weights(model, f"nvme:{tmp_path}")
    x = torch.randn(4, 64)
    results = []
    for module in (layer, model):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = module(leaf * 1)
        y.sum().backward()
        results.append((y, leaf.grad))
    assert results[1][0].dtype == torch.bfloat16
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


class Gated(nn.Module):
    """A block with two large layers of one input, and one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.gate, self.up, self.down = nn.Linear(64, 512), nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        y: Tensor = x + self.down(torch.relu(self.gate(x)) * self.up(x))
        return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_two_tiles_are_on_the_device(
    trained: bool, checkpointed: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), *(Gated() for _ in range(3))).to(dtype)
    whole = copy.deepcopy(model)
    for block in model[1:]:
        block.requires_grad_(trained)
    whole.requires_grad_(True)
    tile_layers(model, ["[123].gate", "[123].up", "[123].down"], tiles=8)
    optimizer = (
        AdamW(model.parameters(), lr=0.0, weight_decay=0.0, step_in_backward=True) if trained else None
    )
    handle = offload_weights(
        model, f"nvme:{tmp_path}", blocks=["1", "2", "3"], optimizer=optimizer, tables=()
    )
    most = 0

    def watch(*_: Any) -> None:
        nonlocal most
        most = max(most, handle.statistics()["device"])

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(watch)
            module.weight.register_hook(watch) if module.weight.requires_grad else None
    if checkpointed:
        shoestring.checkpoint_model(model, blocks=["1", "2", "3"])
    x = torch.randn(4, 64, dtype=dtype)
    results = []
    for module in (model, whole):
        y = module(x)
        grads = torch.autograd.grad(
            y.float().square().sum(), list(module[0].parameters()), retain_graph=False
        )
        results.append((y, *grads))
    tolerance = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 0.3}
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)
    if trained:
        model(x).float().square().sum().backward()
    # A tile has 64 x 64 elements and a part of the bias, in whole pages; `first` has as many.
    tile = 64 * 64 * dtype.itemsize + 2 * 4096
    assert 0 < most <= (3 if trained else 2) * tile


def test_memory_is_that_of_two_tiles(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 4096, bias=False)).requires_grad_(False)
    size = model[0].weight.nbytes
    tile_layers(model, "0", tiles=16)
    offload_weights(model, f"nvme:{tmp_path}")
    x = torch.randn(2, 256)
    with torch.no_grad():
        model(x)
    with metered() as meter:
        x.requires_grad_()
        model(x * 1).sum().backward()
        assert meter.peak() <= 3 * size / 16 + 10 * 2 * 4096 * 4


@pytest.mark.parametrize("away", [False, True], ids=["here", "away"])
@pytest.mark.parametrize("kind", ["dense", "nf4", "nf4, nested", "int4", "int8", "embedding"])
def test_state_dict_is_that_of_the_whole_layer(kind: str, away: bool, tmp_path: Path) -> None:
    def made(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        if kind == "embedding":
            return nn.Sequential(nn.Embedding(100, 64, padding_idx=3)).requires_grad_(False)
        layer = nn.Linear(512, 200)
        return nn.Sequential(layer if kind == "dense" else quantised(layer, kind)).requires_grad_(False)

    whole, other = made(0), made(1)
    model = copy.deepcopy(whole)
    tiled = tile_layers(model, "0", tiles=3)
    handle = offload_weights(model, f"nvme:{tmp_path}") if away else None

    def check(expected: nn.Module) -> None:
        state, plain = model.state_dict(), expected.state_dict()
        assert list(state) == list(plain)
        assert all(torch.equal(state[key], plain[key]) for key in plain)

    check(whole)
    assert f"{whole[0].extra_repr()}, tiles=3" in repr(model)
    assert not model.load_state_dict(other.state_dict()).missing_keys
    check(other)
    if kind not in ("dense", "embedding"):
        dense = nn.Sequential(nn.Linear(512, 200)).state_dict()
        whole.load_state_dict(dense)  # quantises the weight
        model.load_state_dict(dense)
        check(whole)
        model.load_state_dict(other.state_dict())
    state = other.state_dict()
    state["0.more"] = state.pop("0.weight")
    with pytest.raises((RuntimeError, ValueError)) as error_of_whole:
        whole.load_state_dict(state)
    with pytest.raises(error_of_whole.type) as error:
        model.load_state_dict(state)
    assert "0.weight" in str(error.value) and str(error.value) == str(error_of_whole.value)
    check(other)
    if handle is not None:
        with pytest.raises(ValueError, match=r"TiledLayers.undo: model: expected weights on their device"):
            tiled.undo()
        handle.undo()
    tiled.undo()
    assert type(model[0]) is type(other[0]) and repr(model) == repr(other)
    check(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize(
    ("rows", "columns", "state"), [(100, 64, "8bit"), (53, 37, "fp32"), (3, 700, "fp32")]
)
def test_embedding(
    rows: int, columns: int, state: str, tiles: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(rows, columns, padding_idx=rows * 2 // 3, dtype=dtype))
    model = copy.deepcopy(whole)
    tile_layers(model, "0", tiles=tiles)
    options: dict[str, Any] = {"lr": 1e-2, "state_format": state, "step_in_backward": True}
    plain, ours = AdamW(whole.parameters(), **options), AdamW(model.parameters(), **options)
    handle = offload_weights(model, f"nvme:{tmp_path}", optimizer=ours)
    for step in range(3):
        tokens, gradient = torch.randint(0, rows, (2, 30)), whole_numbers(2, 30, columns).to(dtype)
        gradient[0, 0, 0] = float("nan") if step == 2 else 0  # changes one row alone
        results = [module(tokens) for module in (whole, model)]
        assert torch.equal(*results)
        for result, optimizer in zip(results, (plain, ours), strict=True):
            (result * gradient).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    handle.undo()
    torch.testing.assert_close(
        model.state_dict()["0.weight"], whole[0].weight.detach(), rtol=0, atol=0, equal_nan=True
    )
    for token in (-1, rows):
        with pytest.raises(IndexError):
            model(torch.tensor([token]))
    assert model(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, columns)


@pytest.mark.parametrize("kind", ["frozen", "trained", "nf4"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("tiles", TILES)
def test_head(tiles: int, reduction: str, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    head: Any = nn.Linear(64, 300).requires_grad_(kind == "trained")
    head = quantised(head, kind) if kind == "nf4" else head
    model = nn.ModuleDict({"head": copy.deepcopy(head)})
    tile_layers(model, "head", tiles=tiles)
    optimizer = (
        AdamW(model.parameters(), lr=0.0, weight_decay=0.0, step_in_backward=True)
        if kind == "trained"
        else None
    )
    seen = {}
    if kind == "trained":
        for i, tile in enumerate(model["head"].children()):
            tile.layer.weight.register_hook(lambda grad, i=i: seen.__setitem__(i, grad.clone()))
    handle = offload_weights(model, f"nvme:{tmp_path}", optimizer=optimizer)
    target = torch.randint(0, 300, (2, 7))
    target[0, 2] = -100
    x = torch.randn(2, 7, 64)
    options: dict[str, Any] = {"reduction": reduction, "z_loss": 1e-2, "softcap": 5.0, "logit_scale": 0.7}
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = model["head"].cross_entropy(ours * 1, target, **options)
    expected = shoestring.linear_cross_entropy(theirs, head.weight, target, head.bias, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    if kind == "trained":
        torch.testing.assert_close(
            torch.cat([seen[i] for i in range(tiles)]), head.weight.grad, rtol=1e-4, atol=1e-5
        )
    size = max(tile.layer.weight.nbytes for tile in model["head"].children()) if kind != "nf4" else 1 << 20
    assert handle.statistics()["device"] <= 3 * (size + 2 * 4096)
    with pytest.raises(IndexError, match=r"cross_entropy: target: expected classes in \[0, 300\)"):
        model["head"].cross_entropy(x, target + 1000)
    with pytest.raises(ValueError, match="cross_entropy: reduction: expected one of mean, sum, none"):
        model["head"].cross_entropy(x, target, reduction="max")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tiles", [1, 4, 301])
@pytest.mark.parametrize("difference", [0, 300])
def test_head_compared_with_fp64(
    difference: float, tiles: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The exponential of a difference of 300 between logits of tiles overflows in fp32."""
    monkeypatch.setattr(weights, "LEAST", 1)
    torch.manual_seed(0)
    head = nn.Linear(40, 301, dtype=dtype).requires_grad_(False)
    head.bias[200:] += difference
    exact = copy.deepcopy(head).double()
    model = nn.ModuleDict({"head": copy.deepcopy(head)})
    tile_layers(model, "head", tiles=tiles)
    offload_weights(model, f"nvme:{tmp_path}")
    x, target = torch.randn(9, 40, dtype=dtype) * 4, torch.randint(0, 301, (9,))
    target[3] = -100
    ours, theirs, best = (x.to(t, copy=True).requires_grad_() for t in (dtype, dtype, torch.float64))
    losses = (
        model["head"].cross_entropy(ours * 1, target),
        shoestring.linear_cross_entropy(theirs, head.weight, target, head.bias),
        nn.functional.cross_entropy(exact(best), target),
    )
    for loss in losses:
        loss.backward()
    results = [(loss.detach(), leaf.grad) for loss, leaf in zip(losses, (ours, theirs, best), strict=True)]
    for mine, whole, value in zip(*results, strict=True):
        error = (mine - value).abs().max()
        eps = torch.finfo(torch.float32 if value.dim() == 0 else dtype).eps
        assert error <= 1.5 * (whole - value).abs().max() + 4 * eps * value.abs().max()


def test_heads_without_finite_losses(tmp_path: Path) -> None:
    head = nn.Linear(64, 300).requires_grad_(False)
    model = nn.ModuleDict({"head": copy.deepcopy(head)})
    tile_layers(model, "head", tiles=3)
    offload_weights(model, f"nvme:{tmp_path}")
    x, target = torch.randn(4, 64), torch.randint(0, 300, (4,))
    none = torch.full_like(target, -100)
    for value, targets in ((float("nan"), target), (float("inf"), target), (0.0, none)):
        x[1, 2] = value
        for reduction in ("none", "mean"):
            ours = model["head"].cross_entropy(x, targets, reduction=reduction)
            theirs = shoestring.linear_cross_entropy(x, head.weight, targets, head.bias, reduction=reduction)
            torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_patched_models(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    ids = torch.randint(128, (2, 16))
    plain = transformers.LlamaForCausalLM(config)
    model = copy.deepcopy(plain)
    tile_layers(model, "model.layers.*.mlp.*_proj", tiles=4)
    shoestring.patch(model)
    trained = [AdamW(m.parameters(), lr=1e-2, step_in_backward=True) for m in (plain, model)]
    handle = offload_weights(model, f"nvme:{tmp_path}", optimizer=trained[1])
    for _ in range(3):
        losses = [m(input_ids=ids, labels=ids, use_cache=False).loss for m in (plain, model)]
        torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
        for loss, optimizer in zip(losses, trained, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert handle.statistics()["written"] > 0 and model.state_dict().keys() == plain.state_dict().keys()
    for name, message in (("lm_head", "TiledLinear; expected"), ("model.embed_tokens", "TiledEmbedding")):
        model = copy.deepcopy(plain)
        tile_layers(model, name, tiles=4)
        with pytest.raises(TypeError, match=f"shoestring.patch: .*{message}"):
            shoestring.patch(model)


def test_weights_are_made_tile_by_tile(tmp_path: Path) -> None:
    """A layer on the meta device is never in memory as a whole."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 512)).requires_grad_(False)
    tile_layers(model, "0", tiles=4)

    def make(tile: nn.Module) -> None:
        tile.to_empty(device="cpu")
        for p in tile.parameters():
            p.fill_(1)

    handle = offload_weights(model, f"nvme:{tmp_path}", param_init_fn=make)
    assert torch.equal(model(torch.ones(2, 64)), torch.full((2, 512), 65.0))
    assert handle.statistics()["away"] == 4 * 128 * 64 * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Conv2d(8, 8, 1), r"or torch.nn.Embedding, received torch.nn.modules.conv.Conv2d"),
        (lambda: nn.Embedding(9, 8, sparse=True), "expected an embedding without sparse, received True"),
        (lambda: nn.Embedding(9, 8, max_norm=1.0), "expected an embedding without max_norm, received 1.0"),
        (lambda: nn.Linear(8, 2), r"tiles: expected 1 to the rows of 0 \(2\), received 3"),
        (
            lambda: quantised(nn.Linear(40, 8), "nf4"),
            "expected a weight whose rows can be split into 3 tiles",
        ),
    ],
)
def test_refused_layers(make: Callable[[], nn.Module], message: str) -> None:
    model = nn.Sequential(make(), nn.Linear(8, 8))
    before = list(model.children())
    with pytest.raises(ValueError, match=f"tile_layers: .*{message}"):
        tile_layers(model, ["1", "0"], tiles=3)
    assert list(model.children()) == before


def test_layers_with_the_rows_of_a_tile() -> None:
    """The largest tile has at most so many rows, and a tile fewer would have more; the result gives the same tiles."""
    model = nn.Sequential(nn.Linear(37, 53), nn.Embedding(1000, 64)).requires_grad_(False)
    for rows in (1, 5, 26, 27, 52, 53, 99):
        handle = tile_layers(model, {"0": rows, "1": 2 * rows})
        found = tiled_layers.tiled_rows(model)
        assert handle.names == ["0", "1"] and found["0"] <= rows and found["1"] <= 2 * rows
        counts = [len(list(layer.children())) for layer in model]
        handle.undo()
        for layer, most, count in zip(model, (rows, 2 * rows), counts, strict=True):
            assert count == 1 or max(tiled_layers.rows_of_tiles(layer, count - 1)) > most
        again = tile_layers(model, found)
        assert [len(list(layer.children())) for layer in model] == counts
        again.undo()
    assert tile_layers(model, {}).names == []
    for layers, tiles, message in (
        (
            {"0": 5},
            2,
            "tiles: expected the number of tiles, or layers with the rows of a tile, received both",
        ),
        (
            "0",
            None,
            "tiles: expected the number of tiles, or layers with the rows of a tile, received neither",
        ),
        ({"0": 0}, None, "layers: expected at least 1 row of a tile, received 0"),
        ({"*": 5}, None, r"layers: '\[\*\]' matches no module of Sequential"),
    ):
        with pytest.raises(ValueError, match=f"^tile_layers: {message}"):
            tile_layers(model, layers, tiles=tiles)  # type: ignore[arg-type]


def test_refused_models(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(100, 64), "head": nn.Linear(64, 100, bias=False)})
    model["head"].weight = model["embed"].weight
    with pytest.raises(ValueError, match="expected a weight of its own, received one that embed has, too"):
        tile_layers(model, "head", tiles=2)
    with pytest.raises(ValueError, match="tile_layers: layers: 'none' matches no module of ModuleDict"):
        tile_layers(model, "none", tiles=2)
    handle = model["head"].register_forward_hook(lambda *_: None)
    model["embed"].weight = nn.Parameter(torch.randn(100, 64))
    with pytest.raises(ValueError, match="head: expected a layer without hooks"):
        tile_layers(model, "head", tiles=2)
    handle.remove()
    blocks = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    offload_weights(blocks, f"nvme:{tmp_path}", blocks=["0", "1"])
    with pytest.raises(ValueError, match="0: expected a weight on its device, received one that is away"):
        tile_layers(blocks, "0", tiles=2)
    with pytest.raises(ValueError, match="tiled_features: weights: .* away. Split its layer by tile_layers"):
        shoestring.tiled_features(
            nn.functional.linear, torch.ones(1, 64), [(blocks[0].weight, 0)], tiles=2, combine="cat"
        )
