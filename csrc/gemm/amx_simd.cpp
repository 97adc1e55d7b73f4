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

}  // namespace
#pragma GCC pop_options

const kernels::AmxTable amx{begin, end, pack_left, pack_right, amx_strip};
#else
const kernels::AmxTable amx{};
#endif

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
