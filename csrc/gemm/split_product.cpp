// Products of a bf16 matrix and an fp32 matrix with bf16 instructions. An fp32 number has 24 significant
// bits, which are the sum of three bf16 numbers with eight each. A product of two bf16 numbers is exact in
// fp32.

#include "gemm/split_product.h"

#include <atomic>
#include <cstring>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "core/threads.h"
#include "gemm/gemm.h"
#include "gemm/packed_gemm.h"

namespace shoestring::gemm {
namespace {

using at::Tensor;

constexpr int64_t kPartsOfFloat = 3;

uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Rounds a finite number to the nearest bf16 number. A number that would round to infinity is cut off.
float nearest_bf16(float x) {
  const uint32_t bits = bits_of_float(x), even = bits + 0x7fffu + (bits >> 16 & 1u);
  return float_of_bits(((even & 0x7f800000u) == 0x7f800000u ? bits : even) & 0xffff0000u);
}

// Writes the numbers kPart of n products scale * x. Returns whether all products are finite.
template <int kPart>
bool split_run(const float* x, float scale, int64_t n, uint16_t* out) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    float rest = scale * x[i];
    bad |= (bits_of_float(rest) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
    float rounded = nearest_bf16(rest);
    for (int k = 0; k < kPart; ++k) {
      rest -= rounded;
      rounded = nearest_bf16(rest);
    }
    out[i] = static_cast<uint16_t>(bits_of_float(rounded) >> 16);
  }
  return bad == 0;
}

// Adds the three blocks of `parts`, which lie side by side along `dim`, from the smallest to the largest.
// Returns nullopt if a sum is not finite.
std::optional<Tensor> join(const Tensor& parts, int dim) {
  const int64_t rows = parts.size(0) / (dim == 0 ? kPartsOfFloat : 1),
                columns = parts.size(1) / (dim == 1 ? kPartsOfFloat : 1), stride = parts.size(1),
                step = dim == 0 ? rows * stride : columns;
  Tensor out = at::empty({rows, columns}, parts.options());
  const float* from = parts.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  std::atomic<bool> finite = true;
  at::parallel_for(0, rows, row_grain(16 * columns), [&](int64_t first, int64_t last) {
    uint32_t bad = 0;
    for (int64_t i = first; i < last; ++i) {
      const float* x = from + i * stride;
      for (int64_t j = 0; j < columns; ++j) {
        const float sum = x[2 * step + j] + x[step + j] + x[j];
        bad |= (bits_of_float(sum) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
        to[i * columns + j] = sum;
      }
    }
    if (bad != 0) finite = false;
  });
  return finite ? std::optional(out) : std::nullopt;
}

}  // namespace

std::optional<Tensor> split(const Tensor& x, double scale, c10::IntArrayRef parts, int dim) {
  const Tensor wide = x.to(at::kFloat), source = wide.stride(1) == 1 ? wide : wide.contiguous();
  const int64_t rows = source.size(0), columns = source.size(1), stride = source.stride(0),
                count = static_cast<int64_t>(parts.size());
  Tensor out = at::empty({rows * (dim == 0 ? count : 1), columns * (dim == 1 ? count : 1)},
                         x.options().dtype(at::kBFloat16));
  const float* from = source.const_data_ptr<float>();
  auto* to = static_cast<uint16_t*>(out.mutable_data_ptr());
  std::atomic<bool> finite = true;
  at::parallel_for(0, rows, row_grain(32 * columns * count), [&](int64_t first, int64_t last) {
    bool all = true;
    for (int64_t i = first; i < last; ++i) {
      for (int64_t k = 0; k < count; ++k) {
        const int64_t block = dim == 0 ? k * rows + i : i * count + k;
        const auto run = parts[k] == 0 ? split_run<0> : parts[k] == 1 ? split_run<1> : split_run<2>;
        all &= run(from + i * stride, static_cast<float>(scale), columns, to + block * columns);
      }
    }
    if (!all) finite = false;
  });
  return finite ? std::optional(out) : std::nullopt;
}

Tensor multiply_split(const Tensor& a, const Tensor& b, double alpha) {
  const bool wide_a = a.scalar_type() == at::kFloat;
  const auto options = a.options().dtype(at::kFloat);
  const auto parts = split(wide_a ? a : b, alpha, {0, 1, 2}, wide_a ? 0 : 1);
  if (parts.has_value() && a.size(1) > 0) {
    const Tensor &left = wide_a ? *parts : a, &right = wide_a ? b : *parts;
    Tensor products = at::empty({left.size(0), right.size(1)}, options);
    gemm_sum(at::kBFloat16, products, {{left, right}});
    if (const auto sum = join(products, wide_a ? 0 : 1)) return *sum;
  }
  // The parts of a number have different signs, so infinity times the number would become NaN.
  Tensor out = at::empty({a.size(0), b.size(1)}, options);
  gemm(out, a, b, 0, alpha);
  return out;
}

}  // namespace shoestring::gemm
