#pragma once

#include <cstdint>

#include "primitives.h"

// Kernels over cuda/core/hopper.h, wgmma.h and tensor_map.h, as primitives.h has them. A GPU has to be a
// Hopper.

namespace simt_tests {

/// One line of a kernel that is wrong on purpose; only the emulator runs those.
enum class HopperFlaw {
  none,
  // tile_gemm
  no_full_wait,
  no_empty_wait,
  released_before_wait,
  too_many_bytes,
  too_few_bytes,
  bytes_after_copy,
  wrong_parity,
  no_init_fence,
  no_barrier_after_init,
  no_wgmma_fence,
  no_commit,
  touched_accumulators,
  half_a_warpgroup,
  two_operands,
  unaligned_tile,
  one_coordinate_less,
  too_many_registers,
  no_wait_at_all,
  // written_gemm
  no_async_fence,
  no_barrier_after_write,
  written_under_way,
  a_under_way,
};

/// c (m, n) = a (m, k) b, with b as (n, k), or (k, n): bf16 or fp16, rows of multiples of 8 elements. One
/// block makes 64 rows of c and `columns` = 64, 96, 128 (fp16), 192 or 256 (bf16) columns. a_in_registers: a
/// of wgmma.
struct TileGemm {
  Type type;
  bool b_is_kn, a_in_registers;
  int columns;
  const void *a, *b;
  float* c;
  int m, n, k;
};
const char* tile_gemm(const TileGemm& problem, HopperFlaw flaw = HopperFlaw::none);

/// c (64, 64) = a (64, 64) b (64, 64)^T in fp16, whose operands threads write to shared memory.
const char* written_gemm(const void* a, const void* b, float* c, HopperFlaw flaw = HopperFlaw::none);

/// The (4 rows, 2 slices) box at {column, row, slice} of in (slices 3, rows 5, columns 72), of 16-bit
/// numbers: out (2, 4, 64).
const char* box(const void* in, int column, int row, int slice, unsigned short* out);

/// The text with which a tensor map of these is refused, or null; 16-bit elements.
const char* map_error(const void* address, int rank, const int64_t* sizes, const int64_t* strides,
                      const int* extent);

}  // namespace simt_tests
