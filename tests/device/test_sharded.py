"""FSDP2 calls gradient hooks on streams of its own, with gradients that other streams still write."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from simdev import device as simdev
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.testing._internal.distributed import fake_pg

import shoestring
from training import mlp, rows


@pytest.fixture(scope="module", autouse=True)
def alone_in_its_group() -> Iterator[None]:
    """One process has all shards, so its collectives have nothing to do."""
    distributed.Backend.register_backend(
        "nothing", fake_pg._create_fake_pg, extended_api=True, devices=["simdev", "cpu"]
    )
    distributed.init_process_group("nothing", rank=0, world_size=1, store=fake_pg.FakeStore())
    yield
    distributed.destroy_process_group()


# Replicas of shards have another stream, on which their gradients are reduced.
@pytest.mark.parametrize("replicas", [False, True], ids=["shards", "replicas of shards"])
@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
def test_steps_in_backward_equal_cpu(mode: simdev.Mode, offload: bool, replicas: bool) -> None:
    names = ("replicas", "shards") if replicas else ("shards",)
    how: dict[str, Any] = {"mesh": init_device_mesh("simdev", (1,) * len(names), mesh_dim_names=names)}
    if offload:
        how["offload_policy"] = CPUOffloadPolicy()
    results = []
    for device in ("simdev", "cpu"):
        model = mlp().to(device)
        if device != "cpu":
            for layer in model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, **how)
            fully_shard(model, **how)
        optimizer = shoestring.optim.AdamW(model.parameters(), lr=1e-2, step_in_backward=True)
        for step in range(4):
            model(rows(step).to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([getattr(p, "to_local", lambda p=p: p)().detach().cpu() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("offload", ["cpu", "nvme:."])
def test_parallelize_offloads(mode: simdev.Mode, offload: str, quantize: str | None) -> None:
    """Shards in host memory or in a file are copied to the device, and gradients back; the CPU steps them."""
    results = []
    for device in ("simdev", "cpu"):
        model = mlp()
        if quantize is not None:
            shoestring.lora.apply(model, rank=4, quantize=quantize)
        model.to(device)
        if device != "cpu":
            report = shoestring.parallelize(model, "zero3", offload=offload)
        trained = [p for p in model.parameters() if p.requires_grad]
        for p in trained:
            assert p.device.type == "cpu"
        optimizer = shoestring.optim.AdamW(trained, lr=1e-2)
        for step in range(4):
            model(rows(step).to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if device != "cpu":
            report.undo()
            assert all(p.device.type == device for p in model.parameters())
        results.append([p.detach().cpu() for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("place", [None, "stream", "nvme:."])
@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "ScheduleFreeAdamW"])
def test_state_of_a_part_is_offloaded(mode: simdev.Mode, name: str, place: str | None) -> None:
    results = []
    for device in ("simdev", "cpu"):
        model = mlp().to(device)
        optimizer = getattr(shoestring.optim, name)(
            model.parameters(), lr=1e-2, offload=place if device != "cpu" else None
        )
        if device != "cpu":
            shoestring.distributed.shard(optimizer)
        for step in range(4):
            if hasattr(optimizer, "train"):
                optimizer.train()
            model(rows(step).to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if hasattr(optimizer, "eval"):
            optimizer.eval()
        results.append([p.detach().cpu() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
