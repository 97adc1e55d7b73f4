#include "gemm/products.h"

#include <algorithm>

#include <ATen/Context.h>
#include <ATen/Functions.h>

#include "core/capability.h"
#include "gemm/gemm.h"
#include "gemm/packed_gemm.h"
#include "gemm/split_product.h"

namespace shoestring::gemm {

using at::Tensor;

namespace {

// With a smaller depth or fewer rows, splitting and packing take longer than an fp32 product.
constexpr int64_t kFewToSplit = 8;

}  // namespace

bool multiplies_bf16() {
  if (cpu::capability() < cpu::Capability::kAvx512) return false;
#if defined(__x86_64__)
  static const bool units = __builtin_cpu_supports("avx512bf16");
#else
  constexpr bool units = false;
#endif
  return units && at::globalContext().userEnabledMkldnn();
}

bool multiplies_by_tiles() {
  return cpu::capability() == cpu::Capability::kAmx && at::globalContext().userEnabledMkldnn();
}

at::ScalarType product_type(const Tensor& x) {
  return x.scalar_type() == at::kBFloat16 && multiplies_bf16() ? at::kBFloat16 : compute_type(x);
}

Products::Products(Backend backend, const Tensor& x)
    : backend(backend), weight(backend == Backend::kCuda ? x.scalar_type() : product_type(x)),
      other(backend == Backend::kCuda ? x.scalar_type() : compute_type(x)) {}

Tensor multiply(const Products& products, const Tensor& a, const Tensor& b, at::ScalarType dtype,
                double alpha) {
  const bool mixed = std::minmax(a.scalar_type(), b.scalar_type()) == std::minmax(at::kFloat, at::kBFloat16);
  if (mixed && products.weight == at::kBFloat16 && products.other == at::kFloat &&
      sums_products(at::kBFloat16) && std::min(a.size(0), a.size(1)) >= kFewToSplit) {
    return multiply_split(a, b, alpha).to(dtype);
  }
  const auto type = dtype == a.scalar_type() ? dtype : compute_type(a);
  Tensor out = at::empty({a.size(0), b.size(1)}, a.options().dtype(type));
  multiply_into(out, products, Tensor(), a, b, 0, alpha);
  return out.to(dtype);
}

void multiply_into(const Tensor& out, const Products& products, const Tensor& bias, const Tensor& a,
                   const Tensor& b, double beta, double alpha) {
  if (bias.defined()) {
    gemm_bias(out, bias, a, b, alpha);
  } else {
    (products.backend == Backend::kCuda ? gemm : gemm_rounded)(out, a, b, beta, alpha);
  }
}

}  // namespace shoestring::gemm
