#pragma once

// Helpers for loops over the rows of rms_norm and layer_norm on the CPU.

#include "core/row_simd.h"
#include "core/some_simd.h"
#include "layers/norm_table.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

constexpr int kWide = 4;  // number of vector registers in one step through a row
constexpr int64_t kStep = kWide * kLanes;
// number of independent partial sums into which a sum is divided, to hide the latency of additions
constexpr int kChains = kLanes == 16 ? 4 : 2;
// Number of rows that are computed together: two, because the L1 cache holds two rows, the weight and the
// sums over rows.
constexpr int kRowsAtOnce = 2;

using Row = Some<kWide>;  // elements of one step through a row

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

// A 16-bit element type whose pairs have memory order. Kernels use it that combine 16-bit with fp32 elements.
template <class E>
struct InOrder : E {
  using Type = typename E::Type;
  static SHOESTRING_METHOD Pair load_pair(const Type* p) { return {E::load(p), E::load(p + kLanes)}; }
  static SHOESTRING_METHOD void store_pair(Type* p, Pair x) { E::store(p, x.first, x.second); }
  static SHOESTRING_METHOD Pair as_pair(Pair x) { return x; }
  static SHOESTRING_METHOD Pair in_order(Pair x) { return x; }
};

SHOESTRING_INLINE F32 rounded(Float, F32 x) { return x; }
SHOESTRING_INLINE F32 rounded(BFloat16, F32 x) { return as_float(rounded_bf16(x) & 0xffff0000u); }
SHOESTRING_INLINE F32 rounded(Half, F32 x) { return from_fp16(to_fp16(x)); }

// Rounds an fp32 value that was computed from elements of type E to E. A NaN that comes from bf16 elements
// has zeros in its lower 16 bits as fp32, so rounding cannot carry into its upper 16 bits. NormRows::arrange
// converts NaNs of the weights to this form.
template <class E>
SHOESTRING_INLINE F32 rounded_of_elements(E, F32 x) {
  return rounded(E{}, x);
}
SHOESTRING_INLINE F32 rounded_of_elements(BFloat16, F32 x) {
  return as_float(round_upper_half(x) & 0xffff0000u);
}

// Computes kSums sums, each over all elements of a row. body(offset, count, sums) adds register k of each
// step to sums[..][k % kChains].
template <int kSums, class Body>
SHOESTRING_INLINE void row_sums(int64_t features, double* totals, Body body) {
  F32 sums[kSums][kChains] = {};
  for (int s = 0; s < kSums; ++s) totals[s] = 0;
  folded<kStep>(
      features, [&](int64_t i, int64_t n) __attribute__((always_inline)) { body(i, n, sums); },
      [&]() __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int s = 0; s < kSums; ++s) {
          F32 all = sums[s][0];
          for (int k = 1; k < kChains; ++k) all += sums[s][k];
          totals[s] += horizontal_sum(all);
          for (F32& sum : sums[s]) sum = F32{};
        }
      });
}

// Mean and reciprocal standard deviation with which a row is normalised.
struct Statistics {
  float mean, rstd;
};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
