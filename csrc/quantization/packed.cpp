#include "quantization/packed.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "core/cuda.h"
#include "core/threads.h"
#include "quantization/quantized_matvec_table.h"

namespace shoestring::quantization {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

namespace {

kernels::Codebook make_codebook(const float (&value)[16], const uint8_t (&order)[16]) {
  kernels::Codebook book;
  for (int i = 0; i < 16; ++i) {
    book.value[i] = value[i];
    book.order[i] = order[i];
  }
  for (int i = 0; i < 15; ++i) book.midpoint[i] = (value[order[i]] + value[order[i + 1]]) / 2;
  return book;
}

// The 16 values of NF4: quantiles of the normal distribution (QLoRA, arXiv 2305.14314).
const kernels::Codebook kNf4 =
    make_codebook({-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
                   -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
                   0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
                   0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f},
                  {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});

// The 16 values of FP4: one sign bit, two exponent bits and one mantissa bit, divided by the largest value.
// Positive numbers that round to zero get code 8, which is minus zero, as in bitsandbytes.
const kernels::Codebook kFp4 =
    make_codebook({0.f, 0.0625f / 12, 8.f / 12, 1.f, 4.f / 12, 6.f / 12, 2.f / 12, 3.f / 12, 0.f,
                   -0.0625f / 12, -8.f / 12, -1.f, -4.f / 12, -6.f / 12, -2.f / 12, -3.f / 12},
                  {11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3});

// The 16 values of int4, before scale and offset are applied: the integers -8 to 7 (quantization/fit_int4.h).
const kernels::Codebook kInt4 = make_codebook({-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
                                              {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});

}  // namespace

const kernels::Codebook& codebook(const char* op, c10::string_view quant_type) {
  TORCH_CHECK(quant_type == "nf4" || quant_type == "fp4" || quant_type == "int4", op,
              ": quant_type: expected 'nf4', 'fp4' or 'int4', received '", quant_type, "'");
  return quant_type == "nf4" ? kNf4 : quant_type == "fp4" ? kFp4 : kInt4;
}

void check_block_size(const char* op, int64_t block_size) {
  TORCH_CHECK(block_size >= 32 && block_size <= 4096 && (block_size & (block_size - 1)) == 0, op,
              ": block_size: expected a power of two from 32 to 4096, received ", block_size);
}

namespace {

void check_sizes(const char* op, const Tensor& packed, const Tensor& absmax, const OptionalTensor& nested,
                 const c10::SymInt& numel, bool offset, int64_t block_size) {
  TORCH_CHECK(packed.scalar_type() == at::kByte && packed.sym_numel() == (numel + 1) / 2, op,
              ": packed: expected ", (numel + 1) / 2, " bytes (uint8), two codes each, received ",
              packed.sym_numel(), " of ", packed.scalar_type());
  const auto blocks = (numel + (block_size - 1)) / block_size;
  TORCH_CHECK(!offset || !nested.has_value(), op,
              ": nested: expected none with quant_type 'int4', received a tensor");
  const auto scale_type = offset ? at::kInt : nested.has_value() ? at::kByte : at::kFloat;
  TORCH_CHECK(absmax.scalar_type() == scale_type && absmax.sym_numel() == blocks, op, ": absmax: expected ",
              blocks, " scales of ", scale_type, ", received ", absmax.sym_numel(), " of ",
              absmax.scalar_type());
  if (!nested.has_value()) return;
  const auto expected = (blocks + (kNestedBlock - 1)) / kNestedBlock + kNestedHead;
  TORCH_CHECK(nested->scalar_type() == at::kFloat && nested->sym_numel() == expected &&
                  nested->device() == packed.device(),
              op, ": nested: expected ", expected, " fp32 values on ", packed.device(), ", received ",
              nested->sym_numel(), " of ", nested->scalar_type(), " on ", nested->device());
}

void check_sizes_int8(const char* op, const Tensor& packed, const Tensor& absmax,
                      const OptionalTensor& nested, const c10::SymInt& numel, int64_t block_size) {
  TORCH_CHECK(packed.scalar_type() == at::kChar && packed.sym_numel() == numel, op, ": packed: expected ",
              numel, " codes (int8), received ", packed.sym_numel(), " of ", packed.scalar_type());
  TORCH_CHECK(block_size >= 1, op, ": block_size: expected the length of an int8 weight's rows, received ",
              block_size);
  TORCH_CHECK(absmax.scalar_type() == at::kFloat && absmax.sym_numel() * block_size == numel, op,
              ": absmax: expected a scale (Float) for every block_size = ", block_size, " of ", numel,
              " codes, where block_size is the length of an int8 weight's rows, received ",
              absmax.sym_numel(), " of ", absmax.scalar_type());
  TORCH_CHECK(!nested.has_value(), op, ": nested: expected none with quant_type 'int8', received a tensor");
}

const auto& table_of(const kernels::Packed&) { return cpu::dequantize_4bit(); }
const auto& table_of(const kernels::PackedInt8&) { return cpu::dequantize_int8(); }
const auto& cuda_table_of(const kernels::Packed&) {
  return cuda::table<kernels::Dequantize4bitCuda>("dequantize_4bit");
}
const auto& cuda_table_of(const kernels::PackedInt8&) {
  return cuda::table<kernels::DequantizeInt8Cuda>("dequantize_int8");
}

}  // namespace

void check_packed(const char* op, const Tensor& packed, const Tensor& absmax, const OptionalTensor& nested,
                  const c10::SymInt& numel, c10::string_view quant_type, int64_t block_size,
                  c10::Device device) {
  TORCH_CHECK(quant_type == "nf4" || quant_type == "fp4" || quant_type == "int4" || quant_type == "int8", op,
              ": quant_type: expected 'nf4', 'fp4', 'int4' or 'int8', received '", quant_type, "'");
  TORCH_CHECK(packed.device() == device && absmax.device() == device, op,
              ": packed and absmax: expected the device ", device, ", received ", packed.device(), " and ",
              absmax.device());
  if (quant_type == "int8") return check_sizes_int8(op, packed, absmax, nested, numel, block_size);
  check_block_size(op, block_size);
  check_sizes(op, packed, absmax, nested, numel, quant_type == "int4", block_size);
}

PackedReader::PackedReader(Backend backend, const char* op, const Tensor& packed, const Tensor& absmax,
                           const OptionalTensor& nested, c10::string_view quant_type, int64_t block_size)
    : backend_(backend), op_(op), packed_(packed.contiguous()), absmax_(absmax.contiguous()) {
  if (quant_type == "int8") {
    view_ =
        kernels::PackedInt8{packed_.const_data_ptr<int8_t>(), absmax_.const_data_ptr<float>(), block_size};
    return;
  }
  kernels::Packed view{packed_.const_data_ptr<uint8_t>(), nullptr, nullptr, nullptr, nullptr, block_size,
                       &codebook(op, quant_type)};
  if (quant_type == "int4") {
    view.offset = reinterpret_cast<const uint32_t*>(absmax_.const_data_ptr<int32_t>());
  } else if (nested.has_value()) {
    nested_ = nested->contiguous();
    view.codes = absmax_.const_data_ptr<uint8_t>();
    view.nested = nested_.const_data_ptr<float>();
  } else {
    view.absmax = absmax_.const_data_ptr<float>();
  }
  view_ = view;
}

void PackedReader::read(int64_t begin, const Tensor& out) const {
  backend_ == Backend::kCpu ? read_cpu(begin, out) : read_cuda(begin, out);
}

void PackedReader::read(int64_t begin, int64_t count, float* out) const {
  std::visit([&](const auto& view) { table_of(view).dequantize_float(view, begin, begin + count, out); },
             view_);
}

void PackedReader::read(int64_t begin, int64_t count, uint16_t* out) const {
  std::visit([&](const auto& view) { table_of(view).dequantize_bf16(view, begin, begin + count, out); },
             view_);
}

void PackedReader::read_cpu(int64_t begin, const Tensor& out) const {
  // Elements per task: a multiple of every block size, so that each task has whole blocks.
  const int64_t each = int64_t{1} << 15, count = out.numel();
  at::parallel_for(0, (count + each - 1) / each, row_grain(12 * each), [&](int64_t first, int64_t last) {
    const int64_t from = first * each, to = std::min(last * each, count);
    std::visit(
        [&](const auto& view) {
          const auto& kernels = table_of(view);
          switch (out.scalar_type()) {
            case at::kFloat:
              return kernels.dequantize_float(view, begin + from, begin + to, out.data_ptr<float>() + from);
            case at::kBFloat16:
              return kernels.dequantize_bf16(view, begin + from, begin + to,
                                             static_cast<uint16_t*>(out.mutable_data_ptr()) + from);
            default:
              return kernels.dequantize_fp16(view, begin + from, begin + to,
                                             static_cast<uint16_t*>(out.mutable_data_ptr()) + from);
          }
        },
        view_);
  });
}

// With more tokens than kFewTokens, dequantising the weight panel by panel and calling a GEMM is faster than
// multiply().
constexpr int64_t kFewTokens = 16;

bool PackedReader::multiplies(int64_t tokens, int64_t columns) const {
  const auto* view = std::get_if<kernels::Packed>(&view_);
  return backend_ == Backend::kCpu && tokens <= kFewTokens && columns > 0 &&
         (view == nullptr || columns % view->block_size == 0);
}

Tensor PackedReader::multiply(const Tensor& x, int64_t rows) const {
  const int64_t tokens = x.size(0), columns = x.size(1);
  const bool halves = std::holds_alternative<kernels::Packed>(view_);
  const Tensor sorted = (halves ? x.reshape({tokens, columns / 2, 2}).transpose(1, 2) : x).contiguous();
  const float* from = sorted.const_data_ptr<float>();
  Tensor out = at::empty({tokens, rows}, x.options());
  float* to = out.mutable_data_ptr<float>();
  const auto& kernels = cpu::quantized_matvec();
  const int64_t passes = (tokens + kernels::kMatvecTokens - 1) / kernels::kMatvecTokens;
  at::parallel_for(0, rows, row_grain(12 * columns * passes), [&](int64_t first, int64_t last) {
    for (int64_t t = 0; t < tokens; t += kernels::kMatvecTokens) {
      const int64_t count = std::min(kernels::kMatvecTokens, tokens - t);
      if (const auto* view = std::get_if<kernels::Packed>(&view_)) {
        kernels.multiply_4bit(*view, first, last, columns, from + t * columns, count, to + t * rows, rows);
      } else {
        kernels.multiply_int8(std::get<kernels::PackedInt8>(view_), first, last, columns, from + t * columns,
                              count, to + t * rows, rows);
      }
    }
  });
  return out;
}

void PackedReader::read_cuda(int64_t begin, const Tensor& out) const {
  std::visit(
      [&](const auto& view) {
        const auto& kernels = cuda_table_of(view);
        const auto run = out.scalar_type() == at::kFloat      ? kernels.dequantize_float
                         : out.scalar_type() == at::kBFloat16 ? kernels.dequantize_bf16
                                                              : kernels.dequantize_fp16;
        check_launch(op_, run(view, begin, out.numel(), out.mutable_data_ptr(), stream_of(packed_)));
      },
      view_);
}

}  // namespace shoestring::quantization
