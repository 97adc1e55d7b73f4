// Bandwidth-bound, and a row of 131072 fp32 logits (512 KiB) is too long for an SM. The first pass runs
// through the row forwards, for maximum and sum; the second runs backwards, so that what it reads first is
// still in the L2 cache. Bytes per logit: 4 + 4 read (the latter partly from L2) + 2 written; with the GEMM's
// 4, 14 in all against 6 * features flops.

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
