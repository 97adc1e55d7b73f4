#pragma once

#include <cstdint>

#include "core/capability.h"
#include "core/host_device.h"
#include "core/philox.h"

namespace shoestring::kernels {

/// Number of elements whose random bits are drawn together, 16 bits for each element. A call of a CPU kernel
/// begins at a whole block of elements.
constexpr int64_t kDropoutBlock = 256;

/// Element i is dropped if its 16 random bits are below `threshold`, and multiplied by `scale` otherwise. Its
/// bits start at bit 16 * (i % 8) of the random number with counter i / 8.
struct Dropout {
  uint32_t threshold;
  float scale;
};

struct SeededDropoutTable {
  // Writes elements [begin, begin + count) of x to `out`, which may be x. begin is a multiple of
  // kDropoutBlock.
  void (*drop_float)(const float* x, int64_t begin, int64_t count, uint64_t seed, Dropout rule, float* out);
  void (*drop_bf16)(const uint16_t* x, int64_t begin, int64_t count, uint64_t seed, Dropout rule,
                    uint16_t* out);
  void (*drop_fp16)(const uint16_t* x, int64_t begin, int64_t count, uint64_t seed, Dropout rule,
                    uint16_t* out);
};

// CUDA kernels. All pointers, also seed, are on the device; stream is a cudaStream_t. Functions return the
// text of an error, or null.
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
