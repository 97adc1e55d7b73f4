#pragma once

#include <cstdint>

#include "core/capability.h"

namespace shoestring::kernels {

/// Number of extra elements after each packed panel, because packing may write past the panel's end.
constexpr int64_t kGemmSlack = 16;

/// Returns the size in elements of a packed panel of `width` lines. One packed element holds `steps` depth
/// steps of a line: an fp32 number, or two bf16 numbers.
constexpr int64_t packed_size(int64_t depth, int64_t steps, int64_t width) {
  return (depth + steps - 1) / steps * width + kGemmSlack;
}

/// A 16-bit matrix that receives gain * x + offset for each result x of a product, in place of the fp32
/// matrix c. The rows of `data` are `stride` elements apart.
struct GemmNarrow {
  uint16_t* data;
  int64_t stride;
  bool fp16;  // fp16 if true, else bf16
  // one number for each column, or null for a gain of 1 and an offset of 0
  const float *gain, *offset;
};

/// Memory that is packed after a product: `rows` rows of `bytes` bytes, `stride` bytes apart. The product
/// asks for it while it multiplies, so that packing need not wait for the memory. No rows: nothing is known.
struct GemmAhead {
  const char* data = nullptr;
  int64_t rows = 0, bytes = 0, stride = 0;
};

/// Functions that pack lines of fp32, bf16 or fp16 elements into panels.
///
/// Each packs `lines` lines of `depth` elements into panels of `width` lines. Element d of line l is at
/// source[l * line_stride + d * depth_stride], and one of the two strides is 1. If line_stride is 1, `width`
/// must not exceed the columns of a tile.
struct GemmPack {
  template <class T>
  using Function = void (*)(const T* source, int64_t lines, int64_t depth, int64_t line_stride,
                            int64_t depth_stride, int64_t width, float* out);
  Function<float> from_float;
  Function<uint16_t> from_bf16, from_fp16;
};

/// Functions for matrix products with fp32 results. They compute one tile of the result at a time, `rows` by
/// `columns` of GemmTable, and keep its sums in registers. Both operands are first packed into panels. A
/// panel holds `width` lines (rows of a, or columns of b), interleaved so that the elements of one depth step
/// (one index of the inner dimension) are contiguous. The last panel is padded with lines of zeros.
struct GemmProduct {
  // Pack panels of b and, except for AMX, of a. A panel has packed_size() elements.
  GemmPack::Function<float> pack_float;
  GemmPack::Function<uint16_t> pack_bf16, pack_fp16;

  // Computes c (m, n) = beta c + alpha a b for packed a and b. The rows of c are `stride` elements apart, and
  // c is not read if beta is 0. If `narrow` is not null, the result is written there instead of to c. If
  // in_groups is true, `stride` may be 0: then c consists of contiguous tiles of width_a x width_b elements,
  // row of tiles by row of tiles, with room for whole tiles. The outer loop runs over the panels of b if
  // b_outside is true, else over the panels of a. The operand of the inner loop should fit the L2 cache. AMX
  // leaves `ahead` out.
  void (*multiply)(const float* a, const float* b, int64_t m, int64_t n, int64_t depth, float* c,
                   int64_t stride, float alpha, float beta, const GemmNarrow* narrow, bool b_outside,
                   const GemmAhead& ahead);

  // Computes c (lines, columns) = beta c + alpha a b for several panels of a and one panel of b; c is
  // contiguous. The panels of a start `a_stride` elements apart. Each has `width` lines, where least_rows <=
  // width <= rows in GemmTable. If `lines` is not a multiple of width, the kernel may also write the padding
  // lines of the last panel, so c must have room for them. `size` is the depth in packed elements. a and b
  // may point to the middle of a panel.
  using Strip = void (*)(const float* a, int64_t a_stride, int64_t width, int64_t lines, const float* b,
                         int64_t size, float* c, float alpha, float beta);
  Strip strip;

  int64_t steps;  // number of depth steps in one element of a packed panel

  // The functions and sizes of multiply(): how panels of a are packed, the number of lines in a panel of a
  // and of b, the number of depth steps to a multiple of which panels are padded with zeros, and the maximum
  // depth of a panel. The sums of a tile restart with each panel.
  GemmPack rows;
  int64_t width_a, width_b, depth_multiple, most_depth;
  // Whether a thread divides the shorter side of its part of the result into groups, so that the thread's own
  // block need not be small for the sums to stay in the L2 cache.
  bool in_groups;
};

struct GemmTable {
  int64_t rows, least_rows, columns;
  // whether the kernels are faster than the BLAS library; if not, whole matrix products use BLAS
  bool beats_library;
  GemmProduct fp32;
  // Functions that round both operands to bf16 and add pairs of products in fp32. They are null pointers if
  // this build of the kernels has no bf16 instructions.
  GemmProduct bf16;
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::GemmTable, gemm)
// Products of bf16 matrices with AMX. Only the AVX-512 build has these functions.
SHOESTRING_CPU_TABLE(kernels::GemmProduct, gemm_amx)
