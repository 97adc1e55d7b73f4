#include "optim/rules/ademamix_rule.h"

#include "optim/optimizer_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

extern const kernels::OptimizerTable<kernels::AdEMAMixRule> ademamix;
const kernels::OptimizerTable<kernels::AdEMAMixRule> ademamix{step<kernels::AdEMAMixRule>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
