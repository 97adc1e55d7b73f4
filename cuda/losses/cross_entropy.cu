// The row kernels of cross_entropy, which are bound by memory bandwidth. A row is read for its maximum and
// sum. The pass for the gradient reads the row again, from the end backwards. As far as the L2 cache holds
// the rows in flight, this read comes from the cache, so the total is about one read and one write. Rows may
// begin at any address; all but their ends move in vectors of 16 bytes.

#include "core/cuda_tables.h"
#include "cuda/losses/cross_entropy.h"

namespace shoestring::cuda {
namespace {

const kernels::CrossEntropyCuda kTable{run<float, float, true>, run<__nv_bfloat16, __nv_bfloat16, true>,
                                       run<__half, __half, true>, run<double, double, true>};
const bool kProvided = (provide("cross_entropy", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
