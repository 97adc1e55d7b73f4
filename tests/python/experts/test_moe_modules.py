"""Test nn.Router, nn.Experts and nn.MoE against plain PyTorch, and the bias that balances experts."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoestring
from processes import run
from references.experts import moe_experts_reference
from relative_error import relative_error

FEATURES, HIDDEN, EXPERTS, TOP_K = 20, 12, 6, 2
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"renormalize": True},
    "sigmoid in groups": {
        "score": "sigmoid",
        "groups": 3,
        "top_groups": 2,
        "renormalize": True,
        "scale": 2.5,
    },
    "topk_softmax": {"score": "topk_softmax"},
}
LAYERS: dict[str, dict[str, Any]] = {
    "silu": {},
    "gpt-oss": {
        "activation": "swigluoai",
        "limit": 0.75,
        "interleaved": True,
        "transposed": True,
        "bias": True,
    },
    "gelu": {"activation": "gelu", "bias": True},
}


def randomised(module: nn.Module) -> Any:
    for p in module.parameters():
        nn.init.normal_(p, std=0.4)
    return module


def gradients(y: Tensor, of: list[Tensor]) -> list[Tensor]:
    upstream = torch.linspace(-1, 1, y.numel()).bfloat16().to(y.dtype).view_as(y)
    return list(torch.autograd.grad(y, of, upstream))


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_a_mixture_is_the_sum_of_its_parts(router: dict[str, Any], options: dict[str, Any]) -> None:
    moe = randomised(shoestring.nn.MoE(FEATURES, HIDDEN, EXPERTS, TOP_K, **router, **options)).double()
    x = torch.randn(3, 7, FEATURES, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(3, 7) < 0.8
    y, route = moe(x, mask)
    expected = shoestring.moe_route(F.linear(x, moe.router.weight), TOP_K, mask=mask, **router)
    assert torch.equal(route.index, expected.index) and torch.equal(route.counts, expected.counts)
    bias = {name.removesuffix("_proj_bias").replace("_proj", "") + "_bias": p for name, p in moe.experts.named_parameters() if "bias" in name}  # fmt: skip
    sum_of_experts = moe_experts_reference(
        x, expected.index, expected.weight, moe.experts.gate_up_proj, moe.experts.down_proj,
        **{key: value for key, value in options.items() if key != "bias"}, **bias,
    )  # fmt: skip
    assert relative_error(y, sum_of_experts) < 1e-12
    of = [x, *moe.parameters()]
    for found, wanted in zip(gradients(y, of), gradients(sum_of_experts, of), strict=True):
        assert relative_error(found, wanted) < 1e-12


def test_the_shared_mlp_is_added() -> None:
    moe = randomised(shoestring.nn.MoE(FEATURES, HIDDEN, EXPERTS, TOP_K, shared_hidden=16)).double()
    x = torch.randn(5, FEATURES, dtype=torch.float64)
    y, route = moe(x)
    alone = moe.experts(x, route.index, route.weight)
    assert relative_error(y - alone, moe.shared(x)) < 1e-12
    assert shoestring.nn.MoE(FEATURES, HIDDEN, EXPERTS, TOP_K).shared is None


def test_names_shapes_and_files() -> None:
    moe = shoestring.nn.MoE(
        FEATURES, HIDDEN, EXPERTS, TOP_K, shared_hidden=16, bias=True, bias_rate=0.1, dtype=torch.float64
    )
    shapes = {name: tuple(t.shape) for name, t in moe.state_dict().items() if "shared" not in name}
    assert shapes == {
        "router.weight": (6, 20), "router.bias": (6,), "router.counts": (6,),
        "experts.gate_up_proj": (6, 24, 20), "experts.gate_up_proj_bias": (6, 24),
        "experts.down_proj": (6, 20, 12), "experts.down_proj_bias": (6, 20),
    }  # fmt: skip
    file = io.BytesIO()
    torch.save(moe.state_dict(), file)
    other = copy.deepcopy(moe)
    randomised(other)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    x = torch.randn(4, FEATURES, dtype=torch.float64)
    assert torch.equal(moe(x)[0], other(x)[0])
    plain = shoestring.nn.MoE(FEATURES, HIDDEN, EXPERTS, TOP_K)
    assert [name for name, _ in plain.named_buffers()] == []


def test_initial_values_are_those_of_linear_layers() -> None:
    """Uniform numbers in +-1/sqrt(inputs): the largest of n misses the bound by more than 20/n in exp(-20) of cases."""
    moe = shoestring.nn.MoE(256, 64, 16, TOP_K, bias=True)
    inputs = {"router.weight": 256, "experts.gate_up_proj": 256, "experts.gate_up_proj_bias": 256}
    for name, p in moe.named_parameters():
        bound, most = inputs.get(name, 64) ** -0.5, p.abs().max().item()
        assert (1 - 20 / p.numel()) * bound < most <= bound, name
        assert p.mean().abs() < 6 * bound / (3 * p.numel()) ** 0.5, name


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
def test_routers_compute_in_fp32(weight: torch.dtype) -> None:
    router = shoestring.nn.Router(FEATURES, EXPERTS, TOP_K, dtype=weight)
    x = torch.randn(50, FEATURES, dtype=torch.bfloat16)
    expected = shoestring.moe_route(F.linear(x.float(), router.weight.float()), TOP_K)
    with torch.autocast("cpu", torch.bfloat16):
        route = router(x)
    assert route.weight.dtype == torch.float32
    assert torch.equal(route.index, expected.index) and torch.equal(route.weight, expected.weight)


def test_autocast() -> None:
    moe = randomised(shoestring.nn.MoE(FEATURES, HIDDEN, EXPERTS, TOP_K, shared_hidden=16, bias=True))
    x = torch.randn(50, FEATURES, requires_grad=True)
    expected = moe(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        y = moe(x)[0]
    assert y.dtype == torch.bfloat16
    assert 0 < relative_error(y, expected) < 2e-2  # a few roundings of 2**-9
    of = [x, *moe.parameters()]
    for found, wanted in zip(gradients(y, of), gradients(expected, of), strict=True):
        assert found.dtype == torch.float32 and relative_error(found, wanted) < 4e-2


def test_adapters_on_the_stacks_compute_no_dense_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoestring.adapters.experts import LowRankSum

    model = nn.ModuleDict({"moe": randomised(shoestring.nn.MoE(FEATURES, HIDDEN, EXPERTS, TOP_K, **LAYERS["gpt-oss"]))}).double()  # fmt: skip
    merged = copy.deepcopy(model)
    stacks = ["gate_up_proj", "down_proj"]
    shoestring.lora.apply(model, rank=3, alpha=6, target_modules=[], target_parameters=stacks)
    for name, p in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, std=0.3)
    experts: Any = model.get_submodule("moe.experts")
    for name in stacks:
        getattr(merged.get_submodule("moe.experts"), name).data = getattr(experts, name).dense().detach()
    monkeypatch.setattr(LowRankSum, "dense", lambda _: pytest.fail("the dense sum was computed"))
    x = torch.randn(30, FEATURES, dtype=torch.float64)
    assert relative_error(model["moe"](x)[0], merged["moe"](x)[0]) < 1e-12


def test_the_bias_follows_the_loads() -> None:
    """Each step is that of Wang et al. (arXiv 2408.15664), with a mean of 0."""
    router = shoestring.nn.Router(FEATURES, EXPERTS, TOP_K, score="sigmoid", renormalize=True, bias_rate=0.25)
    bias, moved = torch.zeros(EXPERTS), 0.0
    for step in range(3):
        load = torch.zeros(EXPERTS, dtype=torch.int64)
        for _ in range(2):  # two micro-batches
            x = torch.randn(16, FEATURES) + step
            route = router(x)
            plain = shoestring.moe_route(
                F.linear(x, router.weight), TOP_K, score="sigmoid", renormalize=True, bias=bias
            )
            assert torch.equal(route.index, plain.index)
            load += torch.bincount(route.index.flatten(), minlength=EXPERTS)
        assert torch.equal(router.counts, load)
        router.eval()
        router(x)
        router.train()
        assert torch.equal(router.counts, load)  # evaluation does not count
        router.update_bias()
        bias = bias + 0.25 * (load.double().mean() - load).sign().float()
        bias -= bias.mean()
        assert torch.equal(router.bias, bias)
        assert router.counts.sum() == 0
        moved += bias.abs().sum().item()
    assert moved > 0


def test_the_bias_balances_experts() -> None:
    """The expert that all tokens prefer loses tokens to the others."""
    router = shoestring.nn.Router(FEATURES, EXPERTS, 1, score="sigmoid", bias_rate=0.02)
    x = torch.randn(512, FEATURES) + 1
    with torch.no_grad():
        router.weight[2] += 0.3
    loads = []
    for _ in range(60):
        loads.append(router(x).counts.max().item())
        router.update_bias()
    assert loads[0] > 400 and max(loads[-10:]) < 200  # the mean is 85


def test_the_bias_stays_in_fp32() -> None:
    router = shoestring.nn.Router(FEATURES, EXPERTS, TOP_K, bias_rate=0.001)
    assert router.bias is not None
    router.bias += 1.0009765625 / 3  # bf16 does not have this number
    before = router.bias.clone()
    router.to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert torch.equal(router.bias, before)
    assert router.counts is not None and router.counts.dtype == torch.int64


@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["shoestring", "torch", "reentrant"])
def test_recomputation_does_not_count(use_reentrant: bool | None) -> None:
    moe = shoestring.nn.MoE(FEATURES, HIDDEN, EXPERTS, TOP_K, bias_rate=0.1)
    x = torch.randn(10, FEATURES, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return moe(x)[0].exp()

    for micro_batch in range(1, 3):
        if use_reentrant is None:
            y = shoestring.checkpoint(function, x)
        else:
            y = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=use_reentrant)
        y.sum().backward()
        assert moe.router.counts.sum() == micro_batch * 10 * TOP_K


def test_a_checkpoint_may_end_with_experts() -> None:
    """Backward then asks for the tensors of moe_experts first, and runs the whole layer again for them."""
    moe = shoestring.nn.MoE(FEATURES, HIDDEN, EXPERTS, TOP_K)
    x = torch.randn(10, FEATURES, requires_grad=True)
    inputs = (x, *moe.parameters())
    expected = torch.autograd.grad(moe(x)[0].square().sum(), inputs)
    y = shoestring.checkpoint(lambda x: moe(x)[0], x)
    for found, gradient in zip(torch.autograd.grad(y.square().sum(), inputs), expected, strict=True):
        assert torch.equal(found, gradient)


def _sums_the_counts(rank: int) -> None:
    router = shoestring.nn.Router(2, 3, 1, bias_rate=0.5)
    assert router.bias is not None and router.counts is not None
    router.counts += torch.tensor([[5, 0, 1], [0, 2, 4]][rank])  # the sum is 5, 2, 5; the mean is 4
    router.update_bias()
    assert torch.allclose(router.bias, torch.tensor([-1 / 3, 2 / 3, -1 / 3]))
    groups = [torch.distributed.new_group([0]), torch.distributed.new_group([1])]
    router.counts += torch.tensor([[3, 0, 0], [0, 3, 0]][rank])
    router.bias.zero_()
    router.update_bias(groups[rank])
    expected = torch.tensor([[-1.0, 0.5, 0.5], [0.5, -1.0, 0.5]][rank]) * 2 / 3
    assert torch.allclose(router.bias, expected)


def test_processes_share_their_counts(tmp_path: Path) -> None:
    run(2, tmp_path, _sums_the_counts)


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        ("Router", {"score": "best"}, "score"),
        ("Router", {"groups": 4}, "groups"),
        ("Router", {"bias_rate": -1.0}, "nn.Router: bias_rate"),
        ("Experts", {"activation": "relu"}, "nn.Experts: activation"),
        ("Experts", {"limit": 0.0}, "nn.Experts: limit"),
        ("MoE", {"limit": 7.0, "shared_hidden": 4}, "nn.MoE: limit"),
        ("MoE", {"activation": "swigluoai", "shared_hidden": 4}, "activation"),
    ],
)
def test_what_does_not_fit_is_refused(module: str, options: dict[str, Any], words: str) -> None:
    sizes = {
        "Router": (FEATURES, EXPERTS, TOP_K),
        "Experts": (EXPERTS, FEATURES, HIDDEN),
        "MoE": (FEATURES, HIDDEN, EXPERTS, TOP_K),
    }[module]
    with pytest.raises((ValueError, RuntimeError), match=words):
        getattr(shoestring.nn, module)(*sizes, **options)
