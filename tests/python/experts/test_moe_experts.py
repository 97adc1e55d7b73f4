"""Test moe_experts: the MLPs of experts, from the choice of a router to the weighted sum."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from operator_cases import Arguments, Draw, Operator, normal, uniform
from operator_tests import OperatorTests
from references.experts import moe_experts_reference
from relative_error import relative_error
from shoestring import ExpertLora
from thread_counts import assert_same_bits

pytestmark = pytest.mark.device

BF16 = {"dtype": torch.bfloat16}
EXPERTS, TOP_K = 5, 2
# (tokens, features): one token, odd sizes, no token, and several tiles and panels.
SIZES = [(1, 40), (51, 33), (0, 8), (130, 270)]


def hidden_of(features: int) -> int:
    return {40: 24, 33: 19, 8: 4, 270: 131}.get(features, features // 2 + 2)


def chosen(tokens: int, kind: str = "some without") -> Draw:
    """Draw the experts of tokens. Expert 2 has no token; some slots have no expert, or expert 3 has all tokens."""

    def values(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
        order = torch.rand(*shape[:-1], EXPERTS, generator=g, device="cpu").argsort(-1)
        index = order[..., :TOP_K].contiguous()
        index[index == 2] = -1
        if kind == "one":
            index[..., 0], index[..., 1] = 3, -1
        return index

    return Draw((tokens, TOP_K), values)


def arguments(tokens: int, features: int) -> Arguments:
    hidden = hidden_of(features)
    return {
        "x": normal(tokens, features),
        "index": chosen(tokens),
        "weight": uniform(tokens, TOP_K),
        "gate_up": normal(EXPERTS, 2 * hidden, features, scale=features**-0.5),
        "down": normal(EXPERTS, features, hidden, scale=hidden**-0.5),
    }


def transposed(tokens: int, features: int, name: str) -> Draw:
    hidden = hidden_of(features)
    shape = {"gate_up": (EXPERTS, features, 2 * hidden), "down": (EXPERTS, hidden, features)}[name]
    return normal(*shape, scale=shape[1] ** -0.5)


BIASES: Arguments = {
    "gate_up_bias": lambda _, features: normal(EXPERTS, 2 * hidden_of(features), scale=0.3),
    "down_bias": lambda _, features: normal(EXPERTS, features, scale=0.3),
}
TRANSPOSED: Arguments = {
    "gate_up": lambda *size: transposed(*size, "gate_up"),
    "down": lambda *size: transposed(*size, "down"),
    "transposed": True,
}
RANK = 3
LORA: Arguments = {
    "gate_up_a": lambda _, features: normal(EXPERTS, RANK, features, scale=features**-0.5),
    "gate_up_b": lambda _, features: normal(EXPERTS, 2 * hidden_of(features), RANK),
    "down_a": lambda _, features: normal(
        EXPERTS, RANK + 1, hidden_of(features), scale=hidden_of(features) ** -0.5
    ),
    "down_b": lambda _, features: normal(EXPERTS, features, RANK + 1),
    "scaling": 0.5,
}
DROPOUT: Arguments = {
    "dropout": 0.3,
    "seed": lambda *_: Draw((1,), lambda shape, g: torch.randint(2**62, shape, generator=g, device="cpu")),
}
# A limit far above all features: rounding decides about a gradient at a limit.
GPT_OSS = BIASES | TRANSPOSED | {"activation": "swigluoai", "limit": 7.0, "interleaved": True}


def with_lora(**given: Any) -> Tensor:
    """Call the Python function with the arguments of the operator."""
    lora = {name: given.pop(name) for name in ExpertLora._fields if name in given}
    return shoestring.moe_experts(**given, lora=ExpertLora(**lora) if lora else None)


@pytest.mark.sample(cpu=60, simt=8)
class TestMoeExperts(OperatorTests):
    operator = Operator(
        "moe_experts",
        moe_experts_reference,
        arguments,
        SIZES,
        [
            {},
            LORA,
            GPT_OSS,
            BF16,
            {"activation": "gelu", "index": lambda tokens, _: chosen(tokens, "one")},
            {"activation": "gelu_tanh", "interleaved": True} | BIASES,
            BF16 | TRANSPOSED,
            GPT_OSS | LORA,
            BF16 | LORA,
            LORA | DROPOUT,
            GPT_OSS | LORA | DROPOUT,
        ],
        autocast=lambda given: given | BF16,
        # like eager PyTorch, the operator rounds the features of each slot and their gradients
        computed=lambda dtype: dtype,
        traced=3,
        function=with_lora,
    )


def results(function: Callable[..., Tensor], given: dict[str, Any], seed: int = 3) -> dict[str, Tensor]:
    """Return the result of a function and the gradients of its floating-point tensors, by their names."""
    given = {
        name: v.detach().requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v
        for name, v in given.items()
    }
    y = function(**given)
    leaves = {name: v for name, v in given.items() if isinstance(v, Tensor) and v.requires_grad}
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    grads = torch.autograd.grad(y, list(leaves.values()), upstream.to(y))
    return {"result": y.detach()} | dict(zip(leaves, grads, strict=True))


def drawn(tokens: int, features: int, hidden: int, experts: int, top_k: int) -> dict[str, Tensor]:
    return {
        "x": torch.randn(tokens, features),
        "index": torch.rand(tokens, experts).topk(top_k).indices,
        "weight": torch.rand(tokens, top_k),
        "gate_up": torch.randn(experts, 2 * hidden, features) / features**0.5,
        "down": torch.randn(experts, features, hidden) / hidden**0.5,
    }


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swigluoai"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_limit(capability: str, activation: str, interleaved: bool) -> None:
    """Features beyond the limit count as the limit, and their gradients are 0."""
    given: dict[str, Any] = {
        name: t.double() if t.is_floating_point() else t for name, t in drawn(30, 21, 37, 4, 2).items()
    }
    given |= {"activation": activation, "limit": 0.4, "interleaved": interleaved}
    exact = results(moe_experts_reference, given)
    for name, t in results(shoestring.moe_experts, given).items():
        torch.testing.assert_close(t, exact[name])
    # In fp32, no feature of these is so near to the limit that rounding moves it beyond.
    narrow = {
        name: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for name, v in given.items()
    }
    for name, t in results(shoestring.moe_experts, narrow).items():
        torch.testing.assert_close(t.double(), exact[name], rtol=1e-3, atol=1e-5)


def test_leading_dimensions() -> None:
    given = drawn(24, 16, 12, 4, 2)
    flat = results(shoestring.moe_experts, given)
    shaped = given | {name: given[name].unflatten(0, (2, 3, 4)) for name in ("x", "index", "weight")}
    for name, t in results(shoestring.moe_experts, shaped).items():
        assert torch.equal(t.reshape(flat[name].shape), flat[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["even", "one has all"])
def test_bits_do_not_depend_on_the_number_of_threads(backend: str, kind: str, dtype: torch.dtype) -> None:
    size = (20, 33, 24) if backend == "simt" else (300, 600, 130)
    given = {name: t.to(dtype) if t.is_floating_point() else t for name, t in drawn(*size, 6, 2).items()}
    if kind == "one has all":
        given["index"][:] = torch.tensor([4, -1])
    assert_same_bits(
        lambda: list(results(shoestring.moe_experts, given).values()),
        (1, 2, 3, 7, 16) if backend == "cpu" else (1, 2),
    )


def test_one_token_has_the_bits_of_a_batch(capability: str) -> None:
    given = drawn(40, 70, 50, 5, 3)
    whole = results(shoestring.moe_experts, given)["result"]
    for token in (0, 17, 39):
        alone = given | {name: given[name][token : token + 1] for name in ("x", "index", "weight")}
        assert torch.equal(results(shoestring.moe_experts, alone)["result"], whole[token : token + 1])


def test_no_expert_no_token_and_no_value() -> None:
    """Tokens without an expert become 0 and give no gradient; so do experts without tokens."""
    given = drawn(6, 10, 8, 4, 2)
    given["index"] = torch.tensor([[0, 3], [-1, -1], [3, -1], [-1, 0], [0, 3], [-1, -1]])
    given["weight"][1] = torch.nan  # of no expert
    found = results(shoestring.moe_experts, given)
    assert all(bool(t.isfinite().all()) for t in found.values())
    for name in ("result", "x"):
        assert found[name].ne(0).any(-1).tolist() == [True, False, True, True, True, False]
    assert found["weight"].ne(0).tolist() == given["index"].ge(0).tolist()
    for name in ("gate_up", "down"):
        assert found[name].flatten(1).ne(0).any(-1).tolist() == [True, False, False, True]
    empty = results(shoestring.moe_experts, given | {n: given[n][:0] for n in ("x", "index", "weight")})
    assert empty["result"].shape == (0, 10) and not empty["gate_up"].any() and not empty["down"].any()


def test_not_finite_stays_with_its_token(capability: str) -> None:
    given = drawn(30, 16, 12, 4, 2)
    given["x"][7, 3] = torch.inf
    found = results(shoestring.moe_experts, given)
    assert found["result"].isfinite().all(-1).tolist() == [i != 7 for i in range(30)]
    assert found["weight"].isfinite().all(-1).tolist() == [i != 7 for i in range(30)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_no_tensor_has_the_features_of_each_slot(backend: str, dtype: torch.dtype, backward: bool) -> None:
    """Neither forward nor backward allocates as much as (tokens * top_k, features)."""
    if backend != "cpu":
        pytest.skip("the profiler counts the memory of CPU tensors")
    tokens, features, hidden, experts, top_k = 2048, 1024, 32, 16, 8
    given = {
        n: t.to(dtype) if t.is_floating_point() else t
        for n, t in drawn(tokens, features, hidden, experts, top_k).items()
    }

    def run() -> None:
        if backward:
            results(shoestring.moe_experts, given)
        else:
            shoestring.moe_experts(**given)

    run()
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        run()
    # An event of another operator counts what its allocations leave.
    largest = max(e.cpu_memory_usage for e in profile.events() if e.name.startswith("aten::"))
    sums = tokens * features * 4  # the results of all tokens in fp32
    assert largest <= sums + 2**20 < tokens * top_k * features * dtype.itemsize / 2


def test_what_is_kept() -> None:
    """Backward keeps x, the input of the gates and integers: of x and the features, what SonicMoE keeps."""
    tokens, features, hidden, top_k = 64, 48, 20, 3
    given: dict[str, Any] = drawn(tokens, features, hidden, 6, top_k)
    leaves = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in given.items()}
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        shoestring.moe_experts(**leaves)
    own = {t.data_ptr() for t in leaves.values()}
    kept = [t for t in saved if t.is_floating_point() and t.data_ptr() not in own]
    assert [tuple(t.shape) for t in kept] == [(tokens * top_k, 2 * hidden)]
    assert sum(t.numel() for t in saved if not t.is_floating_point()) == tokens * top_k + 7


# ---- the experts of transformers


def experts_of(name: str, **sizes: int) -> nn.Module:
    """Return the experts of a model of transformers, with random weights."""
    import importlib

    config, module = {
        "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeExperts"),
        "mixtral": ("MixtralConfig", "MixtralExperts"),
        "olmoe": ("OlmoeConfig", "OlmoeExperts"),
        "gpt_oss": ("GptOssConfig", "GptOssExperts"),
        "deepseek_v3": ("DeepseekV3Config", "DeepseekV3Experts"),
        "glm4_moe": ("Glm4MoeConfig", "Glm4MoeExperts"),
    }[name]
    package = importlib.import_module(f"transformers.models.{name}")
    code = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    given = getattr(package, config)(**sizes)
    given._experts_implementation = "eager"
    experts: nn.Module = getattr(code, module)(given)
    for p in experts.parameters():
        nn.init.normal_(p, std=0.2)
    return experts


MODELS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "qwen3_moe": ({"num_experts": 6, "moe_intermediate_size": 20}, {}),
    "mixtral": ({"num_local_experts": 6, "intermediate_size": 20}, {}),
    "olmoe": ({"num_experts": 6, "intermediate_size": 20}, {}),
    "gpt_oss": (
        {"num_local_experts": 6, "intermediate_size": 20},
        {"activation": "swigluoai", "limit": 7.0, "interleaved": True, "transposed": True},
    ),
    "deepseek_v3": ({"n_routed_experts": 6, "moe_intermediate_size": 20}, {}),
    "glm4_moe": ({"n_routed_experts": 6, "moe_intermediate_size": 20}, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_experts_of_models(name: str) -> None:
    """The result and all gradients are those of the experts of transformers."""
    pytest.importorskip("transformers")
    sizes, options = MODELS[name]
    experts = experts_of(name, hidden_size=32, **sizes)
    given = drawn(40, 32, 20, 6, 3)
    biases = {
        "gate_up_bias": getattr(experts, "gate_up_proj_bias", None),
        "down_bias": getattr(experts, "down_proj_bias", None),
    }
    given = {n: given[n] for n in ("x", "index", "weight")}
    given |= {"gate_up": experts.gate_up_proj, "down": experts.down_proj}
    given |= {n: b for n, b in biases.items() if b is not None}

    def theirs(x: Tensor, index: Tensor, weight: Tensor, **stacks: Tensor) -> Tensor:
        names = {"gate_up": "gate_up_proj", "down": "down_proj"}
        state = {names.get(n) or n.replace("_bias", "_proj_bias"): t for n, t in stacks.items()}
        found: Tensor = torch.func.functional_call(experts, state, (x, index, weight))
        return found

    expected = results(theirs, given)
    found = results(lambda **more: shoestring.moe_experts(**more, **options), given)
    assert found.keys() == expected.keys()
    for part, t in found.items():
        assert relative_error(t, expected[part]) < 2e-6, part


# ---- errors

SHAPES: dict[str, Any] = {
    "x": (3, 4), "index": (3, 2), "weight": (3, 2), "gate_up": (5, 12, 4), "down": (5, 4, 6),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"index": (3,)},
            r"index: expected int64 of shape \(..., top_k\) with the tokens of x, \[3\], received \[3\]",
        ),
        (
            {"index": (4, 2)},
            r"index: expected int64 of shape \(..., top_k\) with the tokens of x, \[3\], received \[4, 2\]",
        ),
        (
            {"weight": (3, 1)},
            r"weight: expected the shape of index, \[3, 2\], in fp32, fp64, bf16 or fp16, received \[3, 1\]",
        ),
        (
            {"gate_up": (5, 11, 4)},
            r"gate_up: expected shape \(experts, 2 hidden, features\), received \[5, 11, 4\]",
        ),
        ({"gate_up": (5, 12, 3)}, r"gate_up: expected shape \[5, 12, 4\], received \[5, 12, 3\]"),
        ({"down": (4, 4, 6)}, r"down: expected shape \[5, 4, 6\], received \[4, 4, 6\]"),
        ({"gate_up_bias": (5, 6)}, r"gate_up_bias: expected shape \[5, 12\], received \[5, 6\]"),
        ({"down_bias": (5, 6)}, r"down_bias: expected shape \[5, 4\], received \[5, 6\]"),
        (
            {"activation": "relu"},
            "activation: expected 'silu', 'gelu', 'gelu_tanh' or 'swigluoai', received 'relu'",
        ),
        (
            {"gate_up": (2049, 12, 4), "down": (2049, 4, 6)},
            "gate_up: expected 1 to 2048 experts, received 2049",
        ),
        ({"limit": -1.0}, "limit: expected none or a number above 0, received -1"),
        ({"dtype": torch.int32}, "dtype: expected fp32, fp64, bf16 or fp16, received Int"),
        ({"transposed": True}, r"gate_up: expected shape \[5, 4, 4\], received \[5, 12, 4\]"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    given = SHAPES | change
    tensors = {
        n: torch.zeros(v, dtype=torch.int64 if n == "index" else torch.float32) if isinstance(v, tuple) else v
        for n, v in given.items()
    }
    with pytest.raises(RuntimeError, match=f"^moe_experts: {message}"):
        shoestring.moe_experts(**tensors)


def test_several_dtypes_need_dtype() -> None:
    given: dict[str, Any] = drawn(3, 4, 6, 5, 2)
    given["down"] = given["down"].bfloat16()
    with pytest.raises(
        RuntimeError, match="moe_experts: down: expected Float, received BFloat16; pass dtype"
    ):
        shoestring.moe_experts(**given)
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for dtype, x_type in itertools.product(kinds, kinds):
        given["x"] = given["x"].to(x_type)
        found = results(lambda dtype=dtype, **more: shoestring.moe_experts(**more, dtype=dtype), given)  # type: ignore[misc]
        assert found["result"].dtype == dtype and found["x"].dtype == x_type
        assert found["down"].dtype == torch.bfloat16 and found["gate_up"].dtype == torch.float32


def test_an_index_outside_is_refused(backend: str) -> None:
    if backend != "cpu":
        pytest.skip("an error would wait for the GPU")
    given = drawn(3, 4, 6, 5, 2)
    for wrong in (5, -2):
        given["index"][1, 1] = wrong
        with pytest.raises(
            RuntimeError,
            match=f"^moe_experts: index: expected values from 0 to 4, or -1 for no expert, received {wrong}",
        ):
            shoestring.moe_experts(**given)


def test_the_second_derivative_is_refused() -> None:
    given = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in drawn(8, 6, 5, 3, 2).items()}
    (grad,) = torch.autograd.grad(shoestring.moe_experts(**given).sum(), given["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="moe_experts: the backward pass is not differentiable"):
        grad.sum().backward()
