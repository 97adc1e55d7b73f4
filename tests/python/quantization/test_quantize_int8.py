import copy
import io

import pytest
import torch
from torch import Tensor, nn

import shoestring
from references.quantization import dequantize_int8_reference, quantize_int8_reference
from shoestring.nn import QuantizedLinear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Numbers of columns: one, odd numbers, numbers around the SIMD registers and loop steps of the CPU kernels,
# and whole vectors. CUDA kernels read 2048 elements of a row per step and keep at most 4096 in registers, so
# some rows are longer than either.
COLUMNS = (1, 7, 16, 33, 64, 65, 100, 2048 + 5, 2056, 4096 + 3, 4096 + 8)


def values(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return normal numbers, with rows of zeros, of tiny, of large numbers, and of midpoints of two codes."""
    x = torch.randn(rows, columns)
    x[1::7] = 0
    x[2::7] *= 1e-30
    x[3::7] *= 1e-38  # for rows this small, 127 / absmax overflows
    x[4::7] *= 1000
    x[5::7] = (torch.randint(-254, 255, (columns,)) / 2).clamp(-127, 127)
    x[5::7, 0] = 127
    return x.to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have equal dtypes and values.

    NaNs count as equal, and devices may differ.
    """
    return a.dtype == b.dtype and torch.allclose(a.cpu(), b.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_bitsandbytes(capability: str, dtype: torch.dtype) -> None:
    """int8 codes, scales and dequantised values equal those of bitsandbytes."""
    bnb = pytest.importorskip("bitsandbytes.functional")
    for columns in COLUMNS:
        x = values(14, columns, dtype)
        x[6, 0], x[13, -1] = float("inf"), float("nan")
        codes, scales, _ = bnb.int8_vectorwise_quant(x)
        q = shoestring.quantize_int8(x)
        assert torch.equal(q.packed, codes), columns
        assert same(q.absmax, scales), columns
        assert same(q.dequantize(torch.float32), bnb.int8_vectorwise_dequant(codes, scales)), columns


@pytest.mark.device
@pytest.mark.parametrize("columns", COLUMNS)
def test_bytes_are_the_references(capability: str, columns: int) -> None:
    for dtype in DTYPES:
        x = values(14, columns, dtype)
        q = shoestring.quantize_int8(x)
        for a, b in zip((q.packed, q.absmax), quantize_int8_reference(x.cpu()), strict=True):
            assert same(a, b), dtype
        for to in DTYPES:
            expected = dequantize_int8_reference(q.packed.cpu(), q.absmax.cpu(), dtype=to)
            assert same(shoestring.dequantize_int8(q, to), expected), (dtype, to)


@pytest.mark.device
def test_a_row_that_is_not_finite_is_nan_and_no_other(capability: str) -> None:
    for columns in (24, 37):
        x = torch.randn(5, columns)
        x[1, 20], x[2, 3], x[3, -1] = float("nan"), float("inf"), -float("inf")
        q = shoestring.quantize_int8(x)
        assert same(q.packed, quantize_int8_reference(x.cpu())[0]) and not q.packed[1:4].any()
        y = q.dequantize()
        assert y[1:4].isnan().all() and y[::4].isfinite().all()


@pytest.mark.device
def test_memory_that_is_not_aligned(capability: str) -> None:
    """Input and codes may be at unaligned addresses.

    In the test they begin at the second element of a tensor.
    """
    for dtype in DTYPES:
        x = values(9, 104, dtype)
        shifted = torch.empty(9 * 104 + 1, dtype=dtype)[1:].view(9, 104).copy_(x)
        q, other = shoestring.quantize_int8(x), shoestring.quantize_int8(shifted)
        assert same(q.packed, other.packed) and same(q.absmax, other.absmax)
        other.packed = torch.empty(9 * 104 + 1, dtype=torch.int8)[1:].view(9, 104).copy_(q.packed)
        assert same(other.dequantize(), q.dequantize())


@pytest.mark.device
def test_error_is_half_a_step(capability: str) -> None:
    x = torch.randn(64, 512)
    error = (shoestring.quantize_int8(x).dequantize() - x).abs()
    assert (error <= x.abs().amax(1, keepdim=True) / 254 * 1.0001).all()


@pytest.mark.device
def test_repeatable(capability: str) -> None:
    x = torch.randn(300, 101)
    (first, second) = (shoestring.quantize_int8(x) for _ in range(2))
    for a, b in zip(
        (*first.parts(), first.dequantize()), (*second.parts(), second.dequantize()), strict=True
    ):
        assert torch.equal(a, b)


def test_repeatable_with_any_number_of_threads() -> None:
    x = torch.randn(3000, 101)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, before):
        torch.set_num_threads(threads)
        q = shoestring.quantize_int8(x)
        results.append((q.packed, q.absmax, q.dequantize()))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.device
def test_strides_dimensions_and_empty() -> None:
    x = torch.randn(96, 40).t()
    assert torch.equal(shoestring.quantize_int8(x).packed, shoestring.quantize_int8(x.contiguous()).packed)
    experts = torch.randn(3, 5, 40)
    q = shoestring.quantize_int8(experts)
    assert q.packed.shape == experts.shape and q.absmax.shape == (3, 5)
    assert torch.equal(q.dequantize()[1], shoestring.quantize_int8(experts[1]).dequantize())
    assert shoestring.quantize_int8(experts[0, 0]).absmax.shape == ()
    assert shoestring.quantize_int8(torch.empty(0, 64)).dequantize().shape == (0, 64)


@pytest.mark.device
def test_rows_can_be_sliced() -> None:
    x = torch.randn(6, 33)
    q = shoestring.quantize_int8(x)
    rows = shoestring.QuantizedTensor(
        q.packed[2:4], q.absmax[2:4], None, shape=(2, 33), dtype=x.dtype, quant_type="int8", block_size=33
    )
    assert torch.equal(rows.dequantize(), q.dequantize()[2:4])


@pytest.mark.device
@pytest.mark.parametrize(
    ("rows", "columns"), [(1 << 16, 1 << 12), ((1 << 18) + 1, 8192), (1, (1 << 31) + 8)], ids=str
)
def test_full_size(backend: str, rows: int, columns: int) -> None:
    """Rows of a tensor with up to 2^31 elements and more have the same codes as if quantised separately."""
    if backend != "cuda":
        pytest.skip("gigabytes: a test for the GPU")
    if torch.cuda.mem_get_info()[0] < 6 * rows * columns:
        pytest.skip(f"needs {6 * rows * columns >> 30} GiB of GPU memory")
    x = torch.randn(rows, columns, dtype=torch.bfloat16)
    q = shoestring.quantize_int8(x)
    y = q.dequantize()
    for row in (0, rows // 2, rows - 1):
        part = shoestring.quantize_int8(x[row])
        assert torch.equal(q.packed[row], part.packed) and torch.equal(y[row], part.dequantize())
    tail = x[-1, -(1 << 12) :]
    assert ((y[-1, -(1 << 12) :] - tail).abs() <= q.absmax[-1] / 100).all()


@pytest.mark.device
def test_no_synchronisation_and_a_graph(backend: str) -> None:
    """Quantising and dequantising never synchronise with the GPU.

    A CUDA graph of quantisation and dequantisation uses the values that its input has at each replay.
    """
    if backend != "cuda":
        pytest.skip("a test for the GPU")
    x = torch.randn(90, 101).bfloat16()

    def step() -> Tensor:
        packed, absmax = torch.ops.shoestring.quantize_int8(x)
        return torch.ops.shoestring.dequantize_int8(packed, absmax, dtype=torch.bfloat16)

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
    x = torch.randn(8, 33, dtype=torch.bfloat16)
    linear = nn.Linear(33, 8)
    linear.weight = nn.Parameter(shoestring.quantize_int8(x), requires_grad=False)
    exact = linear.weight.dequantize()
    assert linear.weight.shape == (8, 33) and linear.weight.block_size == 33
    assert linear.weight.nbytes_held() == 8 * 33 + 8 * 4
    linear.to(torch.float16)
    assert linear.weight.dtype == torch.float16 and isinstance(linear.weight, nn.Parameter)
    assert torch.equal(linear.weight.dequantize(torch.bfloat16), exact)

    twin = copy.deepcopy(linear)
    assert twin.weight.packed.data_ptr() != linear.weight.packed.data_ptr()
    assert torch.equal(twin.weight.dequantize(torch.bfloat16), exact)
    file = io.BytesIO()
    torch.save(linear.weight, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False).dequantize(torch.bfloat16), exact)
    assert linear.weight.to("meta").packed.device.type == "meta"

    target = shoestring.quantize_int8(torch.zeros(8, 33))
    target.copy_(linear.weight)
    assert torch.equal(target.dequantize(torch.bfloat16), exact)
    target.copy_(x)  # copy_ from a dense tensor quantises it
    assert torch.equal(target.packed, linear.weight.packed)
    assert torch.equal(torch.empty(8, 33).copy_(target), target.dequantize(torch.float32))
    with pytest.raises(ValueError, match="copy_: expected the form of .*int8.*, received .*nf4"):
        target.copy_(shoestring.quantize_4bit(x))


@pytest.mark.device
def test_state_dict_is_bitsandbytes(backend: str) -> None:
    if backend == "cuda":
        pytest.skip("the bytes are those of bitsandbytes' CPU path")
    bnb = pytest.importorskip("bitsandbytes")
    linear = nn.Linear(96, 40).half()
    ours = QuantizedLinear.from_linear(linear, "int8")
    theirs = bnb.nn.Linear8bitLt(96, 40, has_fp16_weights=False)
    theirs.load_state_dict(linear.state_dict())
    theirs = theirs.half()
    theirs.weight = theirs.weight._quantize("cpu") if theirs.weight.SCB is None else theirs.weight

    mine, reference = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == reference.keys()
    for key, value in mine.items():
        assert value.dtype == reference[key].dtype and torch.equal(value, reference[key]), key
    for quant_type in ("nf4", "int8"):  # quant_type of the layer before it loads the state dict
        loaded = QuantizedLinear(96, 40, quant_type=quant_type)
        loaded.load_state_dict(reference)
        assert torch.equal(loaded.weight.dequantize(torch.float16), ours.weight.dequantize())
        assert loaded.weight.dtype == torch.float32 and torch.equal(loaded.bias, ours.bias.float())
    dense = QuantizedLinear(96, 40, quant_type="int8")
    dense.load_state_dict(linear.state_dict())
    assert torch.equal(dense.weight.packed, ours.weight.packed)
    theirs.load_state_dict(mine)
    assert torch.equal(theirs.weight.SCB, ours.weight.absmax)


@pytest.mark.device
def test_opcheck_and_compile() -> None:
    ops = torch.ops.shoestring
    x = torch.randn(5, 77)
    torch.library.opcheck(ops.quantize_int8.default, (x,))
    torch.library.opcheck(ops.dequantize_int8.default, ops.quantize_int8(x), {"dtype": torch.bfloat16})

    def there_and_back(x: Tensor) -> Tensor:
        packed, absmax = ops.quantize_int8(x * 2)
        return ops.dequantize_int8(packed, absmax, dtype=torch.float32) + 1

    compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (64, 101):
        y = torch.randn(3, n)
        assert torch.equal(compiled(y), there_and_back(y))


@pytest.mark.device
def test_errors() -> None:
    q = shoestring.quantize_int8(torch.randn(4, 64))
    ops = torch.ops.shoestring
    with pytest.raises(RuntimeError, match="quantize_int8: x: expected fp32, bf16 or fp16, received Double"):
        shoestring.quantize_int8(torch.randn(4, dtype=torch.float64))
    for x in (torch.tensor(1.0), torch.empty(4, 0)):
        with pytest.raises(
            RuntimeError, match=r"quantize_int8: x: expected shape \(..., columns\) with one column"
        ):
            shoestring.quantize_int8(x)
    with pytest.raises(
        RuntimeError, match=r"dequantize_int8: packed: expected int8 of shape \(..., columns\)"
    ):
        ops.dequantize_int8(q.packed.byte(), q.absmax, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"dequantize_int8: absmax: expected fp32 of shape \[4\]"):
        ops.dequantize_int8(q.packed, q.absmax[:3], dtype=torch.float32)
    with pytest.raises(RuntimeError, match="dequantize_int8: dtype: expected fp32, bf16 or fp16"):
        q.dequantize(torch.float64)
    with pytest.raises(
        TypeError, match="dequantize_int8: q: expected an int8 QuantizedTensor, received Tensor"
    ):
        shoestring.dequantize_int8(torch.randn(4))
    with pytest.raises(
        TypeError, match="dequantize_int8: q: expected an int8 QuantizedTensor, received one of nf4"
    ):
        shoestring.dequantize_int8(shoestring.quantize_4bit(torch.randn(4)))
    with pytest.raises(TypeError, match="dequantize_4bit: q: expected 4 bits, received int8"):
        shoestring.dequantize_4bit(q)
    with pytest.raises(RuntimeError, match="quant_type: expected 'nf4', 'fp4' or 'int4', received 'int8'"):
        ops.dequantize_4bit(q.packed, q.absmax, shape=(4, 64), dtype=torch.float32, quant_type="int8")
    x = torch.randn(4, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        ops.quantize_int8(x)[1].sum().backward()
