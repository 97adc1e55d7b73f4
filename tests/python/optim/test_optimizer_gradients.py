"""Tests of optimizer classes: gradient accumulation, clipping, steps within backward and bf16 weights."""

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from references.optim import join
from shoestring.optim import SGD, AdamW, GradientNoise, Lion
from shoestring.optim.base import LowMemoryOptimizer

pytestmark = pytest.mark.device

OPTIMIZERS = pytest.mark.parametrize("optimizer", [AdamW, Lion, SGD])
STATES = ("8bit", "4bit", "bf16", "fp32")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
MICRO = 3  # number of micro-batches per optimizer step


class Net(nn.Module):
    """A model with weights that are used once (head), used twice (inner), frozen, or never used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(20, 20)
        self.head = nn.Linear(20, 17)
        self.frozen = nn.Parameter(torch.ones(20), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x * self.frozen)))))


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def loss_of(model: Net, step: int, micro: int) -> Tensor:
    generator = torch.Generator(torch.get_default_device()).manual_seed(100 * step + micro)
    x = torch.randn(4, 20, generator=generator).to(model.head.weight.dtype)
    return model(x).square().mean() / MICRO


def train(model: Net, opt: LowMemoryOptimizer, steps: range, accumulate: bool) -> None:
    """Train with MICRO micro-batches per step.

    Sum gradients with `accumulate()` if ``accumulate``, else in ``.grad``.
    """
    for step in steps:
        for micro in range(MICRO):
            if accumulate and micro < MICRO - 1:
                with opt.accumulate():
                    loss_of(model, step, micro).backward()
            else:
                loss_of(model, step, micro).backward()
        opt.step()
        opt.zero_grad()


def values(model: Net, opt: LowMemoryOptimizer) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()] + [
        opt.state[p][name].clone() for p in model.parameters() for name in sorted(opt.state.get(p, {}))
    ]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@OPTIMIZERS
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.05}], ids=["", "clipped"])
def test_sums_are_those_of_grad(optimizer: Callable[..., LowMemoryOptimizer], options: dict) -> None:
    """For fp32 weights, accumulate() gives the same bits as summing gradients in ``.grad``."""
    results = []
    for accumulate in (False, True):
        model = net()
        opt = optimizer(model.parameters(), lr=1e-2, **options)
        train(model, opt, range(3), accumulate)
        results.append(values(model, opt))
        if options:
            assert 0 < opt.grad_norm.item() < 10
    assert same(*results)
    assert not same(results[0], values(net(), opt))


def test_bf16_gradients_are_added_in_fp32() -> None:
    """Gradients of bf16 weights are summed in `accumulate_dtype`. The step adds the last gradient in fp32.

    In the sum 1 + 2^-9 + 2^-9, bf16 sums lose the first 2^-9. After the step, the sums are zero.
    """
    p = nn.Parameter(torch.zeros(300, dtype=torch.bfloat16))
    for dtype, expected in ((torch.float32, 1 + 2**-8), (torch.bfloat16, 1 + 2**-9)):
        opt = SGD([p], lr=1.0, momentum=0.5, state_format="fp32", accumulate_dtype=dtype)
        for grad in (1.0, 2**-9):
            with opt.accumulate():
                (p * grad).sum().backward()
            assert p.grad is None
        (p * 2**-9).sum().backward()
        opt.step()
        assert (opt.state[p]["momentum_buffer"] == expected).all()
        opt.zero_grad()
        (p * 0).sum().backward()
        opt.step()
        assert (opt.state[p]["momentum_buffer"] == expected / 2).all()


def test_a_parameter_without_a_last_gradient_is_stepped() -> None:
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    opt = SGD([a, b], lr=0.5, momentum=0.5, state_format="fp32")
    with opt.accumulate():
        (a + b).sum().backward()
    a.sum().backward()
    opt.step()
    assert (a == 0).all() and (b == 0.5).all()


@OPTIMIZERS
@DTYPES
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulated"])
def test_steps_within_backward(
    optimizer: Callable[..., LowMemoryOptimizer], dtype: torch.dtype, state: str, accumulate: bool
) -> None:
    """step_in_backward gives the same weights as ordinary steps and frees gradients in backward.

    The test model has a weight that is used twice and an unused weight.
    """
    results = []
    for release in (False, True):
        model = net(dtype)
        weights = "stochastic" if dtype == torch.bfloat16 else "nearest"
        opt = optimizer(
            model.parameters(), lr=1e-2, state_format=state, weight_rounding=weights, step_in_backward=release
        )
        if accumulate:
            train(model, opt, range(3), True)
        else:
            for step in range(3):
                loss_of(model, step, 0).backward()
                assert release == (model.head.weight.grad is None)
                opt.step()
                opt.zero_grad()
        used = [p for p in model.parameters() if p is not model.unused]
        results.append([p.detach() for p in used] + [opt.state[model.head.weight]["step"]])
        assert (model.unused == 1).all()
    assert same(*results)


def test_clipping_within_backward_is_by_the_last_norm() -> None:
    """step_in_backward clips by the gradient norm of the previous step, and does not clip the first step.

    A checkpoint keeps the norm of the last step.
    """
    model, plain = net(), net()
    opt = SGD(model.parameters(), lr=0.1, state_format="fp32", step_in_backward=True, max_grad_norm=0.01)
    other = SGD(plain.parameters(), lr=0.1, state_format="fp32")
    factor = 1.0
    for step in range(4):
        loss_of(model, step, 0).backward()
        opt.step()
        loss_of(plain, step, 0).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        with torch.no_grad():
            for p in plain.parameters():
                if p.grad is not None:
                    p.grad *= factor
        other.step()
        other.zero_grad()
        torch.testing.assert_close(opt.grad_norm, norm)
        factor = min(1.0, 0.01 / (norm.item() + 1e-6))
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    again = copy.deepcopy(model)
    resumed = SGD(again.parameters(), lr=0.1, state_format="fp32", step_in_backward=True, max_grad_norm=0.01)
    resumed.load_state_dict(opt.state_dict())
    for m, o in ((model, opt), (again, resumed)):
        loss_of(m, 5, 0).backward()
        o.step()
    assert same(list(model.parameters()), list(again.parameters()))


def test_a_second_gradient_in_one_backward_is_refused() -> None:
    """A reentrant checkpoint delivers the gradient of a parameter that is used twice in two parts."""
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    opt = AdamW(shared.parameters(), state_format="fp32", step_in_backward=True)

    def loss(use_reentrant: bool) -> Tensor:
        x = torch.randn(3, 4, requires_grad=True)
        for _ in range(2):
            x = checkpoint(shared, x, use_reentrant=use_reentrant)
        return x.square().sum()

    with pytest.raises(RuntimeError, match="a second gradient of a parameter.*use_reentrant=False"):
        loss(use_reentrant=True).backward()
    shared.zero_grad()
    opt.zero_grad()
    loss(use_reentrant=False).backward()
    opt.step()
    assert opt.state[shared.weight]["step"] == 2


def test_grad_scaler_looks_at_sums() -> None:
    """An infinite gradient in an early micro-batch skips this step and no other, and lowers GradScaler's scale."""
    p = nn.Parameter(torch.ones(300))
    opt = SGD([p], lr=0.5, momentum=0.5, state_format="fp32")
    scaler = torch.amp.GradScaler(p.device.type, init_scale=16.0, growth_interval=100)
    for bad in (True, False):
        with opt.accumulate():
            scaler.scale(p * (torch.inf if bad else 1.0)).sum().backward()
        scaler.scale(p.sum()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert (p == (1.0 if bad else 0.0)).all()
        assert scaler.get_scale() == 8.0
    with opt.accumulate():
        scaler.scale(p.sum()).backward()
    scaler.scale(p.sum()).backward()
    scaler.unscale_(opt)
    assert p.grad is not None and (p.grad == 2.0).all()
    scaler.step(opt)
    assert (p < 0).all()


def test_a_grad_scaler_may_not_unscale_sums_of_16_bit_gradients() -> None:
    p = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    opt = SGD([p], lr=0.5)
    scaler = torch.amp.GradScaler(p.device.type, init_scale=16.0)
    with opt.accumulate():
        scaler.scale(p.sum()).backward()
    scaler.scale(p.sum()).backward()
    scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match="SGD: step: expected scaled gradients, .* use max_grad_norm"):
        scaler.step(opt)
    assert (p == 1).all()


@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offload", [None, "cpu", "stream"])
def test_clip_grad_norm_sees_all_micro_batches(sums: torch.dtype, offload: str | None) -> None:
    results = []
    for accumulate in (False, True):
        model = net()
        opt = AdamW(model.parameters(), lr=1e-2, state_format="fp32", accumulate_dtype=sums, offload=offload)
        for step in range(3):
            for micro in range(MICRO):
                with opt.accumulate() if accumulate and micro < MICRO - 1 else nullcontext():
                    loss_of(model, step, micro).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            opt.zero_grad()
        results.append([norm, *model.parameters()])
    tolerance = 1e-6 if sums == torch.float32 else 1e-2
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def test_changed_gradients_without_their_sums_are_refused() -> None:
    """bf16 gradients, those that GradientNoise measures, and parameters that the last micro-batch leaves out."""

    def step(model: Net, opt: LowMemoryOptimizer, clip: Callable[[], object] = lambda: None) -> None:
        with opt.accumulate():
            (loss_of(model, 0, 0) + model.unused.sum()).backward()
        loss_of(model, 0, 1).backward()
        clip()
        opt.step()
        opt.zero_grad()

    for dtype, measures in ((torch.bfloat16, False), (torch.float32, True), (torch.float32, False)):
        model = net(dtype)
        opt = AdamW(model.parameters())
        if measures:
            GradientNoise(opt)
        step(model, opt)
        message = "AdamW: step: expected gradients as backward has left them"
        with pytest.raises(RuntimeError, match=message):
            step(model, opt, lambda m=model: nn.utils.clip_grad_norm_(m.parameters(), 1e-3))  # type: ignore[misc]
        with pytest.raises(RuntimeError, match=message):
            opt.zero_grad()
            step(model, opt, lambda m=model: setattr(m.head.weight, "grad", torch.ones_like(m.head.weight)))  # type: ignore[misc]


def test_no_grad_scaler_within_backward() -> None:
    p = nn.Parameter(torch.ones(3))
    opt = SGD([p], step_in_backward=True)
    scaler = torch.amp.GradScaler(p.device.type, init_scale=16.0)
    scaler.scale(p.sum()).backward()
    opt.found_inf = torch.zeros(1)
    with pytest.raises(RuntimeError, match="SGD: step: expected no GradScaler with step_in_backward=True"):
        opt.step()


@OPTIMIZERS
@pytest.mark.parametrize("state", STATES)
def test_remainders_are_fp32_weights(optimizer: Callable[..., LowMemoryOptimizer], state: str) -> None:
    """bf16 weights with remainders have the same bits as fp32 weights after the same steps.

    fp32 parameters in the same group have no remainder.
    """
    torch.manual_seed(1)
    masters = [nn.Parameter(torch.randn(300)), nn.Parameter(torch.randn(20))]
    weights = [nn.Parameter(masters[0].detach().bfloat16()), nn.Parameter(masters[1].detach().clone())]
    with torch.no_grad():
        masters[0].copy_(weights[0])
    ours = optimizer(weights, lr=1e-3, state_format=state, weight_rounding="remainder")
    theirs = optimizer(masters, lr=1e-3, state_format=state)
    for _ in range(5):
        for p, q in zip(weights, masters, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.to(q.dtype)
        ours.step()
        theirs.step()
        assert torch.equal(
            join(weights[0].detach(), ours.state[weights[0]]["weight_remainder"]), masters[0].detach()
        )
        assert torch.equal(weights[1], masters[1])
    assert "weight_remainder" not in ours.state[weights[1]]
    assert not torch.equal(weights[0].float(), masters[0])


@OPTIMIZERS
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("weights", ["nearest", "stochastic", "remainder"])
def test_resume_is_bitwise(optimizer: Callable[..., LowMemoryOptimizer], state: str, weights: str) -> None:
    """A new model and optimizer that load a checkpoint continue with the bits of uninterrupted training."""
    options = dict(lr=1e-3, state_format=state, weight_rounding=weights, min_quantize_size=30, seed=5)
    model = net(torch.bfloat16)
    opt = optimizer(model.parameters(), **options)
    train(model, opt, range(2), False)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    train(model, opt, range(2, 4), True)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = net(torch.bfloat16)
    resumed = optimizer(again.parameters(), **options | {"seed": 0})
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["opt"])
    train(again, resumed, range(2, 4), True)
    assert same(values(model, opt), values(again, resumed))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"weight_rounding": "exact"},
            'weight_rounding: expected "nearest" or "stochastic" or "remainder", received',
        ),
        ({"seed": 0.5}, "seed: expected a whole number"),
        ({"accumulate_dtype": torch.float16}, "accumulate_dtype: expected torch.float32 or torch.bfloat16"),
        (
            {"weight_rounding": "remainder"},
            'params\\[1\\]: weight_rounding="remainder" expects bf16 .*, received torch.float16',
        ),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3).half())]
    with pytest.raises(ValueError, match=f"AdamW: {message}"):
        AdamW(params, **options)
