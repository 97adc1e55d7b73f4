#include "kernels/schedule_free_adamw.h"

#include "cpu/optimizer.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

extern const kernels::OptimizerTable<kernels::ScheduleFreeAdamWRule> schedule_free_adamw;
const kernels::OptimizerTable<kernels::ScheduleFreeAdamWRule> schedule_free_adamw{step<kernels::ScheduleFreeAdamWRule>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
