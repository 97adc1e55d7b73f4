#pragma once

// The tile registers of AMX. Every function that uses them must be compiled for amx-tile and amx-bf16.

#include "core/element_simd.h"

#if defined(__AVX512F__)
#pragma GCC push_options
#pragma GCC target("avx512bf16,amx-tile,amx-bf16")

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

constexpr int kSquare = 16;                     // rows of a tile, and 32-bit elements in one of its rows
constexpr int kSquareSize = kSquare * kSquare;  // 32-bit elements in a tile
constexpr int kPanel = 2 * kSquare;             // lines in a panel

// shape of the tile registers: all of them have 16 rows of 64 bytes
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// A kernel calls start_tiles() before its first tile instruction, and stop_tiles() after its last one.
SHOESTRING_INLINE void start_tiles() {
  const TileShapes config;
  asm volatile("ldtilecfg %0" : : "m"(config));  // GCC 12's intrinsic reads only the first eight bytes
}
SHOESTRING_INLINE void stop_tiles() { _tile_release(); }

// Adds the products of 16 pairs of depth steps of 32 lines of a and a panel of b to the sums in the tiles 0
// to
// 3. `below` points to the tile of the last 16 lines. One instruction multiplies a tile of 16 lines of a by a
// tile of 16 columns of b. Each loaded tile is used twice, and the four sums are independent, which hides the
// latency of a multiplication.
SHOESTRING_INLINE void add_square_products(const float* a, const float* below, const float* b) {
  _tile_loadd(6, b, 128);
  _tile_loadd(4, a, 64);
  _tile_loadd(7, b + kSquare, 128);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(5, below, 64);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// The sums are in the tiles 0 to 3. `stride` is the distance in fp32 values between rows of c.
SHOESTRING_INLINE void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
SHOESTRING_INLINE void load_sums(const float* c, int64_t stride) {
  asm volatile("" : : : "memory");  // the intrinsics do not tell the compiler that they read memory
  _tile_loadd(0, c, stride * 4);
  _tile_loadd(1, c + kSquare, stride * 4);
  _tile_loadd(2, c + kSquare * stride, stride * 4);
  _tile_loadd(3, c + kSquare * stride + kSquare, stride * 4);
}
SHOESTRING_INLINE void store_sums(float* c, int64_t stride) {
  _tile_stored(0, c, stride * 4);
  _tile_stored(1, c + kSquare, stride * 4);
  _tile_stored(2, c + kSquare * stride, stride * 4);
  _tile_stored(3, c + kSquare * stride + kSquare, stride * 4);
  asm volatile("" : : : "memory");  // the intrinsics do not say that they write memory
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
#pragma GCC pop_options
#endif
