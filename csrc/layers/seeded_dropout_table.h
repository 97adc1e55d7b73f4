#pragma once

#include <cstdint>

#include "core/capability.h"
#include "core/host_device.h"
#include "core/philox.h"

namespace shoestring::kernels {

/// Number of elements whose random bits are drawn together, 16 bits per element. Each call of a CPU kernel
/// starts at a multiple of this number.
constexpr int64_t kDropoutBlock = 256;

/// Dropout's rule for element i: the element is dropped if its 16 random bits are below `threshold`, else
/// multiplied by `scale`. Its bits start at bit 16 * (i % 8) of the 128 random bits with counter i / 8.
struct Dropout {
  uint32_t threshold;
  float scale;
};

struct SeededDropoutTable {
  // Apply dropout to the elements [begin, begin + count) of a tensor. x and `out` point to element `begin`,
  // and `out` may equal x. begin is a multiple of kDropoutBlock.
  void (*drop_float)(const float* x, int64_t begin, int64_t count, uint64_t seed, Dropout rule, float* out);
  void (*drop_bf16)(const uint16_t* x, int64_t begin, int64_t count, uint64_t seed, Dropout rule,
                    uint16_t* out);
  void (*drop_fp16)(const uint16_t* x, int64_t begin, int64_t count, uint64_t seed, Dropout rule,
                    uint16_t* out);
};

// CUDA kernels of seeded dropout. All pointers, including `seed`, are on the device; `stream` is a
// cudaStream_t. Each function returns an error message, or null.
struct SeededDropoutCuda {
  const char* (*drop_float)(const void* x, int64_t count, const int64_t* seed, Dropout rule, void* out,
                            void* stream);
  const char* (*drop_bf16)(const void* x, int64_t count, const int64_t* seed, Dropout rule, void* out,
                           void* stream);
  const char* (*drop_fp16)(const void* x, int64_t count, const int64_t* seed, Dropout rule, void* out,
                           void* stream);
};

}  // namespace shoestring::kernels

SHOESTRING_CPU_TABLE(kernels::SeededDropoutTable, seeded_dropout)
