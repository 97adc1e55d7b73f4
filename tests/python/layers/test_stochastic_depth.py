from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import shoestring
from shoestring import stochastic_depth, stochastic_depth_rate


def kept_rows(x: Tensor, p: float, **where: int) -> Tensor:
    """Return which rows stochastic_depth keeps, from a branch that counts its rows."""
    seen = torch.zeros(len(x), dtype=torch.bool)

    def branch(rows: Tensor) -> Tensor:
        seen[rows[:, 0].long()] = True
        return rows

    numbered = torch.arange(len(x)).double().unsqueeze(1)
    stochastic_depth(branch, numbered, p, **where)  # type: ignore[arg-type]
    return seen


def test_rows_against_the_definition() -> None:
    """Kept rows are x + fn(x) / (1 - p), all others x, and so are the gradients."""
    for rows in (1, 2, 7, 33):
        branch = nn.Linear(5, 5).double()
        x = torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
        for step in range(4):
            ours = stochastic_depth(branch, x, 0.4, step=step, layer=2, seed=9)
            kept = kept_rows(x, 0.4, step=step, layer=2, seed=9).unsqueeze(1)
            exact = x + kept * branch(x) / 0.6
            torch.testing.assert_close(ours, exact)
            weight = torch.randn_like(x)
            wanted = (x, branch.weight, branch.bias)
            found = torch.autograd.grad((ours * weight).sum(), wanted, allow_unused=True)
            for one, other in zip(found, torch.autograd.grad((exact * weight).sum(), wanted), strict=True):
                torch.testing.assert_close(torch.zeros_like(other) if one is None else one, other)


def test_batch_against_the_definition() -> None:
    branch, x = nn.Linear(5, 5), torch.randn(3, 5)
    outcomes = []
    for step in range(40):
        ours = stochastic_depth(branch, x, 0.3, "batch", step=step, layer=0)
        outcomes.append(not torch.equal(ours, x))
        if outcomes[-1]:
            torch.testing.assert_close(ours, x + branch(x) / 0.7)
        assert ours.data_ptr() != x.data_ptr()
    assert set(outcomes) == {True, False}


def test_probabilities() -> None:
    """Each row is kept with probability 1 - p, and pairs of rows and layers are drawn independently."""
    p, steps = 0.37, 4000
    kept = torch.stack([kept_rows(torch.empty(5), p, step=step, layer=0) for step in range(steps)]).double()
    deviation = (p * (1 - p) / steps) ** 0.5
    assert ((kept.mean(0) - (1 - p)).abs() < 5 * deviation).all()
    assert set(kept.sum(1).tolist()) == {3.0, 4.0}  # 0.63 * 5 = 3.15
    # Of 2 kept of 4 rows, each of the 6 pairs has probability 1/6.
    pairs = torch.stack([kept_rows(torch.empty(4), 0.5, step=s, layer=1) for s in range(steps)]).double()
    together = (pairs.T @ pairs / steps)[~torch.eye(4, dtype=torch.bool)]
    assert ((together - 1 / 6).abs() < 5 * (5 / 36 / steps) ** 0.5).all()
    one, other = (
        torch.stack([kept_rows(torch.empty(1), 0.5, step=s, layer=n) for s in range(steps)]) for n in (0, 1)
    )
    assert abs((one == other).double().mean().item() - 0.5) < 5 * 0.5 / steps**0.5


def test_the_draw_is_a_pure_function() -> None:
    """These rows are also in the test in C++, so both languages keep the same."""
    kept = [
        kept_rows(torch.empty(8), 0.4, step=s, layer=3, seed=-5).nonzero().flatten() for s in (0, 1, 2**40)
    ]
    assert [rows.tolist() for rows in kept] == [[0, 1, 3, 6, 7], [0, 1, 2, 3, 6], [1, 2, 3, 5, 7]]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    kept_rows(torch.empty(8), 0.4, step=0, layer=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_work_for_rows_that_are_left_out() -> None:
    calls: list[int] = []

    def branch(rows: Tensor) -> Tensor:
        calls.append(len(rows))
        return rows.sin()

    x = torch.randn(10, 3)
    stochastic_depth(branch, x, 0.4, step=0, layer=0)
    assert calls == [6]
    for step in range(50):
        stochastic_depth(branch, x, 0.9, "batch", step=step, layer=0)
    assert len(calls) < 25 and set(calls) == {6, 10}
    stochastic_depth(branch, x[:0], 0.4, step=0, layer=0)
    assert len(calls) < 25


def test_evaluation_and_zero() -> None:
    branch, x = nn.Linear(4, 4), torch.randn(6, 4)
    for mode in ("row", "batch"):
        off = stochastic_depth(branch, x, 0.9, mode, step=0, layer=0, training=False)
        assert torch.equal(off, x + branch(x))
        assert torch.equal(stochastic_depth(branch, x, 0.0, mode, step=0, layer=0), x + branch(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    """The result has the dtype of x, also if the branch runs under autocast or returns fp32."""
    x = torch.randn(9, 4).to(dtype)
    y = stochastic_depth(lambda rows: rows.float().exp(), x, 0.5, step=0, layer=0)
    assert y.dtype == dtype
    exact = x.double() + (y != x) * x.double().exp().to(dtype) * 2
    torch.testing.assert_close(y, exact.to(dtype))
    branch = nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = stochastic_depth(branch, x.float(), 0.5, step=0, layer=0)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert branch.weight.grad is not None


def test_memory_formats_and_strides() -> None:
    formats = []

    def branch(rows: Tensor) -> Tensor:
        formats.append(rows.is_contiguous(memory_format=torch.channels_last))
        return rows * 2

    x = torch.randn(8, 3, 4, 5)
    plain = stochastic_depth(branch, x, 0.5, step=0, layer=0)
    last = stochastic_depth(branch, x.to(memory_format=torch.channels_last), 0.5, step=0, layer=0)
    assert formats == [False, True]
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain, last)
    strided = torch.randn(5, 7).t()
    assert torch.equal(
        stochastic_depth(torch.sin, strided, 0.5, step=1, layer=0),
        stochastic_depth(torch.sin, strided.contiguous(), 0.5, step=1, layer=0),
    )
    volume = torch.randn(4, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d)
    y = stochastic_depth(torch.sin, volume, 0.5, step=1, layer=0)
    assert torch.equal(y, stochastic_depth(torch.sin, volume.contiguous(), 0.5, step=1, layer=0))


def test_values_that_are_not_finite_stay_in_their_rows() -> None:
    x = torch.ones(6, 2)
    x[2] = torch.nan
    y = stochastic_depth(torch.exp, x, 0.5, step=0, layer=0)
    assert y.isnan().any(1).nonzero().flatten().tolist() == [2]


class Stack(nn.Module):
    def __init__(self, layers: int, mode: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(layers)
        )
        self.mode = mode

    def forward(self, x: Tensor, step: int) -> Tensor:
        for layer, block in enumerate(self.blocks):
            x = stochastic_depth(block, x, 0.4, self.mode, step=step, layer=layer, training=self.training)
        return x


@pytest.mark.parametrize("mode", ["row", "batch"])
@pytest.mark.parametrize("save", [shoestring.checkpoint, torch_checkpoint], ids=["ours", "torch"])
def test_checkpoint(mode: str, save: Callable[..., Tensor]) -> None:
    """Recomputation keeps the same rows, so gradients are the same bits."""
    model, x = Stack(3, mode), torch.randn(8, 16, requires_grad=True)
    more = {} if save is shoestring.checkpoint else {"use_reentrant": False}
    for step in range(3):
        wanted = [x, *model.parameters()]
        plain = torch.autograd.grad(model(x, step).square().sum(), wanted, allow_unused=True)
        saved = save(model, x, step, **more)
        again = torch.autograd.grad(saved.square().sum(), wanted, allow_unused=True)
        for one, other in zip(plain, again, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("mode", ["row", "batch"])
def test_compile(mode: str) -> None:
    """A compiled model, and compiled branches, keep the same rows as eager ones."""
    torch.compiler.reset()
    model, x = Stack(2, mode), torch.randn(8, 16)
    whole = torch.compile(model, backend="aot_eager")
    for step in range(6):
        torch.testing.assert_close(whole(x, step), model(x, step))
    block = torch.compile(model.blocks[0], backend="aot_eager", dynamic=True, fullgraph=True)
    for step in range(6):
        ours = stochastic_depth(block, x, 0.45, mode, step=step, layer=0)
        torch.testing.assert_close(ours, stochastic_depth(model.blocks[0], x, 0.45, mode, step=step, layer=0))


def test_schedule() -> None:
    rates = [stochastic_depth_rate(layer, 12, 0.3) for layer in range(12)]
    assert rates[-1] == 0.3
    assert rates == pytest.approx([0.025 * (layer + 1) for layer in range(12)])
    for layer, layers in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(
            ValueError, match=r"stochastic_depth_rate: layer: expected a number in \[0, layers"
        ):
            stochastic_depth_rate(layer, layers, 0.1)
    with pytest.raises(
        ValueError, match=r"stochastic_depth_rate: p: expected a probability in \[0, 1\), rec"
    ):
        stochastic_depth_rate(0, 1, 1.0)


def test_errors() -> None:
    x = torch.randn(4, 2)
    for options, message in (
        ({"p": 1.0}, r"p: expected a probability in \[0, 1\), received 1"),
        ({"p": float("nan")}, r"p: expected a probability in \[0, 1\), received nan"),
        ({"step": -1}, "step: expected a number of at least 0, received -1"),
        ({"layer": -1}, r"layer: expected a number in \[0, 2\^32\), received -1"),
        ({"mode": "rows"}, 'mode: expected "row" or "batch", received \'rows\''),
        ({"x": torch.tensor(1.0)}, 'x: expected at least one dimension with mode "row", received 0'),
        (
            {"fn": lambda rows: rows[:1]},
            r"fn: expected a result of the shape of its argument, \[2, 2\], rece",
        ),
    ):
        arguments = {"fn": torch.sin, "x": x, "p": 0.5, "step": 0, "layer": 0, **options}
        with pytest.raises(ValueError, match="stochastic_depth: " + message):
            stochastic_depth(**arguments)
