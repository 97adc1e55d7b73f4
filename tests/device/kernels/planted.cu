// The kernel of the host functions with planted mistakes (backend/planted.cpp).

#include "cuda/core/launch.h"
#include "planted.h"

namespace simdev {
namespace {

__global__ void scale(float* x, int64_t n, const float* factor) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= *factor;
}

}  // namespace

const char* launch_scale(float* x, int64_t n, const float* factor, void* stream) {
  constexpr int kThreads = 64;
  return shoestring::cuda::launch(scale, (n + kThreads - 1) / kThreads, kThreads, 0, stream, x, n, factor);
}

}  // namespace simdev
