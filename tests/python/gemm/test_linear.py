"""Test linear and linear_group: linear layers with trainable weights."""

import copy
import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shoestring
from operator_cases import Arguments, Draw, Operator, normal
from operator_tests import OperatorTests
from references.gemm import linear_reference
from relative_error import relative_error
from shoestring.gemm.linear import PRODUCTS
from thread_counts import assert_same_bits

pytestmark = pytest.mark.device

# (rows, in_features): one row, odd sizes, no rows, and sizes of several tiles and panels.
SIZES = [(1, 40), (51, 65), (0, 8), (130, 300)]
# Numbers of out_features of two layers by numbers of in_features.
OUTPUTS = {40: (33, 16), 65: (31, 7), 8: (4, 4), 300: (96, 48)}
BF16 = {"dtype": torch.bfloat16}
BY_LIBRARY = 7  # the argument `library` of an operator whose products PyTorch's library computes


def slack(elements: int, dtype: torch.dtype) -> float:
    """Allow more on a GPU: cuBLAS may split the sums of one of two equal products, and add the parts in 16 bits."""
    split = torch.get_default_device().type == "cuda" and dtype.itemsize == 2
    return 1e-7 + split * torch.finfo(dtype).eps / 4


def group_arguments(rows: int, features: int) -> Arguments:
    outs = OUTPUTS.get(features, (features // 2 + 3, features // 3 + 2))
    weight, other = (normal(out, features) for out in outs)
    return {"x": normal(rows, features), "weight": weight, "other_weight": other, "bias": normal(outs[0])}


def arguments(rows: int, features: int) -> Arguments:
    found = group_arguments(rows, features)
    return {"x": normal(2, rows, features), "weight": found["weight"], "bias": found["bias"]}


def residual(rows: int, features: int) -> Draw:
    return normal(2, rows, *arguments(rows, features)["bias"].shape)


@pytest.mark.sample(cpu=48, simt=8)
class TestLinear(OperatorTests):
    operator = Operator(
        "linear",
        lambda library=0, **given: linear_reference(**given),
        arguments,
        SIZES,
        [
            {},
            BF16,
            {"residual": residual},
            BF16 | {"residual": residual},
            {"bias": None, "library": BY_LIBRARY},
            BF16 | {"library": BY_LIBRARY},
        ],
        slack=slack,
        twice_differentiable=True,
        autocast=lambda given: given | BF16,
        traced=2,
    )


@pytest.mark.sample(cpu=48, simt=8)
class TestLinearGroup(OperatorTests):
    operator = Operator(
        "linear_group",
        lambda x, weight, other_weight, bias, library=0: [
            linear_reference(x, weight, bias),
            linear_reference(x, other_weight),
        ],
        group_arguments,
        SIZES,
        [{}, {"library": BY_LIBRARY}],
        slack=slack,
        twice_differentiable=True,
        autocast=lambda given: given | BF16,
        schema=lambda x, weight, other_weight, bias, **options: {
            "x": x,
            "weights": [weight, other_weight],
            "biases": [bias, None],
            **options,
        },
        traced=1,
    )


@pytest.mark.parametrize("library", [(), PRODUCTS], ids=str)
def test_autocast(capability: str, backend: str, library: tuple[str, ...]) -> None:
    """Under autocast, gradients have the dtypes of x and of the weights, and are no worse than eager's."""
    device = "cuda" if backend == "cuda" else "cpu"
    x, weights = torch.randn(3, 70, 96), [torch.randn(64, 96), torch.randn(40, 96)]
    bias, upstream = torch.randn(64), [torch.randn(3, 70, 64), torch.randn(3, 70, 40)]
    results = []
    for ours, compute in ((True, torch.float32), (False, torch.float64), (False, torch.float32)):
        inputs = [t.to(compute).requires_grad_() for t in (x, *weights, bias)]
        with torch.autocast(device, torch.bfloat16, enabled=compute != torch.float64):
            y = (
                shoestring.linear_group(inputs[0], inputs[1:3], [inputs[3], None], library=library)
                if ours
                else [F.linear(inputs[0], inputs[1], inputs[3]), F.linear(inputs[0], inputs[2])]
            )
        grads = torch.autograd.grad(y, inputs, [g.to(t.dtype) for g, t in zip(upstream, y, strict=True)])
        results.append([*y, *grads])
    dtypes = [torch.bfloat16] * 2 + [torch.float32] * 4
    for i, dtype in enumerate(dtypes):
        a, b, c = (found[i] for found in results)
        assert a.dtype == dtype and a.shape == b.shape
        assert relative_error(a, b) <= 1.1 * relative_error(c, b) + slack(a.numel(), dtype)


def test_what_is_kept() -> None:
    """x is saved once, rounded to the dtype of the product, and no rounded weight is saved."""
    x, weights = torch.randn(40, 24, requires_grad=True), [torch.randn(8, 24, requires_grad=True)] * 2
    saved: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s),
        torch.autocast(x.device.type, torch.bfloat16),
    ):
        shoestring.linear_group(x, weights)
    assert [t.dtype for t in saved] == [torch.bfloat16, torch.float32, torch.float32]
    assert all(t.data_ptr() == weights[0].data_ptr() for t in saved[1:])


def test_subsets_of_gradients() -> None:
    """Each gradient has the same bits whichever other gradients are wanted.

    A layer whose output is not used gets no gradient.
    """
    tensors = [torch.randn(s) for s in ((40, 24), (16, 24), (8, 24), (16,))]

    def gradients(wanted: tuple[int, ...], used: tuple[int, ...]) -> dict[int, Tensor | None]:
        inputs = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        y = shoestring.linear_group(inputs[0], inputs[1:3], [inputs[3], None])
        loss = torch.cat([y[i].detach().mul(y[i]).flatten() for i in used]).sum()
        found = torch.autograd.grad(loss, [inputs[i] for i in wanted], allow_unused=True)
        return dict(zip(wanted, found, strict=True))

    every = gradients((0, 1, 2, 3), (0, 1))
    for wanted in itertools.chain.from_iterable(itertools.combinations(range(4), n) for n in (1, 2, 3)):
        for i, found in gradients(wanted, (0, 1)).items():
            assert found is not None and torch.equal(found, every[i])  # type: ignore[arg-type]
    for used, missing in ((0, [2]), (1, [1, 3])):
        assert [i for i, g in gradients((0, 1, 2, 3), (used,)).items() if g is None] == missing


def test_views_and_strides(capability: str) -> None:
    x = torch.randn(12, 5, 40)[::2, :, 3:36].transpose(0, 1)
    weight = torch.randn(33, 31).t()
    torch.testing.assert_close(shoestring.linear(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-5)
    vector = torch.randn(33)
    torch.testing.assert_close(
        shoestring.linear(vector, weight), F.linear(vector, weight), rtol=1e-5, atol=1e-5
    )


def test_not_finite_stays_in_its_row(capability: str) -> None:
    x, weight = torch.randn(20, 40), torch.randn(16, 40)
    x[3, 5], x[7, 1] = float("nan"), 1e30
    y = shoestring.linear(x, weight)
    assert bool(y[3].isnan().all()) and bool(torch.cat([y[:3], y[4:]]).isfinite().all())


def test_double_backward_under_autocast() -> None:
    results = []
    for function in (shoestring.linear, F.linear):
        torch.manual_seed(0)
        x, weight = torch.randn(9, 16, requires_grad=True), torch.randn(12, 16, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = function(x, weight)
        grads = torch.autograd.grad(y.float().square().sum(), (x, weight), create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), (x, weight)))
    for ours, eager in zip(*results, strict=True):
        assert relative_error(ours, eager.double()) <= 2e-2


def test_compiles_under_autocast() -> None:
    def loss(x: Tensor, q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        a, b = shoestring.linear_group(x, [q, k], [bias, None])
        return (a * a).sum() + shoestring.linear(b, k, residual=x[..., : k.shape[0]]).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9):
        inputs = [torch.randn(s, requires_grad=True) for s in ((tokens, 8), (6, 8), (8, 8), (6,))]
        with torch.autocast("cpu", torch.bfloat16):
            a = torch.autograd.grad(compiled(*inputs), inputs)
            b = torch.autograd.grad(loss(*inputs), inputs)
        for ours, expected in zip(a, b, strict=True):
            torch.testing.assert_close(ours, expected, rtol=2e-2, atol=1e-1)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_threads_change_nothing(capability: str, backend: str, autocast: bool) -> None:
    if backend != "cpu" or capability == "plain":
        pytest.skip("the library's products")
    x, weights = (
        torch.randn(700, 130, requires_grad=True),
        [torch.randn(n, 130, requires_grad=True) for n in (90, 33)],
    )

    def run() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = shoestring.linear_group(x, weights)
        return [*y, *torch.autograd.grad(y, (x, *weights), [torch.ones_like(t) for t in y])]

    assert_same_bits(run, (1, 2, 3))


def test_module() -> None:
    torch.manual_seed(0)
    ours = shoestring.nn.Linear(24, 8, library=("forward",))
    torch.manual_seed(0)
    theirs = torch.nn.Linear(24, 8)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    x, residual = torch.randn(2, 5, 24), torch.randn(2, 5, 8)
    torch.testing.assert_close(copy.deepcopy(ours)(x, residual), theirs(x) + residual)
    assert "library=('forward',)" in repr(ours)
    with pytest.raises(ValueError, match="library: expected names out of forward, grad_x, grad_weight"):
        shoestring.nn.Linear(24, 8, library=("backward",))


def test_errors() -> None:
    x, weight = torch.ones(3, 4), torch.ones(5, 4)
    cases = [
        ((x, torch.ones(5, 3)), {}, "weight: expected shape"),
        ((x, weight.bfloat16()), {}, "weight: expected Float, received BFloat16; pass dtype"),
        ((x, weight, torch.ones(4)), {}, "bias: expected shape"),
        ((x, weight), {"residual": torch.ones(3, 4)}, "residual: expected the shape of the result"),
        ((x.int(), weight), {}, "x: expected fp32, fp64, bf16 or fp16"),
        ((x, weight), {"dtype": torch.int32}, "dtype: expected fp32"),
        ((torch.tensor(1.0), weight), {}, "x: expected shape"),
    ]
    for args, options, message in cases:
        with pytest.raises(RuntimeError, match="linear: " + message):
            shoestring.linear(*args, **options)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="linear_group: biases: expected none or 2"):
        shoestring.linear_group(x, [weight, weight], [None])
    with pytest.raises(ValueError, match="linear: library: expected names"):
        shoestring.linear(x, weight, library="forward")


def test_a_bias_is_added_before_rounding(capability: str) -> None:
    """The result with a bias is as exact as an fp32 sum that is rounded once, also for a bias of fp32.

    Without SIMD instructions and on a GPU, PyTorch computes the product, and the bias is rounded first.
    """
    x, weight = torch.randn(33, 72).bfloat16(), torch.randn(40, 72).bfloat16()
    bias = torch.randn(40) * 30
    exact = x.double() @ weight.double().t() + bias.double()
    rounds_bias = capability in ("plain", "simt", "cuda")
    y = shoestring.linear(x, weight, bias, dtype=torch.bfloat16)
    bound = exact.abs() * 2**-8 + (bias.abs() * 2**-8 if rounds_bias else 0) + 1e-4
    if capability == "cuda":  # cuBLAS may round the product before it adds the bias
        bound += (exact - bias.double()).abs() * 2**-8
    assert (y.double() - exact).abs().le(bound).all()
