#include "optim/rules/apply_rule.h"

#include "optim/optimizer_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

extern const kernels::OptimizerTable<kernels::ApplyRule> apply;
const kernels::OptimizerTable<kernels::ApplyRule> apply{step<kernels::ApplyRule>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
