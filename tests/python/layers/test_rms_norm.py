from typing import Any

import pytest
import torch
from torch import Tensor

import shoestring
from operator_cases import Arguments, Draw, Operator, uniform
from operator_tests import OperatorTests
from references.layers import add_rms_norm_reference, rms_norm_reference
from relative_error import relative_error
from thread_counts import assert_same_bits

pytestmark = pytest.mark.device

EPS = 1e-5
# Shapes (rows, features): no rows, no features, one element, and odd sizes. On CUDA, one warp reads a row of
# 192, one block a row of 1096, and a block reads a row of 8208 twice. (300, 24) has more rows than one part
# of the reduction over rows.
SHAPES = [(0, 64), (3, 0), (1, 1), (5, 77), (9, 192), (3, 1096), (2, 8208), (300, 24)]
GEMMA = {"eps": EPS, "offset": 0.25, "upcast": "gemma"}


def rows_of_different_norm(rows: int, features: int) -> Draw:
    def values(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
        norms = torch.rand(rows, 1, generator=g, device="cpu") * 3 + 0.5
        return torch.randn(shape, generator=g, device="cpu") * norms

    return Draw((rows, features), values)


def arguments(rows: int, features: int) -> Arguments:
    return {"x": rows_of_different_norm(rows, features), "weight": uniform(features, low=0.5, high=1.5)}


class TestRmsNorm(OperatorTests):
    # add_rms_norm runs the same kernels on rows of all lengths.
    operator = Operator(
        "rms_norm",
        rms_norm_reference,
        arguments,
        [(5, 77), (3, 1096)],
        [GEMMA, {"eps": EPS, "weight": None}],
    )


class TestAddRmsNorm(OperatorTests):
    operator = Operator(
        "add_rms_norm",
        add_rms_norm_reference,
        lambda rows, features: (
            arguments(rows, features) | {"residual": rows_of_different_norm(rows, features)}
        ),
        SHAPES,
        [GEMMA],
    )


def inputs(
    rows: int, features: int, dtype: torch.dtype, weight: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return x and residual with rows of different norm, a weight, and the gradients of both outputs.

    The outputs are the normalised rows and the sum of x and residual.
    """
    size = torch.rand(rows, 1) * 3 + 0.5
    x, residual, grad, grad_sum = ((torch.randn(rows, features) * size).to(dtype) for _ in range(4))
    w = (torch.rand(features) + 0.5).to(weight or dtype)
    return {"x": x, "residual": residual, "weight": w, "grad": grad, "grad_sum": grad_sum}


def results(
    function: Any, given: dict[str, Tensor], compute: torch.dtype | None, **options: Any
) -> list[Tensor]:
    """Return normalised rows, residual sum and gradients of `function`, computed in `compute` if given."""
    t = {name: value.to(compute or value.dtype) for name, value in given.items()}
    leaves = [t[name].detach().requires_grad_() for name in ("x", "residual", "weight")]
    y, total = function(*leaves, eps=EPS, **options)
    return [y, total, *torch.autograd.grad((y, total), leaves, (t["grad"], t["grad_sum"]))]


def cancelled(given: dict[str, Tensor], gradient: Tensor) -> float:
    """Return the norm of the terms whose difference is the gradient of x, divided by the norm of the gradient.

    In a row of one feature the terms are almost equal, so that their rounding errors become large.
    """
    t = {name: value.double() for name, value in given.items()}
    size = (t["x"] + t["residual"]).square().mean(1, keepdim=True).add(EPS).sqrt()
    return (t["grad"] * (t["weight"] + 0.25) / size).norm().item() / gradient.norm().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("upcast", ["llama", "gemma", "none"])
def test_upcasts_round_where_they_say(capability: str, upcast: str, dtype: torch.dtype) -> None:
    """With each value of ``upcast``, rms_norm rounds as its reference in plain PyTorch does.

    Fewer than 1 % of the elements may differ, because the last bit of an fp32 sum may decide the rounding.
    """
    given = inputs(64, 192, dtype)
    options: dict[str, Any] = {"eps": EPS, "offset": 1.0 if upcast == "gemma" else 0.0, "upcast": upcast}
    ours = shoestring.rms_norm(given["x"], given["weight"], **options)
    expected = rms_norm_reference(given["x"], given["weight"], **options)
    assert (ours != expected).double().mean() < 0.01
    assert ((ours - expected).abs() <= 2 * torch.finfo(dtype).eps * expected.abs()).all()
    others = [
        rms_norm_reference(given["x"], given["weight"], **options | {"upcast": other})
        for other in ("llama", "gemma", "none")
        if other != upcast
    ]
    assert all((ours != other).double().mean() > 0.03 for other in others)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_narrow_results_of_fp32_rows(capability: str, shape: tuple[int, int], out: torch.dtype) -> None:
    """With out_dtype, y is the fp32 result rounded once, and gradients are as exact as eager PyTorch's.

    x is fp32, or has the dtype of y and is added to a residual of fp32.
    """
    wide = inputs(*shape, torch.float32)
    options: dict[str, Any] = {"offset": 0.25, "upcast": "gemma"}
    for x_dtype in (torch.float32, out):
        if x_dtype == torch.float32:
            y = shoestring.rms_norm(wide["x"], wide["weight"], eps=EPS, out_dtype=out, **options)
            plain = shoestring.rms_norm(wide["x"], wide["weight"], eps=EPS, **options)
            assert torch.equal(y, plain.to(out))
        given = {**wide, "x": wide["x"].to(x_dtype), "grad": wide["grad"].to(out)}
        if x_dtype == out:
            ours = results(shoestring.add_rms_norm, given, None, out_dtype=out, **options)
            eager = results(add_rms_norm_reference, given, None, out_dtype=out, **options)
        else:
            ours, eager = (alone(f, given, out, options) for f in (shoestring.rms_norm, rms_norm_reference))
        if x_dtype == out:
            exact = results(add_rms_norm_reference, given, torch.float64, **options)
        else:
            exact = alone(rms_norm_reference, given, None, options, torch.float64)
        normed = given if x_dtype == out else {**given, "residual": torch.zeros_like(given["x"])}
        for a, b, c in zip(ours, exact, eager, strict=True):
            assert a.dtype == c.dtype and a.shape == c.shape
            if a.numel():
                terms = cancelled(normed, b) if b.shape == shape else 0
                slack = torch.finfo(torch.float32).eps * (2 + terms)
                assert relative_error(a, b) <= 1.1 * relative_error(c, b) + slack


def alone(
    function: Any,
    given: dict[str, Tensor],
    out: torch.dtype | None,
    options: dict[str, Any],
    compute: torch.dtype | None = None,
) -> list[Tensor]:
    """Return the result and gradients of ``rms_norm`` or its reference, computed in ``compute`` if given."""
    x, weight, grad = (given[name].to(compute or given[name].dtype) for name in ("x", "weight", "grad"))
    leaves = (x.detach().requires_grad_(), weight.detach().requires_grad_())
    y = function(*leaves, eps=EPS, out_dtype=out, **options)
    return [y, *torch.autograd.grad(y, leaves, grad.to(y.dtype))]


def test_narrow_results_elsewhere(capability: str) -> None:
    """Results in out_dtype keep NaNs and repeat on any number of threads."""
    given = inputs(70, 100, torch.float32)
    given |= {"x": given["x"].bfloat16(), "grad": given["grad"].bfloat16()}
    assert_same_bits(
        lambda: results(shoestring.add_rms_norm, given, None, out_dtype=torch.bfloat16),
        (torch.get_num_threads(), 1, 3),
    )
    x = torch.ones(3, 70)
    x[0, 3] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    x[1, 69] = float("inf")
    y = shoestring.rms_norm(x, eps=EPS, out_dtype=torch.bfloat16)
    assert y[0].isnan().all() and y[1, :69].eq(0).all() and y[1, 69].isnan() and y[2].eq(1).all()
    total = shoestring.add_rms_norm(
        given["x"].requires_grad_(), given["residual"], eps=EPS, out_dtype=torch.bfloat16
    )[1]
    assert torch.autograd.grad(total.sum(), given["x"])[0].eq(1).all()


def test_narrow_results_compiled_and_opcheck() -> None:
    given = inputs(70, 100, torch.float32)
    given |= {"x": given["x"].bfloat16(), "grad": given["grad"].bfloat16()}
    compiled = torch.compile(shoestring.add_rms_norm, fullgraph=True, backend="aot_eager")
    found, again = (
        results(function, given, None, out_dtype=torch.bfloat16)
        for function in (shoestring.add_rms_norm, compiled)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    leaf, weight = torch.randn(4, 70, requires_grad=True), torch.rand(70, requires_grad=True)
    torch.library.opcheck(
        torch.ops.shoestring.rms_norm.default, (leaf, weight), {"eps": EPS, "out_dtype": torch.bfloat16}
    )
    torch.library.opcheck(
        torch.ops.shoestring.add_rms_norm.default,
        (leaf.detach().bfloat16().requires_grad_(), leaf, weight),
        {"eps": EPS, "out_dtype": torch.bfloat16},
    )


def test_a_frozen_weight_changes_no_bit(capability: str) -> None:
    given = inputs(7, 96, torch.float32)
    x, weight = given["x"].requires_grad_(), given["weight"].requires_grad_()
    expected, found = (
        torch.autograd.grad(shoestring.rms_norm(x, w, eps=EPS), x, given["grad"])[0]
        for w in (weight, weight.detach())
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_of_other_dtypes(capability: str, dtype: torch.dtype) -> None:
    for weight in (torch.float32, torch.float16 if dtype == torch.bfloat16 else torch.bfloat16):
        given = inputs(9, 192, dtype, weight)
        ours = results(shoestring.add_rms_norm, given, None)
        eager, exact = (results(add_rms_norm_reference, given, compute) for compute in (None, torch.float64))
        assert ours[0].dtype == dtype and ours[4].dtype == weight
        for a, b, c in zip(ours, exact, eager, strict=True):
            assert relative_error(a, b) <= 1.1 * relative_error(c, b)


def test_one_of_the_results_alone() -> None:
    given = inputs(6, 33, torch.float32)
    x, residual, weight = (given[name].requires_grad_() for name in ("x", "residual", "weight"))
    for index in (0, 1):
        ours = shoestring.add_rms_norm(x, residual, weight, eps=EPS)[index]
        expected = add_rms_norm_reference(x, residual, weight, eps=EPS)[index]
        for a, b in zip(
            torch.autograd.grad(ours.square().sum(), (x, residual, weight), allow_unused=True),
            torch.autograd.grad(expected.square().sum(), (x, residual, weight), allow_unused=True),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5) if b is not None else None


def test_what_is_kept() -> None:
    given = inputs(6, 64, torch.bfloat16)
    x, residual, weight = (given[name].requires_grad_() for name in ("x", "residual", "weight"))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        shoestring.rms_norm(x, weight, eps=EPS)
        shoestring.add_rms_norm(x, residual, weight, eps=EPS)
    assert [s.dtype for s in saved if s.shape == (6,)] == [torch.float32] * 2
    assert sum(s.numel() * s.element_size() for s in saved) == 2 * (6 * 64 * 2 + 64 * 2 + 6 * 4)


def test_repeatable_on_any_number_of_threads(backend: str) -> None:
    # With 20000 rows, each part of the CPU's reduction over rows has more rows than are summed at once.
    given = inputs(700 if backend == "simt" else 20000, 40, torch.float32)
    found = assert_same_bits(
        lambda: results(shoestring.add_rms_norm, given, None), (torch.get_num_threads(), 1, 2, 3)
    )
    exact, eager = (results(add_rms_norm_reference, given, compute)[-1] for compute in (torch.float64, None))
    assert relative_error(found[0][-1], exact) <= 1.1 * relative_error(eager, exact) + 2e-7


def test_strides_and_dimensions() -> None:
    wide = torch.randn(4, 5, 66, requires_grad=True)
    x = wide[:, 1:4, 1:65].transpose(0, 1)
    torch.testing.assert_close(shoestring.rms_norm(x, eps=EPS), rms_norm_reference(x, eps=EPS))
    assert shoestring.rms_norm(torch.randn(8), eps=EPS).shape == (8,)
    shoestring.rms_norm(x, eps=EPS).square().sum().backward()
    assert wide.grad is not None and (wide.grad[:, 0] == 0).all()


def test_not_finite_and_large() -> None:
    x = torch.ones(4, 64)
    x[1, 3], x[2, 3], x[3, 3] = float("nan"), float("inf"), 1e30
    ours, expected = shoestring.rms_norm(x, eps=EPS), rms_norm_reference(x, eps=EPS)
    torch.testing.assert_close(ours, expected, equal_nan=True)
    torch.testing.assert_close(shoestring.rms_norm(torch.zeros(2, 64), eps=EPS), torch.zeros(2, 64))


def test_nans_of_weights_stay_nans(capability: str) -> None:
    """A NaN in the weight of rms_norm makes its column of the output NaN, and no other column.

    The test uses NaNs with all mantissa bits set, because rounding them to bf16 could overflow into a number.
    """
    weight = torch.ones(200)
    weight[[3, 70, 199]] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    x = torch.randn(5, 200).bfloat16().requires_grad_()
    y = shoestring.rms_norm(x, weight, eps=EPS)
    assert torch.equal(y.isnan(), weight.isnan().expand(5, 200))
    assert torch.autograd.grad(y.float().sum(), x)[0].isnan().all()


def test_errors() -> None:
    x = torch.ones(3, 4)
    for message, arguments, options in (
        (
            r"rms_norm: weight: expected \(4\) of a floating-point type on \w+(:0)?, received \[3\] of Float",
            (x, torch.ones(3)),
            {},
        ),
        (
            r"rms_norm: x: expected \(\.\.\., features\) of fp32, fp64, bf16 or fp16, received \[3\] of Long",
            (torch.ones(3, dtype=torch.int64),),
            {},
        ),
        ("rms_norm: upcast: expected 'llama', 'gemma' or 'none', received 'gpt'", (x,), {"upcast": "gpt"}),
        ("rms_norm: eps: expected a number that is not negative, received -1", (x,), {"eps": -1.0}),
    ):
        with pytest.raises(RuntimeError, match=message):
            shoestring.rms_norm(*arguments, **{"eps": EPS} | options)
    message = "rms_norm: out_dtype: expected None, Float, or bf16 or fp16 for rows of fp32, received Double"
    with pytest.raises(RuntimeError, match=message):
        shoestring.rms_norm(x, eps=EPS, out_dtype=torch.float64)
    message = "rms_norm: out_dtype: expected None, BFloat16, or"
    with pytest.raises(RuntimeError, match=message):
        shoestring.rms_norm(x.bfloat16(), eps=EPS, out_dtype=torch.float32)
    message = "rms_norm: residual: expected .* With out_dtype the dtype of x, the residual may be fp32"
    with pytest.raises(RuntimeError, match=message):
        shoestring.add_rms_norm(x.bfloat16(), x, eps=EPS, out_dtype=torch.float16)
    message = r"rms_norm: residual: expected x's shape, dtype and device, \[3, 4\] of Float on \w+(:0)?, received \[4\]"
    with pytest.raises(RuntimeError, match=message):
        shoestring.add_rms_norm(x, torch.ones(4), eps=EPS)
