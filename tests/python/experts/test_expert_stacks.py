"""Test moe_experts with frozen quantised stacks and with LoRA."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from operator_cases import slack_of_products
from references.experts import moe_experts_reference
from rounding import assert_no_worse
from shoestring import ExpertLora, QuantizedTensor
from thread_counts import assert_same_bits

pytestmark = pytest.mark.device

QUANTISERS: dict[str, Callable[..., QuantizedTensor]] = {
    "nf4": lambda t: shoestring.quantize_4bit(t),
    "nested": lambda t: shoestring.quantize_4bit(t, double_quant=True),
    "fp4": lambda t: shoestring.quantize_4bit(t, quant_type="fp4", block_size=32),
    "int4": lambda t: shoestring.quantize_4bit(t, quant_type="int4"),
    "int8": lambda t: shoestring.quantize_int8(t),
}
LORA = ("gate_up_a", "gate_up_b", "down_a", "down_b")
formats = pytest.mark.parametrize("format_", QUANTISERS)


def drawn(
    tokens: int,
    features: int,
    hidden: int,
    experts: int,
    top_k: int,
    format_: str = "nf4",
    *,
    lora: bool = True,
    transposed: bool = False,
) -> dict[str, Any]:
    """Draw arguments with quantised stacks. Expert 1 has no token, and the first token has no second expert."""
    score = torch.rand(tokens, experts)
    score[:, 1] = -1
    index = score.topk(top_k).indices
    index[:1, 1:] = -1
    stacks = {
        "gate_up": torch.randn(experts, 2 * hidden, features) / features**0.5,
        "down": torch.randn(experts, features, hidden) / hidden**0.5,
    }
    if transposed:
        stacks = {name: t.transpose(1, 2).contiguous() for name, t in stacks.items()}
    given: dict[str, Any] = {
        "x": torch.randn(tokens, features),
        "index": index,
        "weight": torch.rand(tokens, top_k),
        **{name: QUANTISERS[format_](t) for name, t in stacks.items()},
        "gate_up_bias": torch.randn(experts, 2 * hidden) / 2,
        "down_bias": torch.randn(experts, features) / 2,
        "transposed": transposed,
    }
    if lora:
        given |= {
            "gate_up_a": torch.randn(experts, 5, features) / features**0.5,
            "gate_up_b": torch.randn(experts, 2 * hidden, 5),
            "down_a": torch.randn(experts, 3, hidden) / hidden**0.5,
            "down_b": torch.randn(experts, features, 3),
            "scaling": 0.7,
        }
    return given


def ours(**given: Any) -> Tensor:
    lora = {name: given.pop(name) for name in ExpertLora._fields if name in given}
    return shoestring.moe_experts(**given, lora=ExpertLora(**lora) if lora else None)


def reference(dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return the loop over experts on dense stacks, which are rounded to ``dtype`` after they are decoded."""

    def compute(**given: Any) -> Tensor:
        for name in ("gate_up", "down"):
            if isinstance(given[name], QuantizedTensor):
                given[name] = given[name].dequantize(torch.float32).to(dtype)
        return moe_experts_reference(**given)

    return compute


def results(
    function: Callable[..., Tensor], given: dict[str, Any], dtype: torch.dtype, seed: int = 3
) -> dict[str, Tensor]:
    """Return the result and the gradients of all floating-point tensors, converted to ``dtype``, by their names."""
    leaves = {
        name: v.detach().to(dtype).requires_grad_()
        for name, v in given.items()
        if isinstance(v, Tensor) and v.is_floating_point() and not isinstance(v, QuantizedTensor)
    }
    y = function(**given | leaves)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(y)
    grads = torch.autograd.grad(y, list(leaves.values()), upstream)
    return {"result": y.detach()} | dict(zip(leaves, grads, strict=True))


def rounded(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        n: v.to(dtype)
        if isinstance(v, Tensor) and v.is_floating_point() and not isinstance(v, QuantizedTensor)
        else v
        for n, v in given.items()
    }


# tokens, features, hidden, experts, top_k: one row an expert, odd numbers of rows, and several tiles and panels.
SIZES = [(3, 32, 64, 4, 1), (51, 96, 32, 5, 2), (90, 160, 96, 6, 4), (600, 320, 256, 3, 2)]


@pytest.mark.sample(cpu=60, simt=6)
@formats
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_worse_than_dense_stacks(
    backend: str, capability: str, size: tuple[int, int, int, int, int], format_: str, dtype: torch.dtype
) -> None:
    if backend == "simt" and size[0] > 100:
        size = SIZES[0]  # the emulator is slow
    given = rounded(drawn(*size, format_, transposed=size[0] % 2 == 0), dtype)

    def exact() -> list[Tensor]:
        return list(results(reference(torch.float64), given, torch.float64).values())

    found, eager = results(ours, given, dtype), results(reference(dtype), given, dtype)
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {
        n: (t.shape, t.dtype) for n, t in eager.items()
    }
    slack = slack_of_products(math.prod(size[:2]), dtype)
    parts = (list(found.values()), list(eager.values()))
    assert_no_worse(list(found), *parts, exact(), exact, 1.5, slack, dtype)


@pytest.mark.sample(simt=2)
@formats
@pytest.mark.parametrize("transposed", [False, True])
def test_fp64(format_: str, transposed: bool) -> None:
    given = drawn(20, 64, 32, 5, 3, format_, transposed=transposed)
    exact = results(reference(torch.float64), given, torch.float64)
    for name, t in results(ours, given, torch.float64).items():
        torch.testing.assert_close(t, exact[name], rtol=1e-10, atol=1e-10)


def test_one_quantised_stack() -> None:
    """The other stack may be dense and trained."""
    given = drawn(20, 64, 32, 5, 2)
    for name in ("gate_up", "down"):
        mixed = given | {name: given[name].dequantize()}
        exact = results(reference(torch.float64), mixed, torch.float64)
        found = results(ours, mixed, torch.float32)
        assert name in found and found.keys() == exact.keys()
        for part, t in found.items():
            torch.testing.assert_close(t.double(), exact[part], rtol=1e-4, atol=1e-4)


def test_lora_of_one_stack() -> None:
    given = drawn(20, 64, 32, 5, 2)
    whole = given | {"gate_up": given["gate_up"].dequantize(), "down": given["down"].dequantize()}
    for stack in ("gate_up", "down"):
        for base in (given, whole):
            some = {n: v for n, v in base.items() if n not in (f"{stack}_a", f"{stack}_b")}
            exact = results(reference(torch.float64), some, torch.float64)
            for part, t in results(ours, some, torch.float32).items():
                torch.testing.assert_close(t.double(), exact[part], rtol=1e-4, atol=1e-4)


def test_zero_lora_changes_no_bit() -> None:
    given = drawn(40, 64, 32, 5, 2)
    bare = {n: v for n, v in given.items() if n not in ExpertLora._fields}
    for name in ("gate_up_b", "down_b"):
        given[name] = torch.zeros_like(given[name])
    expected, found = (results(ours, g, torch.float32) for g in (bare, given))
    assert all(torch.equal(found[name], t) for name, t in expected.items())
    assert found["gate_up_b"].any() and found["down_b"].any()
    assert not found["gate_up_a"].any() and not found["down_a"].any()


def test_experts_without_tokens() -> None:
    """Their LoRA has the gradient zero; one expert with all tokens is right."""
    given = drawn(300, 64, 32, 4, 2)
    given["index"][:] = torch.tensor([3, -1])
    exact = results(reference(torch.float64), given, torch.float64)
    for name, t in results(ours, given, torch.float32).items():
        torch.testing.assert_close(t.double(), exact[name], rtol=1e-4, atol=1e-4)
        if name in LORA:
            assert t.flatten(1).any(-1).tolist() == [False, False, False, True]
    none = {n: v[:0] if n in ("x", "index", "weight") else v for n, v in given.items()}
    empty = results(ours, none, torch.float32)
    assert empty["result"].shape == (0, 64)
    assert not any(empty[name].any() for name in LORA)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format_", ["nested", "int8"])
@pytest.mark.parametrize("kind", ["even", "one has all"])
def test_bits_do_not_depend_on_the_number_of_threads(
    backend: str, kind: str, format_: str, dtype: torch.dtype
) -> None:
    size = (20, 32, 64) if backend == "simt" else (200, 192, 320)
    given = drawn(*size, 6, 2, format_)
    if kind == "one has all":
        given["index"][:] = torch.tensor([4, -1])
    assert_same_bits(
        lambda: list(results(ours, given, dtype).values()),
        (1, 2, 3, 7, 16) if backend == "cpu" else (1, 2),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format_", ["nf4", "int8"])
def test_no_dense_stack(backend: str, format_: str, dtype: torch.dtype) -> None:
    """Neither forward nor backward allocates a fraction of the stack, nor of the product of b and a."""
    if backend != "cpu":
        pytest.skip("the profiler counts the memory of CPU tensors")
    experts, features, hidden = 48, 1024, 256
    given = drawn(32, features, hidden, experts, 2, format_)
    elements = experts * 2 * hidden * features

    def run() -> None:
        results(ours, given, dtype)

    run()
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        run()
    largest = max(e.cpu_memory_usage for e in profile.events() if e.name.startswith("aten::"))
    assert largest <= elements / 8


def test_compiles_with_autocast() -> None:
    """A compiled layer under autocast has the bits of an eager layer with dtype=bf16."""

    class Experts(nn.Module):
        def __init__(self, given: dict[str, Any]) -> None:
            super().__init__()
            self.stacks = nn.ParameterDict(
                {n: nn.Parameter(given[n], requires_grad=False) for n in ("gate_up", "down")}
            )
            self.lora = nn.ParameterDict({n: given[n] for n in LORA})

        def forward(self, x: Tensor, index: Tensor, weight: Tensor, **more: Any) -> Tensor:
            lora = ExpertLora(*(self.lora[n] for n in LORA), scaling=0.7)
            gate_up, down = self.stacks["gate_up"], self.stacks["down"]
            return shoestring.moe_experts(torch.tanh(x), index, weight, gate_up, down, lora=lora, **more)

    given = drawn(9, 64, 32, 5, 2)
    layer = Experts(given)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (9, 4):
        inputs = [given[n][:tokens] for n in ("x", "index", "weight")]
        expected = layer(*inputs, dtype=torch.bfloat16)
        with torch.autocast(expected.device.type, torch.bfloat16):
            y = compiled(*inputs)
        assert torch.equal(y, expected)
        found, wanted = (torch.autograd.grad(t.sum(), list(layer.lora.values())) for t in (y, expected))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def schema(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the operator."""
    gate_up, down = given["gate_up"], given["down"]
    assert isinstance(gate_up, QuantizedTensor) and isinstance(down, QuantizedTensor)
    codes = {n: t.packed for n, t in (("gate_up", gate_up), ("down", down))}
    scales = {f"{n}_absmax": t.absmax for n, t in (("gate_up", gate_up), ("down", down))}
    return given | codes | scales | {"hidden_features": gate_up.shape[1] // 2}


def test_opcheck() -> None:
    given = schema(drawn(4, 32, 32, 3, 2))
    for name in ("x", "weight", "gate_up_a", "down_b"):
        given[name].requires_grad_()
    positional = tuple(given.pop(name) for name in ("x", "index", "weight", "gate_up", "down"))
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(torch.ops.shoestring.moe_experts.default, positional, given, test_utils=tests)


def test_wrong_codes() -> None:
    """Errors name the stack before anything is computed."""
    given = drawn(6, 32, 32, 3, 2)
    operator = torch.ops.shoestring.moe_experts
    plain = schema(given)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"hidden_features": None}, "hidden_features: expected a number above 0 with a quantised gate_up"),
        ({"hidden_features": 31}, "gate_up: expected 1984 codes for each expert"),
        ({"down": plain["down"][:-1]}, "down: packed: expected 1536 bytes"),
        ({"down_absmax": plain["down_absmax"][:-1]}, "down: absmax: expected 48 scales of Float"),
        ({"quant_type": "nf3"}, "gate_up: quant_type: expected 'nf4', 'fp4', 'int4' or 'int8', received"),
        ({"block_size": 48}, "gate_up: block_size: expected a power of two from 32 to 4096"),
        ({"gate_up_b": None}, "gate_up_b: expected a tensor with gate_up_a, received none"),
        ({"gate_up_a": torch.zeros(3, 5, 31)}, r"gate_up_a: expected shape \[3, 5, 32\] in fp32"),
        ({"gate_up_a": torch.zeros(3, 32)}, r"gate_up_a: expected shape \(experts, rank, 32\) with a rank"),
        ({"down_b": torch.zeros(3, 32, 4)}, r"down_b: expected shape \[3, 32, 3\] in fp32"),
    ]
    for change, message in cases:
        with pytest.raises(RuntimeError, match=f"^moe_experts: {message}"):
            operator(**plain | change)


def test_blocks_that_span_experts_are_refused() -> None:
    given = drawn(6, 16, 10, 4, 2, lora=False) | {"gate_up_bias": None, "down_bias": None}
    with pytest.raises(
        RuntimeError,
        match=r"^moe_experts: down: expected whole blocks of 64 elements for each expert, received "
        r"matrices of 16 x 10; quantise with a block_size that divides their elements",
    ):
        shoestring.moe_experts(**given)


def test_wrong_stacks() -> None:
    given = drawn(6, 32, 64, 3, 2, lora=False) | {"gate_up_bias": None, "down_bias": None}
    other = shoestring.quantize_int8(given["down"].dequantize())
    with pytest.raises(RuntimeError, match="^moe_experts: down: expected the quant_type and block_size of"):
        shoestring.moe_experts(**given | {"down": other})
    turned = shoestring.quantize_4bit(given["down"].dequantize().transpose(1, 2).contiguous())
    with pytest.raises(
        RuntimeError, match=r"^moe_experts: down: expected shape \[3, 32, 64\], received \[3, 64, 32\]"
    ):
        shoestring.moe_experts(**given | {"down": turned})
