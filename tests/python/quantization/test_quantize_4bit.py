import copy
import io
import math

import pytest
import torch
from torch import Tensor, nn

import shoestring
from references.quantization import dequantize_4bit_reference, quantize_4bit_reference
from shoestring.quantization.quantize_4bit import code_values

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # all supported block sizes
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sizes(block: int) -> tuple[int, ...]:
    """Return element counts: 1, odd, above a SIMD register, around a block, and several blocks."""
    return (1, 7, 33, block - 1, block, block + 1, 3 * block + 7, 2 * block + 32)


def values(n: int, dtype: torch.dtype, block: int) -> Tensor:
    """Return normal numbers, with a block of zeros, one of tiny numbers, and values near a code midpoint."""
    x = torch.randn(n)
    if n > block:
        x[:block] = 0
    if n > 3 * block:
        x[block : 2 * block] *= 1e-30
        # The scale of this block must be 1, so all its numbers but the first three are made small. The second
        # number is then on a midpoint between codes.
        x[2 * block : 3 * block] *= 0.1
        x[2 * block : 2 * block + 3] = torch.tensor([1.0, 0.8614784479141235, 0.8614786])
    return x.to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether the values of two tensors are equal. NaNs count as equal, and devices may differ."""
    return torch.allclose(a.cpu(), b.cpu(), rtol=0, atol=0, equal_nan=True)


def dequantized(q: shoestring.QuantizedTensor) -> Tensor:
    """Dequantise q with the reference in plain PyTorch, on the CPU."""
    nested = None if q.nested is None else q.nested.cpu()
    options = {"shape": q.shape, "dtype": q.dtype, "quant_type": q.quant_type, "block_size": q.block_size}
    return dequantize_4bit_reference(q.packed.cpu(), q.absmax.cpu(), nested, **options)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_bytes_are_bitsandbytes(capability: str, quant_type: str) -> None:
    bnb = pytest.importorskip("bitsandbytes.functional")
    for block in BLOCK_SIZES:
        for dtype in DTYPES:
            for n in sizes(block):
                x = values(n, dtype, block)
                packed, state = bnb.quantize_4bit(x, blocksize=block, quant_type=quant_type)
                q = shoestring.quantize_4bit(x, quant_type, block)
                assert torch.equal(q.packed, packed.flatten()), (block, dtype, n)
                assert torch.equal(q.absmax, state.absmax), (block, dtype, n)


@pytest.mark.device
@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_bytes_are_the_references(capability: str, quant_type: str, block: int) -> None:
    """Codes, scales and dequantised values equal those of the reference in plain PyTorch.

    8192 + 2048 + 5 elements are a whole tile of the CUDA kernels, whole vectors, and a remainder.
    """
    for dtype in DTYPES:
        for n in (*sizes(block), 8192 + 2048 + 5):
            x = values(n, dtype, block)
            q = shoestring.quantize_4bit(x, quant_type, block)
            for a, b in zip(
                (q.packed, q.absmax), quantize_4bit_reference(x.cpu(), quant_type, block), strict=True
            ):
                assert same(a, b), (dtype, n)
            assert same(shoestring.dequantize_4bit(q), dequantized(q)), (dtype, n)


@pytest.mark.device
@pytest.mark.parametrize("block", [32, 256, 4096])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_midpoints_and_what_is_not_finite(capability: str, quant_type: str, block: int) -> None:
    """Codes equal the reference at and next to midpoints of codes, and for infinity and NaN in any block."""
    book = code_values(quant_type, torch.get_default_device()).sort().values
    middle = (book[:-1] + book[1:]) / 2
    close = torch.cat(
        [middle, middle.nextafter(torch.tensor(-9.0)), middle.nextafter(torch.tensor(9.0)), book]
    )
    x = torch.cat([close, -close, torch.zeros(-2 * close.numel() % block), torch.randn(8 * block + 5)])
    # In blocks of midpoints between codes, an element of 1 makes the scale 1, so that midpoints stay
    # midpoints.
    x[:: min(block, 32)] = 1
    x[-7 * block] = float("inf")
    x[-6 * block] = -float("inf")
    x[-5 * block] = float("nan")
    for last in (1.0, float("inf"), float("nan"), 0.0):
        if last == 0:
            x[-5:] = 0
        x[-3] = last
        q = shoestring.quantize_4bit(x, quant_type, block)
        for a, b in zip(
            (q.packed, q.absmax), quantize_4bit_reference(x.cpu(), quant_type, block), strict=True
        ):
            assert same(a, b), last
        assert same(q.dequantize(), dequantized(q)), last


@pytest.mark.device
def test_memory_that_is_not_aligned(capability: str) -> None:
    """Input and codes may be at unaligned addresses.

    In the test they begin at the second element of a tensor.
    """
    for dtype in DTYPES:
        x = values(9001, dtype, 64)
        shifted = torch.empty(9002, dtype=dtype)[1:].copy_(x)
        q, other = shoestring.quantize_4bit(x), shoestring.quantize_4bit(shifted)
        assert same(q.packed, other.packed) and same(q.absmax, other.absmax)
        other.packed = torch.empty(q.packed.numel() + 1, dtype=torch.uint8)[1:].copy_(q.packed)
        assert same(other.dequantize(), q.dequantize())


@pytest.mark.device
@pytest.mark.parametrize("n", [2, 7, 64 * 256 + 1, 64 * 256 * 3 + 64 * 5 + 2], ids=str)
def test_nested_scales(capability: str, n: int) -> None:
    """Nested scales are dequantised as in the reference. Their error is at most half a quantisation step."""
    x = torch.randn(n) * torch.rand(n).exp()
    plain, q = shoestring.quantize_4bit(x), shoestring.quantize_4bit(x, double_quant=True)
    assert q.nested is not None and same(q.packed, plain.packed)
    assert same(q.dequantize(), dequantized(q))
    offset, table, groups = q.nested[0], q.nested[1:257], q.nested[257:]
    torch.testing.assert_close(offset, plain.absmax.mean())
    group = groups.repeat_interleave(256)[: plain.absmax.numel()]
    error = (table[q.absmax.long()] * group + offset - plain.absmax).abs()
    # The limit is half of the largest step between values of the 8-bit map, which is 0.9 / 64.
    assert (error <= 0.0071 * group + 1e-6).all()


# Element counts that give one scale (equal to the mean of scales), a whole group of scales, and a short last
# group. The counts are even, because bitsandbytes compiles code at run time for odd counts.
@pytest.mark.parametrize("n", [2, 64 * 256, 64 * 256 * 3 + 64 * 5 + 2], ids=str)
def test_nested_scales_are_bitsandbytes(capability: str, n: int) -> None:
    bnb = pytest.importorskip("bitsandbytes.functional")
    x = torch.randn(n) * torch.rand(n).exp()
    packed, state = bnb.quantize_4bit(x, quant_type="nf4", compress_statistics=True)
    q = shoestring.quantize_4bit(x, double_quant=True)
    assert q.nested is not None
    assert torch.equal(q.absmax, state.absmax)
    assert torch.equal(q.nested[0], state.offset)
    assert torch.equal(q.nested[1:257], state.state2.code)
    assert torch.equal(q.nested[257:], state.state2.absmax)
    assert torch.equal(q.dequantize(), bnb.dequantize_4bit(packed, state).view(n))


# For each block size, mean absolute and mean relative error of NF4 on 1024 x 1024 normal numbers, as bitsandbytes
# documents them.
NF4_ERROR = {
    32: (0.067746, 0.189726), 64: (0.072798, 0.203339), 128: (0.076831, 0.215237), 256: (0.080337, 0.226105),
    512: (0.083547, 0.236079), 1024: (0.086610, 0.245370), 2048: (0.089592, 0.254163), 4096: (0.092547, 0.262473),
}  # fmt: skip


@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_error_table(block: int) -> None:
    x = torch.randn(1024, 1024)
    error = (shoestring.quantize_4bit(x, block_size=block).dequantize() - x).abs()
    # The mean error varies with the random numbers, mostly with the largest number of each block. The blocks
    # are independent, so the standard deviation of the mean follows from that of the blocks.
    for errors, published in zip((error, error / x.abs().clamp_min(1e-8)), NF4_ERROR[block], strict=True):
        of_blocks = errors.view(-1, block).mean(1)
        deviation = of_blocks.std() / math.sqrt(len(of_blocks))
        assert errors.mean() < published + 5 * deviation


@pytest.mark.device
def test_repeatable(capability: str) -> None:
    x = torch.randn(30_001)
    (first, second) = (shoestring.quantize_4bit(x, double_quant=True) for _ in range(2))
    for a, b in zip(
        (*first.parts(), first.dequantize()), (*second.parts(), second.dequantize()), strict=True
    ):
        assert torch.equal(a, b)


def test_repeatable_with_any_number_of_threads() -> None:
    x = torch.randn(300_001)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, before):
        torch.set_num_threads(threads)
        q = shoestring.quantize_4bit(x)
        results.append((q.packed, q.absmax, q.dequantize()))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.device
def test_nan_marks_its_block_and_no_other() -> None:
    x = torch.randn(192)
    x[70] = float("nan")
    y = shoestring.quantize_4bit(x).dequantize()
    assert y[64:128].isnan().all()
    assert y[:64].isfinite().all() and y[128:].isfinite().all()


@pytest.mark.device
def test_strides_and_empty() -> None:
    x = torch.randn(96, 40).t()
    assert torch.equal(shoestring.quantize_4bit(x).packed, shoestring.quantize_4bit(x.contiguous()).packed)
    for nested in (False, True):
        empty = shoestring.quantize_4bit(torch.empty(0, 64), double_quant=nested)
        assert empty.dequantize().shape == (0, 64)


@pytest.mark.device
def test_row_packed_form_is_sliceable() -> None:
    """If rows of a weight are whole blocks, the codes have a dimension for rows, so rows can be sliced."""
    x = torch.randn(6, 128)
    q = shoestring.quantize_4bit(x)
    assert q.packed.shape == (6, 64) and q.absmax.shape == (6, 2)
    rows = shoestring.QuantizedTensor(
        q.packed[2:4], q.absmax[2:4], None, shape=(2, 128), dtype=x.dtype, quant_type="nf4", block_size=64
    )
    assert torch.equal(rows.dequantize(), q.dequantize()[2:4])
    assert shoestring.quantize_4bit(torch.randn(6, 100)).packed.shape == (300,)


@pytest.mark.device
@pytest.mark.parametrize("numel", [1 << 28, (1 << 31) + 2 * 4096 + 7], ids=["2^28", "above 2^31"])
def test_full_size(backend: str, numel: int) -> None:
    """Parts of a tensor with up to 2^31 elements and more have the same codes as if quantised separately."""
    if backend != "cuda":
        pytest.skip("gigabytes: a test for the GPU")
    if torch.cuda.mem_get_info()[0] < 6 * numel:
        pytest.skip(f"needs {6 * numel >> 30} GiB of GPU memory")
    for block in (64, 4096):
        x = torch.randn(numel, dtype=torch.bfloat16)
        q = shoestring.quantize_4bit(x, block_size=block, double_quant=block == 64)
        y = q.dequantize()
        last, middle = (numel // 4096 - 1) * 4096, numel // 8192 * 4096
        for begin, end in ((0, 1 << 20), (middle, middle + (1 << 20)), (last, numel)):
            part = shoestring.quantize_4bit(x[begin:end], block_size=block)
            assert torch.equal(q.packed[begin // 2 : (end + 1) // 2], part.packed)
            if q.nested is None:
                assert torch.equal(y[begin:end], part.dequantize())
            else:
                torch.testing.assert_close(y[begin:end], part.dequantize(), rtol=0.02, atol=0.02)
        del x, y


@pytest.mark.device
def test_no_synchronisation_and_a_graph(backend: str) -> None:
    """Quantising and dequantising never synchronise with the GPU.

    A CUDA graph of quantisation and dequantisation uses the values that its input has at each replay.
    """
    if backend != "cuda":
        pytest.skip("a test for the GPU")
    x = torch.randn(9001).bfloat16()
    _, second = torch.ops.shoestring.quantize_absmax(shoestring.quantize_4bit(x).absmax)

    def step() -> tuple[Tensor, Tensor]:
        packed, absmax = torch.ops.shoestring.quantize_4bit(x)
        codes = (absmax * 40).to(torch.uint8)
        options = {"shape": x.shape, "dtype": torch.bfloat16}
        dequantize = torch.ops.shoestring.dequantize_4bit
        return dequantize(packed, absmax, **options), dequantize(packed, codes, second, **options)

    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    x.normal_()
    graph.replay()
    for a, b in zip(results, step(), strict=True):
        assert torch.equal(a, b)


def test_memory_formula() -> None:
    """A 4-bit tensor takes 4 + 32 / block bits per element.

    With nested scales it takes 4 + 8 / block + 32 / (256 block) bits per element and 257 words of 32 bits.
    """
    x = torch.randn(1024, 1024)
    assert shoestring.quantize_4bit(x).nbytes_held() == x.numel() // 2 + x.numel() // 64 * 4
    nested = x.numel() // 2 + x.numel() // 64 + 4 * (257 + x.numel() // 64 // 256)
    assert shoestring.quantize_4bit(x, double_quant=True).nbytes_held() == nested


@pytest.mark.device
@pytest.mark.parametrize("nested", [False, True])
def test_quantized_tensor_as_a_parameter(nested: bool) -> None:
    x = torch.randn(8, 128, dtype=torch.bfloat16)
    linear = nn.Linear(128, 8)
    linear.weight = nn.Parameter(shoestring.quantize_4bit(x, double_quant=nested), requires_grad=False)
    exact = linear.weight.dequantize()
    assert isinstance(linear.weight, nn.Parameter) and linear.weight.shape == (8, 128)
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

    target = shoestring.quantize_4bit(torch.zeros(8, 128), double_quant=nested)
    target.copy_(linear.weight)
    assert torch.equal(target.dequantize(torch.bfloat16), exact)
    target.copy_(x)  # copy_ from a dense tensor quantises it
    assert torch.equal(target.packed, linear.weight.packed)
    assert torch.equal(torch.empty(8, 128).copy_(target), target.dequantize(torch.float32))


@pytest.mark.device
def test_opcheck_and_compile() -> None:
    ops = torch.ops.shoestring
    x = torch.randn(5, 77)
    torch.library.opcheck(ops.quantize_4bit.default, (x,))
    packed, absmax = ops.quantize_4bit(x)
    torch.library.opcheck(ops.quantize_absmax.default, (absmax,))
    codes, nested = ops.quantize_absmax(absmax)
    for parts in ((packed, absmax), (packed, codes, nested)):
        torch.library.opcheck(ops.dequantize_4bit.default, parts, {"shape": (5, 77), "dtype": torch.bfloat16})

    def there_and_back(x: Tensor) -> Tensor:
        packed, absmax = ops.quantize_4bit(x * 2)
        return ops.dequantize_4bit(packed, absmax, shape=x.shape, dtype=torch.float32) + 1

    compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (64, 101):
        y = torch.randn(3, n)
        assert torch.equal(compiled(y), there_and_back(y))


@pytest.mark.device
def test_errors() -> None:
    q = shoestring.quantize_4bit(torch.randn(4, 64))
    ops = torch.ops.shoestring
    with pytest.raises(RuntimeError, match="quantize_4bit: x: expected fp32, bf16 or fp16, received Double"):
        shoestring.quantize_4bit(torch.randn(4, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="quant_type: expected 'nf4', 'fp4' or 'int4', received 'int5'"):
        shoestring.quantize_4bit(torch.randn(4), "int5")
    for block in (16, 48, 8192):
        with pytest.raises(
            RuntimeError, match="block_size: expected a power of two from 32 to 4096, received"
        ):
            shoestring.quantize_4bit(torch.randn(4), block_size=block)
    with pytest.raises(RuntimeError, match="packed: expected 160 bytes"):
        ops.dequantize_4bit(q.packed, q.absmax, shape=(5, 64), dtype=torch.float32)
    with pytest.raises(RuntimeError, match="absmax: expected 4 scales of Float, received 3"):
        ops.dequantize_4bit(q.packed, q.absmax[:3], shape=(4, 64), dtype=torch.float32)
    with pytest.raises(RuntimeError, match="absmax: expected 4 scales of Byte"):
        ops.dequantize_4bit(q.packed, q.absmax, torch.zeros(258), shape=(4, 64), dtype=torch.float32)
    codes = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="nested: expected 258 fp32 values"):
        ops.dequantize_4bit(q.packed, codes, torch.zeros(257), shape=(4, 64), dtype=torch.float32)
    with pytest.raises(RuntimeError, match="dtype: expected fp32, bf16 or fp16"):
        q.dequantize(torch.float64)
    with pytest.raises(TypeError, match="dequantize_4bit: q: expected a QuantizedTensor, received Tensor"):
        shoestring.dequantize_4bit(torch.randn(4))
    with pytest.raises(NotImplementedError, match="dequantise first"):
        q + 1
    with pytest.raises(ValueError, match=r"copy_: expected shape \(4, 64\), received \(2, 64\)"):
        q.copy_(torch.zeros(2, 64))
    with pytest.raises(TypeError, match="expected a floating-point dtype"):
        q.to(torch.int8)
    x = torch.randn(64, requires_grad=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        ops.quantize_4bit(x)[1].sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_into_a_given_tensor(dtype: torch.dtype) -> None:
    operator = torch.ops.shoestring.dequantize_
    for q in (
        shoestring.quantize_4bit(torch.randn(7, 96), "fp4", 32),
        shoestring.quantize_int8(torch.randn(7, 96)),
    ):
        out = torch.full((7, 96), torch.nan, dtype=dtype)
        options = {"quant_type": q.quant_type, "block_size": q.block_size}
        operator(out, q.packed, q.absmax, None, **options)
        assert torch.equal(out, q.dequantize(dtype))
        torch.library.opcheck(operator.default, (out, q.packed, q.absmax, None), options)
        with pytest.raises(
            RuntimeError, match="dequantize_: out: expected a contiguous tensor of fp32, bf16 or fp16"
        ):
            operator(out.t(), q.packed, q.absmax, None, **options)
        with pytest.raises(RuntimeError, match="dequantize_: packed: expected"):
            operator(out[:3], q.packed, q.absmax, None, **options)
