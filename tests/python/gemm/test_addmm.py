"""Test addmm_, the matrix product on which the other operators are built, on CPU and GPU."""

import pytest
import torch
from torch import Tensor

from references.gemm import addmm_reference
from shoestring.ops import addmm_

pytestmark = pytest.mark.device

# Shapes (m, n, k) of products of (m, k) and (k, n). In the CPU kernels, a tile of the result has 14 or 6 rows
# and 32 or 16 columns. A panel holds at most 192 of the k elements of a dot product. With AMX, a tile has 32
# rows and 32 columns, and a panel holds at most 256 of the k elements, padded to a multiple of 32. Products
# with fewer than 8 rows or columns go to the BLAS library. The shapes cover:
# - whole tiles, and one row or column more or less than a tile,
# - a depth k just above one panel,
# - a long m, a long n, few rows, and vectors.
SHAPES = [
    (28, 64, 192),
    (15, 33, 193),
    (13, 31, 383),
    (64, 96, 512),
    (33, 65, 513),
    (47, 49, 1057),
    (300, 9, 20),
    (9, 700, 769),
    (8, 8, 8),
    (7, 40, 50),
    (1, 100, 100),
    (100, 1, 100),
    (50, 40, 3),
]


def relative(x: Tensor, reference: Tensor) -> float:
    return float((x.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_products(capability: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for transposed_1 in (False, True):
        for transposed_2 in (False, True):
            a = torch.randn(k, m).to(dtype).t() if transposed_1 else torch.randn(m, k).to(dtype)
            b = torch.randn(n, k).to(dtype).t() if transposed_2 else torch.randn(k, n).to(dtype)
            for beta, alpha in [(1.0, 1.0), (0.0, 1.0), (0.5, -3.0)]:
                out = torch.randn(m, n).to(wide)
                expected = addmm_reference(out, a, b, beta=beta, alpha=alpha).double()
                addmm_(out, a, b, beta=beta, alpha=alpha)
                # A tensor core cuts off the last bits of each of the sums of 16 products.
                cut = k / 16 * 2**-24 if capability == "cuda" and dtype.itemsize == 2 else 0
                assert relative(out, expected) < (1e-14 if wide == torch.float64 else 5e-7 + cut), (
                    transposed_1,
                    transposed_2,
                )


@pytest.mark.parametrize(
    "shape", [(40, 70, 3000), (300, 50, 7000)], ids=str
)  # With k = 3000, the product needs many panels. With k = 7000, the panels exceed 8 MiB.
def test_no_less_exact_than_torch(capability: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = torch.randn(m, k), torch.randn(k, n)
    exact = a.double() @ b.double()
    out = torch.empty(m, n)
    addmm_(out, a, b, beta=0)
    assert relative(out, exact) <= 1.05 * relative(a @ b, exact)


def test_views(capability: str) -> None:
    """addmm_ accepts strided, unaligned and expanded matrices, and writes only the elements of its result."""
    for columns_first in (False, True):
        whole = torch.full((50, 60), 7.0)
        out = whole.t()[3:40, 5:44] if columns_first else whole[3:40, 5:44]
        a, b = torch.randn(41, 101)[1:38, 1:100], torch.randn(120, 80)[2:101, 3:81:2]
        expected = addmm_reference(out, a, b)
        addmm_(out, a, b)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        out.fill_(7)
        assert bool((whole == 7).all())
    row = torch.randn(1, 30).expand(20, 30)
    out, b = torch.zeros(20, 40), torch.randn(30, 40)
    addmm_(out, row, b)
    torch.testing.assert_close(out, row @ b, rtol=1e-5, atol=1e-5)
    apart = torch.full((30, 30, 2), 7.0)
    addmm_(apart[..., 0], torch.eye(30), torch.eye(30), beta=0)
    assert torch.equal(apart[..., 0], torch.eye(30)) and bool((apart[..., 1] == 7).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_finite_stays_in_its_row_and_column(capability: str, dtype: torch.dtype) -> None:
    a, b = torch.randn(20, 50).to(dtype), torch.randn(50, 40).to(dtype)
    a[3, 7], b[9, 5] = float("nan"), float("inf")
    out = torch.full((20, 40), float("nan"))
    addmm_(out, a, b, beta=0)
    finite = out.isfinite()
    expected = torch.ones(20, 40, dtype=torch.bool)
    expected[3], expected[:, 5] = False, False
    assert torch.equal(finite, expected)
    assert bool(out[3].isnan().all()) and bool(out[:3, 5].isinf().all())


def test_empty(capability: str) -> None:
    addmm_(torch.empty(0, 5), torch.empty(0, 9), torch.empty(9, 5))
    out = torch.ones(3, 4)
    addmm_(out, torch.empty(3, 0), torch.empty(0, 4), beta=0.5)
    assert torch.equal(out, torch.full((3, 4), 0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(30, 40, 90), (70, 40, 90), (100, 300, 1100), (2000, 40, 600)], ids=str)
def test_16_bit_results_are_rounded_once(
    capability: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    m, n, k = shape
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    start = torch.randn(m, n).to(dtype)
    for beta in (0.0, 0.5):
        wide = start.float()
        addmm_(wide, a, b, beta=beta)
        out = start.clone()
        addmm_(out, a, b, beta=beta)
        if capability == "cuda":  # cuBLAS may split the sums, and add the parts in 16 bits
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(out.float(), wide, rtol=2 * eps, atol=2 * eps * k**0.5)
            continue
        assert torch.equal(out, wide.to(dtype))
        columns_first = start.t().contiguous().t()
        addmm_(columns_first, a, b, beta=beta)
        # The sums of k products differ in the last bits of fp32, because the operands are exchanged.
        torch.testing.assert_close(columns_first, out, rtol=torch.finfo(dtype).eps, atol=k * 2.0**-23)
        padded = torch.full((m, n + 3), 7.0, dtype=dtype)
        padded[:, :n] = start
        addmm_(padded[:, :n], a, b, beta=beta)
        assert torch.equal(padded[:, :n], out) and bool((padded[:, n:] == 7).all())


def test_wide_results_of_many_groups(capability: str) -> None:
    """A long row of results is computed in groups of columns, over several panels of the depth."""
    a, b = torch.randn(300, 1100).bfloat16(), torch.randn(1100, 1500).bfloat16()
    for x, y in [(a, b), (b.t(), a.t())]:
        exact = x.double() @ y.double()
        out = torch.ones(exact.shape)
        addmm_(out, x, y)
        assert relative(out, exact + 1) < 5e-7


def test_threads_change_nothing(capability: str, backend: str) -> None:
    if backend != "cpu" or capability == "plain":
        pytest.skip("the library's products")
    before = torch.get_num_threads()
    for m, n, k in [(40, 3000, 800), (3000, 40, 800), (30, 40, 5000), (400, 700, 1100)]:
        for dtype in (torch.float32, torch.bfloat16):
            a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
            for narrow in (torch.float32, dtype):
                results = []
                for threads in (1, 2, 5):
                    torch.set_num_threads(threads)
                    results.append(torch.empty(m, n, dtype=narrow))
                    addmm_(results[-1], a, b, beta=0)
                torch.set_num_threads(before)
                assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("shapes", "dtypes", "named"),
    [
        (((3, 4), (3, 5), (6, 4)), (torch.float32,) * 3, "mat1 and mat2"),
        (((3, 5), (3, 5), (5, 4)), (torch.float32,) * 3, "self"),
        (((3, 4), (3, 5), (5, 4)), (torch.float32, torch.float32, torch.bfloat16), "mat1 and mat2"),
        (((3, 4), (3, 5), (5, 4)), (torch.bfloat16, torch.float32, torch.float32), "self"),
        (((3, 4), (3, 5), (5, 4)), (torch.int64,) * 3, "mat1 and mat2"),
    ],
)
def test_refusals(shapes: tuple[tuple[int, int], ...], dtypes: tuple[torch.dtype, ...], named: str) -> None:
    self, mat1, mat2 = (torch.zeros(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True))
    with pytest.raises(RuntimeError, match=rf"addmm_: {named}: expected .*, received "):
        addmm_(self, mat1, mat2)
