// Products of panels of bf16 numbers on AMX tiles, for callers that pack panels themselves.

#include "gemm/amx_table.h"

#include "gemm/amx_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
extern const kernels::AmxTable amx;

#if defined(__AVX512F__)
#pragma GCC push_options
#pragma GCC target("avx512bf16,amx-tile,amx-bf16")
namespace {

void begin() { start_tiles(); }
void end() { stop_tiles(); }

void pack_left(const uint16_t* source, int64_t lines, int64_t depth, int64_t line_stride,
               int64_t depth_stride, float* out) {
  pack_tiles<BFloat16, true, kAmxLines>(source, lines, depth, line_stride, depth_stride,
                                        kernels::amx_size(depth, kAmxLines), out);
}

void pack_right(const uint16_t* source, int64_t lines, int64_t depth, int64_t line_stride,
                int64_t depth_stride, float* out) {
  pack_tiles<BFloat16, false, kAmxColumns>(source, lines, depth, line_stride, depth_stride,
                                           kernels::amx_size(depth, kAmxColumns), out);
}

void amx_strip(const float* a, int64_t a_stride, int64_t lines, const float* b, int64_t size, float* c,
               bool add) {
  for (; lines > kAmxLines; lines -= 2 * kAmxLines, a += 2 * a_stride, c += 2 * kAmxLines * kAmxColumns) {
    add ? load_sums(c, kAmxColumns) : zero_sums();
    add_products(a, a + a_stride, kSquareSize, b, size);
    store_sums(c, kAmxColumns);
  }
  if (lines <= 0) return;
  if (add) {
    asm volatile("" : : : "memory");  // the intrinsics do not tell the compiler that they read memory
    _tile_loadd(0, c, kAmxColumns * 4);
    _tile_loadd(1, c + kAmxLines, kAmxColumns * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  add_half_products(a, kSquareSize, b, size);
  _tile_stored(0, c, kAmxColumns * 4);
  _tile_stored(1, c + kAmxLines, kAmxColumns * 4);
}

// Copies a block of lines and depth steps to a tile that is padded with zeros.
void pad_tile(const uint16_t* a, int64_t line_stride, int64_t lines, int64_t depth, uint16_t* tile) {
  __builtin_memset(tile, 0, kAmxLines * kAmxDepth * sizeof *tile);
  for (int64_t i = 0; i < lines; ++i) {
    __builtin_memcpy(tile + i * kAmxDepth, a + i * line_stride, depth * sizeof *tile);
  }
}

// Multiplies up to 16 lines, or 17 to 32 if kBelow, by up to three tiles of columns. The columns of b are
// read from the second-level cache, so 32 lines together take half as long as 16 and 16.
template <int kTiles, bool kBelow>
SHOESTRING_INLINE void multiply_unpacked(const uint16_t* a, int64_t line_stride, int64_t lines, int64_t depth,
                                         const float* const (&b)[3], float* c, int64_t c_stride) {
  alignas(64) uint16_t padded[kAmxLines * kAmxDepth];
  const auto load_lines = [&](int64_t first, int64_t d) __attribute__((always_inline)) {
    const uint16_t* from = a + first * line_stride + d;
    const int64_t some = lines - first, steps = depth - d;
    if (some >= kAmxLines && steps >= kAmxDepth) {
      _tile_loadd(6, from, line_stride * 2);
    } else {
      pad_tile(from, line_stride, some < kAmxLines ? some : kAmxLines, steps < kAmxDepth ? steps : kAmxDepth,
               padded);
      asm volatile("" : : : "memory");  // the intrinsics do not tell the compiler that they read memory
      _tile_loadd(6, padded, 64);
    }
  };
  zero_sums();
  _tile_zero(4);
  _tile_zero(5);
  for (int64_t d = 0; d < depth; d += kAmxDepth) {
    const int64_t at = d * kAmxColumns / 2;
    load_lines(0, d);
    _tile_loadd(7, b[0] + at, 128);
    _tile_dpbf16ps(0, 6, 7);
    if constexpr (kTiles > 1) {
      _tile_loadd(7, b[1] + at, 128);
      _tile_dpbf16ps(1, 6, 7);
    }
    if constexpr (kTiles > 2) {
      _tile_loadd(7, b[2] + at, 128);
      _tile_dpbf16ps(2, 6, 7);
    }
    if constexpr (kBelow) {
      load_lines(kAmxLines, d);
      if constexpr (kTiles > 2) _tile_dpbf16ps(5, 6, 7);
      if constexpr (kTiles > 1) {
        if constexpr (kTiles > 2) _tile_loadd(7, b[1] + at, 128);
        _tile_dpbf16ps(4, 6, 7);
        _tile_loadd(7, b[0] + at, 128);
      }
      _tile_dpbf16ps(3, 6, 7);
    }
  }
  float* below = c + kAmxLines * c_stride;
  _tile_stored(0, c, c_stride * 4);
  if constexpr (kTiles > 1) _tile_stored(1, c + kAmxLines, c_stride * 4);
  if constexpr (kTiles > 2) _tile_stored(2, c + 2 * kAmxLines, c_stride * 4);
  if constexpr (kBelow) {
    _tile_stored(3, below, c_stride * 4);
    if constexpr (kTiles > 1) _tile_stored(4, below + kAmxLines, c_stride * 4);
    if constexpr (kTiles > 2) _tile_stored(5, below + 2 * kAmxLines, c_stride * 4);
  }
  asm volatile("" : : : "memory");  // the intrinsics do not say that they write memory
}

template <int kTiles>
void multiply_unpacked_lines(const uint16_t* a, int64_t line_stride, int64_t lines, int64_t depth,
                             const float* const (&b)[3], float* c, int64_t c_stride) {
  constexpr int64_t kStep = 2 * kAmxLines;
  for (int64_t i = 0; i < lines; i += kStep, a += kStep * line_stride, c += kStep * c_stride) {
    if (lines - i > kAmxLines) {
      multiply_unpacked<kTiles, true>(a, line_stride, lines - i < kStep ? lines - i : kStep, depth, b, c,
                                      c_stride);
    } else {
      multiply_unpacked<kTiles, false>(a, line_stride, lines - i, depth, b, c, c_stride);
    }
  }
}

void unpacked(const uint16_t* a, int64_t line_stride, int64_t lines, int64_t depth, const float* b,
              int64_t tiles, float* c) {
  const int64_t panel = kernels::amx_size(depth, kAmxColumns), c_stride = tiles * kAmxLines;
  const auto column = [&](int64_t tile) { return b + tile / 2 * panel + tile % 2 * kAmxLines; };
  for (int64_t tile = 0; tile < tiles; tile += 3, c += 3 * kAmxLines) {
    const float* const some[3] = {column(tile), column(tile + 1), column(tile + 2)};
    const int64_t tiles_left = tiles - tile;
    const auto multiply = tiles_left == 1   ? multiply_unpacked_lines<1>
                          : tiles_left == 2 ? multiply_unpacked_lines<2>
                                            : multiply_unpacked_lines<3>;
    multiply(a, line_stride, lines, depth, some, c, c_stride);
  }
}

}  // namespace
#pragma GCC pop_options

const kernels::AmxTable amx{begin, end, pack_left, pack_right, amx_strip, unpacked};
#else
const kernels::AmxTable amx{};
#endif

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
