// Instantiates the kernels of cuda/optim/optimizer.h for Schedule-Free AdamW.

#include "optim/rules/schedule_free_adamw_rule.h"

#include "cuda/optim/optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::ScheduleFreeAdamWRule>();

}  // namespace
}  // namespace shoestring::cuda
