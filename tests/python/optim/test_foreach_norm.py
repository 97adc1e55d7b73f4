"""Tests of foreach_norm, the L2 norms of a list of tensors."""

import pytest
import torch

from references.optim import foreach_norm_reference
from relative_error import relative_error
from shoestring.ops import foreach_norm

pytestmark = pytest.mark.device

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Element counts: none, one, counts around a SIMD register of 16, around the 128 elements of eight registers,
# around a chunk of 8192, and several chunks.
SIZES = [0, 1, 15, 16, 17, 127, 129, 8191, 8192, 8193, 3 * 8192 + 5]


def bound(backend: str) -> float:
    """Return the allowed relative error of a norm.

    On the CPU the limit is little more than the rounding of the fp32 result. On other devices it allows for
    the rounding of fp32 sums.
    """
    return 2e-7 if backend == "cpu" else 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_size(capability: str, backend: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        x = torch.randn(size).to(dtype)
        norm = foreach_norm([x])
        assert norm.dtype == torch.float32 and norm.shape == (1,)
        assert relative_error(norm, foreach_norm_reference([x])) < bound(backend), size


def test_many_tensors_of_all_types_and_shapes(capability: str, backend: str) -> None:
    grads = [torch.randn(size).to(DTYPES[i % 3]) for i, size in enumerate(SIZES * 3)]
    grads += [torch.randn(40, 30).t(), torch.randn(64, 65)[:, 1:].bfloat16(), torch.randn(64, 65)[::2, 1::3],
              torch.randn(30, 1).expand(30, 7)]  # fmt: skip
    found = foreach_norm(grads)
    for norm, g in zip(found, grads, strict=True):
        assert relative_error(norm, foreach_norm_reference([g])) < bound(backend)
        # The GPU's sums of several tensors have another order than those of one.
        torch.testing.assert_close(norm, foreach_norm([g])[0], rtol=1e-6 if backend == "cuda" else 0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_worse_than_pytorch(capability: str, backend: str, dtype: torch.dtype) -> None:
    x = torch.randn(1 << (14 if backend == "simt" else 22)).to(dtype)
    exact = x.double().norm()
    eager = torch.linalg.vector_norm(x, dtype=torch.float32)
    # foreach_norm may be less accurate than PyTorch by one rounding of the fp32 result, 1.2e-7.
    assert relative_error(foreach_norm([x])[0], exact) <= relative_error(eager, exact) + 1.2e-7


def test_bits_do_not_depend_on_threads(capability: str, backend: str) -> None:
    if backend != "cpu":
        pytest.skip("of the CPU's threads")
    grads = [torch.randn(n) for n in (100_003, 17, 500_000)]
    threads = torch.get_num_threads()
    found = set()
    for count in (1, 2, 3, threads):
        torch.set_num_threads(count)
        found.add(tuple(foreach_norm(grads).tolist()))
    torch.set_num_threads(threads)
    assert len(found) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_shows(capability: str, dtype: torch.dtype) -> None:
    for place in (0, 8191, 8200, 16389):
        for bad in (float("inf"), float("-inf"), float("nan")):
            x = torch.randn(16390).to(dtype)
            x[place] = bad
            norm = foreach_norm([torch.ones(5), x])[1]
            assert norm.isnan() if bad != bad else norm.isposinf()


def test_large_fp16_gradients_do_not_overflow(capability: str) -> None:
    assert (
        relative_error(
            foreach_norm([torch.full((4096,), 6e4, dtype=torch.float16)]), torch.tensor([6e4 * 64])
        )
        < 1e-3
    )


def test_meta_and_compile(backend: str) -> None:
    assert foreach_norm([torch.ones(3, device="meta")]).device.type == "meta"
    if backend == "cpu":
        torch.library.opcheck(
            torch.ops.shoestring.foreach_norm.default, ([torch.randn(5), torch.randn(3, 4)],)
        )
        grads = [torch.randn(100), torch.randn(7).bfloat16()]
        compiled = torch.compile(lambda: foreach_norm(grads), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(), foreach_norm(grads))


def test_errors() -> None:
    with pytest.raises(
        RuntimeError, match="foreach_norm: tensors: expected at least one tensor, received none"
    ):
        foreach_norm([])
    with pytest.raises(
        RuntimeError, match=r"tensors\[1\]: expected a dense fp32, bf16 or fp16 tensor, received Long"
    ):
        foreach_norm([torch.ones(2), torch.ones(2, dtype=torch.int64)])
    with pytest.raises(RuntimeError, match=r"tensors\[1\]: expected the first one's device"):
        foreach_norm([torch.ones(2), torch.ones(2, device="meta")])
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        foreach_norm([x]).backward()
