#pragma once

#include <cstdint>

// Kernels that use cuda/core/ptx.h and csrc/core/philox.h, for the emulator and for a GPU. Launchers take
// device memory, and return an error or null.

namespace simt_tests {

/// Selects a kernel with one deliberate mistake. Only the emulator runs kernels with flaws.
enum class Flaw {
  none,
  // flaws of gemm()
  no_wait,
  wait_off_by_one,
  no_barrier_after_wait,
  no_barrier_before_copy,
  misaligned_row,
  // flaws of copy_async()
  no_wait_at_all,
  too_many_bytes,
  to_global_memory,
  // flaws of matrices()
  no_syncwarp,
  row_in_global_memory,
  // flaws of one_mma()
  missing_lane,
  two_places,
  // flaws of ring()
  count_too_small,
  unequal_counts,
  half_a_warp,
  arrive_too_soon,
  arrive_twice,
  no_arrive,
};

enum class Type { bf16, fp16, tf32 };

/// Computes c (m, n) = a (m, k) b, with b as (n, k), or as (k, n) for 16-bit types. k is a multiple of 8
/// (TF32: 4); so is n if b is (k, n).
struct Gemm {
  Type type;
  bool b_is_kn;
  const void *a, *b;
  float* c;
  int m, n, k;
};
const char* gemm(const Gemm& problem, Flaw flaw = Flaw::none);

/// Copies the first from_bytes[i] bytes of in[i] to out[i] (16 bytes each), then zeros, by cp.async of
/// `bytes` bytes. 128 threads.
const char* copy_async(int bytes, const unsigned char* in, const int* from_bytes, unsigned char* out,
                       Flaw flaw = Flaw::none);

/// Loads `count` (1, 2 or 4) of the four 8 by 8 matrices in `in` by ldmatrix. out[lane][matrix] is what a
/// lane receives.
const char* matrices(int count, bool trans, const unsigned short* in, unsigned* out, Flaw flaw = Flaw::none);

/// Computes c (16, 8) = a (16, k) b (k, 8) by one mma, with k = 16 (TF32: 8). Fills the fragments as the
/// table in ptx.h says.
const char* one_mma(Type type, const void* a, const void* b, float* c, Flaw flaw = Flaw::none);

/// Applies to_tf32 to n <= 32 floats, given as bits.
const char* round_to_tf32(const unsigned* in, unsigned* out, int n);

/// Computes out[i] = sum over the chunks of in[chunk][i], i < 64. Two warps fill a ring of two buffers, and
/// two warps empty it.
const char* ring(const float* in, int chunks, float* out, Flaw flaw = Flaw::none);

/// Computes out[i] = in[31 - i], i < 32. One warp hands the values to a second warp through barriers, and the
/// second warp hands them to a third.
const char* relay(const float* in, float* out);

/// Computes philox_at(seed, step, first + i) for i < count <= 1024.
const char* random_bits(uint64_t seed, uint64_t step, uint64_t first, int count, unsigned* out);

}  // namespace simt_tests
