#pragma once

#include <cuda_runtime.h>

namespace shoestring::cuda {
namespace {

// The functions of a rule, as in core/elementwise_simd.h.
struct ElementwiseMath {
  static __device__ float abs(float x) { return fabsf(x); }
  static __device__ float clamp(float x, float low, float high) {
    return x < low ? low : x > high ? high : x;
  }
  static __device__ float exp(float x) { return expf(x); }
  static __device__ float exp_of_negative(float x) { return expf(x); }
  static __device__ float reciprocal(float x) { return 1 / x; }
};

}  // namespace
}  // namespace shoestring::cuda
