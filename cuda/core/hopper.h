#pragma once

// Instructions of Hopper GPUs, for kernels that are compiled for sm_90a only: barriers that count arrivals
// and bytes, tile copies (TMA) that complete on such barriers, and the transfer of registers between
// warpgroups. A warpgroup is four warps; the index of its first warp is a multiple of 4. The matrix products
// are in wgmma.h, and the host code for tensor maps is in tensor_map.h.
//
// A tile in shared memory has rows of 128 bytes and starts at a multiple of 1024 bytes. Its 16-byte chunks
// are swizzled: the chunk's index in its row (address bits 4 to 6) is xor-ed with the row's index (bits 7 to
// 9). So chunks with the same index in eight consecutive rows are in eight different groups of banks.

#include <cstdint>

#include "cuda/core/ptx.h"

#if defined(__CUDACC__)
#include <cuda.h>  // for the type CUtensorMap only: the library does not link libcuda
#else
#include "hopper_emulation.h"  // defines the same functions as this header, for the emulator
#endif

namespace shoestring::cuda {

/// A barrier (mbarrier) in shared memory. A phase of the barrier completes when `arrivals` threads have
/// arrived and all announced bytes have been copied; then the next phase begins. The phases have the parities
/// 0, 1, 0, ...
struct alignas(8) Mbarrier {
  uint64_t state;
};

#if defined(__CUDACC__)

/// A TMA descriptor. A kernel takes it as a parameter of type `const __grid_constant__ TensorMap`.
using TensorMap = CUtensorMap;

/// Initialises a barrier in shared memory. One thread calls this function and then mbarrier_init_fence(). The
/// other threads of the block may use the barrier after a __syncthreads().
__device__ inline void mbarrier_init(Mbarrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals)
               : "memory");
}
__device__ inline void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Arrives at the barrier. Threads that wait for the barrier's phase then see all writes that this thread did
/// before.
__device__ inline void mbarrier_arrive(Mbarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

/// Announces that this thread will start copies of `bytes` bytes in this phase of the barrier, and arrives at
/// the barrier.
__device__ inline void mbarrier_arrive_expect(Mbarrier& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(bytes)
               : "memory");
}

/// Waits until the barrier's phase of this parity has completed, that is, while the current phase has this
/// parity. On a new barrier, a wait for parity 1 returns at once.
__device__ inline void mbarrier_wait(Mbarrier& barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
      "@!over bra again;\n"
      "}" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

/// Makes this thread's writes to shared memory visible to later TMA copies and wgmma products. For the writes
/// of several threads, each of them calls this function before a common barrier.
__device__ inline void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Starts the copy of a box of a tensor to a swizzled tile in shared memory. One thread calls this function.
/// `at` is the index of the box's first element, innermost dimension first; the innermost index must not be
/// negative. Elements outside the tensor become zeros. The copy reports the bytes of the whole box to the
/// barrier.
template <int rank>
__device__ void tma_load(void* tile, const TensorMap& map, Mbarrier& barrier, const int (&at)[rank]) {
  static_assert(rank >= 3 && rank <= 5, "a tensor map has three to five dimensions");
  const unsigned to = shared_address(tile), full = shared_address(&barrier);
  const auto from = reinterpret_cast<uint64_t>(&map);
  if constexpr (rank == 3) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
        "%5}], [%2];" ::"r"(to),
        "l"(from), "r"(full), "r"(at[0]), "r"(at[1]), "r"(at[2])
        : "memory");
  } else if constexpr (rank == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6}], [%2];" ::"r"(to),
        "l"(from), "r"(full), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3])
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
        "l"(from), "r"(full), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4])
        : "memory");
  }
}

/// Reduces or raises the number of registers per thread, from here on, to `count`: a multiple of 8 from 24 to
/// 256. All threads of a warpgroup call it. registers_grow waits until other warpgroups have released enough
/// registers. The kernel needs __launch_bounds__(threads, 1).
template <int count>
__device__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

#endif

}  // namespace shoestring::cuda
