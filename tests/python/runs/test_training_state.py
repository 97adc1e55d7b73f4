"""Tests that every state of a run comes back with its types, and that a refused load changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_schedules

import shoestring
from shoestring import optim
from shoestring.files.safetensors_file import checksum_of, open_safetensors, save_gathered
from shoestring.optim import schedules

STEPS = 30


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


# ---- schedules


def sequence(optimizer: Any) -> Any:
    first = torch_schedules.ConstantLR(optimizer, total_iters=4)
    return torch_schedules.SequentialLR(
        optimizer, [first, torch_schedules.MultiStepLR(optimizer, [3, 6, 6])], milestones=[8]
    )


def chain(optimizer: Any) -> Any:
    first = torch_schedules.LinearLR(optimizer, total_iters=4)
    return torch_schedules.ChainedScheduler([first, torch_schedules.ExponentialLR(optimizer, 0.9)])


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: torch_schedules.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: torch_schedules.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: torch_schedules.StepLR(o, 7),
    "MultiStepLR": lambda o: torch_schedules.MultiStepLR(o, [5, 12, 12, 20]),
    "ConstantLR": lambda o: torch_schedules.ConstantLR(o, total_iters=9),
    "LinearLR": lambda o: torch_schedules.LinearLR(o, total_iters=9),
    "ExponentialLR": lambda o: torch_schedules.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: torch_schedules.PolynomialLR(o, 20, 2.0),
    "CosineAnnealingLR": lambda o: torch_schedules.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: torch_schedules.CosineAnnealingWarmRestarts(o, 4, 2),
    "ReduceLROnPlateau": lambda o: torch_schedules.ReduceLROnPlateau(o, patience=2),
    "CyclicLR": lambda o: torch_schedules.CyclicLR(
        o, 0.01, 0.2, step_size_up=4, mode="exp_range", gamma=0.99
    ),
    "OneCycleLR": lambda o: torch_schedules.OneCycleLR(o, 0.3, total_steps=40),
    "SequentialLR": sequence,
    "ChainedScheduler": chain,
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
    "shoestring": lambda o: schedules.Scheduler(
        o, lr=schedules.cosine(20, warmup=3), weight_decay=schedules.linear(9)
    ),
    "shoestring.ReduceOnPlateau": lambda o: schedules.ReduceOnPlateau(o, patience=2),
}


def scheduled(name: str) -> tuple[nn.Module, Any, Any]:
    model = nn.Linear(2, 1)
    groups = [{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), (0.1, 0.02), strict=True)]
    optimizer = (optim.SGD if name.startswith("shoestring") else torch.optim.SGD)(
        groups, momentum=0.9, weight_decay=0.1
    )
    return model, optimizer, SCHEDULES[name](optimizer)


def rates(optimizer: Any, schedule: Any, name: str, steps: range) -> list[Any]:
    found = []
    for step in steps:
        optimizer.step()
        schedule.step(*([float(step % 3 == 0)] if "Plateau" in name else []))
        found.append(
            [(group["lr"], group["momentum"], group["weight_decay"]) for group in optimizer.param_groups]
        )
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.sample(9)
def test_schedules_resume_at_every_step(name: str, tmp_path: Path) -> None:
    """Every scheduler of PyTorch, and ours. The file does not change a bit of a rate."""
    model, optimizer, schedule = scheduled(name)
    expected, path = [], tmp_path / "run"
    for step in range(STEPS):
        shoestring.save_training(f"{path}{step}", model, optimizer, step=step, schedule=schedule)
        expected += rates(optimizer, schedule, name, range(step, step + 1))
    for step in range(STEPS):
        model, optimizer, schedule = scheduled(name)
        shoestring.load_training(f"{path}{step}", model, optimizer, schedule=schedule)
        assert rates(optimizer, schedule, name, range(step, STEPS)) == expected[step:]


def test_every_schedule_of_pytorch_is_tested() -> None:
    found = {
        name
        for name, kind in vars(torch_schedules).items()
        if isinstance(kind, type)
        and issubclass(kind, torch_schedules.LRScheduler)
        and not name.startswith("_")
    }
    assert found - {"LRScheduler"} <= SCHEDULES.keys()


def test_a_schedule_in_a_file_of_version_1(tmp_path: Path) -> None:
    """Such files have the keys of a dict as texts. They get the keys that the scheduler has, or are refused."""
    model, optimizer, schedule = scheduled("MultiStepLR")
    rates(optimizer, schedule, "", range(7))
    path = tmp_path / "run"
    shoestring.save_training(path, model, optimizer, schedule=schedule)
    file = open_safetensors(path, "")
    tensors, metadata = {name: file.load(name) for name in file.tensors()}, dict(file.metadata())
    values = {"schedule": {"milestones": {"5": 1, "12": 2, "20": 1}}}
    del metadata["kinds"], metadata["checksum"]
    metadata |= {"format_version": "1", "parts": json.dumps(values)}
    metadata["checksum"] = checksum_of(tensors, metadata, writes=True)
    save_gathered(path, tensors, metadata, writes=True)
    again = scheduled("MultiStepLR")
    shoestring.load_training(path, again[0], again[1], schedule=again[2])
    assert again[2].state_dict() == schedule.state_dict()
    other = torch_schedules.MultiStepLR(again[1], [5, 13])
    with pytest.raises(ValueError, match=r"schedule: milestones: expected the keys \[5, 13\], received '12'"):
        shoestring.load_training(path, again[0], again[1], schedule=other)


# ---- arguments and names


class Part:
    """A part that holds whatever it gets, and refuses some states."""

    def __init__(self, value: Any, refuses: Any = ()) -> None:
        self.value, self.refuses = value, refuses

    def state_dict(self) -> dict[str, Any]:
        return self.value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = {"half": 1.0}  # the error comes after a change
        if str(state) in self.refuses or "all" in self.refuses:
            raise RuntimeError("no")
        self.value = state


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"a": Part({"b.c": 1}), "a.b": Part({"c": 2})},
            "none begins another, received a and a.b. Rename one",
        ),
        (
            {"step": Part({})},
            "step: expected a whole number of at least 0, received .*A part needs another name",
        ),
        ({"step": 1.5}, "step: expected a whole number of at least 0, received 1.5"),
        ({"step": True}, "step: expected a whole number of at least 0, received True"),
        ({"step": -1}, "step: expected a whole number of at least 0, received -1"),
        ({"position": Part({})}, "position: expected whole numbers by name"),
        ({"position": {"row": 0.5}}, "position: expected whole numbers by name"),
        ({"position": {3: 1}}, "position: expected whole numbers by name"),
        ({"facts": Part({})}, "facts: expected texts by name"),
        ({"facts": {"seed": 1}}, "facts: expected texts by name"),
        ({"frozen": Part({})}, "frozen: expected True or False"),
        ({"part": Part({1: 2})}, "part: expected a state dict with texts as keys"),
        ({"part": Part(None)}, "part: expected a state dict with texts as keys"),
    ],
)
def test_arguments_that_are_no_parts(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^save_training: .*{message}"):
        shoestring.save_training(tmp_path / "run", net(), **arguments)
    assert not list(tmp_path.iterdir())
    shoestring.save_training(tmp_path / "run", net())
    if not {"position", "part"} & arguments.keys() and "step" not in arguments:
        with pytest.raises(ValueError, match=f"^load_training: .*{message}"):
            shoestring.load_training(tmp_path / "run", net(), **arguments)
    if "step" in arguments or "position" in arguments:
        with pytest.raises(ValueError, match="load_training: parts: expected another name than"):
            shoestring.load_training(tmp_path / "run", net(), **arguments)


def test_names_of_tensors_do_not_collide(tmp_path: Path) -> None:
    value = {"a": [torch.tensor(1.0)], "a.0": torch.tensor(2.0), "b": {"a.0": torch.tensor(3.0)}}
    part, again = Part(value), Part({})
    shoestring.save_training(tmp_path / "run", net(), a=part, ab=part)
    shoestring.load_training(tmp_path / "run", net(), a=again, ab=Part({}))
    assert again.value == value


def test_names_of_callbacks_have_no_dots() -> None:
    with pytest.raises(ValueError, match="Callbacks: a.b: expected a name without a dot"):
        shoestring.callbacks.Callbacks(**{"a.b": shoestring.callbacks.Callback()})


# ---- refusals


class Run:
    """A run with every kind of optimizer and part, two of them trained."""

    def __init__(self, steps: int) -> None:
        self.model = net()
        params = list(self.model.parameters())
        made = (
            optim.AdamW(params[:2]),
            optim.GaLore(params[2:4], optim.AdamW, rank=2),
            torch.optim.AdamW(params[4:]),
        )
        self.optimizers: list[Any] = list(made)
        guard = optim.Guard(made[0])
        averages, noise = optim.Averages(self.model), optim.GradientNoise(made[0])
        self.parts: dict[str, Any] = {
            "module": nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
            "averages": averages,
            "guard": guard,
            "noise": noise,
            "schedule": schedules.Scheduler(made[0], lr=schedules.cosine(20)),
            "multi_step": torch_schedules.MultiStepLR(made[2], [2, 5]),
            "scaler": torch.amp.GradScaler("cpu", init_scale=8.0 + steps),
            "callbacks": shoestring.callbacks.Callbacks(every=shoestring.callbacks.OnStep(averages.update)),
            "optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1 * (1 + steps), momentum=0.9),
            "last": Part({"value": [torch.tensor(float(steps)), (steps, None)]}),
        }
        torch.manual_seed(steps)
        for _ in range(steps):
            loss = self.model(torch.randn(8, 4)).square().sum()
            loss.backward()
            guard.step(loss)
            for optimizer in made[1:]:
                optimizer.step()
            for optimizer in made:
                optimizer.zero_grad()
            averages.update()
            self.parts["schedule"].step()
            self.parts["multi_step"].step()
            with torch.no_grad():
                self.parts["module"](torch.randn(8, 3))

    def contents(self, path: Path) -> bytes:
        """Return everything that a run has, as the bytes of its file."""
        shoestring.save_training(path, self.model, self.optimizers, frozen=True, **self.parts)
        return path.read_bytes()

    def load(self, path: Path, **changes: Any) -> None:
        shoestring.load_training(path, self.model, self.optimizers, frozen=True, **(self.parts | changes))


PLACES = (
    "module",
    "averages",
    "guard",
    "noise",
    "schedule",
    "multi_step",
    "scaler",
    "callbacks",
    "optimizer",
    "last",
)


@pytest.mark.parametrize("place", PLACES)
def test_a_part_that_refuses_leaves_everything_as_it_was(place: str, tmp_path: Path) -> None:
    saved, run = Run(4), Run(2)
    saved.contents(tmp_path / "saved")
    before = run.contents(tmp_path / "before")
    part = run.parts[place]
    load = part.load_state_dict

    def refuse(state: Any, calls: list[int] = []) -> None:  # noqa: B006
        calls.append(1)
        load(state)
        if len(calls) == 1:
            raise KeyError("no")

    part.load_state_dict = refuse
    with pytest.raises(
        ValueError, match="expected the content of save_training, received another .KeyError: 'no'"
    ):
        run.load(tmp_path / "saved")
    del part.load_state_dict
    assert run.contents(tmp_path / "after") == before
    run.load(tmp_path / "saved")
    assert run.contents(tmp_path / "after") == (tmp_path / "saved").read_bytes()


@pytest.mark.parametrize("number", range(3))
def test_an_optimizer_that_refuses_leaves_everything_as_it_was(number: int, tmp_path: Path) -> None:
    saved, run = Run(4), Run(2)
    groups = saved.optimizers[number].param_groups
    saved.contents(tmp_path / "saved")
    groups[0]["betas"] = (2.0, 0.5)
    groups[0]["lr"] = -1.0
    before = run.contents(tmp_path / "before")
    saved.contents(tmp_path / "saved")
    if number == 2:  # PyTorch's optimizers load any value, so the failure is made
        run.optimizers[2].register_load_state_dict_pre_hook(refuse_once())
    with pytest.raises(ValueError, match="expected|refused"):
        run.load(tmp_path / "saved")
    assert run.contents(tmp_path / "after") == before


def refuse_once() -> Callable[..., None]:
    calls: list[int] = []

    def hook(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("refused")

    return hook


def test_random_numbers_that_refuse_leave_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, run = Run(4), Run(2)
    saved.contents(tmp_path / "saved")
    before = run.contents(tmp_path / "before")
    state = torch.set_rng_state
    monkeypatch.setattr(torch, "set_rng_state", lambda s: (state(s), refuse())[0])
    refuse = refuse_once()
    with pytest.raises(ValueError, match="refused"):
        run.load(tmp_path / "saved")
    assert run.contents(tmp_path / "after") == before


def test_a_part_that_refuses_its_own_state_is_named(tmp_path: Path) -> None:
    """All others are as they were."""
    saved, run = Run(4), Run(2)
    saved.contents(tmp_path / "saved")
    before = run.contents(tmp_path / "before")
    broken = Part({"value": 1.0}, refuses=("all",))
    message = "RuntimeError: no. Everything is as it was but the part last .RuntimeError: no., which refused the state that it had"
    with pytest.raises(ValueError, match=message):
        run.load(tmp_path / "saved", last=broken)
    assert run.contents(tmp_path / "after") == before


def test_an_expanded_weight_is_refused_first(tmp_path: Path) -> None:
    saved, run = Run(4), Run(2)
    for one in (saved, run):
        one.model[2].register_buffer("wide", torch.zeros(1).expand(3))  # type: ignore[operator,union-attr]
    saved.contents(tmp_path / "saved")
    before = run.contents(tmp_path / "before")
    with pytest.raises(
        ValueError, match="load_training: model: 2.wide: expected a tensor with memory for each"
    ):
        run.load(tmp_path / "saved")
    assert run.contents(tmp_path / "after") == before


def test_weights_that_are_away_are_refused_first(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))))
        return model, optim.AdamW(model.parameters(), step_in_backward=True)

    path = tmp_path / "run"
    model, optimizer = made()
    shoestring.save_training(path, model, optimizer)
    before = path.read_bytes()
    offloaded = shoestring.offload_weights(model, f"nvme:{tmp_path}", optimizer=optimizer)
    model(torch.randn(2, 128)).sum().backward()
    optimizer.step()
    here = [p for p in model.parameters() if p.ndim == 1]  # biases stay
    weights = [p.clone() for p in here]
    for call in (shoestring.save_training, shoestring.load_training):
        with pytest.raises(
            ValueError, match=r"model: 0\.\d.weight: expected a weight on its device, .* Call undo"
        ):
            call(path, model, optimizer)
    assert path.read_bytes() == before
    assert all(torch.equal(p, q) for p, q in zip(here, weights, strict=True))
    offloaded.undo()
    shoestring.load_training(path, model, optimizer)
    shoestring.save_training(path, model, optimizer)
    assert path.read_bytes() == before
