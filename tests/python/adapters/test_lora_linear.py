import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import shoestring
from references.adapters import lora_linear_reference, lora_weight_norm_reference
from relative_error import relative_error
from rounding import rounding_errors
from shoestring.ops import LoraWeight

pytestmark = pytest.mark.device

OPERATOR = torch.ops.shoestring.lora_linear.default
# Shapes (tokens, in_features, out_features, rank): one token; odd sizes; rows that end inside quantisation
# blocks; a weight that the operator converts in more than one panel of 1 MiB.
SHAPES = [(1, 64, 32, 4), (3, 5, 7, 2), (33, 100, 70, 16), (40, 2048, 300, 8)]


# For each test case, the optional arguments of lora_linear besides x, the weight and the adapter. A case with
# `seed` has dropout.
CASES = {
    "plain": ("bias",),
    "no adapter": ("bias", "gain"),
    "dropout": ("bias", "seed"),
    "dora": ("bias", "gain"),
    "swiglu": ("gate", "seed"),
    "rows": ("low_scale",),
    "all": ("bias", "gain", "low_scale", "gate", "seed"),
}


def make(
    shape: tuple[int, int, int, int], dtype: torch.dtype, adapter: torch.dtype, case: str
) -> dict[str, Tensor]:
    tokens, columns, rows, rank = shape
    tensors = {
        "x": torch.randn(tokens, columns).to(dtype),
        "gate": torch.randn(tokens, columns).to(dtype),
        "bias": torch.randn(rows).to(dtype),
        "lora_A": torch.randn(rank, columns).to(adapter) / columns**0.5,
        "lora_B": torch.randn(rows, rank).to(adapter),
        "gain": torch.rand(rows).to(adapter) + 0.5,
        "low_scale": torch.randint(2, (tokens, rank)).to(adapter),
        "seed": torch.randint(1 << 62, (1,)),
    }
    adapter_names = () if case == "no adapter" else ("lora_A", "lora_B")
    return {name: t for name, t in tensors.items() if name in ("x", *adapter_names, *CASES[case])}


def split(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return the arguments of lora_linear that require gradients, and the other arguments."""
    rest: dict[str, object] = {k: v for k, v in tensors.items() if k in ("low_scale", "seed")}
    if "seed" in rest:
        rest["dropout"] = 0.3
    return {k: v for k, v in tensors.items() if k not in rest}, rest


def base_weight(base: str, weight: Tensor) -> Tensor:
    if base == "int8":
        return shoestring.quantize_int8(weight)
    quant_type = "int4" if base == "int4" else "nf4"
    return (
        weight
        if base == "dense"
        else shoestring.quantize_4bit(weight, quant_type, double_quant=base == "nested", block_size=32)
    )


# The cases "plain" and "all" run with each shape and base weight, the other cases with some.
GRID = [
    (shape, base, case)
    for shape in SHAPES
    for base in ("dense", "nf4", "nested", "int4", "int8")
    for case in CASES
    if case in ("plain", "all") or (base not in ("nested", "int4") and shape == SHAPES[2])
]


@pytest.mark.sample(simt=18)
@pytest.mark.parametrize(("shape", "base", "case"), GRID, ids=str)
def test_no_worse_than_eager(capability: str, shape: tuple[int, int, int, int], base: str, case: str) -> None:
    """The output and all gradients are about as close to fp64 results as those of eager PyTorch."""
    if capability == "simt" and shape[1] > 1000:
        # The emulator of GPU kernels is slow, so make the largest weight smaller.
        shape = (*shape[:2], 24, shape[3])
    # Pairs of the dtypes of weight and adapter; a 16-bit weight with an fp32 adapter is the usual case.
    for dtype, adapter in ((torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.float16,) * 2):
        leaves, rest = split(make(shape, dtype, adapter, case))
        weight = base_weight(base, (torch.randn(shape[2], shape[1]) / shape[1] ** 0.5).to(dtype))
        dense = weight if base == "dense" else weight.dequantize(torch.float32)
        upstream = torch.randn(shape[0], shape[2]).to(dtype)
        results = []

        def reference(compute: torch.dtype) -> tuple[Tensor, ...]:
            these = {k: t.detach().to(compute).requires_grad_() for k, t in leaves.items()}
            others = {k: v.to(compute) if k == "low_scale" else v for k, v in rest.items()}
            y = lora_linear_reference(weight=dense.to(compute), scaling=0.7, **these, **others)
            return (y, *torch.autograd.grad(y, tuple(these.values()), upstream.to(y.dtype)))

        # On CUDA the matrix products are computed in `dtype`. The avx512 kernels multiply bf16 in bf16 if the
        # CPU has units for it; all other products on the CPU are in fp32.
        narrow = capability in ("cuda", "simt") or (
            dtype == torch.bfloat16 and capability in ("avx512", "amx")
        )
        eager_dtype = dtype if narrow else torch.float32
        these = {k: t.detach().requires_grad_() for k, t in leaves.items()}
        y = shoestring.lora_linear(weight=weight, scaling=0.7, **these, **rest)
        assert y.dtype == dtype
        results.append((y, *torch.autograd.grad(y, tuple(these.values()), upstream)))
        results += [reference(torch.float64), reference(eager_dtype)]
        for i, (name, ours, exact, eager) in enumerate(zip(("y", *leaves), *results, strict=True)):
            assert ours.shape == exact.shape
            eps = torch.finfo(dtype).eps
            few = shape[0] <= 10
            # A sum of n products in fp32 has an error of about sqrt(n) roundings. Over few elements eager's error
            # may happen to be small.
            least = torch.finfo(torch.float32).eps / 2 * max(shape[1:3]) ** 0.5 if few else 2e-7
            bound = 1.5 * relative_error(eager.to(ours.dtype), exact) + max(least, 2e-7)
            if "gate" in leaves:
                # The operator rounds silu(gate) * x to dtype once. With few tokens there are too few elements for
                # the rounding errors to average out.
                bound += eps * (1.5 if few else 0.5)
            if "gate" in leaves and few and name == "lora_B":
                # The products of lora_A with the rounded silu(gate) * x may cancel.
                t = {
                    key: value.double()
                    for key, value in {**leaves, **rest}.items()
                    if isinstance(value, Tensor)
                }
                low = (silu(t["gate"]) * t["x"]).abs() @ t["lora_A"].abs().T / 0.7  # 0.7: with dropout
                low = low * t.get("low_scale", torch.ones_like(low))
                up = (upstream.double() * t.get("gain", torch.ones(shape[2]))).abs()
                rounding = 0.7 * eps / 2 * (up.T @ low)  # 0.7: the scaling
                bound += relative_error(exact + rounding, exact)
            if name == "gain":
                # This gradient is the sum of upstream * (y - bias) / gain over the tokens, from the rounded y.
                rounding = eps / 2 * (upstream * results[1][0]).abs().sum(0) / leaves["gain"].double().abs()
                bound += relative_error(exact + rounding, exact)
            error = relative_error(ours, exact)
            if error > bound and few:  # eager's few roundings may cancel
                exacts = results[1]
                bound = rounding_errors(lambda: reference(torch.float64), exacts, eager_dtype)[i]
            assert error <= bound, (name, dtype)


@pytest.mark.parametrize("base", ["dense", "nf4", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_gradcheck(base: str, case: str) -> None:
    tensors = make((4, 5, 6, 2), torch.float64, torch.float64, case)
    leaves, rest = split(tensors)
    weight = torch.randn(6, 5, dtype=torch.float64)
    weight = weight if base == "dense" else base_weight(base, weight.float())
    names = tuple(leaves)
    assert torch.autograd.gradcheck(
        lambda *values: shoestring.lora_linear(
            weight=weight, scaling=1.3, **dict(zip(names, values, strict=True)), **rest
        ),
        tuple(v.requires_grad_() for v in leaves.values()),
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


def test_mask_is_the_seeds() -> None:
    """Dropout with a seed equals seeded_dropout of lora_A's input, in forward and backward.

    Without a seed argument, PyTorch's random generator draws a seed.
    """
    x, weight = torch.randn(6, 64), torch.randn(10, 64)
    A, B = torch.randn(4, 64, requires_grad=True), torch.randn(10, 4, requires_grad=True)
    seed = torch.tensor([123])
    dropped = shoestring.seeded_dropout(x, 0.4, seed=seed)
    expected = x @ weight.t() + dropped @ A.t() @ B.t()
    y = shoestring.lora_linear(x, weight, A, B, dropout=0.4, seed=seed)
    torch.testing.assert_close(y, expected)
    for a, b in zip(
        torch.autograd.grad(y.sum(), (A, B)), torch.autograd.grad(expected.sum(), (A, B)), strict=True
    ):
        torch.testing.assert_close(a, b)
    torch.manual_seed(3)
    first = shoestring.lora_linear(x, weight, A, B, dropout=0.4)
    assert not torch.equal(first, shoestring.lora_linear(x, weight, A, B, dropout=0.4))
    torch.manual_seed(3)
    assert torch.equal(first, shoestring.lora_linear(x, weight, A, B, dropout=0.4))


def test_opcheck() -> None:
    tensors = make((4, 64, 6, 2), torch.float32, torch.float32, "all")
    t = {k: v.requires_grad_(v.is_floating_point() and k != "low_scale") for k, v in tensors.items()}
    q = shoestring.quantize_4bit(torch.randn(6, 64))
    rest = (t["bias"], t["lora_A"], t["lora_B"])
    torch.library.opcheck(OPERATOR, (t["x"], torch.randn(6, 64), None, None, *rest), {"scaling": 2.0})
    more = {k: t[k] for k in ("gain", "low_scale", "gate", "seed")} | {"dropout": 0.5}
    torch.library.opcheck(OPERATOR, (t["x"], q.packed, q.absmax, None, *rest), more)
    codes, nested = torch.ops.shoestring.quantize_absmax(q.absmax.flatten())
    int8, options = shoestring.quantize_int8(torch.randn(6, 64)), {"quant_type": "int8", "block_size": 64}
    torch.library.opcheck(OPERATOR, (t["x"], int8.packed, int8.absmax, None, *rest), options)
    detached = tuple(v.detach() for v in rest)
    torch.library.opcheck(OPERATOR, (t["x"].detach(), q.packed, codes, nested, *detached), {"scaling": 2.0})
    layers = [torch.randn(6, 64), None, None, *rest, t["gain"], None, q.packed, q.absmax, *[None] * 6]
    group = (t["x"], layers, None, None, 0.0, [1.0, 1.0], ["nf4", "nf4"], [64, 64])
    torch.library.opcheck(torch.ops.shoestring.lora_linear_group.default, group)


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
    """lora_linear saves x once, computes only the required gradients, and accepts strided and empty x."""
    t = make((6, 64, 10, 4), torch.float32, torch.float32, "plain")
    weight, A, B = torch.randn(10, 64), t["lora_A"].requires_grad_(), t["lora_B"].requires_grad_()
    x = torch.randn(64, 6).t()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        y = shoestring.lora_linear(x, weight, A, B)
    assert sorted(s.numel() for s in saved) == sorted(
        [x.numel(), 6 * 4, weight.numel(), A.numel(), B.numel()]
    )
    expected = lora_linear_reference(x, weight, A, B)
    torch.testing.assert_close(y, expected)
    for a, b in zip(
        torch.autograd.grad(y.sum(), (A, B)), torch.autograd.grad(expected.sum(), (A, B)), strict=True
    ):
        torch.testing.assert_close(a, b)
    empty = shoestring.lora_linear(torch.randn(0, 64), weight, A, B)
    assert empty.shape == (0, 10)
    assert all(not g.any() for g in torch.autograd.grad(empty.sum(), (A, B)))


def test_autocast_repeatable_and_no_double_backward() -> None:
    t = make((6, 64, 10, 4), torch.float32, torch.float32, "plain")
    weight, A, B = torch.randn(10, 64), t["lora_A"].requires_grad_(), t["lora_B"].requires_grad_()
    with torch.autocast(t["x"].device.type, torch.bfloat16):
        y = shoestring.lora_linear(t["x"], weight, A, B)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, shoestring.lora_linear(t["x"].bfloat16(), weight.bfloat16(), A, B))
    first, second = (shoestring.lora_linear(t["x"], weight, A, B) for _ in range(2))
    assert torch.equal(first, second)
    gradient = torch.autograd.grad(first.sum(), A, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="lora_linear: the backward pass is not differentiable"):
        gradient.sum().backward()


def test_errors() -> None:
    t = make((3, 64, 10, 4), torch.float32, torch.float32, "plain")
    x, A, B, weight = t["x"], t["lora_A"], t["lora_B"], torch.randn(10, 64)
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
