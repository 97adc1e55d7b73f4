// Products of bf16 matrices with AMX, Intel's unit for matrix products. A tile register holds 16 rows of 64
// bytes. One instruction multiplies a tile of 16 rows of a and 32 depth steps by a tile of 16 pairs of depth
// steps and 16 columns of b, and adds the products to a tile of 16 x 16 sums in fp32. Four tiles of sums, two
// of a and two of b occupy all eight registers, so each loaded tile is used twice.

#include "gemm/gemm_table.h"

#include "gemm/panels_simd.h"
#include "gemm/results_simd.h"
#include "gemm/tile_registers_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
extern const kernels::GemmProduct gemm_amx;

#if defined(__AVX512F__)
#pragma GCC push_options
#pragma GCC target("avx512bf16,amx-tile,amx-bf16")

namespace {

static_assert(kPanel == kColumns);
// Maximum depth of a packed panel. A panel of b takes 32 KiB and stays in the L1 cache.
constexpr int64_t kDepthAmx = 512;
constexpr int kSquareDepth = 2 * kSquare;  // depth steps in a tile

// Loads the pairs of the depth steps [0, 32) of one line that is contiguous along the depth. Only the first
// `depth` steps exist; the others are zero.
template <class Element>
SHOESTRING_INLINE F32 line_of_pairs(const typename Element::Type* p, int64_t depth) {
  if (__is_same(Element, BFloat16)) {
    if (depth >= kSquareDepth) return load_as<F32>(p);
    return (F32)_mm512_maskz_loadu_epi16((1u << depth) - 1, p);
  }
  return (F32)_mm512_cvtne2ps_pbh(load_some<Element>(p + kLanes, depth - kLanes),
                                  load_some<Element>(p, depth));
}

// Loads the pair of the depth steps p and p + stride of 16 adjacent lines. Only the first `lines` lines and
// `depth` steps exist; the others are zero.
template <class Element>
SHOESTRING_INLINE F32 lines_of_a_pair(const typename Element::Type* p, int64_t stride, int64_t lines,
                                      int64_t depth) {
  __m512i interleave;
  {
    alignas(64) uint16_t i[2 * kLanes];
    for (int k = 0; k < 2 * kLanes; ++k) i[k] = static_cast<uint16_t>(k / 2 + k % 2 * kLanes);
    __builtin_memcpy(&interleave, i, sizeof i);
  }
  __m512i both;
  if (__is_same(Element, BFloat16)) {
    const auto* bits = reinterpret_cast<const uint16_t*>(p);
    const auto get = [&](const uint16_t* from, int64_t n) {
      return n >= kLanes ? (__m256i)load_as<U16>(from) : (__m256i)masked_load(from, n);
    };
    both = _mm512_inserti64x4(_mm512_castsi256_si512(get(bits, depth > 0 ? lines : 0)),
                              get(bits + stride, depth > 1 ? lines : 0), 1);
  } else {
    both = (__m512i)_mm512_cvtne2ps_pbh(load_some<Element>(p + stride, depth > 1 ? lines : 0),
                                        load_some<Element>(p, depth > 0 ? lines : 0));
  }
  return (F32)_mm512_permutexvar_epi16(interleave, both);
}

// Packs a block of at most 16 lines and 32 depth steps, padded with zeros. With kLinesOutside, the 16 rows in
// the result are lines, else pairs of depth steps.
template <class Element, bool kLinesOutside, bool kWhole>
SHOESTRING_INLINE void pack_block(const typename Element::Type* source, int64_t lines, int64_t depth,
                                  int64_t line_stride, int64_t depth_stride, float* out, int64_t out_stride) {
  if (kWhole) lines = kSquare, depth = kSquareDepth;
  F32 rows[kSquare];
  if (depth_stride == 1) {
#pragma GCC unroll 16
    for (int i = 0; i < kSquare; ++i) {
      rows[i] = kWhole || i < lines ? line_of_pairs<Element>(source + i * line_stride, depth) : F32{};
    }
    if (!kLinesOutside) transpose(rows);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kSquare; ++i) {
      rows[i] = kWhole || 2 * i < depth ? lines_of_a_pair<Element>(source + 2 * i * depth_stride,
                                                                   depth_stride, lines, depth - 2 * i)
                                        : F32{};
    }
    if (kLinesOutside) transpose(rows);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kSquare; ++i) store(out + i * out_stride, rows[i]);
}

template <class Element, bool kLinesOutside>
__attribute__((noinline)) void pack_part(const typename Element::Type* source, int64_t lines, int64_t depth,
                                         int64_t line_stride, int64_t depth_stride, float* out,
                                         int64_t out_stride) {
  pack_block<Element, kLinesOutside, false>(source, lines, depth, line_stride, depth_stride, out, out_stride);
}

// Packs panels of 32 lines. A panel of a consists of tiles: for each 32 depth steps, the tile of its first 16
// lines and the tile of its last 16 lines, each with 16 lines of 64 contiguous bytes. In a panel of b, each
// pair of depth steps has 32 lines x 2 elements, 128 contiguous bytes. The depth is padded to a multiple of
// 32 with zeros.
template <class Element, bool kLinesOutside>
void pack_tiles(const typename Element::Type* source, int64_t lines, int64_t depth, int64_t line_stride,
                int64_t depth_stride, int64_t, float* out) {
  const int64_t panel =
      kernels::packed_size((depth + kSquareDepth - 1) / kSquareDepth * kSquareDepth, 2, kPanel);
  const auto block = [&](int64_t line, int64_t d) {
    const int64_t half = line / kSquare % 2;
    float* to = out + line / kPanel * panel + d / kSquareDepth * 2 * kSquareSize +
                half * (kLinesOutside ? kSquareSize : kSquare);
    constexpr int64_t kStride = kLinesOutside ? kSquare : kPanel;
    const auto* from = source + line * line_stride + d * depth_stride;
    if (lines - line < kSquare || depth - d < kSquareDepth) {
      pack_part<Element, kLinesOutside>(from, lines - line < kSquare ? lines - line : kSquare,
                                        depth - d < kSquareDepth ? depth - d : kSquareDepth, line_stride,
                                        depth_stride, to, kStride);
    } else if (depth_stride == 1) {
      pack_block<Element, kLinesOutside, true>(from, kSquare, kSquareDepth, line_stride, 1, to, kStride);
    } else {
      pack_block<Element, kLinesOutside, true>(from, kSquare, kSquareDepth, 1, depth_stride, to, kStride);
    }
  };
  const int64_t padded = (lines + kPanel - 1) / kPanel * kPanel;
  if (depth_stride == 1) {
    for (int64_t line = 0; line < padded; line += kSquare) {
      for (int64_t d = 0; d < depth; d += kSquareDepth) block(line, d);
    }
  } else {
    for (int64_t d = 0; d < depth; d += kSquareDepth) {
      for (int64_t line = 0; line < padded; line += kSquare) block(line, d);
    }
  }
}

// Multiplies a panel of a by a panel of b. `size` is the depth in pairs.
SHOESTRING_INLINE void add_products(const float* a, const float* b, int64_t size) {
  for (int64_t p = 0; p < size; p += kSquare, a += 2 * kSquareSize, b += 2 * kSquareSize) {
    add_square_products(a, b);
  }
}

// Computes one tile of 32 x 32 results, of which m x n exist.
SHOESTRING_INLINE void tile_amx(const float* a, const float* b, int64_t m, int64_t n, int64_t size, float* c,
                                int64_t stride, float alpha, float beta, const kernels::GemmNarrow* narrow,
                                int64_t i, int64_t j) {
  if (narrow == nullptr) {
    for (int64_t row = 0; row < m; ++row) {
      __builtin_prefetch(c + row * stride, 1);
      __builtin_prefetch(c + row * stride + kPanel - 1, 1);
    }
    if (m == kPanel && n == kPanel && alpha == 1 && (beta == 0 || beta == 1)) {
      beta == 0 ? zero_sums() : load_sums(c, stride);
      add_products(a, b, size);
      return store_sums(c, stride);
    }
  }
  // Sums that continue those in c start from them in each tile, so all tiles round alike.
  alignas(64) float sum[kPanel][kColumns];
  const bool more = alpha == 1 && beta == 1;
  if (more) {
    for (int64_t row = 0; row < kPanel; ++row) {
      for (int64_t k = 0; k < kPanel; k += kLanes) {
        store(sum[row] + k, row < m ? load_some<Float>(c + row * stride + k, n - k) : F32{});
      }
    }
    load_sums(sum[0], kColumns);
  } else {
    zero_sums();
  }
  add_products(a, b, size);
  store_sums(sum[0], kColumns);
  finish_tile(sum[0], c, stride, m, n, alpha, more ? 0 : beta, narrow, i, j);
}

void multiply_amx(const float* a, const float* b, int64_t m, int64_t n, int64_t depth, float* c,
                  int64_t stride, float alpha, float beta, const kernels::GemmNarrow* narrow,
                  bool b_outside) {
  const int64_t padded = (depth + kSquareDepth - 1) / kSquareDepth * kSquareDepth,
                panel = kernels::packed_size(padded, 2, kPanel);
  const auto at = [&](int64_t i, int64_t j) {
    tile_amx(a + i / kPanel * panel, b + j / kPanel * panel, m - i < kPanel ? m - i : kPanel,
             n - j < kPanel ? n - j : kPanel, padded / 2, c + i * stride + j, stride, alpha, beta, narrow, i,
             j);
  };
  start_tiles();
  if (b_outside) {
    for (int64_t j = 0; j < n; j += kPanel) {
      for (int64_t i = 0; i < m; i += kPanel) at(i, j);
    }
  } else {
    for (int64_t i = 0; i < m; i += kPanel) {
      for (int64_t j = 0; j < n; j += kPanel) at(i, j);
    }
  }
  stop_tiles();
}

}  // namespace
#pragma GCC pop_options

const kernels::GemmProduct gemm_amx{
    pack_tiles<Float, false>,
    pack_tiles<BFloat16, false>,
    pack_tiles<Half, false>,
    multiply_amx,
    nullptr,
    2,
    {pack_tiles<Float, true>, pack_tiles<BFloat16, true>, pack_tiles<Half, true>},
    kPanel,
    kPanel,
    kSquareDepth,
    kDepthAmx,
    true};
#else
const kernels::GemmProduct gemm_amx{};
#endif

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
