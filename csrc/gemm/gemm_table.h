#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

/// Extra elements after each packed panel, which packing may overwrite.
constexpr int64_t kGemmSlack = 16;

/// Returns the size in elements of a packed panel of `width` lines. Each packed element holds `steps` steps
/// of the depth.
constexpr int64_t packed_size(int64_t depth, int64_t steps, int64_t width) {
  return (depth + steps - 1) / steps * width + kGemmSlack;
}

/// Matrix products in fp32. A product computes one tile of `rows` by `columns` of the result at a time and
/// keeps its sums in registers. Both operands are packed into panels first. A panel holds `width` lines (rows
/// of a, or columns of b), interleaved so that the lines' elements of one depth step are contiguous. Missing
/// lines of the last panel are filled with zeros.
struct GemmProduct {
  // Packs `lines` lines of `depth` elements into panels of packed_size() elements. Element (l, d) is at
  // source[l * line_stride + d * depth_stride], and one of the strides is 1. If line_stride is 1, width is at
  // most the product's columns.
  void (*pack_float)(const float* source, int64_t lines, int64_t depth, int64_t line_stride,
                     int64_t depth_stride, int64_t width, float* out);
  void (*pack_bf16)(const uint16_t* source, int64_t lines, int64_t depth, int64_t line_stride,
                    int64_t depth_stride, int64_t width, float* out);
  void (*pack_fp16)(const uint16_t* source, int64_t lines, int64_t depth, int64_t line_stride,
                    int64_t depth_stride, int64_t width, float* out);

  // Computes c (m, n) = beta c + alpha a b for packed a and b. The rows of c are `stride` elements apart, and
  // c is not read if beta is 0. If b_outside, the outer loop runs over the panels of b, otherwise over those
  // of a. The operand of the inner loop should fit the L2 cache.
  void (*multiply)(const float* a, const float* b, int64_t m, int64_t n, int64_t depth, float* c,
                   int64_t stride, float alpha, float beta, bool b_outside);

  // Computes c (lines, columns) = beta c + alpha a b for one panel of b; c is contiguous. The panels of a are
  // `a_stride` apart and `width` lines wide, from least_rows to rows. c has room for all lines of the last
  // panel, which may be written. `size` is the depth in packed elements; the pointers may start in the middle
  // of a panel.
  using Strip = void (*)(const float* a, int64_t a_stride, int64_t width, int64_t lines, const float* b,
                         int64_t size, float* c, float alpha, float beta);
  Strip strip;

  int64_t steps;  // depth steps that one element of a packed panel holds
};

struct GemmTable {
  int64_t rows, least_rows, columns;
  bool beats_library;  // if false, products of whole matrices use the BLAS library
  GemmProduct fp32;
  // A product that rounds both operands to bf16 and adds two of their products at a time in fp32. Empty if
  // the CPU has no bf16 instructions.
  GemmProduct bf16;
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::GemmTable, gemm)
