// Each step of the depth takes one load for every register of b and one broadcast for every row of a, and multiplies
// each with each: the tile is as large as the registers for its sums allow, so that loads hide behind products.

#include "kernels/gemm.h"

#include "cpu/weights.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
extern const kernels::GemmTable gemm;

#if defined(__AVX2__)
namespace {

#if defined(__AVX512F__)
constexpr int kRows = 14;  // 28 of 32 registers hold sums
#else
constexpr int kRows = 6;  // 12 of 16
#endif
constexpr int kWide = 2;  // registers
constexpr int kColumns = kWide * kLanes;

// A step of a panel is whole registers, or less than one: what that has too much, the next step overwrites.
static_assert(kRows < kLanes && kLanes - kRows <= kernels::kGemmSlack);

template <class Element>
SHOESTRING_INLINE F32 read(const typename Element::Type* p, int64_t n) {
  if (n >= kLanes) return Element::load(p);
  typename Element::Type some[kLanes] = {};
  __builtin_memcpy(some, p, n * sizeof some[0]);
  return Element::load(some);
}

// Lines that lie side by side; `available` of them can be read.
template <class Element>
void copy(const typename Element::Type* source, int64_t lines, int64_t available, int64_t depth, int64_t depth_stride,
          int64_t width, float* out) {
  for (int64_t d = 0; d < depth; ++d, source += depth_stride, out += width) {
    for (int64_t l = 0; l < width; l += kLanes) {
      const bool whole = l + kLanes <= available && (lines == width || l + kLanes <= lines);
      store(out + l, whole ? Element::load(source + l) : l < lines ? read<Element>(source + l, lines - l) : F32{});
    }
  }
}

SHOESTRING_INLINE void transpose(F32 (&rows)[kLanes]) {
  I32 low, high;
  for (int i = 0; i < kLanes; ++i) {
    low[i] = i / 2 + i % 2 * kLanes;
    high[i] = low[i] + kLanes / 2;
  }
#pragma GCC unroll 4
  for (int round = 1; round < kLanes; round *= 2) {
    F32 next[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = __builtin_shuffle(rows[i], rows[i + kLanes / 2], low);
      next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + kLanes / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

// Lines that each lie in one piece.
template <class Element>
void transpose(const typename Element::Type* source, int64_t lines, int64_t depth, int64_t line_stride, int64_t width,
               float* out) {
  for (int64_t d = 0; d < depth; d += kLanes) {
    const int64_t steps = depth - d < kLanes ? depth - d : kLanes;
    for (int64_t l = 0; l < width; l += kLanes) {
      F32 block[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        block[i] = l + i < lines ? read<Element>(source + (l + i) * line_stride + d, steps) : F32{};
      }
      transpose(block);
      for (int i = 0; i < kLanes && i < steps; ++i) store(out + (d + i) * width + l, block[i]);
    }
  }
}

template <class Element>
void pack(const typename Element::Type* source, int64_t lines, int64_t depth, int64_t line_stride, int64_t depth_stride,
          int64_t width, float* out) {
  for (int64_t first = 0; first < lines; first += width, out += width * depth + kernels::kGemmSlack) {
    const auto* panel = source + first * line_stride;
    const int64_t some = lines - first < width ? lines - first : width;
    if (line_stride == 1) {
      copy<Element>(panel, some, lines - first, depth, depth_stride, width, out);
    } else {
      transpose<Element>(panel, some, depth, line_stride, width, out);
    }
  }
}

SHOESTRING_INLINE F32 combine(const float* c, F32 sum, float beta) { return beta == 0 ? sum : beta * load(c) + sum; }

void multiply_tile(const float* __restrict a, const float* __restrict b, int64_t m, int64_t n, int64_t depth,
                   float* __restrict c, int64_t stride, float alpha, float beta) {
  for (int64_t i = 0; i < m; ++i) {
    __builtin_prefetch(c + i * stride, 1);
    __builtin_prefetch(c + i * stride + kColumns - 1, 1);
  }
  F32 sum[kRows][kWide] = {};
#pragma GCC unroll 2
  for (int64_t d = 0; d < depth; ++d, a += kRows, b += kColumns) {
    F32 column[kWide];
    for (int j = 0; j < kWide; ++j) column[j] = load(b + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const F32 row = splat(a[i]);
      for (int j = 0; j < kWide; ++j) sum[i][j] = fma(row, column[j], sum[i][j]);
    }
  }
  if (m == kRows && n == kColumns) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kWide; ++j) {
        float* to = c + i * stride + j * kLanes;
        store(to, combine(to, alpha * sum[i][j], beta));
      }
    }
    return;
  }
  float whole[kRows][kColumns];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kWide; ++j) store(whole[i] + j * kLanes, alpha * sum[i][j]);
  }
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      float* to = c + i * stride + j;
      *to = beta == 0 ? whole[i][j] : beta * *to + whole[i][j];
    }
  }
}

void multiply(const float* a, const float* b, int64_t m, int64_t n, int64_t depth, float* c, int64_t stride,
              float alpha, float beta, bool b_outside) {
  const auto tile = [&](int64_t i, int64_t j) {
    multiply_tile(a + i * depth + i / kRows * kernels::kGemmSlack, b + j * depth + j / kColumns * kernels::kGemmSlack,
                  m - i < kRows ? m - i : kRows, n - j < kColumns ? n - j : kColumns, depth, c + i * stride + j, stride,
                  alpha, beta);
  };
  if (b_outside) {
    for (int64_t j = 0; j < n; j += kColumns) {
      for (int64_t i = 0; i < m; i += kRows) tile(i, j);
    }
  } else {
    for (int64_t i = 0; i < m; i += kRows) {
      for (int64_t j = 0; j < n; j += kColumns) tile(i, j);
    }
  }
}

}  // namespace

const kernels::GemmTable gemm{kRows, kColumns, pack<Float>, pack<BFloat16>, pack<Half>, multiply};
#else
const kernels::GemmTable gemm{};
#endif

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
