#pragma once

// Packs bf16 operands into AMX tiles, and multiplies panels of tiles.

#include "gemm/amx_table.h"
#include "gemm/panels_simd.h"
#include "gemm/tile_registers_simd.h"

#if defined(__AVX512F__)
#pragma GCC push_options
#pragma GCC target("avx512bf16,amx-tile,amx-bf16")

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

using kernels::kAmxColumns;
using kernels::kAmxDepth;
using kernels::kAmxLines;

static_assert(kColumns == kAmxColumns && kLanes == kAmxLines && kSquare == kAmxLines && Two::kSteps == 2);

// Loads the pairs of the depth steps [0, 32) of one line that is contiguous along the depth. Only the first
// `depth` steps exist; the others are zero.
template <class Element>
SHOESTRING_INLINE F32 line_of_pairs(const typename Element::Type* p, int64_t depth) {
  if (__is_same(Element, BFloat16)) {
    if (depth >= kAmxDepth) return load_as<F32>(p);
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
  if (kWhole) lines = kAmxLines, depth = kAmxDepth;
  F32 rows[kAmxLines];
  if (depth_stride == 1) {
#pragma GCC unroll 16
    for (int i = 0; i < kAmxLines; ++i) {
      rows[i] = kWhole || i < lines ? line_of_pairs<Element>(source + i * line_stride, depth) : F32{};
    }
    if (!kLinesOutside) transpose(rows);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kAmxLines; ++i) {
      rows[i] = kWhole || 2 * i < depth ? lines_of_a_pair<Element>(source + 2 * i * depth_stride,
                                                                   depth_stride, lines, depth - 2 * i)
                                        : F32{};
    }
    if (kLinesOutside) transpose(rows);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kAmxLines; ++i) store(out + i * out_stride, rows[i]);
}

template <class Element, bool kLinesOutside>
__attribute__((noinline)) void pack_part(const typename Element::Type* source, int64_t lines, int64_t depth,
                                         int64_t line_stride, int64_t depth_stride, float* out,
                                         int64_t out_stride) {
  pack_block<Element, kLinesOutside, false>(source, lines, depth, line_stride, depth_stride, out, out_stride);
}

// Packs panels of kWidth lines, 16 or 32, which start `panel` elements apart. A panel of a (kLinesOutside)
// consists of tiles: for each 32 depth steps, the tile of its first 16 lines, and the tile of its last 16
// lines if it has 32; each tile has 16 lines of 64 contiguous bytes. In a panel of b, each pair of depth
// steps has kWidth lines x 2 elements, which are contiguous. The depth is padded to a multiple of 32 with
// zeros.
template <class Element, bool kLinesOutside, int64_t kWidth>
void pack_tiles(const typename Element::Type* source, int64_t lines, int64_t depth, int64_t line_stride,
                int64_t depth_stride, int64_t panel, float* out) {
  const auto block = [&](int64_t line, int64_t d) {
    const int64_t half = line % kWidth / kAmxLines;
    float* to = out + line / kWidth * panel + d / kAmxDepth * (kWidth / kAmxLines) * kSquareSize +
                half * (kLinesOutside ? kSquareSize : kAmxLines);
    constexpr int64_t kStride = kLinesOutside ? kAmxLines : kWidth;
    const auto* from = source + line * line_stride + d * depth_stride;
    if (lines - line < kAmxLines || depth - d < kAmxDepth) {
      pack_part<Element, kLinesOutside>(from, lines - line < kAmxLines ? lines - line : kAmxLines,
                                        depth - d < kAmxDepth ? depth - d : kAmxDepth, line_stride,
                                        depth_stride, to, kStride);
    } else if (depth_stride == 1) {
      pack_block<Element, kLinesOutside, true>(from, kAmxLines, kAmxDepth, line_stride, 1, to, kStride);
    } else {
      pack_block<Element, kLinesOutside, true>(from, kAmxLines, kAmxDepth, 1, depth_stride, to, kStride);
    }
  };
  const int64_t padded = (lines + kWidth - 1) / kWidth * kWidth;
  if (depth_stride == 1) {
    for (int64_t line = 0; line < padded; line += kAmxLines) {
      for (int64_t d = 0; d < depth; d += kAmxDepth) block(line, d);
    }
  } else {
    for (int64_t d = 0; d < depth; d += kAmxDepth) {
      for (int64_t line = 0; line < padded; line += kAmxLines) block(line, d);
    }
  }
}

// Multiplies 32 lines of a by a panel of b. Tiles of a are `step` elements apart, and `below` points to the
// tiles of the last 16 lines. `size` is the depth in pairs.
SHOESTRING_INLINE void add_products(const float* a, const float* below, int64_t step, const float* b,
                                    int64_t size) {
  for (int64_t p = 0; p < size; p += kAmxLines, a += step, below += step, b += 2 * kSquareSize) {
    add_square_products(a, below, b);
  }
}

// Multiplies 16 lines of a by a panel of b.
SHOESTRING_INLINE void add_half_products(const float* a, int64_t step, const float* b, int64_t size) {
  for (int64_t p = 0; p < size; p += kAmxLines, a += step, b += 2 * kSquareSize) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 128);
    _tile_loadd(7, b + kAmxLines, 128);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
#pragma GCC pop_options
#endif
