// A test kernel that computes the random numbers of csrc/core/philox.h.

#include "core/philox.h"
#include "cuda/core/launch.h"
#include "primitives.h"

namespace simt_tests {
namespace {

__global__ void generate(uint64_t seed, uint64_t step, uint64_t first, unsigned* out) {
  const shoestring::kernels::Random4 r = shoestring::kernels::philox_at(seed, step, first + threadIdx.x);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = r.value[i];
}

}  // namespace

const char* random_bits(uint64_t seed, uint64_t step, uint64_t first, int count, unsigned* out) {
  return shoestring::cuda::launch(generate, 1, count, 0, nullptr, seed, step, first, out);
}

}  // namespace simt_tests
