// The row kernels of linear_cross_entropy, which are bound by memory bandwidth. A row of 131072 fp32 logits
// (512 KiB) does not fit into an SM. The first pass computes maximum and sum, and runs forwards. The second
// pass runs backwards, so that its first reads hit the L2 cache. Bytes per logit: 4 + 4 read (the second
// partly from L2) and 2 written. With 4 bytes written by the GEMM this makes 14, against 6 * features flops.

#include "core/cuda_tables.h"
#include "cuda/losses/cross_entropy.h"
#include "losses/linear_cross_entropy_table.h"

namespace shoestring::cuda {
namespace {

const kernels::LinearCrossEntropyCuda kTable{run<float, float, false>, run<float, __nv_bfloat16, false>,
                                             run<float, __half, false>, run<double, double, false>};
const bool kProvided = (provide("linear_cross_entropy", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
