#pragma once

#include <cstdint>

namespace shoestring::kernels {

/// CUDA kernels that multiply x[0 .. count) by *factor in place, rounding each product once. If the factor is
/// 1, no element of x is read or written. The factor is in device memory: a double for scale_double, a float
/// for the other kernels. Each function returns an error message or null.
struct ScaleCuda {
  const char* (*scale_float)(void* x, int64_t count, const void* factor, void* stream);
  const char* (*scale_bf16)(void* x, int64_t count, const void* factor, void* stream);
  const char* (*scale_fp16)(void* x, int64_t count, const void* factor, void* stream);
  const char* (*scale_double)(void* x, int64_t count, const void* factor, void* stream);
};

}  // namespace shoestring::kernels
