"""Test experts that processes have split: the same results and gradients as one process with all of them (CPU, Gloo)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoestring
from moe_models import moe_model
from processes import run

FEATURES, HIDDEN, EXPERTS, TOP_K = 16, 24, 12, 3


class Model(nn.Module):
    """Two mixtures behind a linear layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.moes = nn.ModuleList(
            shoestring.nn.MoE(FEATURES, HIDDEN, EXPERTS, TOP_K, renormalize=True, **options) for _ in range(2)
        )
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for moe in self.moes:

            def mixed(x: Tensor, moe: nn.Module = moe) -> Tensor:
                y: Tensor = moe(x)[0]
                return y

            x = x + (shoestring.checkpoint(mixed, x) if self.recompute else mixed(x))
        return x


def build(dtype: torch.dtype = torch.float64, **options: Any) -> Model:
    torch.manual_seed(7)
    return Model(**options).to(dtype)


def batch(rank: int, step: int = 0, count: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    size = (5, 9, 2, 7)[rank] if count is None else count
    return torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)


def alone(model: nn.Module, ranks: int, counts: list[int | None]) -> list[Tensor]:
    """Return the outputs of one process for the tokens of all; gradients are the means of those of the processes."""
    outputs = []
    for rank in range(ranks):
        y = model(batch(rank, count=counts[rank]).to(next(model.parameters()).dtype))
        (y.square().sum() / ranks).backward()
        outputs.append(y.detach())
    return outputs


def part_of(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    size = tensor.shape[0] // ranks
    return tensor[rank * size : (rank + 1) * size]


def check_against_one(rank: int, options: dict[str, Any], counts: list[int | None], how: str) -> None:
    ranks = dist.get_world_size()
    model, whole = build(**options), build(**options)
    expected = alone(whole, ranks, counts)
    report = shoestring.expert_parallel(model)
    assert list(report.modules) == ["moes.0.experts", "moes.1.experts"]
    assert (report.ranks, report.experts) == (ranks, 2 * EXPERTS // ranks)
    if how == "ddp":
        shoestring.parallelize(model, "ddp")
    model.recompute = how == "checkpoint"
    results = []
    for _ in range(2):
        model.zero_grad()
        y = model(batch(rank, count=counts[rank]))
        y.square().sum().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append({"y": y.detach()} | grads)
    # Of more than two ranks, DistributedDataParallel adds gradients in another order in its second backward.
    for name, value in results[0].items() if how != "ddp" or ranks == 2 else ():
        assert torch.equal(value, results[1][name]), name
    torch.testing.assert_close(y, expected[rank], rtol=1e-12, atol=1e-12)
    wanted = dict(whole.named_parameters())
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        grad, reference = p.grad, wanted[name].grad
        assert reference is not None
        if ".experts." in name:
            reference = part_of(reference, rank, ranks)
        elif how != "ddp":
            grad = shoestring.distributed.mean_over_ranks(grad)
        torch.testing.assert_close(grad, reference, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("how", ["plain", "checkpoint", "ddp"])
def test_results_and_gradients_are_those_of_one_process(tmp_path: Path, ranks: int, how: str) -> None:
    run(ranks, tmp_path, check_against_one, {}, [None] * 4, how)


@pytest.mark.parametrize(
    "options",
    [
        {"shared_hidden": 20},
        {"bias": True, "transposed": True, "interleaved": True, "activation": "swigluoai", "limit": 7.0},
    ],
    ids=["shared", "gpt-oss"],
)
def test_layouts(tmp_path: Path, options: dict[str, Any]) -> None:
    run(2, tmp_path, check_against_one, options, [None] * 4, "plain")


def test_a_process_without_tokens(tmp_path: Path) -> None:
    run(2, tmp_path, check_against_one, {"shared_hidden": 8}, [0, 6], "plain")


def _choices(rank: int) -> None:
    """All tokens choose one expert, or none."""
    torch.manual_seed(3)
    experts = shoestring.nn.Experts(4, FEATURES, HIDDEN, dtype=torch.float64)
    whole = copy.deepcopy(experts)
    shoestring.expert_parallel(experts)
    x, weight = batch(rank), torch.rand(len(batch(rank)), 2, dtype=torch.float64)
    for chosen in ([3, -1], [-1, -1], [0, 2]):
        index = torch.tensor([chosen]).expand(len(x), 2).contiguous()
        torch.testing.assert_close(experts(x, index, weight), whole(x, index, weight), rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match="expert_parallel: index: expected -1 to 3, received others"):
        experts(x, torch.full((len(x), 2), 4), weight)


def test_one_expert_has_all_tokens_or_none(tmp_path: Path) -> None:
    run(2, tmp_path, _choices)


def _undone(rank: int, quantize: str | None) -> None:
    model = nn.Sequential(shoestring.nn.MoE(64, 64, 4, 2))
    torch.manual_seed(5)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    if quantize is not None:
        shoestring.lora.apply(
            model, rank=2, target_modules=[], target_parameters=["router.weight"], quantize=quantize
        )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(rank))
    expected = model(x)[0]
    report = shoestring.expert_parallel(model)
    assert report.experts == 2 and model[0].experts.gate_up_proj.shape[0] == 2
    torch.testing.assert_close(model(x)[0], expected, rtol=1e-5, atol=1e-6)
    report.undo()
    report.undo()
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[n], t) for n, t in before.items())
    assert torch.equal(model(x)[0], expected)


@pytest.mark.parametrize("quantize", [None, "nf4", "int8"])
def test_undo_brings_all_experts_back(tmp_path: Path, quantize: str | None) -> None:
    run(2, tmp_path, _undone, quantize)


def _adapted(rank: int, kind: str) -> None:
    """Adapters that are added to split experts train as those of one process."""
    tokens = [torch.arange(12)[None] % 90, torch.arange(30, 60)[None] % 90]
    whole: Any = moe_model(kind)
    shoestring.patch(whole, logits=False)
    model = copy.deepcopy(moe_model(kind))
    shoestring.patch(model, logits=False)
    shoestring.expert_parallel(model)
    targets = {
        "target_modules": ["o_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }
    for each in (whole, model):
        shoestring.lora.apply(each, rank=2, **targets)
        for name, p in each.named_parameters():
            if p.requires_grad:
                nn.init.constant_(p, 0.02 if "lora_B" in name else 0.01)
    for each in tokens:
        (whole(input_ids=each, labels=each).loss / 2).backward()
    loss = model(input_ids=tokens[rank], labels=tokens[rank]).loss
    loss.backward()
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        reference = whole.get_parameter(name).grad
        if "experts" in name:
            # lora_A (experts * rank, in); the columns of lora_B (out, rank * experts) are those of a rank's experts
            experts = reference.shape[0 if "lora_A" in name else 1] // 2
            own = slice(rank * experts // 2, (rank + 1) * experts // 2)
            if "lora_A" in name:
                reference = reference.view(experts, 2, -1)[own].flatten(0, 1)
            else:
                reference = reference.view(-1, 2, experts)[:, :, own].flatten(1)
            grad = p.grad
        else:
            grad = shoestring.distributed.mean_over_ranks(p.grad)
        torch.testing.assert_close(grad, reference, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_models_of_transformers_with_adapters(tmp_path: Path, kind: str) -> None:
    run(2, tmp_path, _adapted, kind)


def _refused(rank: int) -> None:
    def message(model: nn.Module, group: Any = None) -> str:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            shoestring.expert_parallel(model, group)
        return str(caught.value)

    other = dist.new_group([0])
    if rank == 1:
        assert "expected a group with this process" in message(build(), other)
    assert "received a Linear without; call shoestring.patch(model) first" in message(nn.Linear(4, 4))
    assert "divisible by the 2 processes, received 3 in experts" in message(shoestring.nn.MoE(16, 8, 3, 2))
    adapted = shoestring.lora.apply(
        build(torch.float32), rank=2, target_modules=[], target_parameters=["down_proj"]
    )
    assert "add adapters after this call" in message(adapted)
    model = build(torch.float32)
    before = list(model.parameters())
    shoestring.expert_parallel(model)
    assert "which processes have split already" in message(model)
    for strategy in ("zero1", "zero2", "zero3"):
        with pytest.raises(
            ValueError, match="strategy: expected 'ddp' for a model whose experts the processes have split"
        ):
            shoestring.parallelize(model, strategy)
    assert len(before) == len(list(model.parameters()))
    assert shoestring.parallelize(model, "auto").strategy == "ddp"


def test_what_is_refused(tmp_path: Path) -> None:
    run(2, tmp_path, _refused)


def _clipped(rank: int) -> None:
    """Clipping by the norm of all experts gives each process the weights of one that has all of them."""
    ranks = dist.get_world_size()
    whole, model = build(torch.float32), build(torch.float32)
    report = shoestring.expert_parallel(model)
    shoestring.parallelize(model, "ddp")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (whole, model)]
    alone(whole, ranks, [None] * 4)
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    model(batch(rank).float()).square().sum().backward()
    received = report.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(received.float(), expected, rtol=1e-5, atol=0)
    for optimizer in optimizers:
        optimizer.step()
    wanted = dict(whole.named_parameters())
    for name, p in model.named_parameters():
        reference = part_of(wanted[name], rank, ranks) if ".experts." in name else wanted[name]
        torch.testing.assert_close(p, reference, rtol=1e-4, atol=1e-6, msg=name)
    clipping = shoestring.optim.AdamW(model.parameters(), max_grad_norm=1.0)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(
        ValueError, match="AdamW: max_grad_norm: expected None with experts that processes have split"
    ):
        clipping.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_clipping_counts_the_experts_of_all(tmp_path: Path) -> None:
    run(2, tmp_path, _clipped)


def _sharded(rank: int, quantize: str) -> None:
    """Codes of stacks are split by experts, beside a layer that is trained."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.moe = nn.Linear(64, 64), shoestring.nn.MoE(64, 64, 4, 2, renormalize=True)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.moe(self.first(x))[0]
            return y

    models = []
    for _ in range(2):
        torch.manual_seed(7)
        model = nn.Sequential(Block(), Block())
        shoestring.lora.apply(model, rank=2, target_modules=["first"], quantize=quantize)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.1)
        models.append(model)
    whole, split = models
    assert shoestring.count_experts(whole) == (8, 0)
    shoestring.parallelize(split, "zero3")
    stack: Any = split.get_submodule("0.moe.experts")._parameters["gate_up_proj"]
    assert stack.to_local().shape[0] == 2
    inputs = [torch.randn(6, 64, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    for _ in range(2):
        sum(whole(x).square().mean() / 2 for x in inputs).backward()  # type: ignore[union-attr]
        split(inputs[rank]).square().mean().backward()
    wanted = dict(whole.named_parameters())
    for name, p in split.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(
                p.grad.full_tensor(), wanted[name].grad, rtol=1e-4, atol=1e-6, msg=name
            )  # type: ignore[union-attr]


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_zero3_splits_the_codes_of_experts(tmp_path: Path, quantize: str) -> None:
    run(2, tmp_path, _sharded, quantize)


def _refused_with_adapters(rank: int) -> None:
    model = build(torch.float32)
    shoestring.lora.apply(model, rank=2, target_modules=[], target_parameters=["experts.down_proj"])
    for strategy in ("zero3", "hsdp"):
        with pytest.raises(
            ValueError,
            match=r"adapters on stacks of experts, received '\w+', which cannot split moes.0.experts.down",
        ):
            shoestring.parallelize(model, strategy, mesh=(1, 2) if strategy == "hsdp" else None)
    shoestring.parallelize(model, "zero2")
    optimizer = shoestring.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    model(batch(rank).float()).square().mean().backward()
    optimizer.step()


def test_zero3_refuses_adapters_of_experts(tmp_path: Path) -> None:
    run(2, tmp_path, _refused_with_adapters)
