"""Test forks of a process that offloads. Child processes can drop inherited optimizers, but not use them.

The parent process continues undisturbed.
"""

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from children import in_child
from offload_faults import disturb_offload
from shoestring.checkpoint import offload_activations
from shoestring.optim import AdamW
from shoestring.optim.base import LowMemoryOptimizer

pytestmark = pytest.mark.fresh

PLACES = ["cpu", "stream", "nvme"]


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    with warnings.catch_warnings():
        # Ignore Python's warning about forks of processes with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
    disturb_offload()


def where(place: str, folder: Path) -> str:
    return f"nvme:{folder}" if place == "nvme" else place


def made(offload: str | None, within: bool) -> tuple[list[nn.Parameter], LowMemoryOptimizer]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(n, generator=generator)) for n in (5000, 300)]
    return params, AdamW(params, lr=1e-2, state_format="fp32", offload=offload, step_in_backward=within)


def backward(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    sum((p * torch.randn(p.shape, generator=generator)).sum() for p in params).backward()


@pytest.mark.parametrize("between", ["steps", "backward and step"])
@pytest.mark.parametrize("place", PLACES)
def test_children_of_an_optimizer(place: str, between: str, tmp_path: Path) -> None:
    """A forked child may drop an inherited optimizer that offloads, or use a new one, but not step it.

    The parent forks while its copies and writes of optimizer state may be running.
    """
    within = between == "backward and step"
    expected, plain = made(None, False)
    params, opt = made(where(place, tmp_path), within)
    held = {"params": params, "opt": opt}
    disturb_offload(2000)

    def drop() -> None:
        nonlocal opt, params
        held.clear()
        del opt, params
        gc.collect()

    def use() -> None:
        message = (
            r"AdamW: offload: expected process \d+, which created this object, received its forked child \d+"
        )
        for p in params:
            p.grad = torch.ones_like(p)
        with pytest.raises(RuntimeError, match=message):
            opt.step()
        for p in params:
            p.grad = None
        if within:
            with pytest.raises(RuntimeError, match=message):
                backward(params, 0)
        ours, fresh = made(where(place, tmp_path), within)
        backward(ours, 0)
        fresh.step()
        if not within:
            assert all(
                torch.isfinite(t).all()
                for entry in opt.state_dict()["state"].values()
                for t in entry.values()
            )

    for step in range(4):
        backward(expected, step)
        plain.step()
        plain.zero_grad()
        backward(params, step)
        if within:
            in_child([drop, use][step % 2])
        opt.step()
        opt.zero_grad()
        if not within:
            in_child([drop, use][step % 2])
    for p, q in zip(expected, params, strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(value, opt.state[q][name]) for name, value in plain.state[p].items())


@pytest.mark.parametrize("place", PLACES)
def test_a_data_loader_with_forked_workers(place: str, tmp_path: Path) -> None:
    """While an optimizer offloads its state, DataLoader workers may be forked, and may end or be stopped."""
    params, opt = made(where(place, tmp_path), True)
    data = list(torch.arange(8))
    for step in range(2):
        loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60)
        batches = iter(loader)
        next(batches)
        backward(params, step)
        seen = [
            int(x) for batch in DataLoader(data, num_workers=1, multiprocessing_context="fork") for x in batch
        ]
        assert seen == list(range(8))
        del batches
        opt.step()
    assert all(opt.state[p]["step"] == 2 for p in params)


@pytest.mark.parametrize("folder", [False, True], ids=["host", "disk"])
def test_children_of_offloaded_activations(folder: bool, tmp_path: Path) -> None:
    """With offloaded activations, a process may fork between forward and backward, while copies still run."""
    disturb_offload(3000)
    x = torch.randn(64, 256, requires_grad=True)

    def chain(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x.sigmoid() * x
        return x.sum()

    (expected,) = torch.autograd.grad(chain(x), x)
    for use in (False, True):
        held = [offload_activations(device="cpu", min_bytes=0, folder=str(tmp_path) if folder else None)]
        with held[0]:
            held.append(chain(x))

        def child(use: bool = use, held: list = held) -> None:
            if use:
                with pytest.raises(
                    RuntimeError, match="offload_activations: expected process .* its forked child"
                ):
                    held[1].backward()
                with pytest.raises(RuntimeError, match="expected process"), held[0]:
                    chain(x)
            held.clear()
            gc.collect()

        in_child(child)
        (grad,) = torch.autograd.grad(held[1], x)
        assert torch.equal(grad, expected)
