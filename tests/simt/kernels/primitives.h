#pragma once

#include <cstdint>

// Kernels over cuda/core/ptx.h and csrc/core/philox.h, for the emulator and for a GPU. Launchers take device
// memory, and return the error or null.

namespace simt_tests {

/// One line of a kernel that is wrong on purpose; only the emulator runs those.
enum class Flaw {
  none,
  // gemm
  no_wait,
  wait_off_by_one,
  no_barrier_after_wait,
  no_barrier_before_copy,
  misaligned_row,
  // copy_async
  no_wait_at_all,
  too_many_bytes,
  to_global_memory,
  // matrices
  no_syncwarp,
  row_in_global_memory,
  // one_mma
  missing_lane,
  two_places,
  // ring
  count_too_small,
  unequal_counts,
  half_a_warp,
  arrive_too_soon,
  arrive_twice,
  no_arrive,
};

enum class Type { bf16, fp16, tf32 };

/// c (m, n) = a (m, k) b, with b as (n, k), or as (k, n) for 16-bit types. k, and n in the second case, are
/// multiples of 8 (TF32: 4).
struct Gemm {
  Type type;
  bool b_is_kn;
  const void *a, *b;
  float* c;
  int m, n, k;
};
const char* gemm(const Gemm& problem, Flaw flaw = Flaw::none);

/// out[i] (16 bytes each) = the first from_bytes[i] bytes of in[i], by cp.async of `bytes` each, then zeros.
/// 128 threads.
const char* copy_async(int bytes, const unsigned char* in, const int* from_bytes, unsigned char* out,
                       Flaw flaw = Flaw::none);

/// What a lane gets from 8 by 8 matrices: out[lane][matrix]; in: 4 matrices, of which `count` = 1, 2 or 4 are
/// loaded.
const char* matrices(int count, bool trans, const unsigned short* in, unsigned* out, Flaw flaw = Flaw::none);

/// One mma, its operands filled as the table in ptx.h says: c (16, 8) = a (16, k) b (k, 8), k = 16 (TF32: 8).
const char* one_mma(Type type, const void* a, const void* b, float* c, Flaw flaw = Flaw::none);

/// to_tf32 of n <= 32 floats, as bits.
const char* round_to_tf32(const unsigned* in, unsigned* out, int n);

/// out[i] = sum over the chunks of in[chunk][i], i < 64: two warps fill a ring of two buffers, two empty it.
const char* ring(const float* in, int chunks, float* out, Flaw flaw = Flaw::none);

/// out[i] = in[31 - i], i < 32: a warp passes it to a second one by barriers, and that one on to a third.
const char* relay(const float* in, float* out);

/// philox_at(seed, step, first + i), i < count <= 1024.
const char* random_bits(uint64_t seed, uint64_t step, uint64_t first, int count, unsigned* out);

}  // namespace simt_tests
