#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

/// Behind a packed panel, in elements: packing may write there.
constexpr int64_t kGemmSlack = 16;

/// Elements of a panel of `width` lines whose elements hold so many steps of the depth.
constexpr int64_t packed_size(int64_t depth, int64_t steps, int64_t width) {
  return (depth + steps - 1) / steps * width + kGemmSlack;
}

/// Products of matrices in fp32, a tile of `rows` by `columns` of the result at a time, whose sums stay in
/// registers. Both operands are first packed: in panels of so many lines (rows of a, columns of b), the lines
/// of a panel side by side for each step of the depth that is summed over. A panel that lacks lines is filled
/// up with zeros.
struct GemmProduct {
  // Packs `lines` lines of `depth` elements, element (l, d) at source[l * line_stride + d * depth_stride];
  // one stride is 1. out: panels of packed_size elements. With a line stride of 1 the width is at most the
  // product's columns.
  void (*pack_float)(const float* source, int64_t lines, int64_t depth, int64_t line_stride,
                     int64_t depth_stride, int64_t width, float* out);
  void (*pack_bf16)(const uint16_t* source, int64_t lines, int64_t depth, int64_t line_stride,
                    int64_t depth_stride, int64_t width, float* out);
  void (*pack_fp16)(const uint16_t* source, int64_t lines, int64_t depth, int64_t line_stride,
                    int64_t depth_stride, int64_t width, float* out);

  // c (m, n), rows `stride` apart, = beta c + alpha a b, for packed a and b; c is not read where beta is 0.
  // The panels of b are walked through once if b_outside, else those of a: the other side should fit the
  // second-level cache.
  void (*multiply)(const float* a, const float* b, int64_t m, int64_t n, int64_t depth, float* c,
                   int64_t stride, float alpha, float beta, bool b_outside);

  // Of one panel of b: c (lines, columns), contiguous, = beta c + alpha a b, for panels of a, `a_stride`
  // apart, of `width` lines, from least_rows to rows; c has room for the last panel's lines, all of which may
  // be written. size: of the depth, in packed elements; the panels may begin amid it.
  using Strip = void (*)(const float* a, int64_t a_stride, int64_t width, int64_t lines, const float* b,
                         int64_t size, float* c, float alpha, float beta);
  Strip strip;

  int64_t steps;  // of the depth, that an element of a packed panel holds
};

struct GemmTable {
  int64_t rows, least_rows, columns;
  bool beats_library;  // else products of whole matrices are the library's
  GemmProduct fp32;
  // Both operands are rounded to bf16, and two of their products at a time are added in fp32. Where the CPU
  // has the units.
  GemmProduct bf16;
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::GemmTable, gemm)
