#include "layers/swiglu_rule.h"

#include "cuda/core/elementwise.h"

namespace shoestring::cuda {
namespace {

const kernels::ElementwiseCuda kTable = elementwise_table<kernels::Gated<kernels::Silu>>();
const bool kProvided = (provide("swiglu", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
