#include <algorithm>
#include <optional>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <shoestring/quantization/ops.h>

#include "core/call.h"
#include "core/cuda.h"
#include "core/huge_pages.h"
#include "core/threads.h"
#include "quantization/fake_quantize_table.h"
#include "quantization/fit_int4.h"
#include "quantization/packed.h"

namespace shoestring::quantization {
namespace {

using at::Tensor;

constexpr const char* kFakeQuantizeOp = "fake_quantize";

// Number of elements that are quantised and then dequantised at a time. It is a multiple of every block size,
// so that each piece begins at a block. The codes of a piece stay in the L1 cache and are never written to
// memory.
constexpr int64_t kFakePiece = 4096;

// Returns the number of elements that share a scale. Raises an error unless the arguments fit together.
c10::SymInt check_fake_quantize(const Tensor& x, c10::string_view quant_type,
                                std::optional<int64_t> block_size, bool double_quant) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, kFakeQuantizeOp,
              ": x: expected fp32, bf16 or fp16, received ", dtype);
  if (quant_type == "int8") {
    TORCH_CHECK(x.dim() >= 1 && x.sym_size(-1) >= 1, kFakeQuantizeOp,
                ": x: expected shape (..., columns) with one column or more for quant_type 'int8', received ",
                x.sym_sizes());
    TORCH_CHECK(!block_size.has_value() && !double_quant, kFakeQuantizeOp,
                ": block_size and double_quant: expected None and False with quant_type 'int8', whose rows "
                "have one fp32 scale each, received ",
                block_size.has_value() ? std::to_string(*block_size) : "None", " and ",
                double_quant ? "True" : "False");
    return x.sym_size(-1);
  }
  TORCH_CHECK(quant_type == "nf4" || quant_type == "fp4" || quant_type == "int4", kFakeQuantizeOp,
              ": quant_type: expected 'nf4', 'fp4', 'int4' or 'int8', received '", quant_type, "'");
  const int64_t block = block_size.value_or(QuantizeOptions().block_size());
  check_block_size(kFakeQuantizeOp, block);
  TORCH_CHECK(!double_quant || quant_type != "int4", kFakeQuantizeOp,
              ": double_quant: expected False with quant_type 'int4', whose scales are bf16, received True");
  return block;
}

// Calls run(x's elements, out's elements, quantise, dequantise) with the functions of the two kernel tables
// for the dtype of x and out.
template <class Quantizers, class Dequantizers, class Run>
void with_kernels(const Quantizers& q, const Dequantizers& d, const Tensor& x, const Tensor& out, Run run) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return run(x.const_data_ptr<float>(), out.data_ptr<float>(), q.quantize_float, d.dequantize_float);
    case at::kBFloat16:
      return run(const_bits(x), bits(out), q.quantize_bf16, d.dequantize_bf16);
    default:
      return run(const_bits(x), bits(out), q.quantize_fp16, d.dequantize_fp16);
  }
}

// Calls each(begin, n) for the pieces of `count` elements. time_bytes: the number of bytes that a core copies
// in the time that an element takes.
template <class Each>
void for_each_piece(int64_t count, int64_t piece, int64_t time_bytes, Each each) {
  at::parallel_for(
      0, (count + piece - 1) / piece, row_grain(time_bytes * piece), [&](int64_t first, int64_t last) {
        for (int64_t begin = first * piece; begin < std::min(last * piece, count); begin += piece)
          each(begin, std::min(piece, count - begin));
      });
}

// Fake-quantises to "nf4" or "fp4".
void fake_4bit_cpu(const Tensor& x, const kernels::Codebook& book, int64_t block_size, const Tensor& out) {
  const auto run = [&](const auto* from, auto* to, const auto quantize, const auto dequantize) {
    for_each_piece(x.numel(), kFakePiece, 24, [&](int64_t begin, int64_t n) {
      uint8_t codes[kFakePiece / 2];
      float scales[kFakePiece / 32];
      quantize(from + begin, n, block_size, book, codes, scales);
      dequantize({codes, scales, nullptr, nullptr, nullptr, block_size, &book}, 0, n, to + begin);
    });
  };
  with_kernels(cpu::quantize_4bit(), cpu::dequantize_4bit(), x, out, run);
}

void fake_int4_cpu(const Tensor& x, int64_t block_size, const Tensor& out) {
  const auto& book = codebook(kFakeQuantizeOp, "int4");
  const auto run = [&](const auto* from, auto* to, const auto quantize, const auto dequantize) {
    for_each_piece(x.numel(), kFakePiece, 256, [&](int64_t begin, int64_t n) {
      uint8_t codes[kFakePiece / 2];
      kernels::Int4Scale scales[kFakePiece / 32];
      quantize(from + begin, n, block_size, codes, scales);
      dequantize({codes, nullptr, nullptr, nullptr, scales, block_size, &book}, 0, n, to + begin);
    });
  };
  with_kernels(cpu::quantize_int4(), cpu::dequantize_4bit(), x, out, run);
}

// Fake-quantises rows to int8. A piece is one long row or several short ones.
void fake_int8_cpu(const Tensor& x, int64_t columns, const Tensor& out) {
  const int64_t together = std::max<int64_t>(1, kFakePiece / columns), piece = together * columns;
  const auto run = [&](const auto* from, auto* to, const auto quantize, const auto dequantize) {
    at::parallel_for(0, x.numel() / columns, row_grain(12 * columns), [&](int64_t first, int64_t last) {
      std::vector<int8_t> codes(piece);
      std::vector<float> scales(together);
      for (int64_t row = first; row < last; row += together) {
        const int64_t rows = std::min(together, last - row), begin = row * columns;
        quantize(from + begin, rows, columns, codes.data(), scales.data());
        dequantize({codes.data(), scales.data(), columns}, 0, rows * columns, to + begin);
      }
    });
  };
  with_kernels(cpu::quantize_int8(), cpu::dequantize_int8(), x, out, run);
}

void fake_cuda(const char* table, const Tensor& x, int64_t block_size, const kernels::Codebook* book,
               const Tensor& out) {
  const auto& kernels = cuda::table<kernels::FakeQuantizeCuda>(table);
  const auto run = x.scalar_type() == at::kFloat      ? kernels.fake_float
                   : x.scalar_type() == at::kBFloat16 ? kernels.fake_bf16
                                                      : kernels.fake_fp16;
  check_launch(kFakeQuantizeOp,
               run(x.const_data_ptr(), x.numel(), block_size, book, out.mutable_data_ptr(), stream_of(x)));
}

// The scales of double quantisation depend on the mean of all scales, so the codes of the whole tensor are
// kept until the last scale is known: half a byte per element.
Tensor fake_double_quant(Backend backend, const Tensor& x, c10::string_view quant_type, int64_t block_size) {
  const auto [packed, absmax] =
      quantize_4bit(x, QuantizeOptions().quant_type(std::string(quant_type)).block_size(block_size));
  const auto [codes, nested] = quantize_absmax(absmax);
  Tensor out = in_huge_pages(at::empty(x.sizes(), x.options()));
  PackedReader(backend, kFakeQuantizeOp, packed, codes, nested, quant_type, block_size).read(0, out);
  return out;
}

template <Backend backend>
Tensor run_fake_quantize(const Tensor& input, c10::string_view quant_type, std::optional<int64_t> block_size,
                         bool double_quant) {
  const int64_t block = check_fake_quantize(input, quant_type, block_size, double_quant).expect_int();
  const c10::OptionalDeviceGuard guard(input.device());
  const Tensor x = input.contiguous();
  if (double_quant) return fake_double_quant(backend, x, quant_type, block);
  Tensor out = in_huge_pages(at::empty(x.sizes(), x.options()));
  if (out.numel() == 0) return out;
  if (quant_type == "int8") {
    backend == Backend::kCpu ? fake_int8_cpu(x, block, out)
                             : fake_cuda("fake_quantize_int8", x, block, nullptr, out);
  } else if (quant_type == "int4") {
    backend == Backend::kCpu ? fake_int4_cpu(x, block, out)
                             : fake_cuda("fake_quantize_int4", x, block, nullptr, out);
  } else {
    const auto& book = codebook(kFakeQuantizeOp, quant_type);
    backend == Backend::kCpu ? fake_4bit_cpu(x, book, block, out)
                             : fake_cuda("fake_quantize_4bit", x, block, &book, out);
  }
  return out;
}

Tensor fake_quantize_meta(const Tensor& x, c10::string_view quant_type, std::optional<int64_t> block_size,
                          bool double_quant) {
  check_fake_quantize(x, quant_type, block_size, double_quant);
  return at::empty_symint(x.sym_sizes(), x.options());
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) { m.impl(kFakeQuantizeOp, run_fake_quantize<Backend::kCpu>); }
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) { m.impl(kFakeQuantizeOp, run_fake_quantize<Backend::kCuda>); }
TORCH_LIBRARY_IMPL(shoestring, Meta, m) { m.impl(kFakeQuantizeOp, fake_quantize_meta); }

}  // namespace
}  // namespace shoestring::quantization

namespace shoestring {

using at::Tensor;

Tensor fake_quantize(const Tensor& x, const QuantizeOptions& options, bool double_quant) {
  static auto op = find<decltype(quantization::fake_quantize_meta)>("shoestring::fake_quantize");
  std::optional<int64_t> block = options.block_size();
  // The structs of options have no empty block size, so for int8 the default and the row length mean none.
  if (options.quant_type() == "int8" &&
      (block == QuantizeOptions().block_size() || (x.dim() >= 1 && x.sym_size(-1) == *block)))
    block.reset();
  return op.call(x, options.quant_type(), block, double_quant);
}

}  // namespace shoestring
