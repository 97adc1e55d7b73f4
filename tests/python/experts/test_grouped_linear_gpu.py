"""Test the CUDA kernels of grouped_linear with many tiles, and with offsets and rows that the CPU refuses."""

import pytest
import torch
from torch import Tensor

from relative_error import relative_error

pytestmark = pytest.mark.device

OPERATORS = torch.ops.shoestring
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NAMES = ("out", "grad x", "grad weight", "grad bias")


@pytest.fixture(autouse=True)
def only_on_gpus(backend: str) -> None:
    if backend == "cpu":
        pytest.skip("these tests are about the CUDA kernels")


def results(
    x: Tensor, weight: Tensor, offsets: Tensor, rows: Tensor | None, bias: Tensor, grad: Tensor
) -> list[Tensor]:
    """Return the result of the operator, and the gradients of x, weight and bias."""
    x, weight, bias = (t.detach().requires_grad_() for t in (x, weight, bias))
    out = OPERATORS.grouped_linear(x, weight, offsets, rows=rows, bias=bias)
    return [out.detach(), *torch.autograd.grad(out, (x, weight, bias), grad)]


def expected(
    x: Tensor, weight: Tensor, offsets: Tensor, rows: Tensor | None, bias: Tensor, grad: Tensor
) -> list[Tensor]:
    """Return the same in fp64. Slots whose row is outside of x have no expert."""
    x, weight, bias, grad = (t.double() for t in (x, weight, bias, grad))
    slots = len(x) if rows is None else len(rows)
    row = torch.arange(slots) if rows is None else rows
    out = torch.zeros(slots, weight.shape[1], dtype=torch.float64)
    grads = [torch.zeros_like(t) for t in (x, weight, bias)]
    bounds = offsets.clamp(0, slots)
    for e in range(len(weight)):
        s = torch.arange(int(bounds[e]), int(bounds[e + 1]))
        s = s[(row[s] >= 0) & (row[s] < len(x))]
        out[s] = x[row[s]] @ weight[e].T + bias[e]
        grads[0].index_add_(0, row[s], grad[s] @ weight[e])
        grads[1][e] = grad[s].T @ x[row[s]]
        grads[2][e] = grad[s].sum(0)
    return [out, *grads]


def drawn(
    tokens: int, features: tuple[int, int], offsets: list[int], slots: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Return random arguments of `results`. `slots`: the number of rows, or None for no rows."""
    experts, (out, inner) = len(offsets) - 1, features
    rows = None if slots is None else torch.randint(tokens, (slots,))
    x, weight, bias, grad = (
        torch.randn(shape).to(dtype)
        for shape in (
            (tokens, inner),
            (experts, out, inner),
            (experts, out),
            (tokens if slots is None else slots, out),
        )
    )
    return x, weight, torch.tensor(offsets), rows, bias, grad


def assert_close(ours: list[Tensor], exact: list[Tensor], dtype: torch.dtype) -> None:
    for name, a, b in zip(NAMES, ours, exact, strict=True):
        assert a.dtype == dtype and a.shape == b.shape, name
        assert relative_error(a, b) <= (1 if dtype.itemsize == 2 else 8) * torch.finfo(dtype).eps, name
        assert torch.equal(a[b == 0], b[b == 0].to(dtype)), f"{name}: expected zeros"


# (tokens, (out, in), offsets, slots)
CASES = {
    "several tiles": (150, (20, 136), [3, 3, 134, 135, 140], 145),
    "several tiles without rows": (150, (20, 136), [3, 3, 134, 135, 148], None),
    "odd columns": (9, (5, 131), [0, 4, 7], 8),
    "several bands of tiles": (9, (131, 5), [2, *range(4, 15)], 16),
    "no slots": (4, (8, 16), [0, 0, 0], 0),
    "no depth": (5, (8, 0), [0, 2, 4], 5),
    "no columns": (5, (0, 8), [0, 2, 4], 5),
    "no experts": (5, (8, 8), [0], 7),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_tiles(case: str, dtype: torch.dtype) -> None:
    given = drawn(*CASES[case], dtype)
    assert_close(results(*given), expected(*given), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_experts_have_few_slots_each(dtype: torch.dtype) -> None:
    offsets = torch.randint(0, 90, (70,)).sort().values.tolist()
    given = drawn(40, (8, 24), offsets, 90, dtype)
    assert_close(results(*given), expected(*given), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_outside_of_x_have_no_expert(dtype: torch.dtype) -> None:
    given = drawn(6, (8, 24), [0, 3, 9], 9, dtype)
    rows = given[3]
    assert rows is not None
    rows[0], rows[4], rows[7], rows[8] = -1, 6, 2**40, -(2**63)
    assert_close(results(*given), expected(*given), dtype)


@pytest.mark.parametrize("offsets", [[-5, 2, 100], [2**40, 2**40, 2**62], [-1, -1, -1]], ids=str)
@pytest.mark.parametrize("rows", [9, None])
def test_offsets_count_as_numbers_of_slots(offsets: list[int], rows: int | None) -> None:
    given = drawn(9, (8, 24), offsets, rows, torch.float32)
    assert_close(results(*given), expected(*given), torch.float32)


@pytest.mark.parametrize("offsets", [[7, 3, 5], [9, 0, 0], [2**62, -(2**62), 4]], ids=str)
@pytest.mark.parametrize("rows", [9, None])
def test_offsets_that_do_not_ascend_stay_in_bounds(offsets: list[int], rows: int | None) -> None:
    """Two blocks may write one row, which the emulator reports. No access is out of bounds."""
    given = drawn(9, (8, 24), offsets, rows, torch.float32)
    try:
        results(*given)
    except RuntimeError as error:
        assert "race" in str(error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.each_gpu("all")
def test_gpus_without_tensor_cores_of_the_dtype(capability: str, dtype: torch.dtype) -> None:
    given = drawn(9, (5, 40), [1, 4, 7], 8, dtype)
    assert_close(results(*given), expected(*given), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_of_gradients(dtype: torch.dtype) -> None:
    """Products in a dtype leave the gradients in those of the arguments."""
    given = drawn(9, (5, 40), [1, 4, 7], 8, torch.float32)
    kinds = (torch.float64, torch.float16, torch.float32)
    x, weight, bias = (given[i].to(kind).requires_grad_() for i, kind in zip((0, 1, 4), kinds, strict=True))
    out = OPERATORS.grouped_linear(x, weight, given[2], rows=given[3], bias=bias, dtype=dtype)
    gradients = torch.autograd.grad(out, (x, weight, bias), given[5].to(dtype))
    exact = expected(x.detach(), weight.detach(), given[2], given[3], bias.detach(), given[5].to(dtype))
    assert out.dtype == dtype
    for name, kind, a, b in zip(NAMES, (dtype, *kinds), (out, *gradients), exact, strict=True):
        assert a.dtype == kind, name
        assert relative_error(a, b) <= max(torch.finfo(t).eps for t in (dtype, torch.float16)), name
