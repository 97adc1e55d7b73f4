// Bandwidth-bound: a row is read for its maximum and sum, and, from the end backwards, once more for the
// gradient, which then comes from the L2 cache as far as it holds the rows in flight; so about one read and
// one write. Rows begin where they happen to: all of a row but its ends moves in vectors of 16 bytes, as they
// lie in memory.

#include "core/cuda_tables.h"
#include "cuda/losses/cross_entropy.h"

namespace shoestring::cuda {
namespace {

const kernels::CrossEntropyCuda kTable{run<float, float, true>, run<__nv_bfloat16, __nv_bfloat16, true>,
                                       run<__half, __half, true>, run<double, double, true>};
const bool kProvided = (provide("cross_entropy", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
