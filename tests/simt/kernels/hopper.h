#pragma once

#include <cstdint>

#include "primitives.h"

// Test kernels that use cuda/core/hopper.h, wgmma.h and tensor_map.h. As in primitives.h, the functions below
// launch a kernel on arrays in device memory, and return an error text or null. The kernels need a Hopper GPU
// or the emulator.

namespace simt_tests {

/// Selects a kernel with one deliberate mistake. Kernels with mistakes run on the emulator only.
enum class HopperFlaw {
  none,
  // mistakes that tile_gemm() can make
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
  // mistakes that written_gemm() can make
  no_async_fence,
  no_barrier_after_write,
  written_under_way,
  a_under_way,
  // mistakes that box() can make
  waits_for_own_warp,
};

/// Computes c (m, n) = a (m, k) b in bf16 or fp16. b is (k, n) if b_is_kn, else (n, k) and used transposed.
/// Row lengths are multiples of 8 elements. One block computes 64 rows and `columns` columns of c. `columns`
/// is 48, 64, 96 or 128 for fp16, and 192 or 256 for bf16. If a_in_registers, wgmma takes operand a from
/// registers.
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

/// Copies a box of 2 slices, 4 rows and 64 columns, which starts at {column, row, slice} of `in`, to `out`
/// (2, 4, 64). `in` has 3 slices, 5 rows and 72 columns of 16-bit elements.
const char* box(const void* in, int column, int row, int slice, unsigned short* out,
                HopperFlaw flaw = HopperFlaw::none);

/// Tries to encode a tensor map of 16-bit elements, and returns the error or null.
const char* map_error(const void* address, int rank, const int64_t* sizes, const int64_t* strides,
                      const int* extent);

}  // namespace simt_tests
