"""Tests of shoestring.optim.APOLLO and APOLLOMini against their definition in fp64, and in training runs."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from low_rank import PROJECTED, Adam64, gradients, parameters, train
from relative_error import relative_error
from shoestring.optim import APOLLO, AdamW, APOLLOMini

SIDE = {0: (24, 40), 1: (40, 24), 2: (12, 27), 6: (16, 48)}


def normal(size: tuple[int, int], seed: int, device: torch.device) -> Tensor:
    """Return the random numbers of a projection, as documented: those of a generator with the state's seed."""
    return torch.randn(size, generator=torch.Generator(device).manual_seed(seed), device=device)


class Apollo64:
    """The update rule of APOLLO for one matrix, in fp64."""

    def __init__(self, tensor_wise: bool) -> None:
        self.adam, self.tensor_wise, self.norm = Adam64(eps=1e-6), tensor_wise, 0.0

    def __call__(self, grad: Tensor, basis: Tensor) -> Tensor:
        """Return APOLLO's update of a matrix for a learning rate of 1, without weight decay."""
        if grad.shape[0] > grad.shape[1]:
            return self(grad.mT, basis).mT
        low_grad = basis.mT @ grad
        low = self.adam(low_grad)
        if self.tensor_wise:
            scaled = grad * (low.norm() / low_grad.norm())
        else:
            scaled = grad * (low.norm(dim=0) / low_grad.norm(dim=0))
        size = scaled.norm().item()
        if self.norm > 0 and size > 1.01 * self.norm:
            scaled *= 1.01 * self.norm / size
        self.norm = scaled.norm().item()
        return -scaled


@pytest.mark.device
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    ("cls", "scale_type"), [(APOLLO, "channel"), (APOLLO, "tensor"), (APOLLOMini, "tensor")]
)
def test_follows_fp64(cls: type, scale_type: str, maximize: bool) -> None:
    """APOLLO follows its definition in fp64 over three projections, with weight decay and clipping.

    In some steps the norm of the update grows so much that APOLLO's growth limit applies, in others it does
    not.
    """
    params = parameters()
    rank, clip, decay, lr, scale = 1 if cls is APOLLOMini else 8, 5.0, 0.2, 1e-2, 1.7
    options = dict(rank=rank, update_proj_gap=3, scale=scale, scale_type=scale_type, max_grad_norm=clip)
    opt = cls(
        params, AdamW, lr=lr, weight_decay=decay, maximize=maximize, state_format="fp32", eps=1e-6, **options
    )
    exact = [p.detach().double() for p in params]
    rules = [Apollo64(scale_type == "tensor") for _ in params]
    grown = []
    for step in range(8):
        gradients(params, step, size=1.0 if step % 3 else 4.0)
        if step == 4:
            params[0].grad = None
        norm = torch.stack([p.grad.double().norm() for p in params if p.grad is not None]).norm()
        opt.step()
        for i in PROJECTED:
            p = params[i]
            if p.grad is None:
                continue
            grad = p.grad.double().flatten(1) * min(1.0, clip / norm.item())
            basis = normal((min(SIDE[i]), rank), opt.state[p]["seed"], p.device).double() / rank**0.5
            before = rules[i].norm
            step_of_one = rules[i](grad, basis).view(p.shape)
            grown.append(rules[i].norm / before if before else 1.0)
            exact[i] = exact[i] * (1 - lr * decay) + lr * scale * step_of_one * (-1 if maximize else 1)
            assert opt.state[p]["norm"].item() == pytest.approx(rules[i].norm, rel=1e-4)
    for i in PROJECTED:
        assert relative_error(params[i], exact[i]) < 1e-5
    assert max(grown) == pytest.approx(1.01) and min(grown) < 1


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_weights_are_rounded_once(dtype: torch.dtype) -> None:
    params = parameters(dtype)
    before = [p.detach().double() for p in params]
    opt = APOLLO(params, AdamW, rank=8, lr=1e-2, weight_decay=0.3, state_format="fp32", eps=1e-6)
    gradients(params, 0)
    opt.step()
    for i in PROJECTED:
        p = params[i]
        basis = normal((min(SIDE[i]), 8), opt.state[p]["seed"], p.device).double() / 8**0.5
        exact = before[i] * (1 - 1e-2 * 0.3) + 1e-2 * Apollo64(False)(p.grad.double().flatten(1), basis).view(
            p.shape
        )
        unit = torch.finfo(dtype).eps * 2.0 ** exact.abs().log2().floor()
        # The 16-bit weight may differ from fp64 by half a unit in the last place, plus the rounding of the
        # fp32 update.
        assert ((p.double() - exact).abs() <= 0.502 * unit + 1e-6).all()


@pytest.mark.device
def test_norms_at_low_rank_are_those_of_the_gradient() -> None:
    """A random projection preserves the norms of columns on average, which APOLLO relies on.

    At rank 8, 95 % of the projected norms are within 50 % of the original norms.
    """
    grad = torch.randn(64, 2000)
    ratio = (normal((64, 8), 5, grad.device).mT / 8**0.5 @ grad).norm(dim=0) / grad.norm(dim=0)
    # The mean squared ratio of projected norms to original norms has a chi-squared distribution with 64 * 8
    # degrees of freedom, so its standard deviation is 6 %.
    assert abs(ratio.square().mean().item() - 1) < 0.1
    assert ((ratio - 1).abs() < 0.5).float().mean() > 0.95


@pytest.mark.device
def test_columns_without_a_gradient_do_not_move() -> None:
    """Columns with a zero gradient stay unchanged, and no weight becomes NaN.

    APOLLO does not divide by a norm of zero. After an update of zero, the growth limit does not apply to the
    next update.
    """
    weight = Parameter(torch.ones(8, 20))
    opt = APOLLO([weight], AdamW, rank=4, lr=0.1, weight_decay=0.0)
    weight.grad = torch.zeros(8, 20)
    opt.step()
    assert torch.equal(weight, torch.ones(8, 20))
    weight.grad[:, 5:] = torch.randn(8, 15)
    opt.step()
    assert (
        torch.equal(weight[:, :5], torch.ones(8, 5))
        and (weight[:, 5:] != 1).all()
        and weight.isfinite().all()
    )


@pytest.mark.device
@pytest.mark.parametrize(("cls", "spread"), [(APOLLO, 1.0), (APOLLOMini, 0.0)])
def test_learns_as_adamw_does(cls: type, spread: float) -> None:
    """APOLLO trains a classifier to half the loss of SGD, and APOLLOMini to at most 1.2 times that of AdamW.

    For the test of APOLLO, the magnitudes of the input features spread over two decades, so that SGD with one
    learning rate is slow.
    """
    generator = torch.Generator(torch.get_default_device()).manual_seed(2)
    x = torch.randn(512, 40, generator=generator) * torch.logspace(-spread, spread, 40)
    teacher = torch.randn(40, 10, generator=generator) / torch.logspace(-spread, spread, 40)[:, None]
    labels = (x @ teacher).argmax(1)

    def train_with(make: object) -> float:
        weight = Parameter(torch.zeros(10, 40))
        opt = make([weight])
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 1 - i / 150)
        for _ in range(150):
            opt.zero_grad()
            loss = torch.nn.functional.cross_entropy(x @ weight.T, labels)
            loss.backward()
            opt.step()
            schedule.step()
        return loss.item()

    options = {} if cls is APOLLOMini else {"rank": 4}
    losses = [
        train_with(lambda p: cls(p, AdamW, lr=0.1, weight_decay=0.0, update_proj_gap=20, **options)),
        train_with(lambda p: AdamW(p, lr=0.1, weight_decay=0.0)),
        train_with(lambda p: torch.optim.SGD(p, lr=0.1)),
    ]
    print("loss: {:.3f}, AdamW {:.3f}, SGD {:.3f}".format(*losses))
    assert losses[0] < 0.5 * losses[2] if spread else losses[0] < 1.2 * losses[1]


def test_projections_are_made_every_gap_steps() -> None:
    params = parameters()
    opt = APOLLO(params, AdamW, rank=8, update_proj_gap=3)
    seeds = []
    for step in range(7):
        train(opt, params, range(step, step + 1))
        seeds.append(opt.state[params[0]]["seed"])
    assert [a == b for a, b in itertools.pairwise(seeds)] == [True, True, False, True, True, False]


def test_bad_scale_type() -> None:
    with pytest.raises(
        ValueError, match='APOLLO: scale_type: expected "channel" or "tensor", received \'row\''
    ):
        APOLLO(parameters(), scale_type="row")
    params = parameters()
    opt = APOLLO(params, rank=8)
    train(opt, params, range(1))
    saved = opt.state_dict()
    saved["state"][0]["norm"] = 1.0
    with pytest.raises(ValueError, match="norm: expected torch.float32 \\(\\), received 1.0"):
        opt.load_state_dict(saved)
