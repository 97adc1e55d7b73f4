"""Tests that saved state finds its parameter by name: in state dicts, files and runs, and over processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import shoestring
from processes import run, whole
from shoestring.files.safetensors_file import save_gathered
from shoestring.optim import SAM, AdamW, GaLore, Lion, load_optimizer, save_optimizer
from shoestring.optim.parameter_names import names_of

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: AdamW(params, lr=1e-2),
    "Lion": lambda params: Lion(params, lr=1e-2, state_format="bf16"),
    "GaLore": lambda params: GaLore(params, AdamW, lr=1e-2, rank=2),
    "SAM": lambda params: SAM(params, torch.optim.SGD, lr=1e-2, momentum=0.9),
    "torch.AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, betas=(0.8, 0.9)),
}


def net() -> nn.Module:
    """Return layers whose parameters have equal shapes."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


def named(model: nn.Module, reverse: bool = False) -> list[tuple[str, nn.Parameter]]:
    """Return the names and parameters, the last first if ``reverse``."""
    return list(model.named_parameters())[:: -1 if reverse else 1]


def trained(kind: str, model: nn.Module, params: Any) -> Optimizer:
    """Return an optimizer that has taken two steps, with another gradient for each parameter."""
    optimizer = KINDS[kind](params)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.linspace(-1, 1, 16).view(2, 8)).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]
    return optimizer


def states(model: nn.Module, optimizer: Any) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter by its name in the model."""
    return {
        name: {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in optimizer.state[p].items()
        }
        for name, p in model.named_parameters()
    }


def check_equal(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def through_state_dict(_: Path, models: list[nn.Module], optimizers: list[Any]) -> None:
    optimizers[1].load_state_dict(optimizers[0].state_dict())


def through_file(path: Path, models: list[nn.Module], optimizers: list[Any]) -> None:
    save_optimizer(optimizers[0], path)
    load_optimizer(optimizers[1], path)


def through_run(path: Path, models: list[nn.Module], optimizers: list[Any]) -> None:
    shoestring.save_training(path, models[0], optimizers[0])
    shoestring.load_training(path, models[1], optimizers[1])


@pytest.mark.parametrize(
    ("kind", "through", "has_names"),
    [
        *((kind, through_state_dict, True) for kind in ("AdamW", "Lion", "GaLore", "SAM")),
        *((kind, through_file, True) for kind in ("AdamW", "Lion")),
        *((kind, through_run, has_names) for kind in KINDS for has_names in (True, False)),
    ],
)
def test_state_follows_the_name(kind: str, through: Any, has_names: bool, tmp_path: Path) -> None:
    """A run knows the names from the model, so its optimizers need none."""
    models = [net(), net()]
    orders = [named(models[0]), named(models[1], reverse=True)]
    if not has_names:
        orders = [[p for _, p in order] for order in orders]  # type: ignore[misc]
    source, target = (trained(kind, model, order) for model, order in zip(models, orders, strict=True))
    expected = states(models[0], source)
    through(tmp_path / "file", models, [source, target])
    check_equal(states(models[1], target), expected)
    if has_names:
        assert target.param_groups[0]["param_names"] == [name for name, _ in named(models[1], reverse=True)]
    through(tmp_path / "file", models[::-1], [target, source])
    check_equal(states(models[0], source), expected)


def test_groups_and_a_file_of_an_older_version(tmp_path: Path) -> None:
    """Files once had the names among the values of a group, which the reader still matches."""

    def groups(model: nn.Module, reverse: bool) -> list[dict[str, Any]]:
        params = named(model)
        split = [params[:4], params[4:]]
        return [{"params": part[:: -1 if reverse else 1], "lr": 10.0**-g} for g, part in enumerate(split)]

    models = net(), net()
    source = trained("AdamW", models[0], groups(models[0], False))
    target = trained("AdamW", models[1], groups(models[1], True))
    for old in (False, True):
        tensors, metadata = shoestring.optim.files.store(source, "save", names_of(source))  # type: ignore[arg-type]
        if old:
            described = json.loads(metadata["groups"])
            for group, name in zip(described, json.loads(metadata.pop("names")), strict=True):
                group["extra"]["param_names"] = name
            metadata["groups"] = json.dumps(described)
        save_gathered(tmp_path / "file", tensors, {"format": "shoestring.optimizer", **metadata}, writes=True)
        load_optimizer(target, tmp_path / "file")  # type: ignore[arg-type]
        check_equal(states(models[1], target), states(models[0], source))
        target.state.clear()


def test_names_that_differ_are_refused(tmp_path: Path) -> None:
    model, other = net(), net()
    source = trained("AdamW", model, named(model))
    target = trained("AdamW", other, [(f"b.{name}", p) for name, p in named(other)])
    before = states(other, target)
    message = r"AdamW: load_state_dict: group 0: expected a state of the parameter 'b.0.weight', received one of '0.weight'"
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(source.state_dict())
    save_optimizer(source, tmp_path / "file")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="group 0: expected a state of the parameter 'b.0.weight'"):
        load_optimizer(target, tmp_path / "file")  # type: ignore[arg-type]
    check_equal(states(other, target), before)
    saved = source.state_dict()
    saved["param_groups"][0]["param_names"] = ["0.weight"] * 6
    with pytest.raises(ValueError, match="expected each name once, received '0.weight' twice"):
        target.load_state_dict(saved)
    del saved["param_groups"][0]["param_names"]
    target.load_state_dict(saved)  # in their order
    check_equal(states(other, target), states(model, source))


def test_names_of_a_wrapped_model_are_those_of_the_model() -> None:
    """DistributedDataParallel and torch.compile put their own names before those of the model."""
    models = [net(), net()]
    source = trained("AdamW", models[0], [(f"module._orig_mod.{name}", p) for name, p in named(models[0])])
    target = trained("AdamW", models[1], named(models[1], reverse=True))
    target.load_state_dict(source.state_dict())
    check_equal(states(models[1], target), states(models[0], source))


def test_a_state_of_all_parameters_together_needs_their_order(tmp_path: Path) -> None:
    def made(model: nn.Module, reverse: bool) -> Optimizer:
        optimizer = torch.optim.LBFGS([p for _, p in named(model, reverse)], lr=0.1, max_iter=3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(torch.ones(2, 8)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return optimizer

    model, other = net(), net()
    source, resumed = made(model, False), made(other, False)
    shoestring.save_training(tmp_path / "run", model, source)
    shoestring.load_training(tmp_path / "run", other, resumed)
    check_equal(dict(next(iter(resumed.state.values()))), dict(next(iter(source.state.values()))))
    with pytest.raises(ValueError, match="torch.LBFGS: expected the parameters in the order of the file"):
        shoestring.load_training(tmp_path / "run", other, made(other, True))


def test_moments_of_more_bits_than_the_weights(tmp_path: Path) -> None:
    """An optimizer of PyTorch's interface may keep fp32 state of bf16 weights, which PyTorch rounds when it loads."""

    class Master(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                self.state[p]["master"] = p.float() / 3

    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer = Master(model.parameters(), lr=0.1)
    optimizer.step()
    expected = states(model, optimizer)
    shoestring.save_training(tmp_path / "run", model, optimizer)
    shoestring.load_training(tmp_path / "run", model, optimizer)
    check_equal(states(model, optimizer), expected)
    copy = shoestring.optim.host_copy.HostCopy([], [optimizer])
    copy.restore()
    check_equal(states(model, optimizer), expected)


# ---- processes


def _split(rank: int, path: str) -> None:
    """State that processes have split, DTensors, and state dicts of torch.distributed.checkpoint."""
    plain = net()
    alone = trained("AdamW", plain, named(plain))
    if rank == 0:
        shoestring.save_training(path, plain, alone)
    torch.distributed.barrier()

    model = net()
    optimizer = AdamW(named(model, reverse=True), lr=1e-2)
    shoestring.distributed.shard(optimizer)
    shoestring.load_training(path, model, optimizer)
    gathered = optimizer.state_dict()["state"]
    for i, (_, p) in enumerate(named(plain, reverse=True)):
        check_equal(gathered[i], dict(alone.state[p]))

    sharded = fully_shard(net())
    optimizer = AdamW([p for _, p in named(sharded, reverse=True)], lr=1e-2)
    shoestring.load_training(path, sharded, optimizer)
    shoestring.save_training(path + ".again", sharded, optimizer)
    torch.distributed.barrier()  # the first process has written the file
    again = trained("AdamW", plain, named(plain))
    if rank == 0:
        shoestring.load_training(path + ".again", plain, again)
        check_equal(states(plain, again), states(plain, alone))

    callbacks = shoestring.callbacks
    averages = callbacks.OnStep(shoestring.optim.Averages(sharded).update)
    for call in (shoestring.save_training, shoestring.load_training):
        with pytest.raises(
            ValueError, match="parts: expected averages of whole weights, received some of DTensors"
        ):
            call(path + ".again", sharded, parts=callbacks.Callbacks(averages=averages))

    source, target = fully_shard(net()), fully_shard(net())
    optimizers = [
        trained("AdamW", source, named(source)),
        trained("AdamW", target, named(target, reverse=True)),
    ]
    set_optimizer_state_dict(target, optimizers[1], get_optimizer_state_dict(source, optimizers[0]))
    for (_, p), (_, q) in zip(named(source), named(target), strict=True):
        for key, value in optimizers[0].state[p].items():
            check_equal(whole(optimizers[1].state[q][key]), whole(value))


def test_processes_find_state_by_name(tmp_path: Path) -> None:
    run(2, tmp_path, _split, str(tmp_path / "run"))
