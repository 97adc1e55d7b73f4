import copy
import io

import pytest
import torch
from torch import Tensor, nn

import shoestring
from references.quantization import dequantize_4bit_reference, int4_scales, quantize_4bit_reference
from relative_error import relative_error
from shoestring import QuantizedTensor
from shoestring.nn import QuantizedLinear

BLOCK_SIZES = (32, 64, 256, 4096)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sizes(block: int) -> tuple[int, ...]:
    """Return element counts: 1, odd, one more than 16 SIMD lanes, around a block, and several blocks.

    The largest count gives more quantisation blocks than one CUDA thread block handles.
    """
    return (1, 7, 17, block - 1, block, 3 * block + 7, min(40 * block + 33, 9001))


def values(n: int, dtype: torch.dtype, block: int) -> Tensor:
    """Return n normal numbers that include special blocks.

    The elements of these blocks are zero, tiny, large, constant, nearly constant, integers, or include an
    outlier.
    """
    x = torch.randn(n)
    changes = [(0.0, 0.0), (1e-5, 0.0), (1e3, 0.0), (0.0, 1.2345), (1e-3, -2.0)]
    for i, (scale, shift) in enumerate(changes[: n // block]):
        x[i * block : (i + 1) * block] = x[i * block : (i + 1) * block] * scale + shift
    if n >= 6 * block:
        x[5 * block] = 50
    if n >= 7 * block:
        x[6 * block : 7 * block] = x[6 * block : 7 * block].round()
    return x.to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have equal dtypes and values.

    NaNs count as equal, and devices may differ.
    """
    return a.dtype == b.dtype and torch.allclose(a.cpu(), b.cpu(), rtol=0, atol=0, equal_nan=True)


def quantize(x: Tensor, block: int = 64) -> QuantizedTensor:
    return shoestring.quantize_4bit(x, "int4", block)


def assert_is_reference(x: Tensor, block: int) -> None:
    q = quantize(x, block)
    packed, absmax = quantize_4bit_reference(x.cpu(), "int4", block)
    assert same(q.packed, packed) and same(q.absmax, absmax), (x.dtype, x.numel())
    for to in DTYPES:
        options = {"shape": q.shape, "dtype": to, "quant_type": "int4", "block_size": block}
        assert same(q.dequantize(to), dequantize_4bit_reference(packed, absmax, **options)), (
            x.dtype,
            x.numel(),
            to,
        )


@pytest.mark.device
@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_bytes_are_the_references(capability: str, block: int, dtype: torch.dtype) -> None:
    for n in sizes(block):
        assert_is_reference(values(n, dtype, block), block)


@pytest.mark.device
def test_what_is_not_finite_and_ends_of_the_range(capability: str) -> None:
    """A block with NaN or infinity dequantises to NaN, and no other block does.

    Blocks with magnitudes up to the largest fp32 number keep their accuracy.
    """
    x = torch.randn(9 * 64 + 21)
    x[3], x[64 + 60], x[2 * 64 + 17] = float("nan"), float("inf"), -float("inf")
    x[3 * 64 : 4 * 64] *= 1e38 / 4
    x[4 * 64 : 5 * 64] = 3.4e38 * torch.linspace(-1, 1, 64)
    x[5 * 64 : 6 * 64] = 3.4e38
    x[6 * 64 : 7 * 64] *= 1e-36
    x[7 * 64 : 8 * 64] *= 1e-41
    for last in (1.0, float("nan"), float("inf")):
        x[-5] = last
        assert_is_reference(x, 64)
        y = quantize(x).dequantize()
        assert y[: 3 * 64].isnan().all() and y[3 * 64 : 9 * 64].isfinite().all()
        assert y[9 * 64 :].isfinite().all() if last == 1 else y[9 * 64 :].isnan().all()
    for block, bound in ((3, 0.15), (4, 0.08), (5, 0.003), (6, 0.15)):
        part = slice(block * 64, (block + 1) * 64)
        assert relative_error(y[part].double(), x[part].double()) < bound, block
    assert (y[7 * 64 : 8 * 64] - x[7 * 64 : 8 * 64]).abs().max() < 1e-37


@pytest.mark.device
def test_constants_are_near_and_zeros_exact(capability: str) -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -3.0, 1.2345, -7e-3, 1e30]).repeat_interleave(64)
    y = quantize(x).dequantize()
    assert torch.equal(y[: 4 * 64], x[: 4 * 64])
    assert ((y - x).abs() <= 1e-4 * x.abs()).all()


@pytest.mark.device
@pytest.mark.parametrize(
    ("outliers", "squared", "absolute"),
    [(0.0, 0.832, 0.961), (0.005, 0.867, 0.952)],
    ids=["normal", "outliers"],
)
def test_error_is_below_nf4s(outliers: float, squared: float, absolute: float, backend: str) -> None:
    """The mean squared error of int4 is 0.81 times that of NF4, and the mean absolute error 0.95 times.

    If some elements are outliers, the factors are 0.83 and 0.94. The limits are means over 60 seeds plus five
    standard deviations.
    """
    if backend == "simt":
        pytest.skip("the bytes are those of the CPU, and fewer elements have other mean errors")
    x = 0.02 * torch.randn(2048 * 64)
    x[torch.rand(x.shape) < outliers] *= 6
    errors = [shoestring.quantize_4bit(x, kind).dequantize() - x for kind in ("int4", "nf4")]
    mine, reference = ((e.square().mean().item(), e.abs().mean().item()) for e in errors)
    assert mine[0] <= squared * reference[0] and mine[1] <= absolute * reference[1]
    assert mine[0] <= 0.009 * x.square().mean().item() * (1 if outliers == 0 else 1.5)


@pytest.mark.device
def test_no_element_is_far_off(capability: str) -> None:
    """Elements within the range of a block's 16 int4 values err by at most half a step.

    Elements outside this range are clipped, with small errors.
    """
    x = torch.randn(500, 64)
    q = quantize(x)
    scale, offset = (t.view(500, 1) for t in int4_scales(q.absmax))
    error = (q.dequantize() - x).abs()
    inside = (x >= offset - 8.5 * scale) & (x <= offset + 7.5 * scale)
    assert (error[inside] <= (0.5001 * scale).expand(500, 64)[inside]).all()
    assert inside.float().mean() > 0.97 and error.max() < 1.5


@pytest.mark.device
def test_memory_that_is_not_aligned(capability: str) -> None:
    """Input and codes may be at unaligned addresses.

    In the test they begin at the second element of a tensor.
    """
    for dtype in DTYPES:
        x = values(3001, dtype, 64)
        shifted = torch.empty(3002, dtype=dtype)[1:].copy_(x)
        q, other = quantize(x), quantize(shifted)
        assert same(q.packed, other.packed) and same(q.absmax, other.absmax)
        other.packed = torch.empty(q.packed.numel() + 1, dtype=torch.uint8)[1:].copy_(q.packed)
        assert same(other.dequantize(), q.dequantize())


def test_repeatable_with_any_number_of_threads() -> None:
    x = torch.randn(3000, 101)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, before):
        torch.set_num_threads(threads)
        q = quantize(x)
        results.append((*q.parts(), q.dequantize()))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.device
def test_strides_empty_and_slices_of_rows() -> None:
    x = torch.randn(96, 40).t()
    assert torch.equal(quantize(x).packed, quantize(x.contiguous()).packed)
    assert quantize(torch.empty(0, 64)).dequantize().shape == (0, 64)
    q = quantize(torch.randn(6, 128))
    assert q.packed.shape == (6, 64) and q.absmax.shape == (6, 2)
    assert torch.equal(q[2:4].dequantize(), q.dequantize()[2:4])
    assert quantize(torch.randn(6, 100)).packed.shape == (300,)
    assert quantize(torch.randn(1024, 64)).nbytes_held() == 1024 * 64 // 2 + 1024 * 4


@pytest.mark.device
def test_indices_beyond_32_bits(backend: str) -> None:
    if backend != "cuda":
        pytest.skip("gigabytes: a test for the GPU")
    numel = (1 << 31) + 2 * 4096 + 7
    if torch.cuda.mem_get_info()[0] < 6 * numel:
        pytest.skip(f"needs {6 * numel >> 30} GiB of GPU memory")
    x = torch.randn(numel, dtype=torch.bfloat16)
    q = quantize(x)
    y = q.dequantize()
    for begin, end in ((0, 1 << 20), ((1 << 31) - 4096, numel)):
        part = quantize(x[begin:end])
        assert torch.equal(q.packed[begin // 2 : (end + 1) // 2], part.packed)
        assert torch.equal(y[begin:end], part.dequantize())


@pytest.mark.device
def test_no_synchronisation_and_a_graph(backend: str) -> None:
    """Quantising and dequantising never synchronise with the GPU.

    A CUDA graph of quantisation and dequantisation uses the values that its input has at each replay.
    """
    if backend != "cuda":
        pytest.skip("a test for the GPU")
    x = torch.randn(9001).bfloat16()

    def step() -> Tensor:
        parts = torch.ops.shoestring.quantize_4bit(x, quant_type="int4")
        return torch.ops.shoestring.dequantize_4bit(
            *parts, shape=x.shape, dtype=torch.bfloat16, quant_type="int4"
        )

    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    x.normal_()
    graph.replay()
    assert torch.equal(result, step())


@pytest.mark.device
def test_quantized_tensor_as_a_parameter() -> None:
    x = torch.randn(8, 128, dtype=torch.bfloat16)
    linear = nn.Linear(128, 8)
    linear.weight = nn.Parameter(quantize(x), requires_grad=False)
    exact = linear.weight.dequantize()
    linear.to(torch.float16)
    assert linear.weight.absmax.dtype == torch.int32 and linear.weight.dtype == torch.float16
    assert torch.equal(copy.deepcopy(linear).weight.dequantize(torch.bfloat16), exact)
    file = io.BytesIO()
    torch.save(linear.weight, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False).dequantize(torch.bfloat16), exact)
    target = quantize(torch.zeros(8, 128))
    target.copy_(x)  # copy_ from a dense tensor quantises it
    assert torch.equal(target.packed, linear.weight.packed)
    with pytest.raises(ValueError, match="copy_: expected the form of .*int4.*, received .*nf4"):
        target.copy_(shoestring.quantize_4bit(x))


@pytest.mark.device
@pytest.mark.parametrize("columns", [128, 100], ids=["rows of blocks", "blocks across rows"])
def test_state_dict_comes_back(columns: int) -> None:
    """A QuantizedLinear of any quant_type loads the state dicts of int4, nf4 and dense layers.

    The keys of int4 state dicts are shoestring's own, because bitsandbytes has no int4.
    """
    linear = nn.Linear(columns, 40)
    layer = QuantizedLinear.from_linear(linear, "int4", 32)
    state = layer.state_dict()
    assert "weight.quant_state.shoestring__int4" in state and not any("bitsandbytes" in key for key in state)
    assert state["weight"].shape == (columns * 20, 1) and state["weight.absmax"].dtype == torch.int32
    for quant_type, block in (("int4", 32), ("int4", 64), ("nf4", 64), ("int8", None)):
        loaded = QuantizedLinear(columns, 40, quant_type=quant_type, block_size=block)
        loaded.load_state_dict(state)
        assert (loaded.weight.quant_type, loaded.weight.block_size) == ("int4", 32)
        assert torch.equal(loaded.weight.dequantize(), layer.weight.dequantize())
        loaded.load_state_dict(QuantizedLinear.from_linear(linear).state_dict())
        assert loaded.weight.quant_type == "nf4"
    layer.load_state_dict(linear.state_dict())
    assert torch.equal(layer.weight.packed, state["weight"].view_as(layer.weight.packed))
    for key, value in (
        ("weight.absmax", state["weight.absmax"].float()),
        ("weight.quant_map", torch.zeros(16)),
    ):
        with pytest.raises(ValueError, match=f"QuantizedLinear: {key}: expected"):
            layer.load_state_dict(state | {key: value})


@pytest.mark.device
def test_opcheck_and_compile() -> None:
    ops = torch.ops.shoestring
    x = torch.randn(5, 77)
    torch.library.opcheck(ops.quantize_4bit.default, (x,), {"quant_type": "int4"})
    parts = ops.quantize_4bit(x, quant_type="int4")
    options = {"shape": (5, 77), "dtype": torch.bfloat16, "quant_type": "int4"}
    torch.library.opcheck(ops.dequantize_4bit.default, parts, options)
    out = torch.empty(5, 77)
    ops.dequantize_(out, *parts, quant_type="int4")
    assert torch.equal(out, quantize(x).dequantize())

    def there_and_back(x: Tensor) -> Tensor:
        packed, absmax = ops.quantize_4bit(x * 2, quant_type="int4")
        return ops.dequantize_4bit(packed, absmax, shape=x.shape, dtype=torch.float32, quant_type="int4") + 1

    compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (64, 101):
        y = torch.randn(3, n)
        assert torch.equal(compiled(y), there_and_back(y))


@pytest.mark.device
def test_errors() -> None:
    q = quantize(torch.randn(4, 64))
    operator = torch.ops.shoestring.dequantize_4bit
    options = {"shape": (4, 64), "dtype": torch.float32, "quant_type": "int4"}
    with pytest.raises(
        ValueError,
        match="quantize_4bit: double_quant: expected False with quant_type 'int4', whose scales are bf16",
    ):
        shoestring.quantize_4bit(torch.randn(64), "int4", double_quant=True)
    with pytest.raises(
        ValueError, match="quantize_4bit: quant_type: expected .* received 'int8'. Call quantize_int8"
    ):
        shoestring.quantize_4bit(torch.randn(64, 32), "int8")
    with pytest.raises(ValueError, match="double_quant: expected False with quant_type 'int4'"):
        QuantizedLinear(64, 4, quant_type="int4", double_quant=True)
    with pytest.raises(
        RuntimeError, match="dequantize_4bit: absmax: expected 4 scales of Int, received 4 of Float"
    ):
        operator(q.packed, q.absmax.float(), **options)
    with pytest.raises(
        RuntimeError, match="dequantize_4bit: absmax: expected 4 scales of Float, received 4 of Int"
    ):
        operator(q.packed, q.absmax, **(options | {"quant_type": "nf4"}))
    with pytest.raises(
        RuntimeError, match="dequantize_4bit: nested: expected none with quant_type 'int4', received a tensor"
    ):
        operator(q.packed, q.absmax, torch.zeros(258), **options)
    with pytest.raises(
        RuntimeError, match="block_size: expected a power of two from 32 to 4096, received 48"
    ):
        quantize(torch.randn(4), 48)
    with pytest.raises(RuntimeError, match="x: expected fp32, bf16 or fp16, received Double"):
        quantize(torch.randn(4, dtype=torch.float64))
