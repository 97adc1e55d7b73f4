import pytest
import torch
from torch import Tensor

import shoestring
from operator_cases import Arguments, Draw, Operator, casts, integers, normal, product_dtype, uniform
from operator_tests import OperatorTests
from references.adapters import lora_weight_norm_reference
from relative_error import relative_error
from shoestring.ops import LoraWeight
from weight_cases import INT4, INT8, NESTED, NF4, codes, outputs, reference, with_weight

pytestmark = pytest.mark.device

RANKS = {5: 2, 64: 4, 100: 16}  # by numbers of features


def rank_of(features: int) -> int:
    """Return 8 in most cases: the bits of narrower products, which are PyTorch's, depend on strides and threads."""
    return RANKS.get(features, 8)


def of_adapter(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of adapters for the dtype of x; a bf16 weight with an fp32 adapter is the usual case."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def arguments(tokens: int, features: int) -> Arguments:
    rows, rank = outputs(features), rank_of(features)
    return {
        "x": normal(tokens, features),
        "weight": normal(rows, features, scale=features**-0.5, gradient=False),
        "absmax": None,
        "nested": None,
        "bias": normal(rows),
        "lora_A": normal(rank, features, scale=features**-0.5, dtype=of_adapter),
        "lora_B": normal(rows, rank, dtype=of_adapter),
        "scaling": 0.7,
    }


def gain(tokens: int, features: int) -> Draw:
    return uniform(outputs(features), low=0.5, high=1.5, dtype=of_adapter)


def gate(tokens: int, features: int) -> Draw:
    return normal(tokens, features)


def low_scale(tokens: int, features: int) -> Draw:
    return codes(tokens, rank_of(features), high=2, dtype=torch.float32)


# The options of a base weight. Without lora_A and lora_B, IA3 remains.
DROPOUT: Arguments = {"seed": integers(1, high=1 << 62), "dropout": 0.3}
ALL = DROPOUT | {"gain": gain, "low_scale": low_scale, "gate": gate}
SOME: list[Arguments] = [
    {},
    {"lora_A": None, "lora_B": None, "gain": gain},
    DROPOUT,
    {"gain": gain},
    DROPOUT | {"gate": gate, "bias": None},
    {"low_scale": low_scale, "bias": None},
]


@pytest.mark.sample(cpu=240, simt=18)
class TestLoraLinear(OperatorTests):
    operator = Operator(
        "lora_linear",
        reference,
        arguments,
        # One token; odd sizes; rows that end inside quantisation blocks; a weight that the operator converts in more
        # than one panel of 1 MiB.
        [(1, 64), (3, 5), (33, 100), (40, 2048)],
        [
            ALL,
            NESTED | ALL,
            INT8,
            *SOME,
            *(NF4 | some for some in (ALL, *SOME)),
            *(INT8 | some for some in (ALL, *SOME[1:])),
            NESTED,
            INT4 | ALL,
            INT4,
        ],
        factor=1.5,
        computed=product_dtype,
        autocast=casts("x", "weight", "gate"),
        function=lambda **given: shoestring.lora_linear(**with_weight(**given)),
        traced=3,
    )


@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_group(dtype: torch.dtype, dropout: bool) -> None:
    """lora_linear_group returns for each layer what lora_linear returns for that layer alone.

    The layers are dense, quantised or without an adapter, and the output of one layer gets no gradient.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = torch.randn(2, 5, 64).to(dtype)
    gate = torch.randn(2, 5, 64).to(dtype)
    weights = [torch.randn(rows, 64).to(dtype) / 8 for rows in (6, 9, 33, 4)]
    if dtype != torch.float64:
        weights[1], weights[2] = shoestring.quantize_4bit(weights[1]), shoestring.quantize_int8(weights[2])
    adapters = [
        (torch.randn(r, 64).to(wide) / 8, torch.randn(n, r).to(wide)) for r, n in ((2, 6), (3, 9), (1, 33))
    ]
    gain, bias = torch.rand(9).to(wide) + 0.5, torch.randn(4).to(wide)
    leaves = [t.requires_grad_() for t in (x, gate, gain, bias, *(m for pair in adapters for m in pair))]
    layers = [
        LoraWeight(weights[0], *adapters[0], scaling=0.5),
        LoraWeight(weights[1], *adapters[1], gain=gain),
        LoraWeight(weights[2], *adapters[2]),
        LoraWeight(weights[3], bias=bias),
    ]
    options = {"gate": gate, "dropout": 0.25, "seed": torch.tensor([7])} if dropout else {"gate": gate}
    together = shoestring.lora_linear_group(x, layers, **options)
    alone = [
        shoestring.lora_linear(
            x, m.weight, m.lora_A, m.lora_B, m.bias, scaling=m.scaling, gain=m.gain, **options
        )
        for m in layers
    ]
    upstream = [torch.randn_like(y) for y in alone]
    used = [0, 1, 3]  # the output of layer 2 is not used
    gradients = torch.autograd.grad(
        [together[i] for i in used], leaves, [upstream[i] for i in used], allow_unused=True
    )
    by_layer = [torch.autograd.grad(alone[i], leaves, upstream[i], allow_unused=True) for i in used]
    for ours, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    # Each layer's gradient and the sum of all are rounded, and the sums of up to 64 products are in another order.
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4 * 2**-9}[dtype]
    for ours, *terms in zip(gradients, *by_layer, strict=True):
        given = [term for term in terms if term is not None]
        if not given:  # a parameter of the layer whose output gets no gradient
            assert ours is None or not ours.any()
            continue
        expected, largest = sum(given), sum(term.abs().amax() for term in given)
        torch.testing.assert_close(ours, expected, rtol=close, atol=float(close * largest))


def test_a_seed_is_drawn() -> None:
    """Without a seed argument, PyTorch's random generator draws a seed."""
    x, weight, A, B = (torch.randn(s) for s in ((6, 64), (10, 64), (4, 64), (10, 4)))
    torch.manual_seed(3)
    first = shoestring.lora_linear(x, weight, A, B, dropout=0.4)
    assert not torch.equal(first, shoestring.lora_linear(x, weight, A, B, dropout=0.4))
    torch.manual_seed(3)
    assert torch.equal(first, shoestring.lora_linear(x, weight, A, B, dropout=0.4))


def test_opcheck_of_a_group_and_without_gradients() -> None:
    x, bias, gain = (torch.randn(s, requires_grad=True) for s in ((4, 64), (6,), (6,)))
    A, B = torch.randn(2, 64, requires_grad=True), torch.randn(6, 2, requires_grad=True)
    q = shoestring.quantize_4bit(torch.randn(6, 64))
    layers = [torch.randn(6, 64), None, None, bias, A, B, gain, None, q.packed, q.absmax, *[None] * 6]
    group = (x, layers, None, None, 0.0, [1.0, 1.0], ["nf4", "nf4"], [64, 64])
    torch.library.opcheck(torch.ops.shoestring.lora_linear_group.default, group)
    codes, nested = torch.ops.shoestring.quantize_absmax(q.absmax.flatten())
    detached = tuple(v.detach() for v in (bias, A, B))
    one = (x.detach(), q.packed, codes, nested, *detached)
    torch.library.opcheck(torch.ops.shoestring.lora_linear.default, one, {"scaling": 2.0})


def base_weight(base: str, weight: Tensor) -> Tensor:
    if base in ("dense", "int8"):
        return weight if base == "dense" else shoestring.quantize_int8(weight)
    return shoestring.quantize_4bit(
        weight, "int4" if base == "int4" else "nf4", double_quant=base == "nested", block_size=32
    )


@pytest.mark.parametrize("base", ["dense", "nf4", "nested", "int4", "int8"])
# The operator converts a weight in panels of 1 MiB; the weight of the last shape needs several.
@pytest.mark.parametrize("shape", [(1, 64, 4), (7, 5, 2), (300, 5000, 16)], ids=str)
def test_weight_norm(capability: str, base: str, shape: tuple[int, int, int]) -> None:
    rows, columns, rank = (40, 600, 16) if capability == "simt" and shape[0] > 100 else shape
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        if dtype == torch.float64 and base != "dense":
            continue
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        A, B = torch.randn(rank, columns).to(wide), torch.randn(rows, rank).to(wide).requires_grad_()
        weight = base_weight(base, torch.randn(rows, columns).to(dtype))
        ours = shoestring.lora_weight_norm(weight, A, B, scaling=0.3)
        dense = weight if base == "dense" else weight.dequantize(torch.float32)
        exact = lora_weight_norm_reference(dense.double(), A.double(), B.double(), scaling=0.3)
        assert ours.dtype == wide and not ours.requires_grad
        assert relative_error(ours, exact) <= (1e-14 if dtype == torch.float64 else 1e-6)
    # with the weight W = -B A, the adapted weight W + B A is zero up to rounding
    opposite = torch.randn(3, 2, 8)
    A, B = opposite[0], opposite[1].t().contiguous()
    assert (shoestring.lora_weight_norm(-B @ A, A, B) < 1e-2).all()


def test_only_what_is_needed() -> None:
    """lora_linear saves x once, and accepts strided and empty x."""
    x, weight = torch.randn(64, 6).t(), torch.randn(10, 64)
    A, B = torch.randn(4, 64, requires_grad=True), torch.randn(10, 4, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        shoestring.lora_linear(x, weight, A, B)
    assert sorted(s.numel() for s in saved) == sorted(
        [x.numel(), 6 * 4, weight.numel(), A.numel(), B.numel()]
    )
    empty = shoestring.lora_linear(torch.randn(0, 64), weight, A, B)
    assert empty.shape == (0, 10)
    assert all(not g.any() for g in torch.autograd.grad(empty.sum(), (A, B)))


def test_errors() -> None:
    x, A, B, weight = (torch.randn(s) for s in ((3, 64), (4, 64), (10, 4), (10, 64)))
    with pytest.raises(RuntimeError, match=r"lora_linear: lora_A: expected shape \(rank, 63\)"):
        shoestring.lora_linear(x[:, 1:], weight, A, B)
    with pytest.raises(RuntimeError, match=r"lora_linear: lora_B: expected shape \(out_features, 4\)"):
        shoestring.lora_linear(x, weight, A, B[:, 1:])
    with pytest.raises(RuntimeError, match=r"lora_linear: weight: expected shape \(10, 64\)"):
        shoestring.lora_linear(x, weight[1:], A, B)
    with pytest.raises(RuntimeError, match="lora_linear: weight: expected x's dtype and device"):
        shoestring.lora_linear(x, weight.bfloat16(), A, B)
    with pytest.raises(RuntimeError, match="lora_linear: weight: expected a frozen weight"):
        shoestring.lora_linear(x, weight.requires_grad_(), A, B)
    with pytest.raises(
        RuntimeError, match="lora_linear: lora_A and lora_B: expected both or neither, received lora_A"
    ):
        shoestring.lora_linear(x, weight.detach(), A)
    with pytest.raises(RuntimeError, match=r"lora_linear: gain: expected shape \(10\)"):
        shoestring.lora_linear(x, weight.detach(), A, B, gain=torch.ones(9))
    with pytest.raises(
        RuntimeError, match=r"lora_linear: low_scale: expected shape \(tokens, rank\) = \(3, 4\)"
    ):
        shoestring.lora_linear(x, weight.detach(), A, B, low_scale=torch.ones(4, 3))
    with pytest.raises(RuntimeError, match="lora_linear: gate: expected the shape, dtype and device"):
        shoestring.lora_linear(x, weight.detach(), A, B, gate=x[:2])
    with pytest.raises(
        RuntimeError, match=r"lora_linear: dropout: expected a probability in \[0, 1\), received 1"
    ):
        shoestring.lora_linear(x, weight.detach(), A, B, dropout=1.0)
    with pytest.raises(
        RuntimeError, match="lora_linear: seed: expected a seed with dropout, and none without it"
    ):
        shoestring.lora_linear(x, weight.detach(), A, B, seed=torch.tensor([1]))
    with pytest.raises(RuntimeError, match="lora_linear: seed: expected one int64"):
        shoestring.lora_linear(x, weight.detach(), A, B, dropout=0.5, seed=torch.tensor([1.0]))
    with pytest.raises(RuntimeError, match="lora_linear: layers: expected 8 tensors"):
        torch.ops.shoestring.lora_linear_group(x, [weight.detach()], None, None, 0.0, [1.0], ["nf4"], [64])
    with pytest.raises(RuntimeError, match=r"lora_weight_norm: lora_B: expected shape \(out_features, 4\)"):
        shoestring.lora_weight_norm(weight.detach(), A, B[:, 1:])
