#include <tuple>

#include <ATen/Functions.h>
#include <torch/library.h>

#include <shoestring/quantization/ops.h>

#include "core/call.h"
#include "core/cuda.h"
#include "quantization/quantize_8bit_table.h"
#include "quantization/state_blocks.h"

namespace shoestring::quantization {
namespace {

using at::Tensor;

void check_quantize_8bit(const Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kFloat, "quantize_8bit: x: expected fp32, received ", x.scalar_type(),
              "; call x.float()");
}

void check_dequantize_8bit(const Tensor& codes, const Tensor& scale) {
  constexpr const char* op = "dequantize_8bit";
  TORCH_CHECK(codes.scalar_type() == at::kByte, op, ": codes: expected uint8, received ",
              codes.scalar_type());
  const c10::SymInt blocks = state_blocks(codes.sym_numel());
  TORCH_CHECK(scale.scalar_type() == at::kFloat && scale.dim() == 1 && scale.sym_size(0) == blocks, op,
              ": scale: expected fp32 of shape (", blocks, "), received ", scale.scalar_type(), " ",
              scale.sym_sizes());
  TORCH_CHECK(scale.device() == codes.device(), op, ": scale: expected codes' device, ", codes.device(),
              ", received ", scale.device());
}

std::tuple<Tensor, Tensor> make_8bit_parts(const Tensor& x) {
  check_quantize_8bit(x);
  return {at::empty_symint(x.sym_sizes(), x.options().dtype(at::kByte)),
          at::empty_symint({state_blocks(x.sym_numel())}, x.options())};
}

std::tuple<Tensor, Tensor> quantize_8bit_cpu(const Tensor& x, bool is_signed) {
  auto [codes, scale] = make_8bit_parts(x);
  const Tensor source = x.contiguous();
  const float* in = source.const_data_ptr<float>();
  uint8_t* out = codes.data_ptr<uint8_t>();
  float* scales = scale.data_ptr<float>();
  const auto& kernels = cpu::quantize_8bit();
  for_state_blocks(x.numel(), [&](int64_t block, int64_t first, int64_t count) {
    kernels.quantize(in + first, count, is_signed, out + first, scales + block);
  });
  return {codes, scale};
}

Tensor dequantize_8bit_cpu(const Tensor& codes, const Tensor& scale, bool is_signed) {
  check_dequantize_8bit(codes, scale);
  const Tensor source = codes.contiguous(), factors = scale.contiguous();
  Tensor x = at::empty(codes.sizes(), scale.options());
  const uint8_t* in = source.const_data_ptr<uint8_t>();
  const float* scales = factors.const_data_ptr<float>();
  float* out = x.data_ptr<float>();
  const auto& kernels = cpu::quantize_8bit();
  for_state_blocks(codes.numel(), [&](int64_t block, int64_t first, int64_t count) {
    kernels.dequantize(in + first, scales + block, count, is_signed, out + first);
  });
  return x;
}

std::tuple<Tensor, Tensor> quantize_8bit_cuda(const Tensor& x, bool is_signed) {
  const c10::OptionalDeviceGuard guard(x.device());
  auto [codes, scale] = make_8bit_parts(x);
  const Tensor source = x.contiguous();
  check_launch("quantize_8bit",
               cuda::table<kernels::Quantize8bitCuda>("quantize_8bit")
                   .quantize(source.const_data_ptr<float>(), x.numel(), is_signed, codes.data_ptr<uint8_t>(),
                             scale.data_ptr<float>(), stream_of(x)));
  return {codes, scale};
}

Tensor dequantize_8bit_cuda(const Tensor& codes, const Tensor& scale, bool is_signed) {
  check_dequantize_8bit(codes, scale);
  const c10::OptionalDeviceGuard guard(codes.device());
  const Tensor source = codes.contiguous(), factors = scale.contiguous();
  Tensor x = at::empty(codes.sizes(), scale.options());
  check_launch("dequantize_8bit",
               cuda::table<kernels::Quantize8bitCuda>("quantize_8bit")
                   .dequantize(source.const_data_ptr<uint8_t>(), factors.const_data_ptr<float>(),
                               codes.numel(), is_signed, x.data_ptr<float>(), stream_of(codes)));
  return x;
}

std::tuple<Tensor, Tensor> quantize_8bit_meta(const Tensor& x, bool) { return make_8bit_parts(x); }

Tensor dequantize_8bit_meta(const Tensor& codes, const Tensor& scale, bool) {
  check_dequantize_8bit(codes, scale);
  return at::empty_symint(codes.sym_sizes(), scale.options());
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("quantize_8bit", quantize_8bit_cpu);
  m.impl("dequantize_8bit", dequantize_8bit_cpu);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("quantize_8bit", quantize_8bit_cuda);
  m.impl("dequantize_8bit", dequantize_8bit_cuda);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("quantize_8bit", quantize_8bit_meta);
  m.impl("dequantize_8bit", dequantize_8bit_meta);
}

}  // namespace

}  // namespace shoestring::quantization

namespace shoestring {

using at::Tensor;

std::tuple<Tensor, Tensor> quantize_8bit(const Tensor& x, bool is_signed) {
  static auto op = find<decltype(quantization::quantize_8bit_cpu)>("shoestring::quantize_8bit");
  return op.call(x, is_signed);
}

Tensor dequantize_8bit(const Tensor& codes, const Tensor& scale, bool is_signed) {
  static auto op = find<decltype(quantization::dequantize_8bit_cpu)>("shoestring::dequantize_8bit");
  return op.call(codes, scale, is_signed);
}

}  // namespace shoestring
