"""Test the settings classes: they declare command options and mark those a resumed run may change."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from shoestring.cli.app import app
from shoestring.cli.expand_settings import expand_settings
from shoestring.core.errors import InputError
from shoestring.training.config import FinetuneConfig, LoopConfig, PlanConfig, TrainConfig, require_equal
from shoestring.training.estimate.config import EstimateConfig


@dataclass(frozen=True, kw_only=True)
class Base:
    size: Annotated[int, typer.Option(help="Size.")] = 1
    rate: Annotated[float, typer.Option(help="Rate.")] = 0.5
    hidden: int = 7  # no option


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    name: Annotated[str, typer.Option(help="Name.")]
    kind: Annotated[str, typer.Option(help="Kind.")] = "plain"
    rate: Annotated[float, typer.Option(help="Rate.")] = 0.25


@dataclass(frozen=True, kw_only=True)
class Chosen(Base):
    given: frozenset[str] = frozenset()


def test_settings_become_options() -> None:
    received: list[Any] = []

    @expand_settings
    def command(
        first: Annotated[int, typer.Option()], config: Derived, last: Annotated[int, typer.Option()] = 3
    ) -> None:
        """Do it."""
        received.extend([first, config, last])

    parameters = inspect.signature(command).parameters
    assert list(parameters) == ["first", "name", "kind", "size", "rate", "last"]
    defaults = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
    assert defaults == {"kind": "plain", "size": 1, "rate": 0.25, "last": 3}
    assert (command.__name__, command.__doc__) == ("command", "Do it.")
    command(first=1, name="a", kind="b", size=2, rate=3.0, last=4)
    assert received == [1, Derived(name="a", kind="b", size=2, rate=3.0), 4]


def test_settings_know_which_options_the_user_gave() -> None:
    """Also of an option that has its default value."""

    received: list[Chosen] = []
    program = typer.Typer()

    @program.command()
    @expand_settings
    def command(config: Chosen) -> None:
        received.append(config)

    for arguments in ([], ["--size", "1"], ["--size", "2", "--rate", "0.5"]):
        typer.main.get_command(program).main(args=arguments, standalone_mode=False)
    assert [each.given for each in received] == [set(), {"size"}, {"size", "rate"}]
    command(size=1, rate=0.5)
    assert received[-1] == Chosen()


def test_an_option_that_two_parameters_declare() -> None:
    with pytest.raises(ValueError, match="duplicate parameter name: 'size'"):

        @expand_settings
        def command(config: Base, size: int) -> None: ...


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("train", TrainConfig),
        ("finetune", FinetuneConfig),
        ("plan", PlanConfig),
        ("estimate", EstimateConfig),
    ],
)
def test_every_setting_is_an_option(name: str, settings: type[Any]) -> None:
    options = typer.main.get_command(app).commands[name].params  # type: ignore[attr-defined]
    constants = {"betas", "eps", "activation_bytes", "given"}
    assert {each.name for each in fields(settings)} - constants <= {each.name for each in options}


def test_a_resumed_run_shares_all_settings_but_those_marked() -> None:
    free = {"activations", "checkpoint_every", "device", "log_every", "memory_budget", "offload", "resume"}
    free |= {"device_memory", "host_memory", "disk", "freedom", "given", "replan"}
    free |= {"host_allocator", "compress", "parallel", "threads", "trust_remote_code"}
    config = FinetuneConfig(model="m")
    assert {each.name for each in fields(config)} - config.fixed().keys() == free | {
        "merge",
        "offload_weights",
        "keep",
    }
    assert {each.name for each in fields(TrainConfig)} - TrainConfig().fixed().keys() == free
    before = config.fixed()
    require_equal(replace(config, merge=True, offload="cpu", threads=2).fixed(), before, "run")
    require_equal(replace(config, parallel="zero2").fixed(), before, "run")
    with pytest.raises(InputError, match="sharded_weights differs"):
        require_equal(replace(config, parallel="zero3").fixed(), before, "run")
    with pytest.raises(InputError, match="pack differs"):
        require_equal(replace(config, pack="none").fixed(), before, "run")


def test_recorded_settings_are_json_values() -> None:
    assert LoopConfig().fixed()["betas"] == [0.9, 0.95]
    assert TrainConfig(tokenizer=Path("a//b")).fixed()["tokenizer"] == "a/b"
    assert TrainConfig().fixed()["tokenizer"] is None
    config = FinetuneConfig(model="m", quantize="none", target_modules=" q_proj,v_proj ")
    assert (config.fixed()["quantize"], config.fixed()["target_modules"]) == (None, ["q_proj", "v_proj"])
    assert FinetuneConfig(model="m", full=True).fixed()["quantize"] is None
    assert FinetuneConfig(model="m", target_modules="all-linear").fixed()["target_modules"] == "all-linear"


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(InputError, match="--quantize: expected nf4 | none with --baseline, got int8"):
        FinetuneConfig(model="m", baseline=True, quantize="int8")
    for settings in (FinetuneConfig, EstimateConfig):
        with pytest.raises(InputError, match="--target-modules: expected all-linear, or names"):
            settings(model="m", target_modules=" , ")
