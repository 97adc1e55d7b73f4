// gelu(gate) * up and gelu(x) on the CPU.

#include "layers/geglu_table.h"

#include "layers/gelu_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

using kernels::Gated;
using kernels::Ungated;

extern const kernels::ElementwiseTable geglu_tanh, geglu_erf, gelu_tanh, gelu_erf;
const kernels::ElementwiseTable geglu_tanh = elementwise_table<Gated<GeluTanh>>(),
                                geglu_erf = elementwise_table<Gated<GeluErf>>(),
                                gelu_tanh = elementwise_table<Ungated<GeluTanh>>(),
                                gelu_erf = elementwise_table<Ungated<GeluErf>>();

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
