#include <optional>
#include <tuple>

#include <ATen/Functions.h>
#include <torch/library.h>

#include <shoestring/quantization/ops.h>

#include "core/call.h"
#include "core/cuda.h"
#include "quantization/quantize_state_4bit_table.h"
#include "quantization/state_blocks.h"

namespace shoestring::quantization {
namespace {

using at::Tensor;
using kernels::kBlockBytes4;

int64_t state_4bit_scales(bool is_signed) {
  return is_signed ? kernels::kScales4<true> : kernels::kScales4<false>;
}

kernels::Rounding4 state_4bit_rounding(std::optional<int64_t> step) {
  return step ? kernels::dithered4(static_cast<uint32_t>(*step)) : kernels::Rounding4{};
}

std::tuple<Tensor, Tensor> make_state_4bit_parts(const Tensor& x, bool is_signed) {
  TORCH_CHECK(x.scalar_type() == at::kFloat, "quantize_state_4bit: x: expected fp32, received ",
              x.scalar_type(), "; call x.float()");
  const c10::SymInt blocks = state_blocks(x.sym_numel());
  return {at::empty_symint({blocks * kBlockBytes4}, x.options().dtype(at::kByte)),
          at::empty_symint({blocks * state_4bit_scales(is_signed)}, x.options())};
}

Tensor empty_state_4bit_values(const Tensor& codes, const Tensor& scale, bool is_signed,
                               const c10::SymInt& numel) {
  constexpr const char* op = "dequantize_state_4bit";
  TORCH_CHECK(numel >= 0, op, ": numel: expected at least 0, received ", numel);
  const c10::SymInt blocks = state_blocks(numel), bytes = blocks * kBlockBytes4,
                    scales = blocks * state_4bit_scales(is_signed);
  TORCH_CHECK(codes.scalar_type() == at::kByte && codes.dim() == 1 && codes.sym_size(0) == bytes, op,
              ": codes: expected uint8 of shape (", bytes, ") for ", numel, " elements, received ",
              codes.scalar_type(), " ", codes.sym_sizes());
  TORCH_CHECK(scale.scalar_type() == at::kFloat && scale.dim() == 1 && scale.sym_size(0) == scales, op,
              ": scale: expected fp32 of shape (", scales, ") for ", numel, " elements, received ",
              scale.scalar_type(), " ", scale.sym_sizes());
  TORCH_CHECK(scale.device() == codes.device(), op, ": scale: expected codes' device, ", codes.device(),
              ", received ", scale.device());
  return at::empty_symint({numel}, scale.options());
}

std::tuple<Tensor, Tensor> quantize_state_4bit_cpu(const Tensor& x, bool is_signed,
                                                   std::optional<int64_t> step) {
  auto [codes, scale] = make_state_4bit_parts(x, is_signed);
  const Tensor source = x.contiguous();
  const float* in = source.const_data_ptr<float>();
  uint8_t* out = codes.data_ptr<uint8_t>();
  float* scales = scale.data_ptr<float>();
  const auto& kernels = cpu::quantize_state_4bit();
  for_state_blocks(x.numel(), [&](int64_t block, int64_t first, int64_t count) {
    kernels.quantize(in + first, count, is_signed, state_4bit_rounding(step), out + block * kBlockBytes4,
                     scales + block * state_4bit_scales(is_signed));
  });
  return {codes, scale};
}

Tensor dequantize_state_4bit_cpu(const Tensor& codes, const Tensor& scale, bool is_signed, int64_t numel) {
  Tensor x = empty_state_4bit_values(codes, scale, is_signed, numel);
  const Tensor source = codes.contiguous(), factors = scale.contiguous();
  const uint8_t* in = source.const_data_ptr<uint8_t>();
  const float* scales = factors.const_data_ptr<float>();
  float* out = x.data_ptr<float>();
  const auto& kernels = cpu::quantize_state_4bit();
  for_state_blocks(numel, [&](int64_t block, int64_t first, int64_t count) {
    kernels.dequantize(in + block * kBlockBytes4, scales + block * state_4bit_scales(is_signed), count,
                       is_signed, out + first);
  });
  return x;
}

const kernels::QuantizeState4bitCuda& state_4bit_cuda_kernels() {
  return cuda::table<kernels::QuantizeState4bitCuda>("quantize_state_4bit");
}

std::tuple<Tensor, Tensor> quantize_state_4bit_cuda(const Tensor& x, bool is_signed,
                                                    std::optional<int64_t> step) {
  const c10::OptionalDeviceGuard guard(x.device());
  auto [codes, scale] = make_state_4bit_parts(x, is_signed);
  const Tensor source = x.contiguous();
  check_launch("quantize_state_4bit",
               state_4bit_cuda_kernels().quantize(source.const_data_ptr<float>(), x.numel(), is_signed,
                                                  state_4bit_rounding(step), codes.data_ptr<uint8_t>(),
                                                  scale.data_ptr<float>(), stream_of(x)));
  return {codes, scale};
}

Tensor dequantize_state_4bit_cuda(const Tensor& codes, const Tensor& scale, bool is_signed, int64_t numel) {
  const c10::OptionalDeviceGuard guard(codes.device());
  Tensor x = empty_state_4bit_values(codes, scale, is_signed, numel);
  Tensor source = codes.contiguous();
  // The CUDA kernel reads the codes in 4-byte words, so they must be aligned to 4 bytes.
  if (reinterpret_cast<uintptr_t>(source.const_data_ptr()) % 4 != 0) source = source.clone();
  const Tensor factors = scale.contiguous();
  check_launch("dequantize_state_4bit", state_4bit_cuda_kernels().dequantize(
                                            source.const_data_ptr<uint8_t>(), factors.const_data_ptr<float>(),
                                            numel, is_signed, x.data_ptr<float>(), stream_of(codes)));
  return x;
}

std::tuple<Tensor, Tensor> quantize_state_4bit_meta(const Tensor& x, bool is_signed, std::optional<int64_t>) {
  return make_state_4bit_parts(x, is_signed);
}

Tensor dequantize_state_4bit_meta(const Tensor& codes, const Tensor& scale, bool is_signed,
                                  c10::SymInt numel) {
  return empty_state_4bit_values(codes, scale, is_signed, numel);
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("quantize_state_4bit", quantize_state_4bit_cpu);
  m.impl("dequantize_state_4bit", dequantize_state_4bit_cpu);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("quantize_state_4bit", quantize_state_4bit_cuda);
  m.impl("dequantize_state_4bit", dequantize_state_4bit_cuda);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("quantize_state_4bit", quantize_state_4bit_meta);
  m.impl("dequantize_state_4bit", dequantize_state_4bit_meta);
}

}  // namespace

}  // namespace shoestring::quantization

namespace shoestring {

using at::Tensor;

std::tuple<Tensor, Tensor> quantize_state_4bit(const Tensor& x, bool is_signed, std::optional<int64_t> step) {
  static auto op = find<decltype(quantization::quantize_state_4bit_cpu)>("shoestring::quantize_state_4bit");
  return op.call(x, is_signed, step);
}

Tensor dequantize_state_4bit(const Tensor& codes, const Tensor& scale, bool is_signed, int64_t numel) {
  static auto op =
      find<decltype(quantization::dequantize_state_4bit_meta)>("shoestring::dequantize_state_4bit");
  return op.call(codes, scale, is_signed, numel);
}

}  // namespace shoestring
