#pragma once

// What Hopper GPUs have besides, for kernels that are compiled for sm_90a alone: barriers that count arrivals
// and bytes, copies of whole tiles that complete on them, and registers that pass from one warpgroup (four
// warps, the first a multiple of 4) to another. Their products are in wgmma.h, the host's side of tensor maps
// in tensor_map.h.
//
// A tile in shared memory has rows of 128 bytes and begins at a multiple of 1024. Its 16-byte chunks are
// swizzled: the chunk's number, bits 4 to 6 of the address, is xor-ed with the row's, bits 7 to 9, so that
// eight rows lie in different banks.

#include <cstdint>

#include "cuda/core/ptx.h"

#if defined(__CUDACC__)
#include <cuda.h>  // the type alone: nothing of libcuda is linked
#else
#include "hopper_emulation.h"  // the emulator's twins have the same names
#endif

namespace shoestring::cuda {

/// In shared memory. Its phase is over when `arrivals` threads have arrived and all bytes that were announced
/// are there; then the next one begins. Phases have the parities 0, 1, 0, ...
struct alignas(8) Mbarrier {
  uint64_t state;
};

#if defined(__CUDACC__)

/// A kernel takes it as `const __grid_constant__ TensorMap`.
using TensorMap = CUtensorMap;

/// By one thread, which then calls mbarrier_init_fence() before the block synchronises.
__device__ inline void mbarrier_init(Mbarrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals)
               : "memory");
}
__device__ inline void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// What this thread did before is seen by those that wait for the phase.
__device__ inline void mbarrier_arrive(Mbarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

/// Announces bytes of copies, which are started behind it, and arrives.
__device__ inline void mbarrier_arrive_expect(Mbarrier& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(bytes)
               : "memory");
}

/// Waits until the phase of this parity is over: that of the other parity is under way. On a new barrier, a
/// wait for parity 1 returns at once.
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

/// Copies and products that come after see what this thread has written to shared memory; others' after a
/// barrier.
__device__ inline void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Starts the copy of a map's box, whose first element is `at` (innermost dimension first, that one not below
/// 0), to a swizzled tile; zeros take the place of what lies outside of the tensor. One thread. The bytes of
/// the whole box arrive on the barrier.
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

/// Registers of a thread from here on, a multiple of 8 from 24 to 256: a whole warpgroup gives some back, or
/// waits until there are enough. The kernel has a __launch_bounds__(threads, 1).
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
