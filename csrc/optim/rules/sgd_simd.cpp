#include "optim/rules/sgd_rule.h"

#include "optim/optimizer_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

extern const kernels::OptimizerTable<kernels::SGDRule> sgd;
const kernels::OptimizerTable<kernels::SGDRule> sgd{step<kernels::SGDRule>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
