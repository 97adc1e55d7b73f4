"""Test that no change of weights that offload_weights moves is lost: it is kept, or it is an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from offloaded_llama import LAYERS, batch, llama
from shoestring import offload_weights
from shoestring.optim import AdamW, Averages, ScheduleFreeAdamW, Unfreezing

pytestmark = pytest.mark.usefixtures("small_weights_leave")


def unfrozen(to: str | None, offload: str | None) -> dict[str, Any]:
    model = llama(layers=3)
    optimizer = AdamW(model.parameters(), lr=1e-2, step_in_backward=True, offload=offload)
    unfreezing = Unfreezing(model, {"lm_head*": 0, "model.layers.2.*": 1, "*": 2})
    if to is not None:
        offload_weights(model, to, optimizer=optimizer, tables=())
    for step in range(4):
        x = batch(step)
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        unfreezing.step()
    state: dict[str, Any] = model.state_dict()
    return state


@pytest.mark.parametrize("offload", [None, "stream"])
def test_weights_that_are_unfrozen_later_are_trained(offload: str | None, tmp_path: Path) -> None:
    expected, received = unfrozen(None, offload), unfrozen(f"nvme:{tmp_path}", offload)
    assert all(torch.equal(received[name], value) for name, value in expected.items())


def test_weights_that_nobody_steps_in_backward_stay_frozen(tmp_path: Path) -> None:
    model, x = llama(layers=3).requires_grad_(False), batch(0)
    offload_weights(model, f"nvme:{tmp_path}")
    expected = model(input_ids=x).logits
    weight = model.model.layers[1].mlp.up_proj.weight.requires_grad_()
    with pytest.raises(
        RuntimeError,
        match=r"layers.1: expected frozen weights, .* received one of shape \[176, 64\] that requires",
    ):
        model(input_ids=x)
    with torch.no_grad():
        assert torch.equal(model(input_ids=x).logits, expected)
    weight.requires_grad_(False)
    model.model.embed_tokens.weight.requires_grad_()
    with pytest.raises(ValueError, match="table: expected a frozen weight, as when it left, received one"):
        model(input_ids=x)
    model.model.embed_tokens.weight.requires_grad_(False)
    assert torch.equal(model(input_ids=x).logits, expected)


def test_no_write_outside_of_the_uses_of_a_block_is_lost(tmp_path: Path) -> None:
    """The last blocks that ran have not left yet, and a write to them is an error, too."""
    model, x = llama(layers=3), batch(0)
    optimizer = AdamW(model.parameters(), lr=1e-3, step_in_backward=True)
    offload_weights(model, f"nvme:{tmp_path}", optimizer=optimizer)
    model(input_ids=x, labels=x).loss.backward()
    for layer in model.model.layers:
        weight = layer.mlp.up_proj.weight
        for write in (lambda w: w.detach().mul_(2), lambda w: nn.init.zeros_(w), lambda w: w.data.fill_(1)):
            with pytest.raises(RuntimeError, match="expected weights on cpu, received some that are in a"):
                write(weight)


def test_a_change_in_forward_is_kept(tmp_path: Path) -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)
            self.seen = nn.Buffer(torch.zeros(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.seen.add_(x.mean())
                self.linear.weight.clamp_(-0.1, 0.1)
            y: Tensor = self.linear(x)
            return x + y

    states = []
    for to in (None, f"nvme:{tmp_path}"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(*(Codebook() for _ in range(4)))).requires_grad_(False)
        if to is not None:
            offload_weights(model, to)
        for step in range(3):
            model(torch.full((2, 32), float(step)))
        states.append(model.state_dict())
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


def parts_of(model: nn.Module) -> list[tuple[str, torch.dtype]]:
    return [(name, p.dtype) for name, p in (*model.named_parameters(), *model.named_buffers())]


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to(torch.bfloat16),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "meta": lambda m: m.to("meta"),
    "share_memory": lambda m: m.share_memory(),
    "of a wrapper": lambda m: nn.ModuleDict({"model": m}).double(),
    "of a block": lambda m: m.model.layers[1].double(),  # type: ignore[union-attr,index]
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_conversion_is_refused_before_it_changes_anything(conversion: str, tmp_path: Path) -> None:
    model, x = llama(layers=3).requires_grad_(False), batch(0)
    before, expected = parts_of(model), model(input_ids=x).logits
    handle = offload_weights(model, f"nvme:{tmp_path}")
    with pytest.raises(ValueError, match="offload_weights: to: expected no conversion of weights that are"):
        CONVERSIONS[conversion](model)
    assert parts_of(model) == before and torch.equal(model(input_ids=x).logits, expected)
    assert model.to("cpu", torch.float32) is model and model.float() is model  # these convert nothing
    handle.undo()
    assert model.double()(input_ids=x).logits.dtype == torch.float64


def test_weights_are_not_put_in_place_of_those_that_are_away(tmp_path: Path) -> None:
    model, other = llama(layers=3).requires_grad_(False), llama(layers=3)
    x = batch(0)
    expected = model(input_ids=x).logits
    offload_weights(model, f"nvme:{tmp_path}")
    state = {name: value + 1 for name, value in other.state_dict().items()}
    for module, prefix in ((model, ""), (model.model.layers[1], "model.layers.1.")):
        part = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        with pytest.raises(ValueError, match="load_state_dict: expected assign=False while weights are"):
            module.load_state_dict(part, assign=True)
    assert torch.equal(model(input_ids=x).logits, expected)


@pytest.mark.parametrize("place", ["forward", "backward", "block", "hook", "embedding", "present"])
def test_an_interrupt_leaves_no_block_on_the_device(place: str, tmp_path: Path) -> None:
    """Each Ctrl-C ends in another block, and afterwards two blocks are on the device, as without."""
    model, x = llama(), batch(0)
    shoestring.lora.apply(model, rank=4)
    expected = model(input_ids=x, labels=x).loss
    handle = offload_weights(model, f"nvme:{tmp_path}")
    layers, embedding = model.model.layers, model.model.embed_tokens
    block = (handle.statistics()["away"] - 2 * 512 * 64 * 4) // LAYERS

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for layer in layers:
        if place == "present":
            with pytest.raises(KeyboardInterrupt), handle.present(layer, changed=False):
                interrupt()
            continue
        module = embedding if place == "embedding" else layer if place == "block" else layer.mlp
        if place == "backward":
            hook = layer.mlp.down_proj.lora_A["default"].register_hook(interrupt)
        elif place == "hook":  # between the hook that brings the weights and the forward of the block
            hook = layer.register_forward_pre_hook(interrupt)
        else:
            hook = module.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=x, labels=x).loss.backward()
        hook.remove()
    model.zero_grad()
    if place == "embedding":
        assert embedding.weight.shape == (512, 64) and model.state_dict()["model.embed_tokens.weight"].any()
    loss = model(input_ids=x, labels=x).loss
    loss.backward()
    assert torch.equal(loss, expected)
    assert handle.statistics()["device"] <= 2 * block
    with pytest.raises(RuntimeError, match="layers.4: expected weights on cpu"):
        layers[4].mlp.up_proj.weight.sum()


def test_threads_share_an_embedding_that_is_away(tmp_path: Path) -> None:
    model = llama(layers=3).requires_grad_(False).eval()
    inputs = [batch(step) for step in range(4)]
    expected = [model(input_ids=x).logits for x in inputs]
    offload_weights(model, f"nvme:{tmp_path}")
    received: dict[int, list[Tensor]] = {}

    def run(index: int) -> None:
        with torch.no_grad():
            received[index] = [model(input_ids=inputs[index]).logits for _ in range(5)]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, all_logits in received.items():
        assert all(torch.equal(logits, expected[index]) for logits in all_logits)
    assert len(received) == 4


@pytest.mark.parametrize("first", [True, False], ids=["offload first", "adapters first"])
@pytest.mark.parametrize(
    "options",
    [
        {"trainable_token_indices": [1, 2, 300]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj", "up_proj"], "dora": True},
    ],
    ids=["tokens", "embeddings", "dora"],
)
def test_adapters_of_models_that_are_away(options: dict[str, Any], first: bool, tmp_path: Path) -> None:
    x, results = batch(0), []
    for to in (None, f"nvme:{tmp_path}"):
        model = llama(layers=3).requires_grad_(False)
        torch.manual_seed(1)
        if to is not None and first:
            offload_weights(model, to)
        shoestring.lora.apply(model, rank=4, **options)
        if to is not None and not first:
            offload_weights(model, to)
        for p in model.parameters():
            if p.requires_grad:
                p.data.normal_(std=0.1)
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters() if p.requires_grad)])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_functions_of_all_weights_refuse_a_model_that_is_away(tmp_path: Path) -> None:
    model, x = llama(layers=3), batch(0)
    optimizer = AdamW(model.parameters(), lr=1e-3, step_in_backward=True)
    averages = Averages(model)
    averages.update()
    schedule_free = ScheduleFreeAdamW(model.parameters(), lr=1e-3, step_in_backward=True)
    with pytest.raises(
        ValueError, match="optimizer: expected an optimizer that changes weights in its steps"
    ):
        offload_weights(model, f"nvme:{tmp_path}", optimizer=schedule_free)
    handle = offload_weights(model, f"nvme:{tmp_path}", optimizer=optimizer)
    before = averages.state_dict()["average.model.embed_tokens.weight"].clone()
    model.model.embed_tokens.weight.data.add_(1)
    uses: list[Callable[[], Any]] = [averages.update, averages.swap().__enter__, lambda: Averages(model)]
    for use in uses:
        with pytest.raises(ValueError, match="Averages: model.layers.0.* expected a tensor on its device"):
            use()
    assert torch.equal(averages.state_dict()["average.model.embed_tokens.weight"], before)
    uses = [
        lambda: shoestring.save_training(tmp_path / "a", step=1, model=model, optimizer=optimizer),
        lambda: shoestring.lora.apply(model, rank=4, quantize="nf4"),
        lambda: shoestring.lora.apply(model, rank=4, init="pissa"),
        lambda: shoestring.lora.apply(model, rank=4, target_modules=["q_proj"], modules_to_save=["mlp"]),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="on (its|their) device, received .*away"):
            use()
    assert all(p.requires_grad for p in model.parameters())
    handle.undo()
    shoestring.lora.apply(model, rank=4)
    expected = model(input_ids=x).logits
    offload_weights(model, f"nvme:{tmp_path}")
    with pytest.raises(ValueError, match="lora.merge: model: expected weights on their device, received"):
        shoestring.lora.merge(model)
    assert torch.equal(model(input_ids=x).logits, expected)
