"""Test the norms of DoRA on the CPU: shapes, strides, ranks, numbers of threads, and numbers that overflow."""

import math

import pytest
import torch
from torch import Tensor

import shoestring
from references.adapters import lora_weight_norm_reference
from relative_error import relative_error
from thread_counts import assert_same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def adapted(rows: int, columns: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight, lora_A and lora_B, whose product is about as large as the weight."""
    weight = torch.randn(rows, columns).to(dtype)
    return weight, torch.randn(rank, columns), torch.randn(rows, rank) / max(1, rank) ** 0.5


def exact(weight: Tensor, A: Tensor, B: Tensor, scaling: float) -> Tensor:
    return lora_weight_norm_reference(weight.double(), A.double(), B.double(), scaling=scaling)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Ranks on both sides of 16 columns of a tile and of its three parts, and above 48, which have other products.
@pytest.mark.parametrize("rank", [0, 1, 5, 11, 16, 17, 48, 49, 70])
@pytest.mark.parametrize("shape", [(1, 31), (31, 64), (33, 95), (70, 333)], ids=str)
def test_ranks_and_shapes(capability: str, shape: tuple[int, int], rank: int, dtype: torch.dtype) -> None:
    weight, A, B = adapted(*shape, rank, dtype)
    assert (
        relative_error(shoestring.lora_weight_norm(weight, A, B, scaling=0.7), exact(weight, A, B, 0.7))
        < 1e-6
    )
    strided = torch.randn(shape[1], shape[0] + 3).to(dtype)[:, 3:].t()
    parts = torch.randn(2, *A.shape[::-1]).transpose(1, 2)[1], torch.randn(*B.shape[::-1]).t()
    assert relative_error(shoestring.lora_weight_norm(strided, *parts), exact(strided, *parts, 1)) < 1e-6


def test_long_rows(capability: str) -> None:
    """The error of a row of 40,000 numbers with equal signs, which add up, is that of a short row."""
    weight = torch.rand(3, 40_000).bfloat16()
    A, B = torch.rand(4, 40_000), torch.rand(3, 4)
    assert relative_error(shoestring.lora_weight_norm(weight, A, B), exact(weight, A, B, 1)) < 2e-7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [16, 60])
def test_zero_lora_B_changes_no_bit(capability: str, rank: int, dtype: torch.dtype) -> None:
    """The magnitudes that an adapter starts with are the norms of the base weight, so the gain is exactly 1."""
    weight, A, B = adapted(70, 333, rank, dtype)
    start = shoestring.lora_weight_norm(weight, A[:0], B[:, :0])
    assert torch.equal(shoestring.lora_weight_norm(weight, A, torch.zeros_like(B), scaling=2), start)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_on_any_number_of_threads(capability: str, dtype: torch.dtype) -> None:
    weight, A, B = adapted(300, 1500, 8, dtype)
    assert_same_bits(lambda: [shoestring.lora_weight_norm(weight, A, B, scaling=0.5)], (1, 2, 3, 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", ["weight", "lora_A", "lora_B"])
@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38])
def test_what_overflows(capability: str, value: float, where: str, dtype: torch.dtype) -> None:
    """Rows with infinity or NaN have no finite norm, as in plain PyTorch, and other rows keep theirs."""
    weight, A, B = adapted(40, 64, 4, dtype)
    B[20:, 1] = 0
    {"weight": weight, "lora_A": A, "lora_B": B}[where].select(0, 1)[3 if where != "lora_B" else 2] = value
    ours = shoestring.lora_weight_norm(weight, A, B)
    if where == "lora_A":  # zero times infinity is NaN
        assert value == 3e38 or not ours.isfinite().any()
        return
    assert not ours[1].isfinite()
    kept = torch.arange(40) != 1
    assert relative_error(ours[kept], exact(weight[kept], A, B[kept], 1)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_worse_than_the_adapted_weight_in_its_dtype(capability: str, dtype: torch.dtype) -> None:
    weight, A, B = adapted(64, 512, 8, dtype)
    right = exact(weight, A, B, 0.5)
    stored = (weight + (0.5 * (B.to(dtype) @ A.to(dtype)))).norm(dim=1)
    ours = shoestring.lora_weight_norm(weight, A, B, scaling=0.5)
    assert relative_error(ours, right) <= 1.2 * relative_error(stored, right) + 1e-7
