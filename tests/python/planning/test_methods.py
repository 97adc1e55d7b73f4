"""Test plans of LoRA and QLoRA for a model that trains all weights: their memory, their reasons, and what they leave."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_plan_training import BATCH, Model, example_of
from torch import Tensor, nn

import shoestring
from shoestring.checkpoint.weights import bytes_here
from shoestring.planning import situation

Example = Callable[[int], Tensor]
WIDTH = 512


def decoder() -> tuple[nn.Module, Example]:
    model = Model()
    return model, example_of(model)


def vectors(model: nn.Module, features: int) -> tuple[nn.Module, Example]:
    return model, lambda rows: model(torch.ones(rows, 16, features)).square().mean()


def blocks() -> tuple[nn.Module, Example]:
    """Return a model of large blocks, whose weights need more memory than their activations."""
    parts = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(6))
    return vectors(nn.Sequential(nn.Linear(16, WIDTH), nn.Sequential(*parts)), 16)


def layers() -> tuple[nn.Module, Example]:
    """Return a model whose blocks are layers with adapters, and return tensors of other shapes than their inputs."""
    return vectors(nn.Sequential(nn.Sequential(*(nn.Linear(64 << i, 128 << i) for i in range(4)))), 64)


def planned(make: Callable[[], tuple[nn.Module, Example]], **options: Any) -> shoestring.TrainingPlan:
    torch.manual_seed(0)
    model, example = make()
    return shoestring.plan_training(model, example=example, batch_size=BATCH, **{"measure": False} | options)


@pytest.mark.parametrize("make", [decoder, blocks, layers])
@pytest.mark.parametrize("method", [{"adapters": "lora"}, {"quantize": "nf4"}], ids=str)
@pytest.mark.parametrize(
    "fixed",
    [
        {"micro_batch": 8, "activations": "keep"},
        {"micro_batch": 2, "activations": "recompute"},
        {"micro_batch": 8, "activations": "keep", "precision": "bf16", "optimizer_state": "bf16"},
    ],
    ids=str,
)
def test_predicted_bytes_are_those_of_training(
    make: Callable[[], tuple[nn.Module, Example]], method: dict[str, str], fixed: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model, example = make()
    plan = shoestring.plan_training(
        model, example=example, batch_size=BATCH, fixed=fixed | method, measure=False
    )
    assert plan.adapters == "lora" and plan.quantize == method.get("quantize", "none")
    applied = plan.apply(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all(".lora_" in name for name in trained)
    check = plan.check(model, example)
    assert check.predicted_bytes == pytest.approx(check.measured_bytes, rel=0.05)
    applied.undo()
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trained


def test_very_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train adapters of a quantised model. The plan does so only with freedom, and says what full training needs."""
    monkeypatch.setattr(situation, "_reserve", lambda *_: 0)
    fixed: dict[str, Any] = {"micro_batch": BATCH, "activations": "keep", "optimizer_state": "8bit"}
    fixed |= {"precision": "fp32", "step_in_backward": False}
    full, lora, qlora = (
        planned(blocks, fixed=fixed | method).peak
        for method in ({"adapters": "none"}, {"adapters": "lora"}, {"quantize": "nf4"})
    )
    assert qlora < lora < full
    budget = (qlora + lora) // 2
    with pytest.raises(ValueError, match="^plan_training: expected device_memory of at least") as caught:
        planned(blocks, fixed=fixed, device_memory=budget)
    said = str(caught.value).splitlines()[0]
    assert said.endswith('; with freedom "method" a plan fits')
    least = re.search(r"at least (\d+) bytes \((.*?)\)", said)
    assert least is not None and int(least[1]) == full
    # A method that was excluded is not offered.
    with pytest.raises(ValueError, match="^plan_training: expected device_memory of at least") as caught:
        planned(blocks, fixed=fixed | {"adapters": "none"}, device_memory=budget)
    assert "a plan fits" not in str(caught.value)
    plan = planned(blocks, fixed=fixed, device_memory=budget, freedom="method")
    assert (plan.adapters, plan.quantize) == ("lora", "nf4")
    texts = {reason["lever"]: reason["text"] for reason in plan.reasons}
    assert (
        texts["adapters"]
        == f"--adapters lora: without it, no plan fits; the least memory would be {least[2]}"
    )
    assert texts["quantize"].startswith("--quantize nf4: without it, no plan fits")
    assert planned(blocks, fixed=fixed, device_memory=full).adapters == "none"


class Steps(nn.Module):
    """A model with a buffer and a random part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout()) for _ in range(3)))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y: Tensor = self.layers(x).square().mean()
        return y


@pytest.mark.first
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_before(fails: bool) -> None:
    model = Steps()

    def example(rows: int) -> Tensor:
        if fails and type(model.layers[0][0]) is not nn.Linear:  # type: ignore[index]
            raise RuntimeError("no adapters here")
        loss: Tensor = model(torch.ones(rows, 64))
        return loss

    for p in model.parameters():
        p.grad = torch.ones_like(p)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: value.clone() for name, value in tensors.items()}
    modules = [(module, type(module), set(vars(module))) for module in model.modules()]
    state = torch.get_rng_state()
    plan = shoestring.plan_training(model, example=example, batch_size=4, freedom="method", measure=False)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert after.keys() == tensors.keys() and all(after[name] is tensors[name] for name in tensors)
    assert all(torch.equal(value, values[name]) for name, value in after.items())
    assert all(
        p.requires_grad and p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters()
    )
    assert [(module, type(module), set(vars(module))) for module in model.modules()] == modules
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())
    said = [reason["text"] for reason in plan.reasons]
    assert fails == ("lora is left out: no adapters here" in said)
    assert fails == ("nf4 is left out: no adapters here" in said)


def test_methods_that_a_model_cannot_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def normalized() -> tuple[nn.Module, Example]:
        parts = (nn.Sequential(nn.LayerNorm(64), nn.GELU()) for _ in range(3))
        return vectors(nn.Sequential(nn.LayerNorm(64), nn.Sequential(*parts)), 64)

    plan = planned(normalized, freedom="method")
    assert plan.adapters == "none"
    [said] = [reason["text"] for reason in plan.reasons if reason["lever"] == "adapters"]
    assert said.startswith("lora is left out: lora.apply: target_modules: expected names of linear layers")
    with pytest.raises(ValueError, match=r"^plan_training: fixed: adapters: lora.apply: target_modules"):
        planned(normalized, fixed={"adapters": "lora"})
    with pytest.raises(ValueError, match="fixed: quantize: expected none, received int8"):
        planned(blocks, fixed={"quantize": "int8"})

    def frozen() -> tuple[nn.Module, Example]:
        model, example = blocks()
        model[0].requires_grad_(False)  # type: ignore[index]
        return model, example

    def adapted() -> tuple[nn.Module, Example]:
        model, example = blocks()
        return shoestring.lora.apply(model, quantize="nf4"), example

    # The models have a method already, since they have frozen weights.
    assert planned(frozen, freedom="method").adapters == "none"
    monkeypatch.setattr(situation, "_reserve", lambda *_: 0)
    plan = planned(adapted, freedom="method")
    assert plan.adapters == "none" and plan.phases[0]["bytes"] == bytes_here(adapted()[0])


def test_a_model_with_checkpoints_gets_no_adapters() -> None:
    plan = planned(decoder, fixed={"adapters": "lora", "activations": "recompute"}, measure=True)
    assert plan.reasons[-1]["text"].startswith("not measured: the model has no adapters")
    model, _ = decoder()
    shoestring.checkpoint_model(model)
    with pytest.raises(ValueError, match="these have checkpoints already"):
        plan.apply(model)
    assert all(p.requires_grad for p in model.parameters())


def test_times_of_another_machine() -> None:
    plan = planned(decoder, freedom="method", hardware="nvidia-h200")
    assert plan.machine == "NVIDIA H200" and plan.adapters in ("none", "lora")
