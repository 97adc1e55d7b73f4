#pragma once

// The emulator's interface for features of Hopper GPUs: mbarriers, tensor copies (TMA) and wgmma.

#include <cstddef>
#include <cstdint>

#include "simt.h"

namespace simt {

/// Operations on an mbarrier: a barrier in shared memory that counts arrivals and the bytes of tensor copies
/// (see cuda/core/hopper.h).
void mbarrier_init(void* barrier, int arrivals, Where where);
void mbarrier_init_fence(Where where);
void mbarrier_arrive(void* barrier, Where where);
void mbarrier_arrive_expect(void* barrier, int bytes, Where where);
void mbarrier_wait(void* barrier, int parity, Where where);

/// Makes the writes that this thread has done so far visible to later tensor copies and wgmma products.
void async_fence(Where where);

/// Describes a tensor of three to five dimensions, whose innermost dimension is contiguous. A tensor copy
/// moves a box of its elements. Sizes are in elements, strides in bytes.
struct alignas(64) TensorMap {
  uint64_t magic;
  const unsigned char* address;
  int rank, element;
  int64_t sizes[5], strides[5];
  int box[5];
};
/// Fills a TensorMap. Returns the text of an error, or null. `strides` has rank - 1 numbers, since the
/// innermost dimension has none.
const char* encode_tensor_map(TensorMap* map, const void* address, int rank, int element,
                              const int64_t* sizes, const int64_t* strides, const int* box);
void tensor_copy(void* to, const TensorMap& map, void* barrier, const int* at, int rank, Where where);

/// The operands of a wgmma of shape m64 nN k16 with 16-bit inputs. Operand a is in registers, or in shared
/// memory at descriptor a_at if `a` is null.
struct Wgmma {
  float* d;  // the n / 2 accumulators of this thread
  int n;
  const uint32_t* a;
  uint64_t a_at, b_at;
  bool b_is_kn, half, accumulate;
};
// Returns the offset of an address in dynamic shared memory, in bytes. A wgmma descriptor contains this
// offset divided by 16.
uint64_t shared_offset(const void* p, Where where);
void wgmma_fence(Where where);
void wgmma(const Wgmma& operation, Where where);
void wgmma_commit(Where where);
void wgmma_wait(int pending, Where where);

void set_registers(int count, bool grow, Where where);

}  // namespace simt
