#pragma once

// Code that the kernels for rows of logits share: common names for the math functions of fp32 and fp64, and
// the number of threads per row.

#include <cmath>
#include <cstdint>

#include "cuda/core/convert.h"
#include "cuda/core/warp.h"

namespace shoestring::cuda {

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }
// Returns the larger number. If one number is NaN, it returns the other one.
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
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

// Returns the number of threads of the block that computes a row. A long row gets `most` threads, so that
// each SM has one block, and the rows in flight fit roughly into the L2 cache. A short row would be finished
// before a large block has started. Its blocks are small, and several share an SM.
inline int threads_for(int64_t vocab, int most) {
  return vocab > 32768 ? most : vocab > 8192 ? most / 2 : vocab > 512 ? 128 : kWarp;
}

}  // namespace shoestring::cuda
