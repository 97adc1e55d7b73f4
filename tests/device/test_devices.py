"""Two devices: operators run where their tensors are, and a missing device guard is noticed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from simdev import device as simdev
from test_offload import adamw, deep, offloading
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import shoestring
from operator_cases import operators
from training import compare, mlp


@pytest.fixture
def emulated(mode: simdev.Mode) -> None:
    """Run the host functions of CUDA operators and emulated kernels."""
    simdev.configure(replace(mode, emulate=True))


@pytest.mark.usefixtures("mode")
def test_copies_between_devices() -> None:
    x = torch.arange(1000.0, device="simdev:0")
    for _ in range(5):
        x.add_(1)
    y = x.to("simdev:1", non_blocking=True)
    x.zero_()
    z = (y * 2).to("simdev:0")
    assert y.device == torch.device("simdev:1")
    assert torch.equal(z.cpu(), 2 * (torch.arange(1000.0) + 5))


@pytest.mark.usefixtures("mode")
def test_tensors_of_two_devices_are_refused() -> None:
    x, y = torch.ones(3, device="simdev:0"), torch.ones(3, device="simdev:1")
    with pytest.raises(RuntimeError, match="at least two devices, simdev:0 and simdev:1"):
        x + y
    with pytest.raises(RuntimeError, match="at least two devices, simdev:0 and cpu"):
        x + torch.ones(3)
    assert (x + torch.tensor(1.0)).sum() == 6


@pytest.mark.usefixtures("mode")
def test_current_device() -> None:
    assert simdev.device_count() == 2
    with simdev.device(1):
        assert torch.ones(1, device="simdev").device == torch.device("simdev:1")
        with torch.Stream("simdev:0"):
            assert simdev.current_device() == 0
        assert simdev.current_device() == 1
    assert simdev.current_device() == 0


def test_trains_on_the_device_that_is_not_current(mode: simdev.Mode) -> None:
    waited = compare(mlp(), adamw, device="simdev:1")
    assert waited == []
    compare(deep(), adamw, device="simdev:1", surround=offloading(prefetch=1))


NAMES = sorted({"fake_quantize", *operators()})


def call(name: str, device: str) -> list[Tensor]:
    """Return the results and gradients of an operator's cases, or those of fake_quantize, which has no cases."""
    if name in operators():
        operator = operators()[name]
        cases = [operator.case(8, 64, options=options) for options in operator.options[: operator.traced]]
        found = [case.results(operator.call, case.given(4, device), 4) for case in cases]
        return [t.cpu() for results in found for t in results.values()]
    torch.manual_seed(4)
    x = torch.randn(8, 64).to(device).requires_grad_()
    y = shoestring.fake_quantize(x, "nf4")
    return [y.detach().cpu(), torch.autograd.grad(y.square().sum(), x)[0].cpu()]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", NAMES)
def test_host_functions_guard_their_device(name: str) -> None:
    """On a device that is not current, launches go to its streams and results equal those of the other one."""
    expected = call(name, "simdev:0")
    found = call(name, "simdev:1")
    assert expected
    assert simdev.current_device() == 0
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class Backwards(TorchDispatchMode):
    """Records the calls of this package's operators of backward, with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "shoestring" and "backward" in func.__name__:
            kept, named = tree_map(
                lambda a: a.detach().clone() if isinstance(a, Tensor) else a, (args, kwargs or {})
            )
            self.calls.append(lambda: func(*kept, **named))
        return func(*args, **(kwargs or {}))


# The operators of backward that change their arguments, and the operators whose options they take.
IN_PLACE = {
    name: operator
    for operator in operators().values()
    for name in (f"_{operator.name}_backward_", f"_{operator.name}_backward_value_")
    if hasattr(torch.ops.shoestring, name)
}


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", IN_PLACE)
def test_backward_in_place_guards_its_device(name: str) -> None:
    in_place = getattr(torch.ops.shoestring, name).default
    count = sum(str(argument.type) == "Tensor" for argument in in_place._schema.arguments)
    torch.manual_seed(5)
    values = torch.randn(count, 8, 64)
    results = []
    for device in ("simdev:0", "simdev:1"):
        tensors = [value.to(device) for value in values]
        in_place(*tensors, **IN_PLACE[name].options[0])
        results.append([tensor.cpu() for tensor in tensors])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(torch.stack(results[0]), values)


# Losses compute their gradients in forward, and the others have no operator of backward that reads the device.
WITHOUT_BACKWARD = {
    "cross_entropy",
    "cross_entropy_with_stats",
    "linear_cross_entropy",
    "linear_cross_entropy_with_stats",
    "linear_distillation",
    "fake_quantize",
    "seeded_dropout",
}


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", sorted({*NAMES} - WITHOUT_BACKWARD))
def test_backward_guards_its_device(name: str) -> None:
    """The autograd engine selects the device of a backward operator; a direct call does not."""
    results = []
    for device in ("simdev:0", "simdev:1"):
        with Backwards() as recorded:
            call(name, device)
        results.append(
            [t.cpu() for run in recorded.calls for t in tree_leaves(run()) if isinstance(t, Tensor)]
        )
    first, second = results
    assert first
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


OPERATORS = torch.ops.shoestring


@pytest.mark.usefixtures("emulated")
def test_moe_sort_guards_its_device() -> None:
    index = torch.randint(-1, 16, (500,), generator=torch.Generator().manual_seed(6))
    first, second = (
        [t.cpu() for t in OPERATORS.moe_sort(index.to(device), 16)] for device in ("simdev:0", "simdev:1")
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(first[0], torch.where(index < 0, 16, index).argsort(stable=True))


@pytest.mark.usefixtures("emulated")
def test_grouped_linear_guards_its_device() -> None:
    """The operator of backward is called by itself, because autograd sets the device of its calls."""
    torch.manual_seed(7)
    bf16 = torch.bfloat16
    floats = [torch.randn(*s).to(bf16) for s in ((30, 40), (3, 24, 40), (3, 24), (60, 24))]
    index, bounds = torch.randint(30, (60,)), torch.tensor([1, 20, 20, 58])

    def call(device: str) -> list[Tensor]:
        x, weight, bias, grad, rows, offsets = (t.to(device) for t in (*floats, index, bounds))
        out = OPERATORS.grouped_linear(x, weight, offsets, rows=rows, bias=bias)
        gradients = OPERATORS._grouped_linear_backward(
            grad, x, weight, offsets, rows, 30, bf16, bf16, bf16, [True, True, True]
        )
        return [t.cpu() for t in (out, *gradients)]

    assert all(torch.equal(*pair) for pair in zip(call("simdev:0"), call("simdev:1"), strict=True))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("transposed", [False, True])
def test_moe_experts_guards_its_device_and_waits_for_nothing(transposed: bool) -> None:
    torch.manual_seed(8)
    x, weight, gate_up, down, gate_up_bias, down_bias, upstream = (
        torch.randn(*shape).bfloat16()
        for shape in ((20, 24), (20, 2), (3, 32, 24), (3, 24, 16), (3, 32), (3, 24), (20, 24))
    )
    if transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    index = torch.randint(-1, 3, (20, 2))
    lora = [torch.randn(*shape) for shape in ((3, 4, 24), (3, 32, 4), (3, 4, 16), (3, 24, 4))]

    def call(device: str) -> list[Tensor]:
        tensors = (x, weight, gate_up, down, gate_up_bias, down_bias, *lora)
        leaves = [t.to(device).requires_grad_() for t in tensors]
        given, grad = index.to(device), upstream.to(device)
        before = simdev.counts(device).waits
        simdev.take_synchronisations()
        out = OPERATORS.moe_experts(
            leaves[0],
            given,
            *leaves[1:4],
            gate_up_bias=leaves[4],
            down_bias=leaves[5],
            transposed=transposed,
            **dict(zip(("gate_up_a", "gate_up_b", "down_a", "down_b"), leaves[6:], strict=True)),
        )
        gradients = torch.autograd.grad(out, leaves, grad)
        assert simdev.take_synchronisations() == []
        assert simdev.counts(device).waits == before
        return [t.detach().cpu() for t in (out, *gradients)]

    assert all(torch.equal(*pair) for pair in zip(call("simdev:0"), call("simdev:1"), strict=True))


def round_trip_4bit(x: Tensor) -> list[Tensor]:
    parts = OPERATORS.quantize_4bit(x, quant_type="nf4")
    into = torch.empty_like(x)
    OPERATORS.dequantize_(into, *parts, quant_type="nf4")
    return [*parts, into, OPERATORS.dequantize_4bit(*parts, shape=x.shape, dtype=x.dtype)]


def round_trip_int8(x: Tensor) -> list[Tensor]:
    parts = OPERATORS.quantize_int8(x)
    return [*parts, OPERATORS.dequantize_int8(*parts, dtype=x.dtype)]


def round_trip_8bit_state(x: Tensor) -> list[Tensor]:
    parts = OPERATORS.quantize_8bit(x, signed=True)
    return [*parts, OPERATORS.dequantize_8bit(*parts, signed=True)]


def round_trip_4bit_state(x: Tensor) -> list[Tensor]:
    parts = OPERATORS.quantize_state_4bit(x, signed=True)
    return [*parts, OPERATORS.dequantize_state_4bit(*parts, signed=True, numel=x.numel())]


def round_trip_compressed(x: Tensor) -> list[Tensor]:
    error, codes, out = (
        torch.zeros_like(x),
        torch.empty(4 * 68, dtype=torch.uint8, device=x.device),
        torch.empty_like(x),
    )
    OPERATORS.compress_gradient_(error, x, codes, bits=4)
    OPERATORS.decompress_mean_(out, codes[None], bits=4)
    return [error, codes, out]


ROUND_TRIPS = [
    round_trip_4bit,
    round_trip_int8,
    round_trip_8bit_state,
    round_trip_4bit_state,
    round_trip_compressed,
]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
def test_quantisation_guards_its_device(round_trip: Callable[[Tensor], list[Tensor]]) -> None:
    torch.manual_seed(6)
    values = torch.randn(8, 64)
    first, second = ([t.cpu() for t in round_trip(values.to(device))] for device in ("simdev:0", "simdev:1"))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert (first[-1].view_as(values) - values).norm() < values.norm() / 2  # not the error of zeros


@pytest.mark.usefixtures("emulated")
def test_scale_guards_its_device() -> None:
    x = torch.full((100,), 2.0, device="simdev:1")
    torch.ops.shoestring._scale_(x, torch.tensor([3.0], device="simdev:1"))
    assert x.cpu().eq(6).all()


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    "name", ["AdamW", "Lion", "SGD", "Muon", "Adafactor", "CAME", "LAMB", "ScheduleFreeAdamW"]
)
def test_optimizers_guard_their_device(name: str) -> None:
    results = []
    for device in ("simdev:0", "simdev:1"):
        torch.manual_seed(0)
        layer = nn.Linear(64, 64, bias=False).to(device)
        optimizer = getattr(shoestring.optim, name)(layer.parameters(), lr=1e-3, max_grad_norm=0.5)
        for _ in range(2):
            layer(torch.ones(8, 64, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(layer.weight.detach().cpu())
    assert torch.equal(*results)


@pytest.mark.usefixtures("emulated")
def test_missing_device_guard_is_noticed() -> None:
    x, factor = torch.ones(100, device="simdev:1"), torch.tensor([3.0], device="simdev:1")
    with pytest.raises(RuntimeError, match="the stream belongs to device 1, and the current device is 0"):
        torch.ops.simdev_planted.without_guard(x, factor)
    with simdev.device(1):
        torch.ops.simdev_planted.without_guard(x, factor)
    assert x.cpu().eq(3).all()


@pytest.mark.usefixtures("emulated")
def test_kernel_with_memory_of_another_device_is_noticed() -> None:
    x, factor = torch.ones(100, device="simdev:0"), torch.tensor([3.0], device="simdev:1")
    torch.ops.simdev_planted.without_guard(x, factor)
    with pytest.raises(
        RuntimeError, match=r"out of bounds: read of 4 bytes at \S*tests/device/kernels/planted.cu"
    ):
        simdev.synchronize()
    simdev.clear_error()


@pytest.mark.usefixtures("emulated")
def test_kernel_that_leaves_its_tensor_is_noticed() -> None:
    x, factor = torch.ones(100, device="simdev"), torch.tensor([3.0], device="simdev")
    torch.ops.simdev_planted.past_the_end(x, factor)
    with pytest.raises(RuntimeError, match="kernel failed on stream 0.*out of bounds"):
        simdev.synchronize()
    simdev.clear_error()
