#pragma once

#include <cstdint>

namespace shoestring::kernels {

/// x[0 .. count) *= *factor, each product rounded once; nothing is read or written where the factor is 1. The
/// factor lies on the device: a double for scale_double, else a float.
struct ScaleCuda {
  const char* (*scale_float)(void* x, int64_t count, const void* factor, void* stream);
  const char* (*scale_bf16)(void* x, int64_t count, const void* factor, void* stream);
  const char* (*scale_fp16)(void* x, int64_t count, const void* factor, void* stream);
  const char* (*scale_double)(void* x, int64_t count, const void* factor, void* stream);
};

}  // namespace shoestring::kernels
