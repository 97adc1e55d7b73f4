#pragma once

#include <cstdint>

#include "primitives.h"

// Kernels that use cuda/core/hopper.h, wgmma.h and tensor_map.h, in the manner of primitives.h. They need a
// Hopper GPU or the emulator.

namespace simt_tests {

/// Selects a kernel with one deliberate mistake. Only the emulator runs kernels with flaws.
enum class HopperFlaw {
  none,
  // flaws of tile_gemm()
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
  // flaws of written_gemm()
  no_async_fence,
  no_barrier_after_write,
  written_under_way,
  a_under_way,
};

/// Computes c (m, n) = a (m, k) b in bf16 or fp16, with b as (n, k) or (k, n). Row lengths are multiples of 8
/// elements. One block computes 64 rows and `columns` columns of c: 48, 64, 96 or 128 (fp16), 192 or 256
/// (bf16). a_in_registers: whether wgmma takes a from registers.
struct TileGemm {
  Type type;
  bool b_is_kn, a_in_registers;
  int columns;
  const void *a, *b;
  float* c;
  int m, n, k;
};
const char* tile_gemm(const TileGemm& problem, HopperFlaw flaw = HopperFlaw::none);

/// Computes c (64, 64) = a (64, 64) b (64, 64)^T in fp16, from operands that threads write to shared memory.
const char* written_gemm(const void* a, const void* b, float* c, HopperFlaw flaw = HopperFlaw::none);

/// Copies the box of 2 slices, 4 rows and 64 columns at {column, row, slice} of `in` (slices 3, rows 5,
/// columns 72) to `out` (2, 4, 64). Elements have 16 bits.
const char* box(const void* in, int column, int row, int slice, unsigned short* out);

/// Returns the error with which a tensor map of 16-bit elements is refused, or null.
const char* map_error(const void* address, int rank, const int64_t* sizes, const int64_t* strides,
                      const int* extent);

}  // namespace simt_tests
