#pragma once

#include <cstdint>

// Test kernels that use cuda/core/ptx.h and csrc/core/philox.h, for the emulator and for a GPU. The functions
// below launch the kernels on arrays in device memory, and return an error text or null.

namespace simt_tests {

/// Selects a kernel with one deliberate mistake. Kernels with mistakes run on the emulator only.
enum class Flaw {
  none,
  // mistakes that gemm() can make
  no_wait,
  wait_off_by_one,
  no_barrier_after_wait,
  no_barrier_before_copy,
  misaligned_row,
  // mistakes that copy_async() can make
  no_wait_at_all,
  too_many_bytes,
  to_global_memory,
  // mistakes that matrices() can make
  no_syncwarp,
  row_in_global_memory,
  // mistakes that one_mma() can make
  missing_lane,
  two_places,
  // mistakes that ring() can make
  count_too_small,
  unequal_counts,
  half_a_warp,
  arrive_too_soon,
  arrive_twice,
  no_arrive,
};

enum class Type { bf16, fp16, tf32 };

/// Computes c (m, n) = a (m, k) b. b is (k, n) if b_is_kn, which 16-bit types allow; else it is (n, k) and
/// used transposed. k is a multiple of 8 (for TF32, of 4). If b is (k, n), n is a multiple of 8, too.
struct Gemm {
  Type type;
  bool b_is_kn;
  const void *a, *b;
  float* c;
  int m, n, k;
};
const char* gemm(const Gemm& problem, Flaw flaw = Flaw::none);

/// For each i < 128, copies the first from_bytes[i] of the 16 bytes in[i] to out[i], by a cp.async of `bytes`
/// bytes, which fills the rest with zeros.
const char* copy_async(int bytes, const unsigned char* in, const int* from_bytes, unsigned char* out,
                       Flaw flaw = Flaw::none);

/// Loads the first `count` (1, 2 or 4) of the four 8 x 8 matrices in `in` with ldmatrix, transposed if
/// `trans`. out[lane][matrix] is the register that a lane receives.
const char* matrices(int count, bool trans, const unsigned short* in, unsigned* out, Flaw flaw = Flaw::none);

/// Computes c (16, 8) = a (16, k) b (k, 8) with one mma, where k is 16 (for TF32, 8). The kernel fills the
/// fragments as the table in ptx.h describes them.
const char* one_mma(Type type, const void* a, const void* b, float* c, Flaw flaw = Flaw::none);

/// Applies to_tf32 to n <= 32 fp32 numbers, given as their bits.
const char* round_to_tf32(const unsigned* in, unsigned* out, int n);

/// Computes out[i], i < 64, as the sum of in[chunk][i] over all chunks. Two warps fill a ring of two buffers,
/// and two other warps empty it, with named barriers.
const char* ring(const float* in, int chunks, float* out, Flaw flaw = Flaw::none);

/// Computes out[i] = in[31 - i], i < 32. The first warp hands the values to a second one through a named
/// barrier, and the second warp hands them to a third.
const char* relay(const float* in, float* out);

/// Computes out[i] = philox_at(seed, step, first + i) for i < count, which is at most 1024.
const char* random_bits(uint64_t seed, uint64_t step, uint64_t first, int count, unsigned* out);

}  // namespace simt_tests
