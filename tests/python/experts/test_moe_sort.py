import pytest
import torch
from torch import Tensor

import shoestring
from thread_counts import assert_same_bits

pytestmark = pytest.mark.device


def sorted_by_pytorch(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of moe_sort, from a stable argsort."""
    key = index.flatten()
    key = torch.where(key < 0, experts, key)
    order = key.argsort(stable=True)
    counts = torch.bincount(key, minlength=experts + 1)
    return order, order.argsort(), torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])


# (slots, experts): none, one, a part of a warp, several parts and a remainder, the largest number of experts.
@pytest.mark.parametrize(
    "size", [(0, 4), (1, 1), (5, 3), (257, 16), (1000, 60), (9001, 128), (3000, 2048)], ids=str
)
@pytest.mark.parametrize("kind", ["uniform", "some without", "one expert", "none"])
def test_equals_a_stable_argsort(backend: str, size: tuple[int, int], kind: str) -> None:
    slots, experts = size
    low = -1 if kind == "some without" else 0
    index = torch.randint(low, experts, (slots,))
    if kind == "one expert":
        index[:] = experts - 1
    if kind == "none":
        index[:] = -1
    found = shoestring.moe_sort(index, experts)
    for ours, expected in zip(found, sorted_by_pytorch(index, experts), strict=True):
        assert ours.dtype == torch.int64 and torch.equal(ours, expected)


def test_slots_are_in_memory_order() -> None:
    index = torch.randint(0, 5, (4, 7, 2))
    assert torch.equal(shoestring.moe_sort(index, 5).order, shoestring.moe_sort(index.flatten(), 5).order)
    strided = index.transpose(0, 2)
    for ours, expected in zip(
        shoestring.moe_sort(strided, 5), shoestring.moe_sort(strided.contiguous(), 5), strict=True
    ):
        assert torch.equal(ours, expected)


def test_sorts_the_choice_of_a_router() -> None:
    """The rows of each expert are those of its tokens, and tokens that the mask leaves out have no row."""
    mask = torch.rand(100) < 0.7
    route = shoestring.moe_route(torch.randn(100, 6), 2, mask=mask)
    order, inverse, offsets = shoestring.moe_sort(route.index, 6)
    assert torch.equal(offsets.diff(), route.counts) and offsets[-1] == 2 * mask.sum()
    for e in range(6):
        tokens = order[offsets[e] : offsets[e + 1]] // 2
        assert torch.equal(tokens, (route.index == e).any(-1).nonzero().flatten())
    assert torch.equal(order[inverse], torch.arange(200))


def test_bits_do_not_depend_on_the_number_of_threads(backend: str) -> None:
    index = torch.randint(-1, 64, (2000 if backend == "simt" else 300_000,))
    assert_same_bits(lambda: list(shoestring.moe_sort(index, 64)), (torch.get_num_threads(), 1, 2, 3, 7))


def test_opcheck_and_compile() -> None:
    index = torch.randint(-1, 9, (12, 2))
    torch.library.opcheck(torch.ops.shoestring.moe_sort.default, (index, 9))
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda t: tuple(x * 2 for x in shoestring.moe_sort(t, 9)),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for rows in (12, 5):
        expected = shoestring.moe_sort(index[:rows], 9)
        assert all(torch.equal(a, 2 * b) for a, b in zip(compiled(index[:rows]), expected, strict=True))


def test_errors(backend: str) -> None:
    index = torch.tensor([[0, 1], [2, 3]])
    for message, given, experts in (
        ("moe_sort: index: expected int64, received Int", index.int(), 4),
        ("moe_sort: index: expected int64, received Float", index.float(), 4),
        ("moe_sort: experts: expected 1 to 2048, received 0", index, 0),
        ("moe_sort: experts: expected 1 to 2048, received 2049", index, 2049),
    ):
        with pytest.raises(RuntimeError, match=message):
            shoestring.moe_sort(given, experts)
    if backend == "cpu":
        message = "moe_sort: index: expected values from 0 to 2, or -1 for no expert, received"
        for wrong, experts in ((index, 3), (index - 3, 3)):
            with pytest.raises(RuntimeError, match=message):
                shoestring.moe_sort(wrong, experts)
    else:  # an error would wait for the GPU
        assert shoestring.moe_sort(index, 3).offsets.tolist() == [0, 1, 2, 3]
