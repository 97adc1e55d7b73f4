import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import shoestring
from shoestring import fast_defaults


@pytest.fixture(autouse=True)
def switches_as_before() -> Iterator[None]:
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark


class Timed:
    """A step whose time depends on whether the weight of a convolution is channels-last."""

    def __init__(self, model: nn.Conv2d, last: float, plain: float) -> None:
        self.model, self.last, self.plain, self.calls = model, last, plain, 0

    def __call__(self) -> None:
        self.calls += 1
        time.sleep(self.plain if self.model.weight.is_contiguous() else self.last)


def test_keeps_what_is_faster_and_undoes_it() -> None:
    model = nn.Conv2d(3, 4, 3)
    weight, parameter, place = model.weight.detach().clone(), model.weight, model.weight.stride()
    model(torch.randn(1, 3, 5, 5)).sum().backward()
    gradient = parameter.grad.clone()
    step = Timed(model, last=0.001, plain=0.01)
    # On CPUs with products in bf16, "bf16_products" would be tried as well.
    fast = fast_defaults(step, model, switches=["tf32", "channels_last", "cudnn_benchmark"], repeats=2)
    assert step.calls == 2 * 2 * 3  # one step to warm up and two to measure, with and without, twice
    assert all(isinstance(switch, shoestring.MeasuredSwitch) for switch in fast.report)
    result = {switch.name: switch for switch in fast.report}
    assert [name for name, switch in result.items() if switch.kept] == ["channels_last"]
    assert 0.001 <= result["channels_last"].after < 0.01 <= result["channels_last"].before
    assert result["tf32"].reason == "the model is on cpu" and result["tf32"].before is None
    assert result["cudnn_benchmark"].reason == "the model is on cpu"
    assert (
        model.weight is parameter and torch.equal(parameter, weight) and torch.equal(parameter.grad, gradient)
    )
    assert parameter.is_contiguous(memory_format=torch.channels_last)
    assert parameter.grad.stride() == parameter.stride()
    assert "channels_last: " in str(fast) and "ms with: kept" in str(fast) and "does not apply" in str(fast)
    fast.undo()
    assert parameter.stride() == parameter.grad.stride() == place and torch.equal(parameter, weight)
    fast.undo()


def test_drops_what_is_not_faster() -> None:
    model = nn.Conv2d(3, 4, 3)
    for last, plain in ((0.01, 0.001), (0.005, 0.005)):
        fast = fast_defaults(
            Timed(model, last, plain), model, switches=["channels_last"], repeats=2, gain=0.3
        )
        (switch,) = fast.report
        assert switch.name == "channels_last" and not switch.kept and switch.before is not None
        assert model.weight.is_contiguous()


def test_context_manager_and_failing_steps() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3))
    with pytest.raises(KeyError), fast_defaults(Timed(model[0], 0.001, 0.01), model, repeats=1):
        assert model[1].weight.is_contiguous(memory_format=torch.channels_last_3d)
        raise KeyError
    assert model[0].weight.is_contiguous() and model[1].weight.is_contiguous()

    def fails() -> None:
        if not model[0].weight.is_contiguous():
            raise KeyError

    with pytest.raises(KeyError):
        fast_defaults(fails, model)
    assert model[0].weight.is_contiguous()


def test_what_does_not_apply() -> None:
    reasons = {switch.name: switch.reason for switch in fast_defaults(lambda: None, nn.Linear(2, 2)).report}
    assert reasons["channels_last"] == "the model has no convolutions of two or three dimensions"
    last = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    (switch,) = fast_defaults(lambda: None, last, switches=("channels_last",)).report
    assert switch.reason == "the weights of convolutions have this format already"
    torch.set_float32_matmul_precision("high")
    (switch,) = fast_defaults(lambda: None, last, switches=("bf16_products",)).report
    assert switch.reason == 'float32_matmul_precision is "high" already'


def test_bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The precision of products is measured, kept if it is faster, and restored."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    is_low = lambda: torch.get_float32_matmul_precision() == "medium"  # noqa: E731
    step = lambda: time.sleep(0.001 if is_low() else 0.01)  # noqa: E731
    with fast_defaults(step, nn.Linear(2, 2), switches=("bf16_products",), repeats=2) as fast:
        assert fast.report[0].kept and is_low()
    assert torch.get_float32_matmul_precision() == "highest"


def test_errors() -> None:
    model = nn.Linear(2, 2)
    for options, message in (
        ({"switches": ["tf23"]}, "switches: expected names of .*, received 'tf23'"),
        ({"repeats": 0}, "repeats: expected a number of at least 1, received 0"),
        ({"gain": 1.0}, r"gain: expected a number in \[0, 1\), received 1.0"),
    ):
        with pytest.raises(ValueError, match="fast_defaults: " + message):
            shoestring.fast_defaults(lambda: None, model, **options)
