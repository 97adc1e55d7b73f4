#include "optim/rules/schedule_free_adamw_rule.h"

#include "optim/optimizer_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

extern const kernels::OptimizerTable<kernels::ScheduleFreeAdamWRule> schedule_free_adamw;
const kernels::OptimizerTable<kernels::ScheduleFreeAdamWRule> schedule_free_adamw{
    step<kernels::ScheduleFreeAdamWRule>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
