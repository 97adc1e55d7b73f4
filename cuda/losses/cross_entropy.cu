// Instantiates the kernels of cuda/losses/cross_entropy.h for cross_entropy. Memory bandwidth limits them.
// The first pass reads a row of logits for its maximum and sum. The second pass, for the gradient, reads the
// row again, from the end backwards. If the L2 cache holds the rows in flight, the second read comes from the
// cache. The traffic is then about one read and one write. Rows may begin at any address; all but the two
// ends of a row are accessed in vectors of 16 bytes.

#include "core/cuda_tables.h"
#include "cuda/losses/cross_entropy.h"

namespace shoestring::cuda {
namespace {

const kernels::CrossEntropyCuda kTable{run<float, float, true>, run<__nv_bfloat16, __nv_bfloat16, true>,
                                       run<__half, __half, true>, run<double, double, true>};
const bool kProvided = (provide("cross_entropy", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
