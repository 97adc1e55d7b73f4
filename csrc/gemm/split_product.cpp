// Products of a bf16 matrix and an fp32 matrix with bf16 instructions. An fp32 number has 24 significant
// bits, which are the sum of three bf16 numbers with eight each. A product of two bf16 numbers is exact in
// fp32.

#include "gemm/split_product.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "core/threads.h"
#include "gemm/amx_table.h"
#include "gemm/gemm.h"
#include "gemm/packed_gemm.h"
#include "gemm/products.h"

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

// Adds three runs of n numbers, which start `step` numbers apart, from the smallest to the largest. Returns
// whether all sums are finite.
bool join_run(const float* x, int64_t step, int64_t n, float* out) {
  uint32_t bad = 0;
  for (int64_t j = 0; j < n; ++j) {
    const float sum = x[2 * step + j] + x[step + j] + x[j];
    bad |= (bits_of_float(sum) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
    out[j] = sum;
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
    bool all = true;
    for (int64_t i = first; i < last; ++i)
      all &= join_run(from + i * stride, step, columns, to + i * columns);
    if (!all) finite = false;
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

namespace {

// Largest number of columns of b for which multiply_few() computes a b.
constexpr int64_t kFewColumns = 64;
// Number of rows of `a` whose products a thread keeps in the cache.
constexpr int64_t kFewRows = 64;

// Computes a b on AMX for a bf16 matrix a with contiguous rows, and the parts (k, 3 n) of b. AMX reads a
// where it lies: packing it would take longer than the product. Returns nullopt if a result is not finite.
std::optional<Tensor> multiply_few(const Tensor& a, const Tensor& parts) {
  const auto& amx = cpu::amx();
  const int64_t rows = a.size(0), depth = a.size(1), lines = parts.size(1), columns = lines / kPartsOfFloat;
  const int64_t panels = parts_of(lines, kernels::kAmxColumns), tiles = parts_of(lines, kernels::kAmxLines),
                stride = tiles * kernels::kAmxLines;
  const auto options = a.options().dtype(at::kFloat);
  const Tensor packed = at::empty({panels * kernels::amx_size(depth, kernels::kAmxColumns)}, options);
  amx.pack_right(static_cast<const uint16_t*>(parts.const_data_ptr()), lines, depth, 1, lines,
                 packed.mutable_data_ptr<float>());
  Tensor out = at::empty({rows, columns}, options);
  const auto* from = static_cast<const uint16_t*>(a.const_data_ptr());
  float* to = out.mutable_data_ptr<float>();
  std::atomic<bool> finite = true;
  at::parallel_for(
      0, parts_of(rows, kFewRows), row_grain(2 * kFewRows * depth), [&](int64_t first, int64_t last) {
        std::vector<float> products(kFewRows * stride);
        bool all = true;
        for (int64_t row = first * kFewRows; row < std::min(last * kFewRows, rows); row += kFewRows) {
          const int64_t count = std::min(kFewRows, rows - row);
          amx.begin();
          amx.unpacked(from + row * a.stride(0), a.stride(0), count, depth, packed.const_data_ptr<float>(),
                       tiles, products.data());
          amx.end();
          for (int64_t i = 0; i < count; ++i) {
            all &= join_run(products.data() + i * stride, columns, columns, to + (row + i) * columns);
          }
        }
        if (!all) finite = false;
      });
  return finite ? std::optional(out) : std::nullopt;
}

}  // namespace

Tensor multiply_split(const Tensor& a, const Tensor& b, double alpha) {
  const bool wide_a = a.scalar_type() == at::kFloat;
  const auto options = a.options().dtype(at::kFloat);
  const auto parts = split(wide_a ? a : b, alpha, {0, 1, 2}, wide_a ? 0 : 1);
  if (parts.has_value() && a.size(1) > 0) {
    const bool whole_rows = !wide_a && (a.stride(1) == 1 || a.size(1) == 1);
    if (whole_rows && multiplies_by_tiles() && b.size(1) <= kFewColumns) {
      if (const auto product = multiply_few(a, *parts)) return *product;
    }
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
