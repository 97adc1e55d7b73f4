from typing import Any

import pytest
import torch
from torch import Tensor

import shoestring
from operator_cases import Arguments, Draw, Operator, normal
from operator_tests import OperatorTests
from references.experts import first_largest, moe_route_reference
from relative_error import relative_error
from thread_counts import assert_same_bits

pytestmark = pytest.mark.device

SCORES = ("softmax", "sigmoid", "topk_softmax")


def on_a_grid(rows: int, experts: int) -> Draw:
    """Draw logits that all dtypes hold exactly, so that none are so near that roundings decide.

    The logits of a token are distinct, unless it has more than 129 experts.
    """

    def values(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
        steps = torch.rand(rows, max(129, experts), generator=g, device="cpu").argsort(-1)
        return (steps[:, :experts] % 129 - 64) / 16

    return Draw((rows, experts), values)


def counted(rows: int, _: int) -> Draw:
    """Draw a mask in which three of four tokens count, the first one in any case."""

    def values(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
        mask = torch.rand(shape, generator=g, device="cpu") < 0.75
        mask[:1] = True
        return mask

    return Draw((rows,), values)


def bias_of(_: int, experts: int) -> Draw:
    return normal(experts, scale=0.1, dtype=torch.float32, gradient=False)


def groups_of(_: int, experts: int) -> int:
    """Return the smallest number of groups above 1 that divides the number of experts."""
    return next((count for count in range(2, experts + 1) if experts % count == 0), 1)


DEEPSEEK: Arguments = {
    "score": "sigmoid",
    "bias": bias_of,
    "renormalize": True,
    "groups": groups_of,
    "top_k": lambda rows, experts: min(3, experts // groups_of(rows, experts)),
    "scale": 2.5,
    "mask": counted,
}


class TestMoeRoute(OperatorTests):
    # (tokens, experts): no token, one expert, a part of a register and of a warp, several parts of the sums over
    # tokens, and the largest number of experts.
    operator = Operator(
        "moe_route",
        moe_route_reference,
        lambda rows, experts: {"logits": on_a_grid(rows, experts), "top_k": min(2, experts)},
        [(0, 8), (1, 1), (5, 3), (9, 77), (70, 128), (1100, 16), (2, 2048)],
        [
            {},
            DEEPSEEK,
            {"renormalize": True, "mask": counted},
            {"bias": bias_of, "scale": 0.5},
            {"score": "sigmoid", "top_k": lambda rows, experts: (experts + 1) // 2},
            {"score": "topk_softmax"},
        ],
        traced=2,
    )


def routed(logits: Tensor, top_k: int, function: Any = shoestring.moe_route, **options: Any) -> list[Tensor]:
    """Return the results of a route and the gradient of the logits for given upstream gradients."""
    leaf = logits.detach().clone().requires_grad_()
    results = function(leaf, top_k, **options)
    _, weight, _, balance, z = results
    upstream = torch.linspace(-1, 1, weight.numel(), device=logits.device).view_as(weight)
    loss = (weight.float() * upstream).sum() + 0.5 * balance + 0.25 * z
    return [*(t.detach() for t in results), torch.autograd.grad(loss, leaf)[0]]


@pytest.mark.parametrize("score", SCORES)
def test_equal_scores_rank_by_the_lowest_index(capability: str, backend: str, score: str) -> None:
    rows = 200 if backend == "simt" else 10_000
    logits = torch.randint(-1, 2, (rows, 24)) * 1.5
    expected = first_largest(logits, 5)
    assert torch.equal(shoestring.moe_route(logits, 5, score=score).index, expected)
    # Scores are computed where a bias is added, and equal logits have equal scores in all lanes.
    zero = torch.zeros(24)
    assert torch.equal(shoestring.moe_route(logits, 5, score=score, bias=zero).index, expected)
    logits[logits == 0] = -0.0
    logits[::2] = logits[::2].abs()
    assert torch.equal(shoestring.moe_route(logits, 5, score=score).index, first_largest(logits, 5))


def dense(index: Tensor, weight: Tensor, experts: int) -> Tensor:
    """Return the weights of all experts, of which those without a place in index are 0."""
    return torch.zeros(*index.shape[:-1], experts, dtype=weight.dtype).scatter(-1, index, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3 as it is", "deepseek", "gpt-oss", "mixtral"])
def test_routers_of_transformers(kind: str, dtype: torch.dtype) -> None:
    """The choice, the weights and their dtype are those of the routers of transformers."""
    hidden = torch.randn(40, 32, dtype=dtype)
    router: Any
    options: dict[str, Any]
    if kind.startswith("qwen3"):
        from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

        normed = kind == "qwen3"
        config = qwen3.Qwen3MoeConfig(
            hidden_size=32, num_experts=16, num_experts_per_tok=4, norm_topk_prob=normed
        )
        router, options = qwen3.Qwen3MoeTopKRouter(config), {"renormalize": normed}
    elif kind == "deepseek":
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

        config = deepseek.DeepseekV3Config(
            hidden_size=32, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2
        )
        router = deepseek.DeepseekV3TopkRouter(config)
        router.e_score_correction_bias.copy_(torch.randn(16) * 0.1)
        options = {"score": "sigmoid", "bias": router.e_score_correction_bias, "renormalize": True}
        options |= {"groups": 4, "top_groups": 2, "scale": config.routed_scaling_factor}
    elif kind == "gpt-oss":
        from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

        config = gpt_oss.GptOssConfig(hidden_size=32, num_local_experts=16, num_experts_per_tok=4)
        router, options = gpt_oss.GptOssTopKRouter(config), {"score": "topk_softmax"}
    else:
        from transformers.models.mixtral import modeling_mixtral as mixtral

        config = mixtral.MixtralConfig(hidden_size=32, num_local_experts=16, num_experts_per_tok=4)
        router, options = mixtral.MixtralTopKRouter(config), {"renormalize": True}
    torch.nn.init.normal_(router.weight, std=0.3)
    if kind != "deepseek":  # its router multiplies in fp32
        router.to(dtype)
    with torch.no_grad():
        logits, weight, index = router(hidden)
    ours = shoestring.moe_route(logits, 4, **options)
    if kind != "mixtral":  # its weights stay in fp32
        assert ours.weight.dtype == weight.dtype
    expected, found = dense(index, weight.float(), 16), dense(ours.index, ours.weight.float(), 16)
    # Equal logits of 16 bits may be chosen in another order, but not in fp32.
    same = (expected != 0).eq(found != 0).all(-1)
    assert same.all() if logits.dtype == torch.float32 else same.float().mean() > 0.7
    tolerance = 2 * torch.finfo(ours.weight.dtype).eps
    torch.testing.assert_close(found[same], expected[same], rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_balance_is_the_loss_of_transformers(masked: bool) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(60, 16)
    mask = torch.rand(6, 10) < 0.7 if masked else None
    expected = load_balancing_loss_func((logits,), 16, 3, attention_mask=mask)
    ours = shoestring.moe_route(logits, 3, mask=None if mask is None else mask.flatten())
    torch.testing.assert_close(ours.balance, expected)


def test_balance_of_equal_loads_is_top_k() -> None:
    route = shoestring.moe_route(torch.eye(6).repeat(2, 1) * 2, 1)
    assert route.counts.eq(2).all()
    torch.testing.assert_close(route.balance, torch.tensor(1.0))


@pytest.mark.parametrize("score", SCORES)
def test_masked_tokens_have_no_expert(capability: str, score: str) -> None:
    """Results of the tokens that count are those without the others, whose logits may be anything."""
    logits, mask = torch.randn(50, 12), torch.rand(50) < 0.6
    alone = shoestring.moe_route(logits[mask], 3, score=score)
    logits[~mask] = float("nan")
    index, weight, counts, balance, z, grad = routed(logits, 3, score=score, mask=mask)
    assert index[~mask].eq(-1).all() and weight[~mask].eq(0).all() and grad[~mask].eq(0).all()
    assert torch.equal(index[mask], alone.index) and torch.equal(weight[mask], alone.weight)
    assert torch.equal(counts, alone.counts) and not grad.isnan().any()
    torch.testing.assert_close((balance, z), (alone.balance, alone.z))


@pytest.mark.parametrize("score", SCORES)
def test_without_a_token(score: str) -> None:
    for logits, mask in ((torch.randn(0, 4), None), (torch.randn(3, 4), torch.zeros(3, dtype=torch.bool))):
        index, weight, counts, balance, z, grad = routed(logits, 2, score=score, mask=mask)
        assert index.eq(-1).all() and weight.eq(0).all() and counts.eq(0).all()
        assert balance == 0 and z == 0 and grad.eq(0).all()


@pytest.mark.parametrize("score", SCORES)
def test_not_finite_and_large(capability: str, score: str) -> None:
    logits = torch.tensor(
        [
            [0, 1, float("nan"), 5],
            [0, -torch.inf, 2, -torch.inf],
            [1e30, -1e30, 3e38, 0],
            [200.0, 0, -200, 199],
        ]
    )
    route = shoestring.moe_route(logits, 2, score=score)
    assert route.index.tolist() == [[2, 3], [2, 0], [2, 0], [0, 3]]
    assert route.weight[0].isnan().any() and route.weight[1:].isfinite().all()
    assert route.balance.isnan() and route.z.isnan()
    exact = routed(logits[[1, 3]].double(), 2, moe_route_reference, score=score)
    for a, b in zip(routed(logits[[1, 3]], 2, score=score), exact, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype))
    # A row without a number still has two experts.
    worst = shoestring.moe_route(torch.full((1, 4), float("nan")), 2, score=score, bias=torch.zeros(4))
    assert worst.index.tolist() == [[0, 1]]


@pytest.mark.parametrize("name", ["weight", "balance", "z"])
@pytest.mark.parametrize("score", SCORES)
def test_one_of_the_results_alone(capability: str, score: str, name: str) -> None:
    logits = torch.randn(20, 9)
    exact, found = (
        torch.autograd.grad(
            (getattr(shoestring.ops.MoeRoute(*function(leaf, 3, score=score)), name) ** 2).sum(), leaf
        )[0]
        for function, leaf in (
            (moe_route_reference, logits.double().requires_grad_()),
            (shoestring.moe_route, logits.clone().requires_grad_()),
        )
    )
    assert relative_error(found, exact) < 1e-6


def test_the_bias_chooses_only() -> None:
    logits, bias = torch.randn(30, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    route = shoestring.moe_route(logits, 2, bias=bias)
    assert not torch.equal(route.index, shoestring.moe_route(logits, 2).index)
    assert torch.equal(route.index, first_largest(logits.softmax(-1) + bias, 2))
    torch.testing.assert_close(route.weight, logits.softmax(-1).gather(-1, route.index))
    with pytest.raises(RuntimeError, match="unused"):
        torch.autograd.grad(route.weight.sum() + route.balance, bias)
    assert not shoestring.moe_route(logits.detach(), 2, bias=bias).weight.requires_grad


def test_experts_come_from_the_best_groups(capability: str) -> None:
    # The best expert is in group 0, but groups 1 and 2 have the largest sums of two.
    logits = torch.tensor([[6.0, -9, -9, -9, 3, 3, 0, 0, 2, 2, 2, 2]])
    options: dict[str, Any] = {"score": "topk_softmax", "groups": 3}
    assert shoestring.moe_route(logits, 3, top_groups=2, **options).index.tolist() == [[4, 5, 8]]
    assert shoestring.moe_route(logits, 3, top_groups=3, **options).index.tolist() == [[0, 4, 5]]
    # Groups of one expert.
    logits = torch.tensor([[1.0, 2, 3, -torch.inf]])
    assert shoestring.moe_route(logits, 2, groups=4, top_groups=2).index.tolist() == [[2, 1]]
    # An expert of -inf in a group that is kept comes before the experts of other groups.
    options["groups"] = 2
    logits = torch.tensor([[-9.0, -9, -9, 3, 3, -torch.inf]])
    assert shoestring.moe_route(logits, 3, **options).index.tolist() == [[3, 4, 5]]


def test_many_dimensions_are_rows() -> None:
    logits, mask = torch.randn(3, 4, 10), torch.rand(3, 4) < 0.5
    found, rows = routed(logits, 2, mask=mask), routed(logits.flatten(0, 1), 2, mask=mask.flatten())
    assert found[0].shape == (3, 4, 2) and found[5].shape == logits.shape
    assert all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(found, rows, strict=True))
    assert shoestring.moe_route(logits[0, 0], 2).index.shape == (2,)


def test_what_is_kept() -> None:
    logits = torch.randn(64, 32, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        shoestring.moe_route(logits, 4)
    assert sum(t.numel() * t.element_size() for t in saved) == 64 * 32 * 4 + 64 * 4 * 8 + 32 * 8


def test_a_checkpoint_keeps_the_choice() -> None:
    """A second run with other logits, as another order of sums would give, has the choice of the first run."""
    logits, noise, chosen = torch.randn(50, 8, requires_grad=True), torch.randn(50, 8), []

    def layer(x: Tensor) -> Tensor:
        route = shoestring.moe_route(x + noise * len(chosen), 2)
        chosen.append(route.index)
        return route.weight.square().sum() + route.balance

    shoestring.checkpoint(layer, logits, keep=["shoestring::moe_route"]).backward()
    assert len(chosen) == 2 and torch.equal(*chosen)


def test_repeatable_on_any_number_of_threads(backend: str) -> None:
    logits = torch.randn(100 if backend == "simt" else 5000, 40)
    for score in SCORES:
        assert_same_bits(
            lambda score=score: routed(logits, 4, score=score), (torch.get_num_threads(), 1, 2, 3)
        )


def test_errors() -> None:
    x = torch.ones(3, 8)
    for message, arguments, options in (
        (
            r"moe_route: logits: expected \(\.\.\., experts\) of fp32, fp64, bf16 or fp16, received \[3\] of Long",
            (torch.ones(3, dtype=torch.int64), 1),
            {},
        ),
        ("moe_route: logits: expected 1 to 2048 experts, received 0", (torch.ones(3, 0), 1), {}),
        ("moe_route: logits: expected 1 to 2048 experts, received 2049", (torch.ones(1, 2049), 1), {}),
        ("moe_route: top_k: expected 1 to 8, the number of experts, received 9", (x, 9), {}),
        ("moe_route: top_k: expected 1 to 8, the number of experts, received 0", (x, 0), {}),
        (
            "moe_route: score: expected 'softmax', 'sigmoid' or 'topk_softmax', received 'tanh'",
            (x, 1),
            {"score": "tanh"},
        ),
        (
            "moe_route: groups: expected a divisor of the number of experts, 8, received 3",
            (x, 1),
            {"groups": 3},
        ),
        (
            "moe_route: top_groups: expected 1 to 4, the number of groups, received 5",
            (x, 1),
            {"groups": 4, "top_groups": 5},
        ),
        (
            "moe_route: top_groups: expected groups with at least top_k experts, 3, received 2 experts in 1 groups",
            (x, 3),
            {"groups": 4},
        ),
        ("moe_route: scale: expected a finite number, received inf", (x, 1), {"scale": float("inf")}),
        (
            r"moe_route: bias: expected \(8\) of a floating-point type on \w+(:0)?, received \[4\] of Float",
            (x, 1),
            {"bias": torch.ones(4)},
        ),
        (
            r"moe_route: bias: expected .* received \[8\] of Float on meta",
            (x, 1),
            {"bias": torch.ones(8, device="meta")},
        ),
        (
            r"moe_route: mask: expected \[3\] of Bool on \w+(:0)?, received \[3\] of Float",
            (x, 1),
            {"mask": torch.ones(3)},
        ),
    ):
        with pytest.raises(RuntimeError, match=message):
            shoestring.moe_route(*arguments, **options)
