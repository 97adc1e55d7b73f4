#include <cmath>
#include <tuple>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <shoestring/ops.h>

#include "ops/call.h"
#include "ops/cuda.h"
#include "ops/packed_4bit.h"

namespace shoestring {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// A scale of the scales serves this many of them, and there are so many values for a scale's 8 bits.
constexpr int64_t kNestedBlock = 256;
constexpr int64_t kNestedHead = 1 + 256;  // offset and values, before the scales in `nested`

kernels::Codebook make_codebook(const float (&value)[16], const uint8_t (&order)[16]) {
  kernels::Codebook book;
  for (int i = 0; i < 16; ++i) {
    book.value[i] = value[i];
    book.order[i] = order[i];
  }
  for (int i = 0; i < 15; ++i) book.midpoint[i] = (value[order[i]] + value[order[i + 1]]) / 2;
  return book;
}

// NF4: quantiles of the normal distribution (QLoRA, arXiv 2305.14314).
const kernels::Codebook kNf4 = make_codebook(
    {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
     -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
     0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});

// FP4: a sign, two bits of exponent, one of mantissa, divided by the largest. Code 8, minus zero, takes the small
// positive numbers, as in bitsandbytes.
const kernels::Codebook kFp4 = make_codebook(
    {0.f, 0.0625f / 12, 8.f / 12, 1.f, 4.f / 12, 6.f / 12, 2.f / 12, 3.f / 12, 0.f, -0.0625f / 12, -8.f / 12, -1.f,
     -4.f / 12, -6.f / 12, -2.f / 12, -3.f / 12},
    {11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3});

void check_input(const Tensor& x, c10::string_view quant_type, int64_t block_size) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
              "quantize_4bit: x: expected fp32, bf16 or fp16, received ", dtype);
  codebook("quantize_4bit", quant_type);
  check_block_size("quantize_4bit", block_size);
}

const uint16_t* bits(const Tensor& t) { return static_cast<const uint16_t*>(t.const_data_ptr()); }

std::tuple<Tensor, Tensor> quantize_cpu(const Tensor& x, c10::string_view quant_type, int64_t block_size) {
  check_input(x, quant_type, block_size);
  const auto& book = codebook("quantize_4bit", quant_type);
  Tensor flat = x.contiguous();
  const int64_t count = flat.numel(), blocks = (count + block_size - 1) / block_size;
  Tensor packed = at::empty({(count + 1) / 2}, x.options().dtype(at::kByte));
  Tensor absmax = at::empty({blocks}, x.options().dtype(at::kFloat));
  uint8_t* bytes = packed.data_ptr<uint8_t>();
  float* scales = absmax.data_ptr<float>();
  const auto& kernels = cpu::quantize_4bit();
  const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 14) / block_size);
  at::parallel_for(0, blocks, grain, [&](int64_t first, int64_t last) {
    const int64_t begin = first * block_size, n = std::min(last * block_size, count) - begin;
    uint8_t* to = bytes + begin / 2;
    switch (flat.scalar_type()) {
      case at::kFloat:
        return kernels.quantize_float(flat.const_data_ptr<float>() + begin, n, block_size, book, to, scales + first);
      case at::kBFloat16:
        return kernels.quantize_bf16(bits(flat) + begin, n, block_size, book, to, scales + first);
      default:
        return kernels.quantize_fp16(bits(flat) + begin, n, block_size, book, to, scales + first);
    }
  });
  return {packed, absmax};
}

std::tuple<Tensor, Tensor> quantize_meta(const Tensor& x, c10::string_view quant_type, int64_t block_size) {
  check_input(x, quant_type, block_size);
  const auto count = x.sym_numel();
  return {at::empty_symint({(count + 1) / 2}, x.options().dtype(at::kByte)),
          at::empty_symint({(count + (block_size - 1)) / block_size}, x.options().dtype(at::kFloat))};
}

// The 256 values of the signed dynamic 8-bit type (8-bit optimizers, arXiv 2110.02861), ascending.
Tensor dynamic_map() {
  Tensor values = at::empty({256}, at::kFloat);
  float* v = values.data_ptr<float>();
  *v++ = 0;
  *v++ = 1;
  for (int i = 0; i < 7; ++i) {
    Tensor bounds = at::linspace(0.1, 1, (1 << i) + 1, at::kFloat);
    Tensor means = bounds.slice(0, 0, -1).add(bounds.slice(0, 1)).div(2).mul(std::pow(10.0, i - 6));
    const float* m = means.const_data_ptr<float>();
    for (int64_t k = 0; k < means.numel(); ++k) {
      *v++ = m[k];
      *v++ = -m[k];
    }
  }
  return std::get<0>(values.sort());
}

void check_scales(const Tensor& absmax) {
  TORCH_CHECK(absmax.scalar_type() == at::kFloat && absmax.dim() == 1,
              "quantize_absmax: absmax: expected a flat fp32 tensor, received ", absmax.sym_sizes(), " of ",
              absmax.scalar_type());
}

// The scales are few (one for 32 to 4096 weights), so PyTorch's own operators serve. A scale becomes the value nearest
// to its place on a grid of 65536 steps, which is how bitsandbytes' table finds it.
std::tuple<Tensor, Tensor> quantize_absmax_cpu(const Tensor& absmax) {
  check_scales(absmax);
  static const Tensor map = dynamic_map();
  const int64_t count = absmax.numel(), blocks = (count + kNestedBlock - 1) / kNestedBlock;
  Tensor values = map.to(absmax.device());
  if (count == 0) {
    return {at::empty({0}, absmax.options().dtype(at::kByte)), at::cat({at::zeros({1}, absmax.options()), values})};
  }
  Tensor offset = absmax.mean();
  Tensor centred =
      at::constant_pad_nd(absmax.sub(offset), {0, blocks * kNestedBlock - count}).view({blocks, kNestedBlock});
  Tensor scale = centred.abs().amax(1);
  Tensor grid = centred.mul(scale.reciprocal().nan_to_num(0, 0, 0).unsqueeze(1)).add(1).mul(32767.5).add(0.5).floor();
  Tensor midpoints = values.slice(0, 0, -1).add(values.slice(0, 1)).div(2);
  // Where all scales of a group are the offset, their own scale is 0 and any code serves; 0 is bitsandbytes'.
  Tensor codes = at::bucketize(grid.div(32767.5).sub(1), midpoints, /*out_int32=*/true)
                     .masked_fill(scale.eq(0).unsqueeze(1), 0);
  return {codes.to(at::kByte).view({-1}).slice(0, 0, count).contiguous(), at::cat({offset.view({1}), values, scale})};
}

std::tuple<Tensor, Tensor> quantize_absmax_meta(const Tensor& absmax) {
  check_scales(absmax);
  const auto count = absmax.sym_numel();
  return {at::empty_symint({count}, absmax.options().dtype(at::kByte)),
          at::empty_symint({(count + (kNestedBlock - 1)) / kNestedBlock + kNestedHead}, absmax.options())};
}

c10::SymInt product(c10::SymIntArrayRef shape) {
  c10::SymInt n = 1;
  for (const auto& size : shape) n = n * size;
  return n;
}

void check_output(c10::SymIntArrayRef shape, at::ScalarType dtype) {
  for (const auto& size : shape) {
    TORCH_CHECK(size >= 0, "dequantize_4bit: shape: expected sizes of 0 or more, received ", shape);
  }
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
              "dequantize_4bit: dtype: expected fp32, bf16 or fp16, received ", dtype);
}

Tensor dequantize_cpu(const Tensor& packed, const Tensor& absmax, const OptionalTensor& nested,
                      c10::SymIntArrayRef shape, at::ScalarType dtype, c10::string_view quant_type,
                      int64_t block_size) {
  check_output(shape, dtype);
  check_packed("dequantize_4bit", packed, absmax, nested, product(shape), quant_type, block_size, packed.device());
  Tensor out = at::empty_symint(shape, packed.options().dtype(dtype));
  PackedReader("dequantize_4bit", packed, absmax, nested, quant_type, block_size).read(0, out);
  return out;
}

Tensor dequantize_cuda(const Tensor& packed, const Tensor& absmax, const OptionalTensor& nested,
                       c10::SymIntArrayRef shape, at::ScalarType dtype, c10::string_view quant_type,
                       int64_t block_size) {
  check_output(shape, dtype);
  check_packed("dequantize_4bit", packed, absmax, nested, product(shape), quant_type, block_size, packed.device());
  const c10::OptionalDeviceGuard guard(packed.device());
  const auto& kernels = cuda::table<kernels::Dequantize4bitCuda>("dequantize_4bit");
  Tensor out = at::empty_symint(shape, packed.options().dtype(dtype));
  const PackedReader reader("dequantize_4bit", packed, absmax, nested, quant_type, block_size);
  const auto run = dtype == at::kFloat      ? kernels.dequantize_float
                   : dtype == at::kBFloat16 ? kernels.dequantize_bf16
                                            : kernels.dequantize_fp16;
  check_launch("dequantize_4bit", run(reader.view(), out.numel(), out.mutable_data_ptr(), stream_of(packed)));
  return out;
}

Tensor dequantize_meta(const Tensor& packed, const Tensor& absmax, const OptionalTensor& nested,
                       c10::SymIntArrayRef shape, at::ScalarType dtype, c10::string_view quant_type,
                       int64_t block_size) {
  check_output(shape, dtype);
  check_packed("dequantize_4bit", packed, absmax, nested, product(shape), quant_type, block_size, packed.device());
  return at::empty_symint(shape, packed.options().dtype(dtype));
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("quantize_4bit", quantize_cpu);
  m.impl("quantize_absmax", quantize_absmax_cpu);
  m.impl("dequantize_4bit", dequantize_cpu);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) { m.impl("dequantize_4bit", dequantize_cuda); }
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("quantize_4bit", quantize_meta);
  m.impl("quantize_absmax", quantize_absmax_meta);
  m.impl("dequantize_4bit", dequantize_meta);
}
// Rounding has no useful gradient: whoever asks for one is told so.
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  m.impl("quantize_4bit", torch::autograd::autogradNotImplementedFallback());
  m.impl("quantize_absmax", torch::autograd::autogradNotImplementedFallback());
  m.impl("dequantize_4bit", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace

const kernels::Codebook& codebook(const char* op, c10::string_view quant_type) {
  TORCH_CHECK(quant_type == "nf4" || quant_type == "fp4", op, ": quant_type: expected 'nf4' or 'fp4', received '",
              quant_type, "'");
  return quant_type == "nf4" ? kNf4 : kFp4;
}

void check_block_size(const char* op, int64_t block_size) {
  TORCH_CHECK(block_size >= 32 && block_size <= 4096 && (block_size & (block_size - 1)) == 0, op,
              ": block_size: expected a power of two from 32 to 4096, received ", block_size);
}

void check_packed(const char* op, const Tensor& packed, const Tensor& absmax, const OptionalTensor& nested,
                  const c10::SymInt& numel, c10::string_view quant_type, int64_t block_size, c10::Device device) {
  codebook(op, quant_type);
  check_block_size(op, block_size);
  TORCH_CHECK(packed.scalar_type() == at::kByte && packed.sym_numel() == (numel + 1) / 2, op,
              ": packed: expected ", (numel + 1) / 2, " bytes (uint8), two codes each, received ", packed.sym_numel(),
              " of ", packed.scalar_type());
  const auto blocks = (numel + (block_size - 1)) / block_size;
  const auto scale_type = nested.has_value() ? at::kByte : at::kFloat;
  TORCH_CHECK(absmax.scalar_type() == scale_type && absmax.sym_numel() == blocks, op, ": absmax: expected ", blocks,
              " scales of ", scale_type, ", received ", absmax.sym_numel(), " of ", absmax.scalar_type());
  TORCH_CHECK(packed.device() == device && absmax.device() == device, op, ": packed and absmax: expected the device ",
              device, ", received ", packed.device(), " and ", absmax.device());
  if (!nested.has_value()) return;
  const auto expected = (blocks + (kNestedBlock - 1)) / kNestedBlock + kNestedHead;
  TORCH_CHECK(nested->scalar_type() == at::kFloat && nested->sym_numel() == expected && nested->device() == device, op,
              ": nested: expected ", expected, " fp32 values on ", device, ", received ", nested->sym_numel(), " of ",
              nested->scalar_type(), " on ", nested->device());
}

PackedReader::PackedReader(const char* op, const Tensor& packed, const Tensor& absmax, const OptionalTensor& nested,
                           c10::string_view quant_type, int64_t block_size)
    : packed_(packed.contiguous()), absmax_(absmax.contiguous()) {
  view_ = {packed_.const_data_ptr<uint8_t>(), nullptr, nullptr, nullptr, block_size, &codebook(op, quant_type)};
  if (nested.has_value()) {
    nested_ = nested->contiguous();
    view_.codes = absmax_.const_data_ptr<uint8_t>();
    view_.nested = nested_.const_data_ptr<float>();
  } else {
    view_.absmax = absmax_.const_data_ptr<float>();
  }
}

void PackedReader::read(int64_t begin, const Tensor& out) const {
  const auto& kernels = cpu::dequantize_4bit();
  // Whole blocks for a thread, and enough of them that starting it pays.
  const int64_t grain = int64_t{1} << 15, count = out.numel();
  at::parallel_for(0, (count + grain - 1) / grain, 1, [&](int64_t first, int64_t last) {
    const int64_t from = first * grain, to = std::min(last * grain, count);
    switch (out.scalar_type()) {
      case at::kFloat:
        return kernels.dequantize_float(view_, begin + from, begin + to, out.data_ptr<float>() + from);
      case at::kBFloat16:
        return kernels.dequantize_bf16(view_, begin + from, begin + to,
                                       static_cast<uint16_t*>(out.mutable_data_ptr()) + from);
      default:
        return kernels.dequantize_fp16(view_, begin + from, begin + to,
                                       static_cast<uint16_t*>(out.mutable_data_ptr()) + from);
    }
  });
}

std::tuple<Tensor, Tensor> quantize_4bit(const Tensor& x, const Quantize4bitOptions& options) {
  static auto op = find<decltype(quantize_cpu)>("shoestring::quantize_4bit");
  return op.call(x, options.quant_type(), options.block_size());
}

std::tuple<Tensor, Tensor> quantize_absmax(const at::Tensor& absmax) {
  static auto op = find<std::tuple<Tensor, Tensor>(const Tensor&)>("shoestring::quantize_absmax");
  return op.call(absmax);
}

Tensor dequantize_4bit(const Tensor& packed, const Tensor& absmax, at::IntArrayRef shape, at::ScalarType dtype,
                       const OptionalTensor& nested, const Quantize4bitOptions& options) {
  static auto op = find<decltype(dequantize_cpu)>("shoestring::dequantize_4bit");
  return op.call(packed, absmax, nested, c10::fromIntArrayRefSlow(shape), dtype, options.quant_type(),
                 options.block_size());
}

}  // namespace shoestring
