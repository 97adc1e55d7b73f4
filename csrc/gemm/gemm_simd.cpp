// Matrix product of packed panels on the CPU, one tile of the result at a time. Each depth step loads a row
// of b into registers, broadcasts each element of a column of a, and adds the products to the tile's sums.
// The tile is as large as the registers allow, so that arithmetic hides the latency of loads.

#include "gemm/gemm_table.h"

#include "gemm/panels_simd.h"
#include "gemm/results_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
extern const kernels::GemmTable gemm;

namespace {

SHOESTRING_INLINE F32 combine(const float* c, F32 sum, float beta) {
  return beta == 0 ? sum : beta * load(c) + sum;
}

SHOESTRING_INLINE void prefetch_tile(const float* c, int64_t stride, int64_t m) {
  for (int64_t i = 0; i < m; ++i) {
    __builtin_prefetch(address(c, i * stride), 1);
    __builtin_prefetch(address(c, i * stride + kColumns - 1), 1);
  }
}

template <int kTile>
SHOESTRING_INLINE void store_tile(const F32 (&sum)[kTile][kWide], float* __restrict c, int64_t stride,
                                  int64_t m, int64_t n, float alpha, float beta) {
  if (n == kColumns) {
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) {
      if (i == m) return;
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

// The memory of which a tile asks for one cache line in each depth step, `step` bytes apart. It is packed
// later.
struct Ahead {
  const char* from;
  int64_t step;
};

// Multiplies the first kTile lines of a panel of a, which is kWidth lines wide, by a panel of b.
template <int kTile, int kWidth = kTile>
void tile_fp32(const float* __restrict a, const float* __restrict b, int64_t m, int64_t n, int64_t size,
               float* __restrict c, int64_t stride, float alpha, float beta, Ahead ahead) {
  prefetch_tile(c, stride, m);
  F32 sum[kTile][kWide] = {};
#pragma GCC unroll 2
  for (int64_t d = 0; d < size; ++d, a += kWidth, b += kColumns) {
    __builtin_prefetch(address(ahead.from, d * ahead.step), 0, 2);
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
template <int kTile, int kWidth = kTile>
void tile_bf16(const float* __restrict a, const float* __restrict b, int64_t m, int64_t n, int64_t size,
               float* __restrict c, int64_t stride, float alpha, float beta, Ahead ahead) {
  prefetch_tile(c, stride, m);
  F32 sum[kTile][kWide] = {};
#pragma GCC unroll 2
  for (int64_t d = 0; d < size; ++d, a += kWidth, b += kColumns) {
    __builtin_prefetch(address(ahead.from, d * ahead.step), 0, 2);
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

// Maximum depth of a packed panel in packed elements. Rounding errors grow with the square root of this depth
// instead of the whole depth. A panel of 32 columns takes 24 KiB and stays in the L1 cache.
constexpr int64_t kDepth = 192;

using Tile = void (*)(const float* a, const float* b, int64_t m, int64_t n, int64_t size, float* c,
                      int64_t stride, float alpha, float beta, Ahead ahead);

// Asks for memory that is in the cache.
SHOESTRING_INLINE Ahead nothing_ahead(const float* a) { return {reinterpret_cast<const char*>(a), 0}; }

constexpr int64_t kCacheLine = 64;

// Returns what a tile of `size` depth steps asks for, the tile with this number in its product.
SHOESTRING_INLINE Ahead part_of(const kernels::GemmAhead& ahead, int64_t tile, int64_t size, const float* a) {
  if (ahead.rows == 0) return nothing_ahead(a);
  const int64_t lines = (ahead.bytes + kCacheLine - 1) / kCacheLine, row = tile / lines * size;
  if (row >= ahead.rows) return nothing_ahead(a);
  const int64_t last = ahead.rows > size ? ahead.rows - size : 0;
  return {ahead.data + (row < last ? row : last) * ahead.stride + tile % lines * kCacheLine, ahead.stride};
}

// The functions for panels of a whose last lines are padding: function i computes 2 (i + 1) lines. The sums
// of a line do not depend on the function.
#if defined(__AVX512F__)
#define SHOESTRING_TILES(TILE)                                          \
  {TILE<2, kRows>,  TILE<4, kRows>,  TILE<6, kRows>,    TILE<8, kRows>, \
   TILE<10, kRows>, TILE<12, kRows>, TILE<kRows, kRows>}
#elif defined(__AVX2__)
#define SHOESTRING_TILES(TILE) {TILE<2, kRows>, TILE<4, kRows>, TILE<kRows, kRows>}
#else
#define SHOESTRING_TILES(TILE) {TILE<2, kRows>, TILE<kRows, kRows>}
#endif
struct Tiles {
  Tile of_lines[kRows / 2];
  constexpr Tile operator()(int64_t lines) const { return of_lines[(lines - 1) / 2]; }
};
constexpr Tiles kTilesFp32{SHOESTRING_TILES(tile_fp32)};
#if defined(__AVX512F__)
constexpr Tiles kTilesBf16{SHOESTRING_TILES(tile_bf16)};
#endif
#undef SHOESTRING_TILES

template <class Packed, const Tiles& tiles>
void multiply(const float* a, const float* b, int64_t m, int64_t n, int64_t depth, float* c, int64_t stride,
              float alpha, float beta, const kernels::GemmNarrow* narrow, bool b_outside,
              const kernels::GemmAhead& ahead) {
  int64_t number = 0;
  const int64_t size = (depth + Packed::kSteps - 1) / Packed::kSteps;
  const auto at = [&](int64_t i, int64_t j) {
    const float *rows = a + i / kRows * kernels::packed_size(depth, Packed::kSteps, kRows),
                *columns = b + j / kColumns * kernels::packed_size(depth, Packed::kSteps, kColumns);
    const int64_t lines = m - i < kRows ? m - i : kRows, some = n - j < kColumns ? n - j : kColumns;
    float* to = c + i * stride + j;
    const Tile tile = tiles(lines);
    const Ahead next = part_of(ahead, number++, size, a);
    if (narrow == nullptr) return tile(rows, columns, lines, some, size, to, stride, alpha, beta, next);
    float sum[kRows * kColumns];
    tile(rows, columns, lines, kColumns, size, sum, kColumns, 1, 0, next);
    finish_tile(sum, to, stride, lines, some, alpha, beta, narrow, i, j);
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

// Multiplies each panel of `kTile` lines by a panel of b with the function `tile`. The function `rest`
// computes the last panel if it is not full. If `rest` is null, `tile` computes this panel with its padding.
template <Tile tile, int kTile>
void strip_of(const float* a, int64_t a_stride, int64_t lines, const float* b, int64_t size, float* c,
              float alpha, float beta, Tile rest = nullptr) {
  for (; lines >= kTile || (lines > 0 && rest == nullptr);
       lines -= kTile, a += a_stride, c += kTile * kColumns) {
    tile(a, b, kTile, kColumns, size, c, kColumns, alpha, beta, nothing_ahead(a));
  }
  if (lines > 0) rest(a, b, lines, kColumns, size, c, kColumns, alpha, beta, nothing_ahead(a));
}

#if defined(__AVX512F__)
#define SHOESTRING_STRIP(TILE)                                                                               \
  [](const float* a, int64_t a_stride, int64_t width, int64_t lines, const float* b, int64_t size, float* c, \
     float alpha, float beta) {                                                                              \
    switch (width) {                                                                                         \
      case 8:                                                                                                \
        return strip_of<TILE<8>, 8>(a, a_stride, lines, b, size, c, alpha, beta);                            \
      case 9:                                                                                                \
        return strip_of<TILE<9>, 9>(a, a_stride, lines, b, size, c, alpha, beta);                            \
      case 10:                                                                                               \
        return strip_of<TILE<10>, 10>(a, a_stride, lines, b, size, c, alpha, beta);                          \
      case 11:                                                                                               \
        return strip_of<TILE<11>, 11>(a, a_stride, lines, b, size, c, alpha, beta);                          \
      case 12:                                                                                               \
        return strip_of<TILE<12>, 12>(a, a_stride, lines, b, size, c, alpha, beta);                          \
      case 13:                                                                                               \
        return strip_of<TILE<13>, 13>(a, a_stride, lines, b, size, c, alpha, beta);                          \
      default:                                                                                               \
        return strip_of<TILE<14>, 14>(a, a_stride, lines, b, size, c, alpha, beta);                          \
    }                                                                                                        \
  }
#else
// Without AVX-512, all panels of a have kRows lines. Each possible number of remaining lines has its own tile
// function.
#define SHOESTRING_STRIP(TILE)                                                                         \
  [](const float* a, int64_t a_stride, int64_t, int64_t lines, const float* b, int64_t size, float* c, \
     float alpha, float beta) {                                                                        \
    constexpr Tile kRest[] = {nullptr,        TILE<1, kRows>,         TILE<2, kRows>,                  \
                              TILE<3, kRows>, TILE<kRows - 2, kRows>, TILE<kRows - 1, kRows>};         \
    strip_of<TILE<kRows>, kRows>(a, a_stride, lines, b, size, c, alpha, beta, kRest[lines % kRows]);   \
  }
#endif

template <class Packed, const Tiles& tiles>
constexpr kernels::GemmProduct product(kernels::GemmProduct::Strip strip) {
  return {pack<Packed, Float>,
          pack<Packed, BFloat16>,
          pack<Packed, Half>,
          multiply<Packed, tiles>,
          strip,
          Packed::kSteps,
          {pack<Packed, Float>, pack<Packed, BFloat16>, pack<Packed, Half>},
          kRows,
          kColumns,
          Packed::kSteps,
          kDepth * Packed::kSteps,
          false};
}

}  // namespace

#if defined(__AVX512F__)
const kernels::GemmTable gemm{kRows,
                              kLeastRows,
                              kColumns,
                              true,
                              product<One, kTilesFp32>(SHOESTRING_STRIP(tile_fp32)),
                              product<Two, kTilesBf16>(SHOESTRING_STRIP(tile_bf16))};
#elif defined(__AVX2__)
const kernels::GemmTable gemm{
    kRows, kLeastRows, kColumns, true, product<One, kTilesFp32>(SHOESTRING_STRIP(tile_fp32)), {}};
#else
const kernels::GemmTable gemm{
    kRows, kLeastRows, kColumns, false, product<One, kTilesFp32>(SHOESTRING_STRIP(tile_fp32)), {}};
#endif
#undef SHOESTRING_STRIP

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
