#include "optim/rules/adamw_rule.h"

#include "optim/optimizer_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

extern const kernels::OptimizerTable<kernels::AdamWRule> adamw;
const kernels::OptimizerTable<kernels::AdamWRule> adamw{step<kernels::AdamWRule>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
