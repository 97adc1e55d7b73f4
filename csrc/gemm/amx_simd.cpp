// Products of bf16 matrices on AMX tiles. A block of two by two tiles of the result stays in tile registers
// while the depth passes, so that each multiplication needs one load of a tile. The four sums are
// independent, which hides the latency of a multiplication.

#include "gemm/amx_table.h"
#include "gemm/panels_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
extern const kernels::AmxTable amx;

#if defined(__AVX512F__)
namespace {

using kernels::kAmxColumns;
using kernels::kAmxDepth;
using kernels::kAmxLines;

constexpr int64_t kTile = kAmxLines * kAmxDepth / 2;  // elements of a tile
static_assert(kColumns == kAmxColumns && kLanes == kAmxLines && Two::kSteps == 2);

// Sets the elements of a right panel from depth step `depth` to the end of its last tile to zero.
void clear_rest(int64_t depth, float* panel) {
  const int64_t used = (depth + 1) / 2 * kColumns;
  memset(panel + used, 0, (kernels::amx_size(depth, kColumns) - used) * sizeof(float));
}

void pack_right(const uint16_t* source, int64_t lines, int64_t depth, int64_t line_stride,
                int64_t depth_stride, float* out) {
  const int64_t panel = kernels::amx_size(depth, kColumns);
  for (int64_t first = 0; first < lines; first += kColumns, out += panel) {
    const int64_t some = lines - first < kColumns ? lines - first : kColumns;
    pack<Two, BFloat16>(source + first * line_stride, some, depth, line_stride, depth_stride, kColumns, out);
    clear_rest(depth, out);
  }
}

// Packs the tile that starts at `source` and has `lines` lines and `depth` depth steps. Lines are adjacent in
// memory.
SHOESTRING_INLINE void pack_tile_across(const uint16_t* source, int64_t lines, int64_t depth, int64_t stride,
                                        float* out) {
  F32 rows[kLanes];
  if (lines >= kLanes && depth >= kAmxDepth) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
      rows[i] = Two::across<BFloat16>(source + 2 * i * stride, kLanes, 2, stride);
  } else {
    for (int i = 0; i < kLanes; ++i) {
      rows[i] = 2 * i < depth
                    ? across_some<Two, BFloat16>(source + 2 * i * stride, lines, depth - 2 * i, stride)
                    : F32{};
    }
  }
  transpose(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store(out + i * kLanes, rows[i]);
}

void pack_left(const uint16_t* source, int64_t lines, int64_t depth, int64_t line_stride,
               int64_t depth_stride, float* out) {
  for (int64_t first = 0; first < lines; first += kAmxLines) {
    for (int64_t d = 0; d < depth; d += kAmxDepth, out += kTile) {
      const uint16_t* from = source + first * line_stride + d * depth_stride;
      if (line_stride == 1) {
        pack_tile_across(from, lines - first, depth - d, depth_stride, out);
        continue;
      }
      for (int64_t i = 0; i < kAmxLines; ++i) {
        uint16_t* to = reinterpret_cast<uint16_t*>(out + i * kLanes);
        const int64_t wanted = first + i < lines ? depth - d : 0, n = wanted < kAmxDepth ? wanted : kAmxDepth;
        if (n == kAmxDepth) {
          memcpy(to, from + i * line_stride, kAmxDepth * sizeof *to);
        } else {
          memset(to, 0, kAmxDepth * sizeof *to);
          memcpy(to, from + i * line_stride, n * sizeof *to);
        }
      }
    }
  }
}

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16")

// The tile configuration of the CPU: every tile has kAmxLines rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

void begin() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) config.row_bytes[i] = kBytes, config.rows[i] = kAmxLines;
  // The operand of the intrinsic is only the first eight bytes in some versions of GCC.
  asm volatile("ldtilecfg %0" : : "m"(config));
}

void end() { _tile_release(); }

// The intrinsics that load a tile do not tell the compiler that they read memory. This file therefore calls
// them only in functions that write no memory by other means.
constexpr int kRowBytes = kAmxLines * sizeof(float), kResultBytes = kAmxColumns * sizeof(float);

// Computes two panels of lines.
template <bool kAdd>
SHOESTRING_INLINE void two_panels(const float* a, int64_t a_stride, const float* b, int64_t size, float* c) {
  float* below = c + kAmxLines * kAmxColumns;
  if (kAdd) {
    _tile_loadd(0, c, kResultBytes);
    _tile_loadd(1, c + kLanes, kResultBytes);
    _tile_loadd(2, below, kResultBytes);
    _tile_loadd(3, below + kLanes, kResultBytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t d = 0; d < size; d += kAmxDepth / 2, a += kTile, b += 2 * kTile) {
    _tile_loadd(4, a, kRowBytes);
    _tile_loadd(6, b, kResultBytes);
    _tile_loadd(7, b + kLanes, kResultBytes);
    _tile_loadd(5, a + a_stride, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, kResultBytes);
  _tile_stored(1, c + kLanes, kResultBytes);
  _tile_stored(2, below, kResultBytes);
  _tile_stored(3, below + kLanes, kResultBytes);
}

template <bool kAdd>
SHOESTRING_INLINE void one_panel(const float* a, const float* b, int64_t size, float* c) {
  if (kAdd) {
    _tile_loadd(0, c, kResultBytes);
    _tile_loadd(1, c + kLanes, kResultBytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  for (int64_t d = 0; d < size; d += kAmxDepth / 2, a += kTile, b += 2 * kTile) {
    _tile_loadd(4, a, kRowBytes);
    _tile_loadd(6, b, kResultBytes);
    _tile_loadd(7, b + kLanes, kResultBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, c, kResultBytes);
  _tile_stored(1, c + kLanes, kResultBytes);
}

template <bool kAdd>
void strip_of(const float* a, int64_t a_stride, int64_t lines, const float* b, int64_t size, float* c) {
  for (; lines > kAmxLines; lines -= 2 * kAmxLines, a += 2 * a_stride, c += 2 * kAmxLines * kAmxColumns) {
    two_panels<kAdd>(a, a_stride, b, size, c);
  }
  if (lines > 0) one_panel<kAdd>(a, b, size, c);
}

void amx_strip(const float* a, int64_t a_stride, int64_t lines, const float* b, int64_t size, float* c,
               bool add) {
  (add ? strip_of<true> : strip_of<false>)(a, a_stride, lines, b, size, c);
}

#pragma GCC pop_options

}  // namespace

const kernels::AmxTable amx{begin, end, pack_left, pack_right, amx_strip};
#else
const kernels::AmxTable amx{};
#endif

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
