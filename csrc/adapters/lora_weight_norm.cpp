// Computes the row norms of a weight with its LoRA adapter. For a row w of the weight, the matching row b of
// lora_B, A = lora_A and s = scaling:
//   |w + s b A|^2 = |w|^2 + 2 s b (A w) + s^2 b (A A^T) b.
// Each product has rank columns, so no temporary is as large as the weight. The weight is read once.

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <shoestring/ops.h>

#include "core/call.h"
#include "core/tensors.h"
#include "gemm/gemm.h"
#include "quantization/base_weight.h"

namespace shoestring::adapters {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kLoraWeightNorm = "lora_weight_norm";
// Number of weight elements that the CPU converts to the compute dtype at a time.
constexpr int64_t kPart = int64_t{1} << 20;

void check(const Tensor& weight, const OptionalTensor& absmax, const OptionalTensor& nested, const Tensor& A,
           const Tensor& B, c10::string_view quant_type, int64_t block_size) {
  for (const auto& [name, t] : {std::pair("lora_A", A), std::pair("lora_B", B)}) {
    TORCH_CHECK(is_supported_float(t.scalar_type()) && t.dim() == 2 && t.device() == weight.device(),
                kLoraWeightNorm, ": ", name, ": expected a floating-point matrix on ", weight.device(),
                ", received ", t.scalar_type(), " ", t.sym_sizes(), " on ", t.device());
  }
  TORCH_CHECK(B.sym_size(1) == A.sym_size(0), kLoraWeightNorm, ": lora_B: expected shape (out_features, ",
              A.sym_size(0), "), the rank as in lora_A, received ", B.sym_sizes());
  if (absmax.has_value()) {
    return quantization::check_packed(kLoraWeightNorm, weight, *absmax, nested, B.sym_size(0) * A.sym_size(1),
                                      quant_type, block_size, weight.device());
  }
  TORCH_CHECK(!nested.has_value(), kLoraWeightNorm,
              ": nested: expected none without absmax, received a tensor");
  TORCH_CHECK(is_supported_float(weight.scalar_type()) && weight.dim() == 2 &&
                  weight.sym_size(0) == B.sym_size(0) && weight.sym_size(1) == A.sym_size(1),
              kLoraWeightNorm, ": weight: expected a floating-point matrix of shape (", B.sym_size(0), ", ",
              A.sym_size(1), "), received ", weight.scalar_type(), " ", weight.sym_sizes());
}

at::ScalarType norm_type(const Tensor& weight, const Tensor& A) {
  return weight.scalar_type() == at::kDouble ? at::kDouble : compute_type(A);
}

template <Backend backend>
Tensor run_lora_weight_norm(const Tensor& weight, const OptionalTensor& absmax, const OptionalTensor& nested,
                            const Tensor& lora_A, const Tensor& lora_B, double scaling,
                            c10::string_view quant_type, int64_t block_size) {
  check(weight, absmax, nested, lora_A, lora_B, quant_type, block_size);
  const c10::OptionalDeviceGuard guard(weight.device());
  const auto type = norm_type(weight, lora_A);
  const auto options = lora_A.options().dtype(type);
  const Tensor A = lora_A.to(type), B = lora_B.to(type);
  const int64_t rows = B.size(0), columns = A.size(1);
  const gemm::Products products(backend, at::empty({0}, options));
  const auto base =
      absmax.has_value()
          ? quantization::BaseWeight::quantized(
                quantization::PackedReader(backend, kLoraWeightNorm, weight, *absmax, nested, quant_type,
                                           block_size),
                rows, columns, options)
          : quantization::BaseWeight::dense(backend == Backend::kCuda ? weight.to(type) : weight, type);
  // Computes the second term of mixed = W A^T + s / 2 B (A A^T), where s is `scaling`; the loop below adds
  // the first term. The squared norm of the adapted row w + s b A is |w|^2 + 2 s (m . b), where w, b and m
  // are equally numbered rows of W, B and `mixed`.
  Tensor mixed = gemm::multiply(products, B, gemm::multiply(products, A, A.t(), type), type,
                                scaling / 2);  // shape (rows, rank)
  Tensor squares = at::empty({rows}, options);
  const int64_t step =
      backend == Backend::kCuda ? rows : std::max<int64_t>(16, kPart / std::max<int64_t>(1, columns));
  base.for_each_panel([&](int64_t begin, const Tensor& panel) {
    for (int64_t i = 0; i < panel.size(0); i += step) {
      const int64_t size = std::min(step, panel.size(0) - i);
      const Tensor part = panel.narrow(0, i, size).to(type);
      Tensor own = squares.narrow(0, begin + i, size);
      at::linalg_vector_norm_out(own, part, 2, 1).square_();
      gemm::gemm(mixed.narrow(0, begin + i, size), part, A.t(), /*beta=*/1);
    }
  });
  return squares.add_(mixed.mul_(B).sum(1), 2 * scaling).clamp_min_(0).sqrt_();
}

Tensor lora_weight_norm_meta(const Tensor& weight, const OptionalTensor& absmax, const OptionalTensor& nested,
                             const Tensor& lora_A, const Tensor& lora_B, double, c10::string_view quant_type,
                             int64_t block_size) {
  check(weight, absmax, nested, lora_A, lora_B, quant_type, block_size);
  return at::empty_symint({lora_B.sym_size(0)}, lora_A.options().dtype(norm_type(weight, lora_A)));
}

// Does not record the norm for autograd, because DoRA treats it as a constant.
Tensor lora_weight_norm_autograd(const Tensor& weight, const OptionalTensor& absmax,
                                 const OptionalTensor& nested, const Tensor& lora_A, const Tensor& lora_B,
                                 double scaling, c10::string_view quant_type, int64_t block_size) {
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<decltype(lora_weight_norm_meta)>("shoestring::lora_weight_norm");
  return op.call(weight, absmax, nested, lora_A, lora_B, scaling, quant_type, block_size);
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) { m.impl(kLoraWeightNorm, run_lora_weight_norm<Backend::kCpu>); }
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) { m.impl(kLoraWeightNorm, run_lora_weight_norm<Backend::kCuda>); }
TORCH_LIBRARY_IMPL(shoestring, Meta, m) { m.impl(kLoraWeightNorm, lora_weight_norm_meta); }
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl(kLoraWeightNorm, lora_weight_norm_autograd); }

}  // namespace

}  // namespace shoestring::adapters

namespace shoestring {

using at::Tensor;

Tensor lora_weight_norm(const LoraWeight& layer) {
  TORCH_CHECK(layer.lora_A().has_value() && layer.lora_B().has_value(), adapters::kLoraWeightNorm,
              ": lora_A and lora_B: expected both, received a layer without an adapter");
  static auto op = find<decltype(adapters::lora_weight_norm_meta)>("shoestring::lora_weight_norm");
  return op.call(layer.weight(), layer.absmax(), layer.nested(), *layer.lora_A(), *layer.lora_B(),
                 layer.scaling(), layer.quantize().quant_type(), layer.quantize().block_size());
}

}  // namespace shoestring
