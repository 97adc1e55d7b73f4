#pragma once

// What the row kernels over logits share: one name for the functions of fp32 and fp64, and the size of a
// row's block.

#include <cmath>
#include <cstdint>

#include "cuda/core/convert.h"
#include "cuda/core/warp.h"

namespace shoestring::cuda {

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }  // of a NaN and another, the other
__device__ inline double larger(double a, double b) { return fmax(a, b); }

template <class Out>
__device__ Out narrow(float x) {
  return rounded<Out>(x);
}
template <class Out>
__device__ Out narrow(double x) {
  return x;
}

template <class T>
__device__ constexpr T low() {
  return -static_cast<T>(INFINITY);
}

// One block an SM, so that the rows in flight are not much more than the L2 cache holds; but a short row is
// over before a large block, of `most` threads, has started, and several share an SM.
inline int threads_for(int64_t vocab, int most) {
  return vocab > 32768 ? most : vocab > 8192 ? most / 2 : vocab > 512 ? 128 : kWarp;
}

}  // namespace shoestring::cuda
