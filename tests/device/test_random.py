"""Random numbers of the device equal the CPU's, whatever the order in which streams run."""

import pytest
import torch
from simdev import device as simdev


def draw(device: str, generator: torch.Generator | None) -> list[torch.Tensor]:
    x = torch.empty(100, device=device)
    return [
        x.clone().normal_(generator=generator),
        torch.rand(50, device=device, generator=generator),
        torch.randperm(40, device=device, generator=generator),
        torch.randint(9, (30,), device=device, generator=generator),
        torch.bernoulli(torch.full((20,), 0.3, device=device), generator=generator),
        torch.multinomial(torch.ones(10, device=device), 4, generator=generator),
    ]


@pytest.mark.parametrize("own", [False, True])
def test_equals_cpu(mode: simdev.Mode, own: bool) -> None:
    results = []
    for device in ("simdev", "cpu"):
        torch.manual_seed(5)
        generator = torch.Generator(device).manual_seed(7) if own else None
        results.append([x.cpu() for x in draw(device, generator)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_streams_draw_in_the_order_of_calls(mode: simdev.Mode) -> None:
    other = torch.Stream("simdev")
    torch.manual_seed(3)
    drawn = []
    for i in range(8):
        if i % 2:
            with other:
                drawn.append(torch.rand(1000, device="simdev"))
                drawn[-1].record_stream(torch.accelerator.current_stream())
        else:
            drawn.append(torch.rand(1000, device="simdev"))
    torch.accelerator.synchronize()
    torch.manual_seed(3)
    for x in drawn:
        assert torch.equal(x.cpu(), torch.rand(1000))


def test_state_is_saved_and_restored(mode: simdev.Mode) -> None:
    torch.rand(3, device="simdev")
    before = simdev.counts().synchronisations
    state = torch.simdev.get_rng_state()
    first = torch.rand(100, device="simdev")
    torch.simdev.set_rng_state(state)
    second = torch.rand(100, device="simdev")
    with torch.random.fork_rng(devices=[0], device_type="simdev"):
        torch.rand(9, device="simdev")
    third = torch.rand(5, device="simdev")
    assert simdev.counts().synchronisations == before
    torch.simdev.set_rng_state(state)
    torch.rand(100, device="simdev")
    assert torch.equal(first.cpu(), second.cpu())
    assert torch.equal(third.cpu(), torch.rand(5, device="simdev").cpu())


def test_generator_of_another_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="generator: expected one of simdev:0, received one of cpu"):
        torch.rand(3, device="simdev", generator=torch.Generator())


def test_dropout_equals_cpu(mode: simdev.Mode) -> None:
    results = []
    for device in ("simdev", "cpu"):
        torch.manual_seed(2)
        x = torch.ones(500, device=device, requires_grad=True)
        torch.nn.functional.dropout(x, 0.3).sum().backward()
        results.append(x.grad.cpu())
    assert torch.equal(*results)
