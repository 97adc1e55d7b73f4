#pragma once

#include <cstdint>

#include "core/capability.h"
#include "core/host_device.h"
#include "core/philox.h"

namespace shoestring::kernels {

/// A thread, or a call, has whole blocks of so many elements, and 16 random bits for each of them.
constexpr int64_t kDropoutBlock = 256;

/// Element i is dropped where its 16 bits, numbers 16 * (i % 8) on of counter i / 8, are below `threshold`;
/// the others are multiplied by `scale`.
struct Dropout {
  uint32_t threshold;
  float scale;
};

struct SeededDropoutTable {
  // Elements [begin, begin + count) of x to out, which may be x; begin is a multiple of kDropoutBlock.
  void (*drop_float)(const float* x, int64_t begin, int64_t count, uint64_t seed, Dropout rule, float* out);
  void (*drop_bf16)(const uint16_t* x, int64_t begin, int64_t count, uint64_t seed, Dropout rule,
                    uint16_t* out);
  void (*drop_fp16)(const uint16_t* x, int64_t begin, int64_t count, uint64_t seed, Dropout rule,
                    uint16_t* out);
};

// Pointers are on the device, seed's too; stream is a cudaStream_t. They return an error's text or null.
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
