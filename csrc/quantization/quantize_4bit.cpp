#include <cmath>
#include <functional>
#include <tuple>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <shoestring/quantization/ops.h>

#include "core/call.h"
#include "core/cuda.h"
#include "core/huge_pages.h"
#include "core/threads.h"
#include "quantization/fit_int4.h"
#include "quantization/packed.h"

namespace shoestring::quantization {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

void check_quantize_4bit(const Tensor& x, c10::string_view quant_type, int64_t block_size) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
              "quantize_4bit: x: expected fp32, bf16 or fp16, received ", dtype);
  codebook("quantize_4bit", quant_type);
  check_block_size("quantize_4bit", block_size);
}

// Returns the dtype of absmax, the scales of a 4-bit tensor. With int4, an int32 holds a bf16 scale and a
// bf16 offset.
at::ScalarType scale_type(c10::string_view quant_type) {
  return quant_type == "int4" ? at::kInt : at::kFloat;
}

// Allocates the packed codes and the scales (absmax) for a quantised x.
std::tuple<Tensor, Tensor> make_4bit_parts(const Tensor& x, c10::string_view quant_type, int64_t block_size) {
  const int64_t count = x.numel(), blocks = (count + block_size - 1) / block_size;
  return {in_huge_pages(at::empty({(count + 1) / 2}, x.options().dtype(at::kByte))),
          at::empty({blocks}, x.options().dtype(scale_type(quant_type)))};
}

// Calls the function for the dtype of x in a kernel table: quantize_float, quantize_bf16 or quantize_fp16.
template <class Kernels, class... Arguments>
void quantize_range(const Kernels& kernels, const Tensor& x, int64_t begin, Arguments... arguments) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return kernels.quantize_float(x.const_data_ptr<float>() + begin, arguments...);
    case at::kBFloat16:
      return kernels.quantize_bf16(const_bits(x) + begin, arguments...);
    default:
      return kernels.quantize_fp16(const_bits(x) + begin, arguments...);
  }
}

template <class Kernels>
auto function_for(const Kernels& kernels, const Tensor& x) {
  return x.scalar_type() == at::kFloat      ? kernels.quantize_float
         : x.scalar_type() == at::kBFloat16 ? kernels.quantize_bf16
                                            : kernels.quantize_fp16;
}

kernels::Int4Scale* int4_scales(const Tensor& absmax) {
  return reinterpret_cast<kernels::Int4Scale*>(absmax.mutable_data_ptr<int32_t>());
}

std::tuple<Tensor, Tensor> quantize_4bit_cpu(const Tensor& x, c10::string_view quant_type,
                                             int64_t block_size) {
  check_quantize_4bit(x, quant_type, block_size);
  const auto& book = codebook("quantize_4bit", quant_type);
  Tensor flat = x.contiguous();
  auto [packed, absmax] = make_4bit_parts(flat, quant_type, block_size);
  const int64_t count = flat.numel();
  uint8_t* bytes = packed.data_ptr<uint8_t>();
  const bool int4 = quant_type == "int4";
  // An element takes about half a nanosecond, and far longer if int4 is fitted.
  const int64_t grain = row_grain((int4 ? 256 : 16) * block_size);
  at::parallel_for(0, absmax.numel(), grain, [&](int64_t first, int64_t last) {
    const int64_t begin = first * block_size, n = std::min(last * block_size, count) - begin;
    uint8_t* to = bytes + begin / 2;
    if (int4) {
      quantize_range(cpu::quantize_int4(), flat, begin, n, block_size, to, int4_scales(absmax) + first);
    } else {
      float* scales = absmax.mutable_data_ptr<float>() + first;
      quantize_range(cpu::quantize_4bit(), flat, begin, n, block_size, std::cref(book), to, scales);
    }
  });
  return {packed, absmax};
}

std::tuple<Tensor, Tensor> quantize_4bit_cuda(const Tensor& x, c10::string_view quant_type,
                                              int64_t block_size) {
  check_quantize_4bit(x, quant_type, block_size);
  const c10::OptionalDeviceGuard guard(x.device());
  Tensor flat = x.contiguous();
  auto [packed, absmax] = make_4bit_parts(flat, quant_type, block_size);
  const void* from = flat.const_data_ptr();
  uint8_t* to = packed.mutable_data_ptr<uint8_t>();
  if (quant_type == "int4") {
    const auto run = function_for(cuda::table<kernels::QuantizeInt4Cuda>("quantize_int4"), flat);
    check_launch("quantize_4bit", run(from, flat.numel(), block_size, to, int4_scales(absmax), stream_of(x)));
  } else {
    const auto run = function_for(cuda::table<kernels::Quantize4bitCuda>("quantize_4bit"), flat);
    check_launch("quantize_4bit", run(from, flat.numel(), block_size, codebook("quantize_4bit", quant_type),
                                      to, absmax.mutable_data_ptr<float>(), stream_of(x)));
  }
  return {packed, absmax};
}

std::tuple<Tensor, Tensor> quantize_4bit_meta(const Tensor& x, c10::string_view quant_type,
                                              int64_t block_size) {
  check_quantize_4bit(x, quant_type, block_size);
  const auto count = x.sym_numel();
  return {
      at::empty_symint({(count + 1) / 2}, x.options().dtype(at::kByte)),
      at::empty_symint({(count + (block_size - 1)) / block_size}, x.options().dtype(scale_type(quant_type)))};
}

// Returns the 256 values of the signed dynamic 8-bit type (8-bit optimizers, arXiv 2110.02861) in ascending
// order.
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

// Quantises scales to 8 bits. There is only one scale for 32 to 4096 weights, so PyTorch's operators are fast
// enough. A scale is first rounded to a grid of 65536 steps and then to the nearest of the 256 values, as
// bitsandbytes' lookup table does. On CUDA the mean of the scales is summed in another order than on the CPU.
// Copying the 256 values to the GPU waits for the stream and cannot be captured in a CUDA graph. That is
// acceptable, because a weight is quantised only once.
std::tuple<Tensor, Tensor> quantize_absmax_any(const Tensor& absmax) {
  check_scales(absmax);
  const c10::OptionalDeviceGuard guard(absmax.device());
  static const Tensor map = dynamic_map();
  const int64_t count = absmax.numel(), blocks = (count + kNestedBlock - 1) / kNestedBlock;
  Tensor values = map.to(absmax.device());
  if (count == 0) {
    return {at::empty({0}, absmax.options().dtype(at::kByte)),
            at::cat({at::zeros({1}, absmax.options()), values})};
  }
  Tensor offset = absmax.mean();
  Tensor centred = at::constant_pad_nd(absmax.sub(offset), {0, blocks * kNestedBlock - count})
                       .view({blocks, kNestedBlock});
  Tensor scale = centred.abs().amax(1);
  Tensor grid =
      centred.mul(scale.reciprocal().nan_to_num(0, 0, 0).unsqueeze(1)).add(1).mul(32767.5).add(0.5).floor();
  Tensor midpoints = values.slice(0, 0, -1).add(values.slice(0, 1)).div(2);
  // If all 256 scales of a group equal the offset, their second-level scale is 0, so any code gives the right
  // result. bitsandbytes uses code 0.
  Tensor codes = at::bucketize(grid.div(32767.5).sub(1), midpoints, /*out_int32=*/true)
                     .masked_fill(scale.eq(0).unsqueeze(1), 0);
  return {codes.to(at::kByte).view({-1}).slice(0, 0, count).contiguous(),
          at::cat({offset.view({1}), values, scale})};
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

void check_dequantize_4bit(c10::SymIntArrayRef shape, at::ScalarType dtype, c10::string_view quant_type) {
  codebook("dequantize_4bit", quant_type);
  for (const auto& size : shape) {
    TORCH_CHECK(size >= 0, "dequantize_4bit: shape: expected sizes of 0 or more, received ", shape);
  }
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
              "dequantize_4bit: dtype: expected fp32, bf16 or fp16, received ", dtype);
}

template <Backend backend>
Tensor run_dequantize_4bit(const Tensor& packed, const Tensor& absmax, const OptionalTensor& nested,
                           c10::SymIntArrayRef shape, at::ScalarType dtype, c10::string_view quant_type,
                           int64_t block_size) {
  check_dequantize_4bit(shape, dtype, quant_type);
  check_packed("dequantize_4bit", packed, absmax, nested, product(shape), quant_type, block_size,
               packed.device());
  const c10::OptionalDeviceGuard guard(packed.device());
  Tensor out = in_huge_pages(at::empty_symint(shape, packed.options().dtype(dtype)));
  PackedReader(backend, "dequantize_4bit", packed, absmax, nested, quant_type, block_size).read(0, out);
  return out;
}

Tensor dequantize_4bit_meta(const Tensor& packed, const Tensor& absmax, const OptionalTensor& nested,
                            c10::SymIntArrayRef shape, at::ScalarType dtype, c10::string_view quant_type,
                            int64_t block_size) {
  check_dequantize_4bit(shape, dtype, quant_type);
  check_packed("dequantize_4bit", packed, absmax, nested, product(shape), quant_type, block_size,
               packed.device());
  return at::empty_symint(shape, packed.options().dtype(dtype));
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("quantize_4bit", quantize_4bit_cpu);
  m.impl("quantize_absmax", quantize_absmax_any);
  m.impl("dequantize_4bit", run_dequantize_4bit<Backend::kCpu>);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("quantize_4bit", quantize_4bit_cuda);
  m.impl("quantize_absmax", quantize_absmax_any);
  m.impl("dequantize_4bit", run_dequantize_4bit<Backend::kCuda>);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("quantize_4bit", quantize_4bit_meta);
  m.impl("quantize_absmax", quantize_absmax_meta);
  m.impl("dequantize_4bit", dequantize_4bit_meta);
}
// quantize_4bit, quantize_absmax and dequantize_4bit have no useful gradient, because quantisation rounds.
// Autograd raises an error if backward reaches one of them.
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  m.impl("quantize_4bit", torch::autograd::autogradNotImplementedFallback());
  m.impl("quantize_absmax", torch::autograd::autogradNotImplementedFallback());
  m.impl("dequantize_4bit", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace

}  // namespace shoestring::quantization

namespace shoestring {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

std::tuple<Tensor, Tensor> quantize_4bit(const Tensor& x, const QuantizeOptions& options) {
  static auto op = find<decltype(quantization::quantize_4bit_cpu)>("shoestring::quantize_4bit");
  return op.call(x, options.quant_type(), options.block_size());
}

std::tuple<Tensor, Tensor> quantize_absmax(const at::Tensor& absmax) {
  static auto op = find<std::tuple<Tensor, Tensor>(const Tensor&)>("shoestring::quantize_absmax");
  return op.call(absmax);
}

Tensor dequantize_4bit(const Tensor& packed, const Tensor& absmax, at::IntArrayRef shape,
                       at::ScalarType dtype, const OptionalTensor& nested, const QuantizeOptions& options) {
  static auto op = find<decltype(quantization::dequantize_4bit_meta)>("shoestring::dequantize_4bit");
  return op.call(packed, absmax, nested, c10::fromIntArrayRefSlow(shape), dtype, options.quant_type(),
                 options.block_size());
}

}  // namespace shoestring
