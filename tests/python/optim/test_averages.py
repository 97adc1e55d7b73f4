"""Tests that ``Averages`` computes exponential, whole and latest averages, against fp64 and PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_swa_avg_fn

import processes
from shoestring.optim import Averages

# Unit roundoff of fp32 (round to nearest).
U = 2.0**-24


class Model(nn.Module):
    """Parameters and buffers of several shapes, of which one is empty and one has no dimension."""

    def __init__(self, dtype: torch.dtype = torch.float32, names: int = 5) -> None:
        super().__init__()
        shapes = [(300,), (), (0, 3), (3, 701), (2, 3, 5, 7)]
        for i, shape in enumerate(shapes[:names]):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape).to(dtype)))
        self.register_buffer("b0", torch.randn(5).to(dtype))
        self.register_buffer("b1", torch.tensor(3))


def floats(model: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: t for name, t in tensors.items() if t.is_floating_point()}


@torch.no_grad()
def move(model: nn.Module, scale: float = 0.1) -> None:
    """Change all weights, as an optimizer's step does."""
    for t in floats(model).values():
        t.add_(torch.randn(t.shape).to(t.dtype), alpha=scale)
    for buffer in model.buffers():
        if not buffer.is_floating_point():
            buffer.add_(1)


def value(averages: Averages, model: nn.Module) -> dict[str, Tensor]:
    """Return the averages as the model receives them."""
    with averages.swap():
        return {name: t.detach().clone() for name, t in floats(model).items()}


@pytest.mark.parametrize("kind", ["ema", "swa"])
@pytest.mark.parametrize("decay", [0.9, 0.999])
def test_averages_agree_with_torch_step_by_step(kind: str, decay: float) -> None:
    """Both follow the fp64 average within their roundings, in each of 40 steps."""
    torch.manual_seed(0)
    model = Model()
    averages = Averages(model, kind, decay=decay)  # type: ignore[arg-type]
    rule = get_ema_avg_fn(decay) if kind == "ema" else get_swa_avg_fn()
    theirs = AveragedModel(model, avg_fn=rule, use_buffers=True)
    exact = {name: t.detach().double() for name, t in floats(model).items()}
    largest = 0.0
    for step in range(40):
        move(model)
        averages.update()
        theirs.update_parameters(model)
        kept = float(np.float32(decay)) if kind == "ema" else step / (step + 1)
        kept = kept if step else 0.0
        exact = {n: kept * exact[n] + (1 - kept) * t.detach().double() for n, t in floats(model).items()}
        largest = max(largest, *(t.abs().max().item() for t in floats(model).values() if t.numel()))
        # A step rounds the product, the sum and the factors: at most 3 U of the largest weight. A rounding
        # that is k steps old counts with the weight of the average from then.
        bound = 3 * U * largest * (step + 1)
        ours = value(averages, model)
        for name, t in floats(theirs.module).items():
            torch.testing.assert_close(ours[name].double(), exact[name], rtol=0, atol=bound)
            torch.testing.assert_close(ours[name], t.detach(), rtol=0, atol=2 * bound)
    with averages.swap():
        assert model.b1.item() == 43  # type: ignore[union-attr, operator]


def test_the_average_of_constant_weights_is_the_weights() -> None:
    """No rounding moves the average of weights that do not change."""
    torch.manual_seed(0)
    for decay, kind in [(0.999, "ema"), (0.9, "ema"), (0.5, "ema"), (0.0, "swa")]:
        model = Model()
        averages = Averages(model, kind, decay=decay)  # type: ignore[arg-type]
        for _ in range(200):
            averages.update()
        for name, t in value(averages, model).items():
            torch.testing.assert_close(t, floats(model)[name].detach(), rtol=4 * U, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["ema", "swa", "lawa"])
def test_weights_of_all_dtypes_have_averages_in_fp32_or_fp64(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Model(dtype)
    averages = Averages(model, kind, decay=0.75, last=3)  # type: ignore[arg-type]
    exact: dict[str, Tensor] = {}
    history: list[dict[str, Tensor]] = []
    for step in range(10):
        move(model)
        averages.update()
        weights = {name: t.detach().double().clone() for name, t in floats(model).items()}
        history = [*history, weights][-3:]
        kept = 0.0 if step == 0 else 0.75 if kind == "ema" else step / (step + 1)
        exact = {n: kept * exact[n] + (1 - kept) * t if step else t for n, t in weights.items()}
    if kind == "lawa":
        exact = {n: sum(h[n] for h in history) / 3 for n in exact}  # type: ignore[misc]
    for name, stored in averages.state_dict().items():
        if name.startswith("average."):
            assert stored.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            error = 1e-14 if dtype == torch.float64 else 3 * U * 10
            torch.testing.assert_close(stored.double(), exact[name[8:]], rtol=error, atol=4 * error)
    for name, t in value(averages, model).items():
        rounding = max(torch.finfo(dtype).eps, 1e-14)
        torch.testing.assert_close(t.double(), exact[name], rtol=rounding, atol=rounding)


def test_bf16_averages_do_not_stand_still() -> None:
    """With decay 0.999, the expected value is exact and the random error within its bound.

    Each step adds an increment i to an average on the grid of bf16, whose spacing is u. Rounded at random, its
    variance is at most i u. With i <= (1 - decay) d, where d is the largest distance between weight and
    average, the errors of all steps have at most the variance d u / 2.
    """
    count, decay = 1 << 14, 0.999
    for seed in (0, 1):
        model = nn.Linear(count, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        averages = Averages(model, decay=decay, format="bf16", seed=seed)
        plain = torch.ones((), dtype=torch.bfloat16)
        averages.update()
        nn.init.constant_(model.weight, 1.25)
        for step in range(1, 2001):
            averages.update()
            plain.lerp_(torch.tensor(1.25, dtype=torch.bfloat16), 1 - decay)
            if step in (100, 2000):
                error = value(averages, model)["weight"].double() - (1.25 - 0.25 * decay**step)
                bound = (0.25 * 2.0**-7 / 2) ** 0.5
                assert error.square().mean().sqrt().item() < bound
                assert abs(error.mean().item()) < 5 * bound / count**0.5
        assert plain == 1.0
        stored = averages.state_dict()["average.weight"]
        assert stored.dtype == torch.bfloat16 and averages.updates == 2001


def test_bf16_averages_are_repeatable() -> None:
    def run(seed: int) -> Tensor:
        torch.manual_seed(0)
        model = Model()
        averages = Averages(model, format="bf16", decay=0.9, seed=seed)
        for _ in range(5):
            move(model)
            averages.update()
        return torch.cat([t.flatten() for t in value(averages, model).values()])

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


@pytest.mark.parametrize("format", ["fp32", "bf16"])
def test_lawa_is_the_mean_of_the_last_snapshots(format: Any) -> None:
    torch.manual_seed(0)
    model = Model(torch.bfloat16)
    averages = Averages(model, "lawa", last=3, every=2, format=format)
    snapshots: list[dict[str, Tensor]] = []
    for step in range(1, 12):
        move(model, 1.0)
        averages.update()
        if step % 2 == 0:
            snapshots = [*snapshots, {n: t.detach().double() for n, t in floats(model).items()}][-3:]
        assert averages.updates == step // 2
        if not snapshots:
            continue
        for name, t in value(averages, model).items():
            exact = torch.stack([s[name] for s in snapshots]).mean(0)
            assert torch.equal(t, exact.float().bfloat16()) or torch.allclose(
                t.double(), exact, rtol=2.0**-8, atol=2.0**-8
            )
    state = averages.state_dict()
    assert [n for n in state if n.endswith(".p0")] == [f"snapshot.{i}.p0" for i in range(3)]
    assert state["snapshot.2.p0"].dtype == torch.bfloat16
    assert torch.equal(state["snapshot.0.p0"].double(), snapshots[0]["p0"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["ema", "lawa"])
def test_swap_restores_the_training_weights_bitwise(kind: Any, dtype: torch.dtype) -> None:
    """All weights come back, even NaN, infinities and signed zeros, and even after an exception."""
    torch.manual_seed(0)
    model = Model(dtype)
    averages = Averages(model, kind, decay=0.5)
    for _ in range(3):
        averages.update()
        move(model)
    with torch.no_grad():
        model.p0[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])  # type: ignore[index, operator]
    integer = torch.int16 if dtype == torch.bfloat16 else torch.int32
    before = {n: t.detach().clone().view(integer) for n, t in floats(model).items()}
    addresses = [t.data_ptr() for t in model.parameters()]

    with averages.swap():
        inside = {n: t.detach().clone() for n, t in floats(model).items()}
        assert model.b1.item() == 5  # type: ignore[union-attr, operator]
        assert not any(torch.equal(inside[n].view(integer), before[n]) for n in ("p0", "p3", "b0"))
        for call in (averages.update, lambda: averages.load_state_dict(averages.state_dict())):
            with pytest.raises(
                RuntimeError, match="Averages: .*: expected the training weights in the model"
            ):
                call()
        with pytest.raises(RuntimeError, match="expected the training weights"), averages.swap():
            pass

    def check() -> None:
        assert all(torch.equal(t.view(integer), before[n]) for n, t in floats(model).items())
        assert [t.data_ptr() for t in model.parameters()] == addresses
        assert model.b1.item() == 6  # type: ignore[union-attr, operator]
        assert all(p.requires_grad for p in model.parameters())

    check()
    with pytest.raises(KeyError), averages.swap():
        raise KeyError
    check()
    for name, t in value(averages, model).items():
        assert torch.equal(t, inside[name]), name
    averages.update()


def test_before_the_first_update_the_averages_are_the_weights() -> None:
    model = Model()
    averages = Averages(model, every=2)
    averages.update()
    assert averages.updates == 0
    assert all(torch.equal(t, floats(model)[n]) for n, t in value(averages, model).items())
    other = Model()
    averages.copy_to(other)
    assert all(torch.equal(t, floats(model)[n]) for n, t in floats(other).items())


def test_copy_to_another_model() -> None:
    torch.manual_seed(0)
    model, other = Model(), Model(torch.bfloat16)
    averages = Averages(model, decay=0.5)
    averages.update()
    move(model)
    averages.update()
    averages.copy_to(other)
    for name, t in value(averages, model).items():
        assert torch.equal(floats(other)[name], t.bfloat16())
    assert other.b1.item() == 4  # type: ignore[union-attr, operator]
    before = {n: t.detach().clone() for n, t in floats(other).items()}
    move(model)
    averages.update()
    with pytest.raises(ValueError, match=r"^Averages: copy_to: model: expected a tensor p4, received none"):
        averages.copy_to(Model(names=4))
    other.p4 = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(
        ValueError, match=r"^Averages: copy_to: p4: expected shape \[2, 3, 5, 7\], received \[2\]"
    ):
        averages.copy_to(other)
    assert all(torch.equal(floats(other)[n], t) for n, t in before.items() if n != "p4")


def test_tied_weights_are_averaged_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    averages = Averages(model, decay=0.5)
    averages.update()
    start = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    averages.update()
    assert [n for n in averages.state_dict() if "weight" in n] == ["average.0.weight"]
    untied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    averages.copy_to(untied)
    for layer in untied:
        torch.testing.assert_close(layer.weight, start + 0.5)


def test_frozen_parameters_have_no_average() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    averages = Averages(model)
    averages.update()
    assert {n for n in averages.state_dict() if "." in n} == {"average.1.weight", "average.1.bias"}
    model[0].weight.requires_grad_()
    with pytest.raises(
        ValueError, match=r"^Averages: 0.weight: expected a frozen parameter, .*, received one that"
    ):
        averages.update()
    assert averages.updates == 1
    model[0].weight.requires_grad_(False)
    model[1].requires_grad_(False)  # the average goes on after a parameter is frozen
    averages.update()
    assert averages.updates == 2


@pytest.mark.parametrize(
    ("change", "received"),
    [
        (lambda m: m.to(torch.bfloat16), r"Float \[300\] on cpu, .*, received BFloat16 \[300\] on cpu"),
        (lambda m: m.to("meta"), r"Float \[300\] on cpu, .*, received Float \[300\] on meta"),
        (
            lambda m: setattr(m.p0, "data", torch.zeros(2)),
            r"Float \[300\] on cpu, .*, received Float \[2\] on cpu",
        ),
        (lambda m: m.register_parameter("p0", None), r"a tensor, .*, received none"),
    ],
)
def test_weights_that_change_raise_one_error(change: Callable[[Any], object], received: str) -> None:
    model = Model()
    averages = Averages(model)
    averages.update()
    before = {n: t.clone() for n, t in averages.state_dict().items() if isinstance(t, Tensor)}
    change(model)
    for call in (averages.update, lambda: averages.swap().__enter__()):
        with pytest.raises(ValueError, match=rf"^Averages: p0: expected {received}") as error:
            call()
        assert len(str(error.value).splitlines()) == 1
    assert all(torch.equal(averages.state_dict()[n], t) for n, t in before.items())
    assert averages.state_dict()["steps"] == 1


def test_replaced_parameters_are_followed() -> None:
    model = nn.Linear(3, 3)
    averages = Averages(model, decay=0.5)
    averages.update()
    model.load_state_dict({n: t + 1 for n, t in model.state_dict().items()}, assign=True)
    averages.update()
    for name, t in value(averages, model).items():
        torch.testing.assert_close(t, floats(model)[name].detach() - 0.5)


@pytest.mark.parametrize("format", ["fp32", "bf16"])
def test_strides_do_not_matter(format: Any) -> None:
    """Weights in channels_last format, transposed, and with gaps have the averages of contiguous weights."""
    torch.manual_seed(0)
    plain = nn.ParameterList([torch.randn(4, 6, 3, 5), torch.randn(40, 30), torch.randn(20, 30)])
    strided = copy.deepcopy(plain)
    strided[0].data = strided[0].data.to(memory_format=torch.channels_last)
    strided[1].data = strided[1].data.t().contiguous().t()
    strided[2].data = torch.zeros(20, 60)[:, ::2].copy_(plain[2].detach())
    results = []
    for model in (plain, strided):
        torch.manual_seed(1)
        averages = Averages(model, decay=0.9)
        for _ in range(4):
            move(model)
            averages.update()
        results.append(value(averages, model))
        if model is strided and format == "fp32":
            assert averages.state_dict()["average.0"].stride() == strided[0].stride()
    for name, t in results[0].items():
        assert torch.equal(t, results[1][name])


def test_weights_that_are_not_finite_spoil_their_own_average_alone() -> None:
    model = nn.Linear(300, 1, bias=False)
    for format in ("fp32", "bf16"):
        averages = Averages(model, decay=0.5, format=format)  # type: ignore[arg-type]
        averages.update()
        with torch.no_grad():
            model.weight.copy_(torch.ones(1, 300))
            model.weight[0, 7] = float("nan")
            model.weight[0, 299] = float("inf")
        averages.update()
        weight = value(averages, model)["weight"][0]
        assert weight[7].isnan() and weight[299].isinf()
        assert weight.isfinite().sum() == 298
        nn.init.zeros_(model.weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mean"}, "kind: expected ema, swa or lawa, received mean"),
        ({"decay": 1.0}, r"decay: expected a number in \[0, 1\), received 1"),
        ({"decay": float("nan")}, r"decay: expected a number in \[0, 1\), received nan"),
        ({"every": 0}, "every: expected a number of at least 1, received 0"),
        ({"last": 0}, "last: expected a number of at least 1, received 0"),
        ({"format": "fp16"}, "format: expected fp32 or bf16, received fp16"),
        ({"offload": "nvme"}, "offload: expected cpu or none, received nvme"),
    ],
)
def test_options_out_of_range_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Averages: {message}"):
        Averages(Model(), **options)


@pytest.mark.parametrize(
    ("kind", "format", "dtype", "each"),
    [
        ("ema", "fp32", torch.float32, 4),
        ("ema", "fp32", torch.bfloat16, 4),
        ("swa", "bf16", torch.float32, 2),
        ("swa", "bf16", torch.float64, 8),
        ("lawa", "fp32", torch.bfloat16, 3 * 2),
        ("lawa", "bf16", torch.float32, 3 * 2),
    ],
)
def test_bytes_per_weight(kind: Any, format: Any, dtype: torch.dtype, each: int) -> None:
    """The state shares the memory of the averages, so its bytes are theirs."""
    model = nn.Sequential(nn.Linear(30, 7), nn.Linear(100, 100).requires_grad_(False)).to(dtype)
    averages = Averages(model, kind, format=format, last=3)
    for _ in range(5):
        averages.update()
    tensors = [t for t in averages.state_dict().values() if isinstance(t, Tensor)]
    assert sum(t.untyped_storage().nbytes() for t in tensors) == each * (30 * 7 + 7)
    kept = {t.data_ptr() for t in tensors}
    averages.update()
    assert {t.data_ptr() for t in averages.state_dict().values() if isinstance(t, Tensor)} == kept


def test_a_model_without_weights() -> None:
    averages = Averages(nn.GELU())
    averages.update()
    with averages.swap():
        pass
    again = Averages(nn.GELU())
    again.load_state_dict(averages.state_dict())
    assert again.updates == 1


# ---- Sharded weights


def _fsdp(rank: int, kind: Any, format: Any) -> None:
    sharded, plain = fully_shard(processes.model()), processes.model()
    ours = [Averages(net, kind, decay=0.75, last=2, format=format) for net in (sharded, plain)]
    steps = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (sharded, plain)]
    for step in range(4):
        for net, optimizer, averages in zip((sharded, plain), steps, ours, strict=True):
            processes.train(net, optimizer, range(step, step + 1))
            averages.update()
    before = [processes.whole(p).clone() for p in sharded.parameters()]
    with ours[0].swap(), ours[1].swap(), torch.no_grad():
        results = [net(processes.batch(9)) for net in (sharded, plain)]  # leaves whole weights in the modules
    # Gradients are summed in another order. The format bf16 draws other random bits for the shards.
    torch.testing.assert_close(*results, rtol=0, atol=1e-5 if format == "fp32" else 2e-2)
    after = [processes.whole(p) for p in sharded.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with torch.no_grad():
        assert not torch.equal(sharded(processes.batch(9)), results[0])


@pytest.mark.parametrize(("kind", "format"), [("ema", "fp32"), ("lawa", "fp32"), ("ema", "bf16")])
def test_shards_of_fsdp_have_their_averages(kind: str, format: str, tmp_path: Path) -> None:
    processes.run(2, tmp_path, _fsdp, kind, format)
