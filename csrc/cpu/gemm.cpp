// Each step of the depth takes one load for every register of b and one broadcast for every row of a, and multiplies
// each with each: the tile is as large as the registers for its sums allow, so that loads hide behind products.

#include "kernels/gemm.h"

#include "cpu/weights.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
extern const kernels::GemmTable gemm;

namespace {

#if defined(__AVX512F__)
constexpr int kRows = 14, kLeastRows = 8;  // 28 of 32 registers hold sums; 16 hide the latency of an addition
#elif defined(__AVX2__)
constexpr int kRows = 6, kLeastRows = 6;  // 12 of 16
#else
constexpr int kRows = 4, kLeastRows = 4;
#endif
constexpr int kWide = 2;  // registers
constexpr int kColumns = kWide * kLanes;

// A step of a panel is whole registers, or less than one: what that has too much, the next step overwrites.
static_assert(kRows <= kLanes && kLanes <= kernels::kGemmSlack);

// What a packed panel's elements are: an fp32, or two steps of the depth in bf16, the first in the lower half.
struct One {
  static constexpr int kSteps = 1;
  // Lines that lie side by side, `n` of them, `count` steps from p on.
  template <class Element>
  static SHOESTRING_METHOD F32 across(const typename Element::Type* p, int64_t n, int64_t, int64_t) {
    return load_some<Element>(p, n);
  }
  // kLanes elements along the depth, of which n steps are there.
  template <class Element>
  static SHOESTRING_METHOD F32 along(const typename Element::Type* p, int64_t n) {
    return load_some<Element>(p, n);
  }
};
struct Two {
  static constexpr int kSteps = 2;
  template <class Element>
  static SHOESTRING_METHOD F32 across(const typename Element::Type* p, int64_t n, int64_t count, int64_t stride) {
    const auto bits = [](F32 x) { return __is_same(Element, BFloat16) ? as_bits(x) : rounded_bf16(x); };
    const U32 low = bits(load_some<Element>(p, n)), high = count > 1 ? bits(load_some<Element>(p + stride, n)) : U32{};
    return as_float((low >> 16) | (high & 0xffff0000u));
  }
  template <class Element>
  static SHOESTRING_METHOD F32 along(const typename Element::Type* p, int64_t n) {
    if (__is_same(Element, BFloat16) && n >= 2 * kLanes) return load_as<F32>(p);  // as they lie
    uint16_t both[2 * kLanes];
    store_upper_halves(both, rounded_bf16(load_some<Element>(p, n)), rounded_bf16(load_some<Element>(p + kLanes, n - kLanes)));
    return load_as<F32>(both);
  }
};

// Lines that lie side by side; `available` of them can be read.
template <class Packed, class Element>
void copy(const typename Element::Type* source, int64_t lines, int64_t available, int64_t depth, int64_t depth_stride,
          int64_t width, float* out) {
  for (int64_t d = 0; d < depth; d += Packed::kSteps, source += Packed::kSteps * depth_stride, out += width) {
    for (int64_t l = 0; l < width; l += kLanes) {
      const bool whole = l + kLanes <= available && (lines == width || l + kLanes <= lines);
      const int64_t n = whole ? int64_t{kLanes} : lines - l;
      store(out + l, n > 0 ? Packed::template across<Element>(source + l, n, depth - d, depth_stride) : F32{});
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
template <class Packed, class Element>
void transpose(const typename Element::Type* source, int64_t lines, int64_t depth, int64_t line_stride, int64_t width,
               float* out) {
  constexpr int64_t kBlock = kLanes * Packed::kSteps;
  const int64_t size = (depth + Packed::kSteps - 1) / Packed::kSteps;  // in packed elements
  for (int64_t d = 0; d < depth; d += kBlock) {
    const int64_t first = d / Packed::kSteps;
    for (int64_t l = 0; l < width; l += kLanes) {
      F32 block[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        block[i] = l + i < lines ? Packed::template along<Element>(source + (l + i) * line_stride + d, depth - d) : F32{};
      }
      transpose(block);
      for (int i = 0; i < kLanes && first + i < size; ++i) store(out + (first + i) * width + l, block[i]);
    }
  }
}

template <class Packed, class Element>
void pack(const typename Element::Type* source, int64_t lines, int64_t depth, int64_t line_stride, int64_t depth_stride,
          int64_t width, float* out) {
  for (int64_t first = 0; first < lines; first += width) {
    const auto* panel = source + first * line_stride;
    const int64_t some = lines - first < width ? lines - first : width;
    if (line_stride == 1) {
      copy<Packed, Element>(panel, some, lines - first, depth, depth_stride, width, out);
    } else {
      transpose<Packed, Element>(panel, some, depth, line_stride, width, out);
    }
    out += kernels::packed_size(depth, Packed::kSteps, width);
  }
}

SHOESTRING_INLINE F32 combine(const float* c, F32 sum, float beta) { return beta == 0 ? sum : beta * load(c) + sum; }

SHOESTRING_INLINE void prefetch_tile(const float* c, int64_t stride, int64_t m) {
  for (int64_t i = 0; i < m; ++i) {
    __builtin_prefetch(c + i * stride, 1);
    __builtin_prefetch(c + i * stride + kColumns - 1, 1);
  }
}

template <int kTile>
SHOESTRING_INLINE void store_tile(const F32 (&sum)[kTile][kWide], float* __restrict c, int64_t stride, int64_t m, int64_t n,
                                  float alpha, float beta) {
  if (m == kTile && n == kColumns) {
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) {
      for (int j = 0; j < kWide; ++j) {
        float* to = c + i * stride + j * kLanes;
        store(to, combine(to, alpha * sum[i][j], beta));
      }
    }
    return;
  }
  float whole[kTile][kColumns];
#pragma GCC unroll 16
  for (int i = 0; i < kTile; ++i) {
    for (int j = 0; j < kWide; ++j) store(whole[i] + j * kLanes, alpha * sum[i][j]);
  }
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      float* to = c + i * stride + j;
      *to = beta == 0 ? whole[i][j] : beta * *to + whole[i][j];
    }
  }
}

template <int kTile>
void tile_fp32(const float* __restrict a, const float* __restrict b, int64_t m, int64_t n, int64_t size,
               float* __restrict c, int64_t stride, float alpha, float beta) {
  prefetch_tile(c, stride, m);
  F32 sum[kTile][kWide] = {};
#pragma GCC unroll 2
  for (int64_t d = 0; d < size; ++d, a += kTile, b += kColumns) {
    F32 column[kWide];
    for (int j = 0; j < kWide; ++j) column[j] = load(b + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) {
      const F32 row = splat(a[i]);
      for (int j = 0; j < kWide; ++j) sum[i][j] = fma(row, column[j], sum[i][j]);
    }
  }
  store_tile(sum, c, stride, m, n, alpha, beta);
}

#if defined(__AVX512F__)
#pragma GCC push_options
#pragma GCC target("avx512bf16")
template <int kTile>
void tile_bf16(const float* __restrict a, const float* __restrict b, int64_t m, int64_t n, int64_t size,
               float* __restrict c, int64_t stride, float alpha, float beta) {
  prefetch_tile(c, stride, m);
  F32 sum[kTile][kWide] = {};
#pragma GCC unroll 2
  for (int64_t d = 0; d < size; ++d, a += kTile, b += kColumns) {
    __m512bh column[kWide];
    for (int j = 0; j < kWide; ++j) column[j] = (__m512bh)load(b + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) {
      const __m512bh row = (__m512bh)_mm512_set1_ps(a[i]);
      for (int j = 0; j < kWide; ++j) sum[i][j] = (F32)_mm512_dpbf16_ps((__m512)sum[i][j], row, column[j]);
    }
  }
  store_tile(sum, c, stride, m, n, alpha, beta);
}
#pragma GCC pop_options
#endif

using Tile = void (*)(const float* a, const float* b, int64_t m, int64_t n, int64_t size, float* c, int64_t stride,
                      float alpha, float beta);

template <class Packed, Tile tile>
void multiply(const float* a, const float* b, int64_t m, int64_t n, int64_t depth, float* c, int64_t stride,
              float alpha, float beta, bool b_outside) {
  const int64_t size = (depth + Packed::kSteps - 1) / Packed::kSteps;
  const auto at = [&](int64_t i, int64_t j) {
    tile(a + i / kRows * kernels::packed_size(depth, Packed::kSteps, kRows),
         b + j / kColumns * kernels::packed_size(depth, Packed::kSteps, kColumns), m - i < kRows ? m - i : kRows,
         n - j < kColumns ? n - j : kColumns, size, c + i * stride + j, stride, alpha, beta);
  };
  if (b_outside) {
    for (int64_t j = 0; j < n; j += kColumns) {
      for (int64_t i = 0; i < m; i += kRows) at(i, j);
    }
  } else {
    for (int64_t i = 0; i < m; i += kRows) {
      for (int64_t j = 0; j < n; j += kColumns) at(i, j);
    }
  }
}

template <Tile tile, int kTile>
void strip_of(const float* a, int64_t a_stride, int64_t panels, const float* b, int64_t size, float* c, float alpha,
              float beta) {
  for (int64_t i = 0; i < panels; ++i, a += a_stride, c += kTile * kColumns) {
    tile(a, b, kTile, kColumns, size, c, kColumns, alpha, beta);
  }
}

#if defined(__AVX512F__)
#define SHOESTRING_STRIP(TILE)                                                                               \
  [](const float* a, int64_t a_stride, int64_t width, int64_t panels, const float* b, int64_t size, float* c, \
     float alpha, float beta) {                                                                              \
    switch (width) {                                                                                         \
      case 8: return strip_of<TILE<8>, 8>(a, a_stride, panels, b, size, c, alpha, beta);                     \
      case 9: return strip_of<TILE<9>, 9>(a, a_stride, panels, b, size, c, alpha, beta);                     \
      case 10: return strip_of<TILE<10>, 10>(a, a_stride, panels, b, size, c, alpha, beta);                  \
      case 11: return strip_of<TILE<11>, 11>(a, a_stride, panels, b, size, c, alpha, beta);                  \
      case 12: return strip_of<TILE<12>, 12>(a, a_stride, panels, b, size, c, alpha, beta);                  \
      case 13: return strip_of<TILE<13>, 13>(a, a_stride, panels, b, size, c, alpha, beta);                  \
      default: return strip_of<TILE<14>, 14>(a, a_stride, panels, b, size, c, alpha, beta);                  \
    }                                                                                                        \
  }
#else
#define SHOESTRING_STRIP(TILE)                                                                              \
  [](const float* a, int64_t a_stride, int64_t, int64_t panels, const float* b, int64_t size, float* c,     \
     float alpha, float beta) { strip_of<TILE<kRows>, kRows>(a, a_stride, panels, b, size, c, alpha, beta); }
#endif

template <class Packed, Tile tile>
constexpr kernels::GemmProduct product(kernels::GemmProduct::Strip strip) {
  return {pack<Packed, Float>, pack<Packed, BFloat16>, pack<Packed, Half>, multiply<Packed, tile>, strip, Packed::kSteps};
}

}  // namespace

#if defined(__AVX512F__)
const kernels::GemmTable gemm{kRows, kLeastRows, kColumns, true, product<One, tile_fp32<kRows>>(SHOESTRING_STRIP(tile_fp32)),
                              product<Two, tile_bf16<kRows>>(SHOESTRING_STRIP(tile_bf16))};
#elif defined(__AVX2__)
const kernels::GemmTable gemm{kRows, kLeastRows, kColumns, true, product<One, tile_fp32<kRows>>(SHOESTRING_STRIP(tile_fp32)),
                              {}};
#else
const kernels::GemmTable gemm{kRows, kLeastRows, kColumns, false, product<One, tile_fp32<kRows>>(SHOESTRING_STRIP(tile_fp32)),
                              {}};
#endif
#undef SHOESTRING_STRIP

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
