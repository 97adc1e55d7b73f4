#include "optim/rules/ema_rule.h"

#include "optim/optimizer_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

extern const kernels::OptimizerTable<kernels::EmaRule> ema;
const kernels::OptimizerTable<kernels::EmaRule> ema{step<kernels::EmaRule>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
