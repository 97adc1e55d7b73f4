"""Test cross-entropy over shards of the classes, in one and two processes.

The reference is linear_cross_entropy with all classes in one process.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shoestring
from processes import run
from relative_error import relative_error

TOKENS, FEATURES, VOCAB = 13, 24, 61


def case(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return inputs with two ignored tokens. No target is in one of three shards, classes 20 to 39."""
    generator = torch.Generator().manual_seed(5)
    target = torch.randint(0, 20, (TOKENS,), generator=generator)
    target[::2] = torch.randint(40, VOCAB, (7,), generator=generator)
    target[3], target[8] = -100, -100
    normal = {
        "hidden": torch.randn(TOKENS, FEATURES, generator=generator, dtype=torch.float64),
        "weight": torch.randn(VOCAB, FEATURES, generator=generator, dtype=torch.float64) * 0.5,
        "bias": torch.randn(VOCAB, generator=generator, dtype=torch.float64),
    }
    return {name: x.to(dtype).requires_grad_() for name, x in normal.items()} | {"target": target}


def joined(x: dict[str, Tensor], starts: list[int], **options: Any) -> tuple[Tensor, Tensor]:
    """Return token losses and log-sum-exps, combined from shards whose first classes are ``starts``."""
    ends = [*starts[1:], VOCAB]
    parts = [
        shoestring.linear_cross_entropy_shard(
            x["hidden"],
            x["weight"][first:end],
            x["target"],
            x["bias"][first:end],
            first_class=first,
            **options,
        )
        for first, end in zip(starts, ends, strict=True)
    ]
    counted = x["target"] != options.get("ignore_index", -100)
    lse = torch.stack([part.lse for part in parts]).logsumexp(0)
    return torch.where(counted, lse - sum(part.target_logit for part in parts), 0), lse.where(counted, 0)


@pytest.mark.parametrize("starts", [[0, 31], [0, 20, 40], [0, 60]])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "logit_scale": 0.7}], ids=["plain", "softcap"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shards_against_the_whole(dtype: torch.dtype, options: dict[str, Any], starts: list[int]) -> None:
    x = case(dtype)
    names = ("hidden", "weight", "bias")
    upstream = torch.linspace(0.5, 2.0, TOKENS, dtype=torch.float64)

    def differentiate(losses: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            (losses * upstream + lse * upstream.flip(0)).sum(), [x[name] for name in names]
        )

    whole = shoestring.linear_cross_entropy_with_stats(
        x["hidden"], x["weight"], x["target"], x["bias"], reduction="none", **options
    )
    losses, lse = joined(x, starts, **options)
    # Shards are summed in another order than all classes at once. In bf16, the gradient of hidden is rounded
    # once per shard.
    bound = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-6}[dtype]
    assert losses.dtype == whole.loss.dtype
    assert relative_error(losses, whole.token_loss) < bound
    assert relative_error(lse, whole.lse) < bound
    bound = 6e-3 if dtype == torch.bfloat16 else bound
    for name, ours, expected in zip(
        names, differentiate(losses, lse), differentiate(whole.token_loss, whole.lse), strict=True
    ):
        assert relative_error(ours, expected) < bound, name


def test_shard_gradcheck() -> None:
    x = case()

    def shard(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        target = torch.tensor([5, 25, -100, 21])
        return shoestring.linear_cross_entropy_shard(
            hidden, weight, target, bias, first_class=20, softcap=4.0
        )

    few = [x["hidden"][:4, :5], x["weight"][20:28, :5], x["bias"][20:28]]
    assert torch.autograd.gradcheck(shard, [part.detach().clone().requires_grad_() for part in few])


def test_shard_opcheck_and_compile() -> None:
    x = case(torch.float32)
    here = x["weight"][20:].detach().requires_grad_()
    operator = torch.ops.shoestring.linear_cross_entropy_shard.default
    torch.library.opcheck(operator, (x["hidden"], here, x["target"]), {"first_class": 20})

    def step(hidden: Tensor, target: Tensor) -> Tensor:
        part = shoestring.linear_cross_entropy_shard(torch.tanh(hidden), here, target, first_class=20)
        return part.lse.sum() + 2 * part.target_logit.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (6, 11):
        results = [f(x["hidden"][:tokens], x["target"][:tokens]) for f in (step, compiled)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(r, here)[0] for r in results))


def test_ignore_index_may_be_a_class() -> None:
    x = case()
    ignored = int(x["target"][0])
    whole = shoestring.linear_cross_entropy(
        x["hidden"], x["weight"], x["target"].clamp(min=0), x["bias"], reduction="none", ignore_index=ignored
    )
    losses, _ = joined(x | {"target": x["target"].clamp(min=0)}, [0, 31], ignore_index=ignored)
    assert relative_error(losses, whole) < 1e-13


def test_weight_gradient_into_a_buffer() -> None:
    x = case()
    here = {
        "hidden": x["hidden"],
        "weight": x["weight"][20:].detach().requires_grad_(),
        "target": x["target"],
    }
    buffer = torch.ones_like(here["weight"])
    for options in ({}, {"weight_grad": buffer}):
        part = shoestring.linear_cross_entropy_shard(**here, first_class=20, **options)
        (part.lse.square().sum() - part.target_logit.sum()).backward()
    assert relative_error(buffer - 1, here["weight"].grad) < 1e-13


def test_options_that_need_other_shards_are_refused() -> None:
    x = case()
    for name in ("label_smoothing", "class_weights", "hard_fraction"):
        with pytest.raises(ValueError, match=f"linear_cross_entropy_shard: {name}: not possible on a shard"):
            shoestring.linear_cross_entropy_shard(
                x["hidden"], x["weight"], x["target"], first_class=0, **{name: 0.1}
            )


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum", "softcap": 3.0, "z_loss": 1e-2},
    "none": {"reduction": "none", "ignore_index": 7},
    "weighted": {"token_weights": torch.linspace(0.1, 1.0, TOKENS, dtype=torch.float64), "shift": True},
    "lora": {"scaling": 0.5, "logit_scale": 0.7},
}


def whole_and_parallel(rank: int, dtype: torch.dtype) -> None:
    """Two processes with 25 and 36 of the classes give the results of one process with all 61 classes."""
    starts = [0, 25, VOCAB]
    mine = slice(starts[rank], starts[rank + 1])
    for name, options in OPTIONS.items():
        results = []
        for parallel in (False, True):
            x = case(dtype)
            x["target"] = x["target"].where(x["target"] != -100, options.get("ignore_index", -100))
            lora: dict[str, Any] = {}
            leaves = {key: x[key] for key in ("hidden", "weight", "bias")}
            generator = torch.Generator().manual_seed(3)
            if name == "lora":
                for key, shape in (("lora_A", (4, FEATURES)), ("lora_B", (VOCAB, 4))):
                    lora[key] = (
                        torch.randn(shape, generator=generator, dtype=torch.float64)
                        .to(dtype)
                        .requires_grad_()
                    )
                lora["logit_scale"] = torch.tensor(0.7, dtype=dtype, requires_grad=True)
                leaves |= lora
            arguments: dict[str, Any] = dict(options) | lora
            if parallel:
                if lora:
                    arguments["lora_B"] = lora["lora_B"][mine]
                loss = shoestring.vocab_parallel_linear_cross_entropy(
                    x["hidden"],
                    x["weight"][mine],
                    x["target"],
                    x["bias"][mine],
                    first_class=mine.start,
                    **arguments,
                )
            else:
                loss = shoestring.linear_cross_entropy(
                    x["hidden"], x["weight"], x["target"], x["bias"], **arguments
                )
            weights = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view_as(loss)
            grads = dict(
                zip(leaves, torch.autograd.grad((loss * weights).sum(), list(leaves.values())), strict=True)
            )
            for key in ("weight", "bias", "lora_B"):
                if key in grads:
                    grads[key] = grads[key][mine]
            results.append({"loss": loss, **grads})
        bound = 1e-12 if dtype == torch.float64 else 2e-6
        for key, expected in results[0].items():
            assert relative_error(results[1][key], expected) < bound, (name, key)


def targets_nobody_has(rank: int) -> None:
    x = case()
    mine = slice(0, 25) if rank == 0 else slice(25, VOCAB)
    target = x["target"].where(x["target"] != -100, VOCAB)
    # Without first_class, all shards are taken to have equal size. Classes 25 to 35 then belong to no
    # process.
    unequal = torch.full((TOKENS,), 30)
    for first, wrong in ((mine.start, target), (None, unequal)):
        with pytest.raises(IndexError, match="expected each class to be one process's"):
            shoestring.vocab_parallel_linear_cross_entropy(
                x["hidden"], x["weight"][mine], wrong, first_class=first
            )
    equal = slice(rank * 30, rank * 30 + 30)
    target = x["target"].clamp(max=59)
    found = shoestring.vocab_parallel_linear_cross_entropy(x["hidden"], x["weight"][equal], target)
    expected = shoestring.linear_cross_entropy(x["hidden"], x["weight"][:60], target)
    assert relative_error(found, expected) < 1e-13
    ignored = torch.full((TOKENS,), -100)
    loss = shoestring.vocab_parallel_linear_cross_entropy(x["hidden"], x["weight"][equal], ignored)
    assert loss.isnan()
    (grad,) = torch.autograd.grad(
        shoestring.vocab_parallel_linear_cross_entropy(
            x["hidden"], x["weight"][equal], ignored, reduction="sum"
        ),
        x["hidden"],
    )
    assert not grad.any()
    others = [torch.empty_like(found) for _ in range(2)]
    dist.all_gather(others, found.detach())
    assert torch.equal(*others)


def confident_tokens(rank: int) -> None:
    """A loss that is small compared with the logits has the precision of the loss, and not of the logits."""
    x = case(torch.float32)
    target = x["target"].clamp(min=0)
    hidden = 5 * x["weight"].detach()[target]
    bias = torch.full((VOCAB,), 1000.0)  # fp32 numbers near 1000 are 6e-5 apart
    mine = slice(0, 25) if rank == 0 else slice(25, VOCAB)
    found = shoestring.vocab_parallel_linear_cross_entropy(
        hidden, x["weight"][mine], target, bias[mine], first_class=mine.start, reduction="none"
    )
    expected = shoestring.linear_cross_entropy(hidden, x["weight"], target, bias, reduction="none")
    assert 0 < expected.max() < 1e-3
    assert relative_error(found, expected) < 1e-3


def targets_and_confident_tokens(rank: int) -> None:
    targets_nobody_has(rank)
    confident_tokens(rank)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_two_processes(tmp_path: Path, dtype: torch.dtype) -> None:
    run(2, tmp_path, whole_and_parallel, dtype)


def test_targets_over_two_processes(tmp_path: Path) -> None:
    run(2, tmp_path, targets_and_confident_tokens)
