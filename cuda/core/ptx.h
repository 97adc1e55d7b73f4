#pragma once

// Inline PTX for instructions that CUDA C++ has no function for. The emulator defines the same functions. All
// except the barriers and ldmatrix need sm_80. Kernels that use instructions of sm_80 also compile for sm_75,
// but would trap there. The host code of an operator therefore launches no such kernel below sm_80.
//
// Layout of the fragments of mma_16x8x16 (A and B in 16 bits) and mma_16x8x8_tf32 (A and B in TF32). With g =
// lane / 4 and t = lane % 4, each line of the table says which elements a register of a lane holds. The lower
// k is in the lower half of a register.
//   16 bit, A (16, 16)                 B (16, 8)                    TF32, A (16, 8)    B (8, 8)
//   a[0]  row g      k 2t, 2t + 1      b[0]  k 2t, 2t + 1  col g    row g      k t     k t      col g
//   a[1]  row g + 8  k 2t, 2t + 1      b[1]  k 2t + 8, +9  col g    row g + 8  k t     k t + 4  col g
//   a[2]  row g      k 2t + 8, +9                                   row g      k t + 4
//   a[3]  row g + 8  k 2t + 8, +9                                   row g + 8  k t + 4
//   C (16, 8) of either:  c[0], c[1]  row g, col 2t, 2t + 1;  c[2], c[3]  row g + 8, col 2t, 2t + 1

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#if !defined(__CUDACC__)
#include "ptx_emulation.h"
#else

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define SHOESTRING_SM80(...) __trap()
#else
#define SHOESTRING_SM80(...) asm volatile(__VA_ARGS__)
#endif

namespace shoestring::cuda {

__device__ inline unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// ---- asynchronous copies

/// Starts an asynchronous copy of 4, 8 or 16 bytes from global to shared memory. Both addresses must be
/// multiples of that size. The copy reads only the first `from_bytes` bytes and fills the rest with zeros.
/// Copies of 16 bytes bypass the L1 cache.
template <int bytes>
__device__ void cp_async(void* shared, const void* global, int from_bytes = bytes) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  if constexpr (bytes == 16) {
    SHOESTRING_SM80("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                    "l"(__cvta_generic_to_global(global)), "r"(from_bytes) : "memory");
  } else {
    SHOESTRING_SM80("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)),
                    "l"(__cvta_generic_to_global(global)), "n"(bytes), "r"(from_bytes) : "memory");
  }
}

/// Makes a group of all asynchronous copies that this thread has started since its last group. A group may be
/// empty.
__device__ inline void cp_async_commit() { SHOESTRING_SM80("cp.async.commit_group;" :: : "memory"); }

/// Waits until at most `pending` groups of this thread's asynchronous copies are in progress, always the most
/// recent ones. To use copies of other threads, every thread first waits for its own, and then all meet at a
/// barrier.
template <int pending>
__device__ void cp_async_wait() {
  SHOESTRING_SM80("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// ---- named barriers

/// Waits until `threads` threads have arrived at the named barrier `id`, 1 to 15. __syncthreads uses barrier
/// 0. `threads` is a multiple of 32 and includes threads that call barrier_arrive. All lanes of a warp call
/// the function.
__device__ inline void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Arrives at the named barrier `id` without waiting. Threads that wait at the barrier then see all writes
/// that this thread did before.
__device__ inline void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- matrices: all 32 lanes of a warp execute these instructions together

/// Loads `count` = 1, 2 or 4 matrices of 8 x 8 16-bit values from shared memory. Lane 8 i + r gives the
/// address of row r of matrix i (16 bytes); the addresses of lanes from 8 * count on are ignored. With g =
/// lane / 4 and t = lane % 4, a lane receives columns 2t and 2t + 1 of row g of each matrix.
template <int count>
__device__ void ldmatrix(uint32_t (&out)[count], const void* row) {
  static_assert(count == 1 || count == 2 || count == 4, "ldmatrix loads 1, 2 or 4 matrices");
  const unsigned from = shared_address(row);
  if constexpr (count == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(out[0])
                 : "r"(from)
                 : "memory");
  } else if constexpr (count == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(out[0]), "=r"(out[1])
                 : "r"(from)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(from)
                 : "memory");
  }
}

/// Loads matrices like ldmatrix, but transposed. With g = lane / 4 and t = lane % 4, a lane receives rows 2t
/// and 2t + 1 of column g of each matrix.
template <int count>
__device__ void ldmatrix_trans(uint32_t (&out)[count], const void* row) {
  static_assert(count == 1 || count == 2 || count == 4, "ldmatrix loads 1, 2 or 4 matrices");
  const unsigned from = shared_address(row);
  if constexpr (count == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(out[0])
                 : "r"(from)
                 : "memory");
  } else if constexpr (count == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(out[0]), "=r"(out[1])
                 : "r"(from)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(from)
                 : "memory");
  }
}

/// Computes c += a b for matrix fragments, with fp32 accumulators. T is __nv_bfloat16 or __half.
template <class T>
__device__ void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

#define SHOESTRING_MMA(TYPES)                                                                      \
  SHOESTRING_SM80("mma.sync.aligned." TYPES                                                        \
                  " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" : "+f"(c[0]), \
                  "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), \
                  "r"(b[0]), "r"(b[1]))

template <>
__device__ inline void mma_16x8x16<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
  SHOESTRING_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
}
template <>
__device__ inline void mma_16x8x16<__half>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  SHOESTRING_MMA("m16n8k16.row.col.f32.f16.f16.f32");
}

/// Computes c += a b for matrix fragments in TF32, which has 10 bits of mantissa. The operands should be
/// results of to_tf32, which rounds; otherwise the hardware truncates them to 10 bits.
__device__ inline void mma_16x8x8_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  SHOESTRING_MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
}
#undef SHOESTRING_MMA

/// Rounds an fp32 number to TF32, to nearest, ties away from zero.
__device__ inline uint32_t to_tf32(float x) {
  uint32_t bits = 0;
  SHOESTRING_SM80("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

}  // namespace shoestring::cuda

#undef SHOESTRING_SM80
#endif
