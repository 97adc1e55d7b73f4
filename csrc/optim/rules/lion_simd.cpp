#include "optim/rules/lion_rule.h"

#include "optim/optimizer_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

extern const kernels::OptimizerTable<kernels::LionRule> lion;
const kernels::OptimizerTable<kernels::LionRule> lion{step<kernels::LionRule>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
