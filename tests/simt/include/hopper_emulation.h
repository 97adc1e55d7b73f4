#pragma once

// The functions of cuda/core/hopper.h and cuda/core/wgmma.h, implemented by the emulator. Their comments are
// in those two headers.

#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "simt_hopper.h"

namespace shoestring::cuda {

using simt::Where;
using TensorMap = simt::TensorMap;

/// Returns the offset of an address from the beginning of dynamic shared memory, in bytes. wgmma descriptors
/// contain such offsets.
inline uint64_t shared_address(const void* p, Where where = Where::current()) {
  return simt::shared_offset(p, where);
}

template <class Mbarrier>
void mbarrier_init(Mbarrier& b, int arrivals, Where where = Where::current()) {
  simt::mbarrier_init(&b, arrivals, where);
}
inline void mbarrier_init_fence(Where where = Where::current()) { simt::mbarrier_init_fence(where); }
template <class Mbarrier>
void mbarrier_arrive(Mbarrier& b, Where where = Where::current()) {
  simt::mbarrier_arrive(&b, where);
}
template <class Mbarrier>
void mbarrier_arrive_expect(Mbarrier& b, int bytes, Where where = Where::current()) {
  simt::mbarrier_arrive_expect(&b, bytes, where);
}
template <class Mbarrier>
void mbarrier_wait(Mbarrier& b, int parity, Where where = Where::current()) {
  simt::mbarrier_wait(&b, parity, where);
}

inline void async_fence(Where where = Where::current()) { simt::async_fence(where); }
template <int rank, class Mbarrier>
void tma_load(void* tile, const TensorMap& map, Mbarrier& b, const int (&at)[rank],
              Where where = Where::current()) {
  static_assert(rank >= 3 && rank <= 5, "a tensor map has three to five dimensions");
  simt::tensor_copy(tile, map, &b, at, rank, where);
}

template <int count>
void registers_shrink(Where where = Where::current()) {
  simt::set_registers(count, false, where);
}
template <int count>
void registers_grow(Where where = Where::current()) {
  simt::set_registers(count, true, where);
}

template <class Registers>
void wgmma_pin(Registers&) {}
template <int tiles>
void wgmma_fence(float (&)[tiles][4], Where where = Where::current()) {
  simt::wgmma_fence(where);
}
inline void wgmma_commit(Where where = Where::current()) { simt::wgmma_commit(where); }
template <int pending, int tiles>
void wgmma_wait(float (&)[tiles][4], Where where = Where::current()) {
  simt::wgmma_wait(pending, where);
}

template <class T, bool b_is_kn, int tiles>
void wgmma(float (&d)[tiles][4], const uint32_t* a, uint64_t a_at, uint64_t b, bool add, Where where) {
  static_assert(tiles == 6 || tiles == 8 || tiles == 12 || tiles == 16 || tiles == 24 || tiles == 32,
                "wgmma: n is 48, 64, 96, 128, 192 or 256");
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>,
                "wgmma multiplies __nv_bfloat16 or __half");
  simt::wgmma({&d[0][0], tiles * 8, a, a_at, b, b_is_kn, std::is_same_v<T, __half>, add}, where);
}
template <class T, bool b_is_kn, int tiles>
void wgmma(float (&d)[tiles][4], uint64_t a, uint64_t b, bool add, Where where = Where::current()) {
  wgmma<T, b_is_kn>(d, nullptr, a, b, add, where);
}
template <class T, bool b_is_kn, int tiles>
void wgmma(float (&d)[tiles][4], const uint32_t (&a)[4], uint64_t b, bool add,
           Where where = Where::current()) {
  wgmma<T, b_is_kn>(d, &a[0], 0, b, add, where);
}

}  // namespace shoestring::cuda
