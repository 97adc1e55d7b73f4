// Product of a large matrix and a few vectors. Each element of the matrix is used only a few times, so
// packing it first, as gemm_cpu.cpp does, would take as long as the product. This kernel reads the matrix
// directly. It multiplies kRows rows by kVectors vectors at a time and keeps the sums in registers.

#include "gemm/skinny_gemm_table.h"

#include "core/element_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

#if defined(__AVX512F__)
constexpr int kRows = 4, kVectors = 4;  // 16 of the 32 vector registers hold sums of a tile
#else
constexpr int kRows = 2, kVectors = 4;  // 8 of the 16 vector registers hold sums of a tile
#endif

template <class E, int rows, int vectors>
void tile(const typename E::Type* a, int64_t stride_a, const float* b, int64_t k, float* c, int64_t stride_c,
          float alpha, float beta) {
  F32 sum[rows][vectors] = {};
  const auto add = [&](auto load_a, auto load_b) __attribute__((always_inline)) {
    F32 x[rows];
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) x[i] = load_a(a + i * stride_a);
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) {
      const F32 y = load_b(b + j * k);
#pragma GCC unroll 4
      for (int i = 0; i < rows; ++i) sum[i][j] = fma(x[i], y, sum[i][j]);
    }
  };
  int64_t d = 0;
  for (; d + kLanes <= k; d += kLanes) {
    add([&](const auto* p) __attribute__((always_inline)) { return E::load(p + d); },
        [&](const float* p) __attribute__((always_inline)) { return load(p + d); });
  }
  if (d < k) {
    add([&](const auto* p) __attribute__((always_inline)) { return load_some<E>(p + d, k - d); },
        [&](const float* p) __attribute__((always_inline)) { return load(p + d, k - d, 0); });
  }
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < vectors; ++j) {
      float* to = c + i * stride_c + j;
      const float product = alpha * horizontal_sum(sum[i][j]);
      *to = beta == 0 ? product : beta * *to + product;
    }
  }
}

template <class E>
void multiply(const typename E::Type* a, int64_t stride_a, int64_t m, const float* b, int64_t n, int64_t k,
              float* c, int64_t stride_c, float alpha, float beta) {
  for (int64_t i = 0; i < m;) {
    const bool several = m - i >= kRows;
    for (int64_t j = 0; j < n;) {
      const auto run = several ? (n - j >= kVectors ? tile<E, kRows, kVectors> : tile<E, kRows, 1>)
                               : (n - j >= kVectors ? tile<E, 1, kVectors> : tile<E, 1, 1>);
      run(a + i * stride_a, stride_a, b + j * k, k, c + i * stride_c + j, stride_c, alpha, beta);
      j += n - j >= kVectors ? kVectors : 1;
    }
    i += several ? kRows : 1;
  }
}

}  // namespace

extern const kernels::SkinnyGemmTable skinny_gemm;
const kernels::SkinnyGemmTable skinny_gemm{multiply<Float>, multiply<BFloat16>, multiply<Half>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
