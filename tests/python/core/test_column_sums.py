"""Test the sum over all dimensions but the last, which is the gradient of a bias."""

import pytest
import torch

from thread_counts import assert_same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (7, 33), (300, 77), (5000, 64), (3, 0)], ids=str)
def test_column_sums(capability: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The gradient of a bias, from contiguous and strided tensors of each dtype."""
    x = torch.randn(shape).to(dtype)
    for given in (x, torch.randn(*shape, 2).to(dtype)[..., 1], torch.randn(shape[1], shape[0]).to(dtype).t()):
        exact = given.double().sum(0)
        found = torch.ops.shoestring._column_sums(given)
        assert found.dtype == torch.float32 and found.shape == exact.shape
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=2e-6 * max(1, shape[0]) ** 0.5)
    assert_same_bits(lambda: [torch.ops.shoestring._column_sums(x)], (torch.get_num_threads(), 1, 2, 3))
    if shape[0] > 1:
        x[1] = float("nan")
        assert torch.ops.shoestring._column_sums(x).isnan().all()
