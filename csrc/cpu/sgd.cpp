#include "kernels/sgd.h"

#include "cpu/optimizer.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

extern const kernels::OptimizerTable<kernels::SGDRule> sgd;
const kernels::OptimizerTable<kernels::SGDRule> sgd{step<kernels::SGDRule>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
