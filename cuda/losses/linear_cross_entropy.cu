// Instantiates the kernels of cuda/losses/cross_entropy.h for linear_cross_entropy. Memory bandwidth limits
// them. A row of 131072 fp32 logits (512 KiB) does not fit into an SM. The first pass computes maximum and
// sum, and reads the row forwards. The second pass computes the gradient, and reads the row backwards, so
// that its first reads hit the L2 cache. The kernels read 4 + 4 bytes per logit (the second 4 partly from L2)
// and write 2. The GEMM before them writes 4 bytes per logit. In all this is 14 bytes, against 6 * features
// floating-point operations of the GEMMs.

#include "core/cuda_tables.h"
#include "cuda/losses/cross_entropy.h"

namespace shoestring::cuda {
namespace {

const kernels::LinearCrossEntropyCuda kTable{run<float, float, false>, run<float, __nv_bfloat16, false>,
                                             run<float, __half, false>, run<double, double, false>};
const bool kProvided = (provide("linear_cross_entropy", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
