"""Test experts whose weights are in a file: only those with tokens are read, and results have the same bits."""

from __future__ import annotations

import copy
import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoestring
from offload_faults import disturb_offload
from shoestring import offload_weights

pytestmark = pytest.mark.usefixtures("small_weights_leave")

FEATURES, HIDDEN, EXPERTS, TOP_K, DEPTH = 32, 24, 16, 2, 4


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.mix = nn.Linear(FEATURES, FEATURES)
        self.router = shoestring.nn.Router(FEATURES, EXPERTS, TOP_K)
        self.experts = shoestring.nn.Experts(EXPERTS, FEATURES, HIDDEN, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        route = self.router(x)
        return x + self.experts(x, route.index, route.weight)


class Model(nn.Module):
    def __init__(self, recompute: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(DEPTH))
        for block in self.blocks:
            block.mix.requires_grad_(False)
            block.experts.requires_grad_(False)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def bytes_of(model: Model) -> tuple[int, int]:
    """Return the bytes of an expert, and of the whole pages of the other weights of a block."""
    block: Any = model.blocks[0]
    experts = block.experts.gate_up_proj.nbytes + block.experts.down_proj.nbytes
    return experts // EXPERTS, -(-block.mix.weight.nbytes // 4096) * 4096


def tokens(count: int, seed: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed)).to(dtype)


def train(model: nn.Module, adapted: bool, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    if adapted:
        torch.manual_seed(1)
        shoestring.lora.apply(
            model, rank=2, target_modules=None, target_parameters=["gate_up_proj", "down_proj"]
        )
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    losses = []
    for step in range(3):
        # Few tokens leave experts without any.
        x = tokens((5, 40, 3)[step], step, dtype).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        losses += [loss.item(), x.grad.abs().sum().item()]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: p.detach().clone() for n, p in trained.items()}


@pytest.mark.parametrize("recompute", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("adapted", [False, True], ids=["", "lora"])
@pytest.mark.parametrize(
    "options", [{}, {"bias": True, "transposed": True, "interleaved": True}], ids=["", "gpt-oss"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_has_the_same_bits(
    dtype: torch.dtype, options: dict[str, bool], adapted: bool, recompute: bool, tmp_path: Path
) -> None:
    results = []
    for away in (False, True):
        model = Model(recompute, **options).to(dtype)
        handle = offload_weights(model, f"nvme:{tmp_path}") if away else None
        results.append(train(model, adapted, dtype))
        if handle is not None:
            assert handle.statistics()["fetched"] > 0
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(results[1][1][name], value), name


@pytest.mark.parametrize(
    "form", [{"quantize": "nf4", "double_quant": True}, {"quantize": "int4"}, {"quantize": "int8"}], ids=str
)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_quantised_stacks_have_the_same_bits(form: dict[str, Any], transposed: bool, tmp_path: Path) -> None:
    results = []
    for away in (False, True):
        model = Model(bias=True, transposed=transposed)
        torch.manual_seed(1)
        shoestring.lora.apply(
            model, rank=2, target_modules=[], target_parameters=["gate_up_proj", "down_proj"], **form
        )
        assert shoestring.count_experts(model) == (DEPTH * EXPERTS, 0)
        handle = offload_weights(model, f"nvme:{tmp_path}") if away else None
        if handle is not None:
            read = [handle.statistics()["fetched"]]
            with torch.no_grad():
                for count in (1, 400):
                    model(tokens(count))
                    read.append(handle.statistics()["fetched"])
            assert read[1] - read[0] < read[2] - read[1]
        results.append(train(model, False, torch.float32))
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(results[1][1][name], value), name


def test_only_experts_with_tokens_are_read(tmp_path: Path) -> None:
    model = Model()
    handle = offload_weights(model, f"nvme:{tmp_path}")
    one, rest = bytes_of(model)
    assert handle.statistics()["away"] >= DEPTH * (rest + EXPERTS * one)
    with torch.no_grad():
        model(tokens(1))
        # The first block without its experts comes again, for the next forward.
        assert handle.statistics()["fetched"] == DEPTH * (rest + TOP_K * one) + rest
        assert handle.statistics()["device"] <= 2 * (rest + TOP_K * one)
        before = handle.statistics()["fetched"]
        # Many tokens use all experts. After that, those of a block are read while the block before runs.
        for _ in range(2):
            model(tokens(400))
        read = handle.statistics()["fetched"] - before
        assert read == 2 * DEPTH * (rest + EXPERTS * one) + EXPERTS * one


def test_backward_reads_the_experts_of_its_forward(tmp_path: Path) -> None:
    model = Model()
    handle = offload_weights(model, f"nvme:{tmp_path}")
    one, rest = bytes_of(model)
    x = tokens(1).requires_grad_()
    model(x).sum().backward()
    # The last two blocks are there when backward begins.
    assert handle.statistics()["fetched"] == (2 * DEPTH - 2) * (rest + TOP_K * one)
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_files_and_changes(tmp_path: Path) -> None:
    model = Model()
    expected = copy.deepcopy(model.state_dict())
    handle = offload_weights(model, f"nvme:{tmp_path}")
    stack = model.blocks[1].experts.down_proj
    with torch.no_grad():
        model(tokens(2))
    with pytest.raises(
        RuntimeError, match=r"offload_weights: blocks\.1: expected weights on cpu, received some that"
    ):
        stack.sum()
    state = model.state_dict()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    doubled = {n: 2 * v for n, v in expected.items()}
    model.load_state_dict(doubled)
    with handle.present(model.blocks[1]):
        assert torch.equal(stack, doubled["blocks.1.experts.down_proj"])
        with torch.no_grad():
            stack[3].fill_(7)
    with torch.no_grad():
        expected_y = model(tokens(200))  # other blocks take the memory
        handle.undo()
        assert torch.equal(model(tokens(200)), expected_y)
    doubled["blocks.1.experts.down_proj"][3] = 7
    for name, value in model.state_dict().items():
        assert torch.equal(value, doubled[name]), name


def test_stacks_that_are_trained_later_are_refused(tmp_path: Path) -> None:
    model = Model()
    handle = offload_weights(model, f"nvme:{tmp_path}")
    model.blocks[0].experts.gate_up_proj.requires_grad_()
    with pytest.raises(RuntimeError, match="offload_weights: .*expected frozen .* requires gradients now"):
        model(tokens(4))
    model.blocks[0].experts.gate_up_proj.requires_grad_(False)
    handle.undo()


def test_errors_of_the_disk_can_be_repeated(tmp_path: Path) -> None:
    model, x = Model(), tokens(30)
    with torch.no_grad():
        expected = model(x)
        handle = offload_weights(model, f"nvme:{tmp_path}")
        assert torch.equal(model(x), expected)
        failures = 0
        for fail_after in range(12):
            disturb_offload(fail_after=fail_after, error=errno.EIO)
            # A read ahead that fails raises in the next forward.
            for _ in range(2):
                try:
                    received = model(x)
                except RuntimeError as error:
                    assert str(error).startswith("offload_weights: ")
                    failures += 1
                    disturb_offload()
            assert torch.equal(received, expected)
            disturb_offload()
            assert torch.equal(model(x), expected)
        assert failures >= 8  # each forward reads more often than that
    handle.undo()


def test_threads_use_different_experts_of_a_block(tmp_path: Path) -> None:
    model = Model()
    batches = [tokens(3, seed) for seed in range(8)]
    with torch.no_grad():
        expected = [model(x) for x in batches]
    offload_weights(model, f"nvme:{tmp_path}")
    disturb_offload(max_delay_us=1000)
    received: dict[int, Tensor] = {}

    def run(first: int) -> None:
        with torch.no_grad():
            for _ in range(10):
                for i in range(first, len(batches), 2):
                    received[i] = model(batches[i])

    threads = [threading.Thread(target=run, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, value in enumerate(expected):
        assert torch.equal(received[i], value)


def test_experts_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=16,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).requires_grad_(False)
    model.set_experts_implementation(shoestring.register_experts())
    x = torch.tensor([[1, 5, 9]])
    expected = model(x).logits
    handle = offload_weights(model, f"nvme:{tmp_path}", tables=())
    assert torch.equal(model(x).logits, expected)
    experts = model.model.layers[0].mlp.experts
    assert handle.statistics()["fetched"] < 3 * (experts.gate_up_proj.nbytes + experts.down_proj.nbytes)
    # Another implementation reads the whole stacks, which are away.
    model.set_experts_implementation("eager")
    with pytest.raises(RuntimeError, match="offload_weights: .*read or change them within present"):
        model(x)
