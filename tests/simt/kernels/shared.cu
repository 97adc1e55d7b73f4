// A kernel with static and dynamic shared memory.

#include "shared.h"

#include "cuda/core/launch.h"

namespace simt_tests {
namespace {

using shoestring::cuda::dynamic_shared;
using shoestring::cuda::launch;

template <class T, int count>
__global__ void take(int dynamic_bytes) {
  __shared__ T values[count];
  __shared__ int4 vector;
  if (threadIdx.x != 0) return;
  values[0] = 1, vector = {static_cast<int>(values[0]), 0, 0, 0};
  dynamic_shared()[dynamic_bytes - 1] = static_cast<unsigned char>(vector.x);
}

}  // namespace

const char* take_shared(int dynamic_bytes) {
  return launch(take<float, 512>, 1, 64, dynamic_bytes, nullptr, dynamic_bytes);
}

}  // namespace simt_tests
