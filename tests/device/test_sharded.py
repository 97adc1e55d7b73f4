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
        "nothing", fake_pg._create_fake_pg, extended_api=True, devices=["simdev"]
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
