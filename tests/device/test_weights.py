"""Weights that are away from the device: in pinned host memory, or in a file."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from simdev import device as simdev
from torch import Tensor, nn

import shoestring
from shoestring.checkpoint import weights
from training import compare

DEVICES = ["simdev:0", "simdev:1"]  # the second one is not current


@pytest.fixture(autouse=True)
def small_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "LEAST", 0)


def deep(layers: int = 5) -> nn.ModuleDict:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(layers)]
    return nn.ModuleDict({"first": nn.Linear(64, 64), "blocks": nn.ModuleList(blocks)})


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    x = model["first"](batch)
    for block in model["blocks"]:
        x = x + block(x)
    loss: Tensor = x.square().mean()
    return loss


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("to", ["cpu", "nvme"])
@pytest.mark.parametrize(
    ("layers", "trained"), [(5, 0), (5, 5), (3, 1)], ids=["frozen", "trained", "last trained"]
)
def test_training_equals_cpu(
    mode: simdev.Mode, layers: int, trained: int, to: str, device: str, tmp_path: Path
) -> None:
    """If the last block alone is trained, it comes back while its changes are still leaving."""
    model, full = deep(layers), trained > 0
    model["blocks"].requires_grad_(False)
    for block in list(model["blocks"])[layers - trained :]:
        block.requires_grad_(True)
    optimizers: dict[str, Any] = {}

    def make(model: nn.Module, device: str) -> torch.optim.Optimizer:
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer: torch.optim.Optimizer = shoestring.optim.AdamW(params, lr=1e-2, step_in_backward=full)
        optimizers[device] = optimizer
        return optimizer

    handles = []

    def surround(model: nn.Module, device: str) -> AbstractContextManager[Any]:
        if device != "cpu":
            place = "cpu" if to == "cpu" else f"nvme:{tmp_path}"
            handles.append(
                shoestring.offload_weights(model, place, optimizer=optimizers[device] if full else None)
            )
        return nullcontext()

    waited = compare(
        model,
        make,
        loss_of=loss_of,
        surround=surround,
        device=device,
        finish=lambda: [h.undo() for h in handles],
    )
    assert full or waited == []
    figures = handles[0].statistics()
    assert (figures["written"] > 0) == full


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("to", ["cpu", "nvme"])
def test_tables_equal_weights_on_the_device(mode: simdev.Mode, to: str, device: str, tmp_path: Path) -> None:
    """Rows and panels of a weight that is away are those of the weight on the device."""
    classes, features = 5_000, 64
    torch.manual_seed(0)
    model = deep(3)
    model["table"] = nn.Embedding(classes, features)
    model.requires_grad_(False).to(device)
    table = model["table"]
    ids = torch.randint(classes, (2, 9)).to(device)
    x = torch.randn(7, features, device=device)

    def run() -> tuple[Tensor, ...]:
        y = model["first"](table(ids))
        for block in model["blocks"]:
            y = y + block(y)
        return y, torch.ops.simdev_panels.linear(x, table.weight, 700), table(ids * 0)

    with torch.no_grad():
        expected = torch.cat([x @ part.t() for part in table.weight.split(700)], 1).cpu()
        embedded = table(ids).cpu()
        place = "cpu" if to == "cpu" else f"nvme:{tmp_path}"
        handle = shoestring.offload_weights(model, place, blocks=["blocks.*"])
        first = run()
        with pytest.raises(RuntimeError, match="mat1 and mat2"):  # while the second panel is on its way
            torch.ops.simdev_panels.linear(x[:, 1:], table.weight, 700)
        second = run()
        assert torch.equal(table(ids).cpu(), embedded)
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one.cpu(), two.cpu())
    torch.testing.assert_close(first[1].cpu(), expected)
    rows = len(ids.cpu().unique()) * 3 + 2
    assert handle.statistics()["fetched"] >= 2 * classes * features * 4 + rows * features * 4
    before = embedded[0, 0]
    handle.undo()
    assert torch.equal(table(ids)[0, 0].cpu(), before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("to", ["cpu", "nvme"])
@pytest.mark.parametrize("has_gradient", [False, True], ids=["", "input with gradient"])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_tiles_need_the_memory_of_two(
    mode: simdev.Mode, trained: bool, has_gradient: bool, to: str, device: str, tmp_path: Path
) -> None:
    """Count the bytes that the device allocates for a layer of 4 MiB in tiles of 256 KiB."""
    torch.manual_seed(0)
    whole = nn.Linear(256, 4096, bias=False).requires_grad_(trained)
    model = nn.Sequential(nn.Linear(256, 4096, bias=False).requires_grad_(trained))
    model[0].load_state_dict(whole.state_dict())
    tile = whole.weight.nbytes // 16
    shoestring.tile_layers(model.to(device), "0", tiles=16)
    optimizer: Any = None
    if trained:
        optimizer = shoestring.optim.AdamW(
            model.parameters(), lr=0.0, weight_decay=0.0, step_in_backward=True
        )
    handle = shoestring.offload_weights(
        model, "cpu" if to == "cpu" else f"nvme:{tmp_path}", optimizer=optimizer
    )
    x, gradient = torch.randn(2, 256), torch.randn(2, 4096)

    def run(module: nn.Module, device: str) -> list[Tensor]:
        leaf = x.to(device).requires_grad_(has_gradient)
        y = module(leaf * 1)
        if trained or has_gradient:
            y.backward(gradient.to(device))
        if trained:
            optimizer.step()
        return [t.detach().cpu() for t in (y, leaf.grad) if t is not None]

    run(model, device)  # allocates the state of the optimizer
    index = int(device[-1])
    simdev.synchronize(index)
    torch.accelerator.reset_peak_memory_stats(index)
    before = simdev.memory_allocated(device) - handle.statistics()["device"]
    results = run(model, device)
    peak = simdev.max_memory_allocated(device) - before
    gradients = 2 * tile if trained else 0
    activations = 4 * gradient.nbytes + 20 * x.nbytes
    assert 2 * tile <= peak <= (3 if trained else 2) * tile + gradients + activations
    for ours, theirs in zip(results, run(whole, "cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
