"""Memory that the library gives up is reused only after the work and the copies that still read it."""

import gc

import pytest
import torch
from simdev import device as simdev

import shoestring
from shoestring.data import Prefetcher
from training import mlp, rows


@pytest.mark.usefixtures("mode")
def test_poison_waits_for_what_reads_a_batch() -> None:
    sums = []
    with Prefetcher(rows, "simdev", depth=2, stop=8, poison=True) as batches:
        for batch in batches:
            for _ in range(5):
                batch = batch * 1.5
            sums.append(batch.sum())
    for step, found in enumerate(sums):
        expected = rows(step)
        for _ in range(5):
            expected = expected * 1.5
        assert torch.equal(found.cpu(), expected.sum())
    assert simdev.counts().operations > 0


@pytest.mark.usefixtures("mode")
def test_a_graph_without_backward_waits_for_its_copies() -> None:
    """A forward whose graph is dropped frees activations that are still on their way to the host."""
    model = mlp().to("simdev")
    offload = shoestring.offload_activations(exclude=model, device="simdev", min_bytes=0)
    for step in range(4):
        x = rows(step).to("simdev")
        with offload:
            loss = model(x).square().mean()
        del loss, x
        for _ in range(8):  # work that reuses the memory
            torch.full((16, 192), 7.0, device="simdev").mul_(2)


@pytest.mark.usefixtures("mode")
def test_an_object_that_is_freed_waits_for_its_copies() -> None:
    """Copies to the host may still run when the object that owns the host memory is freed."""
    model = mlp().to("simdev")
    for step in range(4):
        x = rows(step).to("simdev")
        offload = shoestring.offload_activations(exclude=model, device="simdev", min_bytes=0)
        with offload:
            loss = model(x).square().mean()
        del loss, x, offload
    gc.collect()


@pytest.mark.usefixtures("mode")
def test_backward_overwrites_what_is_on_its_way_to_the_host() -> None:
    """linear_cross_entropy saves the gradients that forward computed, and scales them in place in backward."""
    weight = torch.randn(97, 64).to("simdev").requires_grad_()
    target = torch.arange(16, device="simdev")
    offload = shoestring.offload_activations(exclude=[weight, target], device="simdev", min_bytes=0)
    for step in range(4):
        hidden = rows(step).to("simdev").requires_grad_()
        with offload:
            loss = shoestring.linear_cross_entropy(hidden * 2, weight, target)
        (loss * 3).backward()


@pytest.mark.usefixtures("mode")
def test_a_backward_that_fails_waits_for_what_it_has_prefetched() -> None:
    """An error in backward drops copies that are on their way back to the device."""
    model = torch.nn.Sequential(*(mlp() for _ in range(5))).to("simdev")
    offload = shoestring.offload_activations(
        exclude=model, device="simdev", min_bytes=0, prefetch=6, max_pending=0
    )

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("a hook that fails")

    for step in range(4):
        x = rows(step).to("simdev")
        with offload:
            for number, layer in enumerate(model):
                x = layer(x)
                if number == 3:
                    x.register_hook(fail)
        with pytest.raises(ValueError, match="a hook that fails"):
            x.square().mean().backward()
        del x
        for _ in range(8):  # work that reuses the memory
            torch.full((16, 192), 7.0, device="simdev").mul_(2)
