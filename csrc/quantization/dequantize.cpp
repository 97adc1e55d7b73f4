#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <shoestring/quantization/ops.h>

#include "core/call.h"
#include "quantization/packed.h"

namespace shoestring::quantization {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kDequantizeOp = "dequantize_";

void check_dequantize(const Tensor& out, const Tensor& packed, const Tensor& absmax,
                      const OptionalTensor& nested, c10::string_view quant_type, int64_t block_size) {
  const auto dtype = out.scalar_type();
  TORCH_CHECK((dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) && out.is_contiguous(),
              kDequantizeOp, ": out: expected a contiguous tensor of fp32, bf16 or fp16, received ", dtype,
              " with strides ", out.sym_strides());
  check_packed(kDequantizeOp, packed, absmax, nested, out.sym_numel(), quant_type, block_size, out.device());
}

template <Backend backend>
void run_dequantize(Tensor& out, const Tensor& packed, const Tensor& absmax, const OptionalTensor& nested,
                    c10::string_view quant_type, int64_t block_size) {
  check_dequantize(out, packed, absmax, nested, quant_type, block_size);
  const c10::OptionalDeviceGuard guard(out.device());
  PackedReader(backend, kDequantizeOp, packed, absmax, nested, quant_type, block_size).read(0, out);
}

void dequantize_meta(Tensor& out, const Tensor& packed, const Tensor& absmax, const OptionalTensor& nested,
                     c10::string_view quant_type, int64_t block_size) {
  check_dequantize(out, packed, absmax, nested, quant_type, block_size);
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) { m.impl(kDequantizeOp, run_dequantize<Backend::kCpu>); }
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) { m.impl(kDequantizeOp, run_dequantize<Backend::kCuda>); }
TORCH_LIBRARY_IMPL(shoestring, Meta, m) { m.impl(kDequantizeOp, dequantize_meta); }

}  // namespace

}  // namespace shoestring::quantization

namespace shoestring {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

void dequantize_(const Tensor& out, const Tensor& packed, const Tensor& absmax, const OptionalTensor& nested,
                 const QuantizeOptions& options) {
  static auto op = find<decltype(quantization::dequantize_meta)>("shoestring::dequantize_");
  Tensor to = out;
  op.call(to, packed, absmax, nested, options.quant_type(), options.block_size());
}

}  // namespace shoestring
