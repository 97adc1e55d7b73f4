"""Tests of QLoRA under FSDP2 (CPU, Gloo): quantised weights are sharded by rows and gathered as codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import shoestring
from processes import assert_replicated, run, train_halves
from shoestring import QuantizedTensor
from shoestring.distributed.groups import plain_tensors
from shoestring.quantization.quantized_tensor import join_rows
from split_models import blocks

KINDS = [
    {"quantize": "nf4"},
    {"quantize": "nf4", "double_quant": True, "block_size": 32},
    {"quantize": "fp4", "block_size": 128},
    {"quantize": "int4"},
    {"quantize": "int8"},
]


def shard(net: nn.Module, **options: Any) -> nn.Module:
    for block in net:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def train(net: nn.Module, rank: int | None) -> list[float]:
    # With a smaller eps, AdamW's step for a nearly zero gradient would depend on the order of sums.
    return train_halves(
        net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2, eps=1e-4), 256, rank
    )


def _is_one_process(rank: int, kind: dict[str, Any], again: bool) -> None:
    sharded, plain = shard(blocks(kind), reshard_after_forward=again), blocks(kind)
    weight = sharded[0].up.weight
    assert isinstance(weight, DTensor) and isinstance(weight.to_local(), QuantizedTensor)
    held = weight.to_local().packed
    assert held.shape[0] == 256 and held.nbytes * 2 == plain[0].up.weight.packed.nbytes
    expected, received = train(plain, None), train(sharded, rank)
    assert received == pytest.approx(expected, rel=1e-6) and expected[-1] < expected[0]
    for (name, p), q in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(p, DTensor), name
        if "lora" in name:
            torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=0, atol=1e-6)
            assert_replicated(p.full_tensor())
        elif isinstance(q, QuantizedTensor):  # the frozen base weight is unchanged bit for bit
            mine = torch.chunk(q.packed, 2)[rank]
            assert torch.equal(p.to_local().packed, mine) and torch.equal(
                p.to_local().absmax, q.absmax.chunk(2)[rank]
            )


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("again", [True, False])
def test_fsdp_is_one_process(kind: dict[str, Any], again: bool, tmp_path: Path) -> None:
    run(2, tmp_path, _is_one_process, kind, again)


def _mixed_precision(rank: int) -> None:
    net = shard(blocks({"quantize": "nf4"}), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen = []
    net[0].up.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight))
    out = net(torch.randn(4, 256))
    assert out.dtype == torch.bfloat16
    assert (
        isinstance(seen[0], QuantizedTensor)
        and seen[0].dtype == torch.bfloat16
        and seen[0].shape == (512, 256)
    )
    out.float().square().mean().backward()
    assert net[0].up.lora_B["default"].grad is not None


def test_mixed_precision_changes_what_codes_stand_for(tmp_path: Path) -> None:
    run(2, tmp_path, _mixed_precision)


def _round_trip(rank: int, kind: dict[str, Any]) -> None:
    net, other = shard(blocks(kind)), blocks(kind)
    train(net, rank)
    with torch.no_grad():
        for layer in (m for m in other.modules() if isinstance(m, nn.Linear)):
            layer.weight.copy_(torch.randn(layer.weight.shape))
    other = shard(other)
    x = torch.randn(3, 256)
    assert not torch.equal(other(x), net(x))
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(x), net(x))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_state_dict_round_trip(kind: dict[str, Any], tmp_path: Path) -> None:
    run(2, tmp_path, _round_trip, kind)


class Uneven(nn.Module):
    """Layers of which no number of ranks divides the rows, and of which some ranks have none."""

    def __init__(self, width: int, rows: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, each) for each in rows)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)).mean(-1, keepdim=True)
        return x


UNEVEN: list[tuple[dict[str, Any], int, list[int]]] = [
    ({"quantize": "nf4"}, 256, [301, 5, 1]),
    ({"quantize": "int4"}, 256, [299, 3]),
    ({"quantize": "int8"}, 96, [301, 5]),
    (
        {"quantize": "nf4", "double_quant": True, "block_size": 32},
        8192,
        [7, 5],
    ),  # a row is a group of 256 blocks
]


def uneven(kind: dict[str, Any], width: int, rows: list[int]) -> nn.Module:
    torch.manual_seed(5)
    net = nn.Sequential(Uneven(width, rows), Uneven(width, rows))
    return nn.Sequential(shoestring.lora.apply(net, rank=4, **kind))  # blocks for parallelize


def _uneven_rows(rank: int, kind: dict[str, Any], width: int, rows: list[int], strategy: str) -> None:
    ranks = dist.get_world_size()
    net, alone = (uneven(kind, width, rows) for _ in range(2))
    report = shoestring.parallelize(net, strategy, mesh=(2, ranks // 2) if strategy == "hsdp" else None)
    shards = ranks // 2 if strategy == "hsdp" else ranks
    held = 0
    for name, p in net.named_parameters():
        assert isinstance(p, DTensor), name
        local, whole = p.to_local(), dict(alone.named_parameters())[name]
        most = -(-whole.shape[0] // shards)
        first = min(rank % shards * most, whole.shape[0])
        mine = slice(first, min(first + most, whole.shape[0]))
        assert local.shape == whole[mine].shape
        if isinstance(local, QuantizedTensor):
            assert torch.equal(local.dequantize(), whole.dequantize()[mine])
        held += sum(t.untyped_storage().nbytes() for _, t in plain_tensors(name, local))
    # The storages have the rows of the first rank. Nested scales begin with tables of 257 values.
    tables = 4 * 257 * len(rows) * 2 if "double_quant" in kind else 0
    assert report.rank_bytes.weights - 16 <= held + tables and held <= report.rank_bytes.weights + tables + 16
    trained = [[p for p in m.parameters() if p.requires_grad] for m in (net, alone)]
    # A step differs by at most lr / eps = 1 times what sums in another order change in a gradient.
    ours, other = (torch.optim.AdamW(params, lr=1e-2, eps=1e-2) for params in trained)
    for step in range(3):
        x = torch.randn(12, width, generator=torch.Generator().manual_seed(step))
        ours.zero_grad()
        other.zero_grad()
        found, expected = net(x.chunk(ranks)[rank]).square().mean(), alone(x).square().mean()
        found.backward()
        expected.backward()
        ours.step()
        other.step()
        total = found.detach().clone()
        dist.all_reduce(total)
        assert total.item() / ranks == pytest.approx(expected.item(), rel=1e-6)
    for p, q in zip(*trained, strict=True):
        torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=0, atol=1e-6)
    saved = {name: p.detach().clone() for name, p in net.state_dict().items()}
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        before = net(x)
        for p in net.parameters():
            p.to_local().copy_(torch.ones(p.to_local().shape))
        assert not torch.equal(net(x), before)
        net.load_state_dict(saved)
        assert torch.equal(net(x), before)
    report.undo()
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        assert p.shape == q.shape and type(p) is type(q)
        if isinstance(p, QuantizedTensor):
            assert torch.equal(p.dequantize(), q.dequantize())


@pytest.mark.parametrize("case", UNEVEN, ids=lambda case: str(case[0]))
@pytest.mark.parametrize(("ranks", "strategy"), [(2, "zero3"), (3, "zero3"), (4, "zero3"), (4, "hsdp")])
@pytest.mark.sample(3)
def test_uneven_rows(
    case: tuple[dict[str, Any], int, list[int]], ranks: int, strategy: str, tmp_path: Path
) -> None:
    """A rank has the rows of FSDP2's split, also none; training is that of one process."""
    run(ranks, tmp_path, _uneven_rows, *case, strategy)


def _refused(rank: int) -> None:
    with pytest.raises(
        ValueError, match="rows 0 to 100: expected whole groups of 256 blocks, with 8 blocks a row"
    ):
        fully_shard(
            shoestring.lora.apply(
                nn.Sequential(nn.Linear(256, 200)), quantize="nf4", double_quant=True, block_size=32
            )
        )
    with pytest.raises(ValueError, match="expected consecutive rows of a tensor whose rows are whole blocks"):
        fully_shard(shoestring.lora.apply(nn.Sequential(nn.Linear(100, 64)), quantize="nf4"))
    net = shoestring.lora.apply(nn.Sequential(nn.Linear(256, 64), nn.Linear(100, 64)), quantize="nf4")
    with pytest.raises(ValueError, match="^parallelize: ") as error:
        shoestring.parallelize(net, "zero3")
    assert str(error.value) == (
        "parallelize: model: expected weights whose rows 2 processes can split, received 1.weight: QuantizedTensor: slice: "
        "expected consecutive rows of a tensor whose rows are whole blocks, received dimension 0, step 1, flat blocks of 64, "
        "shape (64, 100). Quantise it in another way, or use 'zero2', which keeps weights whole."
    )
    assert not any(isinstance(p, DTensor) for p in net.parameters())


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    run(2, tmp_path, _refused)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_are_tensors_of_their_own(kind: dict[str, Any]) -> None:
    weight = blocks(kind)[0].down.weight
    dense = weight.dequantize()
    for rows in (slice(0, 64), slice(64, 128), slice(64, None), slice(None), slice(256, None)):
        assert torch.equal(weight[rows].dequantize(), dense[rows])
    for part, expected in zip(weight.split(64), dense.split(64), strict=True):
        assert part.shape == expected.shape and torch.equal(part.dequantize(), expected)
    joined = join_rows(weight.split(64))
    for part, whole in zip(joined.parts(), weight.detach().parts(), strict=True):
        assert torch.equal(part, whole)
    if weight.nested is not None:
        with pytest.raises(ValueError, match="QuantizedTensor: expected slices of one tensor, received"):
            join_rows([weight[:64], blocks(kind)[1].down.weight[64:]])
    assert torch.equal(weight.view(-1).dequantize(), dense.view(-1))
    zeros = weight.new_zeros(64, 512)
    assert zeros.shape == (64, 512)
    zeros.copy_(weight[64:128])
    assert torch.equal(zeros.dequantize(), dense[64:128])
    with pytest.raises(ValueError, match="expected consecutive rows"):
        weight[:, :64]
    with pytest.raises(ValueError, match=r"view: expected \[256, 512\] or \[-1\], received \[512, 256\]"):
        weight.view(512, 256)
