#include "layers/swiglu_rule.h"

#include "core/elementwise_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

extern const kernels::ElementwiseTable swiglu;
const kernels::ElementwiseTable swiglu = elementwise_table<kernels::Gated<kernels::Silu>>();

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
