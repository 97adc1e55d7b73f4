#pragma once

#include <cstdint>

#include "gemm/gemm_table.h"

namespace shoestring::kernels {

// A tile of the left operand has kAmxLines lines and kAmxDepth depth steps; 1 KiB of bf16 numbers.
constexpr int64_t kAmxLines = 16, kAmxDepth = 32;
// Number of columns of a panel of the right operand.
constexpr int64_t kAmxColumns = 32;

/// Returns the size of a panel of `width` lines in fp32 elements, each of which holds two bf16 numbers. The
/// depth is rounded up to whole tiles.
constexpr int64_t amx_size(int64_t depth, int64_t width) {
  return (depth + kAmxDepth - 1) / kAmxDepth * kAmxDepth / 2 * width;
}

/// Functions for products of bf16 matrices on AMX tiles, with sums in fp32. The pointers are null in builds
/// without AVX-512, and may be called if gemm::multiplies_by_tiles().
struct AmxTable {
  // A thread calls begin() before strip(), and end() before it calls code of others that may use AMX.
  void (*begin)();
  void (*end)();

  // Packs lines of the left operand into panels of kAmxLines lines, amx_size(depth, kAmxLines) elements each.
  // A panel is a row of tiles, and a tile holds kAmxDepth consecutive numbers of each line. Element d of line
  // l is at source[l * line_stride + d * depth_stride], and one of the two strides is 1. Missing lines and
  // depth steps are zeros.
  void (*pack_left)(const uint16_t* source, int64_t lines, int64_t depth, int64_t line_stride,
                    int64_t depth_stride, float* out);
  // Packs lines (columns) of the right operand into panels of kAmxColumns lines, amx_size(depth, kAmxColumns)
  // elements each. The format is that of the bf16 product of GemmTable. Missing depth steps are zeros.
  void (*pack_right)(const uint16_t* source, int64_t lines, int64_t depth, int64_t line_stride,
                     int64_t depth_stride, float* out);

  // Computes c (lines, kAmxColumns) = c + a b, or c = a b if `add` is false, for several panels of a and one
  // panel of b. c is contiguous, and has room for whole panels. The panels of a start `a_stride` elements
  // apart. `size` is the depth in packed elements, a multiple of kAmxDepth / 2. a and b may point to a later
  // tile of a panel.
  void (*strip)(const float* a, int64_t a_stride, int64_t lines, const float* b, int64_t size, float* c,
                bool add);

  // Computes c (lines, tiles * kAmxLines) = a b for columns of b that pack_right() packed with the same
  // depth. Lines of a are contiguous, start `line_stride` elements apart, and are not packed: a product with
  // few columns uses each of their elements only a few times. c is contiguous, and has room for whole groups
  // of 2 * kAmxLines lines.
  void (*unpacked)(const uint16_t* a, int64_t line_stride, int64_t lines, int64_t depth, const float* b,
                   int64_t tiles, float* c);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::AmxTable, amx)
