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
#include "quantization/packed.h"

namespace shoestring::quantization {
namespace {

using at::Tensor;

constexpr const char* kQuantizeInt8Op = "quantize_int8";
constexpr const char* kDequantizeInt8Op = "dequantize_int8";

void check_quantize_int8(const Tensor& x) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, kQuantizeInt8Op,
              ": x: expected fp32, bf16 or fp16, received ", dtype);
  TORCH_CHECK(x.dim() >= 1 && x.sym_size(-1) >= 1, kQuantizeInt8Op,
              ": x: expected shape (..., columns) with one column or more, received ", x.sym_sizes());
}

std::tuple<Tensor, Tensor> make_int8_parts(const Tensor& x) {
  check_quantize_int8(x);
  return {at::empty_symint(x.sym_sizes(), x.options().dtype(at::kChar)),
          at::empty_symint(x.sym_sizes().slice(0, x.dim() - 1), x.options().dtype(at::kFloat))};
}

std::tuple<Tensor, Tensor> quantize_int8_cpu(const Tensor& x) {
  auto [packed, absmax] = make_int8_parts(x);
  const Tensor source = x.contiguous();
  const int64_t columns = x.size(-1);
  int8_t* codes = packed.data_ptr<int8_t>();
  float* scales = absmax.data_ptr<float>();
  const auto& kernels = cpu::quantize_int8();
  at::parallel_for(0, absmax.numel(), row_grain(8 * columns), [&](int64_t first, int64_t last) {
    const int64_t begin = first * columns, rows = last - first;
    switch (source.scalar_type()) {
      case at::kFloat:
        return kernels.quantize_float(source.const_data_ptr<float>() + begin, rows, columns, codes + begin,
                                      scales + first);
      case at::kBFloat16:
        return kernels.quantize_bf16(const_bits(source) + begin, rows, columns, codes + begin,
                                     scales + first);
      default:
        return kernels.quantize_fp16(const_bits(source) + begin, rows, columns, codes + begin,
                                     scales + first);
    }
  });
  return {packed, absmax};
}

std::tuple<Tensor, Tensor> quantize_int8_cuda(const Tensor& x) {
  const c10::OptionalDeviceGuard guard(x.device());
  auto [packed, absmax] = make_int8_parts(x);
  const auto& kernels = cuda::table<kernels::QuantizeInt8Cuda>(kQuantizeInt8Op);
  const Tensor source = x.contiguous();
  const auto run = source.scalar_type() == at::kFloat      ? kernels.quantize_float
                   : source.scalar_type() == at::kBFloat16 ? kernels.quantize_bf16
                                                           : kernels.quantize_fp16;
  check_launch(kQuantizeInt8Op,
               run(source.const_data_ptr(), absmax.numel(), x.size(-1), packed.mutable_data_ptr<int8_t>(),
                   absmax.mutable_data_ptr<float>(), stream_of(x)));
  return {packed, absmax};
}

void check_dequantize_int8(const Tensor& packed, const Tensor& absmax, at::ScalarType dtype) {
  TORCH_CHECK(packed.scalar_type() == at::kChar && packed.dim() >= 1 && packed.sym_size(-1) >= 1,
              kDequantizeInt8Op,
              ": packed: expected int8 of shape (..., columns) with one column or more, received ",
              packed.scalar_type(), " ", packed.sym_sizes());
  const auto rows = packed.sym_sizes().slice(0, packed.dim() - 1);
  TORCH_CHECK(
      absmax.scalar_type() == at::kFloat && absmax.sym_sizes() == rows && absmax.device() == packed.device(),
      kDequantizeInt8Op, ": absmax: expected fp32 of shape ", rows, ", a scale for each row, on ",
      packed.device(), ", received ", absmax.scalar_type(), " ", absmax.sym_sizes(), " on ", absmax.device());
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, kDequantizeInt8Op,
              ": dtype: expected fp32, bf16 or fp16, received ", dtype);
}

template <Backend backend>
Tensor run_dequantize_int8(const Tensor& packed, const Tensor& absmax, at::ScalarType dtype) {
  check_dequantize_int8(packed, absmax, dtype);
  const c10::OptionalDeviceGuard guard(packed.device());
  Tensor out = in_huge_pages(at::empty(packed.sizes(), packed.options().dtype(dtype)));
  PackedReader(backend, kDequantizeInt8Op, packed, absmax, std::nullopt, "int8", packed.size(-1))
      .read(0, out);
  return out;
}

Tensor dequantize_int8_meta(const Tensor& packed, const Tensor& absmax, at::ScalarType dtype) {
  check_dequantize_int8(packed, absmax, dtype);
  return at::empty_symint(packed.sym_sizes(), packed.options().dtype(dtype));
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("quantize_int8", quantize_int8_cpu);
  m.impl("dequantize_int8", run_dequantize_int8<Backend::kCpu>);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("quantize_int8", quantize_int8_cuda);
  m.impl("dequantize_int8", run_dequantize_int8<Backend::kCuda>);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("quantize_int8", make_int8_parts);
  m.impl("dequantize_int8", dequantize_int8_meta);
}
// quantize_int8 and dequantize_int8 have no useful gradient, because quantisation rounds. Autograd raises an
// error if backward reaches one of them.
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  m.impl("quantize_int8", torch::autograd::autogradNotImplementedFallback());
  m.impl("dequantize_int8", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace

}  // namespace shoestring::quantization

namespace shoestring {

using at::Tensor;

std::tuple<Tensor, Tensor> quantize_int8(const Tensor& x) {
  static auto op = find<decltype(quantization::quantize_int8_cpu)>("shoestring::quantize_int8");
  return op.call(x);
}

Tensor dequantize_int8(const Tensor& packed, const Tensor& absmax, at::ScalarType dtype) {
  static auto op = find<decltype(quantization::dequantize_int8_meta)>("shoestring::dequantize_int8");
  return op.call(packed, absmax, dtype);
}

}  // namespace shoestring
