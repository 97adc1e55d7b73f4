// gelu(gate) * up and gelu(x) on CUDA.

#include "cuda/core/elementwise.h"
#include "cuda/layers/gelu.h"
#include "layers/gated_rule.h"

namespace shoestring::cuda {
namespace {

using kernels::Gated;
using kernels::Ungated;

const kernels::ElementwiseCuda kTables[] = {
    elementwise_table<Gated<GeluTanh>>(), elementwise_table<Gated<GeluErf>>(),
    elementwise_table<Ungated<GeluTanh>>(), elementwise_table<Ungated<GeluErf>>()};
const bool kProvided = (provide("geglu_tanh", &kTables[0]), provide("geglu_erf", &kTables[1]),
                        provide("gelu_tanh", &kTables[2]), provide("gelu_erf", &kTables[3]), true);

}  // namespace
}  // namespace shoestring::cuda
