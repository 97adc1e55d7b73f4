import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shoestring
from shoestring.optim import AdamW, Unfreezing
from shoestring.optim.schedules import Scheduler, constant

SCHEDULE = {"2.*": 0, "1.weight": 2, "[01].*": 3}


def make_model(width: int = 4) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, unfreezing: Unfreezing, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        unfreezing.step()


def test_the_set_is_a_function_of_the_step() -> None:
    model = make_model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    unfreezing = Unfreezing(model, SCHEDULE)
    assert unfreezing.trained(0) == unfreezing.trained(1) == ["2.weight", "2.bias"]
    assert unfreezing.trained(2) == ["1.weight", "2.weight", "2.bias"]
    assert len(unfreezing.trained(3)) == 6
    for step in (0, 1, 2, 3, 0):
        unfreezing.step(step)
        assert unfreezing.current_step == step
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == (name in unfreezing.trained(step))
            assert parameter.requires_grad or parameter.grad is None
    assert model[2].weight.grad is not None


def test_parameters_without_a_pattern_do_not_change() -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    Unfreezing(model, {"1.*": 5})
    flags = [parameter.requires_grad for parameter in model.parameters()]
    assert flags == [False, True, False, False, True, True]


@pytest.mark.parametrize("make", [AdamW, torch.optim.AdamW], ids=["ours", "torch"])
def test_frozen_parameters_have_neither_gradient_nor_state(make: type[torch.optim.Optimizer]) -> None:
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = make(model.parameters(), lr=0.1, weight_decay=0.1)
    unfreezing = Unfreezing(model, SCHEDULE)
    train(model, optimizer, unfreezing, range(2))
    assert set(optimizer.state) == {model[2].weight, model[2].bias}
    for parameter, old in list(zip(model.parameters(), before, strict=True))[:4]:
        assert torch.equal(parameter, old)
    train(model, optimizer, unfreezing, range(2, 3))
    assert set(optimizer.state) == {model[1].weight, model[2].weight, model[2].bias}
    train(model, optimizer, unfreezing, range(3, 4))
    assert set(optimizer.state) == set(model.parameters())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    storages: dict[int, int] = {}
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(storages.values())


def test_memory_of_frozen_parameters() -> None:
    """With one of three large layers trained, gradients and state take a third of the memory."""
    model = make_model(256)
    model[2] = nn.Linear(256, 256)
    optimizer = AdamW(model.parameters(), lr=0.1, state_format="fp32")
    unfreezing = Unfreezing(model, {"2.*": 0, "*": 1})
    sizes = []
    for _ in range(2):
        model(torch.randn(2, 256)).sum().backward()
        optimizer.step()
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        sizes.append((gradients, state_bytes(optimizer)))
        unfreezing.step()
    layer = 4 * 256 * 257
    assert sizes[0][0] == layer and sizes[1][0] == 3 * layer
    assert sizes[0][1] == pytest.approx(2 * layer, rel=0.01) and sizes[1][1] == pytest.approx(
        6 * layer, rel=0.01
    )


@pytest.mark.parametrize("make", [AdamW, torch.optim.AdamW], ids=["ours", "torch"])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_resume_from_a_file(make: type[torch.optim.Optimizer], at: int, tmp_path: Path) -> None:
    """A resumed run trains the parameters of its step, and continues bit for bit."""
    runs = []
    for _ in range(2):
        model = make_model()
        optimizer = make(model.parameters(), lr=0.1)
        scheduler = Scheduler(optimizer, lr=constant(warmup=4))
        runs.append((model, optimizer, Unfreezing(model, SCHEDULE), scheduler))
    (model, optimizer, unfreezing, scheduler), (resumed, again, other, schedule) = runs
    train(model, optimizer, unfreezing, range(at))
    path = tmp_path / "run.safetensors"
    shoestring.save_training(
        path, model, optimizer, step=at, frozen=True, unfreezing=unfreezing, schedule=scheduler
    )
    shoestring.load_training(path, resumed, again, frozen=True, unfreezing=other, schedule=schedule)
    assert other.current_step == at
    assert [p.requires_grad for p in resumed.parameters()] == [p.requires_grad for p in model.parameters()]
    train(model, optimizer, unfreezing, range(at, at + 4))
    train(resumed, again, other, range(at, at + 4))
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_state_dict() -> None:
    model = make_model()
    unfreezing = Unfreezing(model, SCHEDULE)
    unfreezing.step(2)
    file = io.BytesIO()
    torch.save(unfreezing.state_dict(), file)
    file.seek(0)
    fresh = make_model()
    other = Unfreezing(fresh, SCHEDULE)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert fresh[1].weight.requires_grad and not fresh[1].bias.requires_grad
    other.load_state_dict({"step": torch.tensor(0)})
    assert not fresh[1].weight.requires_grad


def test_compiled_models_follow() -> None:
    torch.compiler.reset()
    model = make_model()
    compiled = torch.compile(model, backend="aot_eager")
    unfreezing = Unfreezing(model, {"2.*": 0, "*": 1})
    for step in range(2):
        unfreezing.step(step)
        compiled(torch.randn(3, 4)).sum().backward()
        assert (model[0].weight.grad is not None) == (step == 1)


def test_errors() -> None:
    model = make_model()
    message = (
        r"Unfreezing: schedule: expected a pattern that matches a parameter, received '3.weight'. Similar"
    )
    with pytest.raises(ValueError, match=message):
        Unfreezing(model, {"*": 5, "3.weight": 0})
    for wrong in (-1, 1.5, True):
        with pytest.raises(
            ValueError, match="Unfreezing: schedule: expected whole numbers of at least 0, received"
        ):
            Unfreezing(model, {"*": wrong})
    assert all(p.requires_grad for p in model.parameters())
    unfreezing = Unfreezing(model, {"*": 5})
    with pytest.raises(ValueError, match="Unfreezing: step: expected a number of at least 0, received -1"):
        unfreezing.step(-1)
    with pytest.raises(
        ValueError, match="Unfreezing: load_state_dict: expected a number called step, received"
    ):
        unfreezing.load_state_dict({})
    assert unfreezing.current_step == 0


def test_distributed_data_parallel_around_frozen_parameters(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        frozen = make_model()
        frozen[0].requires_grad_(False)
        with pytest.raises(
            ValueError, match="Unfreezing: model: expected DistributedDataParallel around parameters"
        ):
            Unfreezing(DistributedDataParallel(frozen), {"*": 0})
        model = DistributedDataParallel(make_model(), find_unused_parameters=True)
        unfreezing = Unfreezing(model, {"module.2.*": 0, "*": 1})
        for step in range(2):
            unfreezing.step(step)
            model(torch.randn(3, 4)).sum().backward()
            assert (model.module[0].weight.grad is not None) == (step == 1)
    finally:
        torch.distributed.destroy_process_group()
