#pragma once

#include <cstdint>

namespace shoestring::kernels {

/// Multiplies x[0 .. count) by *factor and rounds each product once. Nothing is read or written if the factor
/// is 1. The factor is in device memory: a double for scale_double, otherwise a float.
struct ScaleCuda {
  const char* (*scale_float)(void* x, int64_t count, const void* factor, void* stream);
  const char* (*scale_bf16)(void* x, int64_t count, const void* factor, void* stream);
  const char* (*scale_fp16)(void* x, int64_t count, const void* factor, void* stream);
  const char* (*scale_double)(void* x, int64_t count, const void* factor, void* stream);
};

}  // namespace shoestring::kernels
