"""Test that models whose weights are in a file compute, train and save the same bits as models in memory."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoestring
from offload_faults import disturb_offload
from offloaded_llama import LAYERS, batch, llama
from shoestring import OffloadedWeights, offload_weights
from shoestring.checkpoint import tiled_layers
from shoestring.optim import AdamW

pytestmark = pytest.mark.usefixtures("small_weights_leave")


def adapters(quantize: str | None) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        shoestring.lora.apply(model, rank=4, quantize=quantize)

    return prepare


def patched(model: nn.Module) -> None:
    shoestring.patch(model)


def checkpointed(reentrant: bool) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()

    return prepare


def together(*prepare: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    return lambda model: [one(model) for one in prepare] and None


CASES: dict[str, tuple[Callable[[nn.Module], Any], dict[str, Any] | None]] = {
    "lora": (adapters(None), None),
    "qlora nf4": (adapters("nf4"), None),
    "qlora int4, patched": (together(adapters("int4"), patched), None),
    "qlora int8": (adapters("int8"), None),
    "qlora, checkpoints": (together(adapters("nf4"), patched, checkpointed(False)), None),
    "qlora, reentrant": (together(adapters("nf4"), checkpointed(True)), None),
    "full": (lambda model: None, {"state_format": "8bit"}),
    "full, patched": (patched, {"state_format": "4bit", "weight_rounding": "remainder"}),
    "full, checkpoints": (together(patched, checkpointed(False)), {"weight_rounding": "stochastic"}),
    "full, streamed state": (patched, {"offload": "stream", "weight_rounding": "remainder"}),
}


def train(case: str, dtype: torch.dtype, to: str | None, keep: int = 0, steps: int = 3) -> tuple[Any, ...]:
    prepare, options = CASES[case]
    model = llama(dtype)
    prepare(model)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = AdamW(params, lr=1e-3, step_in_backward=options is not None, **(options or {}))
    handle = None
    if to is not None:
        handle = offload_weights(model, to, keep=keep, optimizer=optimizer if options is not None else None)
    losses = []
    for step in range(steps):
        x = batch(step)
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(model.eval()(input_ids=x, labels=x).loss.item())
    state = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    return losses, state, handle


def assert_same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for key in one:
        assert torch.equal(one[key], two[key]), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_training_has_the_same_bits(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if dtype == torch.float32 and "weight_rounding" in (CASES[case][1] or {}):
        pytest.skip("weight_rounding is for 16-bit weights")
    losses, state, _ = train(case, dtype, None)
    received, trained, handle = train(case, dtype, f"nvme:{tmp_path}")
    assert received == losses
    assert_same(trained, state)
    figures = handle.statistics()
    assert (figures["written"] > 0) == case.startswith("full")
    assert figures["fetched"] > 0 and figures["device"] < figures["away"]


def test_two_blocks_are_on_the_device(tmp_path: Path) -> None:
    sizes = []
    for layers in (4, 12):
        model = llama(layers=layers).requires_grad_(False)
        handle = offload_weights(model, f"nvme:{tmp_path}", tables=())
        block = handle.statistics()["away"] // layers
        most = 0

        def watch(*_: Any) -> None:
            nonlocal most
            most = max(most, handle.statistics()["device"])

        for layer in model.model.layers:
            layer.mlp.register_forward_hook(watch)
        x = batch(0)
        for _ in range(2):
            model(input_ids=x)
        assert most == 2 * block
        sizes.append(handle.statistics()["host"])
    # The file is written through memory of at most 16 MiB.
    assert sizes[0] == sizes[1] <= 3 * block


def test_blocks_that_stay_are_never_fetched(tmp_path: Path) -> None:
    model = llama().requires_grad_(False)
    x = batch(0)
    expected = model(input_ids=x).logits
    handle = offload_weights(model, f"nvme:{tmp_path}", tables=())
    one = handle.statistics()["away"] // LAYERS
    handle.undo()
    handle = offload_weights(model, f"nvme:{tmp_path}", keep=3 * one + 4095, tables=())
    assert handle.statistics()["away"] == 2 * one
    assert model.model.layers[2].mlp.up_proj.weight.data_ptr() and not handle.statistics()["fetched"]
    assert torch.equal(model(input_ids=x).logits, expected)
    handle.undo()
    handle = offload_weights(model, f"nvme:{tmp_path}", keep=1 << 40, tables=())
    assert handle.statistics()["away"] == 0
    assert torch.equal(model(input_ids=x).logits, expected) and handle.statistics()["fetched"] == 0


def test_the_last_two_blocks_stay_where_the_direction_turns(tmp_path: Path) -> None:
    """Forward and backward fetch all blocks but two each, also in the micro-batches of one step."""
    model = llama()
    adapters("nf4")(model)
    handle = offload_weights(model, f"nvme:{tmp_path}", tables=())
    block = handle.statistics()["away"] // LAYERS
    for micro in range(3):
        x = batch(micro)
        model(input_ids=x, labels=x).loss.backward()
        assert handle.statistics()["fetched"] == block * (2 + (micro + 1) * 2 * (LAYERS - 2))


def test_evaluation_and_generation(tmp_path: Path) -> None:
    model = llama().eval()
    model.config.use_cache = True
    x = batch(0)[:1]
    expected = model.generate(x, max_new_tokens=8, do_sample=False)
    offload_weights(model.requires_grad_(False), f"nvme:{tmp_path}")
    assert torch.equal(model.generate(x, max_new_tokens=8, do_sample=False), expected)


@pytest.mark.parametrize("patch", [False, True], ids=["", "patched"])
@pytest.mark.parametrize("quant_type", ["nf4", "int4", "int8"])
def test_a_model_is_loaded_into_the_file(quant_type: str, patch: bool, tmp_path: Path) -> None:
    """Adapters on a model that was never in memory train to the bits of those on a model in memory."""
    llama(torch.bfloat16).save_pretrained(tmp_path / "model")
    results = []
    for to in (None, f"nvme:{tmp_path}"):
        model = shoestring.load_quantized(tmp_path / "model", quant_type=quant_type, to=to)
        model.train()
        if patch:
            shoestring.patch(model)
        torch.manual_seed(1)
        shoestring.lora.apply(model, rank=4)
        optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        losses = []
        for step in range(3):
            loss = model(input_ids=batch(step), labels=batch(step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((losses, {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}))
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])
    figures = OffloadedWeights.of(model).statistics()
    assert figures["device"] < figures["away"]
    with pytest.raises(ValueError, match="load_quantized: keep: expected 0 without to, received 5"):
        shoestring.load_quantized(tmp_path / "model", keep=5)
    with pytest.raises(
        ValueError, match="OffloadedWeights: model: expected one with offloaded weights, received"
    ):
        OffloadedWeights.of(nn.Linear(2, 2))


@pytest.mark.parametrize("quant_type", ["nf4", "int8"])
def test_layers_are_loaded_into_the_file_tile_by_tile(quant_type: str, tmp_path: Path) -> None:
    llama(torch.bfloat16).save_pretrained(tmp_path / "model")
    load = functools.partial(shoestring.load_quantized, tmp_path / "model", quant_type=quant_type)
    whole = load()
    rows = whole.model.layers[0].mlp.up_proj.out_features // 2
    tiles = {f"model.layers.{i}.mlp.up_proj": rows for i in range(LAYERS)}
    model = load(to=f"nvme:{tmp_path}", tiles=tiles)
    assert tiled_layers.tiled_rows(model) == tiles
    states = [{k: v for k, v in m.state_dict().items() if isinstance(v, Tensor)} for m in (model, whole)]
    assert_same(*states)
    results = []
    for each in (whole, model):
        torch.manual_seed(1)
        shoestring.lora.apply(each.train(), rank=4, target_modules=["q_proj"])
        each.model.layers[0].self_attn.q_proj.lora_B["default"].data.fill_(0.01)
        loss = each(input_ids=batch(0), labels=batch(0)).loss
        loss.backward()
        results.append((loss, each.model.layers[1].self_attn.q_proj.lora_B["default"].grad))
    # Products in bf16 of other sizes may be rounded in another order.
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * theirs.detach().abs().max().item())
    figures = OffloadedWeights.of(model).statistics()
    assert figures["device"] < figures["away"] / 2
    for options, message in (
        ({"tiles": tiles}, "tiles: expected none without to, received model.layers.0.mlp.up_proj"),
        ({"tiles": {"lm_head": 5}, "to": "cpu"}, "tiles: expected names of linear layers of blocks, received lm_head"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^load_quantized: {message}"):
            load(**options)


def test_undo_gives_the_model_back(tmp_path: Path) -> None:
    model, x = llama(), batch(0)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    handle = offload_weights(model.requires_grad_(False), f"nvme:{tmp_path}")
    model(input_ids=x)
    handle.undo()
    del handle
    gc.collect()
    assert_same(dict(model.state_dict()), before)
    model.requires_grad_(True)
    model(input_ids=x, labels=x).loss.backward()
    with pytest.raises(
        ValueError,
        match="model: expected blocks with frozen weights of at least 1024 bytes, received weights that all",
    ):
        offload_weights(model, f"nvme:{tmp_path}")


def test_a_weight_that_is_away_cannot_be_read(tmp_path: Path) -> None:
    model = llama().requires_grad_(False)
    handle = offload_weights(model, f"nvme:{tmp_path}")
    weight = model.model.layers[3].mlp.up_proj.weight
    with pytest.raises(
        RuntimeError,
        match=r"offload_weights: model.layers.3: expected weights on cpu, received .* in a file: .* present",
    ):
        weight.sum()
    x = batch(0)
    before = model(input_ids=x).logits
    with handle.present(model.model.layers[3]):
        weight.mul_(2)
    after = model(input_ids=x).logits
    assert not torch.equal(before, after)
    with handle.present(model.model.layers[3]):
        weight.div_(2)
    assert torch.equal(model(input_ids=x).logits, before)
    with pytest.raises(
        ValueError,
        match="present: block: expected one of the 7 offloaded blocks and tables, received a LlamaRMSNorm",
    ):
        handle.present(model.model.norm).__enter__()
    with pytest.raises(
        RuntimeError, match="model.embed_tokens: expected weights on cpu, received some that are"
    ):
        model.model.embed_tokens.weight.sum()
    with handle.present(model.model.embed_tokens):
        assert model.model.embed_tokens.weight.isfinite().all()


def test_a_block_that_changes_again_while_it_is_written(tmp_path: Path) -> None:
    """Changes are kept if the block comes back before they are in the file, and changes once more."""
    model = llama().requires_grad_(False)
    handle = offload_weights(model, f"nvme:{tmp_path}")
    one, two, *rest = model.model.layers
    with handle.present(one):
        expected = one.mlp.up_proj.weight.clone()
    disturb_offload(5000)
    for _ in range(4):
        with handle.present(one):
            one.mlp.up_proj.weight.add_(1)
            expected.add_(1)
        with handle.present(two, changed=False):
            pass
    for layer in rest:
        with handle.present(layer):
            pass
    with handle.present(one, changed=False):
        assert torch.equal(one.mlp.up_proj.weight, expected)


def test_a_state_dict_is_loaded_where_weights_are(tmp_path: Path) -> None:
    one, two = llama(), llama()
    for p in two.parameters():
        p.data.normal_()
    offload_weights(one.requires_grad_(False), f"nvme:{tmp_path}")
    one.load_state_dict(two.state_dict())
    x = batch(0)
    assert torch.equal(one(input_ids=x).logits, two(input_ids=x).logits)
    assert_same(dict(one.state_dict()), dict(two.state_dict()))


def test_weights_that_blocks_share_stay(tmp_path: Path) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(3)))
    layers[0][1].weight = layers[2][1].weight
    head = nn.Linear(16, 16)
    head.weight = layers[1][0].weight
    model = nn.ModuleDict({"layers": layers, "head": head}).requires_grad_(False)
    offload_weights(model, f"nvme:{tmp_path}", blocks=["layers.*"])
    x = torch.randn(4, 16)
    assert model["head"](x).isfinite().all() and layers[0][1].weight.sum().isfinite()
    assert model["layers"](x).isfinite().all()


def test_checkpoint_of_a_part_of_a_block(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + checkpoint(lambda y: self.two(self.one(y).relu()), x, use_reentrant=False)

    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(*(Block() for _ in range(4))))
    model[1].requires_grad_(False)
    x = torch.randn(8, 32)
    model(x).sum().backward()
    expected = model[0].weight.grad.clone()
    model.zero_grad()
    offload_weights(model, f"nvme:{tmp_path}")
    model(x).sum().backward()
    assert torch.equal(model[0].weight.grad, expected)


@pytest.mark.parametrize("short", [False, True])
def test_delays_and_short_transfers_change_nothing(short: bool, tmp_path: Path) -> None:
    losses, state, _ = train("full, patched", torch.bfloat16, None)
    disturb_offload(2000, short_transfers=short)
    received, trained, _ = train("full, patched", torch.bfloat16, f"nvme:{tmp_path}")
    assert received == losses
    assert_same(trained, state)


def test_a_failed_read_is_an_error_and_the_step_can_be_repeated(tmp_path: Path) -> None:
    model, x = llama(), batch(0)
    expected = model(input_ids=x).logits
    offload_weights(model.requires_grad_(False), f"nvme:{tmp_path}")
    disturb_offload(0, 2, 5)
    with pytest.raises(
        RuntimeError, match=rf"offload_weights: {tmp_path}/.* cannot read \d+ bytes at \d+: Input/output"
    ):
        for _ in range(2):
            model(input_ids=x)
    disturb_offload()
    assert torch.equal(model(input_ids=x).logits, expected)


def test_a_failed_write_loses_no_weight(tmp_path: Path) -> None:
    _, state, _ = train("full", torch.float32, None)
    model = llama()
    optimizer = AdamW(model.parameters(), lr=1e-3, step_in_backward=True)
    handle = offload_weights(model, f"nvme:{tmp_path}", optimizer=optimizer)
    for step in range(3):
        x = batch(step)
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    before = model.state_dict()
    # Two blocks are in memory and count as changed. Room for a third one needs a write, and a read of its weights. One
    # of the two fails.
    for layer in model.model.layers[:2]:
        with handle.present(layer):
            pass
    disturb_offload(0, 1, 28)
    with pytest.raises(
        RuntimeError, match="cannot (read|write) .* bytes at .*: No space left on device; free some"
    ):
        for layer in model.model.layers[2:]:
            with handle.present(layer):
                pass
    disturb_offload()
    assert_same(dict(model.state_dict()), dict(before))
    assert_same(dict(model.state_dict()), state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "disk"}, "to: expected cpu or nvme:DIR, received 'disk'"),
        ({"to": "nvme:"}, "to: expected cpu or nvme:DIR, received 'nvme:'"),
        ({"to": "cpu"}, "to: expected nvme:DIR for weights on the CPU, received cpu"),
        ({"keep": -1}, "keep: expected a number of bytes of at least 0, received -1"),
        ({"to": "nvme:/nowhere"}, "/nowhere/.*No such file"),
        ({"blocks": ["no.*"]}, "blocks: 'no.*' matches no module of LlamaForCausalLM"),
    ],
)
def test_options(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = llama().requires_grad_(False)
    with pytest.raises((ValueError, RuntimeError), match=f"offload_weights: {message}"):
        offload_weights(model, **({"to": f"nvme:{tmp_path}"} | options))
    assert model.lm_head.weight.isfinite().all() and model(input_ids=batch(0)).logits.isfinite().all()


def test_optimizers_that_do_not_fit(tmp_path: Path) -> None:
    model = llama()
    for optimizer, message in [
        (torch.optim.AdamW(model.parameters()), "step_in_backward=True, received AdamW without it"),
        (AdamW(model.parameters()), "step_in_backward=True, received AdamW without it"),
        (AdamW(model.parameters(), step_in_backward=True, offload="cpu"), "expected offload=None"),
    ]:
        with pytest.raises(ValueError, match=f"offload_weights: optimizer: .*{message}"):
            offload_weights(model, f"nvme:{tmp_path}", optimizer=optimizer)
    offload_weights(model.requires_grad_(False), f"nvme:{tmp_path}")
    with pytest.raises(ValueError, match=r"offloaded already; call undo\(\) first"):
        offload_weights(model, f"nvme:{tmp_path}")
