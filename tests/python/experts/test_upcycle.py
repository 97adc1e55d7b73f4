"""Test upcycle: mixtures of experts that compute what the dense MLPs computed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from relative_error import relative_error

FEATURES, HIDDEN = 20, 24


def dense(activation: str = "silu", bias: bool = False, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    mlps = [
        shoestring.nn.GatedMLP(FEATURES, HIDDEN, activation=activation, bias=bias, dtype=dtype)
        for _ in range(2)
    ]
    model = nn.Sequential(mlps[0], nn.Linear(FEATURES, FEATURES, dtype=dtype), mlps[1])
    for p in model.parameters():
        nn.init.normal_(p, std=0.4)
    return model


@pytest.mark.parametrize(
    ("experts", "top_k", "granularity"), [(4, 1, 1), (6, 3, 1), (8, 4, 2), (12, 3, 3), (16, 8, 4)]
)
@pytest.mark.parametrize(("activation", "bias"), [("silu", False), ("gelu", True), ("gelu_tanh", False)])
def test_first_outputs_are_the_dense_ones(
    experts: int, top_k: int, granularity: int, activation: str, bias: bool
) -> None:
    """The weights of the experts are fp64 as the tokens are, so the outputs agree to fp64's rounding."""
    model = dense(activation, bias)
    x = torch.randn(200, FEATURES, dtype=torch.float64)
    expected = model(x)
    report = shoestring.upcycle(model, experts, top_k, granularity=granularity)
    assert list(report.modules) == ["0", "2"] and report.left == {}
    assert relative_error(model(x), expected) < 1e-12
    for moe in report.modules.values():
        route: Any = moe.route
        assert route.index.shape == (200, top_k)
        # each token has all slices of its copies, and different tokens have different copies
        assert torch.equal(
            (route.index % granularity).sort(-1).values,
            torch.arange(granularity).repeat_interleave(top_k // granularity).expand(200, -1),
        )
        assert route.counts.gt(0).sum() > top_k


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = dense(dtype=dtype)
    exact = copy.deepcopy(model).double()
    x = torch.randn(100, FEATURES, dtype=dtype)
    before = relative_error(model(x), exact(x.double()))
    shoestring.upcycle(model, 8, 4, granularity=2)
    assert model(x).dtype == dtype
    # Sums of slices and weights add one rounding of each to those of the dense MLP.
    assert relative_error(model(x), exact(x.double())) < 3 * before


def test_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, mlp_bias=True)
    model = transformers.LlamaForCausalLM(config).double()
    ids = torch.randint(0, 32, (2, 10))
    expected = model(ids).logits
    report = shoestring.upcycle(model, 8, 2, granularity=2)
    assert list(report.modules) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert relative_error(model(ids).logits, expected) < 1e-6  # the norms compute in fp32
    loss = model(ids, labels=ids).loss + 0.01 * sum(moe.route.balance for moe in report.modules.values())
    loss.backward()
    for moe in report.modules.values():
        assert all(p.grad is not None for p in moe.parameters())


def test_training_goes_on_and_copies_become_different() -> None:
    model = dense(dtype=torch.float32)
    report = shoestring.upcycle(model, 4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(5):
        x = torch.randn(64, FEATURES)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    stack = report.modules["0"].experts.gate_up_proj
    assert stack.isfinite().all() and not torch.equal(stack[0], stack[1])
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    x = torch.randn(3, FEATURES)
    assert torch.equal(other(x), model(x))


def test_checkpoints_keep_the_first_route() -> None:
    model = dense()
    report = shoestring.upcycle(model, 4, 2)
    x = torch.randn(30, FEATURES, dtype=torch.float64, requires_grad=True)
    y = shoestring.checkpoint(lambda x: model(x).exp(), x)
    routes = [moe.route for moe in report.modules.values()]
    y.sum().backward()
    assert all(moe.route is route for moe, route in zip(report.modules.values(), routes, strict=True))


def test_reinitialised_features_have_the_mean_and_deviation_of_the_old_ones() -> None:
    model = nn.Sequential(shoestring.nn.GatedMLP(64, 200))
    mlp: Any = model[0]
    with torch.no_grad():
        mlp.gate_proj.weight.add_(0.5)
    old = [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight.t()]
    experts: Any = shoestring.upcycle(model, 3, 1, reinitialize=0.25).modules["0"].experts
    sets = []
    for e in range(3):
        new = [*experts.gate_up_proj[e].chunk(2), experts.down_proj[e].t()]
        changed = [(n != o).any(1) for n, o in zip(new, old, strict=True)]
        assert changed[0].sum() == 50 and all(torch.equal(c, changed[0]) for c in changed)
        sets.append(changed[0])
        for n, o in zip(new, old, strict=True):
            n, o, count = n[changed[0]], o[changed[0]], 50 * 64
            # 6 standard errors of the mean and of the standard deviation of a normal sample
            assert (n.mean() - o.mean()).abs() < 6 * o.std() / count**0.5
            assert (n.std() / o.std() - 1).abs() < 6 / (2 * count) ** 0.5
    assert not torch.equal(sets[0], sets[1])


class WithScale(nn.Module):
    """A MLP that computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 12)
        self.down_proj, self.act_fn = nn.Linear(12, 8), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class WithRelu(WithScale):
    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_mlps_that_compute_something_else_stay() -> None:
    hooked = shoestring.nn.GatedMLP(8, 12)
    hooked.up_proj.register_forward_hook(lambda *_: None)
    model = nn.Sequential(
        shoestring.nn.GatedMLP(8, 12), WithScale(), WithRelu(), hooked, shoestring.nn.GatedMLP(8, 9)
    )
    before = list(model)
    report = shoestring.upcycle(model, 4, 2, granularity=2)
    assert list(report.modules) == ["0"]
    assert all(model[i] is before[i] for i in range(1, 5))
    assert "neither silu nor gelu, or another computation" in report.left["1"] == report.left["2"]
    assert "hooks" in report.left["3"]
    assert "9 hidden features" in report.left["4"]


def test_a_mlp_in_two_places_stays_one() -> None:
    mlp = shoestring.nn.GatedMLP(8, 12)
    model = nn.Sequential(mlp, mlp)
    report = shoestring.upcycle(model, 4, 2)
    assert list(report.modules) == ["0", "1"] and model[0] is model[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_experts": 5, "granularity": 2}, "num_experts"),
        ({"top_k": 3, "granularity": 2}, "top_k"),
        ({"top_k": 9}, "top_k: expected at most"),
        ({"reinitialize": 1.5}, "reinitialize"),
        ({"granularity": 0}, "granularity"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    model = dense()
    with pytest.raises(ValueError, match=words):
        shoestring.upcycle(model, **{"num_experts": 8, "top_k": 2, **options})
    assert isinstance(model[0], shoestring.nn.GatedMLP)


def test_models_without_mlps_are_refused() -> None:
    with pytest.raises(ValueError, match="received none"):
        shoestring.upcycle(nn.Sequential(nn.Linear(4, 4)), 4, 2)
    with pytest.raises(ValueError, match="received a MLP"):
        shoestring.upcycle(shoestring.nn.GatedMLP(8, 12), 4, 2)
    with pytest.raises(TypeError):
        shoestring.upcycle("folder", 4, 2)  # type: ignore[arg-type]
