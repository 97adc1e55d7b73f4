#pragma once

// What the twins of cuda/core/hopper.h and wgmma.h stand on.

#include <cstddef>
#include <cstdint>

#include "simt.h"

namespace simt {

/// A barrier in shared memory that counts arrivals and bytes of tensor copies: see cuda/core/hopper.h.
void mbarrier_init(void* barrier, int arrivals, Where where);
void mbarrier_init_fence(Where where);
void mbarrier_arrive(void* barrier, Where where);
void mbarrier_arrive_expect(void* barrier, int bytes, Where where);
void mbarrier_wait(void* barrier, int parity, Where where);

/// The thread's writes so far are seen by tensor copies and wgmma that come after.
void async_fence(Where where);

/// Up to five dimensions of elements, the innermost side by side; a tile is a box of them. Sizes in elements,
/// strides in bytes.
struct alignas(64) TensorMap {
  uint64_t magic;
  const unsigned char* address;
  int rank, element;
  int64_t sizes[5], strides[5];
  int box[5];
};
/// An error's text, or null; strides has rank - 1 numbers, those of dimension 1 and up.
const char* encode_tensor_map(TensorMap* map, const void* address, int rank, int element,
                              const int64_t* sizes, const int64_t* strides, const int* box);
void tensor_copy(void* to, const TensorMap& map, void* barrier, const int* at, int rank, Where where);

/// wgmma of m64 nN k16, 16-bit operands: a from registers, or by a descriptor where they are null.
struct Wgmma {
  float* d;  // n / 2
  int n;
  const uint32_t* a;
  uint64_t a_at, b_at;
  bool b_is_kn, half, accumulate;
};
uint64_t shared_offset(const void* p, Where where);  // what a descriptor calls an address, times 16
void wgmma_fence(Where where);
void wgmma(const Wgmma& operation, Where where);
void wgmma_commit(Where where);
void wgmma_wait(int pending, Where where);

void set_registers(int count, bool grow, Where where);

}  // namespace simt
