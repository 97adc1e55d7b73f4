// Decides how a matrix product runs on the CPU: by the BLAS library, without packing, or with packed panels.

#include <algorithm>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "core/tensors.h"
#include "core/threads.h"
#include "gemm/gemm.h"
#include "gemm/gemm_table.h"
#include "gemm/packed_gemm.h"
#include "gemm/products.h"
#include "gemm/skinny_gemm_table.h"

namespace shoestring::gemm {
namespace {

using at::Tensor;

// maximum number of columns of b for which a product a b runs without packing
constexpr int64_t kSkinny = 48;
// if a product has fewer rows, fewer columns or a smaller depth than this, packing takes as long as
// multiplying
constexpr int64_t kFewLines = 8;

// Returns whether multiply_skinny() can compute a b: b has few columns, a has many rows, and each row of a is
// contiguous.
bool is_skinny(const Tensor& a, const Tensor& b) {
  return b.size(1) <= kSkinny && a.size(0) >= 4 * b.size(1) && (a.stride(1) == 1 || a.size(1) == 1);
}

void multiply_skinny(const Tensor& c, const Tensor& a, const Tensor& b, float alpha, float beta) {
  const auto& kernels = cpu::skinny_gemm();
  const Tensor vectors = b.t().to(at::kFloat).contiguous();
  const int64_t n = b.size(1), k = a.size(1), stride = a.stride(0), stride_c = c.stride(0);
  const float* from = vectors.const_data_ptr<float>();
  float* to = c.mutable_data_ptr<float>();
  at::parallel_for(0, a.size(0), std::max<int64_t>(4, row_grain(k * (4 + n))),
                   [&](int64_t first, int64_t last) {
                     const auto run = [&](auto multiply, const auto* rows) {
                       multiply(rows + first * stride, stride, last - first, from, n, k,
                                to + first * stride_c, stride_c, alpha, beta);
                     };
                     const void* rows = a.const_data_ptr();
                     switch (a.scalar_type()) {
                       case at::kFloat:
                         return run(kernels.multiply_float, static_cast<const float*>(rows));
                       case at::kBFloat16:
                         return run(kernels.multiply_bf16, static_cast<const uint16_t*>(rows));
                       default:
                         return run(kernels.multiply_fp16, static_cast<const uint16_t*>(rows));
                     }
                   });
}

// Returns the functions for a product of matrices whose elements are multiplied in the dtype `compute`, fp32
// or bf16. Returns null if this CPU cannot multiply bf16 numbers.
const kernels::GemmProduct* product_for(at::ScalarType compute) {
  if (compute != at::kBFloat16) return &cpu::gemm().fp32;
  return multiplies_by_tiles() ? &cpu::gemm_amx() : multiplies_bf16() ? &cpu::gemm().bf16 : nullptr;
}

}  // namespace

bool gemm_widens(at::ScalarType type) { return type == at::kFloat && cpu::gemm().beats_library; }

void gemm_in(at::ScalarType compute, const Tensor& out, const Tensor& a, const Tensor& b, double beta,
             double alpha) {
  if (out.numel() == 0) return;
  if (out.stride(1) != 1 && out.size(1) != 1 && (out.stride(0) == 1 || out.size(0) == 1)) {
    return gemm_in(compute, out.t(), b.t(), a.t(), beta, alpha);
  }
  const auto wide = compute_type(a);
  const int64_t least = std::min({a.size(0), b.size(1), a.size(1)});
  const bool rounds = compute == at::kBFloat16;
  // A product of two bf16 numbers is exact in fp32, so bf16 operands are multiplied by the bf16 units.
  const bool narrow = a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16;
  const auto* product = product_for(narrow || rounds ? at::kBFloat16 : wide);
  if (rounds && product == nullptr) {
    return gemm_in(wide, out, a.to(compute), b.to(compute), beta, alpha);
  }
  if (product == nullptr) product = product_for(wide);
  const bool widen = a.scalar_type() != wide || b.scalar_type() != wide;
  if (!gemm_widens(wide) || (least < kFewLines && !widen && !rounds) || a.size(1) == 0) {
    const bool in_place = out.scalar_type() == wide;
    Tensor c = in_place ? out : out.to(wide);
    at::addmm_out(c, c, a.to(wide), b.to(wide), beta, alpha);
    if (!in_place) out.copy_(c);
  } else if (is_skinny(a, b)) {
    const auto operand = [&](const Tensor& t) { return rounds ? t.to(compute) : t; };
    const bool in_place = out.scalar_type() == at::kFloat && (out.stride(1) == 1 || out.size(1) == 1);
    const Tensor c = in_place ? out : out.to(at::kFloat).contiguous();
    multiply_skinny(c, operand(a), operand(b), static_cast<float>(alpha), static_cast<float>(beta));
    if (!in_place) out.copy_(c);
  } else {
    multiply_packed(*product, out, {{a, b}}, beta, alpha);
  }
}

bool sums_products(at::ScalarType compute) {
  return (compute == at::kFloat || compute == at::kBFloat16) && cpu::gemm().beats_library &&
         product_for(compute) != nullptr;
}

void gemm_sum(at::ScalarType compute, const Tensor& out, c10::ArrayRef<Term> terms, const Tensor& gain,
              const Tensor& offset, const Factor* then) {
  if (out.numel() == 0) return;
  multiply_packed(*product_for(compute), out, terms, 0, 1, gain, offset, then);
}

void gemm_cpu(const Tensor& out, const Tensor& a, const Tensor& b, double beta, double alpha) {
  gemm_in(compute_type(a), out, a, b, beta, alpha);
}

void gemm_rounded(const Tensor& out, const Tensor& a, const Tensor& b, double beta, double alpha) {
  const bool narrow = a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16;
  if (!narrow || !multiplies_bf16() || a.size(0) >= kFewLines) return gemm_cpu(out, a, b, beta, alpha);
  Tensor c = out;
  if (out.scalar_type() == at::kBFloat16) {
    at::addmm_out(c, out, a, b, beta, alpha);
    return;
  }
  const Tensor product = at::mm(a, b);
  beta == 0 ? c.copy_(product).mul_(alpha) : c.mul_(beta).add_(product, alpha);
}

}  // namespace shoestring::gemm
