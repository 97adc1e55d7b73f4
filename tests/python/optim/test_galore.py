"""Tests of shoestring.optim.GaLore against its definition in fp64, and of its projections against an SVD."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from low_rank import PROJECTED, Adam64, gradients, parameters, train
from relative_error import relative_error
from shoestring.optim import SGD, AdamW, GaLore


def spectrum(rows: int, columns: int, power: float) -> Tensor:
    """Return a matrix whose i-th singular value is i ** -power, or Gaussian noise if `power` is 0."""
    if power == 0:
        return torch.randn(rows, columns)
    count = min(rows, columns)
    u, v = (torch.linalg.qr(torch.randn(n, count)).Q for n in (rows, columns))
    return u * torch.arange(1.0, count + 1) ** -power @ v.mT


def basis_of(gradient: Tensor, rank: int) -> Tensor:
    """Return the projection that GaLore computes from a gradient."""
    weight = Parameter(torch.zeros_like(gradient))
    opt = GaLore([weight], AdamW, rank=rank, projection="left", seed=3)
    weight.grad = gradient
    opt.step()
    return opt.state[weight]["projection"]


def update(basis: Tensor, grad: Tensor, adam: Adam64, left: bool) -> Tensor:
    """Return GaLore's update in fp64: apply Adam to the projected gradient, and project the result back."""
    return basis @ adam(basis.mT @ grad) if left else adam(grad @ basis) @ basis.mT


@pytest.mark.device
@pytest.mark.parametrize("side", ["auto", "left", "right"])
@pytest.mark.parametrize("maximize", [False, True])
def test_follows_fp64(side: str, maximize: bool) -> None:
    """GaLore follows its definition in fp64 over three projections, with weight decay and clipping.

    Each new projection captures as much of its gradient as the leading singular vectors do.
    """
    params = parameters()
    rank, clip, decay, lr, scale = 8, 5.0, 0.2, 1e-2, 0.5
    options = dict(rank=rank, update_proj_gap=3, scale=scale, projection=side, max_grad_norm=clip)
    opt = GaLore(
        params, AdamW, lr=lr, weight_decay=decay, maximize=maximize, state_format="fp32", eps=1e-4, **options
    )
    exact = [p.detach().double() for p in params]
    adams = [Adam64(eps=1e-4) for _ in params]
    signed: dict[int, Tensor] = {}
    for step in range(8):
        gradients(params, step)
        if step == 4:
            params[0].grad = None
        norm = torch.stack([p.grad.double().norm() for p in params if p.grad is not None]).norm()
        opt.step()
        for i, (p, adam) in enumerate(zip(params, adams, strict=True)):
            if p.grad is None or p.numel() == 0:
                continue
            exact[i] = exact[i] * (1 - lr * decay)
            grad = p.grad.double() * (-1 if maximize else 1) * min(1.0, clip / norm.item())
            matrix = grad.flatten(1) if p.dim() > 1 else grad
            left = side == "left" or (side == "auto" and matrix.shape[0] <= matrix.shape[-1])
            projected = i in PROJECTED or (i == 3 and side == "right")
            if not projected:
                exact[i] += lr * adam(grad)
                continue
            basis = opt.state[p]["projection"].double()
            if opt.state[p]["projection_age"] == 1:  # this step computed the projection
                u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
                best = u[:, :rank] if left else vh[:rank].mT
                captured = [(b.mT @ matrix if left else matrix @ b).norm() ** 2 for b in (basis, best)]
                assert captured[0] > 0.995 * captured[1]
                assert i not in signed or ((basis * signed[i]).sum(0) > 0).all()
            signed[i] = basis
            exact[i] += (lr * scale * update(basis, matrix, adam, left)).view(p.shape)
    for p, e in zip(params, exact, strict=True):
        assert relative_error(p, e) < 1e-6


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_weights_are_rounded_once(dtype: torch.dtype) -> None:
    params = parameters(dtype)
    before = [p.detach().double() for p in params]
    opt = GaLore(params, AdamW, rank=8, lr=1e-2, weight_decay=0.3, scale=1.0, state_format="fp32")
    gradients(params, 0)
    opt.step()
    for i in PROJECTED:
        p, matrix = params[i], params[i].grad.double().flatten(1)
        basis = opt.state[p]["projection"]
        assert basis.dtype == dtype
        left = matrix.shape[0] <= matrix.shape[1]
        low = update(basis.double(), matrix, Adam64(), left).view(p.shape)
        exact = before[i] * (1 - 1e-2 * 0.3) + 1e-2 * low
        unit = torch.finfo(dtype).eps * 2.0 ** exact.abs().log2().floor()
        # The 16-bit weight may differ from fp64 by half a unit in the last place, plus the rounding of the
        # fp32 update.
        assert ((p.double() - exact).abs() <= 0.502 * unit + 1e-6).all()


@pytest.mark.device
@pytest.mark.parametrize(("rows", "columns"), [(96, 160), (160, 96), (64, 64)])
@pytest.mark.parametrize("power", [0, 0.5, 1, 2])
def test_the_basis_is_as_good_as_an_svds(rows: int, columns: int, power: float) -> None:
    """A projection captures nearly as much of a matrix's squared norm as the singular vectors of an SVD.

    The limit for a matrix of noise is looser, since its singular values are nearly equal.
    """
    matrix, rank = spectrum(rows, columns, power), 12
    for scale in (1.0, 1e-30, 1e30):
        basis = basis_of(matrix * scale, rank)
        captured = (basis.mT.double() @ matrix.double()).square().sum()
        best = torch.linalg.svdvals(matrix.double())[:rank].square().sum()
        assert captured > best * (0.97 if power == 0 else 0.999)
        assert (basis.mT @ basis - torch.eye(rank)).abs().max() < 5e-6
    assert torch.equal(basis_of(matrix, rank), basis_of(matrix, rank))
    # The singular values are well separated, so each vector must equal that of the SVD, up to its sign.
    if power == 2:
        u = torch.linalg.svd(matrix.double()).U[:, :4]
        assert ((basis[:, :4].double() * u).sum(0).abs() > 0.999).all()


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_rank_is_the_dense_step(dtype: torch.dtype) -> None:
    """With full rank, GaLore over SGD takes the same steps as SGD alone.

    This holds for every projection with orthonormal columns; with other columns the steps would differ.
    """
    ours, theirs = (Parameter(torch.zeros(16, 24, dtype=dtype)) for _ in range(2))
    a = GaLore([ours], SGD, rank=16, scale=1.0, lr=0.1, state_format="fp32", update_proj_gap=100)
    b = SGD([theirs], lr=0.1, state_format="fp32")
    for _ in range(6):
        ours.grad = theirs.grad = torch.randn(16, 24).to(dtype)
        a.step()
        b.step()
    assert relative_error(ours, theirs) < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.device
@pytest.mark.parametrize("state", ["8bit", "fp32"])
def test_solves_a_low_rank_problem(state: str) -> None:
    """GaLore with rank 6 learns a linear map of rank 4, with an eighth of the optimizer state of AdamW."""
    target, x = torch.randn(48, 4) @ torch.randn(4, 64), torch.randn(256, 48)
    weight = Parameter(torch.zeros(48, 64))
    opt = GaLore(
        [weight], lr=0.4, weight_decay=0.0, state_format=state, rank=6, update_proj_gap=20, scale=1.0
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 300)
    for _ in range(300):
        opt.zero_grad()
        loss = (x @ (weight - target)).square().mean()
        loss.backward()
        opt.step()
        schedule.step()
    assert loss.item() < 1e-3 * (x @ target).square().mean().item()


@pytest.mark.device
@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf])
def test_a_gradient_that_says_nothing_gives_no_projection(bad: float) -> None:
    """If the first gradient is zero or not finite, GaLore uses a random projection for this step.

    The gradient of a weight can be zero in the first step if another layer is initialised to zeros.
    """
    weight = Parameter(torch.zeros(16, 24))
    opt = GaLore([weight], AdamW, rank=2, scale=1.0, lr=1e-2)
    weight.grad = torch.zeros(16, 24)
    weight.grad[0, 0] = bad
    opt.step()
    basis = opt.state[weight]["projection"].clone()
    assert (basis.mT @ basis - torch.eye(2)).abs().max() < 1e-5 and weight.isfinite().all() == (bad == 0)
    # A gradient that is not finite has made Adam's moments NaN, so later steps cannot be checked.
    if bad != 0:
        return
    direction = torch.randn(16, 1)
    weight.grad = direction @ torch.randn(1, 24)
    opt.step()
    assert opt.state[weight]["projection_age"] == 1
    first = opt.state[weight]["projection"][:, :1]
    assert relative_error(first * (first.mT @ direction), direction) < 1e-5
    kept = opt.state[weight]["projection"].clone()
    opt.state[weight]["projection_age"] = 200
    weight.grad = torch.zeros(16, 24)
    opt.step()
    # The projection is due for renewal, but with a zero gradient GaLore keeps the old projection.
    assert torch.equal(opt.state[weight]["projection"], kept)


def test_projections_are_made_every_gap_steps() -> None:
    params = parameters()
    opt = GaLore(params, AdamW, rank=8, update_proj_gap=3)
    bases, seeds = [], []
    for step in range(7):
        train(opt, params, range(step, step + 1))
        bases.append(opt.state[params[0]]["projection"].clone())
        seeds.append(opt.state[params[0]]["seed"])
    assert [torch.equal(a, b) for a, b in itertools.pairwise(bases)] == [
        True,
        True,
        False,
        True,
        True,
        False,
    ]
    assert len(set(seeds)) == 3  # GaLore computes each of the three projections from a different seed.


@pytest.mark.device
def test_weights_that_are_no_matrix_in_memory() -> None:
    """GaLore steps a convolution weight in channels_last format to the same values as a contiguous one."""
    values, grads = torch.randn(12, 4, 3, 3), [torch.randn(12, 4, 3, 3) for _ in range(3)]
    for dtype in (torch.float32, torch.bfloat16):
        plain = Parameter(values.to(dtype, copy=True))
        other = Parameter(values.to(dtype, copy=True, memory_format=torch.channels_last))
        for p in (plain, other):
            opt = GaLore([p], AdamW, rank=4)
            for grad in grads:
                p.grad = grad.to(dtype)
                opt.step()
        assert torch.equal(plain, other) and not torch.equal(plain, values.to(dtype))
        assert other.is_contiguous(memory_format=torch.channels_last)


def test_bad_projection() -> None:
    with pytest.raises(
        ValueError, match='GaLore: projection: expected "auto", "left" or "right", received \'std\''
    ):
        GaLore(parameters(), projection="std")
    params = parameters()
    opt = GaLore(params, rank=8)
    train(opt, params, range(1))
    saved = opt.state_dict()
    saved["state"][0]["projection"] = saved["state"][0]["projection"].half()
    with pytest.raises(
        ValueError, match="projection: expected torch.float32 \\(24, 8\\), received torch.float16"
    ):
        opt.load_state_dict(saved)
