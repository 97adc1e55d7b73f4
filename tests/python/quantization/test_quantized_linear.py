import json

import pytest
import torch
from torch import Tensor, nn

import shoestring
from operator_cases import Arguments, Operator, casts, normal, product_dtype
from operator_tests import OperatorTests
from references.quantization import quantized_linear_reference
from relative_error import relative_error
from shoestring.nn import QuantizedLinear
from weight_cases import FP4, INT4, INT8, NESTED, NF4, outputs, reference, with_weight

pytestmark = pytest.mark.device


def arguments(tokens: int, features: int) -> Arguments:
    rows = outputs(features)
    return {"x": normal(1, tokens, features), "bias": normal(rows), "out_features": rows, "block_size": 64}


@pytest.mark.sample(simt=24)
class TestQuantizedLinear(OperatorTests):
    operator = Operator(
        "quantized_linear",
        lambda packed, out_features, **given: reference(weight=packed, **given),
        arguments,
        # No tokens, fewer features than a SIMD register holds, blocks that span rows, and more rows than the 256 that
        # fit into a panel of 4 MiB. The CPU multiplies up to 16 tokens with the codes directly. 77 columns end within
        # a SIMD vector.
        sizes=[(0, 64), (1, 64), (3, 5), (33, 100), (20, 4096)]
        + [(tokens, 192 if tokens % 2 else 77) for tokens in (2, 4, 5, 6, 7, 8, 9, 16, 17)],
        options=[
            {"packed" if name == "weight" else name: value for name, value in options.items()}
            for options in (NF4, NESTED, INT4, INT8, FP4, NF4 | {"bias": None})
        ],
        factor=1.5,
        computed=product_dtype,
        autocast=casts("x"),
        function=lambda packed, out_features, **given: shoestring.quantized_linear(
            **with_weight(weight=packed, **given)
        ),
    )


@pytest.mark.sample(simt=1)
@pytest.mark.parametrize("quant_type", ["nf4", "int8"])
def test_several_panels(backend: str, quant_type: str) -> None:
    """quantized_linear is right for a weight that is dequantised in several panels of rows.

    On CUDA, a panel of 64 MiB has a multiple of 16 rows. With rows of a little more than 2 MiB in fp64 it does
    not have 32, so 17 rows are two panels. Rows have an odd number of elements, so blocks of nf4 span rows.
    """
    columns, rows = ((1 << 18) + 7, 17) if backend != "cpu" else ((1 << 16) + 7, 70)
    if quant_type == "int8":
        packed, absmax = torch.randint(-127, 128, (rows, columns), dtype=torch.int8), torch.rand(rows)
    else:
        packed = torch.randint(256, ((rows * columns + 1) // 2,), dtype=torch.uint8)
        absmax = torch.rand((rows * columns + 4095) // 4096)
    block_size = columns if quant_type == "int8" else 4096
    weight = shoestring.QuantizedTensor(
        packed,
        absmax,
        None,
        shape=(rows, columns),
        dtype=torch.float32,
        quant_type=quant_type,
        block_size=block_size,
    )
    dense = weight.dequantize().double()
    x = torch.randn(2, columns, dtype=torch.float64, requires_grad=True)
    y, expected = shoestring.quantized_linear(x, weight), x @ dense.t()
    torch.testing.assert_close(y, expected)
    upstream = torch.randn_like(y)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, upstream)[0] for out in (y, expected)))


def test_several_panels_in_bf16(backend: str) -> None:
    """With several panels, the error in bf16 is that of one product with the whole weight."""
    if backend != "cuda":
        pytest.skip("panels of 64 MiB: a test for the GPU")
    weight = shoestring.quantize_4bit(torch.randn(5 * 4096, 8192), double_quant=True)  # five panels
    dense = weight.dequantize(torch.bfloat16)
    x, upstream = torch.randn(33, 8192).bfloat16().requires_grad_(), torch.randn(33, 5 * 4096).bfloat16()
    leaf = x.detach().double().requires_grad_()
    results = []
    for a, y in (
        (x, shoestring.quantized_linear(x, weight)),
        (leaf, leaf @ dense.double().t()),
        (x, x @ dense.t()),
    ):
        results.append((y, *torch.autograd.grad(y, a, upstream.to(y.dtype))))
    for ours, exact, eager in zip(*results, strict=True):
        assert relative_error(ours, exact) <= 1.1 * relative_error(eager, exact)


@pytest.mark.parametrize("quant_type", ["nf4", "int4", "int8"])
def test_layer_compiles(quant_type: str) -> None:
    layer = QuantizedLinear(64, 6, quant_type=quant_type)
    compiled = torch.compile(
        lambda x: layer(torch.tanh(x)) * 2, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for tokens in (3, 5):
        x = torch.randn(tokens, 64, requires_grad=True)
        y, expected = compiled(x), layer(torch.tanh(x)) * 2
        assert torch.equal(y, expected)
        (g,), (e,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(expected.sum(), x)
        assert torch.equal(g, e)


def test_a_vector() -> None:
    weight, x = shoestring.quantize_4bit(torch.randn(6, 64)), torch.randn(64)
    torch.testing.assert_close(shoestring.quantized_linear(x, weight), quantized_linear_reference(x, weight))


def test_no_synchronisation_and_a_graph(backend: str) -> None:
    """Forward and backward of quantized_linear never synchronise with the GPU.

    A CUDA graph of forward and backward uses the values that its inputs have at each replay.
    """
    if backend != "cuda":
        pytest.skip("a test for the GPU")
    weight = shoestring.quantize_4bit(torch.randn(96, 256), double_quant=True)
    x, upstream = torch.randn(8, 256, requires_grad=True), torch.randn(8, 96)

    def step() -> tuple[Tensor, Tensor]:
        y = shoestring.quantized_linear(x, weight)
        return y.detach(), torch.autograd.grad(y, x, upstream)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # a first call, in which cuBLAS allocates its workspace
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        x.normal_()
        weight.packed.random_()
    graph.replay()
    for a, b in zip(results, step(), strict=True):
        assert torch.equal(a, b)


def test_saves_nothing_of_the_input() -> None:
    """For backward, quantized_linear saves only the codes and the scales of the weight."""
    weight = shoestring.quantize_4bit(torch.randn(64, 64))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        shoestring.quantized_linear(torch.randn(512, 64, requires_grad=True), weight)
    assert {t.data_ptr() for t in saved} == {weight.packed.data_ptr(), weight.absmax.data_ptr()}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_state_dict_is_bitsandbytes(backend: str, quant_type: str, nested: bool) -> None:
    """QuantizedLinear's state dict has bitsandbytes' keys and values, and it loads those of bitsandbytes."""
    if backend == "cuda":
        pytest.skip("the bytes are those of bitsandbytes' CPU path")
    bnb = pytest.importorskip("bitsandbytes")
    linear = nn.Linear(96, 40).to(torch.bfloat16)
    ours = QuantizedLinear.from_linear(linear, quant_type, double_quant=nested)
    theirs = bnb.nn.Linear4bit(96, 40, quant_type=quant_type, compress_statistics=nested)
    theirs.load_state_dict(linear.to(torch.bfloat16).state_dict())
    theirs = theirs.to(torch.bfloat16).to("cpu")
    theirs.weight = theirs.weight._quantize("cpu") if theirs.weight.quant_state is None else theirs.weight

    mine, reference = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == reference.keys()
    for key, value in mine.items():
        if "quant_state" in key:
            a, b = (json.loads(bytes(t.tolist())) for t in (value, reference[key]))
            assert a == b
        else:
            assert torch.equal(value, reference[key]), key

    loaded = QuantizedLinear(96, 40)
    loaded.load_state_dict(reference)
    assert torch.equal(loaded.weight.dequantize(), ours.weight.dequantize())
    assert loaded.weight.dtype == torch.bfloat16 and torch.equal(loaded.bias, ours.bias.float())
    dense = QuantizedLinear(96, 40, quant_type=quant_type, double_quant=nested)
    dense.load_state_dict(linear.state_dict())
    assert torch.equal(dense.weight.packed, ours.weight.packed)


def test_module() -> None:
    linear = nn.Linear(64, 10).eval()
    layer = QuantizedLinear.from_linear(linear)
    assert isinstance(layer, nn.Linear) and not layer.training and layer.bias is linear.bias
    assert not layer.weight.requires_grad and "nf4" in repr(layer)
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), quantized_linear_reference(x, layer.weight, layer.bias))
    int8 = QuantizedLinear.from_linear(linear, "int8")
    assert "int8, block_size=64" in repr(int8) and int8.weight.packed.shape == (10, 64)
    torch.testing.assert_close(int8(x), quantized_linear_reference(x, int8.weight, int8.bias))
    cast = QuantizedLinear.from_linear(linear, compute_dtype=torch.bfloat16)
    assert cast(x).dtype == torch.float32
    assert torch.equal(cast(x), layer(x.bfloat16()).float())
    torch.manual_seed(3)
    fresh = QuantizedLinear(64, 10)
    torch.manual_seed(3)
    assert torch.equal(fresh.weight.packed, QuantizedLinear.from_linear(nn.Linear(64, 10)).weight.packed)


def test_errors() -> None:
    weight = shoestring.quantize_4bit(torch.randn(6, 64))
    with pytest.raises(RuntimeError, match="quantized_linear: packed: expected 189 bytes"):
        shoestring.quantized_linear(torch.randn(3, 63), weight)
    with pytest.raises(
        RuntimeError, match="quantized_linear: x: expected fp32, fp64, bf16 or fp16, received Long"
    ):
        shoestring.quantized_linear(torch.ones(3, 64, dtype=torch.long), weight)
    with pytest.raises(RuntimeError, match=r"quantized_linear: bias: expected shape \(6\)"):
        shoestring.quantized_linear(torch.randn(3, 64), weight, torch.randn(5))
    op, int8 = torch.ops.shoestring.quantized_linear, shoestring.quantize_int8(torch.randn(6, 64))
    options = {"out_features": 6, "quant_type": "int8"}
    x, scales = torch.randn(3, 64), torch.zeros(300)
    with pytest.raises(RuntimeError, match=r"packed: expected 384 codes \(int8\), received 384 of Byte"):
        op(x, int8.packed.byte(), int8.absmax, **options)
    with pytest.raises(
        RuntimeError, match="absmax: expected a scale .Float. for every block_size = 32 of 384 codes"
    ):
        op(x, int8.packed, int8.absmax, block_size=32, **options)
    with pytest.raises(
        RuntimeError, match="block_size: expected the length of an int8 weight's rows, received 0"
    ):
        op(x, int8.packed, int8.absmax, block_size=0, **options)
    with pytest.raises(RuntimeError, match="nested: expected none with quant_type 'int8'"):
        op(x, int8.packed, int8.absmax, scales, **options)
    with pytest.raises(
        RuntimeError, match="quant_type: expected 'nf4', 'fp4', 'int4' or 'int8', received 'int5'"
    ):
        op(x, int8.packed, int8.absmax, out_features=6, quant_type="int5")
    for change in ({"block_size": 64}, {"double_quant": True}):
        with pytest.raises(
            ValueError, match="QuantizedLinear: block_size and double_quant: expected None and False with"
        ):
            QuantizedLinear(64, 6, quant_type="int8", **change)
    state = QuantizedLinear(64, 6, quant_type="int8").state_dict()
    with pytest.raises(
        ValueError, match=r"and SCB: expected int8 \(5, 64\) and \(5,\), received torch.int8 \(6, 64\)"
    ):
        QuantizedLinear(64, 5).load_state_dict(state)
    with pytest.raises(ValueError, match="weight_format: expected 0 \\(rows in plain order\\), received 2"):
        QuantizedLinear(64, 6).load_state_dict(state | {"weight_format": torch.tensor(2)})
    layer = QuantizedLinear(64, 6)
    state = layer.state_dict()
    with pytest.raises(
        ValueError, match=r"QuantizedLinear: weight: expected shape \(5, 64\), received \(6, 64\)"
    ):
        QuantizedLinear(64, 5, bias=False).load_state_dict(state)
    state["weight.quant_map"] = torch.zeros(16)
    with pytest.raises(ValueError, match="quant_map: expected the nf4 values"):
        layer.load_state_dict(state)


@pytest.mark.parametrize("adapted", [False, True])
def test_codes_may_be_assigned_and_dense_weights_not(adapted: bool) -> None:
    linear = nn.Linear(64, 5)
    model = nn.Sequential(QuantizedLinear(64, 5))
    if adapted:
        shoestring.lora.apply(model, rank=2)
    codes = {"0." + name: value for name, value in QuantizedLinear.from_linear(linear).state_dict().items()}
    dense = {"0." + name: value for name, value in linear.state_dict().items()}
    with pytest.raises(ValueError, match=r"0\.weight: expected codes with load_state_dict\(assign=True\)"):
        model.load_state_dict(dense, assign=True, strict=False)
    model.load_state_dict(codes, assign=True, strict=False)
    expected = model[0].weight.dequantize()
    x = torch.randn(3, 64)
    torch.testing.assert_close(model(x), nn.functional.linear(x, expected, linear.bias), rtol=1e-4, atol=1e-4)
    model.load_state_dict(dense, strict=False)
    assert torch.equal(model[0].weight.dequantize(), expected)
